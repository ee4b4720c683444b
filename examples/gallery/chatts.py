"""ChatTS, a plugin outside vLLM: series in patches, each behind its offset and its scale as text.

The model gets a series around zero, of magnitude 3 at most, with a mask of ones beside its values.
"""

from collections.abc import Sequence

import torch

from mmkit import (
    Modality,
    ModelSpec,
    Scope,
    Tensor,
    batched,
    between,
    ceil_div,
    cfg,
    embed,
    fields,
    literal,
    replace,
    tok,
)

MOST = 3.0


def normalised(items: Sequence[torch.Tensor], scope: Scope) -> dict[str, list[torch.Tensor]]:
    """Series (length,) as (2 * length, 1), value and mask in turns; and what undoes it, (2,)."""
    offsets = [-series.mean() for series in items]
    centred = [series + offset for series, offset in zip(items, offsets, strict=True)]
    largest = [series.abs().max() for series in centred]
    scales = [most / MOST if most >= MOST else torch.ones_like(most) for most in largest]
    values = [series / scale for series, scale in zip(centred, scales, strict=True)]
    return {
        "timeseries": [torch.stack([v, torch.ones_like(v)], dim=1).float().reshape(-1, 1) for v in values],
        "statistics": [torch.stack(pair) for pair in zip(offsets, scales, strict=True)],
    }


offset, scale = fields.statistics[0], fields.statistics[1]
patch = embed(cfg.ts_token_start_index)

CHATTS = ModelSpec(
    "chatts",
    Modality(
        "timeseries",
        item=Tensor((between(1, cfg.ts["max_sequence_length"]),), "float64", bound=1e30),
        layout=tok.text("[Offset: {:.4f}|Scaled by: {:.4f}]", offset, scale)
        + patch * ceil_div(fields.timeseries.shape[0] // 2, cfg.ts["patch_size"]),
        update=replace(literal(cfg.ts_token_start_index, cfg.ts_token_start_index + 1)),
        fields={
            "timeseries": batched(dtype="float32"),
            "statistics": batched(hidden=True, shape=(2,), dtype="float64"),
        },
        process=normalised,
        limit=50,
    ),
)

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

MAX_MAGNITUDE = 3.0


def normalise(items: Sequence[torch.Tensor], scope: Scope) -> dict[str, list[torch.Tensor]]:
    """Return series (length,) as (2 * length, 1), value and mask in turns; and their offsets and scales, (2,)."""
    columns: dict[str, list[torch.Tensor]] = {"timeseries": [], "statistics": []}
    for series in items:
        offset = -series.mean()
        centred = series + offset
        scale = torch.clamp(centred.abs().max() / MAX_MAGNITUDE, min=1.0)
        values = centred / scale
        pairs = torch.stack([values, torch.ones_like(values)], dim=1)
        columns["timeseries"].append(pairs.float().reshape(-1, 1))
        columns["statistics"].append(torch.stack([offset, scale]))
    return columns


OFFSET = fields.statistics[0]
SCALE = fields.statistics[1]
PATCH = embed(cfg.ts_token_start_index)

CHATTS = ModelSpec(
    "chatts",
    Modality(
        "timeseries",
        item=Tensor((between(1, cfg.ts["max_sequence_length"]),), "float64", bound=1e30),
        layout=tok.text("[Offset: {:.4f}|Scaled by: {:.4f}]", OFFSET, SCALE)
        + PATCH * ceil_div(fields.timeseries.shape[0] // 2, cfg.ts["patch_size"]),
        update=replace(literal(cfg.ts_token_start_index, cfg.ts_token_start_index + 1)),
        fields={
            "timeseries": batched(dtype="float32"),
            "statistics": batched(hidden=True, shape=(2,), dtype="float64"),
        },
        process=normalise,
        limit=50,
    ),
)

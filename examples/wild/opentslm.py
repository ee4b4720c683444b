"""OpenTSLM reads time series, each behind a text about it, between a text before and a text after.

Source: https://github.com/StanfordBDHG/OpenTSLM at 559c59f (the soft-prompt variant), paper arXiv 2510.02410, MIT.

Each text is tokenized by itself, with a token that begins it. All series of a request are padded to the longest, and
the padding is encoded too: how many rows a series has depends on the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.functional import pad

from mmkit import (
    Modality,
    ModelSpec,
    Record,
    Scope,
    Tensor,
    Text,
    batched,
    between,
    cfg,
    embed,
    fields,
    item,
    literal,
    replace,
    tok,
)


def pad_to_longest(items: Sequence[Mapping[str, Any]], scope: Scope) -> dict[str, list[Any]]:
    """Pad the series (steps,) of a request by zeros to whole patches of the longest."""
    patch_size = scope.cfg.patch_size
    longest = max(len(each_item["series"]) for each_item in items)
    steps = -(-longest // patch_size) * patch_size
    series = []
    for each_item in items:
        values = each_item["series"]
        series.append(pad(values, (0, steps - len(values))))
    return {"time_series": series}


OPENTSLM = ModelSpec(
    "opentslm",
    Modality(
        "series",
        item=Record(text=Text(cfg.max_text), series=Tensor((between(1, cfg.max_steps),))),
        process=pad_to_longest,
        fields={"time_series": batched(dtype="float32")},
        layout=literal(tok["<|begin_of_text|>"], tok.text("{}", item.text.text))
        + embed(tok["<patch>"]) * (fields.time_series.shape[0] // cfg.patch_size),
        update=replace(tok["<series>"]),
        # the series of a request belong together
        cacheable=item.count == 1,
    ),
)

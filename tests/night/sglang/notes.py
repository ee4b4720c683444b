"""A spec with an unusual item: several series and a text about each, in one record, as OpenTSLM has them.

A request has one record. Its layout has several runs of encoder rows, and the texts between them.
"""

from typing import Any

import torch

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
    fields,
    replace,
    select,
    tok,
)

SEPARATOR = "|"
"""Between the texts of a record."""


def lay_out(items: list[dict[str, Any]], scope: Scope) -> dict[str, list[Any]]:
    """Write the ids of each record: before the patches of a series stands its text."""
    series = []
    ids = []
    for item in items:
        values = item["values"]
        texts = item["texts"].split(SEPARATOR)
        num_patches = -(-values.shape[1] // scope.cfg.steps_per_token)
        ids_of_item = []
        for number in range(len(values)):
            text = texts[number] if number < len(texts) else ""
            ids_of_item += [*scope.tok.text("{}", text), *[scope.tok["<patch>"]] * num_patches]
        series.append(values)
        ids.append(torch.tensor(ids_of_item))
    return {"values": series, "ids": ids}


NOTES = ModelSpec(
    "notes",
    Modality(
        "notes",
        item=Record(values=Tensor((between(1, 4), between(1, cfg.max_steps))), texts=Text(most=60)),
        layout=select(fields.ids, embed=tok["<patch>"]),
        update=replace(tok["<series>"]),
        fields={"values": batched(), "ids": batched(hidden=True)},
        process=lay_out,
        limit=2,
    ),
)


def encode_record(encoder: Any, record: torch.Tensor) -> torch.Tensor:
    """Encode the series of a record (series, steps), one after the other."""
    return torch.cat([encoder(series[:, None]) for series in record])

"""The rows that a model class's `embed_<modality>` returns, compared with the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import MmkitError

_REMEDY = "Return one (rows, hidden_size) tensor per item."


def encoder_rows(
    returned: Any, where: str, counts: Sequence[int | None] | None, width: int
) -> list[torch.Tensor]:
    """The encoder rows of each item, a floating (rows, width) tensor.

    Args:
        returned: a list of tensors, or one tensor with a dimension for the items.
        where: names the method in errors, for example ``waves.series, embed_series``.
        counts: the expected rows of each item, None for an item where they are not known; None
            where the number of items is not known either.
        width: the hidden size of the language model.

    Raises:
        MmkitError: another number of items or rows, or tensors of another form.
    """
    if isinstance(returned, torch.Tensor) and returned.ndim != 3:
        expected = "a list of tensors, or one with a dimension for the items"
        remedy = f"{_REMEDY} `rows.split([...])` cuts one that holds them all."
        raise MmkitError(where, expected, f"shape {tuple(returned.shape)}", remedy)
    encoded = list(returned)
    if counts is None:
        counts = [None] * len(encoded)
    if len(encoded) != len(counts):
        raise MmkitError(where, f"rows for {len(counts)} items", str(len(encoded)), _REMEDY)
    for i, (item, count) in enumerate(zip(encoded, counts, strict=True)):
        at = f"{where}, item {i}"
        if not _is_rows(item, width):
            raise MmkitError(at, f"a floating (rows, {width}) tensor", _told(item), _REMEDY)
        if count is not None and len(item) != count:
            remedy = "Return one row per embed() position."
            raise MmkitError(at, f"{count} encoder rows", str(len(item)), remedy)
    return encoded


def _is_rows(item: Any, width: int) -> bool:
    return (
        isinstance(item, torch.Tensor) and item.is_floating_point() and item.shape[1:] == (width,)
    )


def _told(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return f"shape {tuple(item.shape)} of {item.dtype}"
    return f"a {type(item).__name__}"

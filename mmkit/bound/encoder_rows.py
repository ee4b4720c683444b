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
    known = [None] * len(encoded) if counts is None else counts
    if len(encoded) != len(known):
        raise MmkitError(where, f"rows for {len(known)} items", str(len(encoded)), _REMEDY)
    for i, (item, count) in enumerate(zip(encoded, known, strict=True)):
        at, is_tensor = f"{where}, item {i}", isinstance(item, torch.Tensor)
        if not is_tensor or not item.is_floating_point() or item.shape[1:] != (width,):
            got = f"a {type(item).__name__}"
            if is_tensor:
                got = f"shape {tuple(item.shape)} of {item.dtype}"
            raise MmkitError(at, f"a floating (rows, {width}) tensor", got, _REMEDY)
        if count is not None and len(item) != count:
            remedy = "Return one row per embed() position."
            raise MmkitError(at, f"{count} encoder rows", str(len(item)), remedy)
    return encoded

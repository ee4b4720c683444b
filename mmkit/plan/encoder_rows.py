"""The rows of encoders: what `embed_<modality>` of a model returns, by item."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import MmkitError
from ..language.items.base import describe_array


def row_count_field(modality: str) -> str:
    """Return the name of the field of the numbers of encoder rows.

    `mmkit.MultiModalModel` compares them; see `BoundModality.needs_row_count`.
    """
    return f"mmkit_{modality}_rows"


_REMEDY = "Return one (rows, hidden_size) tensor per item."


def split_encoder_rows(
    returned: Any, where: str, counts: Sequence[int | None] | None, width: int
) -> list[torch.Tensor]:
    """Return the encoder rows of each item, a floating (rows, width) tensor.

    Args:
        returned: a list of tensors, or one tensor with a dimension for the items.
        where: names the method in errors, for example ``waves.series, embed_series``.
        counts: the expected rows of each item, None for an item where they are not known; None
            where the number of items is not known either.
        width: the hidden size of the language model.

    Raises:
        MmkitError: another number of items or rows, or tensors of another form.
    """
    encoded = _rows_of_items(returned, where, counts)
    if counts is None:
        counts = [None] * len(encoded)
    for i, (rows, count) in enumerate(zip(encoded, counts, strict=True)):
        _check_rows(rows, f"{where}, item {i}", count, width)
    return encoded


def split_rows_or_zero(
    returned: Any, where: str, counts: Sequence[int], zeros: torch.Tensor
) -> tuple[list[torch.Tensor], list[MmkitError]]:
    """Return the encoder rows of each item, zeros where `split_encoder_rows` would refuse them.

    Args:
        returned: as for `split_encoder_rows`.
        where: as for `split_encoder_rows`.
        counts: the expected rows of each item.
        zeros: one row of zeros, floating (width,).

    Returns:
        The rows, and an error for each item whose rows are zeros.
    """

    def rows_of_zeros(count: int) -> torch.Tensor:
        return zeros.repeat(count, 1)

    try:
        encoded = _rows_of_items(returned, where, counts)
    except MmkitError as error:
        return [rows_of_zeros(count) for count in counts], [error] * len(counts)
    errors = []
    for i, count in enumerate(counts):
        try:
            _check_rows(encoded[i], f"{where}, item {i}", count, len(zeros))
        except MmkitError as error:
            errors.append(error)
            encoded[i] = rows_of_zeros(count)
    return encoded, errors


def _rows_of_items(returned: Any, where: str, counts: Sequence[int | None] | None) -> list[Any]:
    """Return what an encoder returned, by item.

    Raises:
        MmkitError: rows of another number of items, or of none.
    """
    if isinstance(returned, torch.Tensor) and returned.ndim != 3:
        expected = "a list of tensors, or one with a dimension for the items"
        remedy = f"{_REMEDY} `rows.split([...])` cuts one that holds them all."
        raise MmkitError(where, expected, f"shape {tuple(returned.shape)}", remedy)
    if not isinstance(returned, Iterable):
        raise MmkitError(where, "a list of tensors", describe_array(returned), _REMEDY)
    encoded = list(returned)
    if counts is None:
        counts = [None] * len(encoded)
    if len(encoded) != len(counts):
        raise MmkitError(where, f"rows for {len(counts)} items", str(len(encoded)), _REMEDY)
    return encoded


def _check_rows(rows: Any, where: str, count: int | None, width: int) -> None:
    """Refuse the encoder rows of one item that are no floating (count, width) tensor."""
    is_tensor = isinstance(rows, torch.Tensor)
    if not is_tensor or not rows.is_floating_point() or rows.shape[1:] != (width,):
        raise MmkitError(where, f"a floating (rows, {width}) tensor", describe_array(rows), _REMEDY)
    if count is not None and len(rows) != count:
        remedy = "Return one row per embed() position."
        raise MmkitError(where, f"{count} encoder rows", str(len(rows)), remedy)

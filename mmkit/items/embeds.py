"""Precomputed embeddings, in place of the items of a modality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import InputError
from .base import ItemType
from .values import check_finite


class Embedding(dict[str, Any]):
    """The fields of an item with precomputed embeddings: the rows under the first key, then the
    fields that its layout reads."""

    @property
    def rows(self) -> torch.Tensor:
        """Floating (rows, hidden size)."""
        rows: torch.Tensor = next(iter(self.values()))
        return rows


def embeddings(
    data: object, kind: ItemType, field: str, hidden_size: int | None, where: str
) -> list[torch.Tensor] | None:
    """The rows of precomputed embeddings, per item a floating (rows, hidden size) tensor; None
    where the data holds raw items.

    Callers send embeddings as ``{field: ...}``; for images, videos and audio also in the forms of
    vLLM's own classes: one floating 3-D tensor, or a list of 2-D tensors. A tensor that may be a
    picture as well is refused.

    Args:
        data: a caller's data for one modality that takes embeddings.
        kind: its item type.
        field: the field that carries embeddings.
        hidden_size: width of the language model's rows; None if it is not known.
        where: names the modality in errors.

    Raises:
        InputError: rows that do not fit the model, or that are not finite; a tensor that may be
            either.
    """
    if isinstance(data, Mapping) and set(data) == {field}:
        return embedding_rows(data[field], hidden_size, where)
    form = f'Send embeddings as {{"{field}": ...}}, and pixels as uint8'
    remedy = f"{form}, or as an array or tensor in a list."
    if kind.media and _is_floating(data, 3):
        return embedding_rows(data, hidden_size, where, remedy)
    if not kind.media or not isinstance(data, (list, tuple)):
        return None
    if data and isinstance(data[0], torch.Tensor) and data[0].ndim == 2:
        return embedding_rows(data, hidden_size, where)
    for i, part in enumerate(data):
        if _is_floating(part, 3) and 3 not in (part.shape[0], part.shape[-1]):
            got = f"shape {tuple(part.shape)}, which may be embeddings"
            raise InputError(f"{where}[{i}]", "pixels of three channels", got, remedy)
    return None


def _is_floating(value: object, rank: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == rank and value.is_floating_point()


def embedding_rows(
    data: Any, hidden_size: int | None, where: str, remedy: str = ""
) -> list[torch.Tensor]:
    """One floating (rows, hidden size) tensor, or several, as a list.

    Raises:
        InputError: they are something else, or do not fit the model, or are not finite.
    """
    rows = [data] if isinstance(data, torch.Tensor) and data.ndim != 3 else data
    several = isinstance(rows, (list, tuple, torch.Tensor))
    if not several or not len(rows):
        got = "none" if several else type(data).__name__
        raise InputError(where, "at least one (rows, hidden_size) tensor", got)
    for i, item in enumerate(rows):
        at = f"{where}[{i}]"
        expected = f"a finite floating (rows, {hidden_size or 'hidden_size'}) tensor"
        is_one = _is_floating(item, 2)
        if not is_one or hidden_size not in (None, item.shape[1]):
            shape = f"shape {tuple(item.shape)}" if isinstance(item, torch.Tensor) else ""
            got = f"{shape} of {item.dtype}" if shape else type(item).__name__
            raise InputError(at, expected, got, remedy if is_one else "")
        check_finite(item, at)
    # copies: what is cached must not change when the caller reuses its memory
    return [item.detach().cpu().clone() for item in rows]

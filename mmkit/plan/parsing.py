"""The parsing of one modality: a caller's data as canonical items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InputError
from ..language.expr import Fields
from ..language.field import Batched, Field
from ..language.items import ItemType
from ..language.items.base import form
from ..language.items.memory import apart_from
from ..language.items.tensor import Tensor
from .soundness import check_rows

if TYPE_CHECKING:
    from .modality import BoundModality


class Taken(NamedTuple):
    """The items of one modality of a request.

    Attributes:
        values: canonical items, or precomputed embeddings.
        embeds: whether `values` are precomputed embeddings.
        total: number of items of the modality in the request, cached items included.
        are_largest: whether each of them is the largest item of the spec.
        first: the position of the first of them among those that are processed.
    """

    values: Sequence[Any]
    embeds: bool
    total: int
    are_largest: bool = False
    first: int = 0

    @classmethod
    def whole(cls, values: Sequence[Any], *, embeds: bool = False) -> Taken:
        """All items of a request."""
        return cls(values, embeds, len(values))

    def each(self) -> list[Taken]:
        """These items one by one."""
        return [self._replace(values=[value], first=i) for i, value in enumerate(self.values)]


class Embedding(Fields):
    """The fields of an item with precomputed embeddings: the rows under the first key, then the
    fields that its layout reads."""

    @property
    def rows(self) -> torch.Tensor:
        """Floating (rows, hidden size)."""
        rows: torch.Tensor = next(iter(self.values()))
        return rows


class ItemParser:
    """Turns the data of a request into canonical items, or into the rows of precomputed embeddings.

    Attributes:
        takes_embeds: whether callers may send precomputed embeddings.
        embeds_field: the name of the field of embeddings.
        embeds_as: that field.
        companions: the fields that the layout of embeddings reads and callers send beside them,
            each with the item type of its parts.
    """

    def __init__(self, modality: BoundModality, companions: dict[str, Tensor]) -> None:
        self._modality, self.where, self.item = modality, modality.where, modality.item
        embeds = modality.spec.embeds
        self.takes_embeds, self.embeds_field = bool(embeds), f"{modality.name}_embeds"
        self.embeds_as = embeds if isinstance(embeds, Field) else Batched()
        self.companions = companions

    def parse_raw_items(self, data: object) -> list[Any]:
        """A caller's data as canonical items. None stands for an item whose content a
        `multi_modal_uuids` entry names.

        Raises:
            InputError: None in place of the data, a malformed item, or one with a text that spells
                a placeholder. An empty list is no item, as in vLLM.
        """
        if data is None:
            expected = f"{self.item.expected} or a list of them"
            remedy = "Send the item, or leave the modality out."
            raise InputError(self.where, expected, "None", remedy)
        items = _canonical(self.item, data, self.where)
        for i, item in enumerate(items):
            if item is not None:
                self._check_texts(item, f"{self.where}[{i}]")
        return items

    def _check_texts(self, item: Any, where: str) -> None:
        """Refuse texts that spell placeholders: a `process` that calls the tokenizer would make
        placeholders of them, for which there are no encoder rows.

        Raises:
            InputError: names the text and the placeholder.
        """
        for place, text in self.item.texts(item):
            for placeholder in self._modality.learned.placeholder_texts:
                if placeholder in text:
                    expected = f"a text without {placeholder!r}, which stands for an item"
                    raise InputError(f"{where}{place}", expected, brief(text))

    def parse(self, data: object, hidden_size: int | None) -> Taken:
        """A caller's data as canonical items or precomputed embeddings, each an `Embedding`.

        Callers send embeddings as ``{"<name>_embeds": ...}``, with the fields that their layout
        reads; where it reads none, images, videos and audio also in the forms of vLLM's own
        classes.

        Args:
            data: a caller's data.
            hidden_size: width of the language model's rows; None if it is not known.

        Raises:
            InputError: see `parse_raw_items`; rows that do not fit the model, or that are not
                finite; a field beside embeddings is missing or malformed, or there are not as
                many parts as items.
        """
        own: list[Embedding] | None = None
        if isinstance(data, Mapping) and self.embeds_field in data:
            if not self.takes_embeds:
                expected, remedy = self.item.expected, "Send the raw item."
                raise InputError(self.where, expected, self.embeds_field, remedy)
            own = self._named_embeddings(data, hidden_size)
        elif self.takes_embeds and not self.companions and self.item.media:
            own = self._bare_embeddings(data, hidden_size)
        return (
            Taken.whole(self.parse_raw_items(data))
            if own is None
            else Taken.whole(own, embeds=True)
        )

    def _named_embeddings(
        self, data: Mapping[str, Any], hidden_size: int | None
    ) -> list[Embedding]:
        """Precomputed embeddings with the fields that their layout reads: ``{"image_embeds": ...,
        "image_grid_thw": ...}``. The rows are a list with one tensor per item, or, as vLLM's
        own classes take them with such fields, one (rows of all items, hidden size) tensor."""
        names = [self.embeds_field, *self.companions]
        if set(data) != set(names):
            raise InputError(self.where, f"the fields {names}", repr(sorted(map(str, data))))
        rows = self._rows(data[self.embeds_field], hidden_size)
        parts = {
            key: _canonical(kind, data[key], f"{self.where}.{key}")
            for key, kind in self.companions.items()
        }
        count = len(next(iter(parts.values()), rows))
        for key, own in parts.items():
            if len(own) != count:
                raise InputError(f"{self.where}.{key}", f"{count} items", str(len(own)))
        beside = [{key: own[i] for key, own in parts.items()} for i in range(count)]
        if count > len(rows) == 1:
            sizes = [*map(self._modality.embedding_layout_evaluator.rows, beside)]
            if sum(sizes) != len(rows[0]):
                expected = f"{sum(sizes)} embedding row(s) for {count} items"
                raise InputError(self.where, expected, str(len(rows[0])))
            rows = list(rows[0].split(sizes))
        if len(rows) != count:
            raise InputError(self.where, f"embeddings of {count} items", str(len(rows)))
        pairs = zip(rows, beside, strict=True)
        return [Embedding({self.embeds_field: one, **fields}) for one, fields in pairs]

    def _bare_embeddings(self, data: object, hidden_size: int | None) -> list[Embedding] | None:
        """Precomputed embeddings in the forms of vLLM's own classes: one floating 3-D tensor, or a
        list of 2-D tensors; None where the data holds raw items. A tensor that may be a picture as
        well is refused."""
        sending = f'Send embeddings as {{"{self.embeds_field}": ...}}, and pixels as uint8'
        remedy = f"{sending}, or as an array or tensor in a list."
        parts = data if isinstance(data, (list, tuple)) else ()
        is_batch = _is_floating(data, 3)
        if is_batch or (parts and isinstance(parts[0], torch.Tensor) and parts[0].ndim == 2):
            rows = self._rows(data, hidden_size, remedy if is_batch else "")
            return [Embedding({self.embeds_field: one}) for one in rows]
        for i, part in enumerate(parts):
            if _is_floating(part, 3) and 3 not in (part.shape[0], part.shape[-1]):
                got = f"shape {tuple(part.shape)}, which may be embeddings"
                raise InputError(f"{self.where}[{i}]", "pixels of three channels", got, remedy)
        return None

    def _rows(self, data: Any, hidden_size: int | None, remedy: str = "") -> list[torch.Tensor]:
        """One floating (rows, hidden size) tensor, or several, as a list.

        Raises:
            InputError: they are something else, or do not fit the model, or are not finite.
        """
        rows = [data] if isinstance(data, torch.Tensor) and data.ndim != 3 else data
        several = isinstance(rows, (list, tuple, torch.Tensor))
        if not several or not len(rows):
            got = "none" if several else form(data)
            raise InputError(self.where, "at least one (rows, hidden_size) tensor", got)
        dtype = self._modality.dtype
        checked: list[torch.Tensor] = []
        for i, item in enumerate(rows):
            where = f"{self.where}[{i}]"
            rows_of_item = check_rows(item, where, width=hidden_size, dtype=dtype, remedy=remedy)
            # in the dtype of the model, in which the language model gets them: vLLM batches the
            # rows of all requests in the dtype of the first
            if dtype is not None:
                rows_of_item = rows_of_item.to(dtype)
            checked.append(apart_from(item, rows_of_item))
        return checked

    def split_rows(self, fields: Mapping[str, Any]) -> list[Any]:
        """The rows of each precomputed embedding that the model receives, (rows, hidden size).

        Args:
            fields: the model's arguments, as vLLM batches them.
        """
        rows = fields.get(self.embeds_field)
        if rows is None or isinstance(self.embeds_as, Batched):
            return [] if rows is None else list(rows)
        parts = zip(*(fields[key] for key in self.companions), strict=True)
        beside = (dict(zip(self.companions, own, strict=True)) for own in parts)
        return list(rows.split([*map(self._modality.embedding_layout_evaluator.rows, beside)]))

    def check_present(self, values: Sequence[Any], got: str) -> None:
        """Refuse None in place of an item.

        Raises:
            InputError: names the first.
        """
        for i, value in enumerate(values):
            if value is None:
                where = f"{self.where}[{i}]"
                raise InputError(where, self.item.expected, got, "Send the item itself.")

    def check_count(self, count: int, limit: int | None) -> None:
        """Refuse more than `limit` items.

        Raises:
            InputError: names the limit.
        """
        if limit is not None and count > limit:
            # vLLM's words
            remedy = f"At most {limit} {self._modality.name}(s) may be provided in one prompt."
            raise InputError(self.where, "fewer items", str(count), remedy)


def _canonical(kind: ItemType, data: object, where: str) -> list[Any]:
    return kind.canonical_all(kind.split(data, where), where)


def _is_floating(value: object, rank: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == rank and value.is_floating_point()

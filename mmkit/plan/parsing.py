"""The parsing of one modality: a caller's data as canonical items or precomputed embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shorten
from typing import Any, NamedTuple

import torch

from ..errors import InputError
from ..language.field import Batched, Batching, Field
from ..language.items import ItemType
from ..language.items.base import describe_array
from ..language.items.memory import copy_if_shared
from ..language.items.tensor import Tensor
from ..language.scope import Fields
from .soundness import check_rows


class ItemBatch(NamedTuple):
    """Items of one modality of a request, which are processed together.

    This is what another process receives to process them.

    Attributes:
        values: canonical items, or precomputed embeddings.
        are_embeddings: whether `values` are precomputed embeddings.
        total: number of items of the modality in the request, cached items included.
        are_largest: whether each of them is the largest item of the spec.
        indices: the position of each of them among the items of its modality in the request; by
            default they are all items.
    """

    values: Sequence[Any]
    are_embeddings: bool
    total: int
    are_largest: bool = False
    indices: Sequence[int] = ()

    def index_of(self, position: int) -> int:
        """Return the index in the request of the item at a position among these."""
        return self.indices[position] if self.indices else position

    @classmethod
    def whole(cls, values: Sequence[Any], *, are_embeddings: bool = False) -> ItemBatch:
        """Return all items of a request."""
        return cls(values, are_embeddings, len(values))

    def each(self) -> list[ItemBatch]:
        """Return these items one by one."""
        batches = []
        for position, value in enumerate(self.values):
            batches.append(self._replace(values=[value], indices=[self.index_of(position)]))
        return batches


class Embedding(Fields):
    """The fields of an item with precomputed embeddings.

    The rows are under the first key. The fields that its layout reads follow.
    """

    @property
    def rows(self) -> torch.Tensor:
        """Floating (rows, hidden size)."""
        rows: torch.Tensor = next(iter(self.values()))
        return rows

    @property
    def content(self) -> Any:
        """What the hash of the item covers."""
        return dict(self)


class CanonicalItems(list[Any]):
    """Canonical items of one modality that mmkit has made: the parser does not make them again.

    They belong to the request. Nobody else writes to them.
    """


@dataclass(frozen=True, eq=False)
class ItemParser:
    """Turns the data of a request into canonical items, or into precomputed embeddings.

    Attributes:
        name: the name of the modality.
        where: names the modality in errors.
        item_type: the item type.
        embeds: what the spec says of embeddings: False, True, or the field of their rows.
        companions: the fields that the layout of embeddings reads and callers send beside them,
            each with the item type of its parts.
        count_rows: returns the encoder rows of an embedding by its companions.
        dtype: the dtype of the language model, in which it gets the rows; None leaves them.
        placeholder_texts: the tokens that stand for items in a prompt, as texts, which no text in
            an item may spell.
    """

    name: str
    where: str
    item_type: ItemType
    embeds: Any
    companions: Mapping[str, Tensor]
    count_rows: Callable[[Mapping[str, Any]], int]
    dtype: torch.dtype | None
    placeholder_texts: Sequence[str] = ()

    @property
    def takes_embeds(self) -> bool:
        """Whether callers may send precomputed embeddings."""
        return bool(self.embeds)

    @property
    def embeds_field(self) -> str:
        """The name of the field of embeddings."""
        return f"{self.name}_embeds"

    @property
    def embeds_as(self) -> Field:
        """The field of embeddings."""
        if isinstance(self.embeds, Field):
            return self.embeds
        return Batched()

    def parse(self, data: object, hidden_size: int | None) -> ItemBatch:
        """Return a caller's data as canonical items or precomputed embeddings.

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
        embeddings: list[Embedding] | None = None
        if isinstance(data, Mapping) and self.embeds_field in data:
            if not self.takes_embeds:
                expected, remedy = self.item_type.expected, "Send the raw item."
                raise InputError(self.where, expected, self.embeds_field, remedy)
            embeddings = self._parse_named_embeddings(data, hidden_size)
        elif self.takes_embeds and not self.companions and self.item_type.vllm_modality:
            embeddings = self._parse_unnamed_embeddings(data, hidden_size)
        if embeddings is None:
            return ItemBatch.whole(self.parse_raw_items(data))
        return ItemBatch.whole(embeddings, are_embeddings=True)

    def parse_raw_items(self, data: object) -> list[Any]:
        """Return a caller's data as canonical items.

        None stands for an item whose content a `multi_modal_uuids` entry names. An empty list is no
        item, as in vLLM.

        Raises:
            InputError: None in place of the data, a malformed item, or one with a text that spells
                a placeholder.
        """
        if data is None:
            expected = f"{self.item_type.expected} or a list of them"
            remedy = "Send the item, or leave the modality out."
            raise InputError(self.where, expected, "None", remedy)
        values = _make_canonical(self.item_type, data, self.where)
        for index, value in enumerate(values):
            if value is not None:
                self._check_texts(value, f"{self.where}[{index}]")
        return values

    def split_embeddings(self, fields: Mapping[str, Any]) -> list[Any]:
        """Return the rows of each precomputed embedding that the model receives.

        Each is a (rows, hidden size) tensor.

        Args:
            fields: the model's arguments, as vLLM batches them.
        """
        rows = fields.get(self.embeds_field)
        if rows is None:
            return []
        if self.embeds_as.batching is Batching.STACKED:
            return list(rows)
        columns = [fields[name] for name in self.companions]
        sizes = []
        for values in zip(*columns, strict=True):
            companions = dict(zip(self.companions, values, strict=True))
            sizes.append(self.count_rows(companions))
        return list(rows.split(sizes))

    def check_present(self, batch: ItemBatch, got: str) -> None:
        """Refuse None in place of an item.

        Raises:
            InputError: names the first.
        """
        for position, value in enumerate(batch.values):
            if value is None:
                where = f"{self.where}[{batch.index_of(position)}]"
                raise InputError(where, self.item_type.expected, got, "Send the item itself.")

    def check_count(self, count: int, limit: int | None) -> None:
        """Refuse more than `limit` items.

        Raises:
            InputError: names the limit.
        """
        if limit is not None and count > limit:
            # vLLM's words
            remedy = f"At most {limit} {self.name}(s) may be provided in one prompt."
            raise InputError(self.where, "fewer items", str(count), remedy)

    def _check_texts(self, value: Any, where: str) -> None:
        """Refuse texts that spell placeholders.

        A `process` that calls the tokenizer would make placeholders of them, for which there are no
        encoder rows.

        Raises:
            InputError: names the text and the placeholder.
        """
        for path, text in self.item_type.texts(value):
            for placeholder in self.placeholder_texts:
                if placeholder in text:
                    expected = f"a text without {placeholder!r}, which stands for an item"
                    raise InputError(f"{where}{path}", expected, shorten(text))

    def _parse_named_embeddings(
        self, data: Mapping[str, Any], hidden_size: int | None
    ) -> list[Embedding]:
        """Return precomputed embeddings with the fields that their layout reads.

        Callers send ``{"image_embeds": ..., "image_grid_thw": ...}``.

        The rows are a list with one tensor per item, or, as vLLM's own classes take them with such
        fields, one (rows of all items, hidden size) tensor.
        """
        names = [self.embeds_field, *self.companions]
        if set(data) != set(names):
            raise InputError(self.where, f"the fields {names}", repr(sorted(map(str, data))))
        rows = self._parse_rows(data[self.embeds_field], hidden_size)
        columns: dict[str, list[Any]] = {}
        for name, item_type in self.companions.items():
            columns[name] = _make_canonical(item_type, data[name], f"{self.where}.{name}")
        count = len(rows)
        if columns:
            count = len(next(iter(columns.values())))
        for name, column in columns.items():
            if len(column) != count:
                raise InputError(f"{self.where}.{name}", f"{count} items", str(len(column)))
        companions = []
        for index in range(count):
            companions.append({name: column[index] for name, column in columns.items()})
        if count > len(rows) == 1:
            rows = self._split_joint_rows(rows[0], companions)
        if len(rows) != count:
            raise InputError(self.where, f"embeddings of {count} items", str(len(rows)))
        embeddings = []
        for rows_of_item, fields in zip(rows, companions, strict=True):
            embeddings.append(Embedding({self.embeds_field: rows_of_item, **fields}))
        return embeddings

    def _split_joint_rows(
        self, rows: torch.Tensor, companions: Sequence[Mapping[str, Any]]
    ) -> list[torch.Tensor]:
        """Split one tensor with the rows of all items."""
        sizes = [self.count_rows(fields) for fields in companions]
        if sum(sizes) != len(rows):
            expected = f"{sum(sizes)} embedding row(s) for {len(companions)} items"
            raise InputError(self.where, expected, str(len(rows)))
        return list(rows.split(sizes))

    def _parse_unnamed_embeddings(
        self, data: object, hidden_size: int | None
    ) -> list[Embedding] | None:
        """Return precomputed embeddings in the forms of vLLM's own classes.

        They are one floating 3-D tensor, or a list of 2-D tensors. None where the data holds raw
        items.

        Raises:
            InputError: a tensor may be a picture as well.
        """
        parts = data if isinstance(data, (list, tuple)) else ()
        is_batch = _is_floating(data, 3)
        is_list = bool(parts) and isinstance(parts[0], torch.Tensor) and parts[0].ndim == 2
        if is_batch or is_list:
            remedy = self._remedy_for_pixels if is_batch else ""
            rows = self._parse_rows(data, hidden_size, remedy)
            return [Embedding({self.embeds_field: rows_of_item}) for rows_of_item in rows]
        for index, part in enumerate(parts):
            if _is_floating(part, 3) and 3 not in (part.shape[0], part.shape[-1]):
                got = f"shape {tuple(part.shape)}, which may be embeddings"
                where = f"{self.where}[{index}]"
                raise InputError(where, "pixels of three channels", got, self._remedy_for_pixels)
        return None

    @property
    def _remedy_for_pixels(self) -> str:
        """What to do about a tensor that may be embeddings and pixels as well."""
        return (
            f'Send embeddings as {{"{self.embeds_field}": ...}}, and pixels as uint8, '
            "or as an array or tensor in a list."
        )

    def _parse_rows(
        self, data: Any, hidden_size: int | None, remedy: str = ""
    ) -> list[torch.Tensor]:
        """Return one floating (rows, hidden size) tensor, or several, as a list.

        Raises:
            InputError: they are something else, or do not fit the model, or are not finite.
        """
        rows = data
        if isinstance(data, torch.Tensor) and data.ndim != 3:
            rows = [data]
        if not isinstance(rows, (list, tuple, torch.Tensor)):
            raise InputError(
                self.where, "at least one (rows, hidden_size) tensor", describe_array(data)
            )
        if not len(rows):
            raise InputError(self.where, "at least one (rows, hidden_size) tensor", "none")
        checked: list[torch.Tensor] = []
        for index, sent_rows in enumerate(rows):
            rows_of_item = check_rows(
                sent_rows,
                f"{self.where}[{index}]",
                width=hidden_size,
                dtype=self.dtype,
                remedy=remedy,
            )
            # in the dtype of the model, in which the language model gets them: vLLM batches the
            # rows of all requests in the dtype of the first
            if self.dtype is not None:
                rows_of_item = rows_of_item.to(self.dtype)
            checked.append(copy_if_shared(sent_rows, rows_of_item))
        return checked


def _make_canonical(item_type: ItemType, data: object, where: str) -> list[Any]:
    if isinstance(data, CanonicalItems):
        return list(data)
    return item_type.canonical_all(item_type.split(data, where), where)


def _is_floating(value: object, rank: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == rank and value.is_floating_point()

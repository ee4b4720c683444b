"""What a caller sends of one modality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InputError
from ..items import embeddings
from ..spec import Modality
from .binding import Binding


class Intake:
    """Turns the data of a request into canonical items, or into the rows of precomputed embeddings.

    Attributes:
        takes_embeds: callers may send precomputed embeddings.
        embeds_field: the field that carries these.
    """

    def __init__(self, spec: Modality, binding: Binding) -> None:
        self.name, self.where, self.item = spec.name, binding.where, binding.item
        self.takes_embeds = bool(spec.embeds)
        self.embeds_field = f"{spec.name}_embeds"

    def parse(self, data: object) -> list[Any]:
        """A caller's data as canonical items. None stands for an item whose content a
        `multi_modal_uuids` entry names.

        Raises:
            InputError: None in place of the data, or a malformed item. An empty list is no item, as
                in vLLM.
        """
        if data is None:
            expected = f"{self.item.expected} or a list of them"
            remedy = "Send the item, or leave the modality out."
            raise InputError(self.where, expected, "None", remedy)
        values = enumerate(self.item.split(data, self.where))
        return [
            None if v is None else self.item.canonical(v, f"{self.where}[{i}]") for i, v in values
        ]

    def take(self, data: object, hidden_size: int | None) -> tuple[list[Any], bool]:
        """A caller's data as canonical items, or as the rows of precomputed embeddings; and whether
        it is these.

        Raises:
            InputError: see `parse` and `mmkit.items.embeddings`.
        """
        if self.takes_embeds:
            rows = embeddings(data, self.item, self.embeds_field, hidden_size, self.where)
            if rows is not None:
                return rows, True
        elif isinstance(data, Mapping) and set(data) == {self.embeds_field}:
            raise InputError(
                self.where, self.item.expected, self.embeds_field, "Send the raw item."
            )
        return self.parse(data), False

    def take_whole(self, data: object, hidden_size: int | None) -> tuple[list[Any], bool]:
        """The same where no cache has what a None stands for.

        Raises:
            InputError: as for `take`, or None in place of an item.
        """
        values, embeds = self.take(data, hidden_size)
        for i, value in enumerate(values):
            if value is None:
                where = f"{self.where}[{i}]"
                raise InputError(where, self.item.expected, "None", "Send the item itself.")
        return values, embeds

    def check_count(self, count: int, limit: int | None) -> None:
        """Refuse more than `limit` items.

        Raises:
            InputError: names the limit.
        """
        if limit is not None and count > limit:
            # vLLM's words
            remedy = f"At most {limit} {self.name}(s) may be provided in one prompt."
            raise InputError(self.where, "fewer items", str(count), remedy)

"""Parts that an item may leave out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from ...errors import SpecError
from ..expr import Scope
from ..scope import Absent
from .base import ItemType
from .facts import Facts


class OptionalPart(ItemType):
    """A part of a `Record` that an item may leave out; see `optional`."""

    item: ItemType

    _word = "optional"
    _is_named = False

    is_optional = True
    vllm_modality = ""

    def __post_init__(self) -> None:
        if not isinstance(self.item, ItemType) or self.item.is_optional:
            raise SpecError("optional()", "an item type", repr(self.item))
        super().__post_init__()

    def bind(self, scope: Scope) -> Self:
        return type(self)(self.item.bind(scope))

    def for_function(self) -> Self:
        return type(self)(self.item.for_function())

    def leaves(self) -> Iterator[ItemType]:
        yield from self.item.leaves()

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return self.item.ndim

    @property
    def remedy(self) -> str:  # type: ignore[override]
        return self.item.remedy

    @property
    def expected(self) -> str:
        return f"{self.item.expected}, or nothing"

    def canonical(self, value: object, where: str) -> Any:
        if value is None:
            return None
        return self.item.canonical(value, where)

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        if value is None:
            return Absent(index=index)
        return self.item.facts(value, index)

    def state_facts(self, value: Any) -> Any:
        if value is None:
            return None
        return self.item.state_facts(value)

    def check_facts(self, facts: Facts | None, where: str) -> SimpleNamespace:
        if facts is None:
            return Absent()
        return self.item.check_facts(facts, where)

    def texts(self, value: Any) -> Iterator[tuple[str, str]]:
        if value is not None:
            yield from self.item.texts(value)

    @property
    def num_sizes(self) -> int:
        return 1 + self.item.num_sizes

    def sizes(self, value: Any) -> tuple[int, ...]:
        """Return 1 and the sizes of the part; zeros where it is absent."""
        if value is None:
            return (0,) * self.num_sizes
        return (1, *self.item.sizes(value))

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> Any:
        if sizes[0] == 0:
            return None
        return self.item.random(sizes[1:], generator)

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return sizes[0] * self.item.num_bytes(sizes[1:])

    def candidates(self, fraction: float = 1.0, most: Sequence[float] = ()) -> list[Any]:
        # an item may have more encoder rows without the part: a layout decides
        return [*self.item.candidates(fraction, most[1:]), None]

    def small(self) -> list[Any]:
        return [None, *self.item.small()]

    def smallest(self) -> list[Any]:
        return [None]

    def schema(self) -> dict[str, Any]:
        return {**self.item.schema(), "optional": True}


def optional(part: ItemType) -> OptionalPart:
    """Declare a part of a `Record` that an item may leave out.

    Callers leave it out of the dict, or send None. The canonical form of an absent part is None,
    which a `process` has to expect: such a part is no field by itself.

    In a layout, an absent part is false, and reading anything of it is an error:
    ``where(item.note, tok.text("{}", item.note.text), [])``.

    Args:
        part: the item type of the part.

    Raises:
        SpecError: something else.
    """
    return OptionalPart(part)

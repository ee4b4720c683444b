"""Items that are lists of others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from ...errors import InputError, SpecError, locate_errors
from ..expr import Count, Scope, as_expression
from ..node import Converted, evaluate_all, parameter
from .base import ItemType
from .facts import Facts, ListFacts
from .size import Between, check_size
from .values import ARRAYS, describe

_BYTES_OF_ELEMENT = 64
"""What an element of a list takes in memory beside its content."""


class List(ItemType):
    """A list of elements of one item type: the notes of a patient, arrays of several lengths.

    Callers send a list of elements, or a list of such lists for several items. Where each element
    is a `Tensor`, an array whose first dimension counts the elements is such a list, too. The
    canonical form is a list of canonical elements.

    An element is any item type but an `optional` one: with ``List(Record(name=Text(20),
    values=Tensor((between(1, 9),))), most=4)`` an item is up to four dicts. In a `Record`, the
    numbers may read the parts before it: ``most=item.series.length, least=item.series.length``.

    A function makes the fields of lists: it receives a list for each item. `hf()` passes a list of
    lists.

    Attributes:
        element: the item type of every element.
        most: the most elements.
        least: the fewest.

    Facts: `length`, the number of elements; `elements`, the facts of each, of which `index` is its
    position in the list; `index`. ``each(item.elements, lambda x: ...)`` in a layout lays them out.
    """

    element: ItemType
    most: Converted[Count, Any] = parameter(as_expression)
    least: Converted[Count, Any] = parameter(as_expression, default=1)

    is_nested = True
    vllm_modality = ""
    accepted_types = (*ARRAYS, list, tuple)
    size_hint = "a list of its elements in JSON"
    facts_class = ListFacts

    def __post_init__(self) -> None:
        if not isinstance(self.element, ItemType) or self.element.is_optional:
            expected = "an item type that is not optional"
            raise SpecError("List.element", expected, repr(self.element))
        super().__post_init__()

    def bind(self, scope: Scope) -> Self:
        with locate_errors("List.element"):
            element = self.element.bind(scope)
        with locate_errors("List.most"):
            most = evaluate_all(self.most, scope)
        with locate_errors("List.least"):
            least = evaluate_all(self.least, scope)
        bound = type(self)(element, most, least)
        check_size(Between(least, most), "List.least, List.most")
        for candidate in element.candidates():
            bound.check_bytes((most, *element.sizes(candidate)))
        return bound

    def for_function(self) -> Self:
        return replace(self, element=self.element.for_function())

    def leaves(self) -> Iterator[ItemType]:
        yield from self.element.leaves()

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return self.element.ndim + 1

    @property
    def remedy(self) -> str:  # type: ignore[override]
        return self.element.remedy

    @property
    def expected(self) -> str:
        return f"a list of {self._count} elements, each {self.element.expected}"

    @property
    def _count(self) -> Between:
        return Between(self.least, self.most)

    def _is_one(self, data: Sequence[Any]) -> bool:
        """Return whether a list is one item, judged by its first element."""
        if not data or data[0] is None:  # None is an item that a uuid names
            return False
        first = data[0]
        if isinstance(first, ARRAYS):
            return bool(first.ndim == self.element.ndim)
        if isinstance(first, (list, tuple)):
            return self.element._is_one(first)
        return True

    def canonical(self, value: object, where: str) -> list[Any]:
        is_array = isinstance(value, ARRAYS) and value.ndim > 0
        if not is_array and not isinstance(value, (list, tuple)):
            raise InputError(where, self.expected, describe(value))
        sequence: Any = value
        if not self.least <= len(sequence) <= self.most:
            raise InputError(where, self.expected, f"{len(sequence)} of them")
        elements: list[Any] = []
        for position, sent_element in enumerate(sequence):
            element = self.element.canonical(sent_element, f"{where}[{position}]")
            elements.append(getattr(element, "media", element))  # vLLM wraps decoded images
        return elements

    def facts(self, value: Sequence[Any], index: int) -> SimpleNamespace:
        elements: list[SimpleNamespace] = []
        for position, element in enumerate(value):
            elements.append(self.element.facts(element, position))
        return SimpleNamespace(index=index, length=len(elements), elements=tuple(elements))

    def state_facts(self, value: Sequence[Any]) -> Facts:
        return ListFacts(tuple([self.element.state_facts(element) for element in value]))

    def check_facts(self, facts: Facts, where: str) -> SimpleNamespace:
        self._check_facts_class(facts, where)
        elements = getattr(facts, "elements", ())
        if not self.least <= len(elements) <= self.most:
            raise InputError(where, f"facts of {self.expected}", f"{len(elements)} of them")
        checked: list[SimpleNamespace] = []
        for position, facts_of_element in enumerate(elements):
            element = self.element.check_facts(facts_of_element, f"{where}[{position}]")
            element.index = position
            checked.append(element)
        return SimpleNamespace(length=len(checked), elements=tuple(checked))

    def texts(self, value: Sequence[Any]) -> Iterator[tuple[str, str]]:
        for position, element in enumerate(value):
            for path, text in self.element.texts(element):
                yield f"[{position}]{path}", text

    @property
    def num_sizes(self) -> int:
        return 1 + self.element.num_sizes

    def sizes(self, value: Sequence[Any]) -> tuple[int, ...]:
        """Return the number of elements, then the largest of each size of the elements."""
        largest = [0] * self.element.num_sizes
        for element in value:
            pairs = zip(largest, self.element.sizes(element), strict=True)
            largest = [max(pair) for pair in pairs]
        return (len(value), *largest)

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> list[Any]:
        """Return a list of random elements, all of the same sizes."""
        count = min(max(sizes[0], self.least), self.most)
        return [self.element.random(sizes[1:], generator) for _ in range(count)]

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return sizes[0] * (self.element.num_bytes(sizes[1:]) + _BYTES_OF_ELEMENT)

    def candidates(self, fraction: float = 1.0, most: Sequence[float] = ()) -> list[list[Any]]:
        limit = most[0] if most else math.inf
        count = max(self.least, int(min(self.most * fraction, limit)))
        return [[element] * count for element in self.element.candidates(fraction, most[1:])]

    def small(self) -> list[list[Any]]:
        lists: list[list[Any]] = []
        if self.least == 0:
            lists.append([])
        count = min(max(self.least, 1), self.most)
        for element in self.element.small():
            lists.append([element] * count)
        return lists

    def smallest(self) -> list[list[Any]]:
        if self.least == 0:
            return [[]]
        return [[element] * self.least for element in self.element.smallest()]

    def schema(self) -> dict[str, Any]:
        element = {"expected": self.element.expected, **self.element.schema()}
        return {"shape": [[self.least, self.most]], "dtype": "list", "element": element}

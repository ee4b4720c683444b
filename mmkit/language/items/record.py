"""Items of several parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from reprlib import repr as brief
from types import SimpleNamespace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from ...errors import InputError, SpecError, locate_errors
from ..expr import Scope
from ..node import Dependency, dependencies
from .base import ItemType
from .facts import Facts, RecordFacts
from .values import describe

T = TypeVar("T")

_ROOTS_OF_PARTS = ("item", "function")
"""The roots of what a part may depend on that only the parts before it tell."""

_MAX_COMBINATIONS = 1024
"""The most largest items of a record: each combination of its parts has one, which is tried."""

_RESERVED_NAMES = ("index", "count", "rows")
"""Facts of a whole item, whose names no part can have."""


class Record(ItemType):
    """An item of several parts, for example the genes of a cell and their expression values.

    Callers send a dict with every part, ``{"gene_ids": ..., "values": ...}``, or a list of such
    dicts. The canonical form is a dict of canonical parts, in the declared order.

    A size of a part may depend on the parts before it: with ``gene_ids=Tensor((between(1, 9),),
    "int64"), values=Tensor((item.gene_ids.length,))`` mmkit refuses a cell with another number of
    values than ids.

    A part is a `Record` or a `List`, too. In the sizes of a part, `item` is the innermost `Record`
    around it. An item may leave out a part that is `optional`.

    An `Image`, a `Video` or an `Audio` is a part like others: in ``image=Image((448, 448)),
    click=Tensor((2,), "int64", bound=between(0, item.image.width - 1))`` a click lies on its image.

    Without `process`, each part is the field of its name, which a `Tensor` can be; `identity()`
    takes `Audio` and `Text` beside it. A function receives the dicts; `hf()` passes a list of each
    part, by its name.

    Attributes:
        parts: any item type each, by name; given as keyword arguments.

    Facts: the facts of each part under its name (``item.gene_ids.length``), and `index`.
    """

    parts: Mapping[str, ItemType] = field()  # type: ignore[misc]

    _scope: ClassVar[Scope | None] = None
    """The scope that the record is bound to."""

    ndim = 0
    is_nested = True
    vllm_modality = ""
    accepted_types = (Mapping, list, tuple)
    size_hint = "a dict of its parts in JSON"
    facts_class = RecordFacts

    def __init__(self, /, **parts: ItemType) -> None:
        if not parts:
            raise SpecError("Record", "at least one part", "none")
        for name, part in parts.items():
            if not isinstance(part, ItemType):
                raise SpecError(f"Record.{name}", "an item type", repr(part))
            if name in _RESERVED_NAMES or name.startswith("_"):
                expected = f"a part that is not called {', '.join(_RESERVED_NAMES)} or _..."
                raise SpecError("Record", expected, repr(name))
        self._set(parts=parts)

    def bind(self, scope: Scope) -> Self:
        parts: dict[str, ItemType] = {}
        for name, part in self.parts.items():
            roots = {dependency.root for dependency in dependencies(part)}
            if roots.isdisjoint(_ROOTS_OF_PARTS):
                parts[name] = _bind_part(name, part, scope)
            else:  # it may follow from the parts before it, which an item has
                parts[name] = part
        bound: Self = self._make(parts, scope)
        bound.candidates()  # a size that does not follow from the parts before it is refused here
        return bound

    @staticmethod
    def _make(parts: Mapping[str, Any], scope: Scope | None) -> Any:
        """Return a record of parts that is bound to a scope."""
        record = Record(**parts)
        record._set(_scope=scope)
        return record

    @cached_property
    def _dependencies(self) -> frozenset[Dependency]:
        """What the record depends on; its parts depend on each other, and on nothing around it."""
        names: set[Dependency] = set()
        for dependency in dependencies(self.parts):
            if dependency.root not in _ROOTS_OF_PARTS:
                names.add(dependency)
        return frozenset(names)

    def leaves(self) -> Iterator[ItemType]:
        for part in self.parts.values():
            yield from part.leaves()

    def for_function(self) -> Self:
        parts = {name: part.for_function() for name, part in self.parts.items()}
        return self._make(parts, self._scope)  # type: ignore[no-any-return]

    def part(self, name: str, before: Mapping[str, Any]) -> Any:
        """Return the bound item type of a part.

        Args:
            name: of the part.
            before: the canonical parts before it, by name.
        """
        part = self.parts[name]
        if self._scope is None or not dependencies(part):
            return part
        return self._bind_after(name, self._facts_of_parts(before))

    def _bind_after(self, name: str, facts: Mapping[str, SimpleNamespace]) -> ItemType:
        """Return the item type of a part, bound to the facts of the parts before it, by name."""
        assert self._scope is not None
        scope = self._scope.for_item(SimpleNamespace(**facts), None)
        return _bind_part(name, self.parts[name], scope)

    @property
    def is_field(self) -> bool:  # type: ignore[override]
        return all(part.is_field for part in self.parts.values())

    @property
    def may_be_field(self) -> bool:  # type: ignore[override]
        return all(part.may_be_field or part.is_text for part in self.parts.values())

    @property
    def expected(self) -> str:
        names: list[str] = []
        for name, part in self.parts.items():
            names.append(f"perhaps {name}" if part.is_optional else name)
        return f"a dict of {' and '.join(names)}"

    def canonical(self, value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            remedy = "A list or tuple is several items."
            raise InputError(where, self.expected, describe(value), remedy)
        if not self._has_names(value.keys()):
            raise InputError(where, self.expected, f"one of {brief(list(value))}")
        record: dict[str, Any] = {}
        for name in self.parts:
            item_type = self.part(name, record)
            part = item_type.canonical(value.get(name), f"{where}.{name}")
            record[name] = getattr(part, "media", part)  # vLLM wraps decoded images
        return record

    def _has_names(self, names: Iterable[Any]) -> bool:
        """Return whether names name all parts; optional parts may be missing."""
        missing_names = set(self.parts).difference(names)
        is_known = self.parts.keys() >= set(names)
        return is_known and all(self.parts[name].is_optional for name in missing_names)

    def facts(self, value: Mapping[str, Any], index: int) -> SimpleNamespace:
        return SimpleNamespace(index=index, **self._facts_of_parts(value))

    def state_facts(self, value: Mapping[str, Any]) -> Facts:
        facts = {name: self.parts[name].state_facts(part) for name, part in value.items()}
        return RecordFacts(facts)

    def check_facts(self, facts: Facts, where: str) -> SimpleNamespace:
        self._check_facts_class(facts, where)
        parts: Mapping[str, Any] = getattr(facts, "parts", {})
        if not self._has_names(parts):
            raise InputError(where, f"facts of {self.expected}", brief(list(parts)))
        checked: dict[str, SimpleNamespace] = {}
        for name in self.parts:
            item_type = self.parts[name]
            if self._scope is not None and dependencies(item_type):
                item_type = self._bind_after(name, checked)
            facts_of_part: Any = parts.get(name)  # None for an optional part
            checked[name] = item_type.check_facts(facts_of_part, f"{where}.{name}")
        return SimpleNamespace(**checked)

    def _facts_of_parts(self, value: Mapping[str, Any]) -> dict[str, SimpleNamespace]:
        """Return the facts of parts, without an index, which is the record's."""
        facts: dict[str, SimpleNamespace] = {}
        for name, part in value.items():
            facts[name] = self.parts[name].facts(part, 0)
            del facts[name].index
        return facts

    def texts(self, value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name, part in self.parts.items():
            for path, text in part.texts(value[name]):
                yield f".{name}{path}", text

    @property
    def remedy(self) -> str:  # type: ignore[override]
        for part in self.parts.values():
            if part.remedy:
                return part.remedy
        return ""

    @property
    def num_sizes(self) -> int:
        return sum(part.num_sizes for part in self.parts.values())

    def sizes(self, value: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the sizes of all parts, one part after the other."""
        sizes: list[int] = []
        for name, part in self.parts.items():
            sizes += part.sizes(value[name])
        return tuple(sizes)

    def _split_sizes(self, sizes: Sequence[T]) -> dict[str, Sequence[T]]:
        """Return the sizes of each part, by name; empty ones where there are none at all."""
        sizes_of_parts: dict[str, Sequence[T]] = {}
        begin = 0
        for name, part in self.parts.items():
            end = begin + part.num_sizes
            sizes_of_parts[name] = sizes[begin:end]
            begin = end
        return sizes_of_parts

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> dict[str, Any]:
        sizes_of_parts = self._split_sizes(sizes)
        record: dict[str, Any] = {}
        for name in self.parts:
            record[name] = self.part(name, record).random(sizes_of_parts[name], generator)
        return record

    def num_bytes(self, sizes: Sequence[int]) -> int:
        sizes_of_parts = self._split_sizes(sizes)
        return sum(part.num_bytes(sizes_of_parts[name]) for name, part in self.parts.items())

    def candidates(self, fraction: float = 1.0, most: Sequence[float] = ()) -> list[dict[str, Any]]:
        most_of_parts = self._split_sizes(most)

        def make_candidates(name: str, part: ItemType) -> list[Any]:
            return part.candidates(fraction, most_of_parts[name])

        return self._combine(make_candidates)

    def small(self) -> list[dict[str, Any]]:
        return self._combine(_make_small)

    def smallest(self) -> list[dict[str, Any]]:
        return self._combine(_make_smallest)

    def _combine(self, make: Callable[[str, Any], list[Any]]) -> list[dict[str, Any]]:
        """Return the records of all combinations of items of their parts.

        Args:
            make: returns the items of a part, given its name and its bound type, which may depend
                on the parts before it.
        """
        records: list[dict[str, Any]] = [{}]
        for name in self.parts:
            longer: list[dict[str, Any]] = []
            for record in records:
                for part in make(name, self.part(name, record)):
                    longer.append({**record, name: part})
            records = longer
            if len(records) > _MAX_COMBINATIONS:
                expected = f"at most {_MAX_COMBINATIONS} combinations of largest and absent parts"
                remedy = "Make a List of parts of one kind."
                raise SpecError("Record", expected, f"more with {name}", remedy)
        return records

    def schema(self) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name, part in self.parts.items():
            parts[name] = {"expected": part.expected, **part.schema()}
        return {**super().schema(), "parts": parts}

    def __repr__(self) -> str:
        arguments = [f"{name}={part!r}" for name, part in self.parts.items()]
        return f"Record({', '.join(arguments)})"


def _make_small(name: str, part: ItemType) -> list[Any]:
    """Return the small items of a part of a record."""
    return part.small()


def _make_smallest(name: str, part: ItemType) -> list[Any]:
    """Return the smallest item of a part of a record, where every spec accepts it."""
    return part.smallest()


def _bind_part(name: str, part: ItemType, scope: Scope) -> ItemType:
    """Return a bound part; errors name it."""
    with locate_errors(f"Record.{name}"):
        return part.bind(scope)

"""The scope of one modality, and errors that name its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..errors import MmkitError, SpecError
from ..expr import Fields, Scope
from ..items import Embedding, ItemType, unscoped
from ..process import HF
from ..spec import Modality


class Binding:
    """The scope of one modality, without an item or with one.

    Attributes:
        where: names the modality in errors, for example ``robot.actions``.
        static: the scope without an item.
        item: the item type, bound.
        is_cached: whether vLLM may always cache processed items.
    """

    def __init__(self, spec: Modality, where: str, scope: Scope) -> None:
        self.where = where
        self.is_cached = spec.cacheable is True
        self._uncached = _uncached(spec)
        self.static = replace(scope, kwargs=unscoped(scope.kwargs or {}, [spec.item]))
        item: ItemType = self.bind("item", spec.item)
        self.item = item if isinstance(spec.process, HF) else item.for_function()

    def at(self, part: str) -> At:
        """A context in which errors name a part of the modality."""
        return At(f"{self.where}, {part}")

    def bind(self, part: str, declared: Any) -> Any:
        """A declaration with everything evaluated that needs no item."""
        with self.at(part):
            return declared.bind(self.static)

    def scope(
        self,
        value: Any,
        index: int,
        fields: Mapping[str, Any] | None = None,
        count: int = 1,
        *,
        of_fields: bool = False,
    ) -> Scope:
        """The scope of one item.

        Args:
            value: the canonical item, its precomputed embeddings, or its facts.
            index: its position among the items of the modality.
            fields: its processed fields.
            count: number of items of the modality in the request.
            of_fields: whether for processed fields, which come back for an item of that content
                at any index.
        """
        if isinstance(value, SimpleNamespace):
            facts = value
        elif isinstance(value, Embedding):
            facts = SimpleNamespace(index=index, rows=len(value.rows))
        else:
            facts = self.item.facts(value, index)
        facts.count = count
        if uncached := self._uncached[of_fields]:
            facts = _Facts(**{name: v for name, v in vars(facts).items() if name not in uncached})
        if fields is not None and type(fields) is not Fields:
            fields = Fields(fields)
        return self.static.of(facts, fields)


def _uncached(spec: Modality) -> tuple[frozenset[str], frozenset[str]]:
    """What functions of a layout, and those of fields, cannot read: it changes while the item is
    cached. Of expressions, the spec knows it already."""
    if spec.cacheable is not True or all(leaf.root != "function" for leaf in spec.leaves()):
        return frozenset(), frozenset()
    return frozenset({"count"}), frozenset({"index", "count"})


class _Facts(SimpleNamespace):
    """The facts of an item that do not change while it is cached."""

    def __getattr__(self, name: str) -> Any:
        if name in ("index", "count"):
            remedy = "Say by cacheable= when items may be kept."
            raise SpecError(
                f"item.{name} has no value here: items are cached by their content. {remedy}"
            )
        raise AttributeError(f"an item has no attribute {name!r}")


class At:
    """A context in which errors name a part of a spec: ``with At("robot.actions, layout"):``.

    Args:
        where: the part.
        expected: of a function of the spec, whose own errors of mmkit stay as they are.
        kind: what becomes of every other exception of a function.
    """

    __slots__ = ("expected", "kind", "where")

    def __init__(self, where: str, expected: str = "", kind: type[MmkitError] = SpecError) -> None:
        self.where, self.expected, self.kind = where, expected, kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, SpecError) and not self.expected:
            raise SpecError(f"{self.where}: {error}") from error
        if isinstance(error, Exception) and not isinstance(error, MmkitError):
            got = f"{type(error).__name__}: {error}".rstrip(": .")
            raise self.kind(self.where, self.expected or "a value", got) from error

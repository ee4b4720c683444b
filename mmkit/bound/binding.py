"""The declarations of one modality, bound, and errors that name its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ..errors import InputError, MmkitError, SpecError
from ..expr import Fields, Scope, evaluate
from ..field import Field
from ..items import Embedding, ItemType, unscoped
from ..items.tensor import Tensor
from ..layout import Layout
from ..node import fold
from ..process import HF
from ..spec import Modality
from ..updates import Insert, Update


class Binding:
    """One modality with everything evaluated that depends on the config and the vocabulary alone.

    Attributes:
        where: names the modality in errors, for example ``robot.actions``.
        static: the scope without an item.
        item: the item type.
        limit: the most items in one request, or None.
        layout: the layout of raw items.
        embeds: the layout of precomputed embeddings; None where the spec takes none.
        companions: the item types of the fields that callers send beside these.
        updates: the alternatives of `update`.
        fields: the processed fields, by name.
        hf: the call of a Hugging Face processor; None where `process` is something else.
        grid: the sizes of the grid of M-RoPE positions.
        is_cached: whether vLLM may always cache processed items.

    Raises:
        SpecError: a part that cannot be bound; `others` has the errors of the other parts.
    """

    def __init__(self, spec: Modality, where: str, scope: Scope) -> None:
        self.where = where
        self.is_cached = spec.cacheable is True
        self._uncached = _uncached(spec)
        self.static = replace(scope, kwargs=unscoped(scope.kwargs or {}, [spec.item]))
        refusals = Refusals()

        def bound(part: str, declared: Any) -> Any:
            with refusals.collected(), self.at(part):
                return declared.bind(self.static)

        item: ItemType = bound("item", spec.item)
        self.layout: Layout = bound("layout", spec.layout)
        # an empty layout stands at offset 0, as vLLM's own
        declared = spec.update if spec.has_positions else [Insert(at="start")]
        self.updates: list[Update] = [bound("update", update) for update in declared]
        self.fields: dict[str, Field] = {
            name: bound("fields", field) for name, field in spec.fields.items()
        }
        self.hf: HF | None = None
        if isinstance(spec.process, HF):
            self.hf = bound("process", spec.process)
        self.embeds: Layout | None = self.layout if spec.embeds else None
        if isinstance(spec.embeds, Layout):
            self.embeds = bound("embeds", spec.embeds)
        self.companions: dict[str, Tensor] = {
            key: bound("embeds", companion) for key, companion in spec.companions().items()
        }
        self.grid: list[Any] = []
        with refusals.collected(), self.at("positions"):
            self.grid = [fold(part, self.static) for part in spec.positions or ()]
        self.limit: int | None = None
        with refusals.collected():
            self.limit = self._limit(spec)
        refusals.refuse()
        self.item = item if self.hf else item.for_function()

    def _limit(self, spec: Modality) -> int | None:
        with (at := self.at("limit")):
            limit = evaluate(spec.limit, self.static)
        if limit is None or (type(limit) is int and limit >= 0):
            return limit
        raise SpecError(at.where, "a whole number >= 0 or None", repr(limit))

    def at(self, part: str) -> At:
        """A context in which errors name a part of the modality."""
        return At(f"{self.where}, {part}")

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


class Refusals(list[SpecError]):
    """Collects why a spec cannot be bound: every reason, not only the first."""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A context after whose errors the next part is looked at."""
        try:
            yield
        except SpecError as error:
            self += [error, *error.others]

    def refuse(self) -> None:
        """Raise the first error, with the others as its `others`; nothing where there is none."""
        if self:
            first, *others = self
            first.others = tuple(others)
            raise first


@contextmanager
def of_spec() -> Iterator[None]:
    """A context in which the refusal of an item is a mistake of the spec, which stated it."""
    try:
        yield
    except InputError as error:
        raise SpecError(f"the largest item: {error}") from error


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

"""The scopes in which the expressions of a modality are evaluated for one item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..errors import InputError, MmkitError, SpecError, relocate
from ..language.expr import Scope
from ..language.items import ItemType
from ..language.scope import Fields
from .parsing import Embedding


@dataclass(frozen=True, eq=False)
class ItemScopes:
    """Makes the scopes of the items of one modality.

    Attributes:
        static: the scope without an item.
        item_type: the item type.
        hides_position: whether items have no count, and no index where their fields are computed:
            vLLM caches them, and a function of the spec might read these.
    """

    static: Scope
    item_type: ItemType
    hides_position: bool

    def make(
        self,
        value: Any,
        index: int,
        fields: Mapping[str, Any] | None = None,
        count: int = 1,
        *,
        for_fields: bool = False,
    ) -> Scope:
        """Return the scope of one item.

        Args:
            value: the canonical item, its precomputed embeddings, or its facts.
            index: its position among the items of the modality.
            fields: its processed fields.
            count: the number of items of the modality in the request.
            for_fields: whether processed fields are computed in it, which a cache gives back for an
                item of that content at any index.
        """
        facts = self._make_facts(value, index)
        if self.hides_position:
            facts = _CachedFacts(**vars(facts))
            if for_fields:
                del facts.index
        else:
            facts.count = count
        if fields is not None and not isinstance(fields, Fields):
            fields = Fields(fields)
        return self.static.for_item(facts, fields)

    def _make_facts(self, value: Any, index: int) -> SimpleNamespace:
        if isinstance(value, SimpleNamespace):
            return value
        if isinstance(value, Embedding):
            return SimpleNamespace(index=index, rows=len(value.rows))
        return self.item_type.facts(value, index)


class _CachedFacts(SimpleNamespace):
    """The facts of an item that do not change while it is cached."""

    def __getattr__(self, name: str) -> Any:
        if name in ("index", "count"):
            problem = "has no value here: items are cached by their content."
            raise SpecError(f"item.{name} {problem} Say by cacheable= when items may be kept.")
        raise AttributeError(f"an item has no attribute {name!r}")


@contextmanager
def refuse_item(where: str, index: int | None, facts: Any) -> Iterator[None]:
    """Report a ValueError in a function of the spec as the refusal of an item of a request.

    A library that the function calls may raise it.

    Args:
        where: names the modality.
        index: the position of the item; None where it is not known.
        facts: the facts of the item.

    Raises:
        InputError: in place of the ValueError, or of the SpecError that it became.
    """
    try:
        yield
    except (SpecError, ValueError) as error:
        cause: BaseException = error
        while isinstance(cause, MmkitError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, MmkitError) or not isinstance(cause, ValueError):
            raise
        if index is not None:
            where = f"{where}[{index}]"
        message = " ".join(str(cause).split()).rstrip(".")
        got = f"{describe_item(facts)}: {message}"
        raise InputError(where, "an item that has a layout", got) from error


@contextmanager
def locate_texts(where: str) -> Iterator[None]:
    """Name the item in the refusal of a text that an expression encodes.

    Args:
        where: the item.

    Raises:
        InputError: in place of the vocabulary's error, which names no item.
    """
    try:
        yield
    except InputError as error:
        if not error.where.startswith("tok.text("):
            raise
        raise relocate(error, where) from error


def describe_item(facts: Any) -> str:
    """Return an item by its sizes, for messages: ``an item of shape (1, 3)``."""
    values = dict(vars(facts))
    values.pop("index", None)
    values.pop("count", None)
    if "shape" in values:
        return f"an item of shape {tuple(values['shape'])}"
    sizes = [f"{name} {value}" for name, value in values.items() if type(value) is int]
    if not sizes:
        return "an item"
    return f"an item of {' and '.join(sizes)}"

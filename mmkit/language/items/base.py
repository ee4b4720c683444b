"""The base class of the item types."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ...errors import InputError, SpecError, locate_errors
from ..expr import Scope
from ..node import Part, evaluate_all
from .facts import Facts
from .memory import copy_if_shared
from .size import Between
from .size import get_ends as get_ends
from .values import ARRAYS, describe
from .values import check_finite as check_finite
from .values import describe_array as describe_array
from .values import dtype_name as dtype_name

MEDIA_SCOPES = ("images_kwargs", "videos_kwargs", "audio_kwargs")
"""The keys of `mm_processor_kwargs` that hold options for the items of one kind of media."""

SCOPES = ("common_kwargs", "text_kwargs", *MEDIA_SCOPES)
"""The keys of `mm_processor_kwargs` that hold options for one part of a Hugging Face processor."""

GIB = 1 << 30

_MAX_DRAWN = 4093
"""Values that are drawn for a large random item, which repeats them: drawing each would take too
long. A prime, so that the rows of an array do not repeat."""


class ItemType(Part):
    """Base of the item types.

    A bound item type holds numbers only.

    Attributes:
        ndim: the number of dimensions of an item as one array.
        largest: the sizes of the largest items, once bound.
        parts: the item types of its parts, by name, as which a canonical item is a dict; empty
            where an item is a whole.
        is_field: whether items, or their parts, are processed fields without a word of the spec.
        may_be_field: whether they can be, where a spec says `identity()`.
        is_text: whether items are texts, which no field can be.
        vllm_modality: vLLM's name for such an item: image, video or audio. Empty for none of them,
            None for any of them.
        accepted_types: what a caller may send for one item or several.
        mime_type: the type of a file that holds one item; empty where JSON can hold an item.
        kwargs_scope: the key of `MEDIA_SCOPES` that concerns these items alone; empty for none.
        size_hint: what ``mmkit show --item`` takes for an item of some sizes.
        dummy_sizes: the sizes of `largest`, as vLLM's `limit_mm_per_prompt` names them.
        small_sizes: the sizes of `small`, where not every spec accepts the smallest ones.
        remedy: what to state in a spec that does not accept the items that mmkit makes.
        most_bytes: the bytes of the largest item that a spec may state.
        num_sizes: how many sizes an item has.
        facts_class: the class of the facts that stand for an item without its content; None where
            a caller has to send the item itself.
        is_nested: whether an item holds items of other types.
        is_optional: whether an item may leave out such a part.
    """

    _is_named = True

    ndim: ClassVar[int]
    if TYPE_CHECKING:  # a class variable here would come first among the fields of a subclass
        largest: ClassVar[Any]
    parts: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    is_field: ClassVar[bool] = False
    may_be_field: ClassVar[bool] = False
    is_text: ClassVar[bool] = False
    vllm_modality: ClassVar[str | None] = None
    accepted_types: ClassVar[tuple[type, ...]] = (object,)
    mime_type: ClassVar[str] = ""
    kwargs_scope: ClassVar[str] = ""
    size_hint: ClassVar[str] = "sizes as 9x4"
    dummy_sizes: ClassVar[tuple[str, ...]] = ()
    small_sizes: ClassVar[tuple[tuple[int, ...], ...]] = ()
    remedy: ClassVar[str] = ""
    most_bytes: ClassVar[int] = 2 * GIB
    facts_class: ClassVar[type[Facts] | None] = None
    is_nested: ClassVar[bool] = False
    is_optional: ClassVar[bool] = False

    def bind(self, scope: Scope) -> Self:
        """Return this item type with its expressions evaluated on `cfg` and `proc`.

        Raises:
            SpecError: a value that the config lacks, or that is out of range.
        """
        kind: Any = type(self)
        arguments: dict[str, Any] = {}
        for name in self._names:
            with locate_errors(f"{kind.__name__}.{name}"):
                arguments[name] = evaluate_all(getattr(self, name), scope)
        return kind(**arguments)  # type: ignore[no-any-return]

    def split(self, data: object, where: str) -> list[Any]:
        """Return the items in a caller's data, not validated yet.

        Args:
            data: one item, or several in a sequence or a batch.
            where: names the data in errors.

        Raises:
            InputError: the data cannot hold items of this type.
        """
        if not isinstance(data, self.accepted_types):
            raise InputError(where, f"{self.expected} or a list of them", describe(data))
        sequence: Any = data
        if isinstance(data, ARRAYS):
            is_batch = data.ndim == self.ndim + 1  # canonical() refuses other dimensions
        else:
            is_batch = isinstance(data, (list, tuple)) and not self._is_one(data)
        if is_batch:
            return list(sequence)
        return [data]

    def _is_one(self, data: Sequence[Any]) -> bool:
        """Return whether a list or a tuple is one item."""
        return False

    def canonical(self, value: object, where: str) -> Any:
        """Return an item in its canonical form.

        It lies in memory that the caller does not have: what is cached must not change when the
        caller uses its memory again.

        Raises:
            InputError: the item is malformed.
        """
        return copy_if_shared(value, self.convert(value, where))

    def convert(self, value: object, where: str) -> Any:
        """Return an item in its canonical form, which may lie in the memory of what a caller sent.

        Raises:
            InputError: the item is malformed.
        """
        raise NotImplementedError

    def canonical_all(self, values: Sequence[object], where: str) -> list[Any]:
        """Return each item in its canonical form; None for an item that the caller only names.

        Raises:
            InputError: an item is malformed.
        """
        items: list[Any] = []
        for index, value in enumerate(values):
            if value is None:
                items.append(None)
            else:
                items.append(self.canonical(value, f"{where}[{index}]"))
        return items

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        """Return the value of the root `item` for a canonical item.

        Args:
            value: the item.
            index: its position among the items of its modality.
        """
        raise NotImplementedError

    def state_facts(self, value: Any) -> Facts:
        """Return the facts of a canonical item, as a caller states them without the item.

        The item type has a `facts_class`.
        """
        facts = self.facts(value, 0)
        arguments = {}
        for name in self._fact_names:
            if hasattr(facts, name):
                arguments[name] = getattr(facts, name)
        return self.facts_class(**arguments)  # type: ignore[misc]

    def check_facts(self, facts: Facts, where: str) -> SimpleNamespace:
        """Return the value of the root `item`, without an index, for the facts of an item.

        Raises:
            InputError: the facts of another type of item, or of an item that the spec refuses.
        """
        self._check_facts_class(facts, where)
        for name, bound in zip(facts.size_names, self.bounds(), strict=True):
            _check_fact(getattr(facts, name), bound, f"{where}.{name}")
        return SimpleNamespace(**{name: getattr(facts, name) for name in self._fact_names})

    def _check_facts_class(self, facts: Facts, where: str) -> None:
        if self.facts_class is None:
            raise InputError(where, self.expected, "facts of one", "Send the item itself.")
        if not isinstance(facts, self.facts_class):
            raise InputError(where, self.facts_class.__name__, type(facts).__name__)

    @cached_property
    def _fact_names(self) -> list[str]:
        declared: Any = self.facts_class
        return [field.name for field in dataclass_fields(declared)]

    def make_field(self, value: Any) -> Any:
        """Return a canonical item as a field: a tensor that may lie in the memory of the item.

        Only for an item type that `may_be_field`.
        """
        return value

    def find_field_shape(self, facts: Any) -> Sequence[int]:
        """Return the shape of the field that `make_field` makes of an item.

        Only for an item type that `may_be_field` and has no parts.

        Args:
            facts: the value of the root `item`.
        """
        shape: Sequence[int] = facts.shape
        return shape

    def texts(self, value: Any) -> Iterator[tuple[str, str]]:
        """Yield the texts in a canonical item, each with its path in the item.

        The path is ``.unit`` for a part of a record, ``[0]`` for an element of a list, and "" where
        the item itself is the text.
        """
        yield from ()

    def leaves(self) -> Iterator[ItemType]:
        """Yield the item types in this one that hold no others; itself, where it holds none."""
        yield self

    @property
    def num_sizes(self) -> int:
        return self.ndim

    def sizes(self, value: Any) -> tuple[int, ...]:
        """Return the sizes of a canonical item."""
        raise NotImplementedError

    def blank(self, *sizes: int) -> Any:
        """Return a canonical item of these sizes."""
        raise NotImplementedError

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> Any:
        """Return a canonical item with random values within the bounds.

        Args:
            sizes: its sizes, as `sizes` has them; each is brought within its bounds.
            generator: what the values are drawn from.
        """
        raise NotImplementedError

    def num_bytes(self, sizes: Sequence[int]) -> int:
        """Return the memory that an item of these sizes takes, in bytes."""
        raise NotImplementedError

    def check_bytes(self, sizes: Sequence[int]) -> None:
        """Refuse sizes of a largest item that takes too much memory, before anybody makes it.

        Raises:
            SpecError: names the sizes and the bytes.
        """
        # a size of 0 hides others that no array can have
        needed = self.num_bytes([max(size, 1) for size in sizes])
        if needed > self.most_bytes:
            where = f"{type(self).__name__}.largest"
            expected = f"an item of at most {self.most_bytes // GIB} GiB"
            got = f"{tuple(sizes)}, which takes {needed // GIB + 1} GiB"
            remedy = "State smaller sizes: binding makes the largest item."
            raise SpecError(where, expected, got, remedy)

    def bounds(self) -> list[Between]:
        """Return the least and the most of each size."""
        raise NotImplementedError

    def nearest(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes within the bounds that are nearest to some sizes."""
        nearest = []
        for size, bound in zip(sizes, self.bounds(), strict=True):
            nearest.append(min(max(size, bound.least), bound.most))
        return tuple(nearest)

    def candidates(self, fraction: float = 1.0, most: Sequence[float] = ()) -> list[Any]:
        """Return canonical items that include the one with the most encoder rows.

        Args:
            fraction: makes the items smaller by this factor, as far as the type allows.
            most: the most of each size, as far as the type allows; empty for the sizes of the spec.
        """
        items: list[Any] = []
        for sizes in self.largest:
            scaled = self.scale_sizes(sizes, fraction)
            if most:
                scaled = [int(min(size, limit)) for size, limit in zip(scaled, most, strict=True)]
            items.append(self.blank(*self.nearest(scaled)))
        return items

    def scale_sizes(self, sizes: Sequence[int], fraction: float) -> list[int]:
        """Return sizes that are smaller by a factor."""
        return [int(size * fraction) for size in sizes]

    def small(self) -> list[Any]:
        """Return small canonical items, in ascending order."""
        if self.small_sizes:
            return [self.blank(*sizes) for sizes in self.small_sizes]
        least = [bound.least for bound in self.bounds()]
        return [self.blank(*least)]

    def smallest(self) -> list[Any]:
        """Return the smallest item, where every spec accepts it; else none.

        Binding rehearses a spec on this item and on the candidates.
        """
        if self.small_sizes:
            return []
        return self.small()

    def within(self, sizes: Mapping[str, int], where: str) -> ItemType:
        """Return this bound item type with a largest item of at most some sizes.

        Args:
            sizes: by name, as in vLLM's `limit_mm_per_prompt`.
            where: names the modality in errors.

        Raises:
            InputError: sizes that belong to other kinds of items.
        """
        foreign_sizes = []
        for name, size in sizes.items():
            if name not in self.dummy_sizes:
                foreign_sizes.append(f"{name}={size}")
        if foreign_sizes:
            expected = " and ".join(("a count", *self.dummy_sizes))
            remedy = "State other sizes as largest in the spec."
            got = " and ".join(foreign_sizes)
            raise InputError(f"{where}, limit_mm_per_prompt", expected, got, remedy)
        limits = [sizes.get(name, math.inf) for name in self.dummy_sizes]
        largest = []
        for row in self.largest:
            limited = [min(size, limit) for size, limit in zip(row, limits, strict=False)]
            largest.append(tuple(limited))
        smaller: Any = self
        return replace(smaller, largest=tuple(largest))  # type: ignore[no-any-return]

    def for_function(self) -> ItemType:
        """Return this item type for items that a function of the spec processes."""
        return self

    @property
    def expected(self) -> str:
        """A short description of an item, for messages."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """Return the `shape` and the `dtype` of an item's array, as clients see them in JSON.

        A size that varies is [least, most].
        """
        return {"shape": None, "dtype": None}


def select_options(kind: ItemType, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `mm_processor_kwargs` that can concern the items of a type.

    The scopes of other media are left out. Only the returned options reach such an item, and its
    hash covers all of them: both call this function.
    """
    if not kind.kwargs_scope:
        return dict(kwargs)
    other_scopes = set(MEDIA_SCOPES) - {kind.kwargs_scope}
    return {name: value for name, value in kwargs.items() if name not in other_scopes}


def flatten_options(kind: ItemType, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `select_options` as one dict without scopes.

    Options in `common_kwargs` override options outside all scopes; options in the type's own scope
    override both.

    Raises:
        InputError: a scope that holds no options.
    """
    concerning = select_options(kind, kwargs)
    options = {name: value for name, value in concerning.items() if name not in SCOPES}
    for scope in ("common_kwargs", kind.kwargs_scope):
        of_scope = concerning.get(scope) or {}
        if not isinstance(of_scope, Mapping):
            raise InputError(f"mm_processor_kwargs[{scope!r}]", "a dict of options", repr(of_scope))
        options.update(of_scope)
    return options


def repeat_values(values: np.ndarray[Any, Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return an array of a shape that repeats values in their order."""
    return np.resize(values, tuple(shape))


def count_drawn_values(shape: Sequence[int]) -> int:
    """Return how many values are drawn for a random array of a shape."""
    return min(math.prod(shape), _MAX_DRAWN)


def _check_fact(size: object, bound: Between, where: str) -> None:
    """Refuse a size that no item has.

    Raises:
        InputError: it is no whole number, or out of bounds.
    """
    if type(size) is int and bound.least <= size <= bound.most:
        return
    sizes = f"in {bound}"
    if bound.most == math.inf:
        sizes = f">= {bound.least}"
    raise InputError(where, f"a whole number {sizes}", describe(size))

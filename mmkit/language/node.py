"""The parts of a declaration: frozen, compared by what they declare, printed as their source.

A parameter is written once, as a field of its class: what an author may write, and the one form in
which the part holds it: ``layout: Stated[LayoutLike, Layout] = stated(as_layout)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from .expr import Leaf

Written = TypeVar("Written", contravariant=True)
Held = TypeVar("Held", covariant=True)


class Stated(Generic[Written, Held]):
    """The type of a field that takes one type and holds another; see `stated`."""

    if TYPE_CHECKING:

        def __get__(self, owner: object, kind: type | None = None) -> Held: ...

        def __set__(self, owner: object, value: Written) -> None: ...


def stated(form: Callable[[Any], Any], **options: Any) -> Any:
    """A field whose value is brought into one form.

    Args:
        form: a function of what is written, or of the default, to what is held, which it leaves as
            it is. None stays None.
        options: those of `dataclasses.field`.
    """
    return field(metadata={"form": form}, **options)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field, stated))
class Node:
    """Base of the parts of a declaration. Every subclass is a frozen dataclass, compared and hashed
    by its fields, expressions included; its `repr` is its source.

    Attributes:
        _word: what declares such a part; empty for the name of its class.
        _is_named: whether its source names arguments that every such part has.
        _names: the names of its fields.
        _forms: what brings a field into its form.
    """

    _word: ClassVar[str] = ""
    _is_named: ClassVar[bool] = False
    _names: ClassVar[tuple[str, ...]] = ()
    _forms: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def __init_subclass__(cls, *, init: bool = True) -> None:
        known: Any = dataclass(frozen=True, repr=False, eq=False, init=init)(cls)
        own = dataclass_fields(known)
        cls._names = tuple(one.name for one in own)
        cls._forms = {one.name: one.metadata["form"] for one in own if one.metadata}

    def __post_init__(self) -> None:
        stated = ((name, getattr(self, name)) for name in self._forms)
        self._set(**{n: self._forms[n](value) for n, value in stated if value is not None})

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return same(self, other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(structure(self))

    def __repr__(self) -> str:
        return f"{self._word or type(self).__name__}({', '.join(self._stated())})"

    def _stated(self) -> Iterator[str]:
        """The fields that are not as by default, as arguments."""
        known: Any = dataclass_fields(self)  # type: ignore[arg-type]
        for one in sorted(known, key=lambda one: one.kw_only):
            value, make = getattr(self, one.name), one.default_factory
            default = one.default if make is MISSING else make()
            if default is MISSING and not one.kw_only and not self._is_named:
                yield source(value)
            elif default is MISSING or (one.repr and not same(value, default)):
                yield f"{one.name}={source(value)}"

    def _source(self) -> str:
        """The source where this part is an argument."""
        return repr(self)

    def _folded(self, scope: Any) -> Any:
        """See `fold`."""
        return self

    def _evaluated(self, scope: Any) -> Any:
        """See `evaluate_all`."""
        return self

    @cached_property
    def _leaves(self) -> frozenset[Leaf]:
        return frozenset().union(*map(leaves, parts(self)))


class Part(Node):
    """A part of a declaration that is bound to a config and a tokenizer."""

    def bind(self, scope: Any) -> Any:
        """This part with everything that depends on `cfg`, `proc` and `tok` alone evaluated."""
        kind: Any = type(self)
        bound = fold(stated := tuple(parts(self)), scope)
        return self if bound is stated else kind(**dict(zip(self._names, bound, strict=True)))

    def leaves(self) -> frozenset[Leaf]:
        """Everything that this part depends on; see `mmkit.language.node.leaves`."""
        return self._leaves

    def _folded(self, scope: Any) -> Any:
        return self.bind(scope)

    def _evaluated(self, scope: Any) -> Any:
        kind: Any = type(self)
        return kind(*[evaluate_all(part, scope) for part in parts(self)])


def source(value: Any) -> str:
    """The source of an argument; of a function, its name."""
    if isinstance(value, Node):
        return value._source()
    return getattr(value, "__qualname__", repr(value)) if callable(value) else repr(value)


def parts(value: Any) -> Iterable[Any]:
    """The parts of a part of a spec: the fields of a declaration, the elements of a container."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Node):
        return [getattr(value, name) for name in value._names]
    return value.values() if isinstance(value, Mapping) else ()


def structure(part: Any) -> Any:
    """A part of a spec as plain tuples, which are equal, with equal hashes, for equal
    declarations."""
    if isinstance(part, Mapping):
        return frozenset((name, structure(value)) for name, value in part.items())
    if isinstance(part, (Node, list, tuple)):
        kind = (type(part),) if isinstance(part, Node) else ()
        return (*kind, *map(structure, parts(part)))
    return (slice, part.start, part.stop, part.step) if isinstance(part, slice) else part


def same(a: Any, b: Any) -> bool:
    """Whether two parts of a spec are equal declarations; ``==`` between expressions records a
    comparison of their values."""
    return bool(structure(a) == structure(b))


def leaves(value: Any) -> frozenset[Leaf]:
    """Everything that a value or a part of a declaration depends on, as the longest chains:
    ``leaves(cfg.a.b + item.width * 2)`` are ``cfg.a.b`` and ``item.width``.
    """
    if isinstance(value, Node):
        return value._leaves
    return frozenset().union(*map(leaves, inner)) if (inner := parts(value)) else frozenset()


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A function applied to a value; to a container, its elements, however deep. A tuple whose
    elements stay is returned as it is."""
    if isinstance(value, (list, tuple)):
        results = [mapped(function, part) for part in value]
        is_same = isinstance(value, tuple) and all(map(is_, results, value))
        return value if is_same else type(value)(results)
    # most values are of types that are told without asking an abstract class
    if not isinstance(value, (Node, str, int)) and isinstance(value, Mapping):
        return {name: mapped(function, part) for name, part in value.items()}
    return function(value)


def fold(value: Any, scope: Any) -> Any:
    """Replace every part that depends on `cfg`, `proc`, `kwargs` and `tok` alone by its value.

    Raises:
        SpecError: a config or processor attribute is missing.
    """
    return mapped(lambda part: part._folded(scope) if isinstance(part, Node) else part, value)


def evaluate_all(value: Any, scope: Any) -> Any:
    """The value of every expression in a part or a container.

    Raises:
        SpecError: as for `mmkit.language.expr.evaluate`.
    """
    return mapped(lambda part: part._evaluated(scope) if isinstance(part, Node) else part, value)

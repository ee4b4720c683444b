"""The parts of a declaration: frozen, compared by what they declare, printed as their source.

A parameter is declared once, as a field of its class. Where an author may write something else than
the part holds, the type is `Converted` and a `parameter` has a converter: ``layout:
Converted[LayoutLike, Layout] = parameter(as_layout)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from dataclasses import Field as DataclassField
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, dataclass_transform

Accepted = TypeVar("Accepted", contravariant=True)
Stored = TypeVar("Stored", covariant=True)


class Converted(Generic[Accepted, Stored]):
    """The type of a parameter that a part holds in another type than an author writes.

    An author writes an `Accepted`, and the part holds a `Stored`.

    Type checkers take the type of an argument from `__set__`, and that of an attribute from
    `__get__`. Signatures and `help()` show the accepted type; see `Node.__init_subclass__`.
    """

    if TYPE_CHECKING:

        def __get__(self, owner: object, kind: type | None = None) -> Stored: ...

        def __set__(self, owner: object, value: Accepted) -> None: ...


def parameter(converter: Callable[[Any], Any], **options: Any) -> Any:
    """Declare a parameter whose value is converted when the part is made.

    Args:
        converter: an idempotent function of what an author wrote, or of the default; not called for
            None.
        options: the options of `dataclasses.field`.
    """
    return field(metadata={"converter": converter}, **options)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field, parameter))
class Node:
    """Base of the parts of a declaration.

    Every subclass is a frozen dataclass, compared and hashed by its fields, expressions included;
    its `repr` is its source.

    Attributes:
        _word: the word that declares such a part; empty for the name of its class.
        _is_named: whether its source names arguments that every such part has.
        _names: the names of its fields.
        _converters: the converters of those fields that have one.
    """

    _word: ClassVar[str] = ""
    _is_named: ClassVar[bool] = False
    _names: ClassVar[tuple[str, ...]] = ()
    _converters: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def __init_subclass__(cls, *, init: bool = True) -> None:
        # the dataclass copies its annotations into the signature of __init__
        annotations = {}
        for name, annotation in cls.__annotations__.items():
            annotations[name] = _find_accepted_type(annotation)
        cls.__annotations__ = annotations
        dataclass(frozen=True, repr=False, eq=False, init=init)(cls)

        names: list[str] = []
        converters: dict[str, Callable[[Any], Any]] = {}
        for declared in _list_fields(cls):
            names.append(declared.name)
            if "converter" in declared.metadata:
                converters[declared.name] = declared.metadata["converter"]
        cls._names = tuple(names)
        cls._converters = converters

    def __post_init__(self) -> None:
        for name, convert in self._converters.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, convert(value))

    def _set(self, **values: Any) -> None:
        """Set fields while the part is made; it is frozen from then on."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return is_equal_declaration(self, other)

    def __hash__(self) -> int:
        return hash(build_structure(self))

    def __repr__(self) -> str:
        word = self._word or type(self).__name__
        return f"{word}({', '.join(self._write_arguments())})"

    def _write_arguments(self) -> Iterator[str]:
        """Write the fields that differ from their defaults as arguments, keywords last."""
        positional: list[str] = []
        keywords: list[str] = []
        for declared in _list_fields(self):
            value = getattr(self, declared.name)
            default = declared.default
            if declared.default_factory is not MISSING:
                default = declared.default_factory()
            is_required = default is MISSING
            if is_required and not declared.kw_only and not self._is_named:
                positional.append(write_source(value))
                continue
            is_shown = declared.repr and not is_equal_declaration(value, default)
            if not is_required and not is_shown:
                continue
            argument = f"{declared.name}={write_source(value)}"
            if declared.kw_only:
                keywords.append(argument)
            else:
                positional.append(argument)
        yield from positional
        yield from keywords

    def _write_source(self) -> str:
        """Write the source where this part is an argument."""
        return repr(self)

    def _fold(self, scope: Any) -> Any:
        """Return what replaces this part in `fold`."""
        return self

    def _evaluate(self, scope: Any) -> Any:
        """Return what replaces this part in `evaluate_all`."""
        return self

    @cached_property
    def _dependencies(self) -> frozenset[Dependency]:
        return dependencies(list_parts(self))


def _find_accepted_type(annotation: Any) -> Any:
    """Return the accepted type of an annotation `Converted`; any other annotation as it is."""
    # all modules of declarations postpone their annotations: these are texts
    if not isinstance(annotation, str) or not annotation.startswith("Converted["):
        return annotation
    arguments = annotation.removeprefix("Converted[").removesuffix("]")
    depth = 0
    for position, character in enumerate(arguments):
        if character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        elif character == "," and depth == 0:
            return arguments[:position]
    raise TypeError(f"{annotation} has one type, expected two")


def _list_fields(part: Any) -> tuple[DataclassField[Any], ...]:
    return dataclass_fields(part)


class Part(Node):
    """A part of a declaration that is bound to a config and a tokenizer."""

    def bind(self, scope: Any) -> Any:
        """Return this part with everything evaluated that is static.

        See `mmkit.language.operations.STATIC`.

        A part with nothing to evaluate is returned itself.
        """
        values = tuple(list_parts(self))
        bound = fold(values, scope)
        if bound is values:  # fold returns a tuple whose elements stay as it is
            return self
        return self._rebuild(bound)

    def dependencies(self) -> frozenset[Dependency]:
        """Return everything that this part depends on; see `mmkit.language.node.dependencies`."""
        return self._dependencies

    def _fold(self, scope: Any) -> Any:
        return self.bind(scope)

    def _evaluate(self, scope: Any) -> Any:
        values = [evaluate_all(value, scope) for value in list_parts(self)]
        return self._rebuild(values)

    def _rebuild(self, values: Iterable[Any]) -> Any:
        """Return a part of the same class with other values of its fields."""
        kind: Any = type(self)
        return kind(**dict(zip(self._names, values, strict=True)))


def write_source(value: Any) -> str:
    """Write the source of an argument; of a function, its name."""
    if isinstance(value, Node):
        return value._write_source()
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    return repr(value)


def list_parts(value: Any) -> Iterable[Any]:
    """List the parts of a value: the fields of a declaration, the elements of a container."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Node):
        return [getattr(value, name) for name in value._names]
    if isinstance(value, Mapping):
        return value.values()
    return ()


def build_structure(part: Any) -> Any:
    """Build plain tuples from a part of a spec.

    Tuples of equal declarations are equal, and have equal hashes.
    """
    if isinstance(part, Mapping):
        return frozenset((name, build_structure(value)) for name, value in part.items())
    if isinstance(part, (Node, list, tuple)):
        structures = [build_structure(inner) for inner in list_parts(part)]
        if isinstance(part, Node):
            structures.insert(0, type(part))
        return tuple(structures)
    if isinstance(part, slice):
        return (slice, part.start, part.stop, part.step)
    return part


def is_equal_declaration(a: Any, b: Any) -> bool:
    """Return whether two parts of a spec declare the same.

    ``==`` between expressions records a comparison of their values.
    """
    return bool(build_structure(a) == build_structure(b))


LOOP = "loop"
"""The root of a `Dependency` on the variable of an `each`."""

FUNCTION = "function"
"""The root of a `Dependency` on what a plain function reads, which may be anything."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """What an expression reads: a chain of attributes and constant indices, or a plain function.

    ``fields.grid.shape[0]`` is such a chain.

    Attributes:
        root: the start of the chain: the name of a root, `LOOP` or `FUNCTION`.
        keys: the attributes and indices, in order; after `LOOP` the `LoopVariable` comes first, and
            after `FUNCTION` there is the function only.
        expr: the expression.
    """

    root: str
    keys: tuple[Any, ...]
    expr: Node = field(compare=False)

    def __repr__(self) -> str:
        return repr(self.expr)


def dependencies(value: Any) -> frozenset[Dependency]:
    """Return everything that a value or a part of a declaration depends on.

    These are the longest chains: ``dependencies(cfg.a.b + item.width * 2)`` are ``cfg.a.b`` and
    ``item.width``.
    """
    if isinstance(value, Node):
        return value._dependencies
    result: frozenset[Dependency] = frozenset()
    for part in list_parts(value):
        result |= dependencies(part)
    return result


def map_values(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value, or to the elements of a container, however deep.

    A tuple whose elements stay the same objects is returned itself.
    """
    if isinstance(value, (list, tuple)):
        results = [map_values(function, element) for element in value]
        if isinstance(value, tuple) and _are_identical(results, value):
            return value
        return type(value)(results)
    # asking for Mapping, an abstract class, is slow: most values are known not to be one
    if not isinstance(value, (Node, str, int)) and isinstance(value, Mapping):
        return {name: map_values(function, element) for name, element in value.items()}
    return function(value)


def _are_identical(results: list[Any], values: tuple[Any, ...]) -> bool:
    for result, value in zip(results, values, strict=True):
        if result is not value:
            return False
    return True


def fold(value: Any, scope: Any) -> Any:
    """Replace every part that is static by its value; see `mmkit.language.operations.STATIC`.

    Raises:
        SpecError: a config or processor attribute is missing.
    """

    def fold_value(part: Any) -> Any:
        if isinstance(part, Node):
            return part._fold(scope)
        return part

    return map_values(fold_value, value)


def evaluate_all(value: Any, scope: Any) -> Any:
    """Return the value of every expression in a part or a container.

    Raises:
        SpecError: as for `mmkit.language.expr.evaluate`.
    """

    def evaluate_value(part: Any) -> Any:
        if isinstance(part, Node):
            return part._evaluate(scope)
        return part

    return map_values(evaluate_value, value)

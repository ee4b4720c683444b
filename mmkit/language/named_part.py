"""What modalities, outputs and specs have in common: a name, checks, and copies with changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ..errors import SpecError
from .node import Node, dependencies


class NamedPart(Node):
    """Base of a modality, an output and a spec."""

    name: str

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return this declaration with some of its arguments changed, checked like a new one.

        Raises:
            SpecError: as for a new one.
        """
        arguments = {name: getattr(self, name) for name in self._names}
        if update is not None:
            arguments.update(update)
        make: Any = type(self)
        name = arguments.pop("name")
        modalities = arguments.pop("modalities", ())  # only a spec has them
        copy: Self = make(name, *modalities, **arguments)
        return copy


def require(condition: object, where: str, expected: str, got: str, remedy: str = "") -> None:
    """Refuse a part of a declaration unless a condition holds.

    Raises:
        SpecError: the condition is false.
    """
    if not condition:
        raise SpecError(where, expected, got, remedy)


def require_known_when_bound(part: Any, where: str) -> None:
    """Refuse a part of a declaration that reads more than `cfg` and `tok`.

    Raises:
        SpecError: names what it reads.
    """
    for dependency in dependencies(part):
        is_known = dependency.root in ("cfg", "tok", "function")
        require(is_known, where, "values of cfg and tok", repr(dependency))


def check_name(name: object, where: str) -> None:
    """Refuse a name that is no Python identifier.

    Raises:
        SpecError: it is none.
    """
    is_name = isinstance(name, str) and name.isidentifier()
    require(is_name, where, "a name that is a Python identifier", repr(name))

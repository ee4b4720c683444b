"""What differs between two documents, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..language.node import is_equal_declaration


class Difference(NamedTuple):
    """A part that two documents have in different forms, or that one of them lacks.

    Attributes:
        path: where it stands: ``modalities.image.layout``.
        first: what the first document has there; None for nothing.
        second: what the second one has.
    """

    path: str
    first: Any
    second: Any


def find_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between two documents, in the order of the first.

    Modalities and outputs of one name are compared with each other, wherever they stand.

    Args:
        first: as `to_document` returns it.
        second: likewise.
    """
    return list(_compare("", first, second))


def _compare(path: str, first: Any, second: Any) -> Iterator[Difference]:
    first = _name_elements(first)
    second = _name_elements(second)
    if isinstance(first, Mapping) and isinstance(second, Mapping) and _are_alike(first, second):
        for name in list(first) + [name for name in second if name not in first]:
            inner_path = f"{path}.{name}" if path else name
            yield from _compare(inner_path, first.get(name), second.get(name))
    elif not is_equal_declaration(first, second):
        yield Difference(path, first, second)


def _are_alike(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two objects are compared entry by entry: they have one type, or none."""
    return bool(first.get("type") == second.get("type"))


def _name_elements(value: Any) -> Any:
    """Return a list of modalities or outputs as an object, by their names."""
    if not isinstance(value, list) or not value:
        return value
    elements: dict[str, Any] = {}
    for element in value:
        if not isinstance(element, Mapping) or "name" not in element:
            return value
        elements[element["name"]] = element
    return elements

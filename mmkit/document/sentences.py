"""What pydantic refuses, in one sentence of mmkit's: where, expected, got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..errors import SpecError
from .notations import describe_json

_PREFIX = "Input should be "


def explain(error: ValidationError, contents: Any, where: str) -> SpecError:
    """Return the first error of pydantic as an error of mmkit.

    Args:
        error: pydantic's.
        contents: what was validated.
        where: names the document.
    """
    details = error.errors()[0]
    path = _write_path(details["loc"], contents)
    if path:
        where = f"{where}, {path}"
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        cause.prepend(where)
        return cause
    expected, got = _describe(details)
    return SpecError(where, expected, got)


def _write_path(location: Sequence[int | str], contents: Any) -> str:
    """Write the path of an error: ``modalities[0].item``.

    pydantic names which alternative of a union was tried; those names are no part of the document.
    """
    path = ""
    value = contents
    last = len(location) - 1
    for position, key in enumerate(location):
        if isinstance(key, int):
            path += f"[{key}]"
            value = value[key] if isinstance(value, Sequence) else None
            continue
        is_entry = isinstance(value, Mapping) and key in value
        if not is_entry and position != last:
            continue
        path += f".{key}" if path else key
        if is_entry:
            value = value[key]
    return path


def _describe(details: ErrorDetails) -> tuple[str, str]:
    """Return what was expected, and what came."""
    kind = details["type"]
    context = details.get("ctx", {})
    got = describe_json(details["input"])
    if kind == "missing":
        return "a value", "none"
    if kind == "extra_forbidden":
        return "a name that this part has", repr(details["loc"][-1])
    if kind == "literal_error":
        return str(context["expected"]), got
    if kind == "union_tag_invalid":
        return f"a type among {context['expected_tags']}", repr(context["tag"])
    if kind == "union_tag_not_found":
        return "an object with a type, or a value of the form's", got
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "an object", got
    if kind == "string_pattern_mismatch":
        return f"a text of the form {context['pattern']}", got
    message = details["msg"]
    expected = message.removeprefix(_PREFIX)
    return expected[0].lower() + expected[1:], got

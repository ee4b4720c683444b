"""Decoding of JSON, with one sentence about the first mistake.

msgspec stops at the first mistake, and builds no value beyond the expected ones, so a refusal costs
little more than what was sent. `decode_json` turns its errors into `InputError`, with the path of
the mistake in the request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Raw, Struct, field

from ..errors import InputError

SAMPLING_FIELD = "sampling_params"
"""The field of a request for parameters of sampling. Clients often put these beside it."""

MAX_QUOTED_CHARS = 40
"""Characters of a bad value, or of a bad name, that an error shows."""

MAX_PROBLEM_CHARS = 500
"""Characters at either end of a message of msgspec that are parsed. It may quote all that was
sent."""

MAX_SEARCHED_BYTES = 2**18
"""Bytes of malformed JSON in which the path of the mistake is looked for."""

_KNOWN_FIELD = "a field that there is"
"""What an error expected in place of an unknown field."""

_NOT_A_NUMBER = re.compile(rb"-?(NaN|Infinity)")
_STRING_OR_SIGN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]')

get_decoder = cache(msgspec.json.Decoder)
"""Return the decoder of JSON of one type. Making one is slow, so each is kept."""


# -- values ----------------------------------------------------------------------------------------


class FieldNames(NamedTuple):
    """The fields that a JSON object may have, for the error about another one.

    Attributes:
        names: in the order in which the error has them; none if they cannot be listed.
        noun: what the fields are, as a plural: "modalities" if each is the name of one.
    """

    names: Sequence[str]
    noun: str = "fields"


def decode_json(kind: Any, raw: Any, where: str = "", field_names: FieldNames | None = None) -> Any:
    """Return the value of a type that JSON holds.

    Args:
        kind: the type.
        raw: bytes, a text or `Raw`.
        where: the path of the value in errors; empty for the body.
        field_names: the fields that the value may have; None for the fields of the type, or of
            the kind of message.

    Raises:
        InputError: names the path of the first thing that is wrong.
    """
    try:
        return get_decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        raise _make_type_error(error, kind, raw, where, field_names) from None
    except RecursionError:
        raise make_depth_error(where) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _make_syntax_error(raw, where, str(error)) from None


def decode_fields(
    raw: Any,
    types: Mapping[str, Any],
    where: str,
    *,
    nullable: bool = True,
    noun: str = "fields",
) -> dict[str, Any]:
    """Return the fields that a JSON object has, in the order of `types`.

    Args:
        raw: its JSON; null is an object without fields.
        types: the types of the fields that it may have, by name.
        where: the path of the object in errors.
        nullable: whether null is accepted.
        noun: what the fields are, for the error about another one.

    Raises:
        InputError: it is no such object, or has another field.
    """
    struct = _make_struct(tuple(types.items()))
    kind = struct | None if nullable else struct
    value = decode_json(kind, raw, where, FieldNames(tuple(types), noun))
    if value is None:
        return {}
    fields = {}
    for name, field_value in zip(types, msgspec.structs.astuple(value), strict=True):
        if field_value is not UNSET:
            fields[name] = field_value
    return fields


@cache
def _make_struct(types: tuple[tuple[str, Any], ...]) -> Any:
    """Return a struct with these fields, of which none is required.

    A field may have any name on the wire; Python's name of it is only its number.
    """
    fields = []
    for number, (name, kind) in enumerate(types):
        fields.append((f"field_{number}", kind, field(name=name, default=UNSET)))
    return msgspec.defstruct("Named", fields, forbid_unknown_fields=True)


def starts_with(raw: Raw, sign: bytes) -> bool:
    """Tell whether JSON starts with a sign: ``{`` of an object, ``[`` of a list, a quote."""
    return bytes(memoryview(raw)[:1]) == sign


def quote(value: str) -> str:
    """Return a text as errors show it: in quotes, and cut if it is long."""
    if len(value) <= MAX_QUOTED_CHARS:
        return repr(value)
    return f"'{repr(value[:MAX_QUOTED_CHARS])[1:-1]}...'"


# -- a value of another type -----------------------------------------------------------------------


class Mistake(NamedTuple):
    """What msgspec found in place of a value.

    Attributes:
        path: where it is, below the value that was decoded, as ``items[0].name``.
        expected: what it should be.
        got: what it is.
    """

    path: str
    expected: str
    got: str


def parse_mistake(error: msgspec.ValidationError) -> Mistake:
    """Return the mistake that a message of msgspec is about.

    Its messages have one of these forms, in which ``- at ...`` may be missing::

        Object contains unknown field `x` - at `$.items`
        Object missing required field `x` - at `$.items`
        Expected `int`, got `str` - at `$.items[0]`
        Any other sentence - at `$.items[0]`
    """
    message = str(error)
    tail_start = max(MAX_PROBLEM_CHARS, len(message) - MAX_PROBLEM_CHARS)
    message = message[:MAX_PROBLEM_CHARS] + message[tail_start:]
    text, _, path = message.replace("`key` in ", "").partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    problem, has_name, name = text.removesuffix("`").partition(" field `")
    if has_name:
        path = f"{path}.{quote(name)[1:-1]}".lstrip(".")
        if problem.endswith("unknown"):
            return Mistake(path, _KNOWN_FIELD, quote(name))
        return Mistake(path, "a value", "none")
    if text == "Number out of range":
        return Mistake(path, "a finite number", "one out of the range of floats")
    if not text.startswith("Expected "):
        problem = text.removeprefix("Invalid value ")
        return Mistake(path, "a valid value", problem[:1].lower() + problem[1:])
    expected, _, got = text.removeprefix("Expected ").replace("`", "").partition(", got ")
    return Mistake(path, expected, got or "another")


def _make_type_error(
    error: msgspec.ValidationError,
    kind: Any,
    raw: Any,
    where: str,
    field_names: FieldNames | None,
) -> InputError:
    """Return the refusal of a value of another type.

    For the arguments, see `decode_json`.
    """
    path, expected, got = parse_mistake(error)
    path = path.removeprefix("[...]")  # a value of a mapping, of which msgspec omits the key
    where = _join_path(where, path)
    if path == "type" and _is_tagged_union(kind):
        tags = [member.__struct_config__.tag for member in get_args(kind)]
        expected = f"one of {', '.join(tags)}"
    if expected != _KNOWN_FIELD:
        return InputError(where, expected, got)
    if field_names is None:
        field_names = FieldNames(_find_field_names(kind, path, raw))
    if field_names.names:
        expected = f"{field_names.noun} among {list(field_names.names)}"
    remedy = ""
    if SAMPLING_FIELD in field_names.names:
        remedy = f"If {path} is a parameter of sampling, put it into {SAMPLING_FIELD}."
    return InputError(where, expected, got, remedy)


def _join_path(where: str, path: str) -> str:
    """Return the path of a value in a request; ``body`` for all of it.

    Args:
        where: the path of an object or a list; empty for the body.
        path: the path of a value below it; empty for itself.
    """
    if path and not path.startswith("["):
        where = f"{where}."
    return (where + path).lstrip(".") or "body"


def _find_field_names(kind: Any, path: str, raw: Any) -> Sequence[str]:
    """Return the fields of the object with an unknown one, if that object is a struct.

    Args:
        kind: the type of the JSON.
        path: of the unknown field.
        raw: the JSON, whose end may be malformed.
    """
    if _is_tagged_union(kind):
        kind = _find_message_type(kind, raw)
    objects = path.removesuffix("...").split(".")[:-1]  # a name that is cut ends with dots
    for name in objects:
        if not _is_struct(kind):
            return ()
        kind = get_type_hints(kind).get(name)
        for member in get_args(kind):  # of a field that may be missing, the struct
            if _is_struct(member):
                kind = member
                break
    if not _is_struct(kind):
        return ()
    names: Sequence[str] = kind.__struct_encode_fields__
    return names


def _find_message_type(union: Any, raw: Any) -> Any:
    """Return the type of a message by its tag; None where that is unknown."""
    try:
        tag = msgspec.json.decode(raw)["type"]
    except msgspec.MsgspecError:
        return None
    for kind in get_args(union):
        if kind.__struct_config__.tag == tag:
            return kind
    return None


def _is_tagged_union(kind: Any) -> bool:
    members = get_args(kind)
    return bool(members) and all(
        _is_struct(member) and member.__struct_config__.tag for member in members
    )


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


# -- malformed JSON --------------------------------------------------------------------------------


def make_depth_error(where: str = "") -> InputError:
    """Return the refusal of JSON that is nested deeper than it can be decoded or encoded."""
    return InputError(where or "body", "JSON nested at most some hundred deep", "deeper")


def _make_syntax_error(raw: Any, where: str, message: str) -> InputError:
    """Return the refusal of malformed JSON.

    NaN and Infinity, which other encoders write, are named with the path of the number.

    Args:
        raw: bytes, a text or `Raw`.
        where: its path in errors; empty for the body.
        message: msgspec's.
    """
    message = message.removeprefix("JSON is malformed: ").removesuffix(")")
    problem, _, position = message.partition(" (byte ")
    problem = problem[:1].lower() + problem[1:]
    if not position:
        return InputError(where or "body", "JSON", f"invalid JSON: {problem}")
    byte = int(position)
    text = raw.encode() if isinstance(raw, str) else bytes(raw)
    start = byte
    if text[byte - 1 : byte] == b"-":
        start -= 1
    number = _NOT_A_NUMBER.match(text, start)
    if number is None:
        return InputError(where or "body", "JSON", f"invalid JSON at byte {byte}: {problem}")
    path = f"byte {start}"
    if start <= MAX_SEARCHED_BYTES:
        path = _find_path_at(text, start)
    remedy = "Send finite numbers; a gap in the data needs a mask, or a number that stands for it."
    got = f"{number[0].decode()}, which JSON does not have"
    return InputError(_join_path(where, path), "a number", got, remedy)


def _find_path_at(text: bytes, end: int) -> str:
    """Return the path of the value that begins at a byte of JSON, as ``items.series[0][3]``.

    Each open list is an index, and each open object the key of its current value.
    """
    path: list[int | str] = []
    last_string = ""
    for match in _STRING_OR_SIGN.finditer(text, 0, end):
        sign = match[0]
        if sign == b"[":
            path.append(0)
        elif sign == b"{":
            path.append("")
        elif sign in (b"]", b"}"):
            path.pop()
        elif sign == b":":
            path[-1] = last_string
        elif sign == b"," and path and isinstance(path[-1], int):
            path[-1] += 1
        elif sign[:1] == b'"':
            last_string = sign[1:-1].decode(errors="replace")
    steps = ""
    for step in path:
        steps += f"[{step}]" if isinstance(step, int) else f".{step}"
    return steps.removeprefix(".")

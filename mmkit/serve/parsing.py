"""JSON as messages and items, and errors in it as one sentence.

msgspec decodes. It stops at the first error, and builds no values beyond the expected ones, so the
cost of a refusal is bounded by the size of the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from ..errors import InputError

M = TypeVar("M", bound=Struct)

MEDIA = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
"""The media parts of chat messages, and what they are."""

FORMS = (
    'nested lists of numbers, {"data", "dtype", "shape"}, {"safetensors"}, or one of '
    + ", ".join(f'{{"{name}"}}' for name in MEDIA)
)

DEEPEST = 32
"""Lists of numbers are nested so deep at most."""

_SHOWN = 40
"""Characters of a bad value, or of a bad name, that an error shows."""


class UnknownField(InputError):
    """An object with a field that it may not have.

    Attributes:
        object: the path of the object; empty for the body.
        name: the name of the field, shortened.
    """

    def __init__(self, path: str, name: str) -> None:
        where = f"{path}.{name}" if path else name
        remedy = "The server's /docs list the fields."
        super().__init__(where, "no field of that name", "one", remedy)
        self.object, self.name = path, name


def parse(model: type[M], raw: bytes | bytearray | str) -> M:
    """A message from its JSON.

    Raises:
        InputError: names the path of the first thing that is wrong.
    """
    message: M = decoded(decoder(model), raw, lambda field: _written(model, raw, field))
    return message


def schema(model: type[Struct]) -> dict[str, Any]:
    """The JSON schema of a message, in one piece: a reference would be one into another
    document."""
    _, parts = msgspec.json.schema_components([model])
    whole: dict[str, Any] = _whole(parts[model.__name__], parts)
    return whole


def _whole(described: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(described, list):
        return [_whole(one, parts) for one in described]
    if not isinstance(described, dict):
        return described
    if "$ref" in described:
        return _whole(parts[described["$ref"].rpartition("/")[2]], parts)
    return {k: _whole(v, parts) for k, v in described.items() if k != "discriminator"}


@cache
def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of JSON of one type."""
    return msgspec.json.Decoder(kind)


def decoded(of: msgspec.json.Decoder[Any], raw: Any, written: Any = None, where: str = "") -> Any:
    """The value that a decoder makes of JSON.

    Args:
        of: the decoder.
        raw: bytes, a text or `Raw`.
        written: a function that returns the source of a field of the outermost object, for errors
            that show it.
        where: names the value in errors; empty for the body.

    Raises:
        InputError: names the path of the first thing that is wrong.
    """
    try:
        return of.decode(raw)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), where, written) from None
    except RecursionError:
        expected = "JSON nested at most some hundred deep"
        raise InputError(where or "body", expected, "deeper") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        got = str(error).removeprefix("JSON is malformed: ")
        got = got.replace("Input data was truncated", "one that ends too soon")
        raise InputError(where or "body", "JSON", got) from None


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "bytes": "base64 text",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
"""msgspec's names of JSON types, in words."""

_UNIONS = {
    "`bool | int | float | object | array | null`": FORMS,
    "`bool | int | float | array`": FORMS,
    "`bool | int | float | str | object | array | null`": f"a text, {FORMS}",
    "`bool | int | float`": f"lists nested at most {DEEPEST} deep",
}
"""msgspec's names of the types of items, in words."""


def _refusal(message: str, root: str, written: Any) -> InputError:
    """One sentence for an error of msgspec."""
    message, of_key, rest = message.partition(" - at `key` in `$")
    message = f"{message} - at `${rest}" if of_key else message
    text, at, place = message.rpartition(" - at `$")
    if not at:
        text, place = message, ""
    here = (root + place.rstrip("`")).lstrip(".")
    named = re.match(r"Object (missing required|contains unknown) field `(.*)`", text, re.DOTALL)
    if named:
        name = named[2] if len(named[2]) <= _SHOWN else f"{named[2][:_SHOWN]}..."
        name = name if name.isprintable() else repr(name)[1:-1]  # one line, whatever it holds
        if named[1].startswith("contains"):
            return UnknownField(here, name)
        return InputError(f"{here}.{name}" if here else name, "a value", "none")
    if text.startswith("Invalid base64"):
        return InputError(here, "base64 text", "another one")
    if value := re.fullmatch(r"Invalid (?:enum )?value '(.*)'", text, re.DOTALL):
        remedy = "The server's /docs list them."
        return InputError(here, "one of its values", shown(value[1]), remedy)
    if text == "Number out of range":
        text = "Expected `float` within the range of 64 bits, got one beyond it"
    expected, _, got = text.removeprefix("Expected ").partition(", got ")
    kind = "a number with a point" if got == "`float`" else _in_words(got)
    bad = written(here) if written is not None and re.fullmatch(r"\.\w+`", place) else ""
    expected = _in_words(expected) + (" as each key" if of_key else "")
    return InputError(here or "body", expected, bad or kind or "another one")


def _in_words(text: str) -> str:
    """msgspec's types in words: `str | array | null` is a text, a list or null."""
    if text in _UNIONS:
        return _UNIONS[text]
    *before, last = re.sub(r"`([^`]*)`(.*)", r"\1\2", text).split(" | ")
    words = [_WORDS.get(name, name) for name in before]
    kind, _, rest = last.partition(" ")
    last = f"{_WORDS.get(kind, kind)} {rest}".rstrip()
    return f"{', '.join(words)} or {last}" if words else last


@cache
def _as_written(model: type[Struct]) -> Any:
    fields = [(name, Raw, msgspec.field(default=UNSET)) for name in model.__struct_fields__]
    return msgspec.json.Decoder(msgspec.defstruct(model.__name__, fields))


def _written(model: type[Struct], raw: Any, field: str) -> str:
    """The source of a number or a text; empty for any other value."""
    try:
        value = getattr(_as_written(model).decode(raw), field)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # more is wrong, further on
        return ""
    start = bytes(memoryview(value)[: _SHOWN + 1]).decode(errors="replace")
    if start.startswith(("[", "{")):
        return ""
    return start if len(start) <= _SHOWN else f"{start[:_SHOWN]}..."


def shown(value: str) -> str:
    """A text in the form that errors show."""
    return repr(value) if len(value) <= _SHOWN else f"a text like {value[:_SHOWN]!r}..."

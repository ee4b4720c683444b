"""The limits of a request, and the check of the size of JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, Struct

from ..errors import InputError, MmkitError
from .decoding import decode_json, parse_mistake

PositiveInt = Annotated[int, Meta(ge=1)]

VARIABLE_PREFIX = "MMKIT_SERVE_"
"""How the environment variables of `Limits` begin."""

CHUNK_BYTES = 2**16
"""Bytes of a body in which values are counted at once."""


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a request; the variable of `body_bytes` is MMKIT_SERVE_BODY_BYTES, and so on.

    Attributes:
        body_bytes: bytes of a request body or a session message.
        listed: values in the JSON of a request or a session message that are written out, prompt
            ids included. Each costs tens of bytes of memory, so this limit is lower than
            `elements`. A text is one value, base64 too.
        elements: numbers in the items of one request.
        items: items of one request, all modalities together; a spec's own limits hold too.
        pixels: pixels of the images and video frames of one request, before they are decoded.
        constraint: bytes in JSON of what a text must be (structured outputs, a response format,
            tools that must be called). The engine compiles it, and other requests wait for that.
    """

    body_bytes: PositiveInt = 64 * 2**20
    listed: PositiveInt = 2**20
    elements: PositiveInt = 2**24
    items: PositiveInt = 4096
    pixels: PositiveInt = 2**25
    constraint: PositiveInt = 2**14

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the limits that environment variables set.

        Raises:
            MmkitError: a value is no number, or out of range.
        """
        values = {}
        for name in cls.__struct_fields__:
            text = environment.get(_name_variable(name), "").strip()
            if text:
                values[name] = text
        try:
            return msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            mistake = parse_mistake(error)
            name = mistake.path
            variable = _name_variable(name)
            raise MmkitError(variable, mistake.expected, repr(values[name])) from None

    def make_error(self, where: str, name: str, unit: str) -> TooLarge:
        """Return the refusal of a request beyond a limit.

        Args:
            where: the path of what is too large.
            name: of the limit.
            unit: what the limit counts.
        """
        remedy = f"Send less at once, or raise {_name_variable(name)} on the server."
        return TooLarge(where, f"at most {getattr(self, name)} {unit}", "more", remedy)


def _name_variable(limit: str) -> str:
    """Return the environment variable of a limit."""
    return VARIABLE_PREFIX + limit.upper()


class TooLarge(InputError):
    """A request beyond a limit of the server."""


# -- the size of JSON -----------------------------------------------------------------------------


def parse_message(kind: Any, raw: bytes | bytearray, where: str, limits: Limits) -> Any:
    """Return a body or a message of some type, after a check of its size.

    Raises:
        InputError: it is malformed.
        TooLarge: it is beyond a limit; nothing is built of it.
    """
    check_size(raw, where, limits)
    return decode_json(kind, raw)


def check_size(raw: bytes | bytearray | memoryview, where: str, limits: Limits) -> None:
    """Refuse the JSON of a body or a message that is beyond a limit.

    Raises:
        TooLarge: it has too many bytes, or too many values.
    """
    if len(raw) > limits.body_bytes:
        raise limits.make_error(where, "body_bytes", "bytes")
    if count_values(raw) > limits.listed:
        raise limits.make_error(where, "listed", "values in JSON")


def count_values(raw: bytes | bytearray | memoryview) -> int:
    """Return an upper bound of the number of values in JSON, less one, without parsing it.

    Each value but the first comes after a comma or an opening bracket, so these are counted, except
    those in texts. A text is one value, however long it is.
    """
    count = 0
    in_text = False
    remainder = b""
    for start in range(0, len(raw), CHUNK_BYTES):
        # A backslash at the end escapes the first byte of the next chunk, so it goes there.
        chunk = (remainder + raw[start : start + CHUNK_BYTES]).replace(rb"\\", b"")
        remainder = b""
        if chunk.endswith(b"\\"):
            remainder = b"\\"
            chunk = chunk[:-1]
        # Between quotes that are not escaped, every other part is in a text.
        parts = chunk.replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[int(in_text) :: 2])
        count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        has_odd_number_of_quotes = len(parts) % 2 == 0
        in_text ^= has_odd_number_of_quotes
    return count

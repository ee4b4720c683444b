"""The weight of a body, counted in its bytes as they arrive, before anything is parsed."""

from __future__ import annotations

from typing import Any

from starlette.requests import ClientDisconnect

from .limits import Limits
from .wire import TooLarge

_OPENING = (b",", b"[", b"{")
"""Outside of texts there are at most as many values in JSON as these, and one more."""

_TEXTS = 2
"""Texts per value, at most: a key and the value itself. Each has two quotes."""

_PIECE = 2**16
"""Bytes that are looked at in one go."""


def weigh_constraint(
    constraint: bytes | bytearray | memoryview, where: str, limits: Limits
) -> None:
    """Refuse a constraint of a text that costs too much to compile.

    Raises:
        TooLarge: its JSON is beyond the limit.
    """
    if len(constraint) > limits.constraint:
        expected = f"a constraint of at most {limits.constraint} bytes"
        remedy = "Ask for less, or raise MMKIT_SERVE_CONSTRAINT on the server."
        raise TooLarge(where, expected, str(len(constraint)), remedy)


class Scale:
    """Weighs one body or session message.

    Args:
        limits: what it may weigh.
        where: what it is, in errors.
        json: whether it is; else its bytes alone count.

    Attributes:
        json: whether it is JSON.
        listed: values in its JSON, at most.
    """

    def __init__(self, limits: Limits, where: str, *, json: bool = True) -> None:
        self._limits, self._where, self.json = limits, where, json
        self._size = self._quotes = self.listed = 0
        self._escape = b""

    def add(self, part: bytes | str) -> None:
        """Take some more of it.

        Raises:
            TooLarge: it is beyond a limit.
        """
        for at in range(0, len(part), _PIECE):
            piece = part[at : at + _PIECE]
            self._add(piece.encode(errors="replace") if isinstance(piece, str) else piece)

    def _add(self, piece: bytes) -> None:
        limits = self._limits
        self._size += len(piece)
        if self._size > limits.body_bytes:
            remedy = "Send less at once, or raise MMKIT_SERVE_BODY_BYTES on the server."
            raise TooLarge(self._where, f"at most {limits.body_bytes} bytes", "more", remedy)
        if not self.json:
            return
        outside = self._outside(piece)
        self.listed += sum(outside.count(sign) for sign in _OPENING)
        if max(self.listed, self._quotes // (2 * _TEXTS) - 1) > limits.listed:
            remedy = "Send numbers as base64, or raise MMKIT_SERVE_LISTED on the server."
            raise TooLarge(self._where, f"at most {limits.listed} values in JSON", "more", remedy)

    def _outside(self, piece: bytes) -> bytes:
        """The part of the next piece that is outside texts. Commas in texts separate no values, and
        long texts have many."""
        piece = (self._escape + piece).replace(rb"\\", b"")
        self._escape = piece[-1:] if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        is_text = self._quotes % 2
        self._quotes += len(parts) - 1
        return b"".join(parts[is_text::2])


async def read(receive: Any, limits: Limits, scale: Scale | None = None) -> bytearray:
    """The body of a request.

    Args:
        receive: ASGI's.
        limits: how much it may be.
        scale: what weighs it; None for one of these limits.

    Raises:
        TooLarge: it is beyond a limit; the rest is not read.
        ClientDisconnect: the client left.
    """
    body, scale = bytearray(), scale or Scale(limits, "body")
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        scale.add(part)
        body += part
        if not message.get("more_body", False):
            return body

"""The limits of one client's requests. Each limit is an environment variable of the server."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import MmkitError

PREFIX = "MMKIT_SERVE_"


@dataclass(frozen=True)
class Limits:
    """Limits of a server; the variable of `body_bytes` is MMKIT_SERVE_BODY_BYTES, and so on.

    Attributes:
        body_bytes: bytes of a request body or a session message.
        listed: values written out in the JSON of a request or a session message, prompt ids
            included. Each costs tens of bytes of memory, so this limit is lower than `elements`. A
            text is one value, base64 too.
        elements: numbers in the items of one request.
        items: items of one request, all modalities together; a spec's own limits hold too.
        pixels: pixels of the images and video frames of one request, before they are decoded.
        constraint: bytes in JSON of what a text must be (structured outputs, a response format,
            tools that must be called). The engine compiles it, which others wait for.
        sessions: open sessions, at all API servers of one address together. A session holds
            sequences and KV cache while it waits for its client; 0 means as many sessions as leave
            each copy of the model half of both.
        idle_seconds: seconds for which the server waits for a session's next message, for the next
            part of a body, and for a client that does not read, event streams included.
    """

    body_bytes: int = 64 * 2**20
    listed: int = 2**20
    elements: int = 2**24
    items: int = 4096
    pixels: int = 2**25
    constraint: int = 2**14
    sessions: int = 0
    idle_seconds: float = 300.0

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Limits:
        """The limits that environment variables set.

        Raises:
            MmkitError: a value that is no number, or out of range.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = PREFIX + field.name.upper()
            if text := environment.get(name, "").strip():
                try:
                    value = float(text) if field.name == "idle_seconds" else int(text)
                except ValueError:
                    value = math.nan
                least = 0 if field.name == "sessions" else 1
                kind = "number" if field.name == "idle_seconds" else "whole number"
                if not least <= value < math.inf:
                    raise MmkitError(name, f"a {kind} of at least {least}", repr(text))
                values[field.name] = value
        return cls(**values)

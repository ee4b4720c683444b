"""Outputs other than text: which ids may stand where, and how they become an array.

An output has a fixed number of tokens. Its layout consists of ids and `any_id`, over `cfg` and
`tok`. `decode` turns the ids at the `any_id` positions into an array; the other ids are separators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from .errors import SpecError
from .expr import Scope
from .layout import Layout, LayoutLike
from .layout import layout as as_layout
from .node import Node

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Decode: TypeAlias = Callable[[Array, Scope], Array]
Encode: TypeAlias = Callable[[Array, Scope], Any]

EXTRA_ARG = "mmkit_output"
"""The key of `SamplingParams.extra_args` for the name of the output that a request asks for."""

_KNOWN = {"cfg", "tok", "function"}


class Output(Node):
    """One kind of output, for example a frame of a world model, an image, or the action of a robot.

    Attributes:
        name: the name by which requests ask for it.
        layout: which ids may stand where.
        decode: a function ``(ids, scope) -> array``. It receives the ids at the `any_id` positions,
            int64 (positions,), and a `Scope` with `cfg` and `tok`, and returns a numpy array. It
            accepts all ids that the layout allows, and returns arrays of one shape and dtype; uint8
            (height, width, 3) is an RGB image. Several threads may call it at once.
        encode: its inverse, ``(array, scope) -> ids``: integers (positions,). It may raise a
            ValueError for an array that the output cannot be.
        lossy: whether `decode` returns only nearly the array that `encode` received, for example
            with a learned image tokenizer.
    """

    name: str
    layout: Layout
    decode: Decode
    encode: Encode | None
    lossy: bool

    def __init__(
        self,
        name: str,
        layout: LayoutLike,
        decode: Decode,
        encode: Encode | None = None,
        *,
        lossy: bool = False,
    ) -> None:
        """Declare an output.

        Raises:
            SpecError: a name that is no identifier, a layout that depends on more than `cfg` and
                `tok`, or a `decode` or `encode` that is no function.
        """
        where = f"output {name!r}"
        if not isinstance(name, str) or not name.isidentifier():
            raise SpecError(where, "a name that is a Python identifier", repr(name))
        for key, function in (("decode", decode), ("encode", encode)):
            if not callable(function) and (key == "decode" or function is not None):
                raise SpecError(f"{where}, {key}", "a function (value, scope)", repr(function))
        own = as_layout(layout)
        for leaf in own.leaves():
            if leaf.root not in _KNOWN:
                raise SpecError(f"{where}, layout", "values of cfg and tok", repr(leaf))
        values = {"name": name, "layout": own, "decode": decode, "encode": encode, "lossy": lossy}
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def __repr__(self) -> str:
        parts = [repr(self.name), self.layout._source(), _named(self.decode)]
        if self.encode is not None:
            parts.append(_named(self.encode))
        if self.lossy:
            parts.append("lossy=True")
        return f"Output({', '.join(parts)})"


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", repr(function)))

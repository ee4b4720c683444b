"""Outputs other than text: which ids may stand where, and how they become an array.

An output has a fixed number of tokens. Its layout consists of ids and `any_id`, over `cfg` and
`tok`. `decode` turns the ids at the `any_id` positions into an array; the other ids are separators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, TypeAlias

import numpy as np

from .errors import SpecError
from .expr import Scope
from .layout import Layout, LayoutLike
from .layout import layout as as_layout
from .node import Node, Stated, stated

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

    Raises:
        SpecError: a name that is no identifier, a layout that depends on more than `cfg` and `tok`,
            or a `decode` or `encode` that is no function.
    """

    name: str
    layout: Stated[LayoutLike, Layout] = stated(as_layout)
    decode: Decode
    encode: Encode | None = None
    _: KW_ONLY
    lossy: bool = False

    def __post_init__(self) -> None:
        where = f"output {self.name!r}"
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise SpecError(where, "a name that is a Python identifier", repr(self.name))
        for key, function in (("decode", self.decode), ("encode", self.encode)):
            if not callable(function) and (key == "decode" or function is not None):
                raise SpecError(f"{where}, {key}", "a function (value, scope)", repr(function))
        super().__post_init__()
        for leaf in self.layout.leaves():
            if leaf.root not in _KNOWN:
                raise SpecError(f"{where}, layout", "values of cfg and tok", repr(leaf))

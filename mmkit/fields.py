"""Fields: how the processed tensors of a modality split into items, as in vLLM's multimodal field configs.

A field may state the shape and dtype of one item's part; what `process` returns is then checked, never cast. A field
with a `value` is derived: it comes from an expression, not from `process`.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch

from .errors import SpecError
from .expr import Scope, Value, evaluate, expression, fold
from .items import Between, dtype_name, fits, map_size, shape_text
from .layout import Tokens


@dataclass(frozen=True)
class Field:
    """One processed tensor; make it with `batched`, `flat` or `shared`."""

    kind: Literal["batched", "flat", "shared"]
    sizes: Value = None
    dim: int = 0
    keep_on_cpu: bool = False
    shape: tuple[Any, ...] | None = None
    dtype: str | None = None
    value: Value = None

    def __post_init__(self) -> None:
        if self.dtype is not None and str(getattr(torch, str(self.dtype), None)) != f"torch.{self.dtype}":
            raise SpecError("dtype of a field", "a torch dtype or its name", repr(self.dtype))

    def bind(self, scope: Scope) -> Field:
        """This field with everything that depends on `cfg` and `proc` alone evaluated."""
        shape = None if self.shape is None else tuple(map_size(lambda end: fold(end, scope), s) for s in self.shape)
        return replace(self, sizes=fold(self.sizes, scope), shape=shape, value=fold(self.value, scope))

    def derive(self, scope: Scope) -> Any:
        """The value of a derived field, for one item, or for all where it is shared: a tensor if a dtype is stated."""
        value = evaluate(self.value, scope)
        if self.dtype is None:
            return value
        try:
            return torch.tensor(value, dtype=getattr(torch, self.dtype))
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError("value", f"numbers for a {self.dtype} tensor", repr(value)) from error

    def split(self, data: Any, sizes: Sequence[int] | None, count: int, where: str) -> list[Any]:
        """One part per item of a processed tensor (or list of tensors).

        Args:
            data: what `process` returned for this field.
            sizes: for a flat field, the extent of each item along `dim`; whole numbers >= 0.
            count: number of items.
            where: names the field in errors.

        Raises:
            SpecError: the data does not hold `count` items, or the sizes do not add up to its extent.
        """
        if self.kind == "shared":
            return [data] * count
        extent = self._extent(data, where)
        if self.kind == "batched":
            if extent != count:
                raise SpecError(where, f"{count} items along the first dimension", str(extent))
            return list(data.unbind(0)) if isinstance(data, torch.Tensor) else [data[i] for i in range(count)]
        assert sizes is not None
        if sum(sizes) != extent:
            expected = f"sizes that add up to {extent}, the extent of dimension {self.dim}"
            raise SpecError(where, expected, str(sum(sizes)))
        if isinstance(data, torch.Tensor):
            return list(torch.split(data, list(sizes), dim=self.dim))
        return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def _extent(self, data: Any, where: str) -> int:
        """Extent of `dim`; of what is no tensor, vLLM knows the first dimension alone."""
        tensor = isinstance(data, torch.Tensor)
        if self.dim not in (range(-data.ndim, data.ndim) if tensor else range(isinstance(data, Sized))):
            got = f"shape {tuple(data.shape)}" if tensor else type(data).__name__
            raise SpecError(where, f"a tensor with a dimension {self.dim}", got)
        return int(data.shape[self.dim]) if tensor else len(data)

    @cached_property
    def varies(self) -> bool:
        """Whether the stated shape, the sizes or the value depend on the item."""
        ends = [(size.least, size.most) if isinstance(size, Between) else (size,) for size in self.shape or ()]
        fixed = all(isinstance(end, int) for pair in ends for end in pair)
        return self.kind == "flat" or self.value is not None or not fixed

    @cached_property
    def _stated(self) -> tuple[torch.dtype | None, tuple[Any, ...] | None] | None:
        """The stated dtype and shape as a tensor has them; None where neither is."""
        if self.dtype is None and self.shape is None:
            return None
        return getattr(torch, self.dtype) if self.dtype else None, self.shape

    def check(self, part: Any, scope: Scope, index: int) -> None:
        """Compare the part of an item with the stated shape and dtype.

        Raises:
            SpecError: they differ.
        """
        if self._stated is None:
            return
        if not self.varies and isinstance(part, torch.Tensor):  # nearly always: one comparison each
            dtype, shape = self._stated
            if part.dtype == (dtype or part.dtype) and part.shape == (part.shape if shape is None else shape):
                return
        where = f"item {index}"
        if self.dtype is not None and str(getattr(part, "dtype", None)).removeprefix("torch.") != self.dtype:
            raise SpecError(where, f"dtype {self.dtype}", str(getattr(part, "dtype", type(part).__name__)))
        if self.shape is not None:
            shape = tuple(getattr(part, "shape", ()))
            wanted = tuple(map_size(lambda end: evaluate(end, scope), s) for s in self.shape)
            if not fits(shape, wanted):
                raise SpecError(where, f"shape {shape_text(wanted)} per item", str(shape))

    def __repr__(self) -> str:
        stated = {
            "dim": self.dim or None,
            "keep_on_cpu": self.keep_on_cpu or None,
            "shape": self.shape,
            "dtype": self.dtype,
            "value": self.value,
        }
        options = [f"{name}={value!r}" for name, value in stated.items() if value is not None]
        return f"{self.kind}({', '.join([repr(self.sizes)] * (self.kind == 'flat') + options)})"


def _shape(shape: Sequence[Value] | None) -> tuple[Any, ...] | None:
    return None if shape is None else tuple(map(expression, shape))


def _derived(value: Value) -> Value:
    return expression(value.value if isinstance(value, Tokens) else value)  # tok[...] is an id here, not a layout


def batched(
    *,
    shape: Sequence[Value] | None = None,
    dtype: str | torch.dtype | None = None,
    keep_on_cpu: bool = False,
    value: Value = None,
) -> Field:
    """Item i is ``data[i]``: a tensor (items, ...), or a list where the items' shapes differ.

    Args:
        shape: shape of one item's part; sizes or expressions.
        dtype: its torch dtype, or the name of that.
        keep_on_cpu: the model reads this field on the host.
        value: derive the field: an expression over the `item` facts and the other batched and shared `out` fields.
            With a `dtype` the result becomes a tensor.

    Raises:
        SpecError: a dtype that torch does not know.
    """
    return Field("batched", None, 0, keep_on_cpu, _shape(shape), dtype_name(dtype), _derived(value))


def flat(
    sizes: Value,
    *,
    dim: int = 0,
    shape: Sequence[Value] | None = None,
    dtype: str | torch.dtype | None = None,
    keep_on_cpu: bool = False,
) -> Field:
    """Items follow one another along `dim` of one tensor, as rows of (total rows, ...) do for ``dim=0``.

    Args:
        sizes: extent of one item along `dim`: an expression over its `item` facts and its batched `out` fields.
        dim: the dimension to split.
        shape: shape of one item's part; sizes or expressions.
        dtype: its torch dtype, or the name of that.
        keep_on_cpu: the model reads this field on the host.

    Raises:
        SpecError: a dtype that torch does not know.
    """
    return Field("flat", expression(sizes), dim, keep_on_cpu, _shape(shape), dtype_name(dtype))


def shared(
    *,
    shape: Sequence[Value] | None = None,
    dtype: str | torch.dtype | None = None,
    keep_on_cpu: bool = False,
    value: Value = None,
) -> Field:
    """Every item has the whole of ``data``. Arguments as for `batched`; a derived `value` cannot depend on the item."""
    return Field("shared", None, 0, keep_on_cpu, _shape(shape), dtype_name(dtype), _derived(value))

"""Fields: how the processed tensors of a modality split into items, as in vLLM's multimodal field
configs.

A field may state the shape and dtype of one item's part. mmkit then checks the result of `process`
and never casts it. An expression, not `process`, computes a derived field.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import KW_ONLY
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from .errors import SpecError
from .expr import Scope, Value, evaluate, expression, several
from .items import Size, dtype_name, fits, shape_text
from .layout import whole
from .node import Part, Stated, evaluate_all, leaves, stated

Shape: TypeAlias = "Sequence[Size]"
"""Sizes, one per dimension."""


def _known_dtype(dtype: Any) -> str:
    name = dtype_name(dtype)
    if str(getattr(torch, str(name), None)) != f"torch.{name}":
        raise SpecError("dtype of a field", "a torch dtype or its name", repr(name))
    return name  # type: ignore[no-any-return]


class Field(Part):
    """One processed tensor: `batched`, `flat`, `derived` or `constant`.

    Attributes:
        shape: shape of one item's part, where it is stated; sizes or expressions.
        dtype: its torch dtype, or the dtype's name, where it is stated.
        keep_on_cpu: the model reads this field on the host.
        hidden: layouts and other fields read it, and the model does not receive it.
        value: the expression that computes the field, where `process` does not return it.

    Raises:
        SpecError: a dtype that torch does not know.
    """

    _: KW_ONLY
    shape: Stated[Shape | None, tuple[Any, ...] | None] = stated(several, default=None)
    dtype: Stated[str | torch.dtype | None, str | None] = stated(_known_dtype, default=None)
    keep_on_cpu: bool = False
    hidden: bool = False
    value: Stated[Value, Any] = stated(expression, default=None)

    @cached_property
    def torch_dtype(self) -> torch.dtype | None:
        """The stated dtype as torch has it."""
        return None if self.dtype is None else getattr(torch, str(self.dtype))

    @property
    def is_derived(self) -> bool:
        """Whether an expression computes the field."""
        return self.value is not None

    def derive(self, scope: Scope) -> Any:
        """The value of a derived field for one item, or for all items where it is shared; a tensor
        if the field states a dtype."""
        value = evaluate(self.value, scope)
        if self.dtype is None:
            return value
        try:
            return torch.as_tensor(value, dtype=self.torch_dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError("value", f"numbers for a {self.dtype} tensor", repr(value)) from error

    def derive_all(self, scope: Scope, scopes: Sequence[Scope]) -> list[Any]:
        """The values of a derived field for all items of a request, one scope per item."""
        return [self.derive(own) for own in scopes]

    def sizes_of(self, scopes: Sequence[Scope]) -> list[int] | None:
        """The extents of the items along `dim`, one scope per item; None where the field is not
        flat."""
        return None

    def split(self, data: Any, sizes: Sequence[int] | None, count: int, where: str) -> list[Any]:
        """The parts of a processed tensor, or list of tensors: one per item.

        Args:
            data: the field as `process` returned it.
            sizes: for a flat field, the extent of each item along `dim`; whole numbers >= 0.
            count: number of items.
            where: names the field in errors.

        Raises:
            SpecError: the data does not hold `count` items, or the sizes do not add up to its
                extent.
        """
        raise NotImplementedError

    def split_each(
        self, parts: Sequence[Any], sizes: Sequence[int] | None, count: int, where: str
    ) -> list[Any]:
        """`split` of a field that comes in parts already, which are checked."""
        return list(parts)

    def batch(self, parts: Sequence[Any]) -> Any:
        """The value that a model receives for the parts of some items, as vLLM batches them."""
        raise NotImplementedError

    @cached_property
    def varies(self) -> bool:
        """Whether the stated shape, the sizes or the value depend on the item."""
        return self.is_derived or bool(leaves(self.shape))

    @property
    def is_stated(self) -> bool:
        """Whether the field states a dtype or a shape to compare parts with."""
        return self.dtype is not None or self.shape is not None

    def check(self, part: Any, scope: Scope, index: int) -> None:
        """Compare the part of an item with the stated shape and dtype.

        Raises:
            SpecError: they differ.
        """
        where, dtype = f"item {index}", getattr(part, "dtype", type(part).__name__)
        if self.dtype not in (None, name := str(dtype_name(dtype))):
            raise SpecError(where, f"dtype {self.dtype}", name)
        shape = tuple(getattr(part, "shape", ()))
        if self.shape is None or (not self.varies and shape == self.shape):
            return
        if not fits(shape, sizes := evaluate_all(self.shape, scope)):
            raise SpecError(where, f"shape {shape_text(sizes)} per item", str(shape))


class Batched(Field):
    """Item i is ``data[i]``: a tensor (items, ...), or a list where the items' shapes differ."""

    _word = "batched"

    def split(self, data: Any, sizes: Sequence[int] | None, count: int, where: str) -> list[Any]:
        extent = _extent(data, 0, where)
        if extent != count:
            raise SpecError(where, f"{count} items along the first dimension", str(extent))
        return list(data)

    def batch(self, parts: Sequence[Any]) -> Any:
        shapes = {part.shape if isinstance(part, torch.Tensor) else None for part in parts}
        return torch.stack(list(parts)) if len(shapes) == 1 and None not in shapes else list(parts)


class Derived(Batched):
    """A batched field that `process` does not return: mmkit computes it for each item.

    Attributes:
        value: an expression over the `item` facts and the other batched `fields`.
        dtype: torch dtype of the tensor that the value becomes, or the dtype's name; None leaves
            the value as it is.
    """

    value: Stated[Value, Any] = stated(expression)

    _word = "derived"


class Flat(Field):
    """Items follow one another along `dim` of one tensor, for ``dim=0`` the rows of a tensor (total
    rows, ...). vLLM pads items that differ in another dimension with zeros; older versions give the
    model a list of rows.

    Attributes:
        sizes: extent of one item along `dim`: an expression over its `item` facts and its batched
            `fields`.
        dim: the dimension to split.
        value: one item's part, where `process` does not return the field: an expression as for
            `derived`, for example ``fields.pixels[0]`` to drop a dimension.
    """

    sizes: Stated[Value, Any] = stated(expression)
    _: KW_ONLY
    dim: int = 0

    _word = "flat"
    varies = True

    def sizes_of(self, scopes: Sequence[Scope]) -> list[int] | None:
        return [self.size_of(scope) for scope in scopes]

    def size_of(self, scope: Scope) -> int:
        """The extent of one item along `dim`."""
        return whole(evaluate(self.sizes, scope), self.sizes, "a size")

    def split(self, data: Any, sizes: Sequence[int] | None, count: int, where: str) -> list[Any]:
        assert sizes is not None
        extent = _extent(data, self.dim, where)
        if sum(sizes) != extent:
            expected = f"sizes that add up to {extent}, the extent of dimension {self.dim}"
            raise SpecError(where, expected, str(sum(sizes)))
        if isinstance(data, torch.Tensor):
            return list(torch.split(data, list(sizes), dim=self.dim))
        return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def split_each(
        self, parts: Sequence[Any], sizes: Sequence[int] | None, count: int, where: str
    ) -> list[Any]:
        pairs = zip(parts, sizes or (), strict=True)
        return [self.split(part, [size], 1, where)[0] for part, size in pairs]

    def batch(self, parts: Sequence[Any]) -> Any:
        if not all(isinstance(part, torch.Tensor) for part in parts):
            return [element for part in parts for element in part]
        if self.dim or len({part.shape[1:] for part in parts}) == 1:
            return torch.cat(list(parts), dim=self.dim)
        rows = [row for part in parts for row in part]
        most = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
        batch = rows[0].new_zeros((len(rows), *most))
        for place, row in zip(batch, rows, strict=True):
            place[tuple(map(slice, row.shape))] = row
        return batch

    def derive_all(self, scope: Scope, scopes: Sequence[Scope]) -> list[Any]:
        parts = super().derive_all(scope, scopes)
        for i, (part, own) in enumerate(zip(parts, scopes, strict=True)):
            self.split(part, [self.size_of(own)], 1, f"item {i}")
        return parts


class Shared(Field):
    """A field that `process` does not return: one value for all items, over `cfg`, `proc` and
    `tok`."""

    value: Stated[Value, Any] = stated(expression)

    _word = "constant"

    def derive_all(self, scope: Scope, scopes: Sequence[Scope]) -> list[Any]:
        return [self.derive(scope)] * len(scopes)

    def batch(self, parts: Sequence[Any]) -> Any:
        return parts[0]


def packed(data: Any) -> Any:
    """The same values, with no gaps. vLLM looks at a field as bytes after `contiguous()`, which
    leaves a vector of one element its stride."""
    if isinstance(data, torch.Tensor) and data.ndim == 1 and data.stride(0) != 1:
        return data.clone(memory_format=torch.contiguous_format)
    return data


def _extent(data: Any, dim: int, where: str) -> int:
    """Extent of a dimension. A value that is no tensor has only a first dimension for vLLM."""
    tensor = isinstance(data, torch.Tensor)
    if dim not in (range(-data.ndim, data.ndim) if tensor else range(isinstance(data, Sized))):
        got = f"shape {tuple(data.shape)}" if tensor else type(data).__name__
        raise SpecError(where, f"a tensor with a dimension {dim}", got)
    return int(data.shape[dim]) if tensor else len(data)


batched = Batched
derived = Derived
flat = Flat
constant = Shared

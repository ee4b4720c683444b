"""Processing and fields: how canonical items become tensors, and how these split into items, as in
vLLM's multimodal field configs.

A field may state the shape and dtype of one item's part. mmkit then checks the result of `process`
and never casts it. An expression, not `process`, computes a derived field.

Without `process=`, a `Tensor` is the modality's one field, and each part of a `Record` of tensors
is the field of its name. `hf()` calls a Hugging Face processor, or an object that is called like
one. A function can do anything else::

    def patches(items, scope):  # canonical items, in order; a Scope without an item
        parts = [item.unfold(0, 4, 4) for item in items]
        return {
            # a flat field: the items' parts, one after the other
            "patches": torch.cat(parts),
            # a batched field: one part per item, also as a list
            "counts": torch.tensor([len(part) for part in parts]),
        }

In each case, an item's part must not depend on the other items of the request, for example by
padding to the batch: vLLM caches each item alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import KW_ONLY, field, replace
from functools import cached_property, partial
from inspect import isroutine
from itertools import accumulate
from reprlib import repr as brief
from typing import Any, TypeAlias

import numpy as np
import torch

from ..errors import SpecError, convert_errors
from .expr import Expr, Scope, Value, evaluate, expression, expressions, plain, several
from .items import Size, dtype_name, fits, shape_text
from .layout import whole
from .node import Part, Stated, evaluate_all, fold, leaves, mapped, stated, structure


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
    shape: Stated[Sequence[Size] | None, tuple[Any, ...] | None] = stated(several, default=None)
    dtype: Stated[str | torch.dtype | None, str | None] = stated(_known_dtype, default=None)
    keep_on_cpu: bool = False
    hidden: bool = False
    value: Stated[Value, Any] = stated(expression, default=None)

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
        dtype: torch.dtype = getattr(torch, self.dtype)
        with convert_errors("value", f"numbers for a {self.dtype} tensor"):
            tensor = torch.as_tensor(value, dtype=dtype)
            if type(value) is int or dtype.is_floating_point or dtype.is_complex:
                return tensor
            exact = torch.as_tensor(value)
        if not bool((tensor.to(exact.dtype) == exact).all()):
            expected, remedy = f"numbers that {self.dtype} holds", "Use math.floor() or //."
            raise SpecError("value", expected, brief(plain(value)), remedy)
        return tensor

    def derive_all(self, scope: Scope, scopes: Sequence[Scope]) -> list[Any]:
        """The values of a derived field for all items of a request, one scope per item."""
        return [self.derive(own) for own in scopes]

    def split(self, data: Any, scopes: Sequence[Scope]) -> list[Any]:
        """The parts of a processed tensor, or list of tensors, as `process` returned it: one per
        item, of which each has a scope.

        Raises:
            SpecError: the data does not hold as many items, or the sizes of the items do not add up
                to its extent.
        """
        raise NotImplementedError

    def split_each(self, parts: Sequence[Any], scopes: Sequence[Scope]) -> list[Any]:
        """`split` of a field that comes in parts already, which are checked."""
        return list(parts)

    def batch(self, parts: Sequence[Any]) -> Any:
        """The value that a model receives for the parts of some items, as vLLM batches them."""
        raise NotImplementedError

    @cached_property
    def varies(self) -> bool:
        """Whether the stated shape, the sizes or the value depend on the item."""
        return self.is_derived or bool(leaves(self.shape))

    def check(self, part: Any, scope: Scope, index: int) -> None:
        """Compare the part of an item with the stated shape and dtype.

        Raises:
            SpecError: they differ.
        """
        where, dtype = f"item {index}", getattr(part, "dtype", type(part).__name__)
        if self.dtype not in (None, name := str(dtype_name(dtype))):
            raise SpecError(where, f"dtype {self.dtype}", name)
        if self.shape is None:
            return
        shape = tuple(getattr(part, "shape", ()))
        sizes = evaluate_all(self.shape, scope) if self.varies else self.shape
        if not fits(shape, sizes):
            raise SpecError(where, f"shape {shape_text(sizes)} per item", str(shape))


class Batched(Field):
    """Item i is ``data[i]``: a tensor (items, ...), or a list where the items' shapes differ."""

    _word = "batched"

    def split(self, data: Any, scopes: Sequence[Scope]) -> list[Any]:
        if (extent := _extent(data, 0)) != len(scopes):
            expected = f"{len(scopes)} items along the first dimension"
            raise SpecError("", expected, str(extent))
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

    def split(self, data: Any, scopes: Sequence[Scope]) -> list[Any]:
        sizes = [whole(evaluate(self.sizes, own), self.sizes, "a size") for own in scopes]
        if sum(sizes) != (extent := _extent(data, self.dim)):
            expected = f"sizes that add up to {extent}, the extent of dimension {self.dim}"
            raise SpecError("", expected, str(sum(sizes)))
        if isinstance(data, torch.Tensor):
            return list(data.split(sizes, dim=self.dim))
        return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def split_each(self, parts: Sequence[Any], scopes: Sequence[Scope]) -> list[Any]:
        return [self.split(part, [own])[0] for part, own in zip(parts, scopes, strict=True)]

    def derive_all(self, scope: Scope, scopes: Sequence[Scope]) -> list[Any]:
        return self.split_each(super().derive_all(scope, scopes), scopes)

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


class Shared(Field):
    """A field that `process` does not return: one value for all items, over `cfg`, `proc` and
    `tok`."""

    value: Stated[Value, Any] = stated(expression)

    _word = "constant"

    def derive(self, scope: Scope) -> Any:
        # vLLM compares the values of the items of a batch by `==`, which has no truth value for
        # arrays: two items would raise in the worker, which ends the engine
        return mapped(_as_tensor, super().derive(scope))

    def derive_all(self, scope: Scope, scopes: Sequence[Scope]) -> list[Any]:
        return [self.derive(scope)] * len(scopes)

    def batch(self, parts: Sequence[Any]) -> Any:
        return parts[0]


def _as_tensor(value: Any) -> Any:
    """A dense tensor for an array of numbers or a sparse tensor; any other value as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.tensor(value)
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return value.to_dense()
    return value


def packed(data: Any) -> Any:
    """The same values, with no gaps and without a gradient. vLLM looks at a field as bytes after
    `contiguous()`, which leaves a vector of one element its stride."""
    if isinstance(data, torch.Tensor) and data.requires_grad:
        data = data.detach()
    if isinstance(data, torch.Tensor) and data.ndim == 1 and data.stride(0) != 1:
        return data.clone(memory_format=torch.contiguous_format)
    return data


def _extent(data: Any, dim: int) -> int:
    """Extent of a dimension. A value that is no tensor has only a first dimension for vLLM."""
    tensor = isinstance(data, torch.Tensor)
    if dim not in (range(-data.ndim, data.ndim) if tensor else range(isinstance(data, Sized))):
        got = f"shape {tuple(data.shape)}" if tensor else type(data).__name__
        raise SpecError("", f"a tensor with a dimension {dim}", got)
    return int(data.shape[dim]) if tensor else len(data)


batched = Batched
derived = Derived
flat = Flat
constant = Shared


class Identity(Part):
    """Each item is its own field, or each of its parts the field of that name: the default for a
    `Tensor` and for a `Record` of tensors."""

    _word = "identity"


def _processor(value: Any) -> Any:
    """An expression for a plain function of a `Scope`; an object that is called like a processor
    stays as it is.

    Raises:
        SpecError: a class, or something that cannot be called.
    """
    if isinstance(value, Expr):
        return value
    if isinstance(value, type) or not callable(value):
        expected = "an object that is called like a Hugging Face processor"
        remedy = ""
        if isinstance(value, type):
            name = value.__name__
            remedy = f"Give an instance: {name}(), or later({name})(...) of what the config says."
        raise SpecError("processor of hf()", expected, repr(value), remedy)
    is_function = isroutine(value) or isinstance(value, partial)
    return expression(value) if is_function else value


def _sizes(corner: Any) -> tuple[Any, ...]:
    return several(corner if isinstance(corner, tuple) else (corner,))


class HF(Part):
    """Call a Hugging Face processor, or an object that is called like one, once with all items that
    vLLM's cache lacks.

    mmkit ignores outputs that are no declared field. Where the processor raises, mmkit refuses the
    request; where it raises on the spec's largest item too, mmkit refuses the spec.

    Attributes:
        processor: the object to call in place of the checkpoint's processor: a part of it
            (``proc.process``), or, for a model that ships none, one made from the config
            (``later(Tiles)(cfg.tile_size)``, or a function of a `Scope`). mmkit makes it once per
            distinct `mm_processor_kwargs`, and calls it with the items of all modalities that name
            it and have the same options, as ``(images=..., videos=..., audio=...,
            return_tensors="pt", **kwargs)``, with those arguments that it takes. Any other
            callable object than a function is such an object itself.
        inputs: vLLM's argument name to the processor's: ``{"images": "pixels"}``. vLLM's names are
            `images`, `videos` and `audios` (`audio` by default), for a `Tensor` or a `Text` the
            name of its modality, and for a `Record` the names of its parts.
        outputs: the processor's output name to the field's.
        text: text of one item, for a processor that expects one placeholder per item in a text.
        unpad: field to the sizes of one item's part (a size, or a tuple of sizes, of its leading
            dimensions), for a processor that pads items to the largest of the batch.
        kwargs: arguments of every call: ``{"sampling_rate":
            proc.feature_extractor.sampling_rate}``. A request cannot change them.
        one_by_one: call the processor once per item, where its output for an item depends on the
            other items of the batch, for example by padding.
    """

    processor: Stated[Value | Callable[..., Any], Any] = stated(_processor, default=None)
    _: KW_ONLY
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    text: Stated[Value, Any] = stated(expression, default=None)
    unpad: Stated[Mapping[str, Any], Mapping[str, tuple[Any, ...]]] = stated(
        lambda corners: {name: _sizes(corner) for name, corner in corners.items()},
        default_factory=dict,
    )
    kwargs: Stated[Mapping[str, Value], Mapping[str, Any]] = stated(
        expressions, default_factory=dict
    )
    one_by_one: bool = False

    _word = "hf"

    @cached_property
    def key(self) -> Hashable:
        """The identity of the declared call."""
        return structure((self.processor, self.kwargs, self.text))  # type: ignore[no-any-return]

    def bind(self, scope: Scope) -> HF:
        bound = {"text": fold(self.text, scope), "unpad": fold(self.unpad, scope)}
        return replace(self, **bound, kwargs=evaluate_all(self.kwargs, scope))


identity = Identity
hf = HF


Process: TypeAlias = Identity | HF | Callable[[Sequence[Any], Scope], Mapping[str, Any]]


def unpadded(part: Any, sizes: Sequence[Value], scope: Scope) -> Any:
    """The leading corner of one item's part, without the padding."""
    return part[tuple(slice(int(evaluate(size, scope))) for size in sizes)]

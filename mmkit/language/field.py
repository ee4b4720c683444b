"""Processing and fields: how canonical items become tensors, and these split into items.

Fields are those of vLLM's multimodal field configs.

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

In each case, an item's part must not depend on the other items of the request: vLLM caches each
item alone. So `process` pads no item to the longest of a batch; vLLM does, where it joins the parts
of a batch (`Batching.JOINED`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import KW_ONLY, field, replace
from enum import Enum
from functools import cached_property, partial
from inspect import isroutine
from reprlib import repr as brief
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from ..errors import SpecError, convert_errors
from .expr import Expr, Scope, Value, as_expression, as_expression_tuple, as_expressions, evaluate
from .items import Size, dtype_name, fits, write_shape
from .layout import to_whole
from .node import (
    Converted,
    Part,
    build_structure,
    dependencies,
    evaluate_all,
    fold,
    map_values,
    parameter,
)
from .scope import to_python

# -- fields ----------------------------------------------------------------------------------------


def _as_dtype_name(dtype: Any) -> str:
    name = dtype_name(dtype)
    if str(getattr(torch, str(name), None)) != f"torch.{name}":
        raise SpecError("dtype of a field", "a torch dtype or its name", repr(name))
    return name  # type: ignore[no-any-return]


class Batching(Enum):
    """How the parts of several items become one argument of the model, in one of vLLM's three ways.

    It says nothing of what `process` returns, which `Field.split` reads.

    ========== =====================================================================
    batching   the argument
    ========== =====================================================================
    STACKED    one part per item: a stacked tensor, or a list where the shapes differ
    JOINED     the parts one after the other along `Field.dim`, in one tensor. Where they
               differ in another dimension, vLLM pads them with zeros; older versions give
               a list of rows
    SHARED     one value for all items
    ========== =====================================================================
    """

    STACKED = "stacked"
    JOINED = "joined"
    SHARED = "shared"


class Field(Part):
    """One processed tensor: `batched`, `flat`, `derived` or `constant`.

    A kind of fields is a subclass in `FIELD_KINDS`. It states in `_word` the name by which an
    author calls it, and besides:

    ==================== =========================================================
    attribute            what it states
    ==================== =========================================================
    `split`              how the result of `process` becomes one part per item
    `take_parts`         how a value per item, such as the item itself, becomes its part
    `keeps_shape`        whether `take_parts` leaves the shape of each value
    `split_reads_fields` whether `split` reads other fields of an item
    `batching`, `dim`    how vLLM batches the parts for the model
    `batch`              the same batch, for training
    ==================== =========================================================

    An item's part of a field is what vLLM has as the data of a ``MultiModalFieldElem``.

    Attributes:
        shape: shape of one item's part, where it is stated; sizes or expressions.
        dtype: its torch dtype, or the dtype's name, where it is stated.
        keep_on_cpu: the model reads this field on the host.
        hidden: layouts and other fields read it, and the model does not receive it.

    Raises:
        SpecError: a dtype that torch does not know.
    """

    _: KW_ONLY
    shape: Converted[Sequence[Size] | None, tuple[Any, ...] | None] = parameter(
        as_expression_tuple, default=None
    )
    dtype: Converted[str | torch.dtype | None, str | None] = parameter(_as_dtype_name, default=None)
    keep_on_cpu: bool = False
    hidden: bool = False

    batching: ClassVar[Batching]
    """How the parts of several items become one argument of the model; each kind states it."""

    # A kind that has one of these as a parameter declares it again, which mypy does not foresee for
    # a class variable.
    value: ClassVar[Any] = None
    """The expression that computes the field, for the kinds of fields that have one."""

    dim: ClassVar[int] = 0
    """The dimension along which the parts of items are joined for the model, for JOINED fields.

    `flat` also splits along it.
    """

    keeps_shape: ClassVar[bool] = False
    """Whether the parts that `take_parts` returns have the shapes of the values that it gets.

    With `identity` these values are the items. So the facts of an item then tell the shape of its
    part, and an outline may read it (``fields.signal.shape[0]``). Without it, an outline of such a
    layout is refused.
    """

    split_reads_fields: ClassVar[bool] = False
    """Whether `split` and `take_parts` read other fields of an item. These are computed before."""

    @property
    def is_derived(self) -> bool:
        """Whether an expression computes the field, and `process` does not return it."""
        return self.value is not None

    def derive(self, scope: Scope) -> Any:
        """Compute a derived field for one item, or for all items where it is shared.

        The value is a tensor if the field states a dtype.
        """
        value = evaluate_all(self.value, scope)
        if self.dtype is None:
            return value
        dtype: torch.dtype = getattr(torch, self.dtype)
        with convert_errors("value", f"numbers for a {self.dtype} tensor"):
            if dtype == torch.int64 and _holds_integers(value):
                # which are exact: numpy refuses larger ones. torch takes three times as long for
                # the few numbers of a grid
                return torch.from_numpy(np.array(value, np.int64))
            tensor = torch.as_tensor(value, dtype=dtype)
            if type(value) is int or dtype.is_floating_point or dtype.is_complex:
                return tensor
            exact = torch.as_tensor(value)
        is_exact = bool((tensor.to(exact.dtype) == exact).all())
        if not is_exact:
            expected, remedy = f"numbers that {self.dtype} holds", "Use math.floor() or //."
            raise SpecError("value", expected, brief(to_python(value)), remedy)
        return tensor

    def derive_all(self, scope: Scope, scopes: Sequence[Scope]) -> list[Any]:
        """Compute a derived field for all items of a request.

        Args:
            scope: the scope of the request, without an item.
            scopes: the scopes of the items.
        """
        return [self.derive(item_scope) for item_scope in scopes]

    def split(self, data: Any, scopes: Sequence[Scope]) -> list[Any]:
        """Split a processed tensor, or list of tensors, into one part per item.

        The data is as `process` returned it. Each item has a scope.

        Raises:
            SpecError: the data does not hold as many items, or the sizes of the items do not add up
                to its extent. It names no field: the caller does, by `locate_errors`.
        """
        raise NotImplementedError

    def take_parts(self, values: Sequence[Any], scopes: Sequence[Scope]) -> list[Any]:
        """Return the parts of a field that comes in one value per item already.

        It is called in place of `split` where `process` is `identity`, for zeros in place of the
        largest items, and by `flat` for what its expression gives. It refuses what `split` refuses.
        """
        return list(values)

    def batch(self, parts: Sequence[Any]) -> Any:
        """Return the value that a model receives for the parts of some items.

        vLLM batches them itself when it serves; this does the same for training.
        """
        raise NotImplementedError

    @cached_property
    def varies(self) -> bool:
        """Whether the stated shape, the sizes or the value depend on the item."""
        return self.is_derived or self._shape_varies

    @cached_property
    def _shape_varies(self) -> bool:
        return bool(dependencies(self.shape))

    def check(self, part: Any, scope: Scope, index: int) -> None:
        """Compare the part of an item with the stated shape and dtype.

        Raises:
            SpecError: they differ.
        """
        if self.dtype is not None:
            dtype = getattr(part, "dtype", type(part).__name__)
            name = str(dtype_name(dtype))
            if self.dtype != name:
                raise SpecError(f"item {index}", f"dtype {self.dtype}", name)
        if self.shape is None:
            return
        shape = tuple(getattr(part, "shape", ()))
        sizes = self.shape
        if self._shape_varies:
            sizes = evaluate_all(sizes, scope)
        if not fits(shape, sizes):
            where = f"item {index}"
            raise SpecError(where, f"shape {write_shape(sizes)} per item", str(shape))


def _holds_integers(value: Any) -> bool:
    """Return whether a value is an integer of Python, or a list or a tuple of these."""
    if not isinstance(value, (list, tuple)):
        return type(value) is int
    return all(type(element) is int for element in value)


class Batched(Field):
    """Item i is ``data[i]``: a tensor (items, ...), or a list where the items' shapes differ."""

    batching = Batching.STACKED
    keeps_shape = True

    _word = "batched"

    def split(self, data: Any, scopes: Sequence[Scope]) -> list[Any]:
        extent = _find_extent(data, 0)
        if extent != len(scopes):
            expected = f"{len(scopes)} items along the first dimension"
            raise SpecError("", expected, str(extent))
        return list(data)

    def batch(self, parts: Sequence[Any]) -> Any:
        shapes: set[torch.Size] = set()
        for part in parts:
            if not isinstance(part, torch.Tensor):
                return list(parts)
            shapes.add(part.shape)
        if len(shapes) != 1:
            return list(parts)
        return torch.stack(list(parts))


class Derived(Batched):
    """A batched field that `process` does not return: mmkit computes it for each item.

    Attributes:
        value: an expression over the `item` facts and the other batched `fields`.
        dtype: torch dtype of the tensor that the value becomes, or the dtype's name; None leaves
            the value as it is.
    """

    value: Converted[Value, Any] = parameter(as_expressions)  # type: ignore[misc]

    _word = "derived"


class Flat(Field):
    """Items follow one another along `dim` of one tensor.

    For ``dim=0`` these are the rows of a tensor (total rows, ...).

    Attributes:
        sizes: extent of one item along `dim`: an expression over its `item` facts and its batched
            `fields`.
        dim: the dimension to split.
        value: one item's part, where `process` does not return the field: an expression as for
            `derived`, for example ``fields.pixels[0]`` to drop a dimension.
    """

    sizes: Converted[Value, Any] = parameter(as_expression)
    _: KW_ONLY
    value: Converted[Value, Any] = parameter(as_expression, default=None)  # type: ignore[misc]
    dim: int = 0  # type: ignore[misc]

    batching = Batching.JOINED
    keeps_shape = True
    split_reads_fields = True
    varies = True  # in place of the property of `Field`: `split` needs the scope of each item

    _word = "flat"

    def split(self, data: Any, scopes: Sequence[Scope]) -> list[Any]:
        sizes: list[int] = []
        for scope in scopes:
            sizes.append(to_whole(evaluate(self.sizes, scope), self.sizes, "a size"))
        extent = _find_extent(data, self.dim)
        if sum(sizes) != extent:
            expected = f"sizes that add up to {extent}, the extent of dimension {self.dim}"
            raise SpecError("", expected, str(sum(sizes)))
        if isinstance(data, torch.Tensor):
            return list(data.split(sizes, dim=self.dim))
        parts: list[Any] = []
        start = 0
        for size in sizes:
            parts.append(data[start : start + size])
            start += size
        return parts

    def take_parts(self, values: Sequence[Any], scopes: Sequence[Scope]) -> list[Any]:
        parts: list[Any] = []
        for value, scope in zip(values, scopes, strict=True):
            parts.extend(self.split(value, [scope]))
        return parts

    def derive_all(self, scope: Scope, scopes: Sequence[Scope]) -> list[Any]:
        return self.take_parts(super().derive_all(scope, scopes), scopes)

    def batch(self, parts: Sequence[Any]) -> Any:
        if not all(isinstance(part, torch.Tensor) for part in parts):
            return _join_rows(parts)
        # beside `dim`, tensors of another dimension than the first have equal extents
        shapes = {part.shape[1:] for part in parts}
        if self.dim != 0 or len(shapes) == 1:
            return torch.cat(list(parts), dim=self.dim)
        return _pad_rows(_join_rows(parts))


def _join_rows(parts: Sequence[Any]) -> list[Any]:
    rows: list[Any] = []
    for part in parts:
        rows.extend(part)
    return rows


def _pad_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a batch of rows with different extents.

    Rows are padded with zeros at the end of each dimension.
    """
    shapes = [row.shape for row in rows]
    extents = [max(extents) for extents in zip(*shapes, strict=True)]
    batch = rows[0].new_zeros((len(rows), *extents))
    for position, row in enumerate(rows):
        corner = tuple([slice(extent) for extent in row.shape])
        batch[position][corner] = row
    return batch


class Constant(Field):
    """A field that `process` does not return, with one value for all items.

    The value depends on `cfg`, `proc` and `tok`.

    Attributes:
        value: the value, or an expression.
    """

    value: Converted[Value, Any] = parameter(as_expression)  # type: ignore[misc]

    batching = Batching.SHARED

    _word = "constant"

    def derive(self, scope: Scope) -> Any:
        # vLLM compares the values of the items of a batch by `==`, which has no truth value for
        # arrays: two items would raise in the worker, which ends the engine
        return map_values(_as_dense_tensor, super().derive(scope))

    def derive_all(self, scope: Scope, scopes: Sequence[Scope]) -> list[Any]:
        return [self.derive(scope)] * len(scopes)

    def batch(self, parts: Sequence[Any]) -> Any:
        return parts[0]


batched = Batched
derived = Derived
flat = Flat
constant = Constant

FIELD_KINDS: Sequence[type[Field]] = (Batched, Flat, Derived, Constant)
"""The kinds of fields, in the order in which messages name them."""


def _as_dense_tensor(value: Any) -> Any:
    """Return a dense tensor for an array of numbers or a sparse tensor.

    Return any other value as it is.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.tensor(value)
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return value.to_dense()
    return value


def _find_extent(data: Any, dim: int) -> int:
    """Return the extent of a dimension.

    A value that is no tensor has only a first dimension for vLLM.
    """
    if isinstance(data, torch.Tensor):
        if not -data.ndim <= dim < data.ndim:
            got = f"shape {tuple(data.shape)}"
            raise SpecError("", f"a tensor with a dimension {dim}", got)
        return int(data.shape[dim])
    if dim != 0 or not isinstance(data, Sized):
        raise SpecError("", f"a tensor with a dimension {dim}", type(data).__name__)
    return len(data)


def compact(data: Any) -> Any:
    """Return the same values, with no gaps in memory and without a gradient.

    vLLM looks at a field as bytes after `contiguous()`, which leaves a vector of one element its
    stride.
    """
    if not isinstance(data, torch.Tensor):
        return data
    if data.requires_grad:
        data = data.detach()
    if data.ndim == 1 and data.stride(0) != 1:
        return data.clone(memory_format=torch.contiguous_format)
    return data


def remove_padding(part: Any, sizes: Sequence[Value], scope: Scope) -> Any:
    """Return the leading corner of one item's part, without the padding.

    The part is as its field has split it: the sizes are its own leading dimensions.
    """
    corner: list[slice] = []
    for size in sizes:
        corner.append(slice(int(evaluate(size, scope))))
    return part[tuple(corner)]


# -- processing ------------------------------------------------------------------------------------


class Identity(Part):
    """Each item is its own field, or each of its parts the field of that name.

    It is the default for a `Tensor` and for a `Record` of tensors. Written as
    ``process=identity()``, it is also for `Audio`, whose field is float32 (samples,), and for a
    `Record` with a `Text`, which is no field: layouts and derived fields read it.
    """

    _word = "identity"


def _as_processor(value: Any) -> Any:
    """Return an expression for a plain function of a `Scope`.

    An object that is called like a processor stays as it is.

    Raises:
        SpecError: a class, or something that cannot be called.
    """
    if isinstance(value, Expr):
        return value
    if isinstance(value, type):
        name = value.__name__
        remedy = f"Give an instance: {name}(), or later({name})(...) of what the config says."
        raise _no_processor(value, remedy)
    if not callable(value):
        raise _no_processor(value, "")
    if isroutine(value) or isinstance(value, partial):
        return as_expression(value)
    return value


def _no_processor(value: Any, remedy: str) -> SpecError:
    expected = "an object that is called like a Hugging Face processor"
    return SpecError("processor of hf()", expected, repr(value), remedy)


def _as_corners(corners: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the sizes of each field's part as a tuple, where an author may write one size."""
    return {name: _as_corner(corner) for name, corner in corners.items()}


def _as_corner(corner: Any) -> tuple[Any, ...]:
    if not isinstance(corner, tuple):
        corner = (corner,)
    return as_expression_tuple(corner)


class HF(Part):
    """Call a Hugging Face processor, or an object that is called like one.

    It is called once with all items that vLLM's cache lacks.

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
            dimensions once the field is split), for a processor that pads items to the largest of
            the batch.
        kwargs: arguments of every call: ``{"sampling_rate":
            proc.feature_extractor.sampling_rate}``. A request cannot change them.
        one_by_one: call the processor once per item, where its output for an item depends on the
            other items of the batch, for example by padding, or where it takes all items for those
            of one prompt and returns one batch for them.
    """

    processor: Converted[Value | Callable[..., Any], Any] = parameter(_as_processor, default=None)
    _: KW_ONLY
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    text: Converted[Value, Any] = parameter(as_expression, default=None)
    unpad: Converted[Mapping[str, Any], Mapping[str, tuple[Any, ...]]] = parameter(
        _as_corners, default_factory=dict
    )
    kwargs: Converted[Mapping[str, Value], Mapping[str, Any]] = parameter(
        as_expressions, default_factory=dict
    )
    one_by_one: bool = False

    _word = "hf"

    @cached_property
    def key(self) -> Hashable:
        """The identity of the declared call."""
        return build_structure((self.processor, self.kwargs, self.text))  # type: ignore[no-any-return]

    def bind(self, scope: Scope) -> HF:
        # not the processor, which is made once per options of a request
        return replace(
            self,
            text=fold(self.text, scope),
            unpad=fold(self.unpad, scope),
            kwargs=evaluate_all(self.kwargs, scope),
        )


identity = Identity
hf = HF


Process: TypeAlias = Identity | HF | Callable[[Sequence[Any], Scope], Mapping[str, Any]]
"""How canonical items become fields. A function gets the items in order and a `Scope` without an
item, and returns the fields by name."""

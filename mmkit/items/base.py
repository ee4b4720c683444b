"""The base class of the item types, and sizes, which `bind` evaluates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import numpy as np
import torch

from ..errors import At, InputError, SpecError
from ..expr import Count, Expr, Scope, expression, plain
from ..node import Part, Stated, evaluate_all, stated

SCOPES = ("common_kwargs", "text_kwargs", "images_kwargs", "videos_kwargs", "audio_kwargs")
"""The keys of `mm_processor_kwargs` that hold options for one part of a Hugging Face processor."""


class Between(Part):
    """A size that varies from `least` to `most`, both included: whole numbers >= 0, or expressions
    over `cfg`."""

    least: Stated[Count, Any] = stated(expression)
    most: Stated[Count, Any] = stated(expression)

    _word = "between"

    def __str__(self) -> str:
        return f"{plain(self.least)!r}..{plain(self.most)!r}"


between = Between

Size: TypeAlias = "Expr | int | Between | Callable[[Scope], Any]"
"""One dimension: a whole number >= 0, or `between` two of them."""

Sizes: TypeAlias = "tuple[Any, ...] | list[tuple[Any, ...]] | Expr | Callable[[Scope], Any]"
"""The sizes of an item, one per dimension, or a list of such sizes."""


class ItemType(Part):
    """Base of the item types. A bound item type holds numbers only.

    Attributes:
        rank: the number of dimensions of an item as one array.
        largest: the sizes of the largest items, once bound.
        parts: the item types of its parts, by name, as which a canonical item is a dict; empty
            where an item is a whole.
        is_field: whether items, or their parts, can be processed fields as they are.
        media: vLLM's name for such an item: image, video or audio. Empty for none of them, None for
            any of them.
        sent: what a caller may send for one item or several.
        mime: the media type of a file that holds one item; empty where JSON can hold an item.
        scope: the key of `SCOPES` that concerns these items alone.
        form: the argument of ``mmkit show --item`` for an item of some sizes.
        dummy_sizes: the sizes of `largest`, as vLLM's `limit_mm_per_prompt` names them.
        small_sizes: the sizes of `small`, where not every spec accepts the smallest ones.
    """

    _is_named = True

    rank: ClassVar[int]
    if TYPE_CHECKING:  # a class variable here would come first among the fields of a subclass
        largest: ClassVar[Any]
    parts: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    is_field: ClassVar[bool] = False
    media: ClassVar[str | None] = None
    sent: ClassVar[tuple[type, ...]] = (object,)
    mime: ClassVar[str] = ""
    scope: ClassVar[str] = ""
    form: ClassVar[str] = "sizes as 9x4"
    dummy_sizes: ClassVar[tuple[str, ...]] = ()
    small_sizes: ClassVar[tuple[tuple[int, ...], ...]] = ()

    def bind(self, scope: Scope) -> Self:
        """This item type with its expressions evaluated on `cfg` and `proc`.

        Raises:
            SpecError: a value that the config lacks, or that is out of range.
        """
        kind: Any = type(self)
        known: dict[str, Any] = {}
        for name in self._names:
            with At(f"{kind.__name__}.{name}"):
                known[name] = evaluate_all(getattr(self, name), scope)
        return kind(**known)  # type: ignore[no-any-return]

    def split(self, data: object, where: str) -> list[Any]:
        """The items in a caller's data, which holds one item, or several in a sequence or batch;
        not validated yet.

        Raises:
            InputError: the data cannot hold items of this type.
        """
        if not isinstance(data, self.sent):
            raise InputError(where, f"{self.expected} or a list of them", described(data))
        if isinstance(data, ARRAYS):
            several = data.ndim == self.rank + 1  # canonical() refuses a wrong rank
        else:
            several = isinstance(data, (list, tuple)) and not self._is_one(data)
        return list(data) if several else [data]  # type: ignore[call-overload]

    def _is_one(self, data: Sequence[Any]) -> bool:
        """Whether a list or tuple is one item."""
        return False

    def canonical(self, value: object, where: str) -> Any:
        """An item in its canonical form.

        Raises:
            InputError: the item is malformed.
        """
        raise NotImplementedError

    def canonical_all(self, values: Sequence[object], where: str) -> list[Any]:
        """Each item in its canonical form; None stands for an item that the caller only names.

        Raises:
            InputError: an item is malformed.
        """
        return [
            None if value is None else self.canonical(value, f"{where}[{i}]")
            for i, value in enumerate(values)
        ]

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        """The value of the root `item` for a canonical item.

        Args:
            value: the item.
            index: its position among the items of its modality.
        """
        raise NotImplementedError

    def blank(self, *sizes: int) -> Any:
        """A canonical item of these sizes."""
        raise NotImplementedError

    def bounds(self) -> list[Between]:
        """The least and the most of each size."""
        raise NotImplementedError

    def nearest(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes within the bounds that are nearest to the given ones."""
        pairs = zip(sizes, self.bounds(), strict=True)
        return tuple(min(max(size, bound.least), bound.most) for size, bound in pairs)

    def candidates(self, fraction: float = 1.0) -> list[Any]:
        """Canonical items that include the one with the most encoder rows.

        Args:
            fraction: makes the items smaller by this factor, as far as the type allows.
        """
        scaled = [self.scaled(sizes, fraction) for sizes in self.largest]
        return [self.blank(*self.nearest(sizes)) for sizes in scaled]

    def scaled(self, sizes: Sequence[int], fraction: float) -> list[int]:
        """Sizes, smaller by a factor."""
        return [int(size * fraction) for size in sizes]

    def small(self) -> list[Any]:
        """Small canonical items, in ascending order."""
        sizes = self.small_sizes or (tuple(bound.least for bound in self.bounds()),)
        return [self.blank(*own) for own in sizes]

    def smallest(self) -> list[Any]:
        """The smallest item, where every spec accepts it: binding rehearses a spec on this item
        and on the candidates."""
        return [] if self.small_sizes else self.small()

    def within(self, sizes: Mapping[str, int], where: str) -> ItemType:
        """This bound item type with a largest item of at most the sizes of vLLM's
        `limit_mm_per_prompt`.

        Raises:
            InputError: sizes that belong to other kinds of items.
        """
        if unknown := {name: size for name, size in sizes.items() if name not in self.dummy_sizes}:
            stated = " and ".join(["a count", *self.dummy_sizes])
            got = " and ".join(f"{name}={size}" for name, size in unknown.items())
            remedy = "State other sizes as largest in the spec."
            raise InputError(f"{where}, limit_mm_per_prompt", stated, got, remedy)
        most = [sizes.get(name, math.inf) for name in self.dummy_sizes]
        largest = tuple(tuple(map(min, row, most)) for row in self.largest)
        smaller: Any = self
        return replace(smaller, largest=largest)  # type: ignore[no-any-return]

    def for_function(self) -> ItemType:
        """This item type for items that a function of the spec processes."""
        return self

    @property
    def expected(self) -> str:
        """A short description of an item, for messages."""
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        """The array of an item, for clients: `shape`, with [least, most] for a size that varies,
        and `dtype`."""
        return {"shape": None, "dtype": None}


def unscoped(kwargs: Mapping[str, Any], kinds: Sequence[ItemType]) -> dict[str, Any]:
    """The `mm_processor_kwargs` that concern some item types: the options without a scope,
    overridden by those of `common_kwargs` and of the scopes of these types."""
    options = {name: value for name, value in kwargs.items() if name not in SCOPES}
    concerned = {"common_kwargs", *(kind.scope for kind in kinds)}
    for scope in filter(concerned.__contains__, SCOPES):
        options.update(kwargs.get(scope) or {})
    return options


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_positive(number: Any, where: str) -> None:
    """Refuse what is no number > 0, once bound; None states no number."""
    if number is not None and not (is_number(number) and number > 0):
        raise SpecError(where, "a number > 0 from cfg", repr(number))


def check_size(size: Any, where: str) -> None:
    """Refuse what is no size, once bound."""
    if not _are_whole(*ends(size), least=0) or ends(size) != tuple(sorted(ends(size))):
        raise SpecError(where, "whole numbers >= 0, in order", str(size))


def sizes_of(value: Any, width: int, where: str) -> tuple[tuple[int, ...], ...]:
    """One shape, or several, of `width` sizes each."""
    rows = value
    if not isinstance(rows, (list, tuple)) or not isinstance(next(iter(rows), None), (list, tuple)):
        rows = [rows]
    sizes = [tuple(row) if isinstance(row, (list, tuple)) else (row,) for row in rows]
    for row in sizes:
        if len(row) != width or not _are_whole(*row, least=1):
            raise SpecError(where, f"{width} whole number(s) >= 1", repr(row))
    return tuple(sizes)


def _are_whole(*values: Any, least: int) -> bool:
    return all(isinstance(one, int) and is_number(one) and one >= least for one in values)


def shape_text(shape: Sequence[Any]) -> str:
    """A shape for messages: ``(6, 1..3)``."""
    return f"({', '.join(map(str, map(plain, shape)))}{',' if len(shape) == 1 else ''})"


def ends(size: Any) -> tuple[Any, Any]:
    """The least and the most of a size."""
    return (size.least, size.most) if isinstance(size, Between) else (size, size)


def fits(shape: Sequence[int], sizes: Sequence[Any]) -> bool:
    """Whether a shape has these sizes, of which some may be `between`."""
    if shape == sizes or len(shape) != len(sizes):
        return bool(shape == sizes)
    return all(least <= n <= most for n, (least, most) in zip(shape, map(ends, sizes), strict=True))


ARRAYS = (np.ndarray, torch.Tensor)
SCALARS = (int, float, np.generic)
LARGEST_FLOAT16 = 65504.0


def described(value: object) -> str:
    if value is None:
        return "None"
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or somebody's class
        text = ""
    return f"{type(value).__name__} {text}" if 0 < len(text) <= 40 else f"a {type(value).__name__}"


def form(value: object) -> str:
    """A tensor or an array by its shape and dtype, for messages; anything else by its class."""
    if isinstance(value, ARRAYS):
        return f"shape {tuple(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"


def strided(tensor: torch.Tensor, where: str, expected: str) -> torch.Tensor:
    """A plain tensor in host memory, apart from autograd."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        raise InputError(where, expected, f"a {tensor.layout} tensor on {tensor.device}")
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_cpu else tensor.cpu()


def as_array(value: object, where: str, expected: str) -> np.ndarray[Any, Any]:
    """An array, tensor, image or list as an array; a floating tensor, which may be a bfloat16, as
    float32."""
    if isinstance(value, torch.Tensor):
        value = strided(value, where, expected)
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(where, expected, "a masked array", "Fill its gaps.")
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        value = value.float()
    try:
        return np.asarray(value)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InputError(where, expected, described(value)) from error


def check_finite(value: Any, where: str) -> None:
    """Refuse arrays and tensors of other than real numbers that any model dtype can hold.

    Raises:
        InputError: a dtype that is no real number's, NaN, an infinity, or a magnitude beyond the
            largest float16.
    """
    array = as_array(value, where, "real numbers")
    if array.dtype.kind not in "fiub":
        raise InputError(where, "real numbers", f"dtype {array.dtype}")
    if array.dtype.kind != "f" or not array.size:
        return
    most = max(array.max(), -array.min())  # without a copy of it; NaN is both
    if not most <= LARGEST_FLOAT16:
        got = "NaN or an infinity" if not np.isfinite(array).all() else f"{float(most):g}"
        raise InputError(where, f"finite values of magnitude <= {LARGEST_FLOAT16:g}", got)


def dtype_name(dtype: Any) -> Any:
    """The name of a torch dtype; anything else as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype

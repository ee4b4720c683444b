"""Items: what a caller may send.

An item type splits a caller's data into items, brings each to one canonical form (vLLM's hash sees dtype and container,
so equal values must be one form), validates it completely, tells its facts to expressions, and knows its largest
instance, from which dummy inputs and the token maximum are derived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from .errors import InputError, SpecError
from .expr import Count, Expr, Scope, Structural, Value, evaluate, expression, plain

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch has no arithmetic on these
_ACCEPTED = {dtype: kind for kind in (_FLOATS, _INTEGERS, (torch.bool,)) for dtype in kind}
"""What each canonical dtype is made from without a cast that changes the kind of number."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _ACCEPTED}
_ARRAYS = (np.ndarray, torch.Tensor)
LARGEST_FLOAT16 = 65504.0
_SCALARS = (int, float, np.generic)
_DEEPEST = 32  # levels of nested lists; more are a mistake, or a list that holds itself


@dataclass(frozen=True, eq=False)
class Between(Structural):
    """A dimension that may vary; see `between`."""

    least: Any
    most: Any

    def __repr__(self) -> str:
        return f"between({self.least!r}, {self.most!r})"

    def __str__(self) -> str:
        return f"{self.least!r}..{self.most!r}"


Size: TypeAlias = "Expr | int | Between | Callable[[Scope], Any]"
"""One dimension: a whole number >= 0, or `between` two of them."""

Sizes: TypeAlias = "tuple[Any, ...] | list[tuple[Any, ...]] | Expr | Callable[[Scope], Any]"
"""The sizes of an item, one per dimension, or a list of such sizes."""


def between(least: Count, most: Count) -> Between:
    """A dimension of any size from `least` to `most`, both included; whole numbers >= 0, or expressions over `cfg`."""
    return Between(expression(least), expression(most))


class ItemType(Structural):
    """Base of the item types. A bound item type holds numbers only."""

    _rank: int
    """How many dimensions an item has as one array."""

    of_vllm = False
    """Whether vLLM has items of this kind, too."""

    argument = ""
    """What vLLM calls the items as an argument of a Hugging Face processor; empty for the name of the modality."""

    dummy_sizes: tuple[str, ...] = ()
    """The sizes of `largest`, as vLLM's `limit_mm_per_prompt` names them."""

    def bind(self, scope: Scope) -> ItemType:
        """This item type with its expressions evaluated on `cfg` and `proc`.

        Raises:
            SpecError: a value that the config lacks, or that is out of range.
        """
        raise NotImplementedError

    def split(self, data: object, where: str) -> list[Any]:
        """The items in a caller's data, which is one item, or several in a sequence or batch. Not validated yet.

        Raises:
            InputError: the data cannot hold items of this type.
        """
        if isinstance(data, _ARRAYS):
            several = data.ndim == self._rank + 1  # canonical() refuses a wrong rank
        else:
            several = isinstance(data, (list, tuple)) and not self._is_one(data)
        return list(data) if several else [data]  # type: ignore[call-overload]

    def _is_one(self, data: Sequence[Any]) -> bool:
        """Whether a list or tuple is one item."""
        return False

    def canonical(self, value: object, where: str) -> Any:
        """The one form of an item.

        Raises:
            InputError: the item is malformed.
        """
        raise NotImplementedError

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        """What expressions see as `item`, for a canonical item at a position among those of its modality."""
        raise NotImplementedError

    def candidates(self) -> list[Any]:
        """Canonical items among which is the one with the most encoder rows."""
        raise NotImplementedError

    def within(self, sizes: Mapping[str, int], where: str) -> ItemType:
        """This item type, bound, with a largest item that has at most the sizes of vLLM's `limit_mm_per_prompt`.

        Raises:
            InputError: sizes that vLLM has of other kinds of items.
        """
        if unknown := {name: size for name, size in sizes.items() if name not in self.dummy_sizes}:
            stated = " and ".join(["a count", *self.dummy_sizes])
            got = " and ".join(f"{name}={size}" for name, size in unknown.items())
            raise InputError(f"{where}, limit_mm_per_prompt", stated, got, "State other sizes as largest in the spec.")
        most = [sizes.get(name, math.inf) for name in self.dummy_sizes]
        kind: Any = self
        if isinstance(kind.largest, int):
            largest: Any = min(kind.largest, *most)
        else:
            largest = tuple(tuple(map(min, row, most)) for row in kind.largest)
        smaller: ItemType = replace(kind, largest=largest)
        return smaller

    def for_function(self) -> ItemType:
        """This item type where a function of the spec processes the items."""
        return self

    def extremes(self) -> list[Any]:
        """The candidates, and the smallest item where there is one."""
        return self.candidates()

    @property
    def expected(self) -> str:
        """What a caller should send, in a few words."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Tensor(ItemType):
    """A tensor: the item type of new modalities.

    Callers send one item, a sequence of items, or a batch with one more leading dimension, as torch tensors, numpy
    arrays or nested lists of numbers. The canonical form is a contiguous CPU tensor of `dtype`.

    A floating `dtype` accepts every floating dtype (float64, numpy's default, is rounded to nearest), lists of numbers
    (rounded likewise), and integer arrays whose every value it holds exactly; bool and complex arrays are refused
    rather than cast. An integer `dtype` accepts integer values that fit, and bool only bools. A scalar (shape ``()``)
    may also be a number.

    Attributes:
        shape: one size, expression or `between(least, most)` per dimension.
        dtype: the canonical torch dtype, or its name.
        finite: refuse NaN and infinities.
        bound: largest magnitude of finite values, rounded to `dtype` as they are. None, the default, is the largest
            float16, which no model dtype overflows when it casts; for an integer `dtype` it is the range of that dtype.
        largest: shape of the item with the most encoder rows, or a list of shapes among which it is, where that is not
            the item with every size at its most.

    Facts: `shape`, `length` (the first dimension, or 1 for a scalar), `index`.
    """

    shape: tuple[Any, ...]
    dtype: Any = "float32"
    finite: bool = True
    bound: Any = None
    largest: Any = None

    if TYPE_CHECKING:  # what an author may write; a bound item type holds numbers

        def __init__(
            self,
            shape: tuple[Size, ...] | list[Size],
            dtype: str | torch.dtype = "float32",
            finite: bool = True,
            bound: Expr | float | None = None,
            largest: Sizes | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.dtype not in _DTYPES:
            raise SpecError("Tensor.dtype", f"one of {', '.join(_DTYPES)}", repr(self.dtype))
        if isinstance(self.shape, list):
            object.__setattr__(self, "shape", tuple(self.shape))
        if not isinstance(self.shape, tuple):
            raise SpecError("Tensor.shape", "a tuple of sizes, one per dimension", repr(self.shape))
        object.__setattr__(self, "_rank", len(self.shape))

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The canonical dtype."""
        return _DTYPES[self.dtype]

    def bind(self, scope: Scope) -> Tensor:
        sizes = tuple(_bound_size(size, scope, axis) for axis, size in enumerate(self.shape))
        most = tuple(size.most if isinstance(size, Between) else size for size in sizes)
        largest = _sizes(self.largest, scope, len(most), "Tensor.largest") if self.largest is not None else (most,)
        for shape in largest:
            if not fits(shape, sizes):
                raise SpecError("Tensor.largest", f"a shape within {shape_text(sizes)}", repr(shape))
        bound = None if self.bound is None else _positive(self.bound, scope, "Tensor.bound")
        return replace(self, shape=sizes, bound=magnitude(bound, self.torch_dtype), largest=largest)

    @cached_property
    def expected(self) -> str:
        return f"a {shape_text(self.shape)} {self.dtype} tensor"

    def _is_one(self, data: Sequence[Any]) -> bool:
        """Whether nested lists are one item, judged by their first number."""
        inner: Any = data
        for _ in range(self._rank):
            if not isinstance(inner, (list, tuple)):
                break
            if not inner:
                return inner is not data
            inner = inner[0]
        return isinstance(inner, _SCALARS)

    def split(self, data: object, where: str) -> list[Any]:
        if not isinstance(data, (*_ARRAYS, list, tuple)) and (self._rank or not isinstance(data, _SCALARS)):
            raise InputError(where, f"{self.expected} or a list of them", _describe(data))
        return super().split(data, where)

    def canonical(self, value: object, where: str) -> torch.Tensor:
        tensor = _as_tensor(value, where, self)
        integers = tensor.dtype in _INTEGERS
        if tensor.dtype not in _ACCEPTED[self.torch_dtype] and not (integers and self.torch_dtype in _FLOATS):
            got = f"dtype {str(tensor.dtype).removeprefix('torch.')}"
            raise InputError(where, self.expected, got, f"Convert it to {self.dtype}.")
        if not fits(tensor.shape, self.shape):
            remedy = "Send one tensor per item." if tensor.ndim > self._rank else ""
            raise InputError(where, self.expected, f"shape {tuple(tensor.shape)}", remedy)
        if tensor.numel() and self.torch_dtype.is_floating_point:
            self._check_floats(tensor, where)
        elif tensor.numel() and integers:
            self._check_integers(tensor, where)
        # a copy: what is cached must not change when the caller reuses its memory
        return tensor.to(self.torch_dtype, copy=True, memory_format=torch.contiguous_format)

    def _check_integers(self, tensor: torch.Tensor, where: str) -> None:
        limits = torch.iinfo(self.torch_dtype)
        lowest, highest = limits.min, limits.max
        if self.bound is not None:
            lowest, highest = max(lowest, -self.bound), self.bound
        least, most = int(tensor.min()), int(tensor.max())
        if least < lowest or most > highest:
            expected = f"{self.dtype} values from {lowest} to {highest}"
            raise InputError(where, expected, f"values from {least} to {most}")

    def _check_floats(self, tensor: torch.Tensor, where: str) -> None:
        integers = not tensor.dtype.is_floating_point
        if not integers and float(tensor.abs().max()) <= self.bound:  # not so for NaN, which wins every max
            return
        flat = tensor.double().flatten()
        bad = ~(flat.abs() <= self.bound) & (flat.isfinite() | self.finite)
        if bad.any():
            value = float(flat[bad][0])
            remedy = "Check the units." if math.isfinite(value) else ""
            got = f"{value:g} at {_first(bad, tensor)}"
            raise InputError(where, f"finite values of magnitude <= {self.bound:g}", got, remedy)
        if integers:
            self._check_exact(tensor.flatten(), tensor, where)

    def _check_exact(self, flat: torch.Tensor, tensor: torch.Tensor, where: str) -> None:
        """Refuse integers that the floating dtype would round."""
        held = flat.to(self.torch_dtype)
        # 2**63 is no int64: what was rounded up to it would come back as any number
        rounded = (held.double() >= 2.0**63) | (held.to(torch.int64) != flat)
        if rounded.any():
            got = f"{int(flat[rounded][0])} at {_first(rounded, tensor)}"
            remedy = "Send floats to have them rounded."
            raise InputError(where, f"integers that {self.dtype} holds exactly", got, remedy)

    def facts(self, value: torch.Tensor, index: int) -> SimpleNamespace:
        shape = tuple(value.shape)
        return SimpleNamespace(index=index, shape=shape, length=shape[0] if shape else 1)

    def candidates(self) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=self.torch_dtype) for shape in self.largest]

    def extremes(self) -> list[torch.Tensor]:
        least = [size.least if isinstance(size, Between) else size for size in self.shape]
        return [*self.candidates(), torch.zeros(least, dtype=self.torch_dtype)]


@dataclass(frozen=True, eq=False)
class Image(ItemType):
    """An image, as vLLM accepts it: PIL image, (height, width, 3) uint8 array, or (3, height, width) array or tensor.

    The canonical form of 8-bit RGB pixels, channels last or first, is the PIL image of them. Other arrays, as float32
    of one, three or four channels, stay as they are, where they are taken.

    Attributes:
        largest: (width, height) in pixels of the image with the most tokens; a list where it is one of several.
        arrays: take other arrays. None, the default, takes them for `hf()` and refuses them for a function of the spec,
            which then gets PIL images alone.

    Facts: `width`, `height`, `index`.
    """

    largest: Any
    arrays: bool | None = None

    if TYPE_CHECKING:

        def __init__(self, largest: Sizes, arrays: bool | None = None) -> None: ...

    def bind(self, scope: Scope) -> Image:
        return replace(self, largest=_sizes(self.largest, scope, 2, "Image.largest"))

    def for_function(self) -> Image:
        return replace(self, arrays=bool(self.arrays))

    expected = "an image"
    of_vllm = True
    argument = "images"
    dummy_sizes = ("width", "height")
    _rank = 3

    def canonical(self, value: object, where: str) -> Any:
        media = getattr(value, "media", value)  # vLLM wraps decoded media together with its bytes
        if isinstance(media, _pil().Image):
            if 0 in media.size:
                raise InputError(where, "an image of at least 1 x 1 pixels", f"size {media.size}")
            return value
        if not isinstance(media, _ARRAYS):
            raise InputError(where, "a PIL image or an array", _describe(value))
        expected = "an array of shape (height, width, 3) or (3, height, width)"
        if not _holds_pixels(media.shape, 3):
            raise InputError(where, expected, f"shape {tuple(media.shape)}")
        if isinstance(media, torch.Tensor):
            value = media = _strided(media, where, expected)
        if media.dtype in (np.uint8, torch.uint8) and 3 in (media.shape[-1], media.shape[0]):
            pixels = np.asarray(media)
            last = pixels if pixels.shape[-1] == 3 else np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
            return _pil().fromarray(last, "RGB")
        if self.arrays is False:
            got = f"{str(media.dtype).removeprefix('torch.')} values of shape {tuple(media.shape)}"
            raise InputError(where, "a PIL image or 8-bit RGB pixels", got, "Convert it to uint8 values from 0 to 255.")
        check_finite(media, where)
        return value

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        width, height = _image_size(getattr(value, "media", value))
        return SimpleNamespace(index=index, width=width, height=height)

    def candidates(self) -> list[Any]:
        return [_pil().new("RGB", size, color=(255, 255, 255)) for size in self.largest]


@dataclass(frozen=True, eq=False)
class Video(ItemType):
    """A video, as vLLM accepts it: (frames, height, width, 3) array, list of frames, or (frames, metadata).

    Attributes:
        largest: (frames, width, height) of the video with the most tokens; a list where it is one of several.
        metadata: the model needs the metadata of every video.

    Facts: `frames`, `width`, `height`, `metadata` (a dict, or None), `index`.
    """

    largest: Any
    metadata: bool = False

    if TYPE_CHECKING:

        def __init__(self, largest: Sizes, metadata: bool = False) -> None: ...

    def bind(self, scope: Scope) -> Video:
        return replace(self, largest=_sizes(self.largest, scope, 3, "Video.largest"))

    @property
    def expected(self) -> str:
        return "a video" + (" with metadata" if self.metadata else "")

    _rank = 4
    of_vllm = True
    argument = "videos"
    dummy_sizes = ("num_frames", "width", "height")

    def _is_one(self, data: Sequence[Any]) -> bool:
        return _is_pair(data) or (len(data) > 0 and _is_frame(data[0]))

    def canonical(self, value: object, where: str) -> Any:
        frames, metadata = _video_parts(value)
        if self.metadata and metadata is None:
            raise InputError(where, "a (frames, metadata) pair", "frames without metadata")
        expected = "an array of shape (frames, height, width, 3)"
        if isinstance(frames, (list, tuple)) and frames and all(map(_is_frame, frames)):
            frames = _stacked([_array(frame, where, expected) for frame in frames], where)
        if not isinstance(frames, _ARRAYS) or not _holds_pixels(frames.shape, 4):
            got = f"shape {tuple(frames.shape)}" if hasattr(frames, "shape") else _describe(value)
            raise InputError(where, expected, got)
        if isinstance(frames, torch.Tensor):
            frames = _strided(frames, where, expected)
        check_finite(frames, where)
        return frames if metadata is None else (frames, metadata)

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        frames, metadata = _video_parts(value)
        width, height = _image_size(frames[0])
        return SimpleNamespace(index=index, frames=len(frames), width=width, height=height, metadata=metadata)

    def candidates(self) -> list[Any]:
        return [self._blank(*size) for size in self.largest]

    def _blank(self, frames: int, width: int, height: int) -> Any:
        video = np.full((frames, height, width, 3), 255, dtype=np.uint8)
        numbers = list(range(frames))
        metadata = {"fps": 1.0, "duration": float(frames), "total_num_frames": frames, "frames_indices": numbers}
        return (video, metadata) if self.metadata else video


@dataclass(frozen=True, eq=False)
class Audio(ItemType):
    """Audio, as vLLM accepts it: a 1-D float array, or (array, sampling rate in Hz), resampled to `rate`.

    The canonical form is a float32 array. It is resampled by torchaudio (vLLM's default), soxr or scipy, the first that
    is installed; without any of them another sampling rate than `rate` is refused.

    Attributes:
        largest: length in samples of the audio with the most tokens.
        rate: sampling rate in Hz that the model expects; None takes no audio with a sampling rate.

    Facts: `length` in samples, `index`.
    """

    largest: Any
    rate: Any = None

    if TYPE_CHECKING:

        def __init__(self, largest: Count, rate: Expr | float | None = None) -> None: ...

    def bind(self, scope: Scope) -> Audio:
        ((length,),) = _sizes(self.largest, scope, 1, "Audio.largest")
        return Audio(largest=length, rate=None if self.rate is None else _positive(self.rate, scope, "Audio.rate"))

    expected = "a 1-D float array or an (array, sampling rate) pair"
    of_vllm = True
    argument = "audios"
    dummy_sizes = ("length",)
    _rank = 1

    def _is_one(self, data: Sequence[Any]) -> bool:
        if isinstance(data, tuple):
            return len(data) == 2 and isinstance(data[1], _SCALARS)
        return len(data) > 0 and isinstance(data[0], _SCALARS)

    def canonical(self, value: object, where: str) -> Any:
        samples, rate = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        rate, array = plain(rate), _array(samples, where, self.expected)
        if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.floating):
            raise InputError(where, self.expected, f"shape {array.shape}, dtype {array.dtype}")
        if rate is not None and not (_is_number(rate) and 1 <= rate < math.inf):
            raise InputError(where, "a sampling rate >= 1 in Hz", repr(rate))
        check_finite(array, where)
        array = np.ascontiguousarray(array, dtype=np.float32)
        return array if rate is None else self._at_rate(array, rate, where)

    def _at_rate(self, samples: np.ndarray[Any, Any], rate: float, where: str) -> np.ndarray[Any, Any]:
        if self.rate is None:
            got = f"{rate:g} Hz"
            raise InputError(where, "samples alone, since the spec states no sampling rate", got, "Send the array.")
        before, after = round(rate), round(self.rate)
        if before == after:
            return samples
        length = -(-len(samples) * after // before)
        if length > max(len(samples), self.largest):  # a few samples of a low rate must not become gigabytes
            got = f"{length} of them from {len(samples)} at {rate:g} Hz"
            raise InputError(where, f"at most {self.largest} samples at {self.rate:g} Hz", got, "Send less.")
        return np.ascontiguousarray(_resampled(samples, before, after, where), dtype=np.float32)

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        return SimpleNamespace(index=index, length=len(value))

    def candidates(self) -> list[Any]:
        return [np.zeros(self.largest, dtype=np.float32)]


SCOPES = ("common_kwargs", "text_kwargs", "images_kwargs", "videos_kwargs", "audio_kwargs")
"""Where `mm_processor_kwargs` may hold options for a part of Hugging Face's processors, as these take them."""


def unscoped(kwargs: Mapping[str, Any], kinds: Sequence[ItemType]) -> dict[str, Any]:
    """The `mm_processor_kwargs` that concern some item types: those without a scope, and in their place those of
    `common_kwargs` and of the scopes of these types."""
    options = {name: value for name, value in kwargs.items() if name not in SCOPES}
    of_kinds = {"images_kwargs": Image, "videos_kwargs": Video, "audio_kwargs": Audio}
    scopes = [scope for scope, of in of_kinds.items() if any(isinstance(kind, of) for kind in kinds)]
    for scope in ("common_kwargs", *scopes):
        options.update(kwargs.get(scope) or {})
    return options


def _resampled(samples: np.ndarray[Any, Any], before: int, after: int, where: str) -> Any:
    """Audio at another sampling rate, by the first library there is of those that vLLM resamples with."""
    with suppress(ImportError, OSError):
        from torchaudio.functional import resample

        return resample(torch.from_numpy(samples), before, after).numpy()
    with suppress(ImportError, OSError):
        import soxr

        return soxr.resample(samples, before, after)
    with suppress(ImportError, OSError):
        from scipy.signal import resample_poly

        common = math.gcd(before, after)
        return resample_poly(samples, after // common, before // common)
    remedy = "Resample it first, or install soxr."
    raise InputError(where, f"audio at {after} Hz", f"{before} Hz, and no library that resamples", remedy)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _known(value: Value, scope: Scope, where: str) -> Any:
    """The value of an expression that needs `cfg` and `proc` alone."""
    try:
        return evaluate(expression(value), scope)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error


def _positive(value: Value, scope: Scope, where: str) -> int | float:
    number = _known(value, scope, where)
    if not _is_number(number) or not number > 0:
        raise SpecError(where, "a number > 0 from cfg", repr(number))
    return number  # type: ignore[no-any-return]


def shape_text(shape: Sequence[Any]) -> str:
    """A shape for messages: ``(6, 1..3)``."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _bound_size(size: Any, scope: Scope, axis: int) -> Any:
    where = f"Tensor.shape[{axis}] = {size!s}"
    known = map_size(lambda end: _known(end, scope, where), size)
    least, most = (known.least, known.most) if isinstance(known, Between) else (known, known)
    if not _is_whole(least, 0) or not _is_whole(most, least):
        raise SpecError(where, "whole numbers >= 0, in order", str(known))
    return known


def _sizes(value: Any, scope: Scope, width: int, where: str) -> tuple[tuple[int, ...], ...]:
    """One shape, or several, of `width` sizes each."""
    value = _known(value, scope, where)
    several = isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple))
    sizes = []
    for row in value if several else [value]:
        sizes.append(tuple(_known(v, scope, where) for v in (row if isinstance(row, (list, tuple)) else [row])))
        if len(sizes[-1]) != width or not all(_is_whole(v, 1) for v in sizes[-1]):
            raise SpecError(where, f"{width} whole number(s) >= 1", repr(sizes[-1]))
    return tuple(sizes)


def _strided(tensor: torch.Tensor, where: str, expected: str) -> torch.Tensor:
    """A plain tensor in host memory, apart from autograd."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        raise InputError(where, expected, f"a {tensor.layout} tensor on {tensor.device}")
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.cpu()


def _array(value: object, where: str, expected: str) -> np.ndarray[Any, Any]:
    """An array, tensor, image or list as an array; a floating tensor, which may be a bfloat16, as float32."""
    if isinstance(value, torch.Tensor):
        value = _strided(value, where, expected)
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(where, expected, "a masked array", "Fill its gaps.")
    try:
        return np.asarray(value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InputError(where, expected, _describe(value)) from error


def _as_tensor(value: object, where: str, kind: Tensor) -> torch.Tensor:
    """The value as a strided CPU tensor of its own dtype, which may share its memory."""
    if isinstance(value, torch.Tensor):
        value = _strided(value, where, kind.expected)
        if value.dtype not in _UNSIGNED:
            return value
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        array = _array(value, where, kind.expected)
    else:
        array = _from_list(value, where, kind)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8 and array.size and int(array.max()) >= 2**63:
            raise InputError(where, kind.expected, f"the value {int(array.max())}")
        array = array.astype(np.int64)
    try:
        return torch.from_numpy(array.copy())  # torch refuses negative strides and warns of read-only memory
    except (TypeError, ValueError) as error:  # no number, not of this machine's byte order, or too long for torch
        raise InputError(where, kind.expected, f"dtype {array.dtype}", f"Convert it to {kind.dtype}.") from error


def _from_list(value: object, where: str, kind: Tensor) -> np.ndarray[Any, Any]:
    """An array of a number or of nested lists of numbers; these have no dtype, so integers will do for floats."""
    numbers = (bool, np.bool_) if kind.torch_dtype == torch.bool else (int, float, np.integer, np.floating)
    if odd := _first_odd(value, numbers):
        got = f"a list that holds {odd}" if isinstance(value, (list, tuple)) else odd
        raise InputError(where, kind.expected, got)
    try:
        return np.array(value, dtype=np.float64 if kind.torch_dtype.is_floating_point else None)
    except ValueError as error:
        raise InputError(where, kind.expected, "a ragged list") from error


def _first_odd(value: Any, numbers: tuple[type, ...], depth: int = 0) -> str | None:
    """The first element of nested lists that is none of these numbers."""
    if isinstance(value, (list, tuple)):
        if depth == _DEEPEST:
            return f"more than {_DEEPEST} levels"
        return next(filter(None, (_first_odd(v, numbers, depth + 1) for v in value)), None)
    if not isinstance(value, numbers) or (isinstance(value, bool) and bool not in numbers):
        return _describe(value)
    return _describe(value).removeprefix("int ") if isinstance(value, int) and not -(2**63) <= value < 2**63 else None


def _first(flags: torch.Tensor, tensor: torch.Tensor) -> str:
    """The index, in a tensor, of the first that is flagged among its elements."""
    position = int(flags.nonzero()[0])
    return f"[{', '.join(map(str, map(int, np.unravel_index(position, tensor.shape))))}]"


def dtype_name(dtype: Any) -> Any:
    """The name of a torch dtype; anything else as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def magnitude(bound: int | float | None, dtype: torch.dtype) -> int | float | None:
    """The largest magnitude of a value of a dtype: a stated bound as far as the dtype reaches, rounded as values are;
    without one the largest float16, and None, all that there is, for integers."""
    if dtype.is_floating_point:
        if bound is None:
            return min(LARGEST_FLOAT16, torch.finfo(dtype).max)
        bound = min(bound, torch.finfo(dtype).max)
        return max(bound, float(torch.tensor(float(bound), dtype=dtype)))
    if bound is None or dtype == torch.bool:
        return None
    return None if bound > torch.iinfo(dtype).max else int(bound)


def map_size(function: Callable[[Any], Any], size: Any) -> Any:
    """A size after a function; both ends of `between`."""
    return Between(function(size.least), function(size.most)) if isinstance(size, Between) else function(size)


def fits(shape: Sequence[int], sizes: Sequence[Any]) -> bool:
    """Whether a shape has these sizes; `between` may stand for one."""
    return shape == sizes or (len(shape) == len(sizes) and all(map(_fits, shape, sizes)))


def _fits(size: int, wanted: Any) -> bool:
    return bool(wanted.least <= size <= wanted.most if isinstance(wanted, Between) else size == wanted)


def check_finite(value: Any, where: str) -> None:
    """Refuse arrays and tensors of other than real numbers that any model dtype can hold.

    Raises:
        InputError: a dtype that is no real number's, NaN, an infinity, or a magnitude beyond the largest float16.
    """
    array = _array(value, where, "real numbers")
    if array.dtype.kind not in "fiub":
        raise InputError(where, "real numbers", f"dtype {array.dtype}")
    if array.dtype.kind == "f" and array.size and not np.abs(array).max() <= LARGEST_FLOAT16:
        got = "NaN or an infinity" if not np.isfinite(array).all() else f"{float(np.abs(array).max()):g}"
        raise InputError(where, f"finite values of magnitude <= {LARGEST_FLOAT16:g}", got)


def embeddings(
    data: object, kind: ItemType, field: str, hidden_size: int | None, where: str
) -> list[torch.Tensor] | None:
    """Precomputed embeddings, each a floating (rows, hidden size) tensor; None where the data holds raw items.

    They come as ``{field: ...}``; for images, videos and audio also as vLLM's own classes take them: as one floating
    3-D tensor, or as a list of 2-D tensors. A tensor that may be a picture as well is refused.

    Args:
        data: what a caller sends for one modality, which takes embeddings.
        kind: its item type.
        field: the field that carries embeddings.
        hidden_size: width of the rows that the language model takes; None if it is not known.
        where: names the modality in errors.

    Raises:
        InputError: rows that do not fit the model, or that are not finite; a tensor that may be either.
    """
    if isinstance(data, Mapping) and set(data) == {field}:
        return _embedding_rows(data[field], hidden_size, where)
    if not kind.of_vllm:
        return None
    remedy = f'Send embeddings as {{"{field}": ...}}, and pixels as uint8, or as an array or tensor in a list.'
    if _is_floating(data, 3):
        return _embedding_rows(data, hidden_size, where, remedy)
    if not isinstance(data, (list, tuple)):
        return None
    if data and isinstance(data[0], torch.Tensor) and data[0].ndim == 2:
        return _embedding_rows(data, hidden_size, where)
    for i, part in enumerate(data):
        if _is_floating(part, 3) and 3 not in (part.shape[0], part.shape[-1]):
            got = f"shape {tuple(part.shape)}, which may be embeddings"
            raise InputError(f"{where}[{i}]", "pixels of three channels", got, remedy)
    return None


def _is_floating(value: object, rank: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == rank and value.is_floating_point()


def _embedding_rows(data: Any, hidden_size: int | None, where: str, remedy: str = "") -> list[torch.Tensor]:
    rows = [data] if isinstance(data, torch.Tensor) and data.ndim != 3 else data
    if not isinstance(rows, (list, tuple, torch.Tensor)) or not len(rows):
        got = "none" if isinstance(rows, (list, tuple, torch.Tensor)) else type(data).__name__
        raise InputError(where, "at least one (rows, hidden_size) tensor", got)
    for i, item in enumerate(rows):
        at = f"{where}[{i}]"
        expected = f"a finite floating (rows, {hidden_size or 'hidden_size'}) tensor"
        if not _is_floating(item, 2):
            got = type(item).__name__
            if isinstance(item, torch.Tensor):
                got = f"{item.dtype} tensor of shape {tuple(item.shape)}"
            raise InputError(at, expected, got)
        if hidden_size not in (None, item.shape[1]):
            raise InputError(at, expected, f"shape {tuple(item.shape)}", remedy)
        check_finite(item, at)
    # copies: what is cached must not change when the caller reuses its memory
    return [item.detach().cpu().clone() for item in rows]


def _is_frame(value: Any) -> bool:
    return hasattr(value, "getbands") or (isinstance(value, _ARRAYS) and value.ndim == 3)


def _stacked(frames: list[np.ndarray[Any, Any]], where: str) -> np.ndarray[Any, Any]:
    forms = [f"{frame.dtype} {frame.shape}" for frame in frames]
    if other := next((form for form in forms if form != forms[0]), None):
        raise InputError(where, "frames of one shape and dtype", f"{forms[0]} and {other}")
    return np.stack(frames)


def _holds_pixels(shape: Sequence[int], rank: int) -> bool:
    return len(shape) == rank and 0 not in shape and not {1, 3, 4}.isdisjoint((shape[-3], shape[-1]))


def _is_pair(value: Any) -> bool:
    """Whether a value is (frames, metadata)."""
    return isinstance(value, tuple) and len(value) == 2 and (value[1] is None or isinstance(value[1], Mapping))


def _video_parts(value: Any) -> tuple[Any, Any]:
    value = getattr(value, "media", value)
    if _is_pair(value):
        return getattr(value[0], "media", value[0]), value[1]
    return value, None


@cache
def _pil() -> Any:
    """PIL's module of images, which models without any do not load."""
    from PIL import Image as PILImage

    return PILImage


def _image_size(image: Any) -> tuple[int, int]:
    """(width, height), by vLLM's rule: channels last if the last dimension can be channels."""
    if hasattr(image, "getbands"):
        return image.size  # type: ignore[no-any-return]
    height, width = image.shape[:2] if image.shape[-1] in (1, 3, 4) else image.shape[1:]
    return width, height


def _describe(value: object) -> str:
    if value is None:
        return "None"
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or somebody's class
        text = ""
    return f"{type(value).__name__} {text}" if 0 < len(text) <= 40 else f"a {type(value).__name__}"

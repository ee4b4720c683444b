"""Items: what a caller may send.

An item type splits a caller's data into items, brings each to one canonical form (vLLM's hash sees dtype and container,
so equal values must be one form), validates it completely, tells its facts to expressions, and knows its largest
instance, from which dummy inputs and the token maximum are derived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .errors import InputError, SpecError, sentence
from .expr import Expr, Scope, Value, evaluate, expression, fold

__all__ = ["Audio", "Between", "Image", "ItemType", "Tensor", "Video", "between"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = {str(d).removeprefix("torch."): d for d in (*_FLOATS, *_INTEGERS, torch.bool)}
LARGEST_FLOAT16 = 65504.0
_DEEPEST = 32  # levels of nested lists; more are a mistake, or a list that holds itself


@dataclass(frozen=True)
class Between:
    """A dimension that may vary; see `between`."""

    least: Value
    most: Value

    def __repr__(self) -> str:
        return f"{self.least!r}..{self.most!r}"


def between(least: Value, most: Value) -> Between:
    """A dimension of any size from `least` to `most`, both included."""
    return Between(expression(least), expression(most))


class ItemType:
    """Base of the item types. A bound item type holds numbers only."""

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
        raise NotImplementedError

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
        """Canonical items among which is the one with the most tokens."""
        raise NotImplementedError

    @property
    def expected(self) -> str:
        """What a caller should send, in a few words."""
        raise NotImplementedError


@dataclass(frozen=True)
class Tensor(ItemType):
    """A tensor: the item type of new modalities.

    Callers send one item, a sequence of items, or a batch with one more leading dimension, as torch tensors, numpy
    arrays or nested lists of numbers. The canonical form is a contiguous CPU tensor of `dtype`.

    A floating `dtype` accepts every floating dtype (float64, numpy's default, is rounded to nearest) and lists of
    numbers; bool, integer and complex arrays are refused rather than cast. An integer `dtype` accepts integer values
    that fit.

    Attributes:
        shape: one size, expression or `between(least, most)` per dimension.
        dtype: name of the canonical torch dtype.
        finite: refuse NaN and infinities.
        bound: largest magnitude. The default is the largest float16, which no model dtype overflows when it casts.
        largest: shape of the item with the most encoder rows, or a list of shapes among which it is, where that is not
            the item with every size at its most.

    Facts: `shape`, `length` (the first dimension, or 1 for a scalar), `index`.
    """

    shape: tuple[Any, ...]
    dtype: str = "float32"
    finite: bool = True
    bound: Value = LARGEST_FLOAT16
    largest: Any = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise SpecError(sentence("Tensor.dtype", f"one of {', '.join(_DTYPES)}", repr(self.dtype)))
        object.__setattr__(self, "shape", tuple(s if isinstance(s, Between) else expression(s) for s in self.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The canonical dtype."""
        return _DTYPES[self.dtype]

    def bind(self, scope: Scope) -> Tensor:
        sizes: list[Any] = []
        for axis, size in enumerate(self.shape):
            ends = [fold(end, scope) for end in ((size.least, size.most) if isinstance(size, Between) else (size,))]
            if any(not isinstance(end, int) or isinstance(end, bool) or end < 0 for end in ends) or ends[0] > ends[-1]:
                got = "..".join(map(repr, ends))
                raise SpecError(sentence(f"Tensor.shape[{axis}] = {size!r}", "whole numbers >= 0, in order", got))
            sizes.append(Between(*ends) if isinstance(size, Between) else ends[0])
        bound = fold(self.bound, scope)
        if isinstance(bound, Expr) or not bound > 0:
            raise SpecError(sentence("Tensor.bound", "a number > 0 from cfg", repr(bound)))
        most = tuple(size.most if isinstance(size, Between) else size for size in sizes)
        largest = _sizes(self.largest, scope, len(most), "Tensor.largest") if self.largest is not None else [most]
        for shape in largest:
            if not all(map(_fits, shape, sizes)):
                raise SpecError(sentence("Tensor.largest", f"a shape within {tuple(sizes)}", repr(shape)))
        return replace(self, shape=tuple(sizes), bound=bound, largest=tuple(largest))

    @property
    def expected(self) -> str:
        sizes = ", ".join(map(repr, self.shape)) + ("," if len(self.shape) == 1 else "")
        return f"a ({sizes}) {self.dtype} tensor"

    def split(self, data: object, where: str) -> list[Any]:
        rank = len(self.shape)
        if isinstance(data, (torch.Tensor, np.ndarray)):
            if data.ndim == rank + 1:
                return list(data)
            return [data]  # one item; canonical() refuses a wrong rank
        if isinstance(data, (list, tuple)):
            return list(data) if _is_sequence_of_items(data, rank) else [data]
        raise InputError(sentence(where, f"{self.expected} or a list of them", _describe(data)))

    def canonical(self, value: object, where: str) -> torch.Tensor:
        tensor, listed = _as_tensor(value, where, self)
        wanted = self.torch_dtype
        if not self._accepts(tensor.dtype, listed):
            raise InputError(
                sentence(where, self.expected, f"dtype {_name(tensor.dtype)}", f"Convert it to {self.dtype}.")
            )
        if len(tensor.shape) != len(self.shape) or not all(map(_fits, tensor.shape, self.shape)):
            raise InputError(
                sentence(where, self.expected, f"shape {tuple(tensor.shape)}", "Send one tensor per item.")
            )
        if not wanted.is_floating_point:
            return self._integers(tensor, where)
        if tensor.numel() and (self.finite or math.isfinite(self.bound)):
            largest = float(tensor.abs().max())  # NaN wins every max, so one comparison sees all three faults
            if not largest <= self.bound and (self.finite or math.isfinite(largest)):
                raise InputError(self._out_of_bounds(tensor, where))
        return _own(tensor, wanted)

    def _accepts(self, dtype: torch.dtype, listed: bool) -> bool:
        if self.torch_dtype.is_floating_point:
            return dtype in _FLOATS or (listed and dtype in _INTEGERS)
        if self.torch_dtype == torch.bool:
            return dtype == torch.bool
        return dtype in _INTEGERS

    def _integers(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        if tensor.dtype != torch.bool and tensor.numel():
            limits = torch.iinfo(self.torch_dtype)
            least, most = int(tensor.min()), int(tensor.max())
            most_allowed = min(limits.max, int(self.bound)) if self.bound != LARGEST_FLOAT16 else limits.max
            if least < max(limits.min, -most_allowed - 1) or most > most_allowed:
                expected = f"values that fit {self.dtype}, at most {most_allowed}"
                raise InputError(sentence(where, expected, f"values from {least} to {most}"))
        return _own(tensor, self.torch_dtype)

    def _out_of_bounds(self, tensor: torch.Tensor, where: str) -> str:
        flat = tensor.reshape(-1)
        bad = (~torch.isfinite(flat)).nonzero() if self.finite else flat.new_empty(0)
        if not len(bad):
            bad = (flat.abs() > self.bound).nonzero()
        position = int(bad[0])
        index = ", ".join(map(str, np.unravel_index(position, tuple(tensor.shape)))) if tensor.ndim else ""
        remedy = "Check the units." if math.isfinite(float(flat[position])) else ""
        return sentence(
            where, f"finite values of magnitude <= {self.bound:g}", f"{float(flat[position]):g} at [{index}]", remedy
        )

    def facts(self, value: torch.Tensor, index: int) -> SimpleNamespace:
        shape = tuple(value.shape)
        return SimpleNamespace(index=index, shape=shape, length=shape[0] if shape else 1)

    def candidates(self) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=self.torch_dtype) for shape in self.largest]


@dataclass(frozen=True)
class Image(ItemType):
    """An image, as vLLM accepts it: PIL image, (height, width, 3) uint8 array, or (3, height, width) array or tensor.

    The canonical form of an 8-bit RGB array is the PIL image of the same pixels; others stay as they are.

    Attributes:
        largest: (width, height) in pixels of the image with the most tokens; a list where it is one of several.

    Facts: `width`, `height`, `index`.
    """

    largest: Any

    def bind(self, scope: Scope) -> Image:
        return Image(largest=tuple(_sizes(self.largest, scope, 2, "Image.largest")))

    @property
    def expected(self) -> str:
        return "an image"

    def split(self, data: object, where: str) -> list[Any]:
        if isinstance(data, (np.ndarray, torch.Tensor)) and data.ndim == 4:
            return list(data)
        return list(data) if isinstance(data, (list, tuple)) else [data]

    def canonical(self, value: object, where: str) -> Any:
        from PIL import Image as PILImage

        media = getattr(value, "media", value)  # vLLM wraps decoded media together with its bytes
        if isinstance(media, PILImage.Image):
            if 0 in media.size:
                raise InputError(sentence(where, "an image of at least 1 x 1 pixels", f"size {media.size}"))
            return value
        if not isinstance(media, (np.ndarray, torch.Tensor)):
            raise InputError(sentence(where, "a PIL image or an array", _describe(value)))
        if media.ndim != 3 or 0 in media.shape or not {media.shape[0], media.shape[-1]} & {1, 3, 4}:
            raise InputError(
                sentence(
                    where, "an array of shape (height, width, 3) or (3, height, width)", f"shape {tuple(media.shape)}"
                )
            )
        array = np.asarray(media) if media.shape[-1] == 3 else None
        if array is not None and array.dtype == np.uint8:
            return PILImage.fromarray(array, "RGB")
        check_finite(media, where)
        return value

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        width, height = _image_size(getattr(value, "media", value))
        return SimpleNamespace(index=index, width=width, height=height)

    def candidates(self) -> list[Any]:
        from PIL import Image as PILImage

        return [PILImage.new("RGB", size, color=(255, 255, 255)) for size in self.largest]


@dataclass(frozen=True)
class Video(ItemType):
    """A video, as vLLM accepts it: (frames, height, width, 3) array, list of frames, or (frames, metadata).

    Attributes:
        largest: (frames, width, height) of the video with the most tokens; a list where it is one of several.
        metadata: the model needs the metadata of every video.

    Facts: `frames`, `width`, `height`, `metadata` (a dict, or None), `index`.
    """

    largest: Any
    metadata: bool = False

    def bind(self, scope: Scope) -> Video:
        return replace(self, largest=tuple(_sizes(self.largest, scope, 3, "Video.largest")))

    @property
    def expected(self) -> str:
        return "a video" + (" with metadata" if self.metadata else "")

    def split(self, data: object, where: str) -> list[Any]:
        if isinstance(data, (np.ndarray, torch.Tensor)):
            return list(data) if data.ndim == 5 else [data]
        if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Mapping):
            return [data]
        if isinstance(data, (list, tuple)) and data and _is_frame(data[0]):
            return [data]
        return list(data) if isinstance(data, (list, tuple)) else [data]

    def canonical(self, value: object, where: str) -> Any:
        frames, metadata = _video_parts(value)
        if self.metadata and metadata is None:
            raise InputError(sentence(where, "a (frames, metadata) pair", "frames without metadata"))
        if isinstance(frames, (list, tuple)) and frames and all(map(_is_frame, frames)):
            sizes = {_image_size(f) for f in frames}
            if len(sizes) > 1:
                raise InputError(sentence(where, "frames of one size", f"sizes {sorted(sizes)}"))
            frames = np.stack([np.asarray(f) for f in frames])
        if not isinstance(frames, (np.ndarray, torch.Tensor)) or frames.ndim != 4 or 0 in frames.shape:
            got = f"shape {tuple(frames.shape)}" if hasattr(frames, "shape") else _describe(value)
            raise InputError(sentence(where, "an array of shape (frames, height, width, 3)", got))
        check_finite(frames, where)
        return frames if metadata is None else (frames, metadata)

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        frames, metadata = _video_parts(value)
        width, height = _image_size(frames[0])
        return SimpleNamespace(index=index, frames=len(frames), width=width, height=height, metadata=metadata)

    def candidates(self) -> list[Any]:
        videos = [np.full((frames, height, width, 3), 255, dtype=np.uint8) for frames, width, height in self.largest]
        if not self.metadata:
            return list(videos)
        return [
            (
                v,
                {
                    "fps": 1.0,
                    "duration": float(len(v)),
                    "total_num_frames": len(v),
                    "frames_indices": list(range(len(v))),
                },
            )
            for v in videos
        ]


@dataclass(frozen=True)
class Audio(ItemType):
    """Audio, as vLLM accepts it: a 1-D float array, or (array, sampling rate in Hz), resampled to `rate`.

    Attributes:
        largest: length in samples of the audio with the most tokens.
        rate: sampling rate in Hz that the model expects; None leaves audio as it is.

    Facts: `length` in samples, `index`.
    """

    largest: Value
    rate: Value = None

    def bind(self, scope: Scope) -> Audio:
        ((length,),) = _sizes((self.largest,), scope, 1, "Audio.largest")
        return Audio(largest=length, rate=fold(self.rate, scope))

    @property
    def expected(self) -> str:
        return "a 1-D float array or an (array, sampling rate) pair"

    def split(self, data: object, where: str) -> list[Any]:
        if isinstance(data, (np.ndarray, torch.Tensor)):
            return list(data) if data.ndim == 2 else [data]
        if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], (int, float)):
            return [data]
        if isinstance(data, list) and data and isinstance(data[0], (int, float)):
            return [data]
        return list(data) if isinstance(data, (list, tuple)) else [data]

    def canonical(self, value: object, where: str) -> Any:
        samples, rate = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if isinstance(samples, torch.Tensor):
            samples = samples.detach().cpu().numpy()
        try:
            array = np.asarray(samples)
        except ValueError as error:
            raise InputError(sentence(where, self.expected, _describe(value))) from error
        if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.floating):
            raise InputError(sentence(where, self.expected, f"shape {array.shape}, dtype {array.dtype}"))
        if rate is not None and not (isinstance(rate, (int, float)) and rate > 0):
            raise InputError(sentence(where, "a sampling rate > 0 in Hz", repr(rate)))
        check_finite(array, where)
        array = np.ascontiguousarray(array, dtype=np.float32)
        return array if rate is None else (array, rate)

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        return SimpleNamespace(index=index, length=len(value[0] if isinstance(value, tuple) else value))

    def candidates(self) -> list[Any]:
        return [np.zeros(self.largest, dtype=np.float32)]


def _sizes(value: Any, scope: Scope, width: int, where: str) -> list[tuple[int, ...]]:
    value = evaluate(expression(value), scope)
    rows = value if value and isinstance(value[0], (list, tuple)) else [value]
    sizes = [tuple(evaluate(expression(v), scope) for v in row) for row in rows]
    for row in sizes:
        if len(row) != width or any(not isinstance(v, int) or v < 1 for v in row):
            raise SpecError(sentence(where, f"{width} whole number(s) >= 1", repr(row)))
    return sizes


def _is_sequence_of_items(data: Sequence[Any], rank: int) -> bool:
    """Whether a list is a list of items rather than one item written as nested lists of numbers."""
    if not data:
        return True
    depth, inner = 0, data
    while isinstance(inner, (list, tuple)) and depth <= _DEEPEST:
        depth += 1
        if not inner:
            break
        inner = inner[0]
    return depth > rank or not isinstance(inner, (list, tuple, int, float))


def _as_tensor(value: object, where: str, kind: Tensor) -> tuple[torch.Tensor, bool]:
    """The value as a tensor of its own dtype, and whether it came as nested lists, which have no dtype."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_meta or value.is_quantized:
            raise InputError(sentence(where, kind.expected, f"a {value.layout} tensor on {value.device}"))
        return value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg(), False
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(sentence(where, kind.expected, "a masked array", "Fill its gaps."))
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind not in "fiubc":
            raise InputError(sentence(where, kind.expected, f"dtype {array.dtype}"))
        if not array.dtype.isnative or (array.dtype.kind == "f" and array.dtype.itemsize > 8):
            raise InputError(sentence(where, kind.expected, f"dtype {array.dtype.str}", f"Convert it to {kind.dtype}."))
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch has no arithmetic on these
            if array.dtype.itemsize == 8 and array.size and int(array.max()) >= 2**63:
                raise InputError(sentence(where, kind.expected, f"the value {int(array.max())}"))
            array = array.astype(np.int64)
        writable = array if array.flags.writeable else array.copy()
        return torch.from_numpy(np.ascontiguousarray(writable)).reshape(array.shape), False
    if isinstance(value, (list, tuple)):
        odd = _first_odd(value)
        if odd is not None:
            raise InputError(sentence(where, kind.expected, f"a list that holds {odd}"))
        try:
            array = np.array(value)
            return torch.from_numpy(array if array.size else array.astype(np.float64)), True
        except (ValueError, TypeError) as error:
            raise InputError(sentence(where, kind.expected, "a ragged list")) from error
    raise InputError(sentence(where, kind.expected, _describe(value)))


def _own(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous CPU copy: what is cached must not change when the caller reuses its memory."""
    return tensor.to(device="cpu", dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def _first_odd(value: Any, depth: int = 0) -> str | None:
    """The first element of nested lists that is no number."""
    if isinstance(value, (list, tuple)):
        if depth == _DEEPEST:
            return f"more than {_DEEPEST} levels"
        return next((odd for odd in (_first_odd(v, depth + 1) for v in value) if odd is not None), None)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _describe(value)
    return None if abs(value) < 2**63 or isinstance(value, float) else repr(value)


def _fits(size: int, wanted: Any) -> bool:
    return bool(wanted.least <= size <= wanted.most if isinstance(wanted, Between) else size == wanted)


def check_finite(value: Any, where: str) -> None:
    """Refuse arrays and tensors of other than real numbers that any model dtype can hold.

    Raises:
        InputError: a dtype that is no real number's, NaN, an infinity, or a magnitude beyond the largest float16.
    """
    array = value.detach().cpu().float().numpy() if isinstance(value, torch.Tensor) else value
    if array.dtype.kind not in "fiub":
        raise InputError(sentence(where, "real numbers", f"dtype {array.dtype}"))
    if array.dtype.kind == "f" and array.size and not np.abs(array).max() <= LARGEST_FLOAT16:
        got = "NaN or an infinity" if not np.isfinite(array).all() else f"{float(np.abs(array).max()):g}"
        raise InputError(sentence(where, f"finite values of magnitude <= {LARGEST_FLOAT16:g}", got))


def _is_frame(value: Any) -> bool:
    return hasattr(value, "getbands") or (isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 3)


def _video_parts(value: Any) -> tuple[Any, Any]:
    value = getattr(value, "media", value)
    if isinstance(value, tuple) and len(value) == 2 and (value[1] is None or isinstance(value[1], Mapping)):
        return getattr(value[0], "media", value[0]), value[1]
    return value, None


def _image_size(image: Any) -> tuple[int, int]:
    """(width, height), by vLLM's rule: channels last if the last dimension can be channels."""
    if hasattr(image, "getbands"):
        return image.size[0], image.size[1]
    if image.shape[-1] in (1, 3, 4):
        return image.shape[1], image.shape[0]
    return image.shape[2], image.shape[1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: object) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 40 else f"a {type(value).__name__}"

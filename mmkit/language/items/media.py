"""Images, videos and audio, as vLLM takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, field, replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch

from ...errors import InputError, SpecError
from ..expr import Count, Expr, Scope, as_expression, as_expressions, to_python
from ..node import Converted, parameter
from .base import GIB, ItemType, num_drawn, repeated
from .pictures import check_file, pil, upright_rgb
from .size import Between, Sizes, check_positive, check_size, is_number, sizes_of
from .values import (
    ARRAYS,
    SCALARS,
    as_array,
    check_finite,
    describe,
    describe_array,
    to_plain_tensor,
)

_ANY: Any = math.inf

_AUDIO = "a 1-D float array or an (array, sampling rate) pair"

AUDIO_DECODERS = ("soundfile", "torchcodec")
"""Libraries that scale the integers of a file of audio to -1..1, and mix its channels. PyAV, which
vLLM takes without them, does neither."""

_AUDIO_BOUND = 8.0
"""A few times the magnitude of samples, which no decoded file was seen to reach."""

_MOST_CHANNELS = 8
"""Of a file of audio. A 2-D array of fewer columns than these is one recording, and no batch."""

_MOST_UPSAMPLING = 16
"""A sample must not become gigabytes: where no length is stated, 1 kHz may become 16 kHz."""


class _Media(ItemType):
    """An item of one of vLLM's own modalities. Its fewest sizes are 1 each."""

    largest: Converted[Sizes, Any] = parameter(as_expressions)  # type: ignore[misc]

    def bind(self, scope: Scope) -> Self:
        bound, where = super().bind(scope), f"{type(self).__name__}.largest"
        bound = replace(bound, largest=sizes_of(bound.largest, len(self.dummy_sizes), where))
        for sizes in bound.largest:
            bound.check_bytes(sizes)
        return bound

    @property
    def num_sizes(self) -> int:
        return len(self.dummy_sizes)

    def bounds(self) -> list[Between]:
        return [Between(1, _ANY)] * len(self.dummy_sizes)


class Image(_Media):
    """An image, as vLLM accepts it: PIL image, (height, width, 3) uint8 array, or (3, height,
    width) array or tensor.

    The canonical form is an upright PIL image in RGB, transparency on white, also for 8-bit RGB
    pixels with channels last or first. A picture of more than 8 bits per channel (PIL's modes I;16,
    I and F) is refused: its values would be clipped. Other arrays, for example float32 of one,
    three or four channels, stay as they are for `hf()`; a function of the spec receives PIL images
    alone.

    Attributes:
        largest: (width, height) in pixels of the image with the most tokens; a list where it is one
            of several.

    Facts: `width`, `height`, `index`.
    """

    only_pictures: bool = field(default=False, kw_only=True, repr=False)
    """Whether a function of the spec processes the images: it receives PIL images alone."""

    expected = "an image"
    ndim = 3
    vllm_modality = "image"
    kwargs_scope = "images_kwargs"
    size_hint = "WIDTHxHEIGHT"
    dummy_sizes = ("width", "height")
    small_sizes = ((1, 1), (32, 32))  # some image processors take no single pixel

    def for_function(self) -> Image:
        return replace(self, only_pictures=True)

    def convert(self, value: object, where: str) -> Any:
        media = getattr(value, "media", value)  # vLLM wraps decoded media together with its bytes
        if isinstance(media, pil().Image):
            if 0 in media.size:
                raise InputError(where, "an image of at least 1 x 1 pixels", f"size {media.size}")
            if media is value:
                return upright_rgb(value, where)
            # what vLLM wraps, it has converted, and it says nothing of what was lost
            if isinstance(file := getattr(value, "original_bytes", None), bytes):
                check_file(file, where)
            return value
        if not isinstance(media, ARRAYS):
            raise InputError(where, "a PIL image or an array", describe(value))
        expected = "an array of shape (height, width, 3) or (3, height, width)"
        if not _holds_pixels(media.shape, 3):
            raise InputError(where, expected, f"shape {tuple(media.shape)}")
        if isinstance(media, torch.Tensor):
            value = media = to_plain_tensor(media, where, expected)
        are_bytes = media.dtype in (np.uint8, torch.uint8)
        if are_bytes and 3 in (media.shape[-1], media.shape[0]):
            pixels = np.asarray(media)
            if pixels.shape[-1] != 3:
                pixels = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
            return pil().fromarray(pixels, "RGB")
        if self.only_pictures:
            remedy = "Send three channels of uint8 values from 0 to 255."
            raise InputError(
                where, "a PIL image or 8-bit RGB pixels", describe_array(media), remedy
            )
        check_finite(media, where)
        return value

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        width, height = _image_size(getattr(value, "media", value))
        return SimpleNamespace(index=index, width=width, height=height)

    def sizes(self, value: Any) -> tuple[int, ...]:
        return _image_size(getattr(value, "media", value))

    def blank(self, *sizes: int) -> Any:
        return pil().new("RGB", sizes, color=(255, 255, 255))

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> Any:
        width, height = self.nearest(sizes)
        return pil().fromarray(_random_pixels((height, width, 3), generator), "RGB")

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return math.prod(sizes) * 3


class Video(_Media):
    """A video, as vLLM accepts it: (frames, height, width, 3) array, list of frames, or (frames,
    metadata).

    Attributes:
        largest: (frames, width, height) of the video with the most tokens; a list where it is one
            of several.
        metadata: the model needs the metadata of every video. Otherwise they are left out, as by
            vLLM's own parser.

    Facts: `frames`, `width`, `height`, `metadata` (a dict, or None), `index`.
    """

    metadata: bool = False

    ndim = 4
    vllm_modality = "video"
    mime_type = "video/mp4"
    kwargs_scope = "videos_kwargs"
    size_hint = "FRAMESxWIDTHxHEIGHT"
    dummy_sizes = ("num_frames", "width", "height")
    small_sizes = ((1, 32, 32),)
    most_bytes = 16 * GIB  # its frames are zeros, which take no memory until somebody reads them

    @property
    def expected(self) -> str:
        return "a video" + (" with metadata" if self.metadata else "")

    def _is_one(self, data: Sequence[Any]) -> bool:
        return _is_pair(data) or (len(data) > 0 and _is_frame(data[0]))

    def convert(self, value: object, where: str) -> Any:
        frames, metadata = _video_parts(value)
        if self.metadata and metadata is None:
            raise InputError(where, "a (frames, metadata) pair", "frames without metadata")
        expected = "an array of shape (frames, height, width, 3)"
        if isinstance(frames, (list, tuple)) and frames and all(map(_is_frame, frames)):
            frames = _stacked([as_array(frame, where, expected) for frame in frames], where)
        if not isinstance(frames, ARRAYS) or not _holds_pixels(frames.shape, 4):
            got = f"shape {tuple(frames.shape)}" if hasattr(frames, "shape") else describe(value)
            raise InputError(where, expected, got)
        if isinstance(frames, torch.Tensor):
            frames = to_plain_tensor(frames, where, expected)
        check_finite(frames, where)
        if metadata is not None:
            _check_metadata(metadata, len(frames), f"{where}, metadata")
        return (frames, metadata) if self.metadata else frames

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        frames, metadata = _video_parts(value)
        width, height = _image_size(frames[0])
        sizes = {"frames": len(frames), "width": width, "height": height}
        return SimpleNamespace(index=index, **sizes, metadata=metadata)

    def scaled(self, sizes: Sequence[int], fraction: float) -> list[int]:
        # fewer frames, and smaller ones only where a single one is left: none is resized then
        frames, *sides = sizes
        return [int(frames * fraction), *super().scaled(sides, min(1.0, frames * fraction))]

    def sizes(self, value: Any) -> tuple[int, ...]:
        frames, _ = _video_parts(value)
        return (len(frames), *_image_size(frames[0]))

    def blank(self, *sizes: int) -> Any:
        frames, width, height = sizes
        # of zeros: memory that nobody looks at costs no time
        return self._of(np.zeros((frames, height, width, 3), dtype=np.uint8))

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> Any:
        frames, width, height = self.nearest(sizes)
        return self._of(_random_pixels((frames, height, width, 3), generator))

    def _of(self, video: np.ndarray[Any, Any]) -> Any:
        """Return a canonical item of some frames, one per second."""
        if not self.metadata:
            return video
        frames = len(video)
        metadata: dict[str, Any] = {"fps": 1.0, "duration": float(frames)}
        metadata |= {"total_num_frames": frames, "frames_indices": list(range(frames))}
        return video, metadata

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return math.prod(sizes) * 3


class Audio(_Media):
    """Audio, as vLLM accepts it: a 1-D float array, or (array, sampling rate in Hz), resampled to
    `rate`.

    The canonical form is a float32 array. torchaudio, vLLM's default, resamples it, or soxr;
    without either mmkit refuses another sampling rate than `rate`. n samples at one rate become
    ceil(n * rate / that rate) by either.

    Attributes:
        largest: length in samples of the audio with the most tokens.
        rate: sampling rate in Hz that the model expects; None refuses audio with a sampling rate.
        most: the most samples at that rate; None for any number.
        bound: the largest magnitude of a sample. Samples lie within -1..1, and a lossy codec
            exceeds that a little; what exceeds the bound was never scaled, for example 16-bit
            integers. None for any finite value.

    Facts: `length` in samples, `index`.
    """

    largest: Converted[Count | Sizes, Any] = parameter(as_expressions)  # type: ignore[misc]
    rate: Converted[Expr | float | None, Any] = parameter(as_expression, default=None)
    _: KW_ONLY
    most: Converted[Count | None, Any] = parameter(as_expression, default=None)
    bound: Converted[Expr | float | None, Any] = parameter(as_expression, default=_AUDIO_BOUND)

    def bind(self, scope: Scope) -> Self:
        bound = super().bind(scope)
        check_positive(bound.rate, "Audio.rate")
        check_positive(bound.bound, "Audio.bound")
        if bound.most is not None:
            check_size(bound.most, "Audio.most")
            if (longest := max(bound.largest)[0]) > bound.most:
                raise SpecError("Audio.largest", bound.expected, f"{longest} samples")
        return bound

    def bounds(self) -> list[Between]:
        return [Between(1, _ANY if self.most is None else self.most)]

    @property
    def expected(self) -> str:
        return _AUDIO if self.most is None else f"{_AUDIO} of at most {self.most} samples"

    ndim = 1
    vllm_modality = "audio"
    mime_type = "audio/wav"
    kwargs_scope = "audio_kwargs"
    size_hint = "a number of samples"
    dummy_sizes = ("length",)
    small_sizes = ((1,),)

    def _is_one(self, data: Sequence[Any]) -> bool:
        if isinstance(data, tuple):
            return len(data) == 2 and isinstance(data[1], SCALARS)
        return len(data) > 0 and isinstance(data[0], SCALARS)

    def convert(self, value: object, where: str) -> Any:
        samples, rate = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        rate, array = to_python(rate), as_array(samples, where, _AUDIO)
        if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.floating):
            raise InputError(where, _AUDIO, f"shape {array.shape}, dtype {array.dtype}")
        if rate is not None and not (is_number(rate) and 1 <= rate < math.inf):
            raise InputError(where, "a sampling rate >= 1 in Hz", repr(rate))
        check_finite(array, where)
        self._check_scale(array, where)
        array = np.ascontiguousarray(array, dtype=np.float32)
        array = array if rate is None else self._at_rate(array, rate, where)
        if self.most is not None and len(array) > self.most:
            raise InputError(where, self.expected, f"{len(array)} samples")
        return array

    def split(self, data: object, where: str) -> list[Any]:
        if isinstance(data, ARRAYS) and data.ndim == 2:
            length, channels = data.shape
            if channels <= _MOST_CHANNELS < length:
                got = f"shape {tuple(data.shape)}, which has {channels} channel(s)"
                raise InputError(where, self.expected, got, "Average the channels: x.mean(1).")
        return super().split(data, where)

    def _check_scale(self, samples: np.ndarray[Any, Any], where: str) -> None:
        if self.bound is None:
            return
        magnitude = max(float(samples.max()), -float(samples.min()))
        if magnitude > self.bound:
            expected = f"samples of magnitude <= {self.bound:g}"
            raise InputError(where, expected, f"{magnitude:g}", "Scale them to -1..1.")

    def _at_rate(
        self, samples: np.ndarray[Any, Any], rate: float, where: str
    ) -> np.ndarray[Any, Any]:
        if self.rate is None:
            expected = "samples alone, since the spec states no sampling rate"
            raise InputError(where, expected, f"{rate:g} Hz", "Send the array.")
        before, after = round(rate), round(self.rate)
        if before == after:
            return samples
        length = -(-len(samples) * after // before)
        self._check_length(length, len(samples), rate, where)
        resampled = np.zeros(length, np.float32)
        made = _resampled(samples, before, after, where)[:length]  # soxr makes one less at times
        resampled[: len(made)] = made
        return resampled

    def _check_length(self, length: int, before: int, rate: float, where: str) -> None:
        """Refuse audio that is too long once it is resampled, before it is."""
        if self.most is not None:
            most = self.most
        else:
            most = max(max(self.largest)[0], _MOST_UPSAMPLING * before)
        if length > most:
            got = f"{length} of them from {before} at {rate:g} Hz"
            expected = f"at most {most} samples at {self.rate:g} Hz"
            raise InputError(where, expected, got, "Send less.")

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        return SimpleNamespace(index=index, length=len(value))

    def sizes(self, value: Any) -> tuple[int, ...]:
        return (len(value),)

    def blank(self, *sizes: int) -> np.ndarray[Any, Any]:
        return np.zeros(sizes, dtype=np.float32)

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> np.ndarray[Any, Any]:
        shape = self.nearest(sizes)
        samples = generator.uniform(-1, 1, num_drawn(shape)).astype(np.float32)
        return repeated(samples, shape)

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return 4 * sizes[0]


def _random_pixels(shape: Sequence[int], generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return random bytes of a shape."""
    return repeated(generator.integers(0, 256, num_drawn(shape), dtype=np.uint8), shape)


def _resampled(samples: np.ndarray[Any, Any], before: int, after: int, where: str) -> Any:
    """Audio at another sampling rate, by the first installed library of those that vLLM uses."""
    with suppress(ImportError, OSError):
        from torchaudio.functional import resample

        return resample(torch.from_numpy(samples), before, after).numpy()
    with suppress(ImportError, OSError):
        import soxr

        return soxr.resample(samples, before, after)
    got = f"{before} Hz, and no library that resamples"
    raise InputError(where, f"audio at {after} Hz", got, "Resample it first, or install soxr.")


def _check_metadata(metadata: Mapping[str, Any], count: int, where: str) -> None:
    """Refuse metadata that contradict the frames, or cannot be: those of a file without a length
    say that it has -3e15 frames, and its loader has decoded one of them.

    Args:
        metadata: as vLLM's loaders make them; what they lack is not looked at.
        count: the number of frames.
        where: names them in errors.

    Raises:
        InputError: names the value.
    """
    remedy = "Send a file that states its length, or the frames alone."
    fps = to_python(metadata.get("fps"))
    if fps is not None and not (is_number(fps) and 0 < fps < math.inf):
        raise InputError(where, "fps > 0", repr(fps), remedy)
    duration = to_python(metadata.get("duration"))
    if duration is not None and not (is_number(duration) and 0 <= duration < math.inf):
        raise InputError(where, "a duration >= 0 in seconds", repr(duration), remedy)
    total = to_python(metadata.get("total_num_frames"))
    if total is not None and not (is_number(total) and 1 <= total < math.inf):
        raise InputError(where, "total_num_frames >= 1", repr(total), remedy)
    indices = to_python(metadata.get("frames_indices"))
    if indices is None:
        return
    if not isinstance(indices, (list, tuple)) or len(indices) != count:
        got = f"{len(indices)} of them" if isinstance(indices, (list, tuple)) else describe(indices)
        raise InputError(where, f"frames_indices of {count} frames", got)
    last = math.inf if total is None else total - 1
    for index in indices:
        if not (is_number(index) and 0 <= index <= last):
            raise InputError(where, f"frames_indices from 0 to {last}", repr(index))


def _is_frame(value: Any) -> bool:
    return hasattr(value, "getbands") or (isinstance(value, ARRAYS) and value.ndim == 3)


def _stacked(frames: list[np.ndarray[Any, Any]], where: str) -> np.ndarray[Any, Any]:
    forms = [f"{frame.dtype} {frame.shape}" for frame in frames]
    if other := next((form for form in forms if form != forms[0]), None):
        raise InputError(where, "frames of one shape and dtype", f"{forms[0]} and {other}")
    return np.stack(frames)


def _holds_pixels(shape: Sequence[int], rank: int) -> bool:
    if len(shape) != rank or 0 in shape:
        return False
    return not {1, 3, 4}.isdisjoint((shape[-3], shape[-1]))


def _is_pair(value: Any) -> bool:
    """Whether a value is (frames, metadata)."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and (value[1] is None or isinstance(value[1], Mapping))


def _video_parts(value: Any) -> tuple[Any, Any]:
    value = getattr(value, "media", value)
    if _is_pair(value):
        return getattr(value[0], "media", value[0]), value[1]
    return value, None


def _image_size(image: Any) -> tuple[int, int]:
    """(width, height), by vLLM's rule: channels last if the last dimension can be channels."""
    if hasattr(image, "getbands"):
        return image.size  # type: ignore[no-any-return]
    height, width = image.shape[:2] if image.shape[-1] in (1, 3, 4) else image.shape[1:]
    return width, height

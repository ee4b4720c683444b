"""Images, videos and audio, as vLLM takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ...errors import InputError, SpecError
from ..expr import Count, Expr, Scope, as_expression, as_expressions
from ..node import Converted, parameter
from ..scope import to_python
from .base import GIB, ItemType, count_drawn_values, repeat_values
from .facts import AudioFacts, Facts, ImageFacts, VideoFacts
from .pictures import check_file, import_pil, upright_rgb
from .size import Between, Sizes, check_positive, check_size, convert_shapes, is_number
from .values import (
    ARRAYS,
    SCALARS,
    as_array,
    check_finite,
    describe,
    describe_array,
    to_plain_tensor,
)

_UNLIMITED: Any = math.inf

_AUDIO = "a 1-D float array or an (array, sampling rate) pair"

AUDIO_DECODERS = ("soundfile", "torchcodec")
"""Libraries that scale the integers of a file of audio to -1..1, and mix its channels. PyAV, which
vLLM takes without them, does neither."""

_MAX_AUDIO_MAGNITUDE = 8.0
"""A few times the magnitude of samples, which no decoded file was seen to reach."""

_MAX_CHANNELS = 8
"""A 2-D array with at most so many columns, and more rows, is one recording and no batch."""

_MAX_UPSAMPLING = 16
"""How many samples one sample may become, where a spec states no largest number: 1 kHz may become
16 kHz, and no short file becomes gigabytes."""


class _Media(ItemType):
    """An item of one of vLLM's own modalities.

    Each of its sizes is at least 1.
    """

    largest: Converted[Sizes, Any] = parameter(as_expressions)  # type: ignore[misc]

    def bind(self, scope: Scope) -> Self:
        bound = super().bind(scope)
        where = f"{type(self).__name__}.largest"
        bound = replace(bound, largest=convert_shapes(bound.largest, len(self.dummy_sizes), where))
        for sizes in bound.largest:
            bound.check_bytes(sizes)
        return bound

    @property
    def num_sizes(self) -> int:
        return len(self.dummy_sizes)

    def bounds(self) -> list[Between]:
        return [Between(1, _UNLIMITED)] * self.num_sizes


class Image(_Media):
    """An image, in any form that vLLM accepts.

    These are a PIL image, a (height, width, 3) uint8 array, and a (3, height, width) array or
    tensor.

    The canonical form is an upright PIL image in RGB, transparency on white, also for 8-bit RGB
    pixels with channels last or first. A picture of more than 8 bits per channel (PIL's modes I;16,
    I and F) is refused: its values would be clipped. Other arrays, for example float32 of one,
    three or four channels, stay as they are for `hf()`; a function of the spec receives only
    PIL images.

    Attributes:
        largest: (width, height) in pixels of the image with the most encoder rows; or a list that
            contains it.

    Facts: `width`, `height`, `index`.
    """

    takes_only_pictures: ClassVar[bool] = False
    """Whether an array that is no picture is refused, as where a function of the spec processes the
    items: it receives PIL images only."""

    expected = "an image"
    ndim = 3
    vllm_modality = "image"
    kwargs_scope = "images_kwargs"
    size_hint = "WIDTHxHEIGHT"
    dummy_sizes = ("width", "height")
    facts_class = ImageFacts
    small_sizes = ((1, 1), (32, 32))  # some image processors take no single pixel

    def for_function(self) -> Image:
        return _ImageForFunction(self.largest)

    def convert(self, value: object, where: str) -> Any:
        media = getattr(value, "media", value)  # vLLM wraps decoded media together with its bytes
        if isinstance(media, import_pil().Image):
            return self._convert_picture(value, media, where)
        if isinstance(media, ARRAYS):
            return self._convert_array(value, media, where)
        raise InputError(where, "a PIL image or an array", describe(value))

    def _convert_picture(self, value: Any, picture: Any, where: str) -> Any:
        """Return a picture upright and in RGB.

        Args:
            value: what was sent: the picture, or vLLM's wrapper of it.
            picture: a PIL image.
            where: names it in errors.
        """
        if 0 in picture.size:
            raise InputError(where, "an image of at least 1 x 1 pixels", f"size {picture.size}")
        if picture is value:
            return upright_rgb(picture, where)
        # vLLM has converted what it wraps, and does not say what was lost; its file does
        file = getattr(value, "original_bytes", None)
        if isinstance(file, bytes):
            check_file(file, where)
        return value

    def _convert_array(self, value: Any, pixels: Any, where: str) -> Any:
        """Return 8-bit RGB pixels as a picture, and other pixels as they are.

        Args:
            value: what was sent: the pixels, or vLLM's wrapper of them.
            pixels: an array or a tensor.
            where: names them in errors.
        """
        expected = "an array of shape (height, width, 3) or (3, height, width)"
        if not _holds_pixels(pixels.shape, 3):
            raise InputError(where, expected, f"shape {tuple(pixels.shape)}")
        if isinstance(pixels, torch.Tensor):
            pixels = to_plain_tensor(pixels, where, expected)
            value = pixels
        is_8_bit = pixels.dtype in (np.uint8, torch.uint8)
        if is_8_bit and 3 in (pixels.shape[-1], pixels.shape[0]):
            return _make_picture(np.asarray(pixels))
        if self.takes_only_pictures:
            got = describe_array(pixels)
            remedy = "Send three channels of uint8 values from 0 to 255."
            raise InputError(where, "a PIL image or 8-bit RGB pixels", got, remedy)
        check_finite(pixels, where)
        return value

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        width, height = _get_image_size(getattr(value, "media", value))
        return SimpleNamespace(index=index, width=width, height=height)

    def sizes(self, value: Any) -> tuple[int, ...]:
        return _get_image_size(getattr(value, "media", value))

    def blank(self, *sizes: int) -> Any:
        return import_pil().new("RGB", sizes, color=(255, 255, 255))

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> Any:
        width, height = self.nearest(sizes)
        return import_pil().fromarray(_make_random_pixels((height, width, 3), generator), "RGB")

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return math.prod(sizes) * 3


class _ImageForFunction(Image):
    """An image that a function of the spec processes."""

    _word = "Image"
    takes_only_pictures = True


class Video(_Media):
    """A video, in any form that vLLM accepts.

    These are a (frames, height, width, 3) array, a list of frames, and (frames, metadata).

    Attributes:
        largest: (frames, width, height) of the video with the most encoder rows; or a list that
            contains it.
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
    facts_class = VideoFacts
    small_sizes = ((1, 32, 32),)
    most_bytes = 16 * GIB  # its frames are zeros, which take no memory until somebody reads them

    @property
    def expected(self) -> str:
        if self.metadata:
            return "a video with metadata"
        return "a video"

    def _is_one(self, data: Sequence[Any]) -> bool:
        return _is_pair(data) or (len(data) > 0 and _is_frame(data[0]))

    def convert(self, value: object, where: str) -> Any:
        frames, metadata = _split_video(value)
        if self.metadata and metadata is None:
            raise InputError(where, "a (frames, metadata) pair", "frames without metadata")
        expected = "an array of shape (frames, height, width, 3)"
        if _is_list_of_frames(frames):
            arrays = [as_array(frame, where, expected) for frame in frames]
            frames = _stack_frames(arrays, where)
        if not isinstance(frames, ARRAYS) or not _holds_pixels(frames.shape, 4):
            got = describe(value)
            if hasattr(frames, "shape"):
                got = f"shape {tuple(frames.shape)}"
            raise InputError(where, expected, got)
        if isinstance(frames, torch.Tensor):
            frames = to_plain_tensor(frames, where, expected)
        check_finite(frames, where)
        if metadata is not None:
            _check_metadata(metadata, len(frames), f"{where}, metadata")
        if self.metadata:
            return frames, metadata
        return frames

    def facts(self, value: Any, index: int) -> SimpleNamespace:
        frames, metadata = _split_video(value)
        width, height = _get_image_size(frames[0])
        return SimpleNamespace(
            index=index, frames=len(frames), width=width, height=height, metadata=metadata
        )

    def check_facts(self, facts: Facts, where: str) -> SimpleNamespace:
        checked = super().check_facts(facts, where)
        if not self.metadata:
            checked.metadata = None
        elif checked.metadata is None:
            raise InputError(where, "facts with metadata", "facts without metadata")
        else:
            _check_metadata(checked.metadata, checked.frames, f"{where}, metadata")
        return checked

    def scale_sizes(self, sizes: Sequence[int], fraction: float) -> list[int]:
        # Fewer frames come first. They become smaller only where not even one is left.
        frames, *sides = sizes
        fraction_of_frame = min(1.0, frames * fraction)
        return [int(frames * fraction)] + super().scale_sizes(sides, fraction_of_frame)

    def sizes(self, value: Any) -> tuple[int, ...]:
        frames, _ = _split_video(value)
        width, height = _get_image_size(frames[0])
        return len(frames), width, height

    def blank(self, *sizes: int) -> Any:
        frames, width, height = sizes
        # np.zeros reserves memory that costs no time before it is read
        return self._add_metadata(np.zeros((frames, height, width, 3), dtype=np.uint8))

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> Any:
        frames, width, height = self.nearest(sizes)
        return self._add_metadata(_make_random_pixels((frames, height, width, 3), generator))

    def _add_metadata(self, video: np.ndarray[Any, Any]) -> Any:
        """Return the canonical item of some frames, one per second."""
        if not self.metadata:
            return video
        num_frames = len(video)
        metadata = {
            "fps": 1.0,
            "duration": float(num_frames),
            "total_num_frames": num_frames,
            "frames_indices": list(range(num_frames)),
        }
        return video, metadata

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return math.prod(sizes) * 3


class Audio(_Media):
    """Audio, in any form that vLLM accepts: a 1-D float array, or (array, sampling rate in Hz).

    The canonical form is a float32 array, resampled to `rate` by torchaudio, vLLM's default, or
    soxr. Without either mmkit refuses another sampling rate than `rate`. n samples at one rate
    become ceil(n * rate / that rate) by either.

    Attributes:
        largest: length in samples of the audio with the most encoder rows.
        rate: sampling rate in Hz that the model expects; None refuses audio with a sampling rate.
        most: the most samples at that rate; None for any number.
        least: the fewest.
        bound: the largest magnitude of a sample. Samples lie within -1..1, and a lossy codec
            exceeds that a little; what exceeds the bound was never scaled, for example 16-bit
            integers. None for any finite value.

    Facts: `length` in samples, `index`.
    """

    largest: Converted[Count | Sizes, Any] = parameter(as_expressions)  # type: ignore[misc]
    rate: Converted[Expr | float | None, Any] = parameter(as_expression, default=None)
    _: KW_ONLY
    most: Converted[Count | None, Any] = parameter(as_expression, default=None)
    bound: Converted[Expr | float | None, Any] = parameter(
        as_expression, default=_MAX_AUDIO_MAGNITUDE
    )
    least: Converted[Count, Any] = parameter(as_expression, default=1)

    def bind(self, scope: Scope) -> Self:
        bound = super().bind(scope)
        check_positive(bound.rate, "Audio.rate")
        check_positive(bound.bound, "Audio.bound")
        check_size(bound.least, "Audio.least")
        if bound.most is not None:
            check_size(bound.most, "Audio.most")
        (longest,) = max(bound.largest)
        if not bound._is_within(longest):
            raise SpecError("Audio.largest", bound.expected, f"{longest} samples")
        return bound

    def bounds(self) -> list[Between]:
        if self.most is None:
            return [Between(self.least, _UNLIMITED)]
        return [Between(self.least, self.most)]

    @property
    def expected(self) -> str:
        limits: list[str] = []
        if self.least != 1:
            limits.append(f"at least {self.least}")
        if self.most is not None:
            limits.append(f"at most {self.most}")
        if not limits:
            return _AUDIO
        return f"{_AUDIO} of {' and '.join(limits)} samples"

    def _is_within(self, length: int) -> bool:
        return self.least <= length and (self.most is None or length <= self.most)

    ndim = 1
    vllm_modality = "audio"
    mime_type = "audio/wav"
    kwargs_scope = "audio_kwargs"
    size_hint = "a number of samples"
    dummy_sizes = ("length",)
    facts_class = AudioFacts
    may_be_field = True

    @property
    def small_sizes(self) -> tuple[tuple[int, ...], ...]:  # type: ignore[override]
        return ((self.least,),)

    def make_field(self, value: Any) -> torch.Tensor:
        return torch.from_numpy(value)

    def find_field_shape(self, facts: Any) -> tuple[int]:
        return (facts.length,)

    def _is_one(self, data: Sequence[Any]) -> bool:
        if isinstance(data, tuple):
            return len(data) == 2 and isinstance(data[1], SCALARS)
        return len(data) > 0 and isinstance(data[0], SCALARS)

    def convert(self, value: object, where: str) -> Any:
        samples: Any = value
        rate: Any = None
        if isinstance(value, tuple) and len(value) == 2:
            samples, rate = value
        rate = to_python(rate)
        array = as_array(samples, where, _AUDIO)
        if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.floating):
            raise InputError(where, _AUDIO, f"shape {array.shape}, dtype {array.dtype}")
        _check_rate(rate, where)
        magnitude = check_finite(array, where)
        self._check_scale(magnitude, where)
        array = np.ascontiguousarray(array, dtype=np.float32)
        if rate is not None:
            array = self._resample(array, rate, where)
        if not self._is_within(len(array)):
            raise InputError(where, self.expected, f"{len(array)} samples")
        return array

    def split(self, data: object, where: str) -> list[Any]:
        if isinstance(data, ARRAYS) and data.ndim == 2:
            length, channels = data.shape
            if channels <= _MAX_CHANNELS < length:
                got = f"shape {tuple(data.shape)}, which has {channels} channel(s)"
                raise InputError(where, self.expected, got, "Average the channels: x.mean(1).")
        return super().split(data, where)

    def _check_scale(self, magnitude: float, where: str) -> None:
        """Refuse samples of a magnitude beyond the bound, which only unscaled samples have."""
        if self.bound is not None and magnitude > self.bound:
            expected = f"samples of magnitude <= {self.bound:g}"
            raise InputError(where, expected, f"{magnitude:g}", "Scale them to -1..1.")

    def _resample(
        self, samples: np.ndarray[Any, Any], rate: float, where: str
    ) -> np.ndarray[Any, Any]:
        """Return samples at the spec's rate, resampled from `rate` in Hz."""
        length = self._count_resampled(len(samples), rate, where)
        before, after = round(rate), round(self.rate)
        if before == after:
            return samples
        resampled = _resample_by_library(samples, before, after, where)
        # soxr makes one sample less than torchaudio at times
        audio = np.zeros(length, np.float32)
        audio[: len(resampled)] = resampled[:length]
        return audio

    def _count_resampled(self, count: int, rate: float, where: str) -> int:
        """Return how many samples become of some at `rate` in Hz.

        Raises:
            InputError: the spec states no rate, or there would be too many.
        """
        if self.rate is None:
            expected = "samples alone, since the spec states no sampling rate"
            raise InputError(where, expected, f"{rate:g} Hz", "Send the array.")
        before, after = round(rate), round(self.rate)
        if before == after:
            return count
        length: int = -(-count * after // before)  # the ceiling, exact for any length
        self._check_length(length, count, rate, where)
        return length

    def check_facts(self, facts: Facts, where: str) -> SimpleNamespace:
        self._check_facts_class(facts, where)
        sound: Any = facts
        _check_rate(sound.rate, where)
        if type(sound.length) is int and sound.length >= 1 and sound.rate is not None:
            sound = AudioFacts(length=self._count_resampled(sound.length, sound.rate, where))
        checked = super().check_facts(sound, where)
        del checked.rate
        return checked

    def _check_length(self, length: int, before: int, rate: float, where: str) -> None:
        """Refuse audio that would be too long once resampled, before it is resampled."""
        if self.most is not None:
            most = self.most
        else:
            most = max(max(self.largest)[0], _MAX_UPSAMPLING * before)
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
        samples = generator.uniform(-1, 1, count_drawn_values(shape)).astype(np.float32)
        return repeat_values(samples, shape)

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return 4 * sizes[0]


def _check_rate(rate: Any, where: str) -> None:
    if rate is not None and not (is_number(rate) and 1 <= rate < math.inf):
        raise InputError(where, "a sampling rate >= 1 in Hz", repr(rate))


def _make_random_pixels(
    shape: Sequence[int], generator: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Return random bytes of a shape."""
    count = count_drawn_values(shape)
    return repeat_values(generator.integers(0, 256, count, dtype=np.uint8), shape)


def _resample_by_library(samples: np.ndarray[Any, Any], before: int, after: int, where: str) -> Any:
    """Return samples at another rate in Hz, by the first installed library of those that vLLM uses.

    Raises:
        InputError: none is installed.
    """
    with suppress(ImportError, OSError):
        from torchaudio.functional import resample

        return resample(torch.from_numpy(samples), before, after).numpy()
    with suppress(ImportError, OSError):
        import soxr

        return soxr.resample(samples, before, after)
    got = f"{before} Hz, and no library that resamples"
    raise InputError(where, f"audio at {after} Hz", got, "Resample it first, or install soxr.")


def _make_picture(pixels: np.ndarray[Any, Any]) -> Any:
    """Return a PIL image of uint8 pixels (height, width, 3) or (3, height, width)."""
    if pixels.shape[-1] != 3:
        pixels = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
    return import_pil().fromarray(pixels, "RGB")


def _check_metadata(metadata: Mapping[str, Any], count: int, where: str) -> None:
    """Refuse metadata that contradict the frames, or are impossible.

    For a file without a length, for example, they state -3e15 frames, while the loader has decoded
    one frame.

    Args:
        metadata: as vLLM's loaders make them; what they lack is not looked at.
        count: the number of frames.
        where: names them in errors.

    Raises:
        InputError: names the value.
    """
    remedy = "Send a file that states its length, or the frames alone."
    fps = to_python(metadata.get("fps"))
    if fps is not None and not _is_finite(fps, above=0):
        raise InputError(where, "fps > 0", repr(fps), remedy)
    duration = to_python(metadata.get("duration"))
    if duration is not None and not _is_finite(duration, least=0):
        raise InputError(where, "a duration >= 0 in seconds", repr(duration), remedy)
    total = to_python(metadata.get("total_num_frames"))
    if total is not None and not _is_finite(total, least=1):
        raise InputError(where, "total_num_frames >= 1", repr(total), remedy)
    indices = to_python(metadata.get("frames_indices"))
    if indices is not None:
        _check_frame_indices(indices, count, total, where)


def _is_finite(value: Any, *, least: float = -math.inf, above: float = -math.inf) -> bool:
    """Return whether a value is a number in a range, and no infinity."""
    return is_number(value) and least <= value < math.inf and value > above


def _check_frame_indices(indices: Any, count: int, total: float | None, where: str) -> None:
    """Refuse a value that is no list of indices of a video's frames.

    Args:
        indices: from the metadata of the video.
        count: the number of frames.
        total: the number of frames of the whole video; None where it is not stated.
        where: names the metadata in errors.
    """
    expected = f"frames_indices of {count} frames"
    if not isinstance(indices, (list, tuple)):
        raise InputError(where, expected, describe(indices))
    if len(indices) != count:
        raise InputError(where, expected, f"{len(indices)} of them")
    last = math.inf if total is None else total - 1
    for index in indices:
        if not (is_number(index) and 0 <= index <= last):
            raise InputError(where, f"frames_indices from 0 to {last}", repr(index))


def _is_frame(value: Any) -> bool:
    """Return whether a value may be one frame of a video: a PIL image or an array."""
    return hasattr(value, "getbands") or (isinstance(value, ARRAYS) and value.ndim == 3)


def _is_list_of_frames(value: Any) -> bool:
    """Return whether a value is a list or a tuple of at least one frame."""
    return isinstance(value, (list, tuple)) and bool(value) and all(map(_is_frame, value))


def _stack_frames(frames: list[np.ndarray[Any, Any]], where: str) -> np.ndarray[Any, Any]:
    """Return frames of one shape and dtype as one array."""
    first = f"{frames[0].dtype} {frames[0].shape}"
    for frame in frames[1:]:
        other = f"{frame.dtype} {frame.shape}"
        if other != first:
            raise InputError(where, "frames of one shape and dtype", f"{first} and {other}")
    return np.stack(frames)


def _holds_pixels(shape: Sequence[int], ndim: int) -> bool:
    """Return whether an array of a shape can hold pixels.

    It has `ndim` dimensions, none of them empty, and 1, 3 or 4 channels, which come last or before
    height and width.
    """
    if len(shape) != ndim or 0 in shape:
        return False
    return not {1, 3, 4}.isdisjoint((shape[-3], shape[-1]))


def _is_pair(value: Any) -> bool:
    """Return whether a value is (frames, metadata)."""
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and (value[1] is None or isinstance(value[1], Mapping))


def _split_video(value: Any) -> tuple[Any, Any]:
    """Return the frames of a video, and its metadata, or None."""
    value = getattr(value, "media", value)
    if not _is_pair(value):
        return value, None
    frames, metadata = value
    return getattr(frames, "media", frames), metadata


def _get_image_size(image: Any) -> tuple[int, int]:
    """Return (width, height) of an image.

    As in vLLM, the last dimension of an array is the channels if it is 1, 3 or 4.
    """
    if hasattr(image, "getbands"):
        return image.size  # type: ignore[no-any-return]
    if image.shape[-1] in (1, 3, 4):
        height, width = image.shape[:2]
    else:
        height, width = image.shape[1:]
    return width, height

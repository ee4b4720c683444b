"""Files of images and of audio, as vLLM's loaders take them.

Of an image the header tells the facts, and its bytes are what is hashed: no pixel is decoded. Of
audio the samples are hashed, so that a file is decoded.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from ..errors import InputError, describe_error
from ..language.items.facts import ImageFacts
from ..language.items.pictures import check_file, find_orientation, import_pil

_IS_TURNED = (5, 6, 7, 8)
"""The orientations that exchange width and height."""

_TOLD_BY_HEADER = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""PIL's names of formats whose header tells the mode of the decoded image."""


@dataclass(frozen=True, kw_only=True)
class ImageFile(ImageFacts):
    """The facts of an image file, with what its hash covers.

    Attributes:
        original_bytes: the file.
        io_config: how vLLM's loader converts the image; None where it does not.
    """

    original_bytes: bytes = field(repr=False)
    io_config: dict[str, Any] | None


def inspect_image_file(
    data: bytes,
    where: str = "image",
    *,
    image_mode: str | None = "RGB",
    rgba_background_color: tuple[int, int, int] = (255, 255, 255),
) -> ImageFile:
    """Read the facts of an image file.

    Formats other than JPEG, PNG, WebP, GIF and BMP are decoded, since their headers do not tell
    enough. A damaged file is not always noticed.

    Args:
        data: the file.
        where: names it in errors.
        image_mode: of the server's ``--media-io-kwargs``.
        rgba_background_color: likewise.

    Raises:
        InputError: no image, or one with more than 8 bits per channel.
    """
    try:
        image = import_pil().open(io.BytesIO(data))
        if image.format not in _TOLD_BY_HEADER:
            image.load()
    except Exception as error:  # the readers of PIL raise errors of many kinds
        raise InputError(where, "an image file", describe_error(error)) from error
    check_file(data, where)
    width, height = image.size
    if find_orientation(image) in _IS_TURNED:
        width, height = height, width
    io_config = None
    if image_mode is not None and image.mode != image_mode:
        io_config = {"image_mode": image_mode, "rgba_background_color": rgba_background_color}
    return ImageFile(width=width, height=height, original_bytes=data, io_config=io_config)


def decode_audio_file(data: bytes, where: str = "audio") -> tuple[np.ndarray[Any, Any], int]:
    """Decode a file of audio by soundfile, as vLLM does where it has no torchcodec.

    Args:
        data: the file.
        where: names it in errors.

    Returns:
        Its samples, float32, the mean of all channels; and its rate in Hz. The pair is an item.

    Raises:
        InputError: soundfile is missing, or does not know the file.
    """
    try:
        soundfile: Any = import_module("soundfile")
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            samples = file.read(dtype="float32", always_2d=False).T
            rate: int = file.samplerate
    except Exception as error:
        expected = "a file of audio that soundfile decodes"
        raise InputError(where, expected, describe_error(error)) from error
    if samples.ndim > 1:
        samples = np.mean(samples, axis=tuple(range(samples.ndim - 1)))
    return samples, rate

"""Pictures: one form for all that PIL opens, upright, in RGB, with 8 bits per channel."""

from __future__ import annotations

import io
from contextlib import suppress
from functools import cache
from typing import Any

from ...errors import InputError, describe_error

_ORIENTATION = 0x0112  # the EXIF tag that says how a picture was held

_DEEP_MODES = ("I", "F")
"""How the names of PIL's modes begin whose values may exceed 8 bits; a conversion clips them."""

_JPEG_BEGIN = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"

_ALWAYS_8_BITS = (_JPEG_BEGIN, b"GIF8", b"RIFF")
"""How files begin that never hold more, JPEG, GIF and WebP, and whose damage PIL always reports."""

_FILE = "_mmkit_file"
"""The attribute of a PIL image that is decoded later: the bytes of its file."""

_FAILURE = "_mmkit_failure"
"""The attribute of a PIL image that could not be loaded, which says why."""


def upright_rgb(image: Any, where: str) -> Any:
    """Return a PIL image as an upright RGB one, transparency on white, as vLLM makes it.

    Args:
        image: a PIL image of any mode; its file may not be read yet.
        where: names it in errors.

    Raises:
        InputError: its file is damaged, or it has more than 8 bits per channel.
    """
    if image.mode != "RGB":  # most are
        check_depth(image, where)
    _load(image, where)
    if find_orientation(image) != 1:
        with suppress(Exception):  # of EXIF data that cannot be read; the pixels are loaded
            from PIL import ImageOps

            image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = import_pil().new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _load(image: Any, where: str) -> None:
    """Read the pixels of a PIL image from its file.

    PIL forgets that this failed: at a second attempt, or after `getexif`, which reads a PNG to its
    end, the rest of the pixels is black and nothing is raised. So this comes before `getexif`, and
    the failure is kept in the image.

    Raises:
        InputError: the file is damaged, now or at an attempt before.
    """
    failure = getattr(image, _FAILURE, "")
    if failure:
        raise InputError(where, "an image that can be read", failure)
    try:
        image.load()
    except Exception as error:  # of any of PIL's readers
        failure = describe_error(error)
        setattr(image, _FAILURE, failure)
        raise InputError(where, "an image that can be read", failure) from error


def open_undecoded(data: bytes) -> Any:
    """Open a JPEG file of which only the header is read, and return the PIL image.

    Return None for any other file, and for a JPEG file that is not in RGB, that its EXIF data turn,
    or whose end is missing: whoever opens it has more to do than to decode it.
    """
    if not data.startswith(_JPEG_BEGIN) or not data.endswith(_JPEG_END):
        return None
    try:
        image = import_pil().open(io.BytesIO(data), formats=("JPEG",))
    except Exception:  # of a file that is refused where it is decoded
        return None
    # a JPEG file of several pictures has another format
    if image.format != "JPEG" or image.mode != "RGB" or find_orientation(image) != 1:
        return None
    setattr(image, _FILE, data)
    return image


def get_undecoded_file(image: Any) -> bytes | None:
    """Return the bytes of the file of an image that `open_undecoded` has opened, else None."""
    file: bytes | None = getattr(image, _FILE, None)
    return file


def decode_pictures(value: Any, where: str) -> None:
    """Decode the images of an item that `open_undecoded` has opened.

    Args:
        value: an item: an image, or a record or a list with images.
        where: names it in errors.

    Raises:
        InputError: a file is damaged.
    """
    if isinstance(value, dict):
        for name, part in value.items():
            decode_pictures(part, f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            decode_pictures(part, f"{where}[{number}]")
    elif get_undecoded_file(value) is not None:
        _load(value, where)


def check_file(data: bytes, where: str) -> None:
    """Refuse a picture file that is damaged, or has more than 8 bits per channel.

    vLLM's loader decodes such a file without an error.

    Raises:
        InputError: names which.
    """
    if data.startswith(_ALWAYS_8_BITS):
        return
    try:
        image = import_pil().open(io.BytesIO(data))
    except import_pil().UnidentifiedImageError:
        return  # what another loader than PIL's has decoded
    check_depth(image, where)
    try:
        image.verify()  # of a PNG: the checksums of its chunks
    except Exception as error:
        raise InputError(where, "an image that can be read", describe_error(error)) from error


def find_orientation(image: Any) -> int:
    """Return how a picture was held, as its EXIF data say; 1 for upright, and without such data."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # EXIF data that cannot be read, which vLLM ignores
        return 1


def check_depth(image: Any, where: str) -> None:
    """Refuse a PIL image of more than 8 bits per channel.

    Raises:
        InputError: names its mode.
    """
    if image.mode.startswith(_DEEP_MODES):
        remedy = "Send 8-bit RGB, or declare a Tensor for such values."
        raise InputError(where, "an image of 8 bits per channel", f"mode {image.mode}", remedy)


@cache
def import_pil() -> Any:
    """Return PIL's module of images, which models without any do not load."""
    from PIL import Image as PILImage

    return PILImage

"""Images that vLLM's loader does not decode, where render processes do."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import Any

import vllm.envs
from PIL import ExifTags, Image
from pybase64 import b64decode
from vllm.multimodal.media import ImageMediaIO, MediaConnector, MediaIO, MediaWithBytes

from ..render_processes import FILE
from .replaced import replaced


class _Undecoded(MediaIO[Any]):
    """Opens images that need no conversion, and leaves the rest to vLLM's loader.

    Args:
        media_io: vLLM's.
    """

    def __init__(self, media_io: Any) -> None:
        self._io = media_io

    def load_bytes(self, data: bytes) -> Any:
        with suppress(OSError, ValueError, SyntaxError):  # what vLLM's loader then refuses
            image = Image.open(BytesIO(data), formats=("JPEG", "PNG"))
            limit = vllm.envs.VLLM_MAX_IMAGE_PIXELS or float("inf")
            is_small = image.width * image.height <= limit
            if is_small and image.mode == self._io.image_mode and not _is_turned(image, data):
                setattr(image, FILE, data)
                return MediaWithBytes(image, data)
        return self._io.load_bytes(data)

    def load_base64(self, media_type: str, data: str) -> Any:
        return self.load_bytes(b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> Any:
        return self.load_bytes(filepath.read_bytes())


def _is_turned(image: Any, file: bytes) -> bool:
    """Whether metadata of an image say, or may say, that it is to be turned."""
    if image.format == "JPEG":
        return bool(image.getexif().get(ExifTags.Base.Orientation, 1) != 1)
    # of a PNG, to ask for them decodes it
    return any(mark in file for mark in (b"eXIf", b"exif", b"XML:com.adobe.xmp"))


def _steps() -> dict[str, Any]:
    """The methods that load media, leaving images undecoded."""

    def step(theirs: Any) -> Any:
        @wraps(theirs)
        def load(self: Any, url: str, media_io: Any, **options: Any) -> Any:
            own = _Undecoded(media_io) if type(media_io) is ImageMediaIO else media_io
            return theirs(self, url, own, **options)

        return load

    names = ("load_from_url", "load_from_url_async")
    return {name: step(getattr(MediaConnector, name)) for name in names}


def images_undecoded() -> AbstractContextManager[None]:
    """vLLM's loader leaves images undecoded, inside a block."""
    return replaced(MediaConnector, **_steps())


def leave_images_undecoded() -> None:
    """`images_undecoded` for the lifetime of a server."""
    for name, step in _steps().items():
        setattr(MediaConnector, name, step)

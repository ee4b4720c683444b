"""Media among items: what they are, and their sizes, before anything decodes a pixel."""

from __future__ import annotations

import base64
import binascii
from io import BytesIO
from typing import Any

from ..errors import InputError
from ..items import ItemType
from .wire import Media

FRAMES = 32
"""Frames that vLLM takes of a video, unless its ``--media-io-kwargs`` say otherwise."""


def media_of(value: Any) -> list[Media]:
    """The media among a modality's items, or the parts of these, that are still to be loaded."""
    values = value if isinstance(value, list) else [value]
    parts = (one.values() if isinstance(one, dict) else [one] for one in values)
    return [part for of_one in parts for part in of_one if isinstance(part, Media)]


def check_kinds(value: Any, kind: ItemType, where: str) -> None:
    """Refuse an image for what is no image, before anybody loads it.

    Raises:
        InputError: a medium of a modality's items, or of their parts, is of another kind.
    """
    for index, one in enumerate(value if isinstance(value, list) else [value]):
        at = f"{where}[{index}]" if isinstance(value, list) else where
        _check_kind(one, kind, at)
        if isinstance(one, dict):
            for name, part in getattr(kind, "parts", {}).items():
                _check_kind(one.get(name), part, f"{at}.{name}")


def _check_kind(part: Any, kind: ItemType, where: str) -> None:
    if isinstance(part, Media) and kind.media not in (None, part.kind):
        raise InputError(where, kind.expected, f"a part of kind {part.kind}")


def pixels(media: Media, frames: int = FRAMES) -> int:
    """Pixels of an image, or of the frames of a video; 0 for what is no data URL, and for what
    cannot be told, which vLLM's loader refuses, or bounds by limits of its own
    (VLLM_MAX_IMAGE_PIXELS, VLLM_MAX_AUDIO_DECODE_BYTES).

    Args:
        media: as a client sends it.
        frames: how many of a video vLLM takes; all of them if it is negative.
    """
    start, _, content = media.url.partition(",")
    if start[:5].lower() != "data:" or media.kind == "audio":
        return 0
    if media.kind == "image":
        return _of_image(content)
    if start[5:].partition(";")[0].lower() == "video/jpeg":
        parts = content.split(",", frames)[:frames] if frames > 0 else content.split(",")
        return sum(map(_of_image, parts))
    return _of_video(content, frames)


def _of_image(content: str) -> int:
    from PIL import Image

    try:
        with Image.open(BytesIO(base64.b64decode(content, validate=True))) as image:
            return image.width * image.height
    except Image.DecompressionBombError:
        return 2 * (Image.MAX_IMAGE_PIXELS or 0) + 1
    except (OSError, ValueError, SyntaxError, binascii.Error):  # the kinds of plugins differ
        return 0


def _of_video(content: str, frames: int) -> int:
    try:
        import cv2
        from cv2 import videoio_registry
    except ImportError:
        return 0
    try:
        stream: Any = BytesIO(base64.b64decode(content, validate=True))
        (backend, *_) = videoio_registry.getStreamBufferedBackends()
        video = cv2.VideoCapture(stream, backend, [])
    except (ValueError, TypeError, cv2.error):  # an older cv2 reads no streams
        return 0
    size = [int(video.get(of)) for of in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)]
    count = max(1, int(video.get(cv2.CAP_PROP_FRAME_COUNT)))
    return size[0] * size[1] * (min(count, frames) if frames > 0 else count)

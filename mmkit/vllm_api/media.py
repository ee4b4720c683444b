"""What is looked at before vLLM decodes media: their pixels, and who decodes audio.

All media of all routes are loaded by vLLM's `MediaConnector`, from a data URL, a file or another
host. There the loader of one kind of media is put behind `Weighed`, which knows the bytes and has
not decoded them yet.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import DISTRIBUTION, InputError
from ..language.items.media import AUDIO_DECODERS
from .compat import find
from .incoming import REQUEST

FRAMES = 32
"""Frames that vLLM takes of a video, unless its ``--media-io-kwargs`` say otherwise."""

VideoSource: Any = find("multimodal.video:VideoSourceMetadata", default=None)
VideoTarget: Any = find("multimodal.video:VideoTargetMetadata", default=None)


def weighing(theirs: Any) -> Any:
    """Wrap vLLM's function that loads media from a URL, so that their pixels are counted first."""

    # vLLM reads the bytes in threads, which do not inherit `REQUEST`, so it is read here
    @wraps(theirs)
    def load(self: Any, url: str, media_io: Any, **options: Any) -> Any:
        request = REQUEST.get()
        if request is not None:
            media_io = Weighed(media_io, request.spend_pixels)
        return theirs(self, url, media_io, **options)

    return load


class Weighed:
    """vLLM's loader of one kind of media, which counts pixels before it decodes them.

    Args:
        loader: vLLM's.
        spend: called with a number of pixels; raises where there are too many.
    """

    def __init__(self, loader: Any, spend: Callable[[int], None]) -> None:
        self._loader, self._spend = loader, spend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_bytes(self, data: bytes) -> Any:
        """Load media from the bytes of a file."""
        expected = self._count(data)
        return self._checked(expected, self._loader.load_bytes(data))

    def load_base64(self, media_type: str, data: str) -> Any:
        """Load media from base64."""
        if self._is_video() and media_type.lower() == "video/jpeg":
            expected = self._count_pictures(data)
        else:
            expected = self._count(_decode_base64(data))
        return self._checked(expected, self._loader.load_base64(media_type, data))

    def load_file(self, filepath: Path) -> Any:
        """Load media from a file of the server."""
        expected = self._count(filepath.read_bytes())
        return self._checked(expected, self._loader.load_file(filepath))

    def _is_video(self) -> bool:
        return hasattr(self._loader, "video_loader")

    def _count(self, data: bytes) -> int:
        """Spend the pixels of a file; return how many they are."""
        if self._is_video():
            count = _pixels_of_video(data, self._loader)
        elif hasattr(self._loader, "image_mode"):
            count = pixels_of_image(data)
        else:  # sound, which vLLM bounds itself (VLLM_MAX_AUDIO_DECODE_BYTES)
            check_audio_decoder()
            count = 0
        self._spend(count)
        return count

    def _count_pictures(self, data: str) -> int:
        """Spend the pixels of a video that is a list of pictures in base64; return how many they
        are."""
        frames = self._loader.num_frames
        pictures = data.split(",", frames)[:frames] if frames > 0 else data.split(",")
        count = 0
        for picture in pictures:
            count += pixels_of_image(_decode_base64(picture))
        self._spend(count)
        return count

    def _checked(self, expected: int, media: Any) -> Any:
        """Return loaded media after the pixels of a video that turned out larger are spent, too:
        what a file says of its frames may be wrong."""
        if self._is_video():
            frames = getattr(media, "media", media)[0]
            count = math.prod(frames.shape[:-1])
            if count > expected:
                self._spend(count - expected)
        return media


def can_decode_audio() -> bool:
    """Whether a library is installed that decodes files of audio as models expect them."""
    return any(find_spec(name) is not None for name in AUDIO_DECODERS)


def check_audio_decoder() -> None:
    """Refuse files of audio where vLLM would hand over their integers unscaled.

    Raises:
        InputError: no such library is installed.
    """
    if not can_decode_audio():
        expected = f"{' or '.join(AUDIO_DECODERS)} on the server, to decode a file of audio"
        remedy = f"Send samples, or install {DISTRIBUTION}[audio] there."
        raise InputError("audio", expected, "neither", remedy)


def _decode_base64(data: str) -> bytes:
    """Decode base64; empty for what is none, which vLLM refuses."""
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        return b""


def pixels_of_image(data: bytes) -> int:
    """Return the pixels of a picture from its header; 0 for what is none, which vLLM refuses."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.width * image.height
    except Image.DecompressionBombError:
        return 2 * (Image.MAX_IMAGE_PIXELS or 0) + 1
    except Exception:  # the kinds of plugins differ
        return 0


def _pixels_of_video(data: bytes, loader: Any) -> int:
    """Return the pixels of the frames that vLLM would take of a video, from its header; 0 for what
    cannot be told."""
    try:
        import cv2
        from cv2 import videoio_registry

        (backend, *_) = videoio_registry.getStreamBufferedBackends()
        stream: Any = io.BytesIO(data)
        video = cv2.VideoCapture(stream, backend, [])
        if not video.isOpened():
            return 0
        width = int(video.get(cv2.CAP_PROP_FRAME_WIDTH))
        height = int(video.get(cv2.CAP_PROP_FRAME_HEIGHT))
        frames = max(1, int(video.get(cv2.CAP_PROP_FRAME_COUNT)))
        rate = float(video.get(cv2.CAP_PROP_FPS))
    except Exception:  # there is no cv2, or one that reads no streams, or this is no video
        return 0
    return width * height * _frames_taken(loader, frames, rate)


def _frames_taken(loader: Any, frames: int, rate: float) -> int:
    """Return how many frames vLLM takes of a video, as its own function chooses them."""
    wanted = getattr(loader, "num_frames", FRAMES)
    options = dict(getattr(loader, "kwargs", {}))
    try:
        target = VideoTarget(
            num_frames=wanted,
            fps=options.pop("fps", -1),
            max_duration=options.pop("max_duration", 300),
        )
        duration = frames / rate if rate > 0 else 0.0
        source = VideoSource(total_frames_num=frames, original_fps=rate, duration=duration)
        choose = loader.video_loader.compute_frames_index_to_sample
        return len(choose(source, target, **options))
    except Exception:  # the arguments differ between releases and kinds of sampling
        return min(frames, wanted) if wanted > 0 else frames

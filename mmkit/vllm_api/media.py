"""Checks where vLLM decodes media: of their pixels before, and of their samples after.

A server with render processes leaves it to them to decode JPEG files.

All media of all routes are loaded by vLLM's `MediaConnector`, from a data URL, a file or another
host. There the loader of one kind of media is put behind `CheckedLoader`, which knows the bytes and
has not decoded them yet.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import vllm.envs

from ..errors import DISTRIBUTION, InputError, describe_error
from ..language.items.media import AUDIO_DECODERS
from ..language.items.pictures import open_undecoded
from .compat import FILES_TELL_DECODING, find
from .server_request import SERVER_REQUEST

FRAMES = 32
"""Frames that vLLM takes of a video, unless its ``--media-io-kwargs`` say otherwise."""

EXACT_FORMATS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "FLAC")
EXACT_SUBTYPES = ("PCM_", "FLOAT", "DOUBLE", "ULAW", "ALAW")
"""Files, by libsndfile's names and the beginnings of its names, whose header states the number of
frames that every decoder gives. Lossy codecs pad, and headers of such files may estimate."""

MAX_DURATION_RATIO = 1.5
"""Of a decoded sound of several channels to what its header says. Channels that were put one behind
the other make twice the duration, or more."""

AudioMediaIO: Any = find("multimodal.media.audio:AudioMediaIO", "multimodal.audio:AudioMediaIO")

AudioDecoder: Any = find("multimodal.media.audio:AudioDecoder", default=None)
"""torchcodec's, where vLLM's loader takes it; None too where it cannot be imported."""

ImageMediaIO: Any = find("multimodal.media.image:ImageMediaIO", "multimodal.image:ImageMediaIO")

MediaWithBytes: Any = find("multimodal.media:MediaWithBytes", default=None)

VideoSource: Any = find("multimodal.video:VideoSourceMetadata", default=None)
VideoTarget: Any = find("multimodal.video:VideoTargetMetadata", default=None)


def wrap_load(load_from_url: Any) -> Any:
    """Make vLLM's function that loads media from a URL check what it loads.

    Pixels are counted before they are decoded, and decoded audio is compared with its header.
    """

    # vLLM reads the bytes in threads, which do not inherit `SERVER_REQUEST`, so it is read here
    @wraps(load_from_url)
    def check_and_load(self: Any, url: str, media_io: Any, **options: Any) -> Any:
        request = SERVER_REQUEST.get()
        if request is None:  # offline no pixels are counted
            loader = CheckedLoader(media_io, None)
        else:
            loader = CheckedLoader(
                media_io, request.spend_pixels, leaves_jpeg=request.has_render_processes
            )
        return load_from_url(self, url, loader, **options)

    return check_and_load


def _loads_audio(loader: Any) -> bool:
    """Return whether a loader of vLLM loads audio."""
    return isinstance(loader, AudioMediaIO)


class CheckedLoader:
    """vLLM's loader of one kind of media, with a check before it decodes a file, and one after.

    Before, the pixels are counted. Afterwards, the media are compared with what their file says.

    Args:
        loader: vLLM's.
        spend: called with a number of pixels; raises where there are too many. None where none are
            counted.
        leaves_jpeg: whether JPEG files are left to render processes, since their pixels take longer
            to move than the files.
    """

    def __init__(
        self, loader: Any, spend: Callable[[int], None] | None, *, leaves_jpeg: bool = False
    ) -> None:
        self._loader = loader
        self._spend = spend
        # where the loader does not tell how it converts a file, the pixels are hashed
        self._leaves_jpeg = leaves_jpeg and FILES_TELL_DECODING

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_bytes(self, data: bytes) -> Any:
        """Load media from the bytes of a file."""
        expected = self._count(data)
        media = self._open_undecoded(data)
        if media is None:
            media = self._decode(self._loader.load_bytes, data)
        self._check(media, data, expected)
        return media

    def load_base64(self, media_type: str, data: str) -> Any:
        """Load media from base64."""
        content = b""
        if self._is_video() and media_type.lower() == "video/jpeg":
            expected = self._count_pictures(data)
        else:
            content = _decode_base64(data)
            expected = self._count(content)
        media = self._open_undecoded(content)
        if media is None:
            media = self._decode(self._loader.load_base64, media_type, data)
        self._check(media, content, expected)
        return media

    def load_file(self, filepath: Path) -> Any:
        """Load media from a file of the server."""
        content = filepath.read_bytes()
        expected = self._count(content)
        media = self._open_undecoded(content)
        if media is None:
            media = self._decode(self._loader.load_file, filepath)
        self._check(media, content, expected)
        return media

    def _open_undecoded(self, data: bytes) -> Any:
        """Return a JPEG file as vLLM's loader returns it, but for its pixels.

        Return None where the loader has to decode the file, or refuses it.
        """
        # not one derived from it, which may do more
        if not self._leaves_jpeg or type(self._loader) is not ImageMediaIO:
            return None
        if self._loader.image_mode != "RGB":
            return None
        image = open_undecoded(data)
        limit = vllm.envs.VLLM_MAX_IMAGE_PIXELS
        if image is None or 0 < limit < image.width * image.height:
            return None
        return MediaWithBytes(image, data)

    def _decode(self, load: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the loader, whose libraries raise errors of many kinds.

        Raises:
            InputError: in place of an error that a server would take for its own fault.
        """
        try:
            return load(*arguments)
        except ValueError:  # vLLM's own refusals
            raise
        except Exception as error:
            kind = "image"
            if self._is_video():
                kind = "video"
            elif _loads_audio(self._loader):
                kind = "audio"
            raise InputError(kind, "a file that can be decoded", describe_error(error)) from error

    def _is_video(self) -> bool:
        return hasattr(self._loader, "video_loader")

    def _count(self, data: bytes) -> int:
        """Spend the pixels of a file, and return their number."""
        if _loads_audio(self._loader):  # vLLM bounds it itself (VLLM_MAX_AUDIO_DECODE_BYTES)
            check_audio_decoder()
            return 0
        if self._spend is None:
            return 0
        if self._is_video():
            count = _count_pixels_of_video(data, self._loader)
        else:
            count = count_pixels_of_image(data)
        self._spend(count)
        return count

    def _count_pictures(self, data: str) -> int:
        """Spend the pixels of a video that is a list of pictures in base64.

        Return the number of pixels.
        """
        if self._spend is None:
            return 0
        frames = self._loader.num_frames
        pictures = data.split(",", frames)[:frames] if frames > 0 else data.split(",")
        count = 0
        for picture in pictures:
            count += count_pixels_of_image(_decode_base64(picture))
        self._spend(count)
        return count

    def _check(self, media: Any, data: bytes, expected: int) -> None:
        """Check loaded media against what their file says.

        Args:
            media: as the loader returns them.
            data: the bytes of the file; empty for a video that is a list of pictures.
            expected: the pixels that are spent already. Those of a video that has more, because its
                file was wrong, are spent, too.
        """
        if self._is_video() and self._spend is not None:
            frames = getattr(media, "media", media)[0]
            count = math.prod(frames.shape[:-1])
            if count > expected:
                self._spend(count - expected)
        elif _loads_audio(self._loader):
            samples, rate = media
            check_sound(samples, rate, data)


# -- audio -----------------------------------------------------------------------------------------


def can_decode_audio() -> bool:
    """Return whether vLLM has a library here that decodes files of audio as models expect them."""
    soundfile, _ = AUDIO_DECODERS
    if AudioDecoder is not None:
        return True
    try:
        import_module(soundfile)
    except (ImportError, OSError):  # OSError: without libsndfile
        return False
    return True


def check_audio_decoder() -> None:
    """Refuse files of audio where vLLM would hand over their integers unscaled.

    Raises:
        InputError: no such library can be imported.
    """
    if not can_decode_audio():
        expected = f"{' or '.join(AUDIO_DECODERS)} on the server, to decode a file of audio"
        remedy = f"Send samples, or install {DISTRIBUTION}[audio] there."
        raise InputError("audio", expected, "neither", remedy)


class SoundHeader(NamedTuple):
    """What the header of a file of audio says.

    Attributes:
        channels: how many.
        rate: frames per second.
        frames: samples of one channel.
        is_exact: whether every decoder gives as many frames.
    """

    channels: int
    rate: int
    frames: int
    is_exact: bool


def check_sound(samples: Any, rate: float, data: bytes) -> None:
    """Refuse samples that contradict the header of their file.

    Where vLLM leaves a file to PyAV, because libsndfile does not know it or a server's
    ``--media-io-kwargs`` say so, the channels may come in turn, as one of twice the length. A file
    that is cut off gives fewer samples than it states.

    Args:
        samples: as vLLM's loader returns them.
        rate: their sampling rate in Hz.
        data: the bytes of the file.

    Raises:
        InputError: says what the header says.
    """
    if data.startswith(b"RIFX") and AudioDecoder is not None:
        # FFmpeg reads the bytes of its samples in the other order: noise, and no error
        remedy = "Send a WAV file that begins with RIFF, or samples."
        raise InputError("audio", "a file that torchcodec decodes", "big-endian WAV", remedy)
    header = parse_sound_header(data)
    if header is None:
        return
    if header.is_exact:
        agrees = len(samples) == header.frames and round(rate) == header.rate
    else:
        seconds = header.frames / header.rate
        agrees = header.channels == 1 or len(samples) / rate <= MAX_DURATION_RATIO * seconds
    if not agrees:
        expected = f"{header.frames} samples at {header.rate} Hz, as the header of the file says"
        got = f"{len(samples)} at {rate:g} Hz of {header.channels} channel(s)"
        raise InputError("audio", expected, got, "Send a whole file as WAV or FLAC, or samples.")


def parse_sound_header(data: bytes) -> SoundHeader | None:
    """Return what the header of a file of audio says; None where nothing here can read it."""
    try:
        soundfile: Any = import_module("soundfile")
        info = soundfile.info(io.BytesIO(data))
    except Exception:  # it is not installed, or does not know the file
        return _parse_header_by_av(data)
    is_exact = info.format in EXACT_FORMATS and info.subtype.startswith(EXACT_SUBTYPES)
    return SoundHeader(info.channels, info.samplerate, info.frames, is_exact)


def _parse_header_by_av(data: bytes) -> SoundHeader | None:
    """Return what PyAV reads in the header of a file of audio, if it states a duration."""
    try:
        av: Any = import_module("av")
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.audio[0]
            rate = int(stream.rate)
            channels = int(stream.channels)
            if stream.duration is not None and stream.time_base is not None:
                seconds = float(stream.duration * stream.time_base)
            else:
                seconds = (container.duration or 0) / av.time_base
    except Exception:  # it is not installed, or does not know the file
        return None
    frames = round(seconds * rate)
    if frames < 1:
        return None
    return SoundHeader(channels, rate, frames, is_exact=False)


# -- pixels ----------------------------------------------------------------------------------------


def _decode_base64(data: str) -> bytes:
    """Return decoded base64; empty for malformed text, which vLLM refuses."""
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        return b""


def count_pixels_of_image(data: bytes) -> int:
    """Return the number of pixels in the header of a picture.

    Return 0 for bytes that are no picture, which vLLM refuses.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.width * image.height
    except Image.DecompressionBombError:
        return 2 * (Image.MAX_IMAGE_PIXELS or 0) + 1
    except Exception:  # the kinds of plugins differ
        return 0


def _count_pixels_of_video(data: bytes, loader: Any) -> int:
    """Return the number of pixels of the frames that vLLM will take of a video.

    It is computed from the header. Return 0 if that cannot be read.
    """
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
    except Exception:  # there is no cv2, or a cv2 that reads no streams, or this is no video
        return 0
    return width * height * _count_sampled_frames(loader, frames, rate)


def _count_sampled_frames(loader: Any, frames: int, rate: float) -> int:
    """Return how many frames of a video vLLM samples, by its own function."""
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

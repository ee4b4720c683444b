"""Files of pictures, sounds and videos, as people have them: made here, none downloaded."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
import soundfile
import soxr
from PIL import Image, features

REFUSED = "refused"
"""Stands where a file holds no item."""


class File(NamedTuple):
    """A file, and what it holds.

    Attributes:
        name: in the reports of tests.
        mime: of its data URL.
        data: its bytes.
        expected: the item that was recorded, as an array; `REFUSED`; or None where its reader decides.
    """

    name: str
    mime: str
    data: bytes
    expected: Any = None


# -- pictures ----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 40, 24

MODES = {
    "PNG": ("L", "LA", "P", "RGB", "RGBA", "1", "I;16"),
    "TIFF": ("L", "LA", "P", "RGB", "RGBA", "CMYK", "1", "I;16", "I", "F"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("L", "RGB", "RGBA"),
    "GIF": ("L", "P", "RGB", "RGBA", "1"),
    "BMP": ("L", "P", "RGB", "RGBA", "1"),
    "AVIF": ("L", "RGB", "RGBA"),
}
DEEP = ("I;16", "I", "F")
LOSSLESS = {"WEBP": {"lossless": True}}

ORIENTATION = 0x0112
TURNS: Sequence[Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = (
    lambda stored: stored,
    np.fliplr,
    lambda stored: np.rot90(stored, 2),
    np.flipud,
    lambda stored: np.swapaxes(stored, 0, 1),
    lambda stored: np.rot90(stored, -1),
    lambda stored: np.rot90(np.swapaxes(stored, 0, 1), 2),
    lambda stored: np.rot90(stored, 1),
)
"""How a stored picture is seen, by its EXIF orientation from 1 on."""


def picture() -> np.ndarray[Any, Any]:
    """RGB pixels (24, 40, 3) whose corners and directions all differ."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, WIDTH)
    pixels[..., 1] = np.linspace(0, 255, HEIGHT)[:, None]
    pixels[:6, :6] = 255
    return pixels


def _save(image: Any, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def _picture_file(name: str, image: Any, form: str, expected: Any = None, **options: Any) -> File:
    return File(name, f"image/{form.lower()}", _save(image, form, **options), expected)


def _in_mode(mode: str) -> Any:
    """The picture in a mode of PIL."""
    rgb = Image.fromarray(picture())
    ramp = np.linspace(0, 1, WIDTH * HEIGHT).reshape(HEIGHT, WIDTH)
    if mode == "I;16":
        return Image.fromarray((ramp * 65535).astype(np.uint16))
    if mode == "I":
        return Image.fromarray((ramp * 60000).astype(np.int32))
    if mode == "F":
        return Image.fromarray(ramp.astype(np.float32))
    if mode in ("RGBA", "LA"):
        image = rgb.convert(mode)
        image.putalpha(Image.fromarray((ramp * 255).astype(np.uint8)))
        return image
    return rgb.convert(mode)


def _on_white(image: Any) -> np.ndarray[Any, Any]:
    """Pixels of a picture with an alpha channel over white, as floats."""
    values = np.asarray(image.convert("RGBA")).astype(float)
    alpha = values[..., 3:] / 255
    return values[..., :3] * alpha + 255 * (1 - alpha)


def _modes() -> Iterator[File]:
    for form, modes in MODES.items():
        if form in ("AVIF", "WEBP") and not features.check(form.lower()):
            continue
        for mode in modes:
            image = _in_mode(mode)
            expected: Any = None
            if mode in DEEP:
                expected = REFUSED
            elif form not in ("JPEG", "AVIF", "GIF") and mode != "CMYK":
                expected = _on_white(image) if "A" in mode else np.asarray(image.convert("RGB"))
            if (form, mode) == ("BMP", "RGBA"):
                expected = None  # whose alpha channel readers may ignore
            yield _picture_file(f"{mode} {form}", image, form, expected, **LOSSLESS.get(form, {}))


def _orientations() -> Iterator[File]:
    image = Image.fromarray(picture())
    for number, turn in enumerate(TURNS, 1):
        exif = Image.Exif()
        exif[ORIENTATION] = number
        stored = np.asarray(Image.open(io.BytesIO(_save(image, "JPEG", quality=95))))
        yield _picture_file(f"orientation {number} JPEG", image, "JPEG", turn(stored), exif=exif, quality=95)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for form in ("PNG", "WEBP", "TIFF"):
        options = {"exif": exif, **LOSSLESS.get(form, {})}
        yield _picture_file(f"orientation 6 {form}", image, form, TURNS[5](picture()), **options)


def _adam7(pixels: np.ndarray[Any, Any]) -> bytes:
    """An interlaced PNG, which Pillow reads and does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    height, width, _ = pixels.shape
    lines = b""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    for top, left, down, right in passes:
        for line in pixels[top::down, left::right]:
            lines += b"\0" + line.tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 1)
    compressed = zlib.compress(lines)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", compressed) + chunk(b"IEND", b"")


def _special_pictures() -> Iterator[File]:
    image = Image.fromarray(picture())
    few = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
    clear = bytes([0, 128, 255, 255, 255, 255, 255, 255])
    yield _picture_file("one transparent colour of a palette", few, "PNG", transparency=0)
    yield _picture_file("a palette with alpha values", few, "PNG", transparency=clear)
    yield _picture_file("one transparent gray", image.convert("L"), "PNG", transparency=0)
    yield _picture_file("one transparent RGB", image, "PNG", transparency=(255, 255, 255))
    yield File("interlaced PNG", "image/png", _adam7(picture()), picture())
    yield _picture_file("progressive JPEG", image, "JPEG", progressive=True)
    yield _picture_file("interlaced GIF", few, "GIF", np.asarray(few.convert("RGB")), interlace=True)
    frames = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("red", "lime", "blue")]
    red = np.asarray(frames[0])
    for form in ("GIF", "WEBP", "PNG", "TIFF"):
        options = {"save_all": True, "append_images": frames[1:], **LOSSLESS.get(form, {})}
        yield _picture_file(f"animated {form}", frames[0], form, red, **options)
    yield _picture_file("one pixel", Image.new("RGB", (1, 1), "red"), "PNG")
    yield _picture_file("very wide", Image.new("RGB", (3000, 1), "red"), "PNG")
    yield _picture_file("very high", Image.new("RGB", (1, 3000), "red"), "PNG")


def _broken_pictures() -> Iterator[File]:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for form in ("JPEG", "PNG", "TIFF", "WEBP", "GIF"):
        whole = _save(noise, form)
        mime = f"image/{form.lower()}"
        yield File(f"cut {form}", mime, whole[: len(whole) * 2 // 3], REFUSED)
    whole = _save(noise, "PNG")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    yield File("damaged PNG", "image/png", bytes(damaged), REFUSED)
    yield File("an empty picture", "image/png", b"", REFUSED)
    yield File("a text as a picture", "image/png", b"hello", REFUSED)


def pictures() -> list[File]:
    """Return files of pictures, one item each."""
    files: list[File] = []
    for make in (_modes, _orientations, _special_pictures, _broken_pictures):
        files += make()
    return files


# -- sounds ------------------------------------------------------------------------------------------------------------

RATE = 8000


class Coding(NamedTuple):
    """How samples are written into a file.

    Attributes:
        form: of libsndfile.
        subtype: the coding of a sample.
        mime: of the file.
        endian: the order of bytes.
        channels: how many, all alike.
        tolerance: of a decoded sample; None for a coding that loses what nobody hears.
    """

    form: str
    subtype: str
    mime: str = "audio/wav"
    endian: str = "FILE"
    channels: int = 1
    tolerance: float | None = 2**-14


CODINGS = {
    "8 bits": Coding("WAV", "PCM_U8", tolerance=2**-6),
    "16 bits": Coding("WAV", "PCM_16"),
    "24 bits": Coding("WAV", "PCM_24"),
    "32 bits": Coding("WAV", "PCM_32"),
    "float": Coding("WAV", "FLOAT"),
    "double": Coding("WAV", "DOUBLE"),
    "mu-law": Coding("WAV", "ULAW", tolerance=2**-4),
    "A-law": Coding("WAV", "ALAW", tolerance=2**-4),
    "stereo, 16 bits": Coding("WAV", "PCM_16", channels=2),
    "stereo, float": Coding("WAV", "FLOAT", channels=2),
    "six channels": Coding("WAV", "PCM_16", channels=6),
    "extensible": Coding("WAVEX", "PCM_24"),
    "RF64": Coding("RF64", "PCM_16"),
    "W64": Coding("W64", "PCM_16"),
    "RIFX, 16 bits": Coding("WAV", "PCM_16", endian="BIG"),
    "RIFX, 32 bits": Coding("WAV", "PCM_32", endian="BIG"),
    "AIFF, 16 bits": Coding("AIFF", "PCM_16", "audio/aiff"),
    "AIFF, 24 bits, stereo": Coding("AIFF", "PCM_24", "audio/aiff", channels=2),
    "AU, 16 bits": Coding("AU", "PCM_16", "audio/basic"),
    "AU, mu-law": Coding("AU", "ULAW", "audio/basic", tolerance=2**-4),
    "AU, float, stereo": Coding("AU", "FLOAT", "audio/basic", channels=2),
    "CAF": Coding("CAF", "PCM_16", "audio/x-caf"),
    "FLAC, 16 bits": Coding("FLAC", "PCM_16", "audio/flac"),
    "FLAC, 24 bits, stereo": Coding("FLAC", "PCM_24", "audio/flac", channels=2),
    "ADPCM": Coding("WAV", "IMA_ADPCM", tolerance=None),
    "Ogg": Coding("OGG", "VORBIS", "audio/ogg", tolerance=None),
    "Ogg, stereo": Coding("OGG", "VORBIS", "audio/ogg", channels=2, tolerance=None),
    "Opus": Coding("OGG", "OPUS", "audio/ogg", tolerance=None),
    "MP3": Coding("MP3", "MPEG_LAYER_III", "audio/mpeg", tolerance=None),
}


def sound(name: str, samples: np.ndarray[Any, Any], rate: int = RATE) -> File:
    """Return a file of samples, in one of the `CODINGS`."""
    coding = CODINGS[name]
    buffer = io.BytesIO()
    channels = np.repeat(np.clip(samples, -1, 1)[:, None], coding.channels, axis=1)
    soundfile.write(buffer, channels, rate, coding.subtype, coding.endian, coding.form)
    return File(name, coding.mime, buffer.getvalue(), samples)


def available(name: str) -> bool:
    """Whether libsndfile writes a coding here."""
    coding = CODINGS[name]
    return bool(soundfile.check_format(coding.form, coding.subtype, coding.endian))


def special_sounds(samples: np.ndarray[Any, Any]) -> list[File]:
    """Return files of one sound at other rates, of next to nothing, and broken ones."""
    files: list[File] = []
    for rate in (8000, 11025, 16000, 22050, 44100, 48000):
        resampled = soxr.resample(samples, RATE, rate)
        files.append(sound("16 bits", resampled, rate)._replace(name=f"{rate} Hz"))
    shortest = sound("16 bits", samples[:1])
    none = sound("16 bits", samples[:0])
    files += [shortest._replace(name="one sample"), none._replace(name="no sample", expected=REFUSED)]
    whole = sound("16 bits", samples)
    files.append(whole._replace(name="cut in its samples", data=whole.data[: len(whole.data) // 2], expected=None))
    files.append(whole._replace(name="cut in its header", data=whole.data[:30], expected=REFUSED))
    flac = sound("FLAC, 16 bits", samples)
    files.append(flac._replace(name="cut FLAC", data=flac.data[: len(flac.data) // 2], expected=None))
    files.append(File("an empty sound", "audio/wav", b"", REFUSED))
    files.append(File("a text as a sound", "audio/wav", b"hello", REFUSED))
    return files


# -- videos ------------------------------------------------------------------------------------------------------------

FRAMES = 10
SIDES = (64, 48)


def _frame(number: int) -> np.ndarray[Any, Any]:
    width, height = SIDES
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:] = (number * 20 % 256, 128, 255 - number * 20 % 256)
    return pixels


def video(
    form: str,
    codec: str,
    frames: int = FRAMES,
    *,
    rate: int = 10,
    times: Sequence[int] = (),
    options: dict[str, str] | None = None,
) -> bytes:
    """Return a file of frames of one colour each.

    Args:
        form: the container of FFmpeg.
        codec: of FFmpeg.
        frames: how many.
        rate: of them, per second.
        times: of the frames in milliseconds, where they are irregular.
        options: of the container.
    """
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form, options=options or {}) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height = SIDES
        stream.pix_fmt = "yuv420p"
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(_frame(number), format="rgb24")
            if times:
                frame.pts = times[number]
                frame.time_base = Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def _animation(form: str) -> bytes:
    frames = [Image.fromarray(_frame(number)) for number in range(FRAMES)]
    return _save(frames[0], form, save_all=True, append_images=frames[1:], duration=100)


def videos() -> list[File]:
    """Return files of videos; what is expected of one is its number of frames."""
    whole = video("mp4", "mpeg4")
    hole = bytearray(whole)
    begin = whole.find(b"mdat") + len(whole) // 6
    hole[begin : begin + len(whole) // 12] = bytes(len(whole) // 12)
    fragmented = {"movflags": "frag_keyframe+empty_moov"}
    irregular = (0, 100, 900, 1000, 1900, 2000)
    return [
        File("MP4", "video/mp4", whole, FRAMES),
        File("fragmented MP4", "video/mp4", video("mp4", "mpeg4", options=fragmented), FRAMES),
        File("irregular MP4", "video/mp4", video("mp4", "mpeg4", 6, times=irregular), 6),
        File("three frames", "video/mp4", video("mp4", "mpeg4", 3), 3),
        File("one frame", "video/mp4", video("mp4", "mpeg4", 1)),
        File("Matroska", "video/x-matroska", video("matroska", "mpeg4"), FRAMES),
        File("AVI", "video/x-msvideo", video("avi", "mpeg4"), FRAMES),
        File("MPEG-1, no duration", "video/mpeg", video("mpeg", "mpeg1video", rate=25)),
        File("GIF", "image/gif", _animation("GIF")),
        File("APNG", "image/png", _animation("PNG")),
        File("MP4 with a hole", "video/mp4", bytes(hole)),
        File("cut MP4", "video/mp4", whole[: len(whole) * 2 // 3], REFUSED),
        File("an empty video", "video/mp4", b"", REFUSED),
        File("a text as a video", "video/mp4", b"hello", REFUSED),
    ]

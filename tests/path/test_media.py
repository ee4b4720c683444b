"""The pixels of a request, counted where all of its media are loaded, before they are decoded."""

import asyncio
import base64
import io
import wave
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from PIL import Image
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.audio import AudioMediaIO

from mmkit import Audio, InputError
from mmkit.language.expr import Scope
from mmkit.vllm_api import media
from mmkit.vllm_api.media import CheckedLoader, count_pixels_of_image
from mmkit.vllm_api.server_request import SERVER_REQUEST, ServerRequest, TooManyPixels, inherit_context
from tests import ROOT
from tests.path.plain import plain, processor
from tests.profiles import scaled

LIMIT = 1000
REFUSAL = InputError("messages", f"at most {LIMIT} pixels in one request", "more")


@pytest.fixture(scope="module", autouse=True)
def _install_patches() -> None:
    """Make a processor of a spec, which changes vLLM's loader."""
    processor(plain())


def get_refusal() -> InputError:
    return REFUSAL


def make_server_request() -> ServerRequest:
    return ServerRequest(LIMIT, get_refusal)


def make_picture(width: int, height: int, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("1" if form == "PNG" else "P", (width, height)).save(buffer, form)
    return buffer.getvalue()


def make_data_url(content: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))
PLACES = ("data", "file", "data in turn", "another thread")


@given(st.lists(st.tuples(SIZES, st.sampled_from(PLACES)), max_size=6))
def test_the_pictures_of_a_request_have_one_limit(tmp_path_factory: Any, pictures: list[Any]) -> None:
    """Wherever they are, and from whichever thread: loaded up to the limit, and refused beyond it."""
    folder = tmp_path_factory.mktemp("media")
    connector = MediaConnector(allowed_local_media_path=str(folder))

    async def load_all() -> int:
        """Load the pictures as one request; return the number of their pixels."""
        SERVER_REQUEST.set(make_server_request())
        num_pixels = 0
        with ThreadPoolExecutor(1) as executor:
            inherit_context(executor)
            for number, ((width, height), place) in enumerate(pictures):
                content = make_picture(width, height)
                url = make_data_url(content)
                if place == "file":
                    path = folder / f"{number}.png"
                    path.write_bytes(content)
                    url = f"file://{path}"
                if place == "another thread":
                    loop = asyncio.get_running_loop()
                    media = await loop.run_in_executor(executor, connector.fetch_image, url)
                elif place == "data in turn":
                    media = connector.fetch_image(url)
                else:
                    media = await connector.fetch_image_async(url)
                assert media.size == (width, height)
                num_pixels += width * height
        return num_pixels

    total = sum(width * height for (width, height), _ in pictures)
    if total <= LIMIT:
        assert asyncio.run(load_all()) == total
        return
    with pytest.raises(TooManyPixels, match=r"^messages: expected at most 1000 pixels in one request, got more"):
        asyncio.run(load_all())


def test_without_a_request_nothing_is_counted() -> None:
    url = make_data_url(make_picture(40, 40))
    assert MediaConnector().fetch_image(url).size == (40, 40)


def test_an_error_of_a_loader_is_a_refusal_offline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's loader for Qwen2-VL divides by the duration of a file, which may state none."""

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("vllm.multimodal.media.VideoMediaIO.load_base64", fail)
    with pytest.raises(InputError, match=r"^video: expected a file that can be decoded, got ZeroDivisionError: "):
        MediaConnector().fetch_video(make_data_url(b"none", "video/mpeg"))


JPEGS = ",".join(base64.b64encode(make_picture(*size)).decode() for size in [(30, 20), (10, 10), (9, 9)])


@pytest.mark.parametrize(
    ("num_frames", "media_type", "data", "expected"),
    [
        (2, "Video/JPEG", JPEGS, 700),
        (-1, "video/jpeg", JPEGS, 781),
        (32, "image/gif", base64.b64encode(make_picture(30, 20, "GIF")).decode(), 600),
        (32, "video/mp4", "AAAA", 0),
    ],
)
def test_the_pixels_of_a_video_are_those_of_the_frames_that_are_taken(
    num_frames: int, media_type: str, data: str, expected: int
) -> None:
    """Counted before the loader is asked, which here has none."""
    counts: list[int] = []

    def fail(*_: Any) -> Any:
        raise ValueError("not decoded")

    loader = SimpleNamespace(num_frames=num_frames, video_loader=None, kwargs={}, load_base64=fail)
    with pytest.raises(ValueError, match="not decoded"):
        CheckedLoader(loader, counts.append).load_base64(media_type, data)
    assert counts == [expected]


def test_a_video_that_has_more_frames_than_it_says_is_counted_again() -> None:
    counts: list[int] = []
    frames = SimpleNamespace(shape=(7, 20, 10, 3))

    def load_bytes(data: bytes) -> Any:
        return frames, {}

    loader = SimpleNamespace(num_frames=32, video_loader=None, kwargs={}, load_bytes=load_bytes)
    CheckedLoader(loader, counts.append).load_bytes(make_picture(10, 20, "GIF"))
    assert counts == [200, 1200]


def test_the_size_of_a_picture_is_in_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_pixels_of_image(make_picture(30, 20)) == 600
    assert count_pixels_of_image(make_picture(30, 20)[:60]) == 600
    assert count_pixels_of_image(b"none") == 0
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # PIL opens none with more than twice as many
    assert count_pixels_of_image(make_picture(30, 20)) == 201


# -- audio -------------------------------------------------------------------------------------------------------------


def load_sound(name: str) -> tuple[Any, float]:
    """Return the samples and the rate of a stored file, as a server loads it."""
    url = make_data_url((ROOT / "tests" / "data" / "media" / name).read_bytes(), "audio/wav")

    async def load() -> Any:
        SERVER_REQUEST.set(make_server_request())
        return MediaConnector().fetch_audio(url)

    return asyncio.run(load())


@pytest.mark.parametrize("name", ["mono16.wav", "stereo16.wav"])
def test_integers_of_a_file_are_scaled_and_channels_mixed(name: str) -> None:
    samples, _ = load_sound(name)
    with wave.open(str(ROOT / "tests" / "data" / "media" / name)) as file:
        assert len(samples) == file.getnframes()
    assert 0.1 < abs(samples).max() <= 1.0


def test_files_of_audio_are_refused_where_nothing_decodes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would take PyAV, which hands over the integers, and the channels in turn."""
    monkeypatch.setattr(media, "AUDIO_DECODERS", ("no_such_library", "none_either"))
    monkeypatch.setattr(media, "AudioDecoder", None)
    expected = "no_such_library or none_either on the server, to decode a file of audio"
    with pytest.raises(InputError, match=f"^audio: expected {expected}, got neither. Send samples, or install"):
        load_sound("mono16.wav")


def encode_sound(form: str, subtype: str, channels: int = 1, *, rate: int = 8000, endian: str = "FILE") -> bytes:
    """Return a file of 4000 samples, which differ between channels."""
    buffer = io.BytesIO()
    waves = [np.sin(np.arange(4000) * 0.3 / channel) for channel in range(1, channels + 1)]
    soundfile.write(buffer, np.stack(waves, axis=1), rate, subtype, endian, form)
    return buffer.getvalue()


@pytest.mark.parametrize("with_request", [True, False])
def test_channels_that_come_in_turn_are_refused(with_request: bool) -> None:
    """PyAV puts those of floats one behind the other, and mixes none; offline, too."""
    url = make_data_url(encode_sound("WAV", "FLOAT", channels=2), "audio/wav")
    if "audio_backend" not in vars(AudioMediaIO()):
        pytest.skip("this vLLM chooses the backend itself")

    async def load() -> Any:
        if with_request:
            SERVER_REQUEST.set(make_server_request())
        return MediaConnector(media_io_kwargs={"audio": {"audio_backend": "pyav"}}).fetch_audio(url)

    expected = "4000 samples at 8000 Hz, as the header of the file says, got 8000 at 8000 Hz of 2 channel"
    with pytest.raises(InputError, match=f"^audio: expected {expected}"):
        asyncio.run(load())


def test_a_file_of_audio_that_is_cut_off_is_refused() -> None:
    """By libsndfile, or since its header says more."""
    whole = encode_sound("FLAC", "PCM_16")
    cut = whole[: len(whole) // 2]
    with pytest.raises(InputError, match=r"^audio: expected a file that can be decoded, got LibsndfileError: "):
        MediaConnector().fetch_audio(make_data_url(cut, "audio/flac"))
    samples = np.zeros(2000, np.float32)
    with pytest.raises(InputError, match=r"^audio: expected 4000 samples at 8000 Hz, as the header of the file says"):
        media.check_sound(samples, 8000, cut)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("form", "subtype", "is_exact"),
    [
        ("WAV", "PCM_U8", True),
        ("RF64", "PCM_24", True),
        ("AIFF", "PCM_16", True),
        ("AU", "ULAW", True),
        ("FLAC", "PCM_16", True),
        ("OGG", "VORBIS", False),
        ("MP3", "MPEG_LAYER_III", False),
        ("WAV", "IMA_ADPCM", False),
    ],
)
def test_the_header_of_a_sound_and_its_samples_agree(form: str, subtype: str, channels: int, is_exact: bool) -> None:
    data = encode_sound(form, subtype, channels)
    header = media.parse_sound_header(data)
    assert header is not None
    assert (header.channels, header.rate, header.is_exact) == (channels, 8000, is_exact)
    samples, rate = MediaConnector().fetch_audio(make_data_url(data, "audio/wav"))
    media.check_sound(samples, rate, data)
    doubled = np.repeat(samples, 2)
    if channels == 2 or is_exact:
        with pytest.raises(InputError, match=r"as the header of the file says, got \d+ at 8000 Hz of"):
            media.check_sound(doubled, rate, data)


CODINGS = [
    ("WAV", "PCM_U8"),
    ("WAV", "PCM_16"),
    ("WAV", "PCM_24"),
    ("WAV", "PCM_32"),
    ("WAV", "FLOAT"),
    ("WAV", "DOUBLE"),
    ("WAV", "ULAW"),
    ("WAV", "ALAW"),
    ("RF64", "PCM_16"),
    ("AIFF", "PCM_16"),
    ("AU", "PCM_16"),
    ("OGG", "VORBIS"),
    ("FLAC", "PCM_16"),
]


@settings(max_examples=scaled(40), deadline=None)
@given(st.sampled_from(CODINGS), st.integers(1, 3), st.sampled_from([8000, 11025, 48000]), st.booleans())
def test_a_file_is_one_item_in_training_and_in_serving(
    coding: tuple[str, str], channels: int, rate: int, is_big_endian: bool
) -> None:
    """What a trainer reads by soundfile, and what a server loads: bit for bit, and at the rate of the spec."""
    form, subtype = coding
    endian = "BIG" if form == "WAV" and is_big_endian else "FILE"
    data = encode_sound(form, subtype, channels, rate=rate, endian=endian)
    kind = Audio(largest=8000, rate=8000).bind(Scope(SimpleNamespace()))
    samples, rate_of_file = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    trained = kind.canonical((samples.mean(axis=1), rate_of_file), "m[0]")
    served = kind.canonical(MediaConnector().fetch_audio(make_data_url(data, "audio/wav")), "m[0]")
    assert np.array_equal(trained, served)
    assert len(trained) == -(-4000 * 8000 // rate)


def test_a_big_endian_wav_is_refused_where_torchcodec_would_make_noise_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_sound("WAV", "PCM_16", endian="BIG")
    samples = np.zeros(4000, np.float32)
    media.check_sound(samples, 8000, data)
    monkeypatch.setattr(media, "AudioDecoder", object)
    with pytest.raises(InputError, match=r"^audio: expected a file that torchcodec decodes, got big-endian WAV\. Send"):
        media.check_sound(samples, 8000, data)

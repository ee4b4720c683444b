"""Pictures as files hold them: each is seen as it was taken, by every way in, or refused in a sentence."""

import base64
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pictures

from mmkit import Image, InputError
from mmkit.serve import encode
from tests import ROOT
from tests.profiles import scaled

from .common import expect_refusal

FILES = ROOT / "tests" / "data" / "media"
KIND = Image(largest=(64, 64))
DEPTH = (
    "m[0]: expected an image of 8 bits per channel, got mode {}. Send 8-bit RGB, or declare a Tensor for such values."
)


def canonical(value: Any) -> Any:
    return KIND.canonical(value, "m[0]")


def from_file(path: Path) -> SimpleNamespace:
    """What vLLM's loader gives: pixels, whatever was lost, and the bytes."""
    return SimpleNamespace(media=Pictures.new("RGB", (4, 4)), original_bytes=path.read_bytes())


def from_client(picture: Any) -> Any:
    """The picture that a client's request holds."""
    url = encode({"m": [picture]})["m"][0]["image_url"]["url"]
    return Pictures.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_a_picture_is_upright_by_every_way_in() -> None:
    picture = Pictures.open(FILES / "exif6.jpg")
    assert picture.getexif()[0x0112] == 6
    upright = canonical(Pictures.open(FILES / "exif6.jpg"))
    assert upright.size == picture.size[::-1]
    assert np.array_equal(from_client(picture), upright)


@settings(max_examples=scaled(40))
@given(
    st.sampled_from(["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"]),
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(0, 2**16),
)
def test_the_client_sends_what_the_processor_sees(mode: str, width: int, height: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    picture = Pictures.fromarray(values, "RGB").convert("L" if mode in ("LA", "PA") else "RGB").convert(mode)
    exif = Pictures.Exif()
    exif[0x0112] = seed % 8 + 1
    picture.info["exif"] = exif.tobytes()
    picture.getexif().load(exif.tobytes())
    assert np.array_equal(from_client(picture), canonical(picture))


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_values_that_a_conversion_would_clip_are_refused(mode: str) -> None:
    deep = Pictures.new(mode, (4, 4))
    expect_refusal(InputError, DEPTH.format(mode), canonical, deep)
    expect_refusal(InputError, DEPTH.format(mode).replace("m[0]", "items.m[0]"), from_client, deep)


def test_a_file_whose_values_were_clipped_is_refused() -> None:
    expect_refusal(InputError, DEPTH.format("I;16"), canonical, from_file(FILES / "ramp16.png"))
    expect_refusal(InputError, DEPTH.format("I;16"), canonical, Pictures.open(FILES / "ramp16.png"))


def test_a_damaged_file_is_refused() -> None:
    """Its pixels would be black."""
    sentence = "m[0]: expected an image that can be read, got …"
    expect_refusal(InputError, sentence, canonical, from_file(FILES / "damaged.png"))
    picture = Pictures.open(FILES / "damaged.png")
    for _ in range(2):  # PIL reports the damage once
        expect_refusal(InputError, sentence, canonical, picture)
        expect_refusal(InputError, sentence.replace("m[0]", "items.m[0]"), from_client, picture)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a_file_that_is_cut_off_is_refused(form: str) -> None:
    file = io.BytesIO()
    values = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Pictures.fromarray(values, "RGB").save(file, form)
    whole = file.getvalue()
    assert canonical(Pictures.open(io.BytesIO(whole))).size == (32, 32)
    with pytest.raises(InputError, match=r"^m\[0\]: expected an image that can be read, got "):
        canonical(open_or_refuse(whole[: len(whole) * 2 // 3]))


def open_or_refuse(data: bytes) -> Any:
    """PIL reads some files when it opens them."""
    try:
        return Pictures.open(io.BytesIO(data))
    except Exception:
        raise InputError("m[0]", "an image that can be read", "none") from None

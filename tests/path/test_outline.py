"""Outlines and hashes without vLLM against vLLM's path: the law on examples, and hashes of files, options and uuids."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from vllm.multimodal import hasher as vllm_hasher

from mmkit.plan.hashes import salt_uuid
from mmkit.plan.outline import ImageFacts, ItemHasher, decode_audio_file, inspect_image_file
from mmkit.testing import vllm_path
from mmkit.vllm_api import compat
from mmkit.vllm_api.hashes import VllmItemHasher
from mmkit.vllm_api.media import AudioMediaIO
from tests import ROOT, hf_law
from tests.oracles import processor
from tests.profiles import scaled

needs_frames = pytest.mark.skipif(
    not hasattr(vllm_hasher, "_framed"), reason="vLLM before 0.31 hashes the common part otherwise"
)
needs_files = pytest.mark.skipif(
    not compat.FILES_TELL_DECODING, reason="this vLLM does not keep how it converted a file"
)


def make_hasher(vllm_processor: Any, algorithm: str = "blake3") -> ItemHasher:
    """Return the hasher of a router, which knows the replica by the id of its model."""
    return ItemHasher(algorithm, vllm_processor.info.model_id)


# -- the common part ---------------------------------------------------------------------------------------------------

NUMBERS = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats() | st.booleans()
VALUES = st.recursive(
    st.none() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@needs_frames
@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
def test_the_common_part_of_a_hash_is_as_vllm_makes_it(algorithm: str) -> None:
    hasher = ItemHasher(algorithm, "a model")

    @settings(max_examples=scaled(40))
    @given(st.dictionaries(st.text(), VALUES, max_size=3), st.text(min_size=1))
    def check(options: dict[str, Any], modality: str) -> None:
        if modality in ("model_id", "options"):
            return
        values: dict[str, Any] = {modality: "", "options": options}
        expected = compat.hash_by_vllm(algorithm, model_id="a model", **values)
        assert hasher._hash_common_part(modality, options) == expected

    check()


# -- files of images ---------------------------------------------------------------------------------------------------

PIXELS = np.random.RandomState(0).randint(0, 256, (40, 60, 4), np.uint8)


def make_file(mode: str, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    PILImage.fromarray(PIXELS, "RGBA").convert(mode).save(file, kind, **options)
    return file.getvalue()


def make_orientation(number: int) -> bytes:
    exif = PILImage.Exif()
    exif[0x0112] = number
    return exif.tobytes()


FILES = {
    "png": make_file("RGB", "PNG"),
    "png, transparent": make_file("RGBA", "PNG"),
    "png, grey": make_file("L", "PNG"),
    "png, grey and transparent": make_file("LA", "PNG"),
    "png, a palette": make_file("P", "PNG"),
    "png, a transparent colour": make_file("P", "PNG", transparency=0),
    "png, black and white": make_file("1", "PNG"),
    "png, turned": make_file("RGB", "PNG", exif=make_orientation(8)),
    "jpeg": make_file("RGB", "JPEG"),
    "jpeg, grey": make_file("L", "JPEG"),
    "jpeg, four inks": make_file("CMYK", "JPEG"),
    "jpeg, turned": make_file("RGB", "JPEG", exif=make_orientation(6)),
    "jpeg, mirrored": make_file("RGB", "JPEG", exif=make_orientation(2)),
    "webp": make_file("RGB", "WEBP"),
    "webp, transparent": make_file("RGBA", "WEBP"),
    "gif": make_file("P", "GIF"),
    "bmp": make_file("RGB", "BMP"),
    "tiff, which is decoded": make_file("RGB", "TIFF"),
    "ico, which is decoded": make_file("RGBA", "ICO", sizes=[(16, 16)]),
}
OPTIONS: Any = [{}, {"do_rescale": False}, {"images_kwargs": {"do_rescale": False}, "videos_kwargs": {"size": 3}}]


@needs_files
@needs_frames
@pytest.mark.parametrize("options", OPTIONS, ids=["no options", "an option", "options in scopes"])
def test_a_file_has_the_size_and_the_hash_that_vllm_gives_it(options: dict[str, Any]) -> None:
    replica = processor("llava_next")
    hasher = make_hasher(replica)
    for name, file in FILES.items():
        loaded = vllm_path._ImageLoader().load_bytes(file)
        ids = replica.plan.spell({"image": [loaded]})
        served = vllm_path.run(replica, ids, {"image": [loaded]}, options)
        outline = replica.plan.outline(ids, {"image": inspect_image_file(file)}, options=options, hasher=hasher)
        assert outline.hashes == served.hashes, name
        assert outline.prompt_token_ids == served.ids, name


@needs_files
@needs_frames
def test_a_server_that_keeps_transparency_has_other_hashes() -> None:
    replica = processor("llava_next")
    for mode, file in (("RGBA", FILES["png, transparent"]), ("RGBA", FILES["jpeg"]), (None, FILES["png, grey"])):
        loaded = vllm_path._ImageLoader(image_mode=mode).load_bytes(file)
        assert inspect_image_file(file, image_mode=mode).io_config == loaded.io_config
    black = (0, 0, 0)
    loaded = vllm_path._ImageLoader(rgba_background_color=black).load_bytes(FILES["png, transparent"])
    assert inspect_image_file(FILES["png, transparent"], rgba_background_color=black).io_config == loaded.io_config
    assert replica is not None


# -- other items -------------------------------------------------------------------------------------------------------


@needs_frames
@pytest.mark.parametrize("name", ["mono16.wav", "stereo16.wav"])
def test_a_file_of_audio_has_the_hash_that_vllm_gives_it(name: str) -> None:
    file = (ROOT / "tests/data/media" / name).read_bytes()
    replica = processor("whisper")
    samples, rate = AudioMediaIO(audio_backend="soundfile").load_bytes(file)
    served = vllm_path.run(replica, [0], {"audio": [(samples, rate)]})
    outline = replica.plan.outline([0], {"audio": [decode_audio_file(file)]}, hasher=make_hasher(replica))
    assert outline.hashes == served.hashes
    assert outline.prompt_token_ids == served.ids


@needs_frames
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_has_the_hash_that_vllm_gives_it(dtype: torch.dtype) -> None:
    subject = hf_law.open_series()
    replica = subject.processor
    steps = torch.randn(9, 1).to(dtype)
    ids = replica.plan.spell({"series": [steps]})
    served = vllm_path.run(replica, ids, {"series": [steps]})
    items = replica.plan.parse_facts({"series": [steps]})
    hashes = make_hasher(replica).hash_items(replica.plan.modalities["series"], items, {})
    assert hashes == served.hashes["series"]


@needs_frames
@pytest.mark.parametrize("salt", [None, "a tenant"])
def test_a_uuid_has_the_hash_that_vllm_gives_it(salt: str | None) -> None:
    from mmkit.vllm_api.patches import salt_uuids

    replica = processor("llava_next")
    picture = PILImage.fromarray(PIXELS[..., :3])
    data = {"image": [picture, picture]}
    ids = replica.plan.spell(data)
    uuids: dict[str, list[str | None]] = {"image": ["a name", None]}
    prompt = salt_uuids({"multi_modal_uuids": uuids, "cache_salt": salt})
    served = vllm_path.run(replica, ids, data, uuids=prompt["multi_modal_uuids"])
    outline = replica.plan.outline(ids, data, uuids=uuids, cache_salt=salt, hasher=make_hasher(replica))
    assert outline.hashes == served.hashes
    assert salt_uuid("a name", salt) in prompt["multi_modal_uuids"]["image"]


def test_facts_without_content_have_no_hash_by_vllm_either() -> None:
    replica = processor("llava_next")
    facts = {"image": ImageFacts(width=4, height=2)}
    ids = replica.plan.shortest_prompt(replica.plan.parse_facts(facts))
    hasher = VllmItemHasher("blake3", replica.info.model_id)
    assert replica.plan.outline(ids, facts, hasher=hasher).hashes == {"image": [None]}

"""docs/laws-on-vllm.md is checked: what it tells of still happens in this vLLM, and nothing else does.

A few examples per law, so that this file stays quick; `python -m tests.properties.hand_written` looks longer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from mmkit.testing import AudioSample, ImageSample, Request, VideoSample, harness
from tests.properties.hand_written import CHECKED, FOUND, expected, subject, verdict

ENTRIES = """
llava blip2 molmo deepseek_vl2 internvl2 llava_next llava_next_video llava_onevision pixtral_hf mistral3
qwen2_vl qwen2_5_vl qwen2_audio paligemma gemma3 idefics3 whisper audioflamingo3 h2ovl nvlm_d isaac
kimi_vl minicpmv ultravox
""".split()  # noqa: SIM905


@pytest.fixture(scope="module", autouse=True)
def _same_examples_each_time() -> Iterator[None]:
    before = settings.get_current_profile_name()
    settings.register_profile("hand-written", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    settings.load_profile("hand-written")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: more threads are five times slower on a busy machine
    yield
    torch.set_num_threads(threads)
    settings.load_profile(before)


@pytest.mark.parametrize("entry", ENTRIES)
def test_known_violations_and_no_other(entry: str) -> None:
    for law in CHECKED:
        known = expected(entry, law)
        sure = [pattern for pattern, number in known.items() if FOUND[number].always]
        seen = verdict(entry, law, examples=10, known=list(known), sought=sure, most=1).violations
        assert not {what: message for what, message in seen.items() if what not in known}
        assert set(sure) <= set(seen)


# -- the findings, each by the request that docs/laws-on-vllm.md prints ------------------------------------------------


def made(entry: str, request: Request, caches: harness.Caches | None = None) -> harness.Outcome:
    return subject(entry).run(request, caches)


def written(entry: str, name: str, *samples: object) -> list[int]:
    return [token for piece in subject(entry).pieces(name, list(samples)) for token in piece.written]


SMALL, WIDE = ImageSample(0, 28, 28), ImageSample(0, 112, 112)


def test_1_an_expanded_prompt_is_expanded_again() -> None:
    request = Request(written("llava", "image", SMALL), {"image": [SMALL]})
    ids = made("llava", request).ids
    assert (len(ids), len(made("llava", Request(ids, request.items)).ids)) == (16, 31)


def test_2_surplus_placeholders_stay() -> None:
    prompt = written("llava", "image", SMALL, SMALL)
    assert made("llava", Request(prompt, {"image": [SMALL]})).ids[16:] == prompt[1:]


def test_3_a_refused_request_leaves_its_items_in_the_cache() -> None:
    caches = harness.Caches(subject("llava").processor, 1.0, pair=True)
    prompt = written("llava", "image", SMALL)
    with pytest.raises(AssertionError, match="Failed to apply prompt replacement"):
        made("llava", Request([], {"image": [SMALL]}), caches)
    with pytest.raises(RuntimeError, match="not in the receiver"):
        made("llava", Request(prompt, {"image": [SMALL]}), caches)


def test_4_an_array_is_not_its_image() -> None:
    prompt, array = written("llava", "image", SMALL), ImageSample(0, 28, 28, "numpy")
    hashes = [made("llava", Request(prompt, {"image": [sample]})).hashes["image"] for sample in (SMALL, array)]
    assert hashes[0] != hashes[1]


def test_5_embeddings_beside_raw_items() -> None:
    entry, audio = "qwen2_5_omni", AudioSample(0, 1600, 16000)
    image, processor = written(entry, "image", SMALL), subject(entry).processor
    raw = made(entry, Request(image, {"image": [SMALL]}))
    rows = torch.ones(sum(raw.ranges["image"][0][2]), processor.info.ctx.model_config.get_inputs_embeds_size())
    sent = {"image": {"image_embeds": rows, "image_grid_thw": raw.fields["image"][0]["image_grid_thw"][None]}}
    assert harness.run(processor, image, sent).ranges == raw.ranges
    with pytest.raises(ValueError, match="Failed to apply Qwen2_5OmniProcessor"):
        harness.run(processor, image + written(entry, "audio", audio), {**sent, "audio": [audio.value()]})


def test_8_video_embeddings_of_minicpmv() -> None:
    prompt, sizes = written("minicpmv", "video", VideoSample(0, 2, 28, 28)), torch.tensor([[[28, 28], [28, 28]]])
    sent = {"video_embeds": [torch.ones(8, 32)], "video_image_sizes": sizes}
    with pytest.raises(TypeError, match="can't multiply sequence"):
        harness.run(subject("minicpmv").processor, prompt, {"video": sent})


@pytest.mark.parametrize(("text", "fine"), [("a", True), ("\na", False), ("\n\na", True), ("\n\n\na", True)])
def test_9_gemma3_an_image_and_one_newline(text: str, fine: bool) -> None:
    processor = subject("gemma3").processor
    if fine:
        assert len(harness.run(processor, f"<start_of_image>{text}", {"image": [SMALL.value()]}).ranges["image"]) == 1
    else:
        with pytest.raises(RuntimeError, match="instead found 0 prompt placeholders"):
            harness.run(processor, f"<start_of_image>{text}", {"image": [SMALL.value()]})


def test_10_gemma3_ranges_share_a_token() -> None:
    outcome = harness.run(subject("gemma3").processor, "<start_of_image>" * 2, {"image": [SMALL.value()] * 2})
    (first, one, _), (second, _, _) = outcome.ranges["image"]
    assert first + one > second


def test_13_lfm2_vl_counts_what_is_not_made() -> None:
    big = ImageSample(0, 280, 280)
    prompt = written("lfm2_vl", "image", big)
    whole, bare = {"do_image_splitting": False}, {"use_thumbnail": False}
    one = made("lfm2_vl", Request(prompt, {"image": [big]}, whole))
    assert len(one.fields["image"][0]["pixel_values"]) == 1
    assert sum(one.ranges["image"][0][2]) == 32
    with pytest.raises(IndexError):
        made("lfm2_vl", Request(prompt * 2, {"image": [big, big]}, whole))
    both = made("lfm2_vl", Request(prompt * 2, {"image": [big, big]}, bare))
    assert [len(fields["pixel_values"]) for fields in both.fields["image"]] == [5, 3]  # of four tiles each


def test_14_lfm2_vl_exceeds_its_maximum() -> None:
    big = ImageSample(0, 280, 280)
    stated, _ = harness.most_rows(subject("lfm2_vl").processor, "image")
    ((_, _, mask),) = made("lfm2_vl", subject("lfm2_vl").minimal("image", big)).ranges["image"]
    assert (stated, sum(mask)) == (16, 32)


def test_18_ovis_images_of_different_grids() -> None:
    subject("ovis").pieces("image", [SMALL])
    subject("ovis").pieces("image", [ImageSample(0, 112, 28)])
    with pytest.raises(ValueError, match="expected sequence of length"):
        subject("ovis").pieces("image", [SMALL, ImageSample(0, 112, 28)])


def test_19_llama4_counts_without_max_patches() -> None:
    prompt, few = written("llama4", "image", WIDE), {"max_patches": 2}
    for kwargs, tiles in (({}, 5), (few, 1)):
        outcome = made("llama4", Request(prompt, {"image": [WIDE]}, kwargs))
        assert len(outcome.fields["image"][0]["pixel_values"]) == tiles
        assert sum(outcome.ranges["image"][0][2]) == 20
    both = made("llama4", Request(prompt * 2, {"image": [WIDE, SMALL]}, few)).fields["image"]
    assert [len(fields["pixel_values"]) for fields in both] == [2, 0]


def test_20_deepseek_vl2_gives_one_hash_to_two_results() -> None:
    wide = ImageSample(0, 28, 112)
    one = Request(written("deepseek_vl2", "image", wide), {"image": [wide]})
    many = Request(one.prompt * 3, {"image": [wide, ImageSample(1, 28, 28), ImageSample(2, 28, 28)]})
    caches = harness.Caches(subject("deepseek_vl2").processor, 1.0, pair=True)
    seen = []
    for request in (one, many, one):
        outcome = made("deepseek_vl2", request, caches)
        seen.append((len(outcome.fields["image"][0]["pixel_values"]), sum(outcome.ranges["image"][0][2])))
    assert seen == [(3, 19), (2, 13), (2, 19)]  # the last has the prompt of one and the tensors of the other


@pytest.mark.parametrize("entry", ["minicpmv", "minicpmo"])
def test_24_minicpmv_counts_without_max_slice_nums(entry: str) -> None:
    for kwargs, slices in (({}, 5), ({"max_slice_nums": 2}, 3), ({"max_slice_nums": 1}, 1)):
        outcome = made(entry, Request(written(entry, "image", WIDE), {"image": [WIDE]}, kwargs))
        assert len(outcome.fields["image"][0]["pixel_values"]) == slices
        assert sum(outcome.ranges["image"][0][2]) == 20


def test_25_audio_embeddings_of_minicpmo() -> None:
    prompt = written("minicpmo", "audio", AudioSample(0, 16000, 16000))
    with pytest.raises(KeyError, match="'image' not found"):
        harness.run(subject("minicpmo").processor, prompt, {"audio": {"audio_embeds": [torch.ones(1, 12, 32)]}})


@pytest.mark.parametrize("pair", [False, True])
def test_26_a_cache_smaller_than_the_request(pair: bool) -> None:
    caches = harness.Caches(subject("llava").processor, 6e-5, pair=pair)  # of one image
    prompt, other = written("llava", "image", SMALL), ImageSample(1, 28, 28)
    made("llava", Request(prompt, {"image": [SMALL]}), caches)
    with pytest.raises(AssertionError, match="Expected a cached item"):
        made("llava", Request(prompt * 2, {"image": [other, SMALL]}), caches)

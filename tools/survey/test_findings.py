"""The findings of docs/data/ by smallest requests: `pytest tools/survey`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from vllm.model_executor.models import minicpmo
from vllm.multimodal.parse import DictEmbeddingItems

from mmkit.testing import AudioSample, ImageSample, Request, Sample, VideoSample, reference
from mmkit.vllm_api import doors, harness
from tools.survey import page
from tools.survey.zoo import subject


def made(entry: str, request: Request, caches: harness.Caches | None = None) -> harness.Outcome:
    return subject(entry).run(request, caches)


def rows(entry: str, name: str, sample: Sample) -> int:
    """Encoder rows of an item."""
    ((_, _, mask),) = made(entry, subject(entry).minimal(name, sample)).ranges[name]
    return sum(mask)


def sent_embeddings(entry: str, name: str, sample: Sample) -> None:
    """An item as its embeddings, in each form that the parser takes."""
    processor, request = subject(entry).processor, subject(entry).minimal(name, sample)
    outcome = made(entry, request)
    width = processor.info.ctx.model_config.get_inputs_embeds_size()
    values = [torch.ones(sum(mask), width) for _, _, mask in outcome.ranges[name]]
    for form in harness.embeddings(processor, name, values, outcome.fields[name]):
        harness.run(processor, request.prompt, {name: form})


def written(entry: str, name: str, *samples: object) -> list[int]:
    return [
        token for piece in subject(entry).pieces(name, list(samples)) for token in piece.written
    ]


SMALL, WIDE = ImageSample(0, 28, 28), ImageSample(0, 112, 112)
LONG = AudioSample(0, 30 * 16000, 16000)


def test_each_finding_of_the_page_is_here() -> None:
    numbers = {int(match[1]) for name in globals() if (match := re.match(r"test_(\d+)_", name))}
    assert numbers == page.read().laws.keys()


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
    hashes = [
        made("llava", Request(prompt, {"image": [sample]})).hashes["image"]
        for sample in (SMALL, array)
    ]
    assert hashes[0] != hashes[1]


def test_5_embeddings_beside_raw_items() -> None:
    entry, audio = "qwen2_5_omni", AudioSample(0, 1600, 16000)
    image, processor = written(entry, "image", SMALL), subject(entry).processor
    raw = made(entry, Request(image, {"image": [SMALL]}))
    rows = torch.ones(
        sum(raw.ranges["image"][0][2]), processor.info.ctx.model_config.get_inputs_embeds_size()
    )
    sent = {
        "image": {
            "image_embeds": rows,
            "image_grid_thw": raw.fields["image"][0]["image_grid_thw"][None],
        }
    }
    assert harness.run(processor, image, sent).ranges == raw.ranges
    with pytest.raises(ValueError, match="Failed to apply Qwen2_5OmniProcessor"):
        harness.run(
            processor, image + written(entry, "audio", audio), {**sent, "audio": [audio.value()]}
        )


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("aria", "image"),
        ("paligemma", "image"),
        ("kimi_vl", "image"),
        ("deepseek_ocr", "image"),
        ("llava_next_video", "video"),
        ("llava_onevision", "video"),
        ("whisper", "audio"),
        ("gemma3n", "audio"),
    ],
)
def test_6_embeddings_have_no_field(entry: str, name: str) -> None:
    sample = {
        "image": SMALL,
        "video": VideoSample(0, 2, 28, 28),
        "audio": AudioSample(0, 1600, 16000),
    }[name]
    with pytest.raises(
        RuntimeError, match=f"1 {name} items in keyword arguments .* but only found 0"
    ):
        sent_embeddings(entry, name, sample)


@pytest.mark.parametrize(
    ("entry", "name", "message"),
    [
        ("llama4", "image", "Modality 'image' not found"),
        ("glm4v", "image", "Modality 'image' not found"),
        ("ovis", "image", "Modality 'image' not found"),
        ("ovis2_5", "image", "Modality 'image' not found"),
        ("isaac", "image", "Modality 'image' not found"),
        ("step3_vl", "image", "Modality 'image' not found"),
        ("gemma4", "video", "Modality 'video' not found"),
        ("qwen3_omni", "image", "image_grid_thw"),
        ("internvl_hf", "video", "list index out of range"),
        ("minicpmv4_6", "image", "'int' object is not subscriptable"),
    ],
)
def test_7_embeddings_are_refused_by_accident(entry: str, name: str, message: str) -> None:
    sample = (
        VideoSample(0, 2, 28, 28, entry == "gemma4") if name == "video" else ImageSample(0, 56, 56)
    )
    with pytest.raises((KeyError, IndexError, TypeError), match=message):
        sent_embeddings(entry, name, sample)


def test_8_video_embeddings_of_minicpmv() -> None:
    prompt = written("minicpmv", "video", VideoSample(0, 2, 28, 28))
    sizes = torch.tensor([[[28, 28], [28, 28]]])
    sent = {"video_embeds": [torch.ones(8, 32)], "video_image_sizes": sizes}
    with pytest.raises(TypeError, match="can't multiply sequence"):
        harness.run(subject("minicpmv").processor, prompt, {"video": sent})
    for frames in (2, 3):  # the range is that of two
        sent = {
            "video_embeds": [torch.ones(4 * frames, 32)],
            "video_image_sizes": torch.tensor([[28, 28]]),
        }
        ((_, _, mask),) = harness.run(
            subject("minicpmv").processor, prompt, {"video": sent}
        ).ranges["video"]
        assert sum(mask) == 8


@pytest.mark.parametrize(
    ("text", "fine"), [("a", True), ("\na", False), ("\n\na", True), ("\n\n\na", True)]
)
def test_9_gemma3_an_image_and_one_newline(text: str, fine: bool) -> None:
    processor = subject("gemma3").processor
    if fine:
        assert (
            len(
                harness.run(
                    processor, f"<start_of_image>{text}", {"image": [SMALL.value()]}
                ).ranges["image"]
            )
            == 1
        )
    else:
        with pytest.raises(RuntimeError, match="instead found 0 prompt placeholders"):
            harness.run(processor, f"<start_of_image>{text}", {"image": [SMALL.value()]})


def test_10_gemma3_ranges_share_a_token() -> None:
    outcome = harness.run(
        subject("gemma3").processor, "<start_of_image>" * 2, {"image": [SMALL.value()] * 2}
    )
    (first, one, _), (second, _, _) = outcome.ranges["image"]
    assert first + one > second


def test_11_paligemma_ends_every_prompt_with_a_newline() -> None:
    tokenizer = subject("paligemma").processor.info.get_tokenizer()
    ids = made("paligemma", Request([9], {"image": [SMALL]})).ids
    assert ids[-2:] == [9, tokenizer.get_vocab()["\n"]]


def test_12_prompts_go_through_text() -> None:
    ids = made("phi3v", Request([*written("phi3v", "image", SMALL), 100], {"image": [SMALL]})).ids
    assert ids[-3:] == [176, 128, 126]  # U+FFFD instead of half a character


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
    # of four tiles each
    assert [len(fields["pixel_values"]) for fields in both.fields["image"]] == [5, 3]


def test_14_lfm2_vl_exceeds_its_maximum() -> None:
    big = ImageSample(0, 280, 280)
    stated, _ = harness.most_rows(subject("lfm2_vl").processor, "image")
    assert (stated, rows("lfm2_vl", "image", big)) == (16, 32)


def test_15_llava_onevision_states_one_largest_size() -> None:
    stated, _ = harness.most_rows(subject("llava_onevision").processor, "image")
    assert (stated, rows("llava_onevision", "image", WIDE)) == (70, 88)


def test_16_qwen3_vl_many_small_frames() -> None:
    stated, _ = harness.most_rows(subject("qwen3_vl").processor, "video")
    assert (stated, rows("qwen3_vl", "video", VideoSample(0, 12, 28, 112, True))) == (6, 12)


@pytest.mark.parametrize(
    ("entry", "name", "stated", "reached"),
    [
        ("gemma4", "image", 70, 64),
        ("gemma4", "video", 2496, 2048),
        ("isaac", "image", 1536, 1521),
        ("step3_vl", "image", 3164, 3085),
        ("qwen3_omni", "audio", 50, 26),
    ],
)
def test_17_the_dummy_item_is_not_the_stated_maximum(
    entry: str, name: str, stated: int, reached: int
) -> None:
    assert harness.most_rows(subject(entry).processor, name) == (stated, reached)


def test_17_qwen3_omni_takes_longer_audio_than_stated() -> None:
    assert rows("qwen3_omni", "audio", LONG) == 390


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
    many = Request(
        one.prompt * 3, {"image": [wide, ImageSample(1, 28, 28), ImageSample(2, 28, 28)]}
    )
    caches = harness.Caches(subject("deepseek_vl2").processor, 1.0, pair=True)
    seen = []
    for request in (one, many, one):
        outcome = made("deepseek_vl2", request, caches)
        seen.append(
            (len(outcome.fields["image"][0]["pixel_values"]), sum(outcome.ranges["image"][0][2]))
        )
    # the last has the prompt of one and the tensors of the other
    assert seen == [(3, 19), (2, 13), (2, 19)]


def test_20_h2ovl_tiles_an_image_by_how_many_there_are() -> None:
    one = subject("h2ovl").minimal("image", SMALL)
    outcomes = [made("h2ovl", one), made("h2ovl", Request(one.prompt * 2, {"image": [SMALL] * 2}))]
    assert [len(outcome.fields["image"][0]["pixel_values_flat"]) for outcome in outcomes] == [5, 1]
    assert outcomes[0].hashes["image"][0] == outcomes[1].hashes["image"][0]


@pytest.mark.parametrize("entry", ["llava_next", "llava_onevision"])
def test_21_padding_to_the_largest_image(entry: str) -> None:
    alone = made(entry, subject(entry).minimal("image", SMALL)).fields["image"][0]["pixel_values"]
    both = Request(written(entry, "image", SMALL, WIDE), {"image": [SMALL, WIDE]})
    beside = made(entry, both).fields["image"][0]["pixel_values"]
    assert len(alone) < len(beside)
    assert torch.equal(alone, beside[: len(alone)])
    assert not beside[len(alone) :].any()


def test_22_molmo_counts_positions_in_the_joint_prompt() -> None:
    first, second = made("molmo", Request([0], {"image": [SMALL, SMALL]})).fields["image"]
    assert set(
        (second["image_input_idx"] - first["image_input_idx"])[
            first["image_input_idx"] >= 0
        ].tolist()
    ) == {44}


def test_23_qwen3_omni_the_last_frame_depends_on_the_batch() -> None:
    short, long = AudioSample(0, 4000, 16000), AudioSample(0, 16000, 16000)
    both = Request(written("qwen3_omni", "audio", short, long), {"audio": [short, long]})
    alone, beside = (
        made("qwen3_omni", request).fields["audio"][0]["input_audio_features"]
        for request in (subject("qwen3_omni").minimal("audio", short), both)
    )
    differ = (alone - beside).abs().amax(0) > 1e-6
    assert differ.nonzero().flatten().tolist() == [len(differ) - 1]


@pytest.mark.parametrize("entry", ["minicpmv", "minicpmo"])
def test_24_minicpmv_counts_without_max_slice_nums(entry: str) -> None:
    for kwargs, slices in (({}, 5), ({"max_slice_nums": 2}, 3), ({"max_slice_nums": 1}, 1)):
        outcome = made(entry, Request(written(entry, "image", WIDE), {"image": [WIDE]}, kwargs))
        assert len(outcome.fields["image"][0]["pixel_values"]) == slices
        assert sum(outcome.ranges["image"][0][2]) == 20


def test_25_audio_embeddings_of_minicpmo(monkeypatch: pytest.MonkeyPatch) -> None:
    audio = AudioSample(0, 16000, 16000)
    assert rows("minicpmo", "audio", audio) == 25
    prompt, sent = written("minicpmo", "audio", audio), {"audio_embeds": [torch.ones(25, 32)]}
    with pytest.raises(KeyError, match="'image' not found"):
        harness.run(subject("minicpmo").processor, prompt, {"audio": sent})

    def audio_items(self: DictEmbeddingItems, data: Any, fields_factory: Any) -> None:
        DictEmbeddingItems.__init__(self, data, "audio", {"audio_embeds"}, fields_factory)

    # and that word put right
    monkeypatch.setattr(minicpmo.MiniCPMOAudioEmbeddingItems, "__init__", audio_items)
    ((_, _, mask),) = harness.run(subject("minicpmo").processor, prompt, {"audio": sent}).ranges[
        "audio"
    ]
    assert sum(mask) == 25 * 32


@pytest.mark.parametrize("pair", [False, True])
def test_26_a_cache_smaller_than_the_request(pair: bool) -> None:
    caches = harness.Caches(subject("llava").processor, 6e-5, pair=pair)  # of one image
    prompt, other = written("llava", "image", SMALL), ImageSample(1, 28, 28)
    made("llava", Request(prompt, {"image": [SMALL]}), caches)
    with pytest.raises(AssertionError, match="Expected a cached item"):
        made("llava", Request(prompt * 2, {"image": [other, SMALL]}), caches)


def test_27_gemma4_the_dummy_audio_is_one_window_long() -> None:
    assert harness.most_rows(subject("gemma4").processor, "audio") == (750, 1)
    assert rows("gemma4", "audio", LONG) == 750


def test_28_a_name_stands_for_the_content() -> None:
    processor, prompt = subject("llava").processor, written("llava", "image", SMALL)
    caches, other = harness.Caches(processor, 1.0, pair=False), ImageSample(1, 28, 28)
    first, second, unnamed = (
        harness.run(processor, prompt, {"image": [sample.value()]}, {}, caches, uuids=uuids).fields[
            "image"
        ][0]["pixel_values"]
        for sample, uuids in (
            (SMALL, {"image": ["a"]}),
            (other, {"image": ["a"]}),
            (other, None),
        )
    )
    assert torch.equal(first, second)
    assert not torch.equal(second, unnamed)


def test_29_qwen2_vl_text_after_a_video() -> None:
    one, (rope, model) = subject("qwen2_vl"), subject("qwen2_vl").rope
    video = written("qwen2_vl", "video", VideoSample(0, 4, 28, 28))
    prompt = [rope.config.vision_start_token_id, *video, rope.config.vision_end_token_id]
    outcome = one.run(Request(prompt, {"video": [VideoSample(0, 4, 28, 28)]}))
    ours, _ = rope.positions(outcome.ids, harness.placed(outcome))
    theirs, _ = reference.positions(model, one.processor, outcome, {})
    assert (ours[:, -1].tolist(), theirs[:, -1].tolist()) == ([3] * 3, [2] * 3)


def test_30_qwen3_omni_a_prompt_that_ends_with_an_item() -> None:
    one, (rope, _) = subject("qwen3_omni"), subject("qwen3_omni").rope
    outcome = one.run(one.minimal("image", SMALL))
    with pytest.raises(RuntimeError, match="Position ids length mismatch"):
        rope.positions(outcome.ids, harness.placed(outcome))


@pytest.mark.parametrize("entry", ["minicpmv", "kimi_vl"])
def test_31_reduced_processors_of_ours(entry: str) -> None:
    processor, request = subject(entry).processor, subject(entry).minimal("image", WIDE)
    text = processor.info.get_tokenizer().decode(request.prompt)
    theirs = reference.processed(processor, text, request.data())
    assert theirs is not None
    assert theirs["input_ids"] != harness.run(processor, text, request.data()).ids


@pytest.mark.parametrize(
    ("entry", "name", "value", "sides"),
    [
        ("isaac", "vision_min_num_patches", 16, (64, 64)),
        ("step3_vl", "enable_patch", False, (800, 800)),
    ],
)
def test_32_options_of_the_server_are_dropped(
    entry: str, name: str, value: Any, sides: tuple[int, int]
) -> None:
    sample, processor = ImageSample(0, *sides), subject(entry).processor
    data, prompt = {"image": [sample.value()]}, written(entry, "image", sample)
    server = doors.with_server_kwargs(processor, {name: value})
    bare, asked, served = (
        len(outcome.ids)
        for outcome in (
            harness.run(processor, prompt, data),
            harness.run(processor, prompt, data, {name: value}),
            harness.run(server, prompt, data),
        )
    )
    assert bare == served != asked


def test_33_minicpmv4_6_videos_without_the_option_of_a_request() -> None:
    one, video, few = subject("minicpmv4_6"), VideoSample(0, 2, 112, 112), {"max_slice_nums": 1}
    prompt, data = written("minicpmv4_6", "video", video), {"video": [video.value()]}
    server = doors.with_server_kwargs(one.processor, few)
    asked, served = (
        len(harness.run(processor, prompt, data, kwargs).fields["video"][0]["video_tgt_sizes"])
        for processor, kwargs in ((one.processor, few), (server, {}))
    )
    assert (asked, served) == (10, 2)


@pytest.mark.parametrize(
    ("entry", "side", "image", "tiles"),
    [("cohere2_vision", 16, SMALL, (5, 1)), ("llama4", 28, ImageSample(0, 28, 112), (5, 3))],
)
def test_34_tiles_are_counted_without_size(
    entry: str, side: int, image: ImageSample, tiles: tuple[int, int]
) -> None:
    size = {"size": {"height": side, "width": side}}
    fields = harness.round_trip(subject(entry).processor, {"image": [image.value()]}, size)
    assert tuple(map(len, fields["pixel_values"])) == tiles


def test_35_interns1_a_size_in_a_request() -> None:
    with pytest.raises(TypeError, match="multiple values for keyword argument 'size'"):
        subject("internvl_hf").pieces("image", [SMALL], {"size": {"height": 28, "width": 28}})

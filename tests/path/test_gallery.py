"""The specs of the gallery against vLLM's hand-written processors, stored and live, and against the laws.

Stored outputs of the classes, and what is right where one is wrong, are compared with what the specs give. Beside them
vLLM's own classes run on drawn requests, with the same checkpoints and the same versions of everything, so ids, ranges,
masks and every value of every field are equal or the test fails. Every law that needs no model holds on every spec.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from vllm.model_executor.models.registry import ModelRegistry

from mmkit.plan.parsing import ItemBatch
from mmkit.testing import (
    LAWS,
    AudioSample,
    ImageSample,
    Request,
    Subject,
    TensorSample,
    VideoSample,
    Violation,
    check_law,
    of_spec,
    vllm_path,
)
from mmkit.testing.compare import Given, compare
from mmkit.testing.differences import find_difference
from tests import ROOT, hf_law
from tests.oracles import SYSTEMS, compare_results, hand_written, processor, replay
from tests.profiles import scaled
from tools import outlines
from tools.lines import count_code_lines

# -- stored cases ------------------------------------------------------------------------------------------------------

CASES = [(name, case) for name, system in SYSTEMS.items() for case in system.cases()]
ACCEPTED_CASES = [pytest.param(name, case, id=f"{name}/{case['id']}") for name, case in CASES if "error" not in case]
REFUSED_CASES = [pytest.param(name, case, id=f"{name}/{case['id']}") for name, case in CASES if "error" in case]


@pytest.mark.parametrize(("name", "case"), ACCEPTED_CASES)
def test_a_stored_case_has_the_stored_result(name: str, case: dict[str, Any]) -> None:
    assert not compare_results(case["expect"], replay(name, case))


@pytest.mark.parametrize(("name", "case"), REFUSED_CASES)
def test_a_stored_case_with_an_error_is_refused(name: str, case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^\w+\.(image|video|audio)[^ ]*: expected "):
        replay(name, case)


def check_largest_items(name: str) -> set[str]:
    """Check that the largest items have the form of processed ones, where a smaller item is processed in their place.

    Returns:
        The modalities of which a smaller item is processed.
    """
    shortened = set()
    for modality in processor(name).plan.modalities.values():
        largest = modality.largest_item()
        zeros = modality.make_zeros(ItemBatch.whole([largest]))
        if not zeros or zeros[0] is None:
            continue
        shortened.add(modality.name)
        processed = modality.field_processor.process_spec_item(largest)
        difference = find_difference(describe_form(processed), describe_form(zeros[0]), "processed and not processed")
        assert not difference, difference
    return shortened


MAX_COMPARED_INTEGERS = 7


def describe_form(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes and dtypes of tensors; values of a few integers and of what is no tensor."""
    form: dict[str, Any] = {}
    for name, value in fields.items():
        form[name] = value
        if isinstance(value, torch.Tensor):
            form[name] = [list(value.shape), str(value.dtype)]
            if value.numel() <= MAX_COMPARED_INTEGERS:
                form[name].append(value.tolist())
    return form


def test_the_largest_image_and_video_of_qwen2_vl_have_the_form_of_processed_ones() -> None:
    assert check_largest_items("qwen2_vl") == {"image", "video"}


def test_the_largest_image_of_qwen3_vl_has_the_form_of_a_processed_one() -> None:
    assert check_largest_items("qwen3_vl") == {"image"}


def test_the_largest_video_of_llava_onevision_has_the_form_of_a_processed_one() -> None:
    assert check_largest_items("llava_onevision") == {"video"}


def test_the_largest_image_of_llava_is_processed() -> None:
    assert check_largest_items("llava") == set()


def test_the_docs_state_the_lines_of_each_spec_and_the_number_of_its_stored_cases() -> None:
    page = (ROOT / "docs" / "data" / "gallery.md").read_text()
    row = r"^\| \[.*?\]\(\.\./\.\./(.*?)\) \|[^|]*\| (\d+) \|[^|]*\|[^|]*\| (\d+) \|"
    in_docs = {}
    for path, lines, cases in re.findall(row, page, re.MULTILINE):
        in_docs[path] = (int(lines), int(cases))
    counted = {}
    for system in SYSTEMS.values():
        module = system.spec.split(":")[0]
        path = f"examples/{module.replace('.', '/')}.py"
        source = Path(path).read_text()
        counted[path] = (count_code_lines(source, imports=False), len(system.cases()))
    assert in_docs == counted


def test_the_page_says_which_specs_can_be_outlined() -> None:
    page = outlines.PAGE.read_text(encoding="utf-8")
    assert page == outlines.write_page()
    refused = re.findall(r"^\| \[(\w+)\]\S* \| (\w+) \| no \|", page, re.MULTILINE)
    assert set(refused) < set(outlines.REASONS)


# -- the classes themselves --------------------------------------------------------------------------------------------

HIDDEN = 64


@dataclass(frozen=True)
class Live:
    """What the requests of one system look like.

    Attributes:
        sizes: (width, height) of images at the edges of the system's geometry, or lengths of audio.
        kwargs: `mm_processor_kwargs` that it knows.
        marker: the placeholder of an item in a text, perhaps a template for its number.
        embeds: the numbers of rows of precomputed embeddings; empty where it takes none.
        alike: the items of a request have one size: the hand-written class pads to the largest of a call.
        metadata: its videos come with metadata, and have two frames at least.
        merges: line breaks merge with those around an item, and the class is wrong at most edges: nothing is drawn, and
            each size is one given request.
        checkpoint: makes another one of the stored one.
    """

    sizes: Sequence[Any] = ((56, 56),)
    kwargs: Sequence[Mapping[str, Any]] = ()
    marker: str = ""
    embeds: Sequence[int] = ()
    alike: bool = False
    metadata: bool = False
    merges: bool = False
    checkpoint: Callable[[], tempfile.TemporaryDirectory[str]] | None = None


@functools.cache
def copy_with_video_token() -> tempfile.TemporaryDirectory[str]:
    """Return a copy of InternVL's checkpoint whose tokenizer has a token for videos, which the stored one lacks."""
    folder = tempfile.TemporaryDirectory(prefix="mmkit-test-")  # removed when the interpreter exits
    shutil.copytree(SYSTEMS["internvl2"].checkpoint, folder.name, dirs_exist_ok=True)
    path = Path(folder.name) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    video_token = {
        "id": len(tokenizer["model"]["vocab"]),
        "content": "<|video_pad|>",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    tokenizer["added_tokens"].append(video_token)
    path.write_text(json.dumps(tokenizer))
    return folder


def multiples(side: int, most: int = 4) -> list[tuple[int, int]]:
    """Return the sizes of up to `most` whole tiles, and sizes that differ from them by one pixel."""
    sizes = []
    for columns in range(1, most + 1):
        for rows in range(1, most // columns + 1):
            width = side * columns
            height = side * rows
            sizes += [(width, height), (width + 1, height), (width, height - 1)]
    return sizes


RAW = {"do_rescale": False}
AS_IT_IS = {"do_normalize": False}
NEAREST = {"resample": 0}
PAN = {"do_pan_and_scan": True}
SQUARE = multiples(56, 2)
TILES = multiples(56)
LIVE = {
    "llava": Live(
        SQUARE,
        [
            RAW,
            {"resample": 0, "text_kwargs": {"padding": False}},
            {"images_kwargs": {"do_normalize": False}, "do_normalize": True},
        ],
        "<image>",
        [16],
    ),
    "blip2": Live(SQUARE, [RAW, AS_IT_IS, NEAREST, {"image_mean": [0.5, 0.5, 0.5]}], embeds=[8]),
    "molmo": Live(
        TILES + [(width + 56, height + 56) for width, height in TILES],
        [{"max_crops": 1}, {"max_crops": 2}, {"max_crops": 3}, {"max_crops": 6}],
    ),
    "deepseek_vl2": Live(
        multiples(64), [{"normalize": False}, {"image_mean": [0.1, 0.2, 0.3]}], "<image>", [1, 2, 16, 27]
    ),
    "internvl2": Live(
        TILES + [(5, 4), (50, 40), (70, 56), (4, 5), (140, 112), (112, 140)],
        [
            {"max_dynamic_patch": 1},
            {"max_dynamic_patch": 6},
            {"min_dynamic_patch": 2},
            {"min_dynamic_patch": 3, "max_dynamic_patch": 5},
            {"dynamic_image_size": False},
            {"use_thumbnail": False},
            {"use_thumbnail": False, "max_dynamic_patch": 2},
        ],
        "<image>",
        [1, 4, 20],
    ),
    "internvl2-video": Live(SQUARE + [(5, 4), (70, 56)], marker="<image>", checkpoint=copy_with_video_token),
    "qwen2_audio": Live(
        [480, 481, 1120, 1121, 47999, 48000, 48001], marker="<|audio_bos|><|AUDIO|><|audio_eos|>", embeds=[1, 4, 20]
    ),
    "ultravox": Live([1, 160, 320, 321, 2560, 2561, 47999, 48000, 48001, 112345], marker="<|audio|>", alike=True),
    "whisper": Live([1, 200, 400, 16000, 31999, 32000]),
    "pixtral_hf": Live(multiples(16, 8) + multiples(64), [AS_IT_IS, NEAREST], "[IMG]"),
    "qwen2_vl": Live(
        multiples(28, 8), [{"max_pixels": 12544}, {"min_pixels": 12544, "max_pixels": 50176}, NEAREST], "<|image_pad|>"
    ),
    "qwen3_vl": Live(
        multiples(32, 7),
        [{"max_pixels": 16384}, {"min_pixels": 16384, "max_pixels": 50176}, NEAREST],
        "<|image_pad|>",
        metadata=True,
    ),
    "gemma3": Live(
        multiples(32),
        [
            PAN | {"pan_and_scan_min_crop_size": 16},
            PAN | {"pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 3},
            PAN,
        ],
        "a\n<start_of_image>\n\nb",
        merges=True,
    ),
    "minicpmv": Live(TILES, marker="(<image>./</image>)"),
    "idefics3": Live(
        multiples(56, 6), [{"size": {"longest_edge": 112}}, {"do_image_splitting": False}, AS_IT_IS], "<image>"
    ),
    "llava_next": Live(TILES, [RAW, AS_IT_IS, NEAREST], "<image>", [1, 16, 27], alike=True),
    "llava_onevision": Live(multiples(56, 16), [RAW, AS_IT_IS], "<image>", [1, 16, 27], alike=True),
    "paligemma": Live(SQUARE, [RAW, AS_IT_IS, NEAREST]),
    "phi3v": Live(multiples(336), [{"num_crops": 1}, {"num_crops": 2}], "<|image_{}|>", [1, 16, 27]),
}
LEAST = 4 if version("transformers") < "5" else 1  # transformers 4 takes a side of one or three pixels for the channels


class Processors(NamedTuple):
    """Both processors of a system, on one checkpoint."""

    hand_written: Any
    generated: Any


@functools.cache
def open_processors(name: str) -> Processors:
    make_checkpoint = LIVE[name].checkpoint
    checkpoint = None
    if make_checkpoint is not None:
        checkpoint = make_checkpoint().name
    system = name.partition("-")[0]
    return Processors(
        hand_written(system, checkpoint=checkpoint, enable_mm_embeds=True),
        processor(system, checkpoint=checkpoint, enable_mm_embeds=True),
    )


SEEDS = st.integers(0, 3)
SIDE = st.integers(LEAST, 100)
NARROW_SIDE = st.integers(LEAST, 12)
LONG_SIDE = st.integers(101, 250)


def samples(live: Live) -> dict[str, st.SearchStrategy[Any]]:
    """Return strategies for small items of each modality, many of them at the edges of the geometry."""
    edges = st.sampled_from(live.sizes)
    narrow = st.tuples(NARROW_SIDE, LONG_SIDE)
    wide = st.tuples(LONG_SIDE, NARROW_SIDE)
    sizes: st.SearchStrategy[Any] = st.tuples(SIDE, SIDE) | edges | narrow | wide
    if isinstance(live.sizes[0], int):
        sizes = edges | st.integers(600, 9000)
    if live.alike:
        sizes = st.shared(sizes, key="the size of a request")

    def make_image(seed: int, size: tuple[int, int]) -> ImageSample:
        return ImageSample(seed, *size)

    frames = st.integers(2 if live.metadata else 1, 7)
    # of strips, transformers makes more patches than `longest_edge` allows
    frame_side = st.integers(10, 60)
    return {
        "image": st.builds(make_image, SEEDS, sizes),
        "audio": st.builds(AudioSample, SEEDS, sizes),
        "video": st.builds(VideoSample, SEEDS, frames, frame_side, frame_side, st.just(live.metadata)),
    }


def rows_of(count: int, seed: int = 0) -> TensorSample:
    """Return precomputed embeddings."""
    return TensorSample(seed, (count, HIDDEN))


def list_given_requests(live: Live, kind: str) -> list[Given]:
    """Return requests of precomputed embeddings, and of one raw item each where no requests are drawn.

    Args:
        live: the system.
        kind: its first modality.
    """
    requests = []
    # without a marker for a text, the class takes one item
    max_items = 2 if live.marker else 1
    for count in live.embeds:
        for number in range(1, max_items + 1):
            markers = [live.marker.format(index + 1) for index in range(number)]
            values = [rows_of(count, seed).value() for seed in range(number)]
            requests.append(Given("a " + " and ".join(markers), {kind: values}))
    if live.merges:
        options = [{}, *live.kwargs]
        for index, (width, height) in enumerate(live.sizes):
            picture = ImageSample(0, width, height).value()
            requests.append(Given(live.marker, {kind: [picture]}, options[index % len(options)]))
    return requests


def compare_with_class(name: str, examples: int) -> None:
    """Compare a spec with the hand-written class on drawn requests, most of which both take."""
    live = LIVE[name]
    system = SYSTEMS[name.partition("-")[0]]
    spec = system.load_spec()
    config = open_processors(name).hand_written.info.ctx.model_config
    model_class, _ = ModelRegistry.resolve_model_cls([system.architecture], config)
    strategies = samples(live)
    comparison = compare(
        spec,
        config.model,
        model_class,
        examples=0 if live.merges else examples,
        given_requests=list_given_requests(live, spec.modalities[0].name),
        kwargs=st.sampled_from([{}, {}, *live.kwargs]),
        samples={modality.name: strategies[modality.name] for modality in spec.modalities},
        trust_remote_code=True,
    )
    assert comparison, comparison.difference
    count = comparison.refused + len(comparison.refused_by_class)
    assert count < comparison.requests / 4, comparison.refused_by_class[:1]


@pytest.mark.parametrize("name", LIVE)
def test_a_spec_is_as_the_hand_written_class(name: str) -> None:
    compare_with_class(name, scaled(6))


# -- what the class gets wrong, and no law asks about ------------------------------------------------------------------

IMAGE = ImageSample(0, 60, 40)


def check_that_only_the_spec_refuses(name: str, request: Request, message: str) -> None:
    """Run a request through both processors; the hand-written class takes it."""
    arguments = (request.prompt, request.data(), request.kwargs)
    both = open_processors(name)
    vllm_path.run(both.hand_written, *arguments)
    with pytest.raises(ValueError, match=re.escape(message)):
        vllm_path.run(both.generated, *arguments)


def test_audio_that_the_class_would_cut_off_is_refused() -> None:
    request = Request("a", {"audio": [AudioSample(0, 32001)]})
    check_that_only_the_spec_refuses("whisper", request, "of at most 32000 samples")


def test_more_embeddings_than_an_image_has_rows_are_refused() -> None:
    request = Request("<image>", {"image": [rows_of(13)]})
    check_that_only_the_spec_refuses("llava", request, "embedding row(s), got 13")


def test_fewer_embeddings_than_an_image_has_rows_are_refused() -> None:
    request = Request("a", {"image": [rows_of(5)]})
    check_that_only_the_spec_refuses("blip2", request, "embedding row(s), got 5")


def test_an_option_after_which_the_model_makes_another_number_of_rows_is_refused() -> None:
    request = Request("<image>", {"image": [IMAGE]}, {"do_center_crop": False})
    check_that_only_the_spec_refuses("llava", request, "expected shape (3, 56, 56)")


def test_a_placeholder_in_a_text_of_a_model_without_targets_is_refused() -> None:
    request = Request("<image>", {"image": [IMAGE]})
    check_that_only_the_spec_refuses("blip2", request, "placeholder")


def test_a_placeholder_beside_a_target_is_refused() -> None:
    request = Request("<image><IMG_CONTEXT>", {"image": [IMAGE]})
    check_that_only_the_spec_refuses("internvl2", request, "placeholder")


# -- laws --------------------------------------------------------------------------------------------------------------

EXAMPLES = scaled(15)
KWARGS: dict[str, Any] = {
    "llava_onevision": st.sampled_from([{}, {"do_normalize": False}]),  # another size of tiles is refused
}
"""Where the kit would draw others by itself."""


class KnownViolation(NamedTuple):
    """A law that a spec violates, as the class that it follows.

    Attributes:
        message: a part of what the law says.
        reason: why it is left so.
    """

    message: str
    reason: str


EXPECTED = {
    ("molmo", "independence"): KnownViolation(
        "image_input_idx",
        "it counts over all images of a call; the model uses its order alone",
    ),
    ("minicpmv", "reference"): KnownViolation(
        "ids: 14 and 13 long",
        "vLLM's class leaves out the <s> that transformers writes",
    ),
    ("qwen3_vl", "reference"): KnownViolation(
        "the field 'pixel_values_videos' has other values",
        "vLLM normalises the bytes of videos by the values of the image processor",
    ),
    ("qwen2_vl", "positions"): KnownViolation(
        "and in Qwen2VLModel at",
        "after a video, transformers 5 goes on before its largest position",
    ),
}
LEFT_OUT: dict[str, set[str]] = {
    "cache": {"molmo"},  # as independence, but few sequences of requests show it
    "text": {"fuyu"},  # no tokenizer
    "embeds": {"fuyu", "florence2", "molmo", "chameleon", "gemma3", "idefics3", "minicpmv", "pixtral_hf", "whisper"},
    "reference": {"fuyu", "florence2", "molmo", "internvl2", "qwen_vl", "ultravox", "whisper", "phi3v"},
    "positions": SYSTEMS.keys() - {"qwen2_vl", "qwen3_vl"},  # positions of one dimension
    "outputs": {*SYSTEMS},  # none declares outputs
    "ids_only": {*SYSTEMS},  # every item has placeholders
    "outline": {"ultravox"},  # its processor alone tells the length of each chunk
}
"""Systems about which a law has nothing to say: no embeddings, a Hugging Face processor that writes no
placeholders. tests/night/test_gallery.py checks that it is so."""


def list_pairs() -> list[tuple[str, str]]:
    """Return each law that needs no model with each system about which it says something."""
    pairs = []
    for number, law in LAWS.items():
        if law.needs_model:
            continue
        for name in SYSTEMS:
            if name not in LEFT_OUT.get(number, ()):
                pairs.append((name, number))
    return pairs


PAIRS = list_pairs()


@functools.cache
def open_subject(name: str) -> Subject:
    """Return the subject of a system, with small items."""
    spec = SYSTEMS[name].load_spec()
    strategies = samples(replace(LIVE.get(name, Live()), alike=False))
    of_spec_modalities = {}
    for modality in spec.modalities:
        if modality.name in strategies:
            of_spec_modalities[modality.name] = strategies[modality.name]
    return of_spec(
        spec,
        SYSTEMS[name].checkpoint,
        samples=of_spec_modalities,
        kwargs=KWARGS.get(name),
        trust_remote_code=True,
    )


def choose_pairs_by_day() -> list[tuple[str, str]]:
    """Return few pairs that have each law once, on some spec, and each spec once, under some law.

    The other half of a pair is the one that is the least used so far.
    """
    chosen: list[tuple[str, str]] = []
    for law in LAWS:
        candidates = [pair for pair in PAIRS if pair[1] == law and pair not in EXPECTED]
        if candidates:
            uses = [count_pairs(chosen, name=name) for name, _ in candidates]
            chosen.append(candidates[uses.index(min(uses))])
    for name in SYSTEMS:
        candidates = [pair for pair in PAIRS if pair[0] == name and pair not in EXPECTED]
        if candidates and count_pairs(chosen, name=name) == 0:
            uses = [count_pairs(chosen, law=law) for _, law in candidates]
            chosen.append(candidates[uses.index(min(uses))])
    return chosen


def count_pairs(pairs: list[tuple[str, str]], name: str | None = None, law: str | None = None) -> int:
    """Return the number of pairs of a system, or of a law."""
    count = 0
    for pair_name, pair_law in pairs:
        if pair_name == name or pair_law == law:
            count += 1
    return count


def check_law_or_expected(name: str, number: str) -> None:
    """Check a law on a spec of the gallery, or that the violation is the known one."""
    known_violation = EXPECTED.get((name, number))
    if known_violation is None:
        check_law(number, open_subject(name), examples=EXAMPLES)
        return
    with pytest.raises(Violation, match=known_violation.message):
        check_law(number, open_subject(name), examples=100)


@pytest.mark.parametrize(("name", "number"), choose_pairs_by_day())
def test_a_law_holds(name: str, number: str) -> None:
    check_law_or_expected(name, number)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_processor_for_transformers_is_as_vllms_path(name: str) -> None:
    hf_law.check(open_subject(name), scaled(5))


@pytest.mark.parametrize("name", hf_law.EXAMPLES)
def test_the_processor_for_transformers_of_an_example_is_as_vllms_path(name: str) -> None:
    hf_law.check(hf_law.EXAMPLES[name](), scaled(5))

"""The specs of the gallery against vLLM's hand-written processors, stored and live, and against the laws.

Stored outputs of the classes, and what is right where one is wrong, are compared with what the specs give. Beside them
vLLM's own classes run on drawn requests, with the same checkpoints and the same versions of everything, so ids, ranges,
masks and every value of every field are equal or the test fails. Every law that needs no model holds on every spec.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
from tools.lines import count_code_lines

# -- stored cases ------------------------------------------------------------------------------------------------------

CASES = [(name, case) for name, system in SYSTEMS.items() for case in system.cases()]


@pytest.mark.parametrize(("name", "case"), [pytest.param(n, c, id=f"{n}/{c['id']}") for n, c in CASES])
def test_stored_case(name: str, case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(ValueError, match=r"^\w+\.(image|video|audio)[^ ]*: expected "):
            replay(name, case)
    else:
        assert not compare_results(case["expect"], replay(name, case))


@pytest.mark.parametrize(
    ("name", "shortened"),
    [("qwen2_vl", {"image", "video"}), ("qwen3_vl", {"image"}), ("llava_onevision", {"video"}), ("llava", set())],
)
def test_the_largest_item_has_the_form_of_a_processed_one(name: str, shortened: set[str]) -> None:
    """Also where the Hugging Face processor gets a small item in its place."""
    known = {}
    for modality in processor(name).plan.modalities.values():
        item = modality.largest_item()
        (processed,) = modality.make_zeros(ItemBatch.whole([item])) or [None]
        if processed is not None:
            known[modality.name] = processed
            assert not find_difference(
                form(modality.field_processor.process_spec_item(item)), form(processed), "processed and not processed"
            )
    assert known.keys() == shortened


def form(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes and dtypes of tensors; values of a few integers and of what is no tensor."""
    return {
        name: [list(part.shape), str(part.dtype), part.tolist() if part.numel() < 8 else None]
        if isinstance(part, torch.Tensor)
        else part
        for name, part in fields.items()
    }


def test_the_table_of_the_docs() -> None:
    """docs/data/gallery.md states the lines of each spec and the number of stored cases."""
    text = (ROOT / "docs" / "data" / "gallery.md").read_text()
    stated = re.findall(r"^\| \[.*?\]\(\.\./\.\./(.*?)\) \|[^|]*\| (\d+) \|[^|]*\|[^|]*\| (\d+) \|", text, re.MULTILINE)
    known = {}
    for name, system in SYSTEMS.items():
        path = Path(*("examples/" + system.spec.split(":")[0].replace(".", "/") + ".py").split("/"))
        known[str(path)] = count_code_lines(path.read_text(), imports=False), sum(n == name for n, _ in CASES)
    assert {path: (int(lines), int(cases)) for path, lines, cases in stated} == known


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
def with_video_token() -> tempfile.TemporaryDirectory[str]:
    """InternVL takes videos where the tokenizer has a token for them, which the stored one lacks."""
    folder = tempfile.TemporaryDirectory(prefix="mmkit-test-")  # removed when the interpreter exits
    shutil.copytree(SYSTEMS["internvl2"].checkpoint, folder.name, dirs_exist_ok=True)
    path = Path(folder.name) / "tokenizer.json"
    stored = json.loads(path.read_text())
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    token = {"id": len(stored["model"]["vocab"]), "content": "<|video_pad|>", "special": True}
    path.write_text(json.dumps({**stored, "added_tokens": [*stored["added_tokens"], token | flags]}))
    return folder


def multiples(side: int, most: int = 4) -> list[tuple[int, int]]:
    """Sizes of whole tiles, and one pixel beside them."""
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most]
    return [(side * x + d, side * y + e) for x, y in grids for d, e in ((0, 0), (1, 0), (0, -1))]


RAW, AS_IT_IS, NEAREST = {"do_rescale": False}, {"do_normalize": False}, {"resample": 0}
SQUARE, TILES, PAN = multiples(56, 2), multiples(56), {"do_pan_and_scan": True}
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
    "molmo": Live([*TILES, *((w + 56, h + 56) for w, h in TILES)], [{"max_crops": n} for n in (1, 2, 3, 6)]),
    "deepseek_vl2": Live(
        multiples(64), [{"normalize": False}, {"image_mean": [0.1, 0.2, 0.3]}], "<image>", [1, 2, 16, 27]
    ),
    "internvl2": Live(
        [*TILES, (5, 4), (50, 40), (70, 56), (4, 5), (140, 112), (112, 140)],
        [
            *({"max_dynamic_patch": n} for n in (1, 6)),
            {"min_dynamic_patch": 2},
            {"min_dynamic_patch": 3, "max_dynamic_patch": 5},
            {"dynamic_image_size": False},
            {"use_thumbnail": False},
            {"use_thumbnail": False, "max_dynamic_patch": 2},
        ],
        "<image>",
        [1, 4, 20],
    ),
    "internvl2-video": Live([*SQUARE, (5, 4), (70, 56)], marker="<image>", checkpoint=with_video_token),
    "qwen2_audio": Live(
        [480, 481, 1120, 1121, 47999, 48000, 48001], marker="<|audio_bos|><|AUDIO|><|audio_eos|>", embeds=[1, 4, 20]
    ),
    "ultravox": Live([1, 160, 320, 321, 2560, 2561, 47999, 48000, 48001, 112345], marker="<|audio|>", alike=True),
    "whisper": Live([1, 200, 400, 16000, 31999, 32000]),
    "pixtral_hf": Live([*multiples(16, 8), *multiples(64)], [AS_IT_IS, NEAREST], "[IMG]"),
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


@functools.cache
def sides(name: str) -> tuple[Any, Any]:
    """The hand-written processor and the generated one."""
    make = LIVE[name].checkpoint
    options = {"checkpoint": make().name if make else None, "enable_mm_embeds": True}
    return tuple(side(name.partition("-")[0], **options) for side in (hand_written, processor))  # type: ignore[return-value]


def samples(live: Live) -> dict[str, st.SearchStrategy[Any]]:
    """Small items of each modality, many of them at the edges of the geometry."""
    seeds, side, long = (st.integers(*ends) for ends in ((0, 3), (LEAST, 100), (101, 250)))
    narrow, edges = st.tuples(st.integers(LEAST, 12), long), st.sampled_from(live.sizes)
    sizes: st.SearchStrategy[Any] = st.one_of(st.tuples(side, side), edges, narrow, narrow.map(lambda s: s[::-1]))
    if isinstance(live.sizes[0], int):
        sizes = edges | st.integers(600, 9000)
    if live.alike:
        sizes = st.shared(sizes, key="the size of a request")
    # of strips, transformers makes more patches than `longest_edge` allows
    frames, height, width = st.integers(1 + live.metadata, 7), *[st.integers(10, 60)] * 2
    return {
        "image": st.builds(lambda seed, size: ImageSample(seed, *size), seeds, sizes),
        "audio": st.builds(AudioSample, seeds, sizes),
        "video": st.builds(VideoSample, seeds, frames, height, width, st.just(live.metadata)),
    }


def rows_of(count: int, seed: int = 0) -> TensorSample:
    """Precomputed embeddings."""
    return TensorSample(seed, (count, HIDDEN))


def given(live: Live, kind: str) -> Iterator[Given]:
    """Requests of precomputed embeddings, of one item and of two where the class takes two; and of one raw item each
    where none are drawn."""
    for count in live.embeds:
        for items in (1, 2)[: 1 + bool(live.marker)]:
            prompt = "a " + " and ".join(live.marker.format(i + 1) for i in range(items))
            yield Given(prompt, {kind: [rows_of(count, seed).value() for seed in range(items)]})
    if live.merges:
        for size, kwargs in zip(live.sizes, itertools.cycle([{}, *live.kwargs])):
            yield Given(live.marker, {kind: [ImageSample(0, *size).value()]}, kwargs)


def same_as_the_class(name: str, examples: int) -> None:
    """Compare drawn requests, most of which both take."""
    live = LIVE[name]
    system = SYSTEMS[name.partition("-")[0]]
    spec = system.load_spec()
    kind = spec.modalities[0].name
    theirs, _ = sides(name)
    comparison = compare(
        spec,
        theirs.info.ctx.model_config.model,
        ModelRegistry.resolve_model_cls([system.architecture], theirs.info.ctx.model_config)[0],
        examples=0 if live.merges else examples,
        given_requests=given(live, kind),
        kwargs=st.sampled_from([{}, {}, *live.kwargs]),
        samples={m.name: samples(live)[m.name] for m in spec.modalities},
        trust_remote_code=True,
    )
    assert comparison, comparison.difference
    assert comparison.refused + len(comparison.taken) < comparison.requests / 4, comparison.taken[:1]


@pytest.mark.parametrize("name", LIVE)
def test_as_the_hand_written_class(name: str) -> None:
    same_as_the_class(name, scaled(6))


# -- what the class gets wrong, and no law asks about ------------------------------------------------------------------

IMAGE = ImageSample(0, 60, 40)


@pytest.mark.parametrize(
    ("name", "item", "prompt", "kwargs", "message"),
    [
        # the hand-written class leaves the rest out
        ("whisper", AudioSample(0, 32001), "a", {}, "of at most 32000 samples"),
        # the model makes another number of rows
        ("llava", rows_of(13), "<image>", {}, "embedding row(s), got 13"),
        ("blip2", rows_of(5), "a", {}, "embedding row(s), got 5"),
        ("llava", IMAGE, "<image>", {"do_center_crop": False}, "expected shape (3, 56, 56)"),
        # a placeholder id that stands in the text
        ("blip2", IMAGE, "<image>", {}, "placeholder"),
        ("internvl2", IMAGE, "<image><IMG_CONTEXT>", {}, "placeholder"),
    ],
)
def test_only_the_spec_refuses(name: str, item: Any, prompt: str, kwargs: dict[str, Any], message: str) -> None:
    """The hand-written class takes them."""
    request = Request(prompt, {"audio" if isinstance(item, AudioSample) else "image": [item]}, kwargs)
    sent = request.prompt, request.data(), request.kwargs
    hand, ours = sides(name)
    vllm_path.run(hand, *sent)
    with pytest.raises(ValueError, match=re.escape(message)):
        vllm_path.run(ours, *sent)


# -- laws --------------------------------------------------------------------------------------------------------------

EXAMPLES = scaled(15)
KWARGS: dict[str, Any] = {
    "llava_onevision": st.sampled_from([{}, {"do_normalize": False}]),  # another size of tiles is refused
}
"""Where the kit would draw others by itself."""
EXPECTED = {
    ("molmo", "independence"): (
        "image_input_idx",
        "it counts over all images of a call; the model uses its order alone",
    ),
    ("minicpmv", "reference"): (
        "ids: 14 and 13 long",
        "vLLM's class leaves out the <s> that transformers writes",
    ),
    ("qwen2_vl", "positions"): (
        "and in Qwen2VLModel at",
        "after a video, transformers 5 goes on before its largest position",
    ),
}
"""What a message says, and why."""
LEFT_OUT: dict[str, set[str]] = {
    "cache": {"molmo"},  # as independence, but few sequences of requests show it
    "text": {"fuyu"},  # no tokenizer
    "embeds": {"fuyu", "florence2", "molmo", "chameleon", "gemma3", "idefics3", "minicpmv", "pixtral_hf", "whisper"},
    "reference": {"fuyu", "florence2", "molmo", "internvl2", "qwen_vl", "ultravox", "whisper", "phi3v"},
    "positions": SYSTEMS.keys() - {"qwen2_vl", "qwen3_vl"},  # positions of one dimension
    "outputs": {*SYSTEMS},  # none declares outputs
}
"""Systems about which a law has nothing to say: no embeddings, a Hugging Face processor that writes no
placeholders. tests/night/test_gallery.py checks that it is so."""
PAIRS = [
    (name, number)
    for number, law in LAWS.items()
    for name in SYSTEMS
    if not law.needs_model and name not in LEFT_OUT.get(number, ())
]


@functools.cache
def subject(name: str) -> Subject:
    spec = SYSTEMS[name].load_spec()
    small = samples(replace(LIVE.get(name, Live()), alike=False))
    options: dict[str, Any] = {"kwargs": KWARGS.get(name), "trust_remote_code": True}
    known = {modality.name: small[modality.name] for modality in spec.modalities if modality.name in small}
    return of_spec(spec, SYSTEMS[name].checkpoint, samples=known, **options)


def pairs_by_day() -> list[tuple[str, str]]:
    """Every law on one spec, and every spec under one law: the pair whose other half is the least used."""
    free = [pair for pair in PAIRS if pair not in EXPECTED]
    chosen: list[tuple[str, str]] = []
    for half, values in ((1, LAWS), (0, SYSTEMS)):
        for value in values:
            able = [pair for pair in free if pair[half] == value]
            if able and all(pair[half] != value for pair in chosen):
                chosen.append(min(able, key=lambda pair: sum(pair[1 - half] == other[1 - half] for other in chosen)))
    return chosen


def hold(name: str, number: str) -> None:
    """A law on a spec of the gallery, or the violation that is known."""
    if known := EXPECTED.get((name, number)):
        with pytest.raises(Violation, match=known[0]):
            check_law(number, subject(name), examples=100)
    else:
        check_law(number, subject(name), examples=EXAMPLES)


@pytest.mark.parametrize(("name", "number"), pairs_by_day())
def test_gallery(name: str, number: str) -> None:
    hold(name, number)


@pytest.mark.parametrize("name", [*SYSTEMS, *hf_law.EXAMPLES])
def test_the_processor_for_transformers(name: str) -> None:
    """What it makes of requests is what vLLM's path makes of them."""
    hf_law.check(hf_law.EXAMPLES[name]() if name in hf_law.EXAMPLES else subject(name), scaled(5))

"""Drawn requests through the specs of the gallery and through the classes that they replace, side by side.

Where `test_gallery` replays stored outputs, here vLLM's own processors run: on the same checkpoints, with the same
versions of everything, so ids, ranges, masks and every value of every field are equal or the test fails. Caches are the
law `cache`: what they give is what the spec gives without. A few tests tell where the class is wrong; the laws of most.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from vllm.model_executor.models.registry import ModelRegistry

from mmkit.testing import AudioSample, ImageSample, Request, TensorSample, VideoSample, vllm_path
from mmkit.testing.compare import Given, compare
from mmkit.testing.vllm_path import Caches
from tests.oracles import SYSTEMS, hand_written, processor
from tests.profiles import scaled

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
        prepared: makes another checkpoint of the stored one.
        system: its name in the table of systems, where it is another.
    """

    sizes: Sequence[Any]
    kwargs: Sequence[Mapping[str, Any]] = ()
    marker: str = ""
    embeds: Sequence[int] = ()
    alike: bool = False
    metadata: bool = False
    merges: bool = False
    prepared: Callable[[], tempfile.TemporaryDirectory[str]] | None = None
    system: str = ""


@functools.cache
def with_video_token() -> tempfile.TemporaryDirectory[str]:
    """InternVL takes videos where the tokenizer has a token for them, which the stored one lacks."""
    folder = tempfile.TemporaryDirectory(prefix="mmkit-test-")  # removed when the interpreter exits
    shutil.copytree(SYSTEMS["internvl2"].checkpoint, folder.name, dirs_exist_ok=True)
    path = Path(folder.name) / "tokenizer.json"
    stored = json.loads(path.read_text())
    token = {"id": len(stored["model"]["vocab"]), "content": "<|video_pad|>", "special": True}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    stored["added_tokens"].append(token | flags)
    path.write_text(json.dumps(stored))
    return folder


def multiples(side: int, most: int = 4) -> list[tuple[int, int]]:
    """Sizes of whole tiles, and one pixel beside them."""
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most]
    return [(side * x + d, side * y + e) for x, y in grids for d, e in ((0, 0), (1, 0), (0, -1))]


LIVE = {
    "llava": Live(
        multiples(56, 2),
        [
            {"do_rescale": False},
            {"resample": 0, "text_kwargs": {"padding": False}},
            {"images_kwargs": {"do_normalize": False}, "do_normalize": True},
        ],
        "<image>",
        embeds=[16],
    ),
    "blip2": Live(
        multiples(56, 2),
        [{"do_rescale": False}, {"do_normalize": False}, {"resample": 0}, {"image_mean": [0.5, 0.5, 0.5]}],
        embeds=[8],
    ),
    "molmo": Live(
        [*multiples(56), *((w + 56, h + 56) for w, h in multiples(56))], [{"max_crops": n} for n in (1, 2, 3, 6)]
    ),
    "deepseek_vl2": Live(
        multiples(64), [{"normalize": False}, {"image_mean": [0.1, 0.2, 0.3]}], "<image>", embeds=[1, 2, 16, 27]
    ),
    "internvl2": Live(
        [*multiples(56), (5, 4), (50, 40), (70, 56), (4, 5), (140, 112), (112, 140)],
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
        embeds=[1, 4, 20],
    ),
    "internvl2-video": Live(
        [*multiples(56, 2), (5, 4), (70, 56)], marker="<image>", prepared=with_video_token, system="internvl2"
    ),
    "qwen2_audio": Live(
        [480, 481, 1120, 1121, 47999, 48000, 48001], marker="<|audio_bos|><|AUDIO|><|audio_eos|>", embeds=[1, 4, 20]
    ),
    "ultravox": Live([1, 160, 320, 321, 2560, 2561, 47999, 48000, 48001, 112345], marker="<|audio|>", alike=True),
    "whisper": Live([1, 200, 400, 16000, 31999, 32000]),
    "pixtral_hf": Live([*multiples(16, 8), *multiples(64)], [{"do_normalize": False}, {"resample": 0}], "[IMG]"),
    "qwen2_vl": Live(
        multiples(28, 8),
        [{"max_pixels": 12544}, {"min_pixels": 12544, "max_pixels": 50176}, {"resample": 0}],
        "<|image_pad|>",
    ),
    "qwen3_vl": Live(
        multiples(32, 7),
        [{"max_pixels": 16384}, {"min_pixels": 16384, "max_pixels": 50176}, {"resample": 0}],
        "<|image_pad|>",
        metadata=True,
    ),
    "gemma3": Live(
        multiples(32),
        [
            {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16},
            {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 3},
            {"do_pan_and_scan": True},
        ],
        "a\n<start_of_image>\n\nb",
        merges=True,
    ),
    "minicpmv": Live(multiples(56), marker="(<image>./</image>)"),
    "idefics3": Live(
        multiples(56, 6),
        [{"size": {"longest_edge": 112}}, {"do_image_splitting": False}, {"do_normalize": False}],
        "<image>",
    ),
    "llava_next": Live(
        multiples(56),
        [{"do_rescale": False}, {"do_normalize": False}, {"resample": 0}],
        "<image>",
        embeds=[1, 16, 27],
        alike=True,
    ),
    "llava_onevision": Live(
        multiples(56, 16),
        [{"do_rescale": False}, {"do_normalize": False}],
        "<image>",
        embeds=[1, 16, 27],
        alike=True,
    ),
    "paligemma": Live(multiples(56, 2), [{"do_rescale": False}, {"do_normalize": False}, {"resample": 0}]),
    "phi3v": Live(multiples(336), [{"num_crops": 1}, {"num_crops": 2}], "<|image_{}|>", embeds=[1, 16, 27]),
}


# -- comparison --------------------------------------------------------------------------------------------------------


@functools.cache
def sides(name: str) -> tuple[Any, Any]:
    """The hand-written processor and the generated one."""
    live = LIVE[name]
    checkpoint = live.prepared().name if live.prepared is not None else None
    options = {"checkpoint": checkpoint, "enable_mm_embeds": True}
    return tuple(make(live.system or name, **options) for make in (hand_written, processor))  # type: ignore[return-value]


def samples(live: Live) -> dict[str, st.SearchStrategy[Any]]:
    """Small items of each modality, many of them at the edges of the geometry."""
    seeds, side, long, video = (st.integers(*ends) for ends in ((0, 3), (1, 100), (101, 250), (4, 60)))
    narrow = st.tuples(st.integers(1, 12), long)
    edges = st.sampled_from(live.sizes)
    sizes: st.SearchStrategy[Any] = st.one_of(st.tuples(side, side), edges, narrow, narrow.map(lambda s: s[::-1]))
    if isinstance(live.sizes[0], int):
        sizes = st.one_of(edges, st.integers(600, 9000))
    if live.alike:
        sizes = st.shared(sizes, key="the size of a request")
    frames = st.integers(1 + live.metadata, 7)
    return {
        "image": st.builds(lambda seed, size: ImageSample(seed, *size), seeds, sizes),
        "audio": st.builds(AudioSample, seeds, sizes),
        "video": st.builds(VideoSample, seeds, frames, video, video, st.just(live.metadata)),
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
    system = SYSTEMS[live.system or name]
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


def ask(side: Any, request: Request, caches: Caches | None = None) -> Any:
    """The outcome but for its hashes; or why the request is refused: classes do so with any exception."""
    try:
        outcome = vllm_path.run(side, request.prompt, request.data(), request.kwargs, caches)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return replace(outcome, hashes={})


def request_of(name: str, *items: Any, **kwargs: Any) -> Request:
    """A request of these items and nothing else."""
    kind = "audio" if isinstance(items[0], AudioSample) else "image"
    prompt = "".join(LIVE[name].marker.format(i + 1) for i in range(len(items)))
    return Request(prompt or "a", {kind: list(items)}, kwargs)


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        # the hand-written class leaves the rest out
        ("whisper", request_of("whisper", AudioSample(0, 32001)), "of at most 32000 samples"),
        # the model makes another number of rows
        ("llava", request_of("llava", rows_of(13)), "embedding row(s), got 13"),
        ("blip2", request_of("blip2", rows_of(5)), "embedding row(s), got 5"),
        ("llava", request_of("llava", IMAGE, do_center_crop=False), "expected shape (3, 56, 56)"),
        # a placeholder id that stands in the text
        ("blip2", Request("<image>", {"image": [IMAGE]}), "placeholder id"),
        ("internvl2", Request("<image><IMG_CONTEXT>", {"image": [IMAGE]}), "placeholder id"),
    ],
)
def test_only_the_spec_refuses(name: str, request_: Request, message: str) -> None:
    hand, ours = (ask(side, request_) for side in sides(name))
    assert not isinstance(hand, str), "the hand-written class refuses it too"
    assert isinstance(ours, str)
    assert message in ours

"""Generated requests through the specs of the gallery and through the classes that they replace, side by side.

Where `test_gallery` replays stored outputs, here vLLM's own processors run: on the same checkpoints, with the same
versions of everything, so ids, ranges, masks and every value of every field are equal or the test fails. What only one
of the two takes is not generated; each such case has a test of its own below.
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
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image

from mmkit import MmkitError
from mmkit.testing import AudioSample, ImageSample, Request, Sample, TensorSample, VideoSample
from mmkit.vllm_api import Processor
from mmkit.vllm_api.harness import Caches
from tests.oracles import SYSTEMS, differences, hand_written, processor
from tests.profiles import scaled

EXAMPLES = scaled(25)
REQUESTS = 4
"""In one sequence, which shares its caches."""

HIDDEN = 64
WORDS = ["hello world", "what is it?", " ", "\n\n", "a", "<", ">", "é日", "Frame1: "]


@dataclass(frozen=True)
class Live:
    """What the requests of one system look like.

    Attributes:
        name: of the system.
        markers: per modality the placeholder of an item, as text, or as a template for its number; None where
            placeholders are inserted.
        taken: placeholder tokens, which no prompt may have beside its items.
        special: tokens to write between words.
        sizes: (width, height) of images at the edges of the system's geometry, or lengths of audio.
        kwargs: `mm_processor_kwargs` that it knows.
        arrays: its hand-written class takes arrays as images.
        embeds: the numbers of rows of precomputed embeddings; empty where it takes none.
        least: the fewest items in one request.
        limit: the most.
        alone: the most images in one request that become the same as each would alone.
        words: to write between items.
        metadata: its videos come with metadata, and have two frames at least.
        one_length: its audio is of one length in a sequence: the hand-written class pads to the longest of a call.
        prepared: makes another checkpoint of the stored one.
    """

    name: str
    markers: Mapping[str, str | None]
    taken: Sequence[str]
    special: Sequence[str]
    sizes: Sequence[Any]
    kwargs: Sequence[Mapping[str, Any]] = ()
    arrays: bool = True
    embeds: Sequence[int] = ()
    least: int = 0
    limit: int = 4
    alone: int = 4
    metadata: bool = False
    one_length: bool = False
    words: Sequence[str] = tuple(WORDS)
    prepared: Callable[[], tempfile.TemporaryDirectory[str]] | None = None

    @functools.cached_property
    def sides(self) -> tuple[Any, Any]:
        """The hand-written processor and the generated one."""
        checkpoint = self.prepared().name if self.prepared is not None else None
        theirs = hand_written(self.name, checkpoint, enable_mm_embeds=True)
        return theirs, processor(self.name, checkpoint, enable_mm_embeds=True)

    def encode(self, text: str) -> list[int]:
        return list(self.sides[0].info.get_tokenizer().encode(text, add_special_tokens=False))

    @functools.cached_property
    def pieces(self) -> list[list[int]]:
        """What a prompt of token ids consists of: every other id of the vocabulary, and words."""
        taken = {token for text in self.taken for token in self.encode(text)}
        size = self.sides[0].info.ctx.model_config.get_vocab_size()
        words = [self.encode(word) for word in (*self.words, *self.special)]
        return [*words, *([token] for token in range(size) if token not in taken)]


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


QWEN_PROMPTS: dict[str, Any] = {
    "markers": {"image": "<|image_pad|>", "video": "<|video_pad|>"},
    "taken": ["<|image_pad|>", "<|video_pad|>"],
    "special": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"],
}

LIVE = {
    live.name: live
    for live in (
        Live(
            "llava",
            markers={"image": "<image>"},
            taken=["<image>"],
            special=["<s>", "</s>", "<pad>"],
            sizes=multiples(56, 2),
            kwargs=[
                {"do_rescale": False},
                {"resample": 0, "text_kwargs": {"padding": False}},
                {"images_kwargs": {"do_normalize": False}, "do_normalize": True},
            ],
            embeds=[16],
        ),
        Live(
            "blip2",
            markers={"image": None},
            taken=["<image>"],
            special=["</s>", "<pad>"],
            sizes=multiples(56, 2),
            kwargs=[{"do_rescale": False}, {"do_normalize": False}, {"resample": 0}, {"image_mean": [0.5, 0.5, 0.5]}],
            embeds=[8],
            limit=1,
        ),
        Live(
            "molmo",
            markers={"image": None},
            taken=["<im_patch>"],
            special=["<|endoftext|>", "<|image|>", "<im_start>", "<im_end>", "<im_col>"],
            sizes=[*multiples(56), *((w + 56, h + 56) for w, h in multiples(56))],
            kwargs=[{"max_crops": n} for n in (1, 2, 3, 6)],
        ),
        Live(
            "deepseek_vl2",
            markers={"image": "<image>"},
            taken=["<image>"],
            special=["<|User|>", "<|Assistant|>", "<|grounding|>", "<｜end▁of▁sentence｜>"],
            sizes=multiples(64),
            kwargs=[{"normalize": False}, {"image_mean": [0.1, 0.2, 0.3]}],
            arrays=False,
            embeds=[1, 2, 16, 27],
            alone=2,
        ),
        Live(
            "internvl2",
            markers={"image": "<image>"},
            taken=["<IMG_CONTEXT>"],
            special=["<s>", "</s>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"],
            sizes=[*multiples(56), (5, 4), (50, 40), (70, 56), (4, 5), (140, 112), (112, 140)],
            kwargs=[
                {"max_dynamic_patch": 1},
                {"max_dynamic_patch": 6},
                {"min_dynamic_patch": 2},
                {"min_dynamic_patch": 3, "max_dynamic_patch": 5},
                {"dynamic_image_size": False},
                {"use_thumbnail": False},
                {"use_thumbnail": False, "max_dynamic_patch": 2},
            ],
            arrays=False,
            embeds=[1, 4, 20],
        ),
        Live(
            "qwen2_audio",
            markers={"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
            taken=["<|AUDIO|>"],
            special=["<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|audio_eos|>"],
            sizes=[480, 481, 1120, 1121, 47999, 48000, 48001],
            embeds=[1, 4, 20],
        ),
        Live(
            "ultravox",
            markers={"audio": "<|audio|>"},
            taken=["<|audio|>"],
            special=["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
            sizes=[1, 160, 320, 321, 2560, 2561, 47999, 48000, 48001, 112345],
            one_length=True,
        ),
        Live(
            "whisper",
            markers={"audio": None},
            taken=[],
            special=["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"],
            sizes=[1, 200, 400, 16000, 31999, 32000],
            least=1,
            limit=1,
        ),
        Live(
            "pixtral_hf",
            markers={"image": "[IMG]"},
            taken=["[IMG]"],
            special=["<s>", "</s>", "[INST]", "[/INST]", "[IMG_BREAK]", "[IMG_END]"],
            sizes=[*multiples(16, 8), *multiples(64)],
            kwargs=[{"do_normalize": False}, {"resample": 0}],
        ),
        Live(
            "qwen2_vl",
            **QWEN_PROMPTS,
            sizes=multiples(28, 8),
            kwargs=[{"max_pixels": 12544}, {"min_pixels": 12544, "max_pixels": 50176}, {"resample": 0}],
        ),
        Live(
            "gemma3",
            # newlines merge with those of an image; all others of a prompt do too, and images that meet share one
            markers={"image": "a\n<start_of_image>\n\nb"},
            taken=["<image_soft_token>", "<start_of_image>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"],
            special=["<end_of_image>", "<start_of_turn>", "<end_of_turn>"],
            sizes=multiples(32),
            kwargs=[
                {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16},
                {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 3},
                {"do_pan_and_scan": True},
            ],
            words=["hello world", "what is it?", " ", "a", "<", ">", "é日"],
        ),
        Live(
            "qwen3_vl",
            **QWEN_PROMPTS,
            sizes=multiples(32, 7),
            kwargs=[{"max_pixels": 16384}, {"min_pixels": 16384, "max_pixels": 50176}, {"resample": 0}],
            metadata=True,
        ),
        Live(
            "minicpmv",
            markers={"image": "(<image>./</image>)", "video": "(<video>./</video>)"},
            taken=["<unk>"],
            special=["<image_id>", "</image_id>", "<slice>", "</slice>", "<|im_start|>", "<|im_end|>"],
            sizes=multiples(56),
            arrays=False,
        ),
        Live(
            "idefics3",
            markers={"image": "<image>"},
            taken=["<image>"],
            special=["<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<end_of_utterance>"],
            sizes=multiples(56, 6),
            kwargs=[{"size": {"longest_edge": 112}}, {"do_image_splitting": False}, {"do_normalize": False}],
        ),
        Live(
            "llava_next",
            markers={"image": "<image>"},
            taken=["<image>"],
            special=["<s>", "</s>", "<pad>"],
            sizes=multiples(56),
            kwargs=[{"do_rescale": False}, {"do_normalize": False}, {"resample": 0}],
            embeds=[1, 16, 27],
        ),
        Live(
            "llava_onevision",
            markers={"image": "<image>", "video": "<video>"},
            taken=["<image>", "<video>"],
            special=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
            sizes=multiples(56, 16),
            kwargs=[{"do_rescale": False}, {"do_normalize": False}],
            embeds=[1, 16, 27],
        ),
        Live(
            "paligemma",
            markers={"image": None},
            taken=["<image>"],
            special=["<bos>", "<eos>", "<loc0000>", "\n"],
            sizes=multiples(56, 2),
            kwargs=[{"do_rescale": False}, {"do_normalize": False}, {"resample": 0}],
            least=1,
            limit=1,
        ),
        Live(
            "phi3v",
            markers={"image": "<|image_{}|>"},
            taken=["<|image|>"],
            special=["<s>", "</s>", "<|user|>", "<|end|>", "<|assistant|>"],
            sizes=multiples(336),
            kwargs=[{"num_crops": 1}, {"num_crops": 2}],
            arrays=False,
            embeds=[1, 16, 27],
            least=1,
        ),
    )
}
LIVE["internvl2-video"] = replace(
    LIVE["internvl2"],
    markers={"image": "<image>", "video": "<video>"},
    taken=["<IMG_CONTEXT>", "<|video_pad|>"],
    sizes=[*multiples(56, 2), (5, 4), (70, 56)],
    kwargs=[],
    prepared=with_video_token,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors wait for threads longer than they are worked on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture(ImageSample):
    """Noise in some mode of PIL's, or as an array."""

    mode: str = "RGB"

    def value(self) -> Any:
        if self.container == "numpy":
            return self.pixels()
        noise = np.random.RandomState(self.seed).randint(0, 256, (self.height, self.width, 4), dtype=np.uint8)
        return Image.fromarray(noise, "RGBA").convert(self.mode)


def rows_of(count: int, seed: int = 0) -> TensorSample:
    """Precomputed embeddings."""
    return TensorSample(seed, (count, HIDDEN))


def sizes(live: Live) -> st.SearchStrategy[tuple[int, int]]:
    side, long = st.integers(1, 100), st.integers(101, 250)
    extreme = st.tuples(st.integers(1, 12), long)
    return st.one_of(st.tuples(side, side), st.sampled_from(live.sizes), extreme, extreme.map(lambda s: s[::-1]))


@st.composite
def images(draw: Any, live: Live) -> Picture:
    width, height = draw(sizes(live))
    seed, mode = draw(st.integers(0, 3)), draw(st.sampled_from(["RGB", "RGB", "L", "RGBA", "array"]))
    # an array of 1 or 3 rows may have its channels in front
    if mode == "array" and live.arrays and height not in (1, 3):
        return Picture(seed, width, height, "numpy")
    return Picture(seed, width, height, mode="RGB" if mode == "array" else mode)


SIDES = st.integers(4, 60)  # of a video of three rows, processors take these for channels
VIDEOS = st.builds(VideoSample, st.integers(0, 3), st.integers(1, 4), SIDES, SIDES)


def samples(live: Live, name: str) -> st.SearchStrategy[Any]:
    """Items of a modality."""
    if name == "audio":
        return st.builds(AudioSample, st.integers(0, 3), st.one_of(st.sampled_from(live.sizes), st.integers(600, 9000)))
    if name == "video" and live.metadata:
        return st.builds(VideoSample, st.integers(0, 3), st.integers(2, 7), SIDES, SIDES, st.just(True))
    return images(live) if name == "image" else VIDEOS


@st.composite
def prompts(draw: Any, live: Live, kinds: list[str]) -> str | list[int]:
    """Words, special tokens and any ids, with a placeholder for each of the items, in any order and place."""
    numbers = {kind: itertools.count(1) for kind in live.markers}
    order = draw(st.permutations(kinds))
    marked = [text.format(next(numbers[kind])) for kind in order if (text := live.markers[kind]) is not None]
    if draw(st.booleans()):
        gap = st.lists(st.sampled_from([*live.words, *live.special]), max_size=3).map("".join)
        return draw(gap) + "".join(text + draw(gap) for text in marked)
    gap = st.lists(st.sampled_from(live.pieces), max_size=3).map(lambda parts: [i for ids in parts for i in ids])
    prompt = draw(gap)
    for text in marked:
        prompt = [*prompt, *live.encode(text), *draw(gap)]
    return prompt


@st.composite
def sequences(draw: Any, live: Live, embeds: bool) -> list[Request]:
    """Requests that share some of their items; with precomputed embeddings in half of them where that is asked."""
    pools: dict[str, list[Sample]] = {}
    for name in live.markers:
        pools[name] = draw(st.lists(samples(live, name), min_size=1, max_size=4))
        if live.one_length:
            pools[name] = [replace(sample, length=pools[name][0].length) for sample in pools[name]]
    requests = []
    for _ in range(REQUESTS):
        items = {
            name: draw(st.lists(st.sampled_from(pool), min_size=live.least, max_size=live.limit))
            for name, pool in pools.items()
        }
        first = next(iter(items))
        if len(items[first]) > live.alone:  # other images: hand-written classes confuse equal ones in their caches
            items[first] = [replace(item, seed=item.seed + 10) for item in items[first]]
        if embeds and items[first] and draw(st.booleans()):
            items[first] = [rows_of(draw(st.sampled_from(live.embeds)), seed) for seed in range(len(items[first]))]
        kwargs = draw(st.sampled_from([{}, {}, *live.kwargs]))
        prompt = draw(prompts(live, [name for name, some in items.items() for _ in some]))
        requests.append(Request(prompt, items, kwargs))
    return requests


# -- comparison --------------------------------------------------------------------------------------------------------

PAIR = "with sender and receiver"


class Side:
    """A processor with its caches: none, the processor's own, and the pair of API server and engine."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.refusals = MmkitError if isinstance(processor, Processor) else (ValueError, RuntimeError, AssertionError)
        self.caches = {
            "without cache": None,
            "with the processor's cache": Caches(processor, 0.1, pair=False),
            PAIR: Caches(processor, 0.1, pair=True),
        }

    def ask(self, request: Request, route: str = "without cache") -> Any:
        """The result, with the items as they reach the model; or why the request is refused."""
        cache, options = self.caches[route], {"hf_processor_mm_kwargs": dict(request.kwargs)}
        try:
            items = self.processor.info.parse_mm_data(request.data())
            result = self.processor(request.prompt, items, cache=cache and cache.sender, **options)
        except self.refusals as error:
            return f"{type(error).__name__}: {error}"
        if cache is None:
            return result
        items = {name: list(some) for name, some in result["mm_kwargs"].items() if some}
        return {**result, "mm_kwargs": cache.receive(items, result)}


def unlike(hand: Any, ours: Any, padded: Sequence[str] = ()) -> list[str]:
    """How the outcome of the generated processor differs from that of the hand-written one."""
    if isinstance(hand, str) and isinstance(ours, str):
        return []
    if isinstance(hand, str) or isinstance(ours, str):
        return [f"only one of the two takes it: {hand!s:.300} / {ours!s:.300}"]
    return differences(hand, ours, padded)


@pytest.mark.parametrize(
    ("live", "embeds"),
    [
        pytest.param(live, embeds, id=name + "-embeds" * embeds)
        for name, live in LIVE.items()
        for embeds in (False, True)[: 1 + bool(live.embeds)]
    ],
)
def test_as_the_hand_written_class(live: Live, embeds: bool) -> None:
    """In sequences of requests, without and with caches; most of them are taken."""
    outcomes = []

    @settings(max_examples=EXAMPLES)
    @given(sequences(live, embeds))
    def compare(requests: list[Request]) -> None:
        hand, ours = map(Side, live.sides)
        for request in requests:
            for route in hand.caches:
                outcomes.append(hand.ask(request, route))
                difference = unlike(outcomes[-1], ours.ask(request, route), SYSTEMS[live.name].padded)
                assert not difference, f"{route}, {request}\n{difference[0]}"

    compare()
    assert sum(isinstance(outcome, str) for outcome in outcomes) < len(outcomes) / 4


# -- where only one of the two is right --------------------------------------------------------------------------------

IMAGE = Picture(0, 60, 40)
AUDIO = AudioSample(0, 8000)


def outcomes(name: str, request: Request) -> tuple[Any, Any]:
    hand, ours = (Side(side).ask(request) for side in LIVE[name].sides)
    return hand, ours


SURPLUS = Request("a <image> <image>", {"image": [IMAGE]})
NOTHING_SENT = Request("a <image>", {})
OUT_OF_RANGE = Request([5, 100_000], {})
UNCROPPED = Request("<image>", {"image": [IMAGE]}, {"do_center_crop": False})
FEWER_ROWS = {"llava": rows_of(13), "blip2": rows_of(5)}


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        # L9: left in the prompt, where the model looks for its rows
        *((name, SURPLUS, "image: expected 1 placeholder") for name in ("llava", "deepseek_vl2", "internvl2")),
        # L13: a position for a row that nobody sent
        *((name, NOTHING_SENT, "expected one item per placeholder") for name in ("llava", "deepseek_vl2")),
        ("whisper", Request("a", {}), "expected one item per placeholder"),
        ("blip2", Request("<image>", {"image": [IMAGE]}), "placeholder id"),
        ("molmo", Request("<im_patch>", {"image": [IMAGE]}), "placeholder id"),
        ("internvl2", Request("<image><IMG_CONTEXT>", {"image": [IMAGE]}), "placeholder id"),
        # L13: would index the embedding table out of bounds
        *((name, OUT_OF_RANGE, "expected a token id from 0 to") for name in LIVE),
        # the hand-written class leaves the rest out
        ("whisper", Request("a", {"audio": [AudioSample(0, 32001)]}), "of at most 32000 samples"),
        # L1: the model makes another number of rows
        ("llava", Request("<image>", {"image": [FEWER_ROWS["llava"]]}), "embedding row(s), got 13"),
        ("blip2", Request("a", {"image": [FEWER_ROWS["blip2"]]}), "embedding row(s), got 5"),
        ("llava", UNCROPPED, "expected shape (3, 56, 56)"),
    ],
)
def test_only_the_spec_refuses(name: str, request_: Request, message: str) -> None:
    hand, ours = outcomes(name, request_)
    assert not isinstance(hand, str), "the hand-written class refuses it too"
    assert isinstance(ours, str)
    assert message in ours


@pytest.mark.parametrize("name", sorted(LIVE.keys() - {"whisper"}))  # whose prompt is the decoder's, without items
def test_a_prompt_that_is_expanded_already(name: str) -> None:
    """L10: the hand-written classes expand it again, or do not find the placeholder."""
    kind, marker = next(iter(LIVE[name].markers.items()))
    request = Request((marker or "a").format(1), {kind: [AUDIO if kind == "audio" else IMAGE]})
    once = outcomes(name, request)[1]
    hand, ours = outcomes(name, replace(request, prompt=once["prompt_token_ids"]))
    assert unlike(once, hand)
    assert not unlike(once, ours)


@pytest.mark.parametrize("name", ["llava", "deepseek_vl2", "internvl2"])
def test_a_refused_request_before_one_with_the_same_item(name: str) -> None:
    """L3: the hand-written class leaves the item in the sender's cache; the engine never gets it."""
    good = Request("<image>", {"image": [IMAGE]})
    hand, ours = map(Side, LIVE[name].sides)
    for side in (hand, ours):
        assert isinstance(side.ask(replace(good, prompt="a"), PAIR), str)
    with pytest.raises(Exception, match="not in the receiver"):
        hand.ask(good, PAIR)
    assert not unlike(hand.ask(good), ours.ask(good, PAIR))


@pytest.mark.parametrize(
    ("name", "width", "height"), [("deepseek_vl2", 60, 40), ("internvl2", 60, 40), ("blip2", 30, 3)]
)
def test_an_image_as_an_array(name: str, width: int, height: int) -> None:
    """The hand-written class hands it on to a processor that takes PIL images only, or takes three rows for the
    channels, which gives another image."""
    prompt = LIVE[name].markers["image"] or "a"
    expected, _ = outcomes(name, Request(prompt, {"image": [ImageSample(0, width, height)]}))
    hand, ours = outcomes(name, Request(prompt, {"image": [ImageSample(0, width, height, "numpy")]}))
    assert unlike(expected, hand)
    assert not unlike(expected, ours)


def hashes(processor: Any, *requests: Request) -> list[str]:
    return [Side(processor).ask(request)["mm_hashes"]["image"][0] for request in requests]


def test_equal_pixels_in_another_container() -> None:
    """L7: the hand-written class hashes the container too, and so misses its own cache."""
    requests = [Request("a", {"image": [ImageSample(0, 60, 40, container)]}) for container in ("pil", "numpy")]
    assert [len(set(hashes(side, *requests))) for side in LIVE["blip2"].sides] == [2, 1]


def test_deepseek_counts_with_the_processor_of_the_request() -> None:
    """L1: the hand-written class counts with the default options: the model makes more rows than there are places."""
    hand, ours = outcomes("deepseek_vl2", Request("<image>", {"image": [IMAGE]}, {"downsample_ratio": 1}))
    columns, rows = hand["mm_kwargs"]["image"][0]["images_spatial_crop"].data.tolist()
    side = 64 // 14
    places = [outcome["mm_placeholders"]["image"][0].length for outcome in (hand, ours)]
    assert places[0] < places[1] == side * (side + 1) + 1 + rows * side * (columns * side + 1)


def test_deepseek_hashes_what_an_image_becomes() -> None:
    """L7 and L3: of more than two images none is tiled, and the engine keeps encoder rows by hash. The hand-written
    class brings the untiled image into the engine's cache, and the next request for the image alone gets its one tile
    for the places of two."""
    image = replace(IMAGE, width=128, height=64)
    single, several = (Request("<image>" * n, {"image": [image] * n}) for n in (1, 3))
    tiles = []
    for one_side in LIVE["deepseek_vl2"].sides:
        side = Side(one_side)
        for request in (single, several, single):
            item = side.ask(request, PAIR)["mm_kwargs"]["image"][0]
        tiles.append(item["images_spatial_crop"].data.tolist())
    assert tiles == [[1, 1], [2, 1]]
    assert [len(set(hashes(one_side, single, several))) for one_side in LIVE["deepseek_vl2"].sides] == [1, 2]


def test_qwen2_vl_takes_embeddings_with_their_grids() -> None:
    """The rows of all images as one tensor."""
    grids = torch.tensor([[1, 4, 4], [1, 2, 6]])
    rows = rows_of(7).value()
    data = {"image": {"image_embeds": rows, "image_grid_thw": grids}}
    hand, ours = (
        made("<|image_pad|> and <|image_pad|>", made.info.parse_mm_data(data), hf_processor_mm_kwargs={})
        for made in LIVE["qwen2_vl"].sides
    )
    assert not differences(hand, ours)
    assert [len(item["image_embeds"].data) for item in ours["mm_kwargs"]["image"]] == [4, 3]


@pytest.mark.parametrize(("name", "theirs", "spec"), [("phi3v", [1], []), ("paligemma", [], [9])])
def test_an_empty_prompt_without_items(name: str, theirs: list[int], spec: list[int]) -> None:
    """vLLM asks no processor about it, so that it is for the spec alone to say what becomes of it."""
    assert [outcome["prompt_token_ids"] for outcome in outcomes(name, Request([], {}))] == [theirs, spec]


def test_internvl_with_videos_and_options() -> None:
    """The hand-written class hands the options of images on to its video processor, which takes none."""
    request = Request("<image>", {"image": [Picture(0, 112, 56)]}, {"use_thumbnail": False})
    hand, ours = map(Side, LIVE["internvl2-video"].sides)
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_thumbnail'"):
        hand.ask(request)
    assert not unlike(outcomes("internvl2", request)[0], ours.ask(request))

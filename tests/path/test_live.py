"""Generated requests through the specs of the gallery and through the classes that they replace, side by side.

Where `test_gallery` replays stored outputs, here vLLM's own processors run: on the same checkpoints, with the same
versions of everything, so ids, ranges, masks and every value of every field are equal or the test fails. What only one
of the two takes is not generated; each such case has a test of its own below, which shows what either class does.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image
from vllm.multimodal.cache import (
    LruKeyReplicatedReceiverCache,
    LruKeyReplicatedSenderCache,
    MultiModalProcessorOnlyCache,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec

from mmkit import MmkitError
from mmkit.vllm_api import Processor
from tests.oracles import SYSTEMS, hand_written, processor

RELATIVE = {"image_input_idx"}
"""Fields of positions that begin after those of the items processed in the same call, so that what a cache holds
decides them; the model uses their order alone. They are compared from the item's first one on.
"""

REQUESTS = 4
"""In one sequence, which shares its caches; the `ci` profile runs 300 sequences per system."""

HIDDEN = 64
WORDS = ["hello world", "what is it?", " ", "\n\n", "a", "<", ">", "é日", "Frame1: "]


@dataclass(frozen=True)
class Live:
    """What the requests of one system look like.

    Attributes:
        name: of the system.
        markers: per modality the placeholder of an item, as text; None where placeholders are inserted.
        taken: placeholder tokens, which no prompt may have beside its items.
        special: tokens to write between words.
        sizes: (width, height) of images at the edges of the system's geometry.
        kwargs: `mm_processor_kwargs` that it knows.
        arrays: its hand-written class takes arrays as images.
        embeds: the numbers of rows of precomputed embeddings; empty where it takes none.
        limit: the most items in one request.
        alone: the most images in one request that become the same as each would alone.
        prepare: makes a checkpoint of the stored one.
    """

    name: str
    markers: Mapping[str, str | None]
    taken: Sequence[str]
    special: Sequence[str]
    sizes: Sequence[tuple[int, int]]
    kwargs: Sequence[Mapping[str, Any]] = ()
    arrays: bool = True
    embeds: Sequence[int] = ()
    limit: int = 4
    alone: int = 4
    prepare: Callable[[Path], None] | None = None

    @functools.cached_property
    def sides(self) -> tuple[Any, Any]:
        """The hand-written processor and the generated one."""
        checkpoint = prepared(self.name, self.prepare)
        made = [make(self.name, checkpoint, enable_mm_embeds=True) for make in (hand_written, processor)]
        return made[0], made[1]

    def encode(self, text: str) -> list[int]:
        return list(self.sides[0].info.get_tokenizer().encode(text, add_special_tokens=False))

    @functools.cached_property
    def pieces(self) -> list[list[int]]:
        """What a prompt of token ids consists of: every other id of the vocabulary, and words."""
        taken = {token for text in self.taken for token in self.encode(text)}
        size = self.sides[0].info.ctx.model_config.get_vocab_size()
        words = [self.encode(word) for word in (*WORDS, *self.special)]
        return [*words, *([token] for token in range(size) if token not in taken)]


@functools.cache
def prepared(name: str, prepare: Callable[[Path], None] | None) -> str | None:
    """The folder of a system's checkpoint after some preparation; None for the stored one."""
    if prepare is None:
        return None
    holder = tempfile.TemporaryDirectory(prefix="mmkit-test-")  # removed when the interpreter exits
    _folders.append(holder)
    folder = Path(holder.name)
    shutil.copytree(SYSTEMS[name].checkpoint, folder, dirs_exist_ok=True)
    prepare(folder)
    return str(folder)


_folders: list[tempfile.TemporaryDirectory[str]] = []


def with_video_token(folder: Path) -> None:
    """InternVL takes videos where the tokenizer has a token for them, which the stored one lacks."""
    path = folder / "tokenizer.json"
    stored = json.loads(path.read_text())
    token = {"id": len(stored["model"]["vocab"]), "content": "<|video_pad|>", "special": True}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    stored["added_tokens"].append(token | flags)
    path.write_text(json.dumps(stored))


def multiples(side: int, most: int = 4) -> list[tuple[int, int]]:
    """Sizes of whole tiles, and one pixel beside them."""
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most]
    return [(side * x + d, side * y + e) for x, y in grids for d, e in ((0, 0), (1, 0), (0, -1))]


LIVE = {
    f"{live.name}-video" if "video" in live.markers else live.name: live
    for live in (
        Live(
            "llava",
            markers={"image": "<image>"},
            taken=["<image>"],
            special=["<s>", "</s>", "<pad>"],
            sizes=multiples(56, 2),
            kwargs=[{"do_rescale": False}, {"do_normalize": False}, {"resample": 0}],
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
            embeds=[1, 2, 16, 37],
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
            "internvl2",
            markers={"image": "<image>", "video": "<video>"},
            taken=["<IMG_CONTEXT>", "<|video_pad|>"],
            special=["<s>", "</s>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"],
            sizes=[*multiples(56, 2), (5, 4), (70, 56)],
            arrays=False,
            embeds=[1, 4, 20],
            prepare=with_video_token,
        ),
    )
    if live.name in SYSTEMS
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors wait for threads longer than they are worked on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """An image, a video or precomputed rows, as numbers: its content is noise of a seed."""

    kind: str
    size: tuple[int, int] = (0, 0)
    form: str = "RGB"
    length: int = 0  # frames or rows
    seed: int = 0


@functools.lru_cache(maxsize=64)
def content(item: Item) -> Any:
    """What an item stands for."""
    random = np.random.RandomState(item.seed)
    width, height = item.size
    match item.kind, item.form:
        case "embeds", _:
            return torch.from_numpy(random.randn(item.length, HIDDEN).astype(np.float32))
        case "video", _:
            return random.randint(0, 256, (item.length, height, width, 3), dtype=np.uint8)
    pixels = Image.fromarray(random.randint(0, 256, (height, width, 4), dtype=np.uint8), "RGBA")
    return np.array(pixels.convert("RGB")) if item.form == "array" else pixels.convert(item.form)


@dataclass(frozen=True)
class Request:
    """One request."""

    prompt: str | list[int]
    items: Mapping[str, list[Item]] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, made: Any, cache: Any = None) -> Any:
        """What a processor makes of it, by the call that tokenizes text."""
        data = {name: [content(item) for item in items] for name, items in self.items.items() if items}
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return made(prompt, made.info.parse_mm_data(data), hf_processor_mm_kwargs=dict(self.kwargs), cache=cache)


def sizes(live: Live) -> st.SearchStrategy[tuple[int, int]]:
    side, long = st.integers(1, 100), st.integers(101, 250)
    extreme = st.tuples(st.integers(1, 12), long)
    return st.one_of(st.tuples(side, side), st.sampled_from(live.sizes), extreme, extreme.map(lambda s: s[::-1]))


@st.composite
def images(draw: Any, live: Live) -> Item:
    size = draw(sizes(live))
    # an array of 1 or 3 rows may have its channels in front
    forms = ["RGB", "RGB", "L", "RGBA", *(["array"] if live.arrays and size[1] not in (1, 3) else [])]
    return Item("image", size, draw(st.sampled_from(forms)), seed=draw(st.integers(0, 3)))


VIDEOS = st.builds(
    Item,
    st.just("video"),
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    length=st.integers(1, 4),
    seed=st.integers(0, 3),
)


@st.composite
def prompts(draw: Any, live: Live, kinds: list[str]) -> str | list[int]:
    """Words, special tokens and any ids, with a placeholder for each of the items, in any order and place."""
    marked = [text for kind in draw(st.permutations(kinds)) if (text := live.markers[kind]) is not None]
    if draw(st.booleans()):
        gap = st.lists(st.sampled_from([*WORDS, *live.special]), max_size=3).map("".join)
        return draw(gap) + "".join(text + draw(gap) for text in marked)
    gap = st.lists(st.sampled_from(live.pieces), max_size=3).map(lambda parts: [i for ids in parts for i in ids])
    prompt = draw(gap)
    for text in marked:
        prompt = [*prompt, *live.encode(text), *draw(gap)]
    return prompt


@st.composite
def sequences(draw: Any, live: Live, embeds: bool = False) -> list[Request]:
    """Requests that share some of their items; with precomputed embeddings in half of them where that is asked."""
    pools: dict[str, list[Item]] = {}
    for name in live.markers:
        pools[name] = draw(st.lists(images(live) if name == "image" else VIDEOS, min_size=1, max_size=4))
    made = []
    for _ in range(REQUESTS):
        items = {name: draw(st.lists(st.sampled_from(pool), max_size=live.limit)) for name, pool in pools.items()}
        if len(items["image"]) > live.alone:  # other images: hand-written classes confuse equal ones in their caches
            items["image"] = [replace(item, seed=item.seed + 10) for item in items["image"]]
        if embeds and items["image"] and draw(st.booleans()):
            lengths = st.sampled_from(live.embeds)
            items["image"] = [Item("embeds", length=draw(lengths), seed=i) for i in range(len(items["image"]))]
        kwargs = draw(st.sampled_from([{}, {}, *live.kwargs]))
        prompt = draw(prompts(live, [name for name, some in items.items() for _ in some]))
        made.append(Request(prompt, items, kwargs))
    return made


# -- comparison --------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a request: prompt, ranges and the items as they reach the model, or why it was refused."""

    prompt: list[int] = field(default_factory=list)
    ranges: dict[str, list[tuple[int, int, list[bool]]]] = field(default_factory=dict)
    items: dict[str, list[Any]] = field(default_factory=dict)
    refused: str = ""


class Side:
    """A processor with its caches: none, the processor's own, and the pair of API server and engine."""

    def __init__(self, made: Any) -> None:
        config = made.info.ctx.model_config
        self.made, self.receiver = made, LruKeyReplicatedReceiverCache(config)
        ours = isinstance(made, Processor)
        self.refusals = MmkitError if ours else (ValueError, RuntimeError, AssertionError)
        self.caches = {
            "without cache": None,
            "with the processor's cache": MultiModalProcessorOnlyCache(config),
            "with sender and receiver": LruKeyReplicatedSenderCache(config),
        }

    def ask(self, request: Request, way: str) -> Outcome:
        try:
            result = request.ask(self.made, self.caches[way])
        except self.refusals as error:
            return Outcome(refused=f"{type(error).__name__}: {error}")
        ranges = {
            name: [(r.offset, r.length, [True] * r.length if r.is_embed is None else r.is_embed.tolist()) for r in rs]
            for name, rs in result["mm_placeholders"].items()
        }
        receiver = self.receiver if way == "with sender and receiver" else None
        return Outcome(list(result["prompt_token_ids"]), ranges, received(result, receiver))


def received(result: Any, receiver: Any = None) -> dict[str, list[Any]]:
    """The items that reach the model; through the engine's side of the cache if there is one."""
    items = {name: list(found) for name, found in result["mm_kwargs"].items() if found}
    if receiver is None:
        return items
    features = [
        MultiModalFeatureSpec(
            data=data,
            modality=name,
            identifier=result["mm_hashes"][name][i],
            mm_position=result["mm_placeholders"][name][i],
            mm_hash=result["mm_hashes"][name][i],
        )
        for name, found in items.items()
        for i, data in enumerate(found)
    ]
    order = sorted(features, key=lambda feature: feature.mm_position.offset)
    got = {id(f): g.data for f, g in zip(order, receiver.get_and_update_features(order), strict=True)}
    values = iter([got[id(feature)] for feature in features])
    return {name: [next(values) for _ in found] for name, found in items.items()}


def differences(hand: Outcome, ours: Outcome) -> Iterator[str]:
    """How the outcome of the generated processor differs from that of the hand-written one."""
    if hand.refused or ours.refused:
        if not (hand.refused and ours.refused):
            yield f"the hand-written class {hand.refused or 'takes it'}, the spec {ours.refused or 'takes it'}"
        return
    if hand.prompt != ours.prompt:
        yield f"prompt: {ours.prompt}, not {hand.prompt}"
    if hand.ranges != ours.ranges:
        yield f"placeholders: {ours.ranges}, not {hand.ranges}"
    if (wanted := {m: len(i) for m, i in hand.items.items()}) != (got := {m: len(i) for m, i in ours.items.items()}):
        yield f"items: {got}, not {wanted}"
        return
    for name in hand.items:
        for i, (expected, made) in enumerate(zip(hand.items[name], ours.items[name], strict=True)):
            if sorted(expected) != sorted(made):
                yield f"{name}[{i}]: fields {sorted(made)}, not {sorted(expected)}"
                continue
            for key in sorted(expected):
                relative = key in RELATIVE
                for text in unlike(expected[key], made[key], relative):
                    yield f"{name}[{i}].{key}: {text}"


def from_the_first(positions: torch.Tensor) -> torch.Tensor:
    """Positions relative to the least; negative ones stand for none and stay."""
    return torch.where(positions < 0, positions, positions - positions[positions >= 0].min())


def unlike(wanted: Any, got: Any, relative: bool) -> Iterator[str]:
    # `slices` and `batch_size` tell what was processed together: a cached item keeps those of its first request
    kinds = [(type(f).__name__, f.keep_on_cpu, getattr(f, "dim", None)) for f in (wanted.field, got.field)]
    if kinds[0] != kinds[1]:
        yield f"{kinds[1]}, not {kinds[0]}"
    a, b = wanted.data, got.data
    if type(a) is not type(b):
        yield f"{b!r:.80}, not {a!r:.80}"
        return
    if not isinstance(a, torch.Tensor):
        if a != b:
            yield f"{b!r}, not {a!r}"
        return
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        yield f"{b.dtype} {list(b.shape)}, not {a.dtype} {list(a.shape)}"
        return
    if relative:
        a, b = from_the_first(a), from_the_first(b)
    if not torch.equal(a, b):
        unequal = (a != b).nonzero()
        place = tuple(unequal[0].tolist())
        yield f"{len(unequal)} of {a.numel()} values, at {list(place)} {b[place].item()!r}, not {a[place].item()!r}"


def compared(live: Live, examples: int, embeds: bool = False) -> int:
    """How many generated requests became the same on both sides, without and with caches."""
    count = 0

    @settings(max_examples=examples)
    @given(sequences(live, embeds))
    def compare(requests: list[Request]) -> None:
        nonlocal count
        hand, ours = map(Side, live.sides)
        for request in requests:
            for way in hand.caches:
                found = next(differences(hand.ask(request, way), ours.ask(request, way)), None)
                assert found is None, f"{way}, {request}\n{found}"
            count += 1

    compare()
    return count


@pytest.mark.parametrize("live", LIVE.values(), ids=LIVE)
def test_as_the_hand_written_class(live: Live) -> None:
    examples = settings().max_examples
    assert compared(live, examples) >= REQUESTS * examples  # 1,200 requests in the `ci` profile


@pytest.mark.parametrize(
    "live",
    [pytest.param(live, id=name) for name, live in LIVE.items() if live.embeds],
)
def test_precomputed_embeddings(live: Live) -> None:
    plain = Request(live.markers["image"] or "a", {"image": [Item("embeds", length=live.embeds[0])]})
    hand, ours = (Side(made).ask(plain, "without cache") for made in live.sides)
    assert not [*differences(hand, ours)]
    examples = max(settings().max_examples // 4, 1)
    assert compared(live, examples, embeds=True) >= REQUESTS * examples


# -- where only one of the two is right --------------------------------------------------------------------------------

IMAGE = Item("image", (60, 40))


def outcomes(name: str, request: Request) -> tuple[Outcome, Outcome]:
    hand, ours = map(Side, LIVE[name].sides)
    return hand.ask(request, "without cache"), ours.ask(request, "without cache")


@pytest.mark.parametrize("name", [name for name in ("llava", "deepseek_vl2", "internvl2") if name in LIVE])
def test_a_placeholder_more_than_items(name: str) -> None:
    """L9: the hand-written class leaves it in the prompt; where it is a token, the model looks for its rows."""
    hand, ours = outcomes(name, Request("a <image> <image>", {"image": [IMAGE]}))
    assert len(hand.ranges["image"]) == 1
    left = LIVE[name].encode("<image>")
    assert hand.prompt[-len(left) :] == left
    assert re.match(r"^(NotFound|InputError): \w+\.image: expected 1 placeholder", ours.refused)


@pytest.mark.parametrize("name", [name for name in ("llava", "deepseek_vl2") if name in LIVE])
def test_a_placeholder_without_items(name: str) -> None:
    """L13: to the model it is a position for a row that nobody sent."""
    hand, ours = outcomes(name, Request("a <image>"))
    assert hand.prompt[-1] == LIVE[name].encode("<image>")[0]
    assert "expected one item per placeholder" in ours.refused


@pytest.mark.parametrize(
    ("name", "text"), [("blip2", "<image>"), ("molmo", "<im_patch>"), ("internvl2", "<image><IMG_CONTEXT>")]
)
def test_a_stray_placeholder_id(name: str, text: str) -> None:
    """L13: the same, where an image is inserted or stands for another text."""
    hand, ours = outcomes(name, Request(text, {"image": [IMAGE]}))
    (token,) = LIVE[name].encode(LIVE[name].taken[0])
    assert hand.prompt.count(token) == sum(hand.ranges["image"][0][2]) + 1
    assert "placeholder id" in ours.refused


@pytest.mark.parametrize("name", LIVE)
def test_an_id_outside_the_vocabulary(name: str) -> None:
    """L13: it would index the embedding table out of bounds; Molmo's rewriting of the prompt loses it."""
    hand, ours = outcomes(name, Request([5, 100_000]))
    assert (100_000 in hand.prompt) == (name != "molmo")
    assert "expected a token id from 0 to" in ours.refused


@pytest.mark.parametrize("name", LIVE)
def test_a_prompt_that_is_expanded_already(name: str) -> None:
    """L10: the hand-written classes expand it again, or do not find the placeholder."""
    request = Request(LIVE[name].markers["image"] or "a", {"image": [IMAGE]})
    once = outcomes(name, request)[1]
    hand, ours = outcomes(name, Request(once.prompt, request.items))
    assert hand.refused or len(hand.prompt) > len(once.prompt)
    assert (ours.prompt, ours.ranges) == (once.prompt, once.ranges)


@pytest.mark.parametrize("name", [name for name in ("llava", "deepseek_vl2", "internvl2") if name in LIVE])
def test_a_refused_request_before_one_with_the_same_item(name: str) -> None:
    """L3: the hand-written class leaves the item in the sender's cache; the engine never gets it."""
    way, good = "with sender and receiver", Request("<image>", {"image": [IMAGE]})
    hand, ours = map(Side, LIVE[name].sides)
    for side in (hand, ours):
        assert side.ask(Request("a", good.items), way).refused
    with pytest.raises(Exception, match="not in the receiver"):
        hand.ask(good, way)
    assert not [*differences(hand.ask(good, "without cache"), ours.ask(good, way))]


@pytest.mark.parametrize("name", ["deepseek_vl2", "internvl2"])
def test_an_image_as_an_array(name: str) -> None:
    """The hand-written class hands it on to a processor that takes PIL images only."""
    hand, ours = outcomes(name, Request("<image>", {"image": [Item("image", (60, 40), "array")]}))
    assert re.match("ValueError: Failed to apply", hand.refused)
    assert not [*differences(outcomes(name, Request("<image>", {"image": [IMAGE]}))[0], ours)]


def test_an_array_of_three_rows() -> None:
    """(3, width, 3): the hand-written class takes the rows for the channels, which gives another image."""
    size = (30, 3)
    hand, ours = outcomes("blip2", Request("a", {"image": [Item("image", size, "array")]}))
    expected = outcomes("blip2", Request("a", {"image": [Item("image", size)]}))[0]
    assert [*differences(expected, hand)]
    assert not [*differences(expected, ours)]


def test_equal_pixels_in_another_container() -> None:
    """L7: the hand-written class hashes the container too, and so misses its own cache."""
    requests = [Request("a", {"image": [Item("image", (60, 40), form)]}) for form in ("RGB", "array")]
    hashes = [[r.ask(made)["mm_hashes"]["image"][0] for r in requests] for made in LIVE["blip2"].sides]
    assert [len(set(found)) for found in hashes] == [2, 1]


@pytest.mark.parametrize("name", [name for name in ("llava", "blip2") if name in LIVE])
def test_embeddings_of_too_few_rows(name: str) -> None:
    """L1: BLIP-2's hand-written class places as many positions as ever, LLaVA's as many as there are rows."""
    rows = LIVE[name].embeds[0] - 3
    hand, ours = outcomes(name, Request(LIVE[name].markers["image"] or "a", {"image": [Item("embeds", length=rows)]}))
    assert (hand.ranges["image"][0][1] == rows) == (name == "llava")
    assert f"embedding row(s), got {rows}" in ours.refused


@pytest.mark.skipif("llava" not in LIVE, reason="its spec is not there")
def test_llava_with_an_image_that_its_tower_does_not_take() -> None:
    """L9: the hand-written class lets it through to the engine, where the model refuses it."""
    hand, ours = outcomes("llava", Request("<image>", {"image": [IMAGE]}, {"do_center_crop": False}))
    assert list(hand.items["image"][0]["pixel_values"].data.shape) == [3, 56, 84]
    assert "expected shape (3, 56, 56)" in ours.refused


def test_deepseek_counts_with_the_processor_of_the_request() -> None:
    """L1: the hand-written class counts with the default options: the model makes more rows than there are places."""
    hand, ours = outcomes("deepseek_vl2", Request("<image>", {"image": [IMAGE]}, {"downsample_ratio": 1}))
    columns, rows = hand.items["image"][0]["images_spatial_crop"].data.tolist()
    side = 64 // 14
    places = [outcome.ranges["image"][0][1] for outcome in (hand, ours)]
    assert places[0] < places[1] == side * (side + 1) + 1 + rows * side * (columns * side + 1)


def test_deepseek_hashes_what_an_image_becomes() -> None:
    """L7: of more than two images none is tiled, and the engine keeps encoder rows by hash."""
    image = Item("image", (128, 64))
    requests = [Request("<image>" * n, {"image": [image] * n}) for n in (1, 3)]
    results = [[request.ask(made) for request in requests] for made in LIVE["deepseek_vl2"].sides]
    for single, several in results:
        assert single["mm_placeholders"]["image"][0].length > several["mm_placeholders"]["image"][0].length
    same = [single["mm_hashes"]["image"][0] == several["mm_hashes"]["image"][0] for single, several in results]
    assert same == [True, False]


def test_deepseek_sends_an_image_alone_after_it_was_one_of_three() -> None:
    """L3: by the same hash the hand-written class brings the untiled image into the engine's cache; the next request
    for the image alone gets its one tile for the places of two.
    """
    image, way = Item("image", (128, 64)), "with sender and receiver"
    single, several = (Request("<image>" * n, {"image": [image] * n}) for n in (1, 3))
    tiles = []
    for side in map(Side, LIVE["deepseek_vl2"].sides):
        for request in (single, several):
            side.ask(request, way)
        (item,) = side.ask(single, way).items["image"]
        tiles.append(item["images_spatial_crop"].data.tolist())
    assert tiles == [[1, 1], [2, 1]]


def test_internvl_with_videos_and_options() -> None:
    """The hand-written class hands the options of images on to its video processor, which takes none."""
    request = Request("<image>", {"image": [Item("image", (112, 56))]}, {"use_thumbnail": False})
    hand, ours = LIVE["internvl2-video"].sides
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_thumbnail'"):
        request.ask(hand)
    expected = Side(LIVE["internvl2"].sides[0]).ask(request, "without cache")
    assert not [*differences(expected, Side(ours).ask(request, "without cache"))]

"""The two halves of vLLM's processor cache move together: what the front end counts on, the engine has.

Drawn sequences of requests go through a processor of ours, the step of vLLM's client that sends them, and vLLM's own
two halves. A request may be sent at once, later than others, twice, or never; it may be refused in each step.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

from mmkit import InputError, Modality, ModelSpec, Tensor, batched, between, derived, embed, item, tok
from mmkit import replace as replaces
from mmkit.testing import vllm_path
from mmkit.testing.differences import find_difference
from mmkit.vllm_api.exchange import adopt_features, wrap_add_request
from tests.path.plain import processor
from tests.path.planted.base import ID
from tests.profiles import scaled

CAPACITY = 600
"""Of both halves, in bytes."""

SIZES = (1, 4, 16, 30, 60, 200)
"""The numbers of values in the items, of four bytes each; the last item is larger than the cache."""

REFUSED = len(SIZES)
"""The number of an item that `process` refuses."""

NOT_FINITE = len(SIZES) + 1
"""The number of an item that the parser refuses."""


def make_values(number: int) -> torch.Tensor:
    """Return the item of a number."""
    if number == NOT_FINITE:
        return torch.full((2,), torch.nan)
    size = 2 if number == REFUSED else SIZES[number]
    return torch.full((size,), float(number))


def process_alone(items: Sequence[torch.Tensor], scope: Any) -> dict[str, Any]:
    if any(float(value[0]) == REFUSED for value in items):
        raise InputError("alone", "another item", "this one")
    return {"alone": [value + 1 for value in items]}


def process_among(items: Sequence[torch.Tensor], scope: Any) -> dict[str, Any]:
    """Each item beside the sum of the numbers of all."""
    total = sum(float(value[0]) for value in items)
    return {"among": [value + total for value in items]}


def make_modality(name: str, target: str, placeholder: str, **options: Any) -> Modality:
    return Modality(
        name,
        item=Tensor((between(1, 200),), largest=(200,)),
        layout=embed(tok[placeholder]),
        update=replaces(tok[target]),
        limit=4,
        **options,
    )


TARGETS = {"alone": "<frame>", "among": "<series>", "never": "<|series_1|>"}
SPEC = ModelSpec(
    "halves",
    make_modality("alone", "<frame>", "<pad>", fields={"alone": batched()}, process=process_alone),
    make_modality(
        "among", "<series>", "<row>", fields={"among": batched()}, process=process_among, cacheable=item.count == 1
    ),
    make_modality(
        "never",
        "<|series_1|>",
        "<|series_2|>",
        fields={"never": batched(), "index": derived(item.index, dtype="int64")},
        cacheable=False,
    ),
)


class Part(NamedTuple):
    """An item of a request: the number of its values, whether it has a name, and whether it comes by its name only."""

    modality: str
    number: int
    is_named: bool = False
    is_absent: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether a request with it may be refused."""
        return self.is_absent or self.number in (REFUSED, NOT_FINITE)


class Halves:
    """A processor with vLLM's two halves, and the requests that are on their way from one to the other."""

    def __init__(self) -> None:
        self.processor = get_processor()
        self.caches = vllm_path.Caches(self.processor, CAPACITY / 2**30, pair=True)
        self.waiting: list[tuple[tuple[Part, ...], Any]] = []

    def check(self) -> None:
        """Check that both halves have the same items, in the same order."""
        assert list(self.caches.sender._cache.order) == list(self.caches.receiver._cache.order)

    def render(self, parts: Sequence[Part], *, has_targets: bool = True) -> Any:
        """Return a request as vLLM's renderer makes it; None where it is refused."""
        data: dict[str, list[Any]] = {}
        names: dict[str, list[str | None]] = {}
        for part in parts:
            value = None if part.is_absent else make_values(part.number)
            data.setdefault(part.modality, []).append(value)
            name = f"{part.modality} {part.number}" if part.is_named or part.is_absent else None
            names.setdefault(part.modality, []).append(name)
        prompt = [ID[TARGETS[part.modality]] for part in parts] if has_targets else []
        try:
            return vllm_path.render(self.processor, prompt, data, {}, self.caches.sender, names)
        except InputError:
            if has_targets:
                assert any(part.is_wrong for part in parts)
            return None

    def send(self, parts: tuple[Part, ...], rendered: Any, times: int, *, is_async: bool) -> None:
        """Hand a request to the engine, and compare what it gets with the request without a cache."""
        expected = run_without_cache(parts)
        outcome = vllm_path.collect_outcome(rendered)
        features = vllm_path.sort_by_position(outcome.features)
        for _ in range(times):
            request = SimpleNamespace(mm_features=adopt_features(features, self.caches.sender))
            try:
                self.receive(request, is_async=is_async)
            except vllm_path.CacheMiss as miss:
                # evicted since, and nobody has its values any more
                assert any(part.is_absent for part in parts)
                for item_hash in miss.mm_hashes:
                    self.caches.sender.invalidate(item_hash)
                return
            fields: dict[str, list[Any]] = {}
            for feature in request.mm_features:
                item_fields = vllm_path.unpack_fields(feature.modality, feature.data)
                fields.setdefault(feature.modality, []).append(item_fields)
            assert find_difference(expected.fields, fields) is None
            assert (outcome.ids, outcome.ranges) == (expected.ids, expected.ranges)

    def receive(self, request: Any, *, is_async: bool) -> None:
        """Pass a request through vLLM's client to the engine's half, which takes requests in the order in which they
        are sent."""

        def add_request(client: Any, request: Any) -> None:
            self.caches.receiver.get_and_update_features(request.mm_features)

        async def add_request_async(client: Any, request: Any) -> None:
            add_request(client, request)

        if is_async:
            asyncio.run(wrap_add_request(add_request_async)(None, request))
        else:
            wrap_add_request(add_request)(None, request)

    def receive_foreign(self, number: int) -> None:
        """Hand the engine an item whose fields are not mmkit's, such as prompt embeddings."""
        rendered = vllm_path.render(self.processor, [ID["<frame>"]], FRAME, {}, None)
        data = MultiModalKwargsItem(vllm_path.collect_outcome(rendered).items["alone"][0].data)
        feature = MultiModalFeatureSpec(data, "alone", f"foreign {number}", PlaceholderRange(0, 1))
        request = SimpleNamespace(mm_features=adopt_features([feature], self.caches.sender))
        self.receive(request, is_async=False)

    def step(self, kind: str, parts: tuple[Part, ...], number: int) -> None:
        """Take one step of a sequence."""
        is_async = bool(number % 2)
        match kind:
            case "foreign":
                self.receive_foreign(number)
            case "reset":
                self.caches.sender.clear_cache()
                self.caches.receiver.clear_cache()
            case "misplaced":
                assert self.render(parts, has_targets=False) is None
            case "length":  # a window of a session; a client that leaves
                self.render(parts)
            case "wait":
                rendered = self.render(parts)
                if rendered:
                    self.waiting.append((parts, rendered))
            case "send waiting" if self.waiting:
                parts, rendered = self.waiting.pop(number % len(self.waiting))
                self.send(parts, rendered, times=1, is_async=is_async)
            case "send" | "send twice":
                rendered = self.render(parts)
                if rendered:
                    self.send(parts, rendered, times=2 if kind == "send twice" else 1, is_async=is_async)
        self.check()


FRAME = {"alone": [make_values(1)]}


@functools.cache
def get_processor() -> Any:
    return processor(SPEC)


@functools.cache
def run_without_cache(parts: tuple[Part, ...]) -> vllm_path.Outcome:
    data: dict[str, list[Any]] = {}
    for part in parts:
        data.setdefault(part.modality, []).append(make_values(part.number))
    return vllm_path.run(get_processor(), [ID[TARGETS[part.modality]] for part in parts], data)


KINDS = ["send"] * 6 + ["wait"] * 2 + ["send waiting"] * 2 + ["send twice", "length", "misplaced", "foreign", "reset"]
NUMBERS = list(range(len(SIZES))) * 5 + [REFUSED, NOT_FINITE]
PARTS = st.builds(
    Part,
    modality=st.sampled_from(list(TARGETS)),
    number=st.sampled_from(NUMBERS),
    is_named=st.booleans(),
    is_absent=st.sampled_from([False] * 5 + [True]),
)
REQUESTS = st.lists(PARTS, min_size=1, max_size=3).map(tuple)
STEPS = st.tuples(st.sampled_from(KINDS), REQUESTS, st.integers(0, 3))


@pytest.mark.skipif(vllm_path.CacheMiss is None, reason="before 0.28 the engine's half asserts")
@settings(max_examples=scaled(60))
@given(st.lists(STEPS, min_size=8, max_size=30))
def test_the_front_end_counts_on_what_the_engine_has(sequence: list[Any]) -> None:
    halves = Halves()
    for kind, parts, number in sequence:
        halves.step(kind, parts, number)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_item_that_leaves_the_cache_while_its_request_waits_is_processed_again(is_async: bool) -> None:
    halves = Halves()
    small = (Part("alone", 0),)
    large = (Part("alone", 4), Part("alone", 3), Part("alone", 4, is_named=True))
    halves.step("send", small, 0)
    halves.step("wait", small, 0)
    halves.step("send", large, 0)
    halves.step("send waiting", small, int(is_async))
    assert len(halves.caches.receiver._cache.order) == 3


def test_items_that_depend_on_each_other_are_processed_together() -> None:
    """Also where the cache still has one of them."""
    halves = Halves()
    two_items = (Part("among", 4), Part("among", 3))
    halves.step("send", two_items, 0)
    halves.step("send", (Part("alone", 4),), 0)
    halves.step("send", (Part("alone", 2),), 0)
    hashes = vllm_path.collect_outcome(halves.render(two_items)).hashes["among"]
    assert halves.caches.sender.is_cached(hashes) == [False, True]
    halves.step("send", two_items, 0)


def test_an_item_that_may_not_be_kept_has_a_hash_that_nobody_finds_again() -> None:
    parts = (Part("never", 0),)
    (first,) = run_without_cache.__wrapped__(parts).hashes["never"]
    (second,) = run_without_cache.__wrapped__(parts).hashes["never"]
    assert first != second

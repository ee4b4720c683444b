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

REFUSED, NOT_FINITE = len(SIZES), len(SIZES) + 1
"""Items that `process` refuses, and that the parser does."""


def values_of(number: int) -> torch.Tensor:
    if number == NOT_FINITE:
        return torch.full((2,), torch.nan)
    return torch.full((SIZES[number] if number < len(SIZES) else 2,), float(number))


def alone(items: Sequence[torch.Tensor], scope: Any) -> dict[str, Any]:
    if any(float(value[0]) == REFUSED for value in items):
        raise InputError("alone", "another item", "this one")
    return {"alone": [value + 1 for value in items]}


def among(items: Sequence[torch.Tensor], scope: Any) -> dict[str, Any]:
    """Each item beside the sum of the numbers of all."""
    total = sum(float(value[0]) for value in items)
    return {"among": [value + total for value in items]}


def modality(name: str, target: str, placeholder: str, **options: Any) -> Modality:
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
    modality("alone", "<frame>", "<pad>", fields={"alone": batched()}, process=alone),
    modality("among", "<series>", "<row>", fields={"among": batched()}, process=among, cacheable=item.count == 1),
    modality(
        "never",
        "<|series_1|>",
        "<|series_2|>",
        fields={"never": batched(), "index": derived(item.index, dtype="int64")},
        cacheable=False,
    ),
)


class Part(NamedTuple):
    """An item of a request: the number of its values, whether it has a name, and whether it comes by its name alone."""

    modality: str
    number: int
    is_named: bool = False
    is_absent: bool = False


class Halves:
    """A processor with vLLM's two halves, and the requests that are on their way from one to the other."""

    def __init__(self) -> None:
        self.processor = instance()
        self.caches = vllm_path.Caches(self.processor, CAPACITY / 2**30, pair=True)
        self.waiting: list[tuple[tuple[Part, ...], Any]] = []

    def check(self) -> None:
        """Both halves have the same items, in the same order."""
        orders = [list(half._cache.order) for half in (self.caches.sender, self.caches.receiver)]
        assert orders[0] == orders[1]

    def rendered(self, parts: Sequence[Part], *, has_targets: bool = True) -> Any:
        """A request as vLLM's renderer makes it; None where it is refused."""
        data: dict[str, list[Any]] = {}
        names: dict[str, list[str | None]] = {}
        for part in parts:
            value = None if part.is_absent else values_of(part.number)
            data.setdefault(part.modality, []).append(value)
            name = f"{part.modality} {part.number}" if part.is_named or part.is_absent else None
            names.setdefault(part.modality, []).append(name)
        prompt = [ID[TARGETS[part.modality]] for part in parts] if has_targets else []
        try:
            return vllm_path.render(self.processor, prompt, data, {}, self.caches.sender, names)
        except InputError:
            is_right = has_targets and all(part.number < len(SIZES) and not part.is_absent for part in parts)
            assert not is_right
            return None

    def sent(self, parts: tuple[Part, ...], rendered: Any, times: int, *, is_async: bool) -> None:
        """Hand a request to the engine, and compare what it gets with the request without a cache."""
        expected = without_cache(parts)
        outcome = vllm_path.read_outcome(rendered)
        features = vllm_path.sort_by_position(outcome.features)
        for _ in range(times):
            request = SimpleNamespace(mm_features=adopt_features(features, self.caches.sender))
            try:
                self.received(request, is_async=is_async)
            except vllm_path.CacheMiss as miss:
                # evicted since, and nobody has its values any more
                assert any(part.is_absent for part in parts)
                for item_hash in miss.mm_hashes:
                    self.caches.sender.invalidate(item_hash)
                return
            places: dict[str, list[Any]] = {name: [] for name in outcome.features}
            for feature in request.mm_features:
                places[feature.modality].append(vllm_path.read_fields(feature.modality, feature.data))
            assert find_difference(expected.fields, places) is None
            assert (outcome.ids, outcome.ranges) == (expected.ids, expected.ranges)

    def received(self, request: Any, *, is_async: bool) -> None:
        """vLLM's client and the engine's half, which takes requests in the order in which they are sent."""

        def add_request(client: Any, request: Any) -> None:
            self.caches.receiver.get_and_update_features(request.mm_features)

        async def add_request_async(client: Any, request: Any) -> None:
            add_request(client, request)

        if is_async:
            asyncio.run(wrap_add_request(add_request_async)(None, request))
        else:
            wrap_add_request(add_request)(None, request)

    def step(self, kind: str, parts: tuple[Part, ...], number: int) -> None:
        """One step of a sequence."""
        match kind:
            case "foreign":  # such as prompt embeddings, which vLLM makes fields of
                fields = vllm_path.read_outcome(vllm_path.render(self.processor, [ID["<frame>"]], FRAME, {}, None))
                data = MultiModalKwargsItem(fields.items["alone"][0].data)
                feature = MultiModalFeatureSpec(data, "alone", f"foreign {number}", PlaceholderRange(0, 1))
                self.received(
                    SimpleNamespace(mm_features=adopt_features([feature], self.caches.sender)), is_async=False
                )
            case "reset":
                self.caches.sender.clear_cache()
                self.caches.receiver.clear_cache()
            case "misplaced":
                assert self.rendered(parts, has_targets=False) is None
            case "length":  # a window of a session; a client that leaves
                self.rendered(parts)
            case "wait":
                if rendered := self.rendered(parts):
                    self.waiting.append((parts, rendered))
            case "send waiting" if self.waiting:
                self.sent(*self.waiting.pop(number % len(self.waiting)), times=1, is_async=bool(number % 2))
            case "send" | "send twice":
                if rendered := self.rendered(parts):
                    self.sent(parts, rendered, 1 + (kind == "send twice"), is_async=bool(number % 2))
        self.check()


FRAME = {"alone": [values_of(1)]}


@functools.cache
def instance() -> Any:
    return processor(SPEC)


@functools.cache
def without_cache(parts: tuple[Part, ...]) -> vllm_path.Outcome:
    data: dict[str, list[Any]] = {}
    for part in parts:
        data.setdefault(part.modality, []).append(values_of(part.number))
    return vllm_path.run(instance(), [ID[TARGETS[part.modality]] for part in parts], data)


KINDS = (
    *["send"] * 6,
    *["send twice", "wait", "wait", "send waiting", "send waiting", "length", "misplaced", "foreign", "reset"],
)
numbers = st.sampled_from([*range(len(SIZES))] * 5 + [REFUSED, NOT_FINITE])
requests = st.lists(
    st.builds(Part, st.sampled_from([*TARGETS]), numbers, st.booleans(), st.sampled_from([False] * 5 + [True])),
    min_size=1,
    max_size=3,
).map(tuple)
steps = st.tuples(st.sampled_from(KINDS), requests, st.integers(0, 3))


@pytest.mark.skipif(vllm_path.CacheMiss is None, reason="before 0.28 the engine's half asserts")
@settings(max_examples=scaled(60))
@given(st.lists(steps, min_size=8, max_size=30))
def test_the_front_end_counts_on_what_the_engine_has(sequence: list[Any]) -> None:
    halves = Halves()
    for step in sequence:
        halves.step(*step)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_item_that_leaves_the_cache_while_its_request_waits_is_processed_again(is_async: bool) -> None:
    halves, small, large = Halves(), (Part("alone", 0),), (Part("alone", 4), Part("alone", 3), Part("alone", 4, True))
    for step in [("send", small, 0), ("wait", small, 0), ("send", large, 0), ("send waiting", small, int(is_async))]:
        halves.step(*step)
    (order,) = [halves.caches.receiver._cache.order]
    assert len(order) == 3


def test_items_that_depend_on_each_other_are_processed_together() -> None:
    """Also where the cache still has one of them."""
    halves, two = Halves(), (Part("among", 4), Part("among", 3))
    for parts in (two, (Part("alone", 4),), (Part("alone", 2),)):
        halves.step("send", parts, 0)
    hashes = vllm_path.read_outcome(halves.rendered(two)).hashes["among"]
    assert halves.caches.sender.is_cached(hashes) == [False, True]
    halves.step("send", two, 0)


def test_an_item_that_may_not_be_kept_has_a_hash_that_nobody_finds_again() -> None:
    hashes = [without_cache.__wrapped__((Part("never", 0),)).hashes["never"][0] for _ in range(2)]
    assert hashes[0] != hashes[1]

"""Rendered requests that were damaged on their way from one host to another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange

from mmkit import InputError, SpecError, Tensor, batched, between, derived, embed, fields, tok
from mmkit.bound.placeholders import rows_field
from mmkit.testing import vllm_path
from mmkit.testing.differences import differences
from tests.path.plain import ONES, ids, plain, processor, run
from tests.path.planted import BASES, HIDDEN
from tests.profiles import scaled

Draw = Callable[[Any], Any]
Change = Callable[[Draw, dict[str, Any], str, int], Any]
"""Changes a request in place, at an item of a modality."""

OTHERS = st.sampled_from([torch.float64, torch.float16, torch.int64, torch.int32, torch.bool])
NOT_FINITE = st.sampled_from([torch.nan, torch.inf, -torch.inf])
NO_IDS = st.sampled_from([-1, 2**31, 2**63, 1.5, "a", None])


def in_a_field(change: Callable[[Draw, torch.Tensor], Any]) -> Change:
    """Another value of one field."""

    def changed(draw: Draw, request: dict[str, Any], name: str, i: int) -> None:
        fields = dict(request["mm_kwargs"][name][i])
        key = draw(st.sampled_from(sorted(fields)))
        fields[key] = replace(fields[key], data=change(draw, fields[key].data))
        request["mm_kwargs"][name][i] = MultiModalKwargsItem(fields)

    return changed


def another_dtype(draw: Draw, part: torch.Tensor) -> torch.Tensor:
    return part.to(draw(OTHERS.filter(lambda dtype: dtype != part.dtype)))


def another_shape(draw: Draw, part: torch.Tensor) -> torch.Tensor:
    shorter = [part.narrow(dim, 0, size) for dim, most in enumerate(part.shape) for size in range(most)]
    longer = [part[None].expand(2, *part.shape), part[None], part[..., None], part.flatten()[None]]
    others = st.sampled_from(longer) | st.sampled_from(shorter or longer)
    return draw(others.filter(lambda other: other.shape != part.shape))


def not_finite(draw: Draw, part: torch.Tensor) -> torch.Tensor:
    assume(part.is_floating_point())
    part = part.clone()
    part.view(-1)[draw(st.integers(0, part.numel() - 1))] = draw(NOT_FINITE)
    return part


def other_names(draw: Draw, request: dict[str, Any], name: str, i: int) -> None:
    fields = dict(request["mm_kwargs"][name][i])
    key = draw(st.sampled_from(sorted(fields)))
    element = fields[key] if draw(st.booleans()) else fields.pop(key)
    if draw(st.booleans()) or key in fields:
        fields[draw(st.sampled_from(["x", f"{name}_embeds", key.upper()]))] = element
    request["mm_kwargs"][name][i] = MultiModalKwargsItem(fields)


def another_range(draw: Draw, request: dict[str, Any], name: str, i: int) -> None:
    ranges = request["mm_placeholders"][name]
    place = ranges[i]
    moved = place.offset + draw(st.integers(-3, 3) | st.sampled_from([-(2**31), 2**31]))
    length = place.length + draw(st.integers(-3, 3))
    every = [one for places in request["mm_placeholders"].values() for one in places]
    ranges[i] = draw(st.sampled_from([PlaceholderRange(moved, length), *every, None, (moved, length)]))


def another_mask(draw: Draw, request: dict[str, Any], name: str, i: int) -> None:
    place = request["mm_placeholders"][name][i]
    length = place.length + draw(st.sampled_from([0, 0, -1, 1]))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    request["mm_placeholders"][name][i] = PlaceholderRange(place.offset, place.length, mask)


def other_counts(draw: Draw, request: dict[str, Any], name: str, i: int) -> None:
    part = request[draw(st.sampled_from(["mm_kwargs", "mm_placeholders"]))]
    match draw(st.sampled_from(["one fewer", "one twice", "none", "no list", "another modality"])):
        case "one fewer":
            del part[name][i]
        case "one twice":
            part[name].append(part[name][i])
        case "none":
            del part[name]
        case "no list":
            part[name] = draw(st.sampled_from([None, 7, {}, [None] * len(part[name])]))
        case _:
            part["x"] = part.pop(name)


def other_ids(draw: Draw, request: dict[str, Any], name: str, i: int) -> None:
    """Inside of the layout, or before it; any id elsewhere is another prompt, and as good."""
    ids, place = request["prompt_token_ids"], request["mm_placeholders"][name][i]
    at = place.offset + draw(st.integers(0, place.length - 1))
    match draw(st.sampled_from(["another", "no id", "removed", "before", "cut off"])):
        case "another":
            ids[at] = draw(st.integers(0, 31).filter(lambda token: token != ids[at]))
        case "no id":
            ids[draw(st.integers(0, len(ids) - 1))] = draw(NO_IDS)
        case "removed":
            del ids[at]
        case "before":
            ids.insert(at, draw(st.integers(0, 31)))
        case _:
            del ids[at:]


def two_swapped(draw: Draw, request: dict[str, Any], name: str, i: int) -> None:
    part = request[draw(st.sampled_from(["mm_kwargs", "mm_placeholders"]))][name]
    assume(len(part) > 1)
    j = (i + 1) % len(part)
    part[i], part[j] = part[j], part[i]


DAMAGE: dict[str, Change] = {
    "another dtype": in_a_field(another_dtype),
    "another shape": in_a_field(another_shape),
    "not finite": in_a_field(not_finite),
    "no tensor": in_a_field(lambda draw, part: draw(st.sampled_from([None, "a", 1, part.tolist(), [part]]))),
    "other names": other_names,
    "another range": another_range,
    "another mask": another_mask,
    "other counts": other_counts,
    "other ids": other_ids,
    "two swapped": two_swapped,
}


def _stated(name: str, item: Any) -> Any:
    """Without the number of rows, which is counted again, whatever is sent."""
    return MultiModalKwargsItem({key: element for key, element in item.items() if key != rows_field(name)})


def test_damaged_requests_are_refused_or_harmless() -> None:
    """In one sentence about the spec. Harmless is what leaves ids, ranges and fields as they were."""
    subjects = [BASES["mixed"](), BASES["robot"]()]
    seen: Counter[tuple[str, str]] = Counter()

    @settings(max_examples=scaled(600))
    @given(st.data())
    def check(data: Any) -> None:
        subject = data.draw(st.sampled_from(subjects))
        drawn = data.draw(subject.requests())
        body = vllm_path.sent(subject.processor, drawn.prompt, drawn.data(), drawn.kwargs)
        here = vllm_path.admitted(subject.processor, vllm_path.received(body))
        request = vllm_path.received(body)
        request["mm_kwargs"] = {
            name: [_stated(name, item) for item in items] for name, items in request["mm_kwargs"].items()
        }
        name = data.draw(st.sampled_from(sorted(request["mm_kwargs"])))
        i = data.draw(st.integers(0, len(request["mm_kwargs"][name]) - 1))
        kind = data.draw(st.sampled_from(sorted(DAMAGE)))
        DAMAGE[kind](data.draw, request, name, i)
        sent = request["mm_kwargs"]
        refusal = ""
        try:
            there = vllm_path.admitted(subject.processor, request)
        except InputError as error:
            refusal = str(error)
        seen[kind, "refused" if refusal else "harmless"] += 1
        if refusal:
            assert re.fullmatch(rf"{subject.plan.spec.name}\..+: expected .+, got .+\.", refusal)
            return
        assert (there.ids, there.ranges) == (here.ids, here.ranges)
        if kind == "two swapped":  # of equal layouts: the same as if they were sent so
            swapped = {name: [{key: e.data for key, e in item.items()} for item in sent[name]] for name in sent}
            assert differences(swapped, there.fields) is None
        else:
            assert differences(here.fields, there.fields) is None

    check()
    assert seen.total() >= 300
    assert {kind for kind, outcome in seen if outcome == "refused"} == set(DAMAGE)
    harmless = {kind for kind, outcome in seen if outcome == "harmless"}
    assert harmless <= {"another range", "another mask", "other ids", "two swapped"}


# -- one damage, one sentence ------------------------------------------------------------------------------------------

HEIGHT = fields.frames.shape[0]
VARIABLE: dict[str, Any] = {
    "item": Tensor(shape=(between(1, 4), 3)),
    "layout": tok["<open>"] + embed(tok["<pad>"]) * HEIGHT,
    "fields": {"frames": batched(shape=(between(1, 4), 3)), "rows": derived(HEIGHT, dtype="int64")},
    "process": lambda items, scope: {"frames": items},
}
TWO = torch.tensor(2)
HERE = "[0]: expected a placeholder of 3 ids at 1, 2 of them embed(), got PlaceholderRange(offset="

FIELDS: list[tuple[str, Any, Any]] = [
    ("frames[0], frames: expected what the spec says, got item 0: expected shape (1..4, 3) per ", ONES[:, :2], TWO),
    ("frames[0], frames: expected dtype torch.float32, got torch.float64.", ONES.double(), TWO),
    ("frames[0], frames: expected finite values, got NaN or an infinity.", ONES * torch.inf, TWO),
    ("frames[0], frames: expected a Tensor, got a list.", [1.0], TWO),
    ("frames[0], frames: expected a plain tensor, got a torch.sparse_coo tensor on cpu.", ONES.to_sparse(), TWO),
    ("frames[0], rows: expected a plain tensor, got a torch.strided tensor on meta.", ONES, TWO.to("meta")),
    ("frames[0], rows: expected 2, as the spec derives it, got tensor(3).", ONES, TWO + 1),
    ("prompt: expected the layouts of its items, got others, or one too many.", torch.ones(3, 3), TWO + 1),
]
"""What is said of an item of these two fields."""
PARTS: list[tuple[str, dict[str, Any]]] = [
    ("frames: expected a placeholder for each of 1 items, got 0.", {"mm_placeholders": {}}),
    (f"frames{HERE}-4, length=3, is_embed=None).", {"mm_placeholders": {"frames": [PlaceholderRange(-4, 3)]}}),
    (f"frames{HERE}1, length=2, is_embed=None).", {"mm_placeholders": {"frames": [PlaceholderRange(1, 2)]}}),
    (
        "frames: expected fewer items, got 4. At most 3 ",
        {"mm_kwargs": {"frames": [None] * 4}, "mm_placeholders": {"frames": [None] * 4}},
    ),
    ("mm_kwargs: expected lists by modality, got int.", {"mm_kwargs": 7}),
    ("mm_kwargs: expected raw items, got processed fields.", {"prompt_token_ids": None}),
    ("frames[0]: expected processed fields, got NoneType.", {"mm_kwargs": {"frames": [None]}}),
    ("frames[0]: expected the fields ['frames', 'rows'], got ['x'].", {"mm_kwargs": {"frames": [{"x": None}]}}),
]
"""What is said of other parts of a request."""


def item(**values: Any) -> Any:
    """A request's fields of one item."""
    return {"mm_kwargs": {"frames": [{name: SimpleNamespace(data=value) for name, value in values.items()}]}}


SENTENCES = [*PARTS, *((sentence, item(frames=frames, rows=rows)) for sentence, frames, rows in FIELDS)]


@pytest.mark.parametrize(("sentence", "changes"), SENTENCES, ids=[sentence for sentence, _ in SENTENCES])
def test_sentences(sentence: str, changes: dict[str, Any]) -> None:
    instance = processor(plain(**VARIABLE))
    request = vllm_path.received(vllm_path.sent(instance, ids("a <frame>"), {"frames": ONES}))
    with pytest.raises(InputError) as refused:
        vllm_path.admitted(instance, {**request, **changes})
    assert str(refused.value).startswith(f"plain.{sentence}")


def test_embeddings_from_elsewhere_need_to_be_enabled() -> None:
    instance = processor(plain(embeds=True))
    request = vllm_path.received(vllm_path.sent(instance, ids("<frame>"), {"frames": ONES}))
    with pytest.raises(
        InputError, match=r"^plain\.frames\[0\]: .* got frames_embeds\. Start vLLM with --enable-mm-emb"
    ):
        vllm_path.admitted(instance, request | item(frames_embeds=torch.ones(2, HIDDEN)))


def test_a_grid_that_is_not_that_of_the_rows_reaches_no_engine() -> None:
    """Neither from here nor from elsewhere."""
    data = {"frames": ONES}
    fitting, wrong = (processor(plain(**VARIABLE, positions=(1, HEIGHT, width))) for width in (1, HEIGHT))
    body = vllm_path.sent(fitting, ids("<frame>"), data)
    vllm_path.admitted(fitting, vllm_path.received(body))
    grid = r"plain\.frames, positions: layout: expected embed\(\) positions for a grid of \(1, 2, 2\), got"
    with pytest.raises(SpecError, match=grid):
        run(wrong, "<frame>", data)
    with pytest.raises(InputError, match=rf"^plain\.frames\[0\]: expected what the spec says, got {grid}"):
        vllm_path.admitted(wrong, vllm_path.received(body))


@pytest.mark.parametrize("cached", [True, False])
def test_items_without_positions(cached: bool) -> None:
    """As in vLLM's own Terratorch: an empty range at the start of a prompt of one id, whatever the caller wrote."""
    instance = processor(plain(layout=None, update=None, tokens=0, limit=1))
    caches = vllm_path.Caches(instance, 0.01, pair=False) if cached else None
    for words in ("a b", "<frame>", "a", ""):
        outcome = run(instance, words, {"frames": ONES}, caches=caches)
        assert (outcome.ids, outcome.ranges) == ([0], {"frames": [(0, 0, ())]})
    assert vllm_path.outcome(instance.get_dummy_mm_inputs({"frames": 1})).ranges == outcome.ranges
    request = vllm_path.received(vllm_path.sent(instance, [], {"frames": ONES}))
    assert differences(vllm_path.admitted(instance, request).fields, outcome.fields) is None
    with pytest.raises(InputError, match=r"^plain\.prompt: expected \[0\], as the spec rewrites it, got \[0, 0\]\."):
        vllm_path.admitted(instance, {**request, "prompt_token_ids": [0, 0]})

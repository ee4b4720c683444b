"""Requests in vLLM's processing path that no law draws: what is refused there, processing by parts that the spec
names, and hashes and names of items.

Placement, ranges, containers, caches and round trips hold of every random spec (test_random_specs.py), of every spec of
the gallery (test_gallery.py) and of the correct bases (test_planted_bugs.py); what a plan refuses is in tests/unit.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.parse import parse_mm_uuids
from vllm.v1.engine.input_processor import InputProcessor

from mmkit import (
    InputError,
    ModelSpec,
    SpecError,
    Tensor,
    batched,
    between,
    derived,
    embed,
    ending_with,
    fields,
    flat,
    hf,
    insert,
    item,
    kwargs,
    literal,
    proc,
    replace,
    tok,
    where,
)
from mmkit.plan.bind import plan_for_options
from mmkit.plan.placement import ItemLayout
from mmkit.testing import vllm_path
from mmkit.testing.differences import find_difference
from mmkit.vllm_api import admission, patches
from mmkit.vllm_api.pipeline import Request
from tests.path.plain import ONES, ids, plain, processor, run
from tests.path.planted.base import HIDDEN, MIXED, series

FRAME = {"frames": ONES}
ROWS = torch.ones(2, HIDDEN)


def caches(instance: Any, capacity: float = 0.01, pair: bool = False) -> vllm_path.Caches:
    return vllm_path.Caches(instance, capacity, pair=pair)


# -- what is refused -------------------------------------------------------------------------------------------------


class Padded:
    """A processor that pads to the longest item, adds a dimension for the batch, and takes no large values."""

    def __call__(self, frames: Any, scale: int = 1, return_tensors: str = "pt") -> dict[str, Any]:
        if max(float(value.max()) for value in frames) > 9:
            raise OverflowError("too large")
        padded = torch.nn.utils.rnn.pad_sequence([scale * value for value in frames], batch_first=True)
        return {"padded": padded[None], "lengths": torch.tensor([[len(value)] for value in frames])}


def incomplete(items: Any = (), return_tensors: str = "pt") -> Any:
    raise KeyError("a table that is missing")


def picky(items: Any, scope: Any) -> Any:
    if float(items[0].sum()) > 7:
        raise AssertionError("too much")
    return {"frames": items}


PADDED = plain(
    item=Tensor((between(1, 6), 3), bound=10),
    layout=embed(tok["<pad>"]) * fields.lengths[0],
    fields={
        "padded": batched(hidden=True),
        "lengths": batched(hidden=True, dtype="int64"),
        "frames": flat(fields.lengths[0], value=fields.padded[0]),
    },
    process=hf(lambda s: Padded(), one_by_one=True, kwargs={"scale": 2}),
)
AS_TEXT = plain(
    series(update=insert(at="start")),
    update=[replace(literal(tok["<frame>"], tok["a"])), replace(tok["<frame>"])],
)
NONE, SERIES = {"frames": [None]}, {"series": torch.ones(1, 2)}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("frames[0]: expected a string in multi_modal_uuids, got int 5.", dict(uuids={"frames": [5]})),
    *(
        (
            "frames[0]: expected a (2, 3) float32 tensor, got None, and no such item in the cache. Send the ",
            dict(data=NONE, uuids=uuids),
        )
        for uuids in (None, {"frames": ["n"]})
    ),
    # vLLM's own search in the text would find both targets at the one place
    (
        "frames: expected 2 targets '<frame> a' in the prompt for 2 items, got 1. ",
        dict(spec=AS_TEXT, words="<frame> a", data={"frames": [ONES] * 2} | SERIES),
    ),
    (
        "frames: expected items that the Hugging Face processor takes, got OverflowError: too large.",
        dict(spec=PADDED, data={"frames": 9.5 * ONES}),
    ),
    (
        "frames, mm_processor_kwargs: expected no scale, which the spec fixes, got 3.",
        dict(spec=PADDED, kwargs={"scale": 3}),
    ),
    (
        " mm_processor_kwargs: plain.frames, layout: kwargs.get('rows', 2): expected a repetition count, ",
        dict(spec=plain(layout=embed(tok["<pad>"]) * kwargs.get("rows", 2)), kwargs={"rows": "x"}),
    ),
]
"""What a sentence begins with, after the name of the spec; the spec, if not the plain one, and parts of the request."""


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("sentence", "request_"), REFUSED, ids=[sentence for sentence, _ in REFUSED])
def test_refused(sentence: str, request_: dict[str, Any], cached: bool) -> None:
    asked = {"spec": plain(), "words": "<frame>", "data": FRAME, **request_}
    instance = processor(asked.pop("spec"), enable_mm_embeds=True)
    with pytest.raises(InputError, match=f"^plain.{re.escape(sentence)}"):
        run(instance, **asked, caches=caches(instance) if cached else None)


def test_embeddings_need_to_be_enabled() -> None:
    with pytest.raises(ValueError, match="--enable-mm-embeds"):
        run(processor(plain(embeds=True)), "<frame>", {"frames": {"frames_embeds": ROWS}})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            plain(process=hf(lambda s: incomplete, inputs={"frames": "items"})),
            "the largest item .* got KeyError: ",
        ),
        (plain(layout=embed(tok["<pad>"]) * proc.size), "proc: expected a checkpoint with a Hugging Face processor, "),
        (
            plain(process=hf(lambda s: Padded(), kwargs={"scael": 2})),
            "the largest item .* keyword argument .scael",
        ),
    ],
)
def test_a_processor_that_never_works_is_a_mistake_of_the_spec(spec: ModelSpec, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        run(processor(spec), "<frame>", FRAME)


@pytest.mark.parametrize("cached", [True, False])
def test_an_exception_of_a_process_names_it(cached: bool) -> None:
    """Also an AssertionError, as vLLM's cache raises it; the items of other requests stay in the cache."""
    instance = processor(plain(process=picky))
    known = caches(instance) if cached else None
    first = run(instance, "<frame>", FRAME, caches=known)
    with pytest.raises(SpecError, match=r"^plain\.frames, process: .* got AssertionError: too much\.$"):
        run(instance, "<frame>", {"frames": 2 * ONES}, caches=known)
    assert known is None or known.sender.is_cached(first.hashes["frames"]) == [True]


# -- prompts that reach no processor ---------------------------------------------------------------------------------


def test_prompts_are_guarded_and_rewritten_with_items_and_without() -> None:
    """Before vLLM's renderer takes them apart, and by the processor, which sees those with items."""
    instance = processor(plain(prompt=ending_with(tok["</s>"])))
    after = partial(
        patches.guard_process_tokens(lambda renderer, prompt: prompt), SimpleNamespace(mm_processor=instance)
    )
    assert after({"prompt_token_ids": ids("a b")})["prompt_token_ids"] == ids("a b </s>")
    for odd in (ids("<frame>"), ids("a <pad>"), [32], [-1], [2.0]):
        with pytest.raises(InputError, match=r"^plain\."):
            after({"prompt_token_ids": odd})
    assert run(instance, "a <frame>", FRAME).ids == ids("a <pad> <pad> </s>")
    assert run(instance, "a", {"frames": []}).ids == ids("a </s>")


OUTSIDE = "prompt[0]: expected a token id from 0 to 31, got "
RENDERED = {"type": "multimodal", "prompt_token_ids": [1], "mm_kwargs": {"frames": [{"frames": None}]}}
PLACE, OUTSIDE_OF_IT = PlaceholderRange(0, 1), PlaceholderRange(1, 1)


@pytest.mark.parametrize(
    ("prompt", "trusts", "sentence"),
    [
        ({"type": "token", "prompt_token_ids": [2**31]}, False, f"{OUTSIDE}2147483648."),
        ({"prompt_token_ids": [2**31]}, False, f"{OUTSIDE}2147483648."),
        ({"encoder_prompt": {"type": "token", "prompt_token_ids": [-1]}}, False, f"{OUTSIDE}-1."),
        ({"encoder_prompt": {"type": "token", "prompt_token_ids": [1]}}, False, "multi_modal_data: expected at least "),
        (RENDERED, False, "mm_kwargs: expected raw items, got processed fields. Send the items themselves, or start "),
        ({**RENDERED, "prompt_token_ids": [2**31]}, True, f"{OUTSIDE}2147483648."),
        ({**RENDERED, "mm_kwargs": {"x": []}}, True, "multi_modal_data: expected modalities among ['frames'], got 'x'"),
        (RENDERED, True, "mm_kwargs.frames: expected fields among ['frames', 'mmkit_frames_rows'], and a range in "),
        (
            {**RENDERED, "mm_kwargs": {"frames": [{"x": 0}]}, "mm_placeholders": {"frames": [PLACE]}},
            True,
            "mm_kwargs.frames: expected fields among ['frames', 'mmkit_frames_rows'], and a range in ",
        ),
        ({**RENDERED, "mm_placeholders": {"frames": [OUTSIDE_OF_IT]}}, True, "mm_kwargs.frames: expected "),
    ],
)
def test_the_check_before_the_engine(prompt: dict[str, Any], trusts: bool, sentence: str) -> None:
    """What vLLM's routes for rendered requests bring passes neither the processor nor the tokenization."""
    config = SimpleNamespace(additional_config={admission.TRUST: trusts})
    holder = SimpleNamespace(renderer=SimpleNamespace(mm_processor=processor(plain())), vllm_config=config)
    with pytest.raises(admission.Refused, match=f"^plain.{re.escape(sentence)}"):
        InputProcessor.process_inputs(holder, "request", prompt, None, None)


def test_fields_of_another_host_that_the_server_trusts() -> None:
    """They pass as they are, those that the engine has as none."""
    plan = processor(plain()).plan
    for sent_fields in ({"frames": torch.zeros(2)}, None):
        sent = {"mm_kwargs": {"frames": [sent_fields]}, "mm_placeholders": {"frames": [PLACE]}}
        admission.admit(plan, {**RENDERED, **sent}, trusts=True)
    sent = {"mm_kwargs": {"frames": [{"frames": torch.full((2,), torch.nan)}]}, "mm_placeholders": {"frames": [PLACE]}}
    with pytest.raises(
        admission.Refused, match=r"^plain.mm_kwargs.frames\[0\].frames: expected finite values, got NaN"
    ):
        admission.admit(plan, {**RENDERED, **sent}, trusts=True)


# -- processing ------------------------------------------------------------------------------------------------------


def test_options_of_the_server_and_of_the_request() -> None:
    """The request's come first; the plans for them are not kept without end."""
    instance = processor(MIXED, mm_processor_kwargs={"repeat": 3, "scale": 5})
    both = run(instance, "<series>", SERIES, kwargs={"scale": 2})
    assert both.ranges["series"] == [(0, 5, (False, True, True, True, False))]
    assert both.fields["series"][0]["values"].tolist() == [[2.0, 2.0]] * 3
    more = run(instance, "<series>", {"series": torch.ones(4, 2)}, kwargs={"repeat": 4})
    assert sum(more.mask("series", 0)) == 16, "more rows than any item has by the server's options"
    for rows in range(200):
        plan_for_options(instance.plan, {"repeat": rows}, None)
    assert len(instance.plan.plans_for_options._new) < 50


def test_two_threads_at_once_each_give_what_they_give_alone() -> None:
    """Both are in the middle of their processing before either goes on."""
    meeting = Barrier(1)

    def met(items: Any, scope: Any) -> dict[str, Any]:
        meeting.wait(30)
        return {"frames": torch.stack(list(items))}

    instance = processor(plain(process=met))
    requests = [("A <frame>", FRAME), ("<frame> <frame> B B", {"frames": [2 * ONES, 3 * ONES]})]
    alone = [run(instance, *request) for request in requests]
    meeting = Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        together = [*threads.map(lambda request: run(instance, *request), requests)]
    assert [find_difference(*pair) for pair in zip(alone, together, strict=True)] == [None, None]


def test_hidden_fields_of_items_that_are_processed_one_by_one() -> None:
    """They reach no model; each item is as it would be alone."""
    lengths = (2, 5, 2)
    got = run(processor(PADDED), "<frame> <frame> <frame>", {"frames": [torch.ones(n, 3) for n in lengths]})
    assert [length for _, length, _ in got.ranges["frames"]] == [*lengths]
    assert [(list(one), one["frames"].tolist()) for one in got.fields["frames"]] == [
        (["frames"], [[2.0] * 3] * n) for n in lengths
    ]


# -- hashes, caches, names -------------------------------------------------------------------------------------------


def test_embeddings_are_other_items_than_tensors_of_the_same_values() -> None:
    """In the cache and on the way to the model."""
    instance = processor(plain(item=Tensor((2, HIDDEN)), embeds=True), enable_mm_embeds=True)
    known = caches(instance)
    for _ in range(2):
        raw, embeds = (
            run(instance, "<frame>", {"frames": sent}, caches=known) for sent in (ROWS, {"frames_embeds": ROWS})
        )
        assert raw.hashes != embeds.hashes
        assert [list(one.fields["frames"][0]) for one in (raw, embeds)] == [["frames"], ["frames_embeds"]]


def test_items_that_depend_on_their_number_and_order() -> None:
    """They are processed anew, and have a hash for each number: vLLM's engine keeps encoder outputs by hash."""
    rows = where(item.count <= 2, 4, 1 + item.index)
    spec = plain(
        layout=embed(tok["<pad>"]) * rows,
        fields={"frames": batched(), "rows": derived(rows, dtype="int64")},
        process=lambda items, scope: {"frames": items},
        cacheable=item.count <= 2,
    )
    instance = processor(spec)
    pair, only, known = caches(instance, pair=True), caches(instance), {}
    for order in ([1], [1, 2], [1, 2, 3], [2, 1], [2, 3, 1], [1]):
        sent = "<frame> " * len(order), {"frames": [number * ONES for number in order]}
        expected = run(instance, *sent)
        lengths = [1, 2, 3] if len(order) == 3 else [4] * len(order)
        assert [length for _, length, _ in expected.ranges["frames"]] == lengths
        assert all(find_difference(expected, run(instance, *sent, caches=one)) is None for one in (only, pair))
        known[len(order)] = expected.hashes["frames"][order.index(1)]
    assert known[1] == known[2] != known[3]


def test_the_hashes_of_items_that_are_applied_twice_are_those_of_their_options() -> None:
    """Also where the same parsed items are processed again."""
    instance = processor(plain())
    items = vllm_path.parse_items(instance, {"frames": ONES})
    hashes = []
    for options in ({}, {"scale": 2}, {}):
        request = Request(ids("<frame>"), items.make_items({}), options=options)
        hashes += instance.render(request)["mm_hashes"]["frames"]
    assert hashes[0] == hashes[2] != hashes[1]


def test_the_senders_cache_holds_no_tensors() -> None:
    """It is there so that the API server does not keep what the engine keeps already."""
    instance = processor(MIXED)
    pair = caches(instance, pair=True)
    outcome = run(instance, "<series>", SERIES, caches=pair)
    fields, cached = pair.sender.get_and_update_item(None, outcome.hashes["series"][0])
    assert fields is None
    assert {type(value) for value in vars(cached).values()} == {ItemLayout, int}


def test_an_item_that_only_a_uuid_names() -> None:
    """It is the first one of that uuid in a request of the same tenant, of the same modality and options."""
    instance = processor(MIXED)
    known = caches(instance)

    def of(salt: str | None, name: str) -> Any:
        prompt = {"multi_modal_uuids": {"frames": name}} | ({} if salt is None else {"cache_salt": salt})
        return parse_mm_uuids(patches.salt_uuids(prompt)["multi_modal_uuids"])

    def ask(value: Any, salt: str | None, name: str = "x", **options: Any) -> Any:
        data = {"frames": [value]}
        return run(instance, "<frame>", data, caches=known, uuids=of(salt, name), kwargs=options)

    def unknown(salt: str | None, name: str = "x", **options: Any) -> None:
        with pytest.raises(ValueError, match=r"data is not provided|no such item"):
            ask(None, salt, name, **options)

    tenants = {"alice": ONES, "bob": ONES + 1, None: ONES + 2}
    for salt, value in tenants.items():
        unknown(salt)
        ask(value, salt)
    for salt, value in tenants.items():
        assert torch.equal(ask(None, salt).fields["frames"][0]["frames"], value)
    (own,) = ask(ONES, "alice").hashes["frames"]
    for guess in (own, *of("alice", "x")["frames"], '["alice", "x"]', "x-alice"):
        unknown("bob", guess)
    unknown("alice", scale=2)
    with pytest.raises(InputError, match=r"^mixed\.series\[0\]: .* no such item in the cache"):
        run(instance, "<series>", {"series": [None]}, caches=known, uuids={"series": of(None, "x")["frames"]})

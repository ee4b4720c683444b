"""Requests in vLLM's processing path that no law draws.

They are about what is refused there, processing by parts that the spec names, and hashes and names of items.

Placement, ranges, containers, caches and round trips hold of every random spec (test_random_specs.py), of every spec of
the gallery (test_gallery.py) and of the correct bases (test_planted_bugs.py); what a plan refuses is in tests/unit.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
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
    MmkitError,
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
    later,
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
from mmkit.vllm_api.errors import Refused, ServerFault
from mmkit.vllm_api.pipeline import ProcessorRequest
from mmkit.vllm_api.server_request import SERVER_REQUEST, ServerRequest
from tests.path.plain import ONES, ids, plain, processor, run
from tests.path.planted.base import HIDDEN, MIXED, series

FRAME = {"frames": ONES}
SERIES = {"series": torch.ones(1, 2)}
MISSING_FRAME = {"frames": [None]}
ROWS = torch.ones(2, HIDDEN)


def make_caches(instance: Any, *, pair: bool = False) -> vllm_path.Caches:
    return vllm_path.Caches(instance, 0.01, pair=pair)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["cached", "uncached"])
def is_cached(request: pytest.FixtureRequest) -> bool:
    """Whether requests go through a processor cache."""
    return request.param == "cached"


def check_refusal(
    sentence: str, is_cached: bool, spec: ModelSpec, words: str = "<frame>", data: Any = FRAME, **options: Any
) -> None:
    """Run a request, and check the sentence with which it is refused.

    Args:
        sentence: what the message begins with, after the name of the spec.
        is_cached: the request goes through a processor cache.
        spec: the spec, named plain.
        words: the prompt.
        data: the items.
        options: of `run`.
    """
    instance = processor(spec, enable_mm_embeds=True)
    caches = make_caches(instance) if is_cached else None
    with pytest.raises(InputError, match=f"^plain.{re.escape(sentence)}"):
        run(instance, words, data, caches=caches, **options)


def test_a_uuid_that_is_no_string_is_refused(is_cached: bool) -> None:
    sentence = "frames[0]: expected a string in multi_modal_uuids, got int 5."
    check_refusal(sentence, is_cached, plain(), uuids={"frames": [5]})


NO_SUCH_ITEM = "frames[0]: expected a (2, 3) float32 tensor, got None, and no such item in the cache. Send the "


def test_an_item_that_is_none_is_refused(is_cached: bool) -> None:
    check_refusal(NO_SUCH_ITEM, is_cached, plain(), data=MISSING_FRAME)


def test_an_unknown_uuid_without_an_item_is_refused(is_cached: bool) -> None:
    check_refusal(NO_SUCH_ITEM, is_cached, plain(), data=MISSING_FRAME, uuids={"frames": ["n"]})


def test_two_targets_at_one_place_are_one(is_cached: bool) -> None:
    """vLLM's own search in the text would find both targets at the one place."""
    spec = plain(
        series(update=insert(at="start")),
        update=[replace(literal(tok["<frame>"], tok["a"])), replace(tok["<frame>"])],
    )
    sentence = "frames: expected 2 targets '<frame> a' in the prompt for 2 items, got 1. "
    check_refusal(sentence, is_cached, spec, "<frame> a", {"frames": [ONES, ONES], **SERIES})


class Padded:
    """A Hugging Face processor that pads to the longest item, adds a dimension for the batch, and takes no large
    values."""

    def __call__(self, frames: Any, scale: int = 1, return_tensors: str = "pt") -> dict[str, Any]:
        for value in frames:
            if float(value.max()) > 9:
                raise OverflowError("too large")
        scaled = [scale * value for value in frames]
        padded = torch.nn.utils.rnn.pad_sequence(scaled, batch_first=True)
        lengths = torch.tensor([[len(value)] for value in frames])
        return {"padded": padded[None], "lengths": lengths}


def make_padded(scope: Any) -> Padded:
    return Padded()


PADDED = plain(
    item=Tensor((between(1, 6), 3), bound=10),
    layout=embed(tok["<pad>"]) * fields.lengths[0],
    fields={
        "padded": batched(hidden=True),
        "lengths": batched(hidden=True, dtype="int64"),
        "frames": flat(fields.lengths[0], value=fields.padded[0]),
    },
    process=hf(make_padded, one_by_one=True, kwargs={"scale": 2}),
)


def test_items_that_the_hugging_face_processor_does_not_take_are_refused(is_cached: bool) -> None:
    sentence = "frames: expected items that the Hugging Face processor takes, got OverflowError: too large."
    check_refusal(sentence, is_cached, PADDED, data={"frames": 9.5 * ONES})


def test_an_option_that_the_spec_fixes_is_refused(is_cached: bool) -> None:
    sentence = "frames, mm_processor_kwargs: expected no scale, which the spec fixes, got 3."
    check_refusal(sentence, is_cached, PADDED, kwargs={"scale": 3})


def test_an_option_of_a_wrong_type_is_refused(is_cached: bool) -> None:
    spec = plain(layout=embed(tok["<pad>"]) * kwargs.get("rows", 2))
    sentence = " mm_processor_kwargs: plain.frames, layout: kwargs.get('rows', 2): expected a repetition count, "
    check_refusal(sentence, is_cached, spec, kwargs={"rows": "x"})


def test_embeddings_need_to_be_enabled() -> None:
    with pytest.raises(ValueError, match="--enable-mm-embeds"):
        run(processor(plain(embeds=True)), "<frame>", {"frames": {"frames_embeds": ROWS}})


# -- mistakes of the spec --------------------------------------------------------------------------------------------


def check_spec_error(spec: ModelSpec, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        run(processor(spec), "<frame>", FRAME)


def test_a_processor_that_never_works_is_a_mistake_of_the_spec() -> None:
    def process(items: Any = (), return_tensors: str = "pt") -> Any:
        raise KeyError("a table that is missing")

    def make_process(scope: Any) -> Any:
        return process

    spec = plain(process=hf(make_process, inputs={"frames": "items"}))
    check_spec_error(spec, "the largest item .* got KeyError: ")


def test_a_missing_hugging_face_processor_is_a_mistake_of_the_spec() -> None:
    spec = plain(layout=embed(tok["<pad>"]) * proc.size)
    check_spec_error(spec, "proc: expected a checkpoint with a Hugging Face processor, ")


def test_an_option_that_the_processor_lacks_is_a_mistake_of_the_spec() -> None:
    spec = plain(process=hf(make_padded, kwargs={"scael": 2}))
    check_spec_error(spec, "the largest item .* keyword argument .scael")


def test_an_exception_of_a_process_names_it(is_cached: bool) -> None:
    """It may be an AssertionError, as vLLM's cache raises it; the items of other requests stay in the cache."""

    def process(items: Any, scope: Any) -> Any:
        if float(items[0].sum()) > 7:
            raise AssertionError("too much")
        return {"frames": items}

    instance = processor(plain(process=process))
    caches = make_caches(instance) if is_cached else None
    first = run(instance, "<frame>", FRAME, caches=caches)
    with pytest.raises(SpecError, match=r"^plain\.frames, process: .* got AssertionError: too much\.$"):
        run(instance, "<frame>", {"frames": 2 * ONES}, caches=caches)
    if caches is not None:
        assert caches.sender.is_cached(first.hashes["frames"]) == [True]


# -- prompts that reach no processor ---------------------------------------------------------------------------------


def render_ids(instance: Any, token_ids: list[Any]) -> list[int]:
    """Return the ids of a prompt without items, as vLLM's renderer with mmkit's guard gives them."""

    def process_tokens(renderer: Any, prompt: Any) -> Any:
        return prompt

    guarded = patches.wrap_process_tokens(process_tokens)
    renderer = SimpleNamespace(mm_processor=instance)
    return guarded(renderer, {"prompt_token_ids": token_ids})["prompt_token_ids"]


WITH_ENDING = plain(prompt=ending_with(tok["</s>"]))


def test_a_prompt_without_items_is_rewritten_by_the_renderer() -> None:
    assert render_ids(processor(WITH_ENDING), ids("a b")) == ids("a b </s>")


@pytest.mark.parametrize("wrong", [ids("<frame>"), ids("a <pad>"), [32], [-1], [2.0]])
def test_a_prompt_without_items_is_guarded_by_the_renderer(wrong: list[Any]) -> None:
    with pytest.raises(InputError, match=r"^plain\."):
        render_ids(processor(WITH_ENDING), wrong)


@pytest.mark.parametrize(
    ("raised", "in_server", "offline"),
    [
        (MmkitError("plain, render processes", "one that answers", "one that ended"), ServerFault, MmkitError),
        (SpecError("plain.frames, process", "a dict of tensors", "None"), ServerFault, SpecError),
        (InputError("plain.frames[0]", "a number", "nan"), InputError, InputError),
        (ZeroDivisionError("not ours"), ZeroDivisionError, ZeroDivisionError),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_fault_of_the_server_is_none_of_the_caller(
    raised: Exception, in_server: Any, offline: Any, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's server answers 400 to a ValueError, which every error of mmkit is. The log has the cause."""

    def process_tokens(renderer: Any, prompt: Any) -> Any:
        raise raised

    async def process_tokens_async(renderer: Any, prompt: Any) -> Any:
        raise raised

    renderer = SimpleNamespace(mm_processor=processor(WITH_ENDING))
    guarded = patches.wrap_process_tokens(process_tokens_async if is_async else process_tokens)

    def process() -> None:
        result = guarded(renderer, {"prompt_token_ids": ids("a")})
        if is_async:
            asyncio.run(result)

    with pytest.raises(offline) as without_server:
        process()
    assert without_server.value is raised
    assert not caplog.records
    token = SERVER_REQUEST.set(ServerRequest(0, AssertionError))  # type: ignore[arg-type]
    try:
        with pytest.raises(in_server) as with_server:
            process()
    finally:
        SERVER_REQUEST.reset(token)
    assert isinstance(with_server.value, ValueError) == issubclass(in_server, InputError)
    if in_server is ServerFault:
        assert str(with_server.value) == (
            "server: expected to serve the request, got an error of its own. Its log says which."
        )
        assert str(raised) in caplog.text


def test_a_prompt_with_items_is_rewritten_by_the_processor() -> None:
    instance = processor(WITH_ENDING)
    assert run(instance, "a <frame>", FRAME).ids == ids("a <pad> <pad> </s>")
    assert run(instance, "a", {"frames": []}).ids == ids("a </s>")


OUTSIDE = "prompt[0]: expected a token id from 0 to 31, got "
NO_SUCH_FIELDS = "mm_kwargs.frames: expected fields among ['frames', 'mmkit_frames_rows'], and a range in "
FIRST_POSITION = PlaceholderRange(0, 1)
RENDERED = {"type": "multimodal", "prompt_token_ids": [1], "mm_kwargs": {"frames": [{"frames": None}]}}
"""A request as another host has rendered it."""


def check_refusal_before_the_engine(prompt: dict[str, Any], sentence: str, *, trusts: bool = False) -> None:
    """Send a rendered prompt to the engine, and check the sentence with which it is refused.

    What vLLM's routes for rendered requests bring passes neither the processor nor the tokenization.

    Args:
        prompt: in vLLM's form.
        sentence: what the message begins with, after the name of the spec.
        trusts: the server trusts the fields of other hosts.
    """
    input_processor = SimpleNamespace(
        renderer=SimpleNamespace(mm_processor=processor(plain())),
        vllm_config=SimpleNamespace(additional_config={admission.TRUST: trusts}),
    )
    with pytest.raises(Refused, match=f"^plain.{re.escape(sentence)}"):
        InputProcessor.process_inputs(input_processor, "request", prompt, None, None)


@pytest.mark.parametrize(
    ("prompt", "token"),
    [
        ({"type": "token", "prompt_token_ids": [2**31]}, 2**31),
        ({"prompt_token_ids": [2**31]}, 2**31),
        ({"encoder_prompt": {"type": "token", "prompt_token_ids": [-1]}}, -1),
    ],
)
def test_an_id_outside_the_vocabulary_does_not_reach_the_engine(prompt: dict[str, Any], token: int) -> None:
    check_refusal_before_the_engine(prompt, f"{OUTSIDE}{token}.")


def test_an_encoder_prompt_without_items_does_not_reach_the_engine() -> None:
    prompt = {"encoder_prompt": {"type": "token", "prompt_token_ids": [1]}}
    check_refusal_before_the_engine(prompt, "multi_modal_data: expected at least ")


def test_processed_fields_do_not_reach_the_engine_of_a_server_that_does_not_trust_them() -> None:
    sentence = "mm_kwargs: expected raw items, got processed fields. Send the items themselves, or start "
    check_refusal_before_the_engine(RENDERED, sentence)


def test_the_ids_of_trusted_fields_are_checked() -> None:
    prompt = {**RENDERED, "prompt_token_ids": [2**31]}
    check_refusal_before_the_engine(prompt, f"{OUTSIDE}2147483648.", trusts=True)


def test_the_modalities_of_trusted_fields_are_checked() -> None:
    prompt = {**RENDERED, "mm_kwargs": {"x": []}}
    sentence = "multi_modal_data: expected modalities among ['frames'], got 'x'"
    check_refusal_before_the_engine(prompt, sentence, trusts=True)


def test_trusted_fields_need_a_range() -> None:
    check_refusal_before_the_engine(RENDERED, NO_SUCH_FIELDS, trusts=True)


def test_trusted_fields_need_a_range_within_the_prompt() -> None:
    prompt = {**RENDERED, "mm_placeholders": {"frames": [PlaceholderRange(1, 1)]}}
    check_refusal_before_the_engine(prompt, "mm_kwargs.frames: expected ", trusts=True)


def test_trusted_fields_have_names_of_the_spec() -> None:
    prompt = {**RENDERED, "mm_kwargs": {"frames": [{"x": 0}]}, "mm_placeholders": {"frames": [FIRST_POSITION]}}
    check_refusal_before_the_engine(prompt, NO_SUCH_FIELDS, trusts=True)


def admit_fields(values: Any) -> None:
    """Admit a request whose item has these fields, by a server that trusts other hosts."""
    prompt = {**RENDERED, "mm_kwargs": {"frames": [values]}, "mm_placeholders": {"frames": [FIRST_POSITION]}}
    admission.admit(processor(plain()).plan, prompt, trusts=True)


def test_trusted_fields_pass() -> None:
    admit_fields({"frames": torch.zeros(2)})


def test_trusted_fields_that_the_engine_has_pass() -> None:
    admit_fields(None)


def test_trusted_fields_are_finite() -> None:
    sentence = r"^plain.mm_kwargs.frames\[0\].frames: expected finite values, got NaN"
    with pytest.raises(Refused, match=sentence):
        admit_fields({"frames": torch.full((2,), torch.nan)})


# -- processing ------------------------------------------------------------------------------------------------------


def test_options_of_the_request_come_before_those_of_the_server() -> None:
    instance = processor(MIXED, mm_processor_kwargs={"repeat": 3, "scale": 5})
    both = run(instance, "<series>", SERIES, kwargs={"scale": 2})
    assert both.ranges["series"] == [(0, 5, (False, True, True, True, False))]
    assert both.fields["series"][0]["values"].tolist() == [[2.0, 2.0]] * 3


def test_options_of_a_request_may_make_more_rows_than_any_item_has_by_those_of_the_server() -> None:
    instance = processor(MIXED, mm_processor_kwargs={"repeat": 3, "scale": 5})
    outcome = run(instance, "<series>", {"series": torch.ones(4, 2)}, kwargs={"repeat": 4})
    assert sum(outcome.mask("series", 0)) == 16


def test_the_plans_for_options_are_not_kept_without_end() -> None:
    plan = processor(MIXED).plan
    for rows in range(200):
        plan_for_options(plan, {"repeat": rows}, None)
    assert len(plan.plans_for_options._new) < 50


def test_two_threads_at_once_each_give_what_they_give_alone() -> None:
    """Both are in the middle of their processing before either goes on."""
    meeting = Barrier(1)

    def process(items: Any, scope: Any) -> dict[str, Any]:
        meeting.wait(30)
        return {"frames": torch.stack(list(items))}

    instance = processor(plain(process=process))

    def run_first() -> vllm_path.Outcome:
        return run(instance, "A <frame>", FRAME)

    def run_second() -> vllm_path.Outcome:
        return run(instance, "<frame> <frame> B B", {"frames": [2 * ONES, 3 * ONES]})

    first_alone = run_first()
    second_alone = run_second()
    meeting = Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run_first)
        second = threads.submit(run_second)
    assert find_difference(first_alone, first.result()) is None
    assert find_difference(second_alone, second.result()) is None


def test_hidden_fields_of_items_that_are_processed_one_by_one_reach_no_model() -> None:
    outcome = run(processor(PADDED), "<frame> <frame> <frame>", {"frames": [torch.ones(n, 3) for n in (2, 5, 2)]})
    lengths = [item_range.length for item_range in outcome.ranges["frames"]]
    assert lengths == [2, 5, 2]
    for values, length in zip(outcome.fields["frames"], lengths, strict=True):
        assert list(values) == ["frames"]
        assert values["frames"].tolist() == [[2.0] * 3] * length


# -- hashes and caches -----------------------------------------------------------------------------------------------


def test_embeddings_are_other_items_than_tensors_of_the_same_values() -> None:
    """They have another hash, in the cache and without, and go to the model under another name."""
    instance = processor(plain(item=Tensor((2, HIDDEN)), embeds=True), enable_mm_embeds=True)
    caches = make_caches(instance)
    for _ in range(2):
        raw = run(instance, "<frame>", {"frames": ROWS}, caches=caches)
        embeds = run(instance, "<frame>", {"frames": {"frames_embeds": ROWS}}, caches=caches)
        assert raw.hashes != embeds.hashes
        assert list(raw.fields["frames"][0]) == ["frames"]
        assert list(embeds.fields["frames"][0]) == ["frames_embeds"]


class TestItemsThatDependOnTheirNumber:
    """Items that are cacheable up to two in a request; of more, each has rows by its index."""

    @pytest.fixture(scope="class")
    def instance(self) -> Any:
        def process(items: Any, scope: Any) -> dict[str, Any]:
            return {"frames": items}

        rows = where(item.count <= 2, 4, 1 + item.index)
        spec = plain(
            layout=embed(tok["<pad>"]) * rows,
            fields={"frames": batched(), "rows": derived(rows, dtype="int64")},
            process=process,
            cacheable=item.count <= 2,
        )
        return processor(spec)

    def run(self, instance: Any, numbers: list[int], caches: Any = None) -> vllm_path.Outcome:
        values = [number * ONES for number in numbers]
        return run(instance, "<frame> " * len(numbers), {"frames": values}, caches=caches)

    @pytest.mark.parametrize("pair", [False, True])
    def test_they_are_processed_anew_where_their_number_is_another(self, instance: Any, pair: bool) -> None:
        caches = make_caches(instance, pair=pair)
        for numbers in ([1], [1, 2], [1, 2, 3], [2, 1], [2, 3, 1], [1]):
            expected = self.run(instance, numbers)
            lengths = [item_range.length for item_range in expected.ranges["frames"]]
            assert lengths == ([1, 2, 3] if len(numbers) == 3 else [4] * len(numbers))
            assert find_difference(expected, self.run(instance, numbers, caches)) is None

    def test_they_have_another_hash_where_they_are_not_cacheable(self, instance: Any) -> None:
        """vLLM's engine keeps encoder outputs by hash."""
        alone = self.run(instance, [1]).hashes["frames"][0]
        of_two = self.run(instance, [1, 2]).hashes["frames"][0]
        of_three = self.run(instance, [1, 2, 3]).hashes["frames"][0]
        assert alone == of_two
        assert alone != of_three


def test_the_hashes_of_items_that_are_applied_twice_are_those_of_their_options() -> None:
    """Also where the same parsed items are processed again."""
    instance = processor(plain())
    items = vllm_path.parse_items(instance, {"frames": ONES})
    hashes = []
    for options in ({}, {"scale": 2}, {}):
        request = ProcessorRequest(ids("<frame>"), items.make_items({}), options=options)
        hashes += instance.render(request)["mm_hashes"]["frames"]
    without_options, with_options, again_without = hashes
    assert without_options == again_without
    assert without_options != with_options


def refuse_nines(value: torch.Tensor) -> float:
    if float(value[0, 0]) == 9:
        raise ValueError("nine is too much")
    return float(value[0, 0])


def test_an_error_beside_a_cached_item_names_the_item_of_the_request() -> None:
    """Only the second item is processed: it is the first of its batch."""
    instance = processor(plain(fields={"frames": batched(), "first": derived(later(refuse_nines)(fields.frames))}))
    caches = make_caches(instance)
    run(instance, "<frame>", FRAME, caches=caches)
    with pytest.raises(InputError, match=r"^plain\.frames\[1\]: .* nine is too much"):
        run(instance, "<frame> <frame>", {"frames": [ONES, ONES * 9]}, caches=caches)
    with pytest.raises(InputError, match=r"^plain\.frames\[1\]: .* no such item in the cache"):
        run(instance, "<frame> <frame>", {"frames": [ONES, None]}, caches=caches)


def test_the_senders_cache_holds_no_tensors() -> None:
    """It is there so that the API server does not keep what the engine keeps already."""
    instance = processor(MIXED)
    caches = make_caches(instance, pair=True)
    outcome = run(instance, "<series>", SERIES, caches=caches)
    engine_fields, cached = caches.sender.get_and_update_item(None, outcome.hashes["series"][0])
    assert engine_fields is None
    assert {type(value) for value in vars(cached).values()} == {ItemLayout, int}


# -- items that only a uuid names ------------------------------------------------------------------------------------


class Tenants:
    """Frames of several tenants, in one cache, by the names that each gives them."""

    def __init__(self) -> None:
        self.instance = processor(MIXED)
        self.caches = make_caches(self.instance)

    def send(self, value: Any, salt: str | None, name: str = "x", **options: Any) -> vllm_path.Outcome:
        """Send an item of a tenant under a name; None for the item of that name."""
        uuids = self.salt_uuids(salt, name)
        return run(self.instance, "<frame>", {"frames": [value]}, caches=self.caches, uuids=uuids, kwargs=options)

    def salt_uuids(self, salt: str | None, name: str) -> Any:
        """Return the names of items as vLLM gets them: with the cache salt of the tenant."""
        prompt: dict[str, Any] = {"multi_modal_uuids": {"frames": name}}
        if salt is not None:
            prompt["cache_salt"] = salt
        return parse_mm_uuids(patches.salt_uuids(prompt)["multi_modal_uuids"])

    def check_unknown(self, salt: str | None, name: str = "x", **options: Any) -> None:
        """Check that a tenant has no item of a name."""
        with pytest.raises(ValueError, match=r"data is not provided|no such item"):
            self.send(None, salt, name, **options)


def test_a_uuid_names_the_item_of_its_own_tenant() -> None:
    tenants = Tenants()
    values = {"alice": ONES, "bob": ONES + 1, None: ONES + 2}
    for salt, value in values.items():
        tenants.check_unknown(salt)
        tenants.send(value, salt)
    for salt, value in values.items():
        outcome = tenants.send(None, salt)
        assert torch.equal(outcome.fields["frames"][0]["frames"], value)


def test_no_name_reaches_the_item_of_another_tenant() -> None:
    tenants = Tenants()
    (item_hash,) = tenants.send(ONES, "alice").hashes["frames"]
    (salted_name,) = tenants.salt_uuids("alice", "x")["frames"]
    for guess in (item_hash, salted_name, '["alice", "x"]', "x-alice"):
        tenants.check_unknown("bob", guess)


def test_a_uuid_names_no_item_of_other_options() -> None:
    tenants = Tenants()
    tenants.send(ONES, "alice")
    tenants.check_unknown("alice", scale=2)


def test_a_uuid_names_no_item_of_another_modality() -> None:
    tenants = Tenants()
    tenants.send(ONES, None)
    uuids = {"series": tenants.salt_uuids(None, "x")["frames"]}
    with pytest.raises(InputError, match=r"^mixed\.series\[0\]: .* no such item in the cache"):
        run(tenants.instance, "<series>", {"series": [None]}, caches=tenants.caches, uuids=uuids)

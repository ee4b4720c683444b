"""Items that become ids only in vLLM's processing path, and the other ways to the same ids."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkit import InputError
from mmkit.testing import Subject, vllm_path
from mmkit.testing.vllm_path import Caches
from tests.profiles import scaled

from .planted.base import HEART, ID, heart


@cache
def open_subject() -> Subject:
    return heart()


@cache
def make_training_processor() -> Any:
    info = open_subject().processor.info
    return HEART.hf_processor(info.get_hf_config(), info.get_tokenizer())


@settings(deadline=None, max_examples=scaled(30))
@given(st.data())
def test_every_way_leads_to_the_same_ids(data: Any) -> None:
    subject = open_subject()
    plan = subject.plan
    assert plan is not None
    request = data.draw(subject.requests())
    items = request.data()
    ids = subject.run(request).ids
    assert plan.expand(request.prompt, items) == ids
    assert plan.expand(plan.unexpand(ids, items), items) == ids
    batch = make_training_processor()(input_ids=request.prompt, **items)
    assert batch["input_ids"].tolist() == [ids]
    assert set(batch) <= {"input_ids", "attention_mask", "mm_token_type_ids", "placeholders", "frames"}


def run(prompt: list[int], caches: Caches | None, value: Any, uuid: str | None = None) -> Any:
    processor = open_subject().processor
    return vllm_path.run(processor, prompt, {"beats": [value]}, caches=caches, uuids={"beats": [uuid]})


@pytest.mark.parametrize("pair", [False, True], ids=["one cache", "two halves"])
def test_a_name_alone_stands_for_an_item_that_was_sent_before(pair: bool) -> None:
    caches = Caches(open_subject().processor, 1.0, pair=pair)
    first = run([ID["<series>"]], caches, torch.tensor([0, 5]), "mine")
    assert first.ids == [ID["<open>"], ID["a"], ID["C"], ID["<close>"]]
    again = run([ID["<series>"], ID["a"]], caches, None, "mine")
    assert again.ids == [*first.ids, ID["a"]]
    for uuid, caches_of_request in (("other", caches), ("mine", None)):
        with pytest.raises(InputError, match=r"heart\.beats\[0\]"):
            run([ID["<series>"]], caches_of_request, None, uuid)


def test_a_request_of_such_items_alone_has_nothing_else() -> None:
    outcome = run([ID["<series>"]], None, torch.tensor([1]))
    assert outcome.ranges == outcome.hashes == outcome.fields == {}


def test_vllm_plans_no_memory_for_such_items() -> None:
    info = open_subject().processor.info
    assert info.get_mm_max_tokens_per_item(64, {"frames": 1, "beats": 1}) == {"frames": 2}
    assert set(info.get_supported_mm_limits()) == {"frames", "beats"}

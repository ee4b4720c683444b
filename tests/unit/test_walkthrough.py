"""One spec and one request, step by step: read this file first.

A spec is declared, and bound to a config and a tokenizer. Then a request with two items runs through the steps that
`mmkit.vllm_api.pipeline.RequestPipeline` takes in vLLM; here without vLLM, its cache and its hashes.
docs/how-it-works.md tells the same in words, and numbers the steps. Steps that need vLLM are shown elsewhere:

===== ===================================================================================================
step  first test to read
===== ===================================================================================================
2, 3  `test_a_uuid_names_the_item_of_its_own_tenant` in tests/path/test_processor.py
4, 8  `test_cache_halves.py` in tests/path: a request that is rendered looks, and moves nothing
9     `test_an_id_outside_the_vocabulary_does_not_reach_the_engine` in tests/path/test_processor.py
10    `test_cache_halves.py` again: a request that is sent moves both halves
11    `test_series.py` in tests/engine
===== ===================================================================================================
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.series.untrained import make_tokenizer
from mmkit import InputError, Modality, ModelSpec, Tensor, batched, between, ceil_div, cfg, fields, replace, tok
from mmkit.plan.item import Item
from mmkit.plan.plan import Plan

TOKENIZER = make_tokenizer()
"""One token per word: `<series>`, `<patch>` and the words of sentences about waves."""

SERIES = TOKENIZER.convert_tokens_to_ids("<series>")
PATCH = TOKENIZER.convert_tokens_to_ids("<patch>")
IS, A, WAVE = TOKENIZER.convert_tokens_to_ids(["is", "a", "wave"])


def centre(items: list[torch.Tensor], scope: Any) -> dict[str, list[torch.Tensor]]:
    """Return the field of each item: the series around zero."""
    return {"series": [item - item.mean() for item in items]}


# -- what an author writes -------------------------------------------------------------------------------------------

SPEC = ModelSpec(
    "waves",
    Modality(
        "series",
        item=Tensor(shape=(between(1, cfg.max_steps),)),
        process=centre,
        fields={"series": batched(dtype="float32")},
        placeholder="<patch>",
        tokens=ceil_div(fields.series.shape[0], cfg.steps_per_token),
        update=replace(tok["<series>"]),
    ),
)

CONFIG = SimpleNamespace(vocab_size=len(TOKENIZER), max_steps=16, steps_per_token=4)
PROMPT = "<series> is a wave <series>"
DATA = {"series": [torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 9.0]), [7.0, 7.0]]}
"""What a caller sends: a series of six steps, which takes two positions, and one of two steps as a list."""


def test_the_spec_holds_expressions_that_read_as_they_were_written() -> None:
    (modality,) = SPEC.modalities
    assert repr(modality.layout) == "embed(tok['<patch>']) * ceil_div(fields.series.shape[0], cfg.steps_per_token)"
    assert repr(modality.update) == "(replace(tok['<series>']),)"


# -- before any request: bind ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Plan:
    return SPEC.bind(CONFIG, TOKENIZER)


def test_bind_evaluates_what_config_and_tokenizer_decide(plan: Plan) -> None:
    modality = plan.modalities["series"]
    assert repr(modality.item.shape) == "(between(1, 16),)"
    assert plan.reserved_targets.modality_of == {(SERIES,): "series"}


def test_bind_finds_the_placeholder_ids_that_prompts_and_answers_must_not_have(plan: Plan) -> None:
    assert plan.embed_ids == {PATCH}
    with pytest.raises(InputError, match=r"waves.series: expected one item per placeholder, got 1 .*<patch>"):
        plan.preview("a <patch>", {})


def test_bind_rehearses_the_largest_item(plan: Plan) -> None:
    modality = plan.modalities["series"]
    largest = modality.largest_item()
    assert largest.shape == (16,)
    assert modality.lay_out_spec_item(largest).num_embeds == 4


# -- a request: parse, process, lay out, place -----------------------------------------------------------------------


@pytest.fixture
def items(plan: Plan) -> list[Item]:
    return plan.parse_items(DATA)


def test_step_1_parse_makes_one_canonical_form_of_every_item(items: list[Item]) -> None:
    first, second = items
    assert (first.value.dtype, second.value.dtype) == (torch.float32, torch.float32)
    assert second.value.tolist() == [7.0, 7.0]
    assert first.value.data_ptr() != DATA["series"][0].data_ptr(), "an item never lies in the caller's memory"


def test_step_1_parse_refuses_what_the_spec_does_not_declare(plan: Plan) -> None:
    with pytest.raises(InputError, match=r"series\[1\]: expected a \(1\.\.16,\) float32 tensor, got shape \(17,\)"):
        plan.parse_items({"series": [torch.zeros(3), torch.zeros(17)]})


def test_step_5_process_fills_in_the_fields_of_each_item(plan: Plan, items: list[Item]) -> None:
    plan.fill_in_fields(items)
    assert items[0].fields["series"].tolist() == [-3.0, -2.0, -1.0, 0.0, 1.0, 5.0]
    assert items[1].fields["series"].tolist() == [0.0, 0.0]


def test_step_6_lay_out_fills_in_what_each_item_becomes_in_the_prompt(plan: Plan, items: list[Item]) -> None:
    plan.fill_in_fields(items)
    plan.fill_in_layouts(items)
    first, second = items[0].layout, items[1].layout
    assert list(first.tokens.ids) == [PATCH, PATCH]  # six steps, four to a position
    assert first.tokens.num_embeds == 2  # of them, those that take a row of the encoder
    assert list(second.tokens.ids) == [PATCH]
    (resolved,) = first.updates
    assert tuple(resolved.target) == (SERIES,)


def test_step_7_place_writes_the_layouts_over_their_targets(plan: Plan, items: list[Item]) -> None:
    plan.fill_in_fields(items)
    plan.fill_in_layouts(items)
    prompt = plan.encode(PROMPT)
    assert prompt == [SERIES, IS, A, WAVE, SERIES]

    placed = plan.rewrite_and_place(prompt, items)

    assert placed.token_ids == [PATCH, PATCH, IS, A, WAVE, PATCH]
    places = [(placement.modality, placement.index, placement.start) for placement in placed.placements]
    assert places == [("series", 0, 0), ("series", 1, 5)]


def test_step_7_place_refuses_a_prompt_with_another_number_of_targets(plan: Plan) -> None:
    with pytest.raises(InputError, match="expected 2 targets '<series>' in the prompt for 2 items, got 1"):
        plan.preview("<series> is a wave", DATA)


# -- all steps at once -----------------------------------------------------------------------------------------------


def test_preview_takes_all_steps(plan: Plan) -> None:
    preview = plan.preview(PROMPT, DATA)
    assert preview.prompt_token_ids == [PATCH, PATCH, IS, A, WAVE, PATCH]
    assert [str(placement) for placement in preview.placements] == [
        "Placement(modality='series', index=0, start=0)",
        "Placement(modality='series', index=1, start=5)",
    ]
    assert preview.fields["series"][1]["series"].tolist() == [0.0, 0.0]


def test_an_expanded_prompt_is_not_expanded_again(plan: Plan) -> None:
    expanded = plan.expand(PROMPT, DATA)
    assert plan.expand(expanded, DATA) == expanded
    assert plan.unexpand(expanded, DATA) == plan.encode(PROMPT)

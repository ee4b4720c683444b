"""Admission: what no item's check sees of a request, embeddings in place of a prompt's tokens, reaches the engine only
where its language model can carry it."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField

from mmkit import InputError, Modality, ModelSpec, Tensor, batched
from mmkit.plan.soundness import compute_largest_magnitude
from mmkit.testing.vllm_path import render
from mmkit.vllm_api.admission import PROMPT_EMBEDS, admit
from mmkit.vllm_api.errors import Refused
from tests.path.plain import ONES, ids, plain, processor
from tests.unit.common import refuses

WIDTH = processor(plain()).plan.hidden_size
GOOD = torch.zeros(3, WIDTH)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OTHER_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
VALUES = (0.0, 1.0, -1.0, 65504.0, 65505.0, -1e30, torch.finfo(torch.float64).max, torch.inf, -torch.inf, torch.nan)


def make_prompt(rows: Any) -> dict[str, Any]:
    return {"prompt_embeds": rows}


def make_rendered_prompt(rows: Any) -> dict[str, Any]:
    return {"type": "embeds", "prompt_embeds": rows}


def make_part_of_message(rows: Any) -> dict[str, Any]:
    """Return a rendered request with embeddings that came as a part of a message, as vLLM puts them there."""
    rendered = render(processor(plain()), ids("a <frame>"), {"frames": ONES}, {}, None)
    field = MultiModalSharedField(batch_size=1)
    rendered["mm_kwargs"][PROMPT_EMBEDS] = [MultiModalKwargsItem({"embedding": MultiModalFieldElem(rows, field)})]
    return rendered


FORMS = {
    "a prompt": make_prompt,
    "a rendered prompt": make_rendered_prompt,
    "a part of a message": make_part_of_message,
}


def is_admitted(prompt: Any) -> bool:
    try:
        admit(processor(plain()).plan, prompt, trusts=False)
    except Refused as error:
        return not str(error).startswith("plain.prompt_embeds: expected ")
    return True


@given(
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(FLOATS + OTHER_DTYPES),
    st.sampled_from([(3, WIDTH), (1, WIDTH), (0, WIDTH), (3, WIDTH + 1), (WIDTH,), (2, 3, WIDTH)]),
    st.sampled_from(VALUES),
    st.integers(0, 2**16),
)
@example("a prompt", torch.float32, (3, WIDTH), torch.nan, 5)
@example("a rendered prompt", torch.float32, (3, WIDTH), torch.inf, 5)
@example("a part of a message", torch.float32, (3, WIDTH), torch.nan, 5)
def test_only_rows_that_the_model_can_carry_are_admitted(
    form: str, dtype: torch.dtype, shape: tuple[int, ...], value: float, place: int
) -> None:
    rows = torch.zeros(shape)
    if rows.numel():
        rows = rows.double()
        rows.view(-1)[place % rows.numel()] = value
    rows = rows.to(dtype)
    is_sound = dtype in FLOATS and bool((rows.double().abs() <= 65504.0).all())
    has_form = rows.ndim == 2 and rows.shape[1] == WIDTH
    assert is_admitted(FORMS[form](rows)) == (is_sound and has_form)


def admit_embeds(plan: Any, rows: torch.Tensor) -> None:
    admit(plan, {"prompt_embeds": rows}, trusts=False)


def test_a_model_in_float16_carries_less() -> None:
    plan = processor(plain(), dtype="float16").plan
    bound = compute_largest_magnitude(torch.float16)
    admit_embeds(plan, torch.full_like(GOOD, -bound))
    expected = "values of magnitude <= 16384, which a model in float16 carries"
    with refuses(Refused, f"plain.prompt_embeds: expected {expected}, got 20000."):
        admit_embeds(plan, torch.full_like(GOOD, -20000.0))


@pytest.mark.parametrize("mask_name", ["is_token_ids", "prompt_is_token_ids"])
def test_ids_at_embedded_positions_are_not_read(mask_name: str) -> None:
    """vLLM writes a token of its own there, which may lie outside the vocabulary."""
    plan = processor(plain()).plan
    prompt = {"prompt_embeds": GOOD, "prompt_token_ids": [2, 10**9, 2]}
    admit(plan, prompt | {mask_name: [True, False, True]}, trusts=False)
    with pytest.raises(InputError, match="a token id from 0 to"):
        admit(plan, prompt | {mask_name: [True, True, True]}, trusts=False)


def test_a_model_of_raw_input_reads_no_prompt() -> None:
    raw = Modality("cell", item=Tensor((3,)), tokens=0, fields={"cell": batched()})
    plan = processor(ModelSpec("raw", raw)).plan
    remedy = "The model reads nothing of a prompt."
    sentence = f"raw.prompt_embeds: expected one item per request, got embeddings of a prompt. {remedy}"
    with refuses(Refused, sentence):
        admit_embeds(plan, GOOD)

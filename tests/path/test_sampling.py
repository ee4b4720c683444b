"""Which ids the sampler of either of vLLM's model runners is left with, row by row, against a plain account of it."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.utils.cpu_triton_utils import _expand_kernel_impl
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from mmkit import InputError, Output, any_id, literal
from mmkit.language.expr import Scope
from mmkit.model import sampling
from mmkit.plan.output import BoundOutput
from tests.unit.common import expect_refusal

VOCABULARY, PLACEHOLDER = 16, 15
LAYOUTS = {
    "short": any_id(0, 4) * 2,
    "long": (any_id(3, 9) + any_id(8, 15)) * 2 + literal(14),
}


class Model:
    """As far as the sampler looks."""

    def __init__(self) -> None:
        self.mm_engine = SimpleNamespace()
        scope, reserved = Scope(), frozenset({PLACEHOLDER})
        outputs = {
            name: BoundOutput(Output(name, layout, lambda ids, _: ids), "m", scope, VOCABULARY, reserved)
            for name, layout in LAYOUTS.items()
        }
        self.mm_plan = SimpleNamespace(outputs=outputs, embed_ids=reserved)
        self.allowed_ids = sampling.AllowedIds(self.mm_plan)
        sampling.MODELS.add(self)


def left(model: Model, name: Any, position: int) -> list[int]:
    """The ids that may be sampled."""
    output = model.mm_plan.outputs.get(name) if isinstance(name, str) else None
    if output is None or position >= output.num_tokens:
        return [token for token in range(VOCABULARY) if token != PLACEHOLDER]
    return list(output.allowed[position])


def finite(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def params(name: Any) -> SamplingParams:
    return SamplingParams(extra_args=None if name is None else {"mmkit_output": name})


NAMES = st.sampled_from([None, "short", "long", "film", 7])
REQUESTS = st.lists(st.tuples(NAMES, st.integers(0, 7)), min_size=1, max_size=6)


@given(REQUESTS, st.data())
def test_requests_that_come_go_and_move(requests: list[tuple[Any, int]], data: Any) -> None:
    model = Model()
    mask = sampling.PlaceholderMask(model.mm_engine, torch.device("cpu"), False)
    ids: list[list[int]] = [[] for _ in requests]
    added = [(row, params(name), None, ids[row]) for row, (name, _) in enumerate(requests)]
    mask.update_state(BatchUpdate(len(requests), [], added, []))
    for own, (_, position) in zip(ids, requests, strict=True):
        own += [0] * position  # vLLM lets them grow
    rows = list(requests)
    if data.draw(st.booleans()):
        one, other = (data.draw(st.integers(0, len(rows) - 1)) for _ in range(2))
        if one != other:
            mask.update_state(BatchUpdate(len(rows), [], [], [(one, other, MoveDirectionality.SWAP)]))
            rows[one], rows[other] = rows[other], rows[one]
    if len(rows) > 1 and data.draw(st.booleans()):
        last = len(rows) - 1
        mask.update_state(BatchUpdate(last, [0], [], [(last, 0, MoveDirectionality.UNIDIRECTIONAL)]))
        rows[0] = rows.pop()
    mask.update_state(None)
    logits = mask.apply(torch.zeros(len(rows), VOCABULARY))
    assert finite(logits) == [left(model, *row) for row in rows]


@given(REQUESTS, st.data())
def test_the_second_model_runner_has_rows_for_drafts(requests: list[tuple[Any, int]], data: Any) -> None:
    """A request has a row for each of its drafts, at the positions behind one another."""
    interface = pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor.interface")
    model = Model()
    prompts = torch.tensor([data.draw(st.integers(1, 9)) for _ in requests])
    mask = sampling.PlaceholderMask(model.mm_engine, SimpleNamespace(prompt_len=SimpleNamespace(gpu=prompts)))
    slots = data.draw(st.permutations(range(len(requests))))
    for slot in range(len(requests)):
        assert mask.add_request(slot, params("long"))  # another's, that was in the slot before
        assert mask.add_request(slot, params(requests[slot][0]))
    rows = [(slot, draft) for slot in slots for draft in range(data.draw(st.integers(1, 3)))]
    expanded = torch.tensor([slot for slot, _ in rows])
    pos = torch.tensor([int(prompts[slot]) + requests[slot][1] + draft - 1 for slot, draft in rows])
    context = interface.LogitsContext(
        expanded_idx_mapping=expanded,
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        expanded_local_pos=torch.tensor([draft for _, draft in rows]),
        input_ids=torch.zeros(len(rows), dtype=torch.int64),
        pos=pos,
        seq_lens_upper_bound_np=np.zeros(len(slots)),
    )
    logits = mask.apply(torch.zeros(len(rows), VOCABULARY), context)
    assert finite(logits) == [left(model, requests[slot][0], requests[slot][1] + draft) for slot, draft in rows]


@pytest.mark.parametrize(
    "drafts",
    [None, SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)],
    ids=["none", "drafts"],
)
def test_a_temperature_beside_drafts_on_a_cpu(drafts: Any) -> None:
    """Is refused as long as vLLM's CPU build loses the temperatures of drafts."""
    engine = SimpleNamespace(vllm_config=VllmConfig())
    engine.vllm_config.speculative_config = drafts
    output = BoundOutput(Output("same", any_id(0, 4) * 2, lambda ids, _: ids), "m", Scope(), VOCABULARY, frozenset())
    current_platform.import_kernels()
    temperatures = torch.zeros(2)
    _expand_kernel_impl(temperatures, torch.tensor([0.5]), torch.tensor([2]), 0, 1)
    is_lost = temperatures.tolist() != [0.5, 0.5]
    assert sampling.sampling_params(output, engine, temperature=0.0).temperature == 0.0
    if drafts and is_lost:
        expect_refusal(
            InputError,
            "m.outputs.same: expected temperature=0 beside speculative_config on a CPU, got 0.7. This vLLM samples "
            "drafts there at arbitrary temperatures, masked ids included.",
            partial(sampling.sampling_params, output, engine, temperature=0.7),
        )
    else:
        assert sampling.sampling_params(output, engine, temperature=0.7).temperature == 0.7

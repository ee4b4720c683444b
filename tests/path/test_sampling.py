"""Which ids the sampler of either of vLLM's model runners is left with, row by row, against a plain account of it."""

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
from tests.unit.common import refuses

VOCABULARY, PLACEHOLDER = 16, 15
LAYOUTS = {
    "short": any_id(0, 4) * 2,
    "long": (any_id(3, 9) + any_id(8, 15)) * 2 + literal(14),
}


def get_ids(ids: Any, scope: Scope) -> Any:
    return ids


class Model:
    """A model, as far as the sampler looks."""

    def __init__(self) -> None:
        self.mm_engine = SimpleNamespace()
        placeholders = frozenset({PLACEHOLDER})
        outputs: dict[str, BoundOutput] = {}
        for name, layout in LAYOUTS.items():
            outputs[name] = BoundOutput(Output(name, layout, get_ids), "m", Scope(), VOCABULARY, placeholders)
        self.mm_plan = SimpleNamespace(outputs=outputs, embed_ids=placeholders)
        self.allowed_ids = sampling.AllowedIds(self.mm_plan)
        sampling.MODELS.add(self)


def list_allowed_ids(model: Model, name: Any, position: int) -> list[int]:
    """Return the ids that may be sampled."""
    output = model.mm_plan.outputs.get(name) if isinstance(name, str) else None
    if output is None or position >= output.num_tokens:
        return [token for token in range(VOCABULARY) if token != PLACEHOLDER]
    return list(output.allowed[position])


def list_finite_ids(logits: torch.Tensor) -> list[list[int]]:
    """Return the ids that are not masked, row by row."""
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def make_params(name: Any) -> SamplingParams:
    """Return the options of a request for an output, or for none."""
    if name is None:
        return SamplingParams()
    return SamplingParams(extra_args={"mmkit_output": name})


NAMES = st.sampled_from([None, "short", "long", "film", 7])
REQUESTS = st.lists(st.tuples(NAMES, st.integers(0, 7)), min_size=1, max_size=6)


@given(REQUESTS, st.data())
def test_requests_that_come_go_and_move(requests: list[tuple[Any, int]], data: Any) -> None:
    model = Model()
    mask = sampling.PlaceholderMask(model.mm_engine, torch.device("cpu"), False)
    ids: list[list[int]] = [[] for _ in requests]
    added = [(row, make_params(name), None, ids[row]) for row, (name, _) in enumerate(requests)]
    mask.update_state(BatchUpdate(len(requests), [], added, []))
    for row, (_, position) in enumerate(requests):
        ids[row] += [0] * position  # vLLM lets the lists grow
    rows = list(requests)
    if data.draw(st.booleans()):
        first = data.draw(st.integers(0, len(rows) - 1))
        second = data.draw(st.integers(0, len(rows) - 1))
        if first != second:
            mask.update_state(BatchUpdate(len(rows), [], [], [(first, second, MoveDirectionality.SWAP)]))
            rows[first], rows[second] = rows[second], rows[first]
    if len(rows) > 1 and data.draw(st.booleans()):
        last = len(rows) - 1
        mask.update_state(BatchUpdate(last, [0], [], [(last, 0, MoveDirectionality.UNIDIRECTIONAL)]))
        rows[0] = rows.pop()
    mask.update_state(None)
    logits = mask.apply(torch.zeros(len(rows), VOCABULARY))
    assert list_finite_ids(logits) == [list_allowed_ids(model, name, position) for name, position in rows]


@given(REQUESTS, st.data())
def test_the_second_model_runner_has_rows_for_drafts(requests: list[tuple[Any, int]], data: Any) -> None:
    """A request has a row for each of its drafts, at the positions behind one another."""
    interface = pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor.interface")
    model = Model()
    prompts = torch.tensor([data.draw(st.integers(1, 9)) for _ in requests])
    mask = sampling.PlaceholderMask(model.mm_engine, SimpleNamespace(prompt_len=SimpleNamespace(gpu=prompts)))
    slots = data.draw(st.permutations(range(len(requests))))
    for slot in range(len(requests)):
        assert mask.add_request(slot, make_params("long"))  # a request that was in the slot before
        assert mask.add_request(slot, make_params(requests[slot][0]))
    slot_of_row: list[int] = []
    draft_of_row: list[int] = []
    prompt_position_of_row: list[int] = []
    expected: list[list[int]] = []
    for slot in slots:
        name, position = requests[slot]
        for draft in range(data.draw(st.integers(1, 3))):
            slot_of_row.append(slot)
            draft_of_row.append(draft)
            prompt_position_of_row.append(int(prompts[slot]) + position + draft - 1)
            expected.append(list_allowed_ids(model, name, position + draft))
    num_rows = len(slot_of_row)
    context = interface.LogitsContext(
        expanded_idx_mapping=torch.tensor(slot_of_row),
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        expanded_local_pos=torch.tensor(draft_of_row),
        input_ids=torch.zeros(num_rows, dtype=torch.int64),
        pos=torch.tensor(prompt_position_of_row),
        seq_lens_upper_bound_np=np.zeros(len(slots)),
    )
    logits = mask.apply(torch.zeros(num_rows, VOCABULARY), context)
    assert list_finite_ids(logits) == expected


@pytest.mark.parametrize(
    "drafts",
    [None, SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)],
    ids=["none", "drafts"],
)
def test_a_temperature_beside_drafts_on_a_cpu(drafts: Any) -> None:
    """It is refused as long as vLLM's CPU build loses the temperatures of drafts."""
    engine = SimpleNamespace(vllm_config=VllmConfig())
    engine.vllm_config.speculative_config = drafts
    output = BoundOutput(Output("same", any_id(0, 4) * 2, get_ids), "m", Scope(), VOCABULARY, frozenset())
    current_platform.import_kernels()
    temperatures = torch.zeros(2)
    _expand_kernel_impl(temperatures, torch.tensor([0.5]), torch.tensor([2]), 0, 1)
    is_lost = temperatures.tolist() != [0.5, 0.5]
    assert sampling.sampling_params(output, engine, temperature=0.0).temperature == 0.0
    if drafts and is_lost:
        sentence = (
            "m.outputs.same: expected temperature=0 beside speculative_config on a CPU, got 0.7. This vLLM samples "
            "drafts there at arbitrary temperatures, masked ids included."
        )
        with refuses(InputError, sentence):
            sampling.sampling_params(output, engine, temperature=0.7)
    else:
        assert sampling.sampling_params(output, engine, temperature=0.7).temperature == 0.7

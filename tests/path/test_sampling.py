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
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.cpu_triton_utils import _expand_kernel_impl
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from mmkit import InputError, Output, any_id, literal
from mmkit.language.expr import Scope
from mmkit.model import sampling
from mmkit.plan.allowed_ids import AllowedIds
from mmkit.plan.output import BoundOutput
from mmkit.vllm_api import confinement
from tests.unit.common import refuses

VOCABULARY, PLACEHOLDER = 16, 15
BEGIN, END = 12, 13
PAIR = any_id(0, 4) + any_id(3, 9)


def get_ids(ids: Any, scope: Scope) -> Any:
    return ids


OUTPUTS = [
    Output("short", any_id(0, 4) * 2, get_ids),
    Output("long", (any_id(3, 9) + any_id(8, 15)) * 2 + literal(14), get_ids),
    Output("pairs", PAIR, get_ids, after=BEGIN, until=END, most=2),
    Output("pair", PAIR, get_ids, after=BEGIN),
]
LAYOUTS = ["short", "long"]
IN_TEXTS = ["pairs", "pair"]


class Model:
    """A model, as far as the sampler looks."""

    def __init__(self) -> None:
        self.mm_engine = SimpleNamespace()
        placeholders = frozenset({PLACEHOLDER})
        outputs: dict[str, BoundOutput] = {}
        for output in OUTPUTS:
            outputs[output.name] = BoundOutput(output, "m", Scope(), VOCABULARY, placeholders)
        self.mm_plan = SimpleNamespace(outputs=outputs, embed_ids=placeholders)
        self.allowed_ids = AllowedIds(self.mm_plan)
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


# -- outputs in a text -------------------------------------------------------------------------------------------------


def list_allowed_behind(model: Model, name: Any, ids: list[int]) -> list[int]:
    """Return the ids that may be sampled behind these, by a walk through them from the first to the last."""
    if name not in IN_TEXTS:
        return list_allowed_ids(model, None, 0)
    most = {"pairs": 2, "pair": 1}[name]
    body: list[int] | None = None
    for token in ids:
        if token == BEGIN:
            body = []
        elif body is not None:
            num_pairs, place = divmod(len(body), 2)
            is_inside = num_pairs < most and token in [range(0, 4), range(3, 9)][place]
            body = [*body, token] if is_inside else None
        if name == "pair" and body is not None and len(body) == 2:
            body = None
    if body is None:
        return list_allowed_ids(model, None, 0)
    num_pairs, place = divmod(len(body), 2)
    allowed = set([range(0, 4), range(3, 9)][place] if num_pairs < most else ())
    if name == "pairs" and num_pairs > 0 and place == 0:
        allowed.add(END)
    return sorted(allowed)


TEXT = st.lists(st.sampled_from([BEGIN, BEGIN, END, 0, 3, 8, 10, PLACEHOLDER]), max_size=9)
NAMES_BESIDE_TEXTS = st.sampled_from([None, *IN_TEXTS, *IN_TEXTS])


@given(st.lists(st.tuples(NAMES_BESIDE_TEXTS, TEXT, TEXT), min_size=1, max_size=5))
def test_outputs_in_the_texts_of_a_batch(requests: list[tuple[Any, list[int], list[int]]]) -> None:
    """What may be sampled depends on the ids of the prompt and of the answer, whatever they are."""
    model = Model()
    mask = sampling.PlaceholderMask(model.mm_engine, torch.device("cpu"), False)
    added: list[Any] = []
    answers: list[list[int]] = []
    for row, (name, prompt, _) in enumerate(requests):
        answers.append([])
        added.append((row, make_params(name), prompt or None, answers[row]))
    mask.update_state(BatchUpdate(len(requests), [], added, []))
    for answer, (_, _, ids) in zip(answers, requests, strict=True):
        answer += ids  # vLLM lets the lists grow
    logits = mask.apply(torch.zeros(len(requests), VOCABULARY))
    expected = [list_allowed_behind(model, name, prompt + ids) for name, prompt, ids in requests]
    assert list_finite_ids(logits) == expected


@given(st.lists(st.tuples(NAMES_BESIDE_TEXTS, TEXT, TEXT), min_size=1, max_size=5), st.data())
def test_outputs_in_texts_with_drafts_in_the_second_model_runner(
    requests: list[tuple[Any, list[int], list[int]]], data: Any
) -> None:
    """Committed ids stand in a table by slot, and drafts in the ids that the model is fed."""
    interface = pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor.interface")
    model = Model()
    table = torch.full((len(requests), 32), 99, dtype=torch.int32)  # behind the committed ids stands anything
    prompt_lengths = torch.zeros(len(requests), dtype=torch.int32)
    states = SimpleNamespace(prompt_len=SimpleNamespace(gpu=prompt_lengths), all_token_ids=SimpleNamespace(gpu=table))
    mask = sampling.PlaceholderMask(model.mm_engine, states)
    fed: list[int] = []
    slot_of_row: list[int] = []
    draft_of_row: list[int] = []
    position_of_row: list[int] = []
    expected: list[list[int]] = []
    slots = data.draw(st.permutations(range(len(requests))))
    for slot in slots:
        name, prompt, drafts = requests[slot]
        prompt = [5, *prompt]
        mask.add_request(slot, make_params(name))
        table[slot, : len(prompt)] = torch.tensor(prompt)
        prompt_lengths[slot] = data.draw(st.integers(1, len(prompt)))
        drafts = drafts[:3]
        for draft in range(len(drafts) + 1):
            ids = prompt + drafts[:draft]
            fed.append(ids[-1])
            slot_of_row.append(slot)
            draft_of_row.append(draft)
            position_of_row.append(len(ids) - 1)
            expected.append(list_allowed_behind(model, name, ids))
    context = interface.LogitsContext(
        expanded_idx_mapping=torch.tensor(slot_of_row, dtype=torch.int32),
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        expanded_local_pos=torch.tensor(draft_of_row, dtype=torch.int32),
        input_ids=torch.tensor(fed, dtype=torch.int32),
        pos=torch.tensor(position_of_row),
        seq_lens_upper_bound_np=np.zeros(len(slots)),
    )
    logits = mask.apply(torch.zeros(len(fed), VOCABULARY), context)
    assert list_finite_ids(logits) == expected


def test_drawn_answers_split_into_texts_and_whole_outputs() -> None:
    """Of 400 answers of 30 ids each, only the last output may be cut off."""
    model = Model()
    mask = sampling.PlaceholderMask(model.mm_engine, torch.device("cpu"), False)
    names = [IN_TEXTS[row % 2] for row in range(400)]
    answers: list[list[int]] = [[] for _ in names]
    added = [(row, make_params(name), [5], answers[row]) for row, name in enumerate(names)]
    mask.update_state(BatchUpdate(len(names), [], added, []))
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        logits = torch.randn(len(names), VOCABULARY, generator=generator) * 2
        logits = mask.apply(logits)
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator).flatten().tolist()
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
    num_whole = 0
    for name, answer in zip(names, answers, strict=True):
        parts = model.mm_plan.outputs[name].split_answer(answer)
        num_whole += sum(part.array is not None for part in parts)
        assert [part for part in parts[:-1] if part.is_output and part.array is None] == []
        assert PLACEHOLDER not in answer
    assert num_whole > 400


def make_engine(**options: Any) -> Any:
    """Return an engine of the first model runner, as far as its configuration is looked at."""
    config = VllmConfig()
    config.scheduler_config.async_scheduling = options.get("is_asynchronous", False)
    config.speculative_config = options.get("drafts")
    model_config = SimpleNamespace(logits_processors=options.get("processors"))
    return SimpleNamespace(vllm_config=ConfigOf(config, model_config))


class ConfigOf:
    """A configuration of vLLM with another model."""

    def __init__(self, config: Any, model_config: Any) -> None:
        self._config = config
        self.model_config = model_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)
PROCESSOR = "mmkit.model.sampling:PlaceholderMask"
ENGINES = [
    ("", {}),
    ("", {"is_asynchronous": True, "processors": [PROCESSOR]}),
    ("", {"is_asynchronous": True, "processors": [sampling.PlaceholderMask]}),
    (
        "m.outputs.pairs: expected an engine whose logits processors see the sampled ids, got asynchronous scheduling, "
        f"in which they see them only if they are named. Start it with logits_processors=['{PROCESSOR}'], or "
        "async_scheduling=False.",
        {"is_asynchronous": True},
    ),
    (
        "m.outputs.pairs: expected an engine that confines each position, got one that makes no logits processor of "
        "mmkit's, as with speculative decoding. Start it without speculative_config, and with mmkit installed.",
        {"drafts": DRAFTS},
    ),
]


@pytest.mark.parametrize(("sentence", "options"), ENGINES)
def test_engines_that_confine_outputs_in_texts(sentence: str, options: Any) -> None:
    """Where an engine cannot, the function refuses and so does the last check before it, whatever the route."""
    engine = make_engine(**options)
    plan = SimpleNamespace(outputs=Model().mm_plan.outputs, spec=SimpleNamespace(name="m"))
    params = SamplingParams(extra_args={"mmkit_output": "pairs"})
    if not sentence:
        chosen = sampling.sampling_params(plan.outputs["pairs"], engine, seed=1)
        assert (chosen.max_tokens, chosen.ignore_eos, chosen.detokenize) == (None, False, True)
        assert chosen.extra_args == {"mmkit_output": "pairs"}
        confinement.check_requested_output(plan, params, engine.vllm_config)
        return
    with refuses(InputError, sentence):
        sampling.sampling_params(plan.outputs["pairs"], engine)
    with refuses(InputError, sentence):
        confinement.check_requested_output(plan, params, engine.vllm_config)


@pytest.mark.parametrize(
    "option",
    [
        {"min_tokens": 2},
        {"allowed_token_ids": [1]},
        {"bad_words": ["a"]},
        {"structured_outputs": StructuredOutputsParams(json_object=True)},
    ],
)
def test_options_that_contradict_an_output_in_a_text(option: dict[str, Any]) -> None:
    plan = SimpleNamespace(outputs=Model().mm_plan.outputs, spec=SimpleNamespace(name="m"))
    (name,) = option
    with refuses(InputError, f"{name}: expected none beside output 'pairs', got some."):
        sampling.sampling_params(plan.outputs["pairs"], make_engine(), **option)
    params = SamplingParams(extra_args={"mmkit_output": "pairs"}, **option)
    with refuses(InputError, f"m.{name}: expected none beside output 'pairs', got some."):
        confinement.check_requested_output(plan, params, None)


def test_requests_for_outputs_that_the_spec_lacks() -> None:
    plan = SimpleNamespace(outputs=Model().mm_plan.outputs, spec=SimpleNamespace(name="m"))
    for name in ("film", 7):
        params = SamplingParams(extra_args={"mmkit_output": name})
        with refuses(InputError, f"m.mmkit_output: expected one of short, long, pairs, pair, got {name!r}."):
            confinement.check_requested_output(plan, params, None)
    plan.outputs = {}
    with refuses(InputError, "m.mmkit_output: expected none, as the spec declares none, got 7."):
        confinement.check_requested_output(plan, params, None)


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

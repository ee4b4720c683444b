"""The time-series model in the engine, with its committed checkpoint, compared with its reference."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams

from examples.series import CHECKPOINT, register
from examples.series.grpo import learn
from examples.series.model import WavesForCausalLM as Served
from examples.series.offline import answer, engine
from examples.series.picture import draw
from examples.series.reference import WavesForCausalLM
from examples.series.spec import WAVES
from examples.series.waves import ANSWER_WORDS, FIRST_TEST_SEED, FIRST_TRAINING_SEED, PROMPT, SHAPES, Wave, make_wave
from mmkit import InputError
from mmkit.training import Collator
from tests.engine.processes import engines_in_this_process

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "series.svg"
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<series>' if part.type == 'series' else part.text }} {% endfor %}{% endfor %}"
)
HELD_OUT = [make_wave(seed) for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + 100)]
SERIES = [wave.series for wave in HELD_OUT]
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER_WORDS)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    register()
    with engines_in_this_process() as engines:
        yield engines.enter_context(engine(CHECKPOINT, seed=0, enforce_eager=True))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def model() -> Any:
    return WavesForCausalLM.from_pretrained(CHECKPOINT).eval()


def share(ids: list[list[int]], tokenizer: Any, waves: list[Wave]) -> float:
    return sum(tokenizer.decode(one) == wave.answer for one, wave in zip(ids, waves, strict=True)) / len(waves)


def turns(parts: list[Any], tokenizer: Any) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Three turns of a conversation, each with the request for `LLM.generate` that it is."""
    messages: list[dict[str, Any]] = []
    text, series = "", []
    for numbers in ([0, 1], [2], [3, 4]):
        content = [{"type": "series", "series": parts[number]} for number in numbers]
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": "is a"}]})
        text += "<series> " * len(numbers) + "is a"
        series += [SERIES[number] for number in numbers]
        yield messages, {"prompt_token_ids": tokenizer.encode(text), "multi_modal_data": {"series": [*series]}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": HELD_OUT[numbers[-1]].answer}]})
        text += f" {HELD_OUT[numbers[-1]].answer} "


def generated(llm: Any, request: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The ids of the prompt and of the answer."""
    (result,) = llm.generate([request], GREEDY, use_tqdm=False)
    return result.prompt_token_ids, list(result.outputs[0].token_ids)


def test_answers_follow_the_series(llm: Any, tokenizer: Any) -> None:
    assert FIRST_TEST_SEED + len(HELD_OUT) <= FIRST_TRAINING_SEED
    ids = answer(llm, SERIES)
    assert share(ids, tokenizer, HELD_OUT) >= 0.95
    assert share(ids, tokenizer, HELD_OUT[1:] + HELD_OUT[:1]) <= 0.1  # with another series in its place
    shown = [next(i for i, wave in enumerate(HELD_OUT) if wave.answer.startswith(shape)) for shape in SHAPES]
    picture = draw([SERIES[i] for i in shown], [tokenizer.decode(ids[i]) for i in shown])
    assert picture == PICTURE.read_text()


def test_same_ids_as_the_reference(llm: Any, model: Any, tokenizer: Any) -> None:
    """Also after a series that is refused."""
    with pytest.raises(InputError, match=r"waves\.series\[0\]: expected a \(1\.\.64, 1\) float32 tensor"):
        answer(llm, [torch.zeros(65, 1)])
    processor = WAVES.hf_processor(model.config, tokenizer)
    expected = [model.answer(processor, PROMPT, one, ANSWER_WORDS) for one in SERIES[:40]]
    assert answer(llm, SERIES[:40]) == expected


def test_an_encoder_with_other_rows_does_not_end_the_engine(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer beside such an item, and those after it, are as before."""
    expected = answer(llm, SERIES[:4])
    encode = Served.embed_series

    def embed_series(self: Served, series: Any) -> Any:
        return [rows[1:] if one[0, 0] == 13 else rows for one, rows in zip(series, encode(self, series), strict=True)]

    monkeypatch.setattr(Served, "embed_series", embed_series)
    unlucky = torch.full((9, 1), 13.0)
    assert len(answer(llm, [SERIES[50], unlucky, SERIES[51]])) == 3
    monkeypatch.undo()
    assert answer(llm, SERIES[:4]) == expected
    assert answer(llm, SERIES[50:52]) == answer(llm, [SERIES[51], SERIES[50]])[::-1]


def test_series_in_a_chat(llm: Any, tokenizer: Any) -> None:
    """Several in a turn, as the processor of a trainer has them."""
    processor = WAVES.hf_processor(llm.llm_engine.model_config.hf_config, tokenizer)
    for messages, request in turns(SERIES, tokenizer):
        (result,) = llm.chat([messages], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
        prompt, ids = result.prompt_token_ids, list(result.outputs[0].token_ids)
        inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True)
        assert inputs["input_ids"].tolist() == [prompt]
        assert (prompt, ids) == generated(llm, request)
    unknown = [{"role": "user", "content": [{"type": "waves", "waves": [[1.0]]}]}]
    with pytest.raises(InputError, match="messages: expected a part of a type among text, series, got 'waves'"):
        llm.chat([unknown], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    # a template of texts: placeholders first, as those of images
    texts = {"chat_template_content_format": "string", "chat_template": "{{ messages[0].content }}"}
    (result,) = llm.chat([messages[-2:-1]], GREEDY, use_tqdm=False, **texts)
    prompt = {"prompt": "<series> <series> is a", "multi_modal_data": {"series": SERIES[3:5]}}
    assert result.prompt_token_ids == generated(llm, prompt)[0]


def test_rollouts_are_what_is_trained_on(llm: Any, model: Any, tokenizer: Any) -> None:
    """Updates of a copy: the prompts of both sides are one, and so are the log probabilities, to rounding. The engine
    has the updated weights afterwards, so this is the last test of the file."""
    learner = copy.deepcopy(model)
    steps = list(learn(llm, learner, Collator(WAVES.hf_processor(model.config, tokenizer)), 3))
    assert len(steps) == 3
    assert max(step.difference for step in steps) < 1e-4
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), learner.parameters(), strict=True))

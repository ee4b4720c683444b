"""The time-series model in the engine, with its committed checkpoint, compared with its reference."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from tests.engine.rounding import ROUNDING

pytestmark = pytest.mark.gpu

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


def compute_share(ids_of_answers: list[list[int]], tokenizer: Any, waves: list[Wave]) -> float:
    """Return the share of the answers, from 0 to 1, that are right for these waves."""
    right = 0
    for ids, wave in zip(ids_of_answers, waves, strict=True):
        if tokenizer.decode(ids) == wave.answer:
            right += 1
    return right / len(waves)


class Turn(NamedTuple):
    """A conversation up to a message of the user."""

    messages: list[dict[str, Any]]
    """For a chat."""
    request: dict[str, Any]
    """The conversation for `LLM.generate`."""


def make_turns(parts: list[Any], tokenizer: Any) -> Iterator[Turn]:
    """Yield three turns of a conversation, in which series are sent as `parts`.

    All turns share one list of messages: read each before the next one is made.
    """
    messages: list[dict[str, Any]] = []
    text = ""
    series = []
    for numbers in ([0, 1], [2], [3, 4]):
        content = [{"type": "series", "series": parts[number]} for number in numbers]
        content.append({"type": "text", "text": "is a"})
        messages.append({"role": "user", "content": content})
        text += "<series> " * len(numbers) + "is a"
        series += [SERIES[number] for number in numbers]

        request = {"prompt_token_ids": tokenizer.encode(text), "multi_modal_data": {"series": series.copy()}}
        yield Turn(messages, request)

        answer_of_turn = HELD_OUT[numbers[-1]].answer
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer_of_turn}]})
        text += f" {answer_of_turn} "


def generate(llm: Any, request: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the answer."""
    (result,) = llm.generate([request], GREEDY, use_tqdm=False)
    return result.prompt_token_ids, list(result.outputs[0].token_ids)


def find_wave_of_shape(shape: str) -> int:
    """Return the number of the first wave of a shape among HELD_OUT."""
    for number, wave in enumerate(HELD_OUT):
        if wave.answer.startswith(shape):
            return number
    raise ValueError(shape)


def test_answers_follow_the_series(llm: Any, tokenizer: Any) -> None:
    assert FIRST_TEST_SEED + len(HELD_OUT) <= FIRST_TRAINING_SEED

    ids = answer(llm, SERIES)

    assert compute_share(ids, tokenizer, HELD_OUT) >= 0.95
    other_waves = HELD_OUT[1:] + HELD_OUT[:1]
    assert compute_share(ids, tokenizer, other_waves) <= 0.1


def test_the_picture_of_the_documentation_shows_the_answers(llm: Any, tokenizer: Any) -> None:
    ids = answer(llm, SERIES)
    numbers = [find_wave_of_shape(shape) for shape in SHAPES]

    picture = draw([SERIES[number] for number in numbers], [tokenizer.decode(ids[number]) for number in numbers])

    assert picture == PICTURE.read_text()


def test_answers_are_those_of_the_reference_also_after_a_refusal(llm: Any, model: Any, tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"waves\.series\[0\]: expected a \(1\.\.64, 1\) float32 tensor"):
        answer(llm, [torch.zeros(65, 1)])

    processor = WAVES.hf_processor(model.config, tokenizer)
    expected = [model.answer(processor, PROMPT, series, ANSWER_WORDS) for series in SERIES[:40]]
    assert answer(llm, SERIES[:40]) == expected


def test_an_encoder_with_other_rows_does_not_end_the_engine(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of the same batch and those after it are as before."""
    expected = answer(llm, SERIES[:4])
    encode = Served.embed_series

    def embed_with_a_row_missing(self: Served, series: Any) -> list[torch.Tensor]:
        rows_of_items = list(encode(self, series))
        for number, item in enumerate(series):
            if item[0, 0] == 13:
                rows_of_items[number] = rows_of_items[number][1:]
        return rows_of_items

    monkeypatch.setattr(Served, "embed_series", embed_with_a_row_missing)
    unlucky = torch.full((9, 1), 13.0)
    assert len(answer(llm, [SERIES[50], unlucky, SERIES[51]])) == 3

    monkeypatch.undo()
    assert answer(llm, SERIES[:4]) == expected
    assert answer(llm, SERIES[50:52]) == answer(llm, [SERIES[51], SERIES[50]])[::-1]


def test_a_chat_with_series_gives_the_ids_of_the_request_and_of_the_processor_for_training(
    llm: Any, tokenizer: Any
) -> None:
    processor = WAVES.hf_processor(llm.llm_engine.model_config.hf_config, tokenizer)
    for messages, request in make_turns(SERIES, tokenizer):
        (result,) = llm.chat([messages], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
        prompt_ids = result.prompt_token_ids
        answer_ids = list(result.outputs[0].token_ids)

        inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True)
        assert inputs["input_ids"].tolist() == [prompt_ids]
        assert (prompt_ids, answer_ids) == generate(llm, request)


def test_a_chat_refuses_parts_of_an_unknown_type(llm: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "waves", "waves": [[1.0]]}]}]
    with pytest.raises(InputError, match="messages: expected a part of a type among text, series, got 'waves'"):
        llm.chat([messages], GREEDY, use_tqdm=False, chat_template=TEMPLATE)


def test_a_chat_template_of_texts_has_the_targets_in_front_of_the_text(llm: Any) -> None:
    """vLLM puts those of images there, too."""
    content: list[dict[str, Any]] = [{"type": "series", "series": series} for series in SERIES[3:5]]
    content.append({"type": "text", "text": "is a"})
    messages: Any = [{"role": "user", "content": content}]

    (result,) = llm.chat(
        [messages],
        GREEDY,
        use_tqdm=False,
        chat_template="{{ messages[0].content }}",
        chat_template_content_format="string",
    )

    request = {"prompt": "<series> <series> is a", "multi_modal_data": {"series": SERIES[3:5]}}
    prompt_ids, _ = generate(llm, request)
    assert result.prompt_token_ids == prompt_ids


def test_rollouts_are_what_is_trained_on(llm: Any, model: Any, tokenizer: Any) -> None:
    """A copy of the model learns: the engine and the learner have equal prompts, and log probabilities that differ only
    by rounding.

    The engine has the updated weights afterwards, so this is the last test of the file.
    """
    learner = copy.deepcopy(model)
    collator = Collator(WAVES.hf_processor(model.config, tokenizer))

    steps = list(learn(llm, learner, collator, 3))

    assert len(steps) == 3
    assert max(step.difference for step in steps) < ROUNDING
    weights = torch.cat([weight.flatten() for weight in model.parameters()])
    learnt_weights = torch.cat([weight.flatten() for weight in learner.parameters()])
    assert not torch.equal(weights, learnt_weights)

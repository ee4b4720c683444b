"""The time-series model: trained here, run in the engine, compared with its reference."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from examples.series import register
from examples.series.offline import answer, engine
from examples.series.picture import draw
from examples.series.spec import WAVES
from examples.series.train import train
from examples.series.waves import ANSWER_WORDS, FIRST_TEST_SEED, FIRST_TRAINING_SEED, PROMPT, SHAPES, Wave, make_wave
from mmkit import InputError
from tests.engine.processes import engines_in_this_process

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "series.svg"
HELD_OUT = [make_wave(seed) for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + 100)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A trained checkpoint, the reference and its tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    torch.set_num_threads(1)
    model, tokenizer = train(250, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def llm(trained: tuple[Path, Any, Any]) -> Iterator[Any]:
    register()
    with engines_in_this_process() as engines:
        yield engines.enter_context(engine(trained[0], seed=0))


def share(ids: list[list[int]], tokenizer: Any, waves: list[Wave]) -> float:
    return sum(tokenizer.decode(one) == wave.answer for one, wave in zip(ids, waves, strict=True)) / len(waves)


def test_answers_follow_the_series(llm: Any, trained: tuple[Path, Any, Any]) -> None:
    assert FIRST_TEST_SEED + len(HELD_OUT) <= FIRST_TRAINING_SEED
    _, _, tokenizer = trained
    ids = answer(llm, [wave.series for wave in HELD_OUT])
    assert share(ids, tokenizer, HELD_OUT) >= 0.95
    assert share(ids, tokenizer, HELD_OUT[1:] + HELD_OUT[:1]) <= 0.1  # with another series in its place
    shown = [next(i for i, wave in enumerate(HELD_OUT) if wave.answer.startswith(shape)) for shape in SHAPES]
    picture = draw([HELD_OUT[i].series for i in shown], [tokenizer.decode(ids[i]) for i in shown])
    assert picture == PICTURE.read_text()


def test_same_ids_as_the_reference(llm: Any, trained: tuple[Path, Any, Any]) -> None:
    _, model, tokenizer = trained
    plan = WAVES.bind(model.config, tokenizer)
    waves = HELD_OUT[:40]
    expected = [model.answer(plan, tokenizer.encode(PROMPT), [wave.series], ANSWER_WORDS) for wave in waves]
    assert answer(llm, [wave.series for wave in waves]) == expected


def test_two_series_of_one_request(llm: Any, trained: tuple[Path, Any, Any]) -> None:
    from vllm import SamplingParams

    _, _, tokenizer = trained
    first, second = HELD_OUT[:2]
    prompt = f"{PROMPT} {first.answer} . {PROMPT}"
    request = {"prompt": prompt, "multi_modal_data": {"series": [first.series, second.series]}}
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_WORDS)
    (result,) = llm.generate([request], sampling, use_tqdm=False)
    assert tokenizer.decode(result.outputs[0].token_ids) == second.answer


def test_a_malformed_series_is_refused(llm: Any) -> None:
    with pytest.raises(InputError, match=r"waves\.series\[0\]: expected a \(1\.\.64, 1\) float32 tensor"):
        answer(llm, [torch.zeros(65, 1)])
    assert len(answer(llm, [torch.zeros(64, 1)])) == 1

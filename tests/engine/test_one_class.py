"""A class of transformers that vLLM runs itself, compared with transformers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams

from examples.series import CHECKPOINT
from examples.series.offline import answer, engine
from examples.series.spec import WAVES
from examples.series.waves import ANSWER_WORDS, FIRST_TEST_SEED, PROMPT, make_wave
from mmkit import InputError
from tests.engine.one_class import OneClassWavesForCausalLM, register
from tests.engine.processes import engines_in_this_process
from tests.engine.rounding import ROUNDING

pytestmark = pytest.mark.gpu

SERIES = [make_wave(seed).series for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + 30)]


@pytest.fixture(scope="module")
def model() -> Any:
    return OneClassWavesForCausalLM.from_pretrained(CHECKPOINT).eval()


@pytest.fixture(scope="module")
def processor(model: Any) -> Any:
    return WAVES.hf_processor(model.config, AutoTokenizer.from_pretrained(CHECKPOINT))


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    register()
    # 24 tokens a step cut a prompt into pieces, 32 a block let the prefix cache act
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 32, "enforce_eager": True}
    options["hf_overrides"] = {"architectures": ["OneClassWavesForCausalLM"]}
    with engines_in_this_process() as engines:
        yield engines.enter_context(engine(CHECKPOINT, **options))


def test_ids_are_those_of_transformers(llm: Any, model: Any, processor: Any) -> None:
    """Those of a `forward` of its own, of which vLLM's backend by itself runs the decoder alone."""
    with pytest.raises(InputError, match=r"waves\.series\[0\]: expected a \(1\.\.64, 1\) float32 tensor"):
        answer(llm, [torch.zeros(65, 1)])

    expected = [model.answer(processor, PROMPT, series, ANSWER_WORDS) for series in SERIES]
    assert answer(llm, SERIES) == expected
    assert len(set(map(tuple, expected))) > 5


def test_log_probabilities_are_those_of_transformers(llm: Any, model: Any, processor: Any) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=10)
    requests = [{"prompt": PROMPT, "multi_modal_data": {"series": series}} for series in SERIES[:5]]
    results = llm.generate(requests, sampling, use_tqdm=False)
    for series, result in zip(SERIES, results, strict=False):
        with torch.inference_mode():
            logits = model(**processor(PROMPT, series=series)).logits[0, -1]
        expected = logits.log_softmax(-1)
        for token, entry in result.outputs[0].logprobs[0].items():
            assert entry.logprob == pytest.approx(expected[token].item(), abs=ROUNDING)


def test_prompts_in_pieces_and_from_the_prefix_cache(llm: Any, model: Any, processor: Any) -> None:
    prompt = "<series> is a sine wave of period 8 . " * 3 + PROMPT
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_WORDS)
    expected = model.answer(processor, prompt, SERIES[:4], ANSWER_WORDS)
    request = {"prompt": prompt, "multi_modal_data": {"series": SERIES[:4]}}
    num_cached = []
    for _ in range(2):
        (result,) = llm.generate([request], sampling, use_tqdm=False)
        assert list(result.outputs[0].token_ids) == expected
        num_cached.append(result.num_cached_tokens)
    assert num_cached[1] > num_cached[0]

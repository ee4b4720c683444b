"""Outputs in the engine: the actions of a vision-language-action model, and positions that are confined one by one."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm import SamplingParams

from examples.llava_like.offline import engine
from examples.vla import register
from examples.vla.checkpoint import STATISTICS, make_checkpoint
from examples.vla.spec import BINS, CENTRES
from mmkit import InputError
from mmkit.model import sampling_params
from tests.engine.processes import engines_in_this_process

from .vla import OVERRIDES, WITH_TABLES


def request(shade: int) -> dict[str, Any]:
    picture = Image.new("RGB", (56, 56), (shade, 128, 255 - shade))
    return {"prompt": "<image>pick up the can", "multi_modal_data": {"image": picture}}


REQUESTS = [request(shade) for shade in range(0, 240, 10)]
FREE = SamplingParams(temperature=0.0, max_tokens=29, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("vla"))


@pytest.fixture(scope="module")
def engines() -> Iterator[ExitStack]:
    register()
    with engines_in_this_process() as stack:
        yield stack


@pytest.fixture(scope="module")
def vla(checkpoint: Path, engines: ExitStack) -> Any:
    return engines.enter_context(engine(checkpoint, seed=0, hf_overrides=OVERRIDES))


@pytest.fixture(scope="module")
def outputs(vla: Any, checkpoint: Path) -> Any:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    return WITH_TABLES.bind(vla.model_config.hf_config, processor.tokenizer, processor=processor).outputs


def ids_of(llm: Any, requests: Any, params: Any) -> list[list[int]]:
    results = llm.generate(requests, params, use_tqdm=False)
    return [list(part.token_ids) for result in results for part in result.outputs]


def test_an_action_has_seven_tokens_whatever_the_model_would_say(vla: Any, outputs: Any) -> None:
    action, size = outputs["action"], vla.model_config.hf_config.text_config.vocab_size
    said, *_ = ids_of(vla, REQUESTS[:1], FREE)
    with pytest.raises(InputError, match=r"vla\.outputs\.action\[\d\]: expected an id from"):
        action.decode(said[:7])
    ids = ids_of(vla, REQUESTS, sampling_params(action, vla, temperature=0.0))
    actions = [action.decode(one) for one in ids]
    low, high = (np.array(STATISTICS[name]) for name in ("q01", "q99"))
    for one, array in zip(ids, actions, strict=True):
        bins = [min(size - 1 - token, BINS - 2) for token in one]
        assert np.allclose(array, (CENTRES[bins] + 1) / 2 * (high - low) + low)
        assert (action.decode(action.encode(array)) == array).all()
    assert len(np.unique(actions, axis=0)) > 1


def test_each_position_of_each_request_has_its_own_ids(vla: Any, outputs: Any) -> None:
    """Confined or not, of both outputs, several answers each, begun at different steps and moved within the batch."""
    table, action = outputs["table"], outputs["action"]
    alone = ids_of(vla, REQUESTS, FREE)
    wild = {"temperature": 2.0, "seed": 0, "n": 3}
    params = [FREE, sampling_params(table, vla, **wild), sampling_params(action, vla, **wild)]
    results = vla.generate(REQUESTS, [params[i % 3] for i in range(len(REQUESTS))], use_tqdm=False)
    drawn: list[Any] = []
    for i, result in enumerate(results):
        ids = [list(part.token_ids) for part in result.outputs]
        if i % 3 == 0:
            assert ids == [alone[i]]
        else:
            drawn += [(table if i % 3 == 1 else action).decode(one).tolist() for one in ids]
    assert len({str(one) for one in drawn}) > 16, "answers differ, and so do the requests"


def test_what_contradicts_an_output_is_refused(vla: Any, outputs: Any) -> None:
    for option in ({"max_tokens": 3}, {"ignore_eos": False}, {"stop_token_ids": [3]}, {"allowed_token_ids": [3]}):
        (name,) = option
        with pytest.raises(InputError, match=rf"^{name}: expected (\w+ or )?none beside output 'action', got "):
            sampling_params(outputs["action"], vla, **option)


def test_names_that_are_no_output_change_nothing(vla: Any) -> None:
    """What any caller may send as `vllm_xargs`."""
    alone = ids_of(vla, REQUESTS[:3], FREE)
    for name in ("film", ["action"], 7, None):
        odd = SamplingParams(temperature=0.0, max_tokens=29, ignore_eos=True, extra_args={"mmkit_output": name})
        assert ids_of(vla, REQUESTS[:3], odd) == alone


def test_drafts_keep_to_an_output_of_one_range(
    checkpoint: Path, engines: ExitStack, outputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes no logits processors for speculative decoding: `allowed_token_ids` says it, or nothing does.

    In a process of its own: n-grams import numba, beside which vLLM 0.32 starts no further engine on a CPU.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("MMKIT_MODULES", "tests.night.vla")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    options = {"seed": 0, "hf_overrides": OVERRIDES, "speculative_config": drafts}
    llm = engines.enter_context(engine(checkpoint, **options))
    params = sampling_params(outputs["action"], llm, temperature=2.0, n=3, seed=0)
    assert len(params.allowed_token_ids) == BINS
    for ids in ids_of(llm, REQUESTS, params):
        outputs["action"].decode(ids)
    with pytest.raises(InputError) as refused:
        sampling_params(outputs["table"], llm)
    assert str(refused.value) == (
        "vla.outputs.table: expected an engine that confines each position, got one that makes no logits processor of "
        "mmkit's, as with speculative decoding. Start it without speculative_config, and with mmkit installed."
    )

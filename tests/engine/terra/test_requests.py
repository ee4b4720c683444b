"""Malformed requests: refused before the engine, or harmless in it. For all models: the guard is one."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from examples.terra.spec import TERRA
from examples.terra.worlds import make_episode
from mmkit import InputError

from .rollouts import PAD, expected, generate, prompt_of, request, stacked

GOOD = make_episode(0)
ACTION = GOOD.actions[0]
PROMPT = prompt_of(GOOD)
FOURTH = expected(GOOD.frames[None], GOOD.actions[None], 1)[0, 0].tolist()
FRAME = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)


def with_items(items: Any) -> dict[str, Any]:
    return request(GOOD) | {"multi_modal_data": {"actions": items}}


MALFORMED = {
    "an item": with_items([ACTION, np.full_like(ACTION, np.nan), ACTION]),
    **{f"{count} items": with_items([ACTION] * count) for count in (0, 4, 25)},
    "a placeholder run cut short": request(GOOD) | {"prompt_token_ids": PROMPT[:-1]},
    "an id past the vocabulary": request(GOOD) | {"prompt_token_ids": [PAD + 1, *PROMPT[1:]]},
    "an unknown modality": {"prompt_token_ids": PROMPT, "multi_modal_data": {"image": [ACTION]}},
    **{f"ids {ids}"[:20]: {"prompt_token_ids": ids} for ids in (PROMPT, [1, -1], [2**31, 1], [1, 1.5])},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(terra: Any, name: str) -> None:
    """Before the engine, by the sentence that the plan has for them; the next good request has the right answer. More
    of them, and the sentences, are in tests/unit/test_messages.py."""
    bad = MALFORMED[name]
    with pytest.raises(InputError) as refusal:
        terra.llm.generate([request(GOOD), bad], FRAME, use_tqdm=False)
    with pytest.raises(InputError) as expected:
        TERRA.bind(terra.config).preview(bad["prompt_token_ids"], bad.get("multi_modal_data", {}))
    assert str(refusal.value) == str(expected.value)
    assert not terra.llm.llm_engine.has_unfinished_requests()
    (result,) = terra.llm.generate([request(GOOD)], FRAME, use_tqdm=False)
    assert list(result.outputs[0].token_ids) == FOURTH


@pytest.mark.parametrize("ids", [[PAD] * 6, [1, 2, PAD + 9], [1, -5, 2], [2**31 - 1], [PAD, PAD + 1, -1] * 20], ids=str)
def test_ids_that_pass_no_processor_do_no_harm(terra: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendered inputs skip every check but that of the guard; without it, the engine and its other requests must
    survive them."""
    engine = terra.llm.llm_engine
    rendered = {"type": "token", "prompt_token_ids": ids}
    with pytest.raises(InputError, match=r"^terra\.(prompt\[\d+\]|actions): expected "):
        engine.add_request(f"guarded {ids}", rendered, FRAME)
    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs.__wrapped__)
    engine.add_request(f"raw {ids}", rendered, FRAME)
    finished = [output for _ in range(80) for output in engine.step() if output.finished]
    assert [len(output.outputs[0].token_ids) for output in finished] == [64]
    frames, actions = stacked(range(1))
    assert np.array_equal(generate(terra, frames, actions, 2), expected(frames, actions, 2))

"""Malformed requests are refused before the engine, or do no harm in it. All models share the guard."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from examples.terra.spec import TERRA
from examples.terra.worlds import make_episode
from mmkit import InputError

from .rollouts import PAD, generate, generate_by_reference, make_prompt, make_request, stack_episodes

GOOD = make_episode(0)
ACTION = GOOD.actions[0]
PROMPT = make_prompt(GOOD)
FOURTH_FRAME = generate_by_reference(GOOD.frames[None], GOOD.actions[None], 1)[0, 0].tolist()
FRAME_PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)


def with_items(items: Any) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT, "multi_modal_data": {"actions": items}}


def with_ids(ids: list[Any]) -> dict[str, Any]:
    return make_request(GOOD) | {"prompt_token_ids": ids}


MALFORMED = {
    "an item": with_items([ACTION, np.full_like(ACTION, np.nan), ACTION]),
    "0 items": with_items([]),
    "4 items": with_items([ACTION] * 4),
    "25 items": with_items([ACTION] * 25),
    "a placeholder run cut short": with_ids(PROMPT[:-1]),
    "an id past the vocabulary": with_ids([PAD + 1] + PROMPT[1:]),
    "an unknown modality": {"prompt_token_ids": PROMPT, "multi_modal_data": {"image": [ACTION]}},
    "placeholders without items": {"prompt_token_ids": PROMPT},
    "ids [1, -1]": {"prompt_token_ids": [1, -1]},
    "ids [2147483648, 1]": {"prompt_token_ids": [2**31, 1]},
    "ids [1, 1.5]": {"prompt_token_ids": [1, 1.5]},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused(terra: Any, name: str) -> None:
    """The engine and the plan refuse a request by the same sentence, and the next good request has the right answer.

    More malformed requests, and the sentences, are in tests/unit/test_messages.py.
    """
    malformed = MALFORMED[name]

    with pytest.raises(InputError) as refusal:
        terra.llm.generate([make_request(GOOD), malformed], FRAME_PARAMS, use_tqdm=False)

    with pytest.raises(InputError) as refusal_of_plan:
        TERRA.bind(terra.config).preview(malformed["prompt_token_ids"], malformed.get("multi_modal_data", {}))
    assert str(refusal.value) == str(refusal_of_plan.value)
    assert not terra.llm.llm_engine.has_unfinished_requests()
    (result,) = terra.llm.generate([make_request(GOOD)], FRAME_PARAMS, use_tqdm=False)
    assert list(result.outputs[0].token_ids) == FOURTH_FRAME


@pytest.mark.parametrize("ids", [[PAD] * 6, [1, 2, PAD + 9], [1, -5, 2], [2**31 - 1], [PAD, PAD + 1, -1] * 20], ids=str)
def test_ids_that_pass_no_processor_do_no_harm(terra: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the guard checks rendered inputs. Without the guard, the engine and its other requests survive them."""
    engine = terra.llm.llm_engine
    rendered = {"type": "token", "prompt_token_ids": ids}

    with pytest.raises(InputError, match=r"^terra\.(prompt\[\d+\]|actions): expected "):
        engine.add_request(f"guarded {ids}", rendered, FRAME_PARAMS)

    without_guard = InputProcessor.process_inputs.__wrapped__
    monkeypatch.setattr(InputProcessor, "process_inputs", without_guard)
    engine.add_request(f"raw {ids}", rendered, FRAME_PARAMS)
    lengths = []
    for _ in range(80):
        for output in engine.step():
            if output.finished:
                lengths.append(len(output.outputs[0].token_ids))
    assert lengths == [64]
    frames, actions = stack_episodes(range(1))
    assert np.array_equal(generate(terra, frames, actions, 2), generate_by_reference(frames, actions, 2))

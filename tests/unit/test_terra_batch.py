"""Batch inference of Terra: which episodes are read, and which are refused."""

from typing import Any

import numpy as np
import pytest

from examples.terra import CHECKPOINT
from examples.terra.batch import read_episode
from examples.terra.configuration import LlamaActionConfig
from examples.terra.spec import TERRA
from examples.terra.world import make_episode
from mmkit import InputError

FRAMES = 2
EPISODE = make_episode(0)
CONTEXT, ACTIONS = EPISODE.frames[:3].tolist(), EPISODE.actions


def changed(values: Any, value: float) -> Any:
    """Another first number, as nested lists."""
    copy = np.array(values)
    copy.flat[0] = value
    return copy.tolist()


@pytest.fixture(scope="module")
def config() -> Any:
    return LlamaActionConfig.from_pretrained(CHECKPOINT)


def read(row: dict[str, Any], config: Any) -> tuple[np.ndarray, np.ndarray]:
    return read_episode(row, TERRA.bind(config), config, FRAMES)


@pytest.mark.parametrize("items", [list(ACTIONS), ACTIONS.tolist()])
def test_reads_an_episode(config: Any, items: list[Any]) -> None:
    context, actions = read({"context": CONTEXT, "actions": items}, config)
    assert (context.dtype, actions.dtype) == (np.int64, np.float32)
    assert np.array_equal(context, CONTEXT)
    assert np.array_equal(actions, ACTIONS[:4])


LENGTHS = "context: expected 1 to 23 frames, as the model holds 25 with the 2 to generate, got "
REFUSED = [
    ("actions", None, "actions: expected 4 or more, one after every frame but the last, got 0."),
    ("actions", ACTIONS[:, :5].tolist(), "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3)."),
    ("context", [CONTEXT[0][:9]], "context: expected frames of 64 ids, got one of 9."),
    ("actions", ACTIONS[:3].tolist(), "actions: expected 4 or more, one after every frame but the last, got 3."),
    ("context", EPISODE.frames[:24].tolist(), LENGTHS + "24."),
    ("context", None, LENGTHS + "0."),
    ("actions", changed(ACTIONS, np.nan), "terra.actions[0]: expected finite values of magnitude <= 1000, got nan"),
    ("context", changed(CONTEXT, 99), "terra.prompt[0]: expected a token id from 0 to 31, got 99."),
    ("context", changed(CONTEXT, 31), "terra.actions: expected 4 placeholder(s) [31] * 6 in the prompt for 4 items,"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED)
def test_refuses_in_one_sentence(config: Any, name: str, value: Any, sentence: str) -> None:
    with pytest.raises(InputError) as refusal:
        read({"context": CONTEXT, "actions": ACTIONS.tolist(), name: value}, config)
    assert str(refusal.value).startswith(sentence)
    assert "\n" not in str(refusal.value)

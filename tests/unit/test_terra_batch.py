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

EPISODE = make_episode(0)
CONTEXT, ACTIONS = EPISODE.frames[:3].tolist(), EPISODE.actions
NAN = np.where(np.arange(3) == 0, np.nan, ACTIONS).tolist()
LENGTHS = "context: expected 1 to 23 frames, as the model holds 25 with the 2 to generate, got "
REFUSED = [
    ("actions", None, "actions: expected 4 or more, one after every frame but the last, got 0."),
    ("actions", ACTIONS[:3].tolist(), "actions: expected 4 or more, one after every frame but the last, got 3."),
    ("actions", ACTIONS[:, :5].tolist(), "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3)."),
    ("actions", NAN, "terra.actions[0]: expected finite values of magnitude <= 1000, got nan"),
    ("context", [CONTEXT[0][:9]], "context: expected frames of 64 ids, got one of 9."),
    ("context", EPISODE.frames[:24].tolist(), LENGTHS + "24."),
    ("context", None, LENGTHS + "0."),
    ("context", [[99, *CONTEXT[0][1:]]], "terra.prompt[0]: expected a token id from 0 to 31, got 99."),
    (
        "context",
        [[31, *CONTEXT[0][1:]]],
        "terra.actions: expected 2 placeholder(s) [31] * 6 in the prompt for 2",
    ),
]


def read(row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    config = LlamaActionConfig.from_pretrained(CHECKPOINT)
    return read_episode(row, TERRA.bind(config), config, 2)


@pytest.mark.parametrize("items", [list(ACTIONS), ACTIONS.tolist()], ids=["arrays", "lists"])
def test_reads_an_episode(items: list[Any]) -> None:
    context, actions = read({"context": CONTEXT, "actions": items})
    assert (context.dtype, actions.dtype) == (np.int64, np.float32)
    assert np.array_equal(context, CONTEXT)
    assert np.array_equal(actions, ACTIONS[:4])


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED)
def test_refuses_in_one_sentence(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(InputError) as refusal:
        read({"context": CONTEXT, "actions": ACTIONS.tolist(), name: value})
    assert str(refusal.value).startswith(sentence)
    assert "\n" not in str(refusal.value)

"""Sessions whose window slides: what is generated is what the kept part of the history gives by itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from examples.terra import CHECKPOINT
from examples.terra.reference import LlamaActionForCausalLM
from examples.terra.serve_demo import SAMPLING
from examples.terra.world import make_episode
from mmkit.serve import Client, RequestError

pytestmark = pytest.mark.timeout(600)

PADS = [31] * 6
DRIVE = make_episode(0, num_frames=60)


def laid_out(frames: Sequence[Sequence[int]]) -> list[int]:
    return [token for frame in frames for token in [*frame, *PADS]]


def start(client: Client, window: dict[str, Any], frames: int = 3, **options: Any) -> Any:
    items = {"actions": DRIVE.actions[:frames]}
    return client.session(laid_out(DRIVE.frames[:frames].tolist()), items, window=window, **{**SAMPLING, **options})


def test_a_session_goes_on_as_the_reference_does(client: Client) -> None:
    """33 frames in a model of 25, with three slides."""
    with start(client, {"keep": 20}) as session:
        chunks = [session.first, *(session.next({"actions": [action]}) for action in DRIVE.actions[3:35])]
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    context, actions = torch.from_numpy(DRIVE.frames[None, :3]), torch.from_numpy(DRIVE.actions[None])
    expected = torch.stack(list(reference.rollout(context, actions, 33, keep=20)), dim=1)
    assert [chunk.token_ids for chunk in chunks] == expected[0].tolist()
    slid = {chunk.index: chunk for chunk in chunks if chunk.slid is not None}
    assert list(slid) == [22, 27, 32]
    for chunk in slid.values():
        assert chunk.slid.items == {"actions": 5}
        assert chunk.slid.tokens == 5 * 70
        assert chunk.usage.prompt_tokens == 20 * 70
        assert chunk.remaining == 1750 - 20 * 70 - 64
    assert chunks[21].remaining == 1750 - 24 * 70 - 64
    assert chunks[21].usage.prompt_tokens == 6


@pytest.mark.parametrize(("cut", "first"), [("item", 210), ("turn", 274)])
def test_what_stays_is_what_was_declared(client: Client, cut: str, first: int) -> None:
    """A first frame that stays, at most six items at once. Each chunk is that of a request with the tokens that are
    left, also where an item comes twice."""
    actions = [*DRIVE.actions[:7], *DRIVE.actions[5:14]]
    ids, begin, slid = laid_out(DRIVE.frames[:3].tolist()), 1, []
    with start(client, {"keep": 3, "items": 6, "cut": cut, "prefix": 70}) as session:
        chunk = session.first
        for number, action in enumerate(actions[3:], 3):
            ids += chunk.token_ids
            chunk = session.next({"actions": [action]})
            if chunk.slid is not None:
                slid.append(chunk.slid.tokens)
                begin += chunk.slid.items["actions"]
                ids = ids[:70] + ids[70 + chunk.slid.tokens :]
            ids += PADS
            items = [actions[0], *actions[begin : number + 1]]
            answer = client.generate(ids, {"actions": items}, **SAMPLING)
            assert chunk.token_ids == answer.choices[0].token_ids, number
            assert chunk.remaining == 1750 - len(ids) - 64
    assert slid == [first, 210, 210, 210]


BAD = {
    "not one": (3, "window: expected an object or null, got 3."),
    "keep": ({}, "window.keep: expected a value, got none."),
    "zero": ({"keep": 0}, "window.keep: expected a whole number >= 1, got another one."),
    "cut": ({"keep": 3, "cut": "frame"}, "window.cut: expected one of its values, got 'frame'."),
    "field": ({"keep": 3, "size": 4}, "window.size: expected no field of that name, got one."),
    "more than items": ({"keep": 9, "items": 5}, "window.keep: expected at most the 5 of window.items, got 9."),
    "too many": ({"keep": 2, "items": 2}, "items: expected at most the 2 of window.items, got 3."),
    "long": (
        {"keep": 3, "prefix": 211},
        "window.prefix: expected at most the 210 tokens of the first prompt, got 211.",
    ),
    "inside": (
        {"keep": 3, "prefix": 68},
        "window.prefix: expected 64 or 70, at an end of an item of actions, got 68.",
    ),
}


@pytest.mark.parametrize(("window", "message"), [pytest.param(*row, id=name) for name, row in BAD.items()])
def test_a_window_that_cannot_be_is_refused(client: Client, window: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught, start(client, window):
        pass
    assert str(caught.value).startswith(message)
    assert caught.value.code == 400


def test_what_fits_into_no_window_is_refused_and_the_session_goes_on(client: Client) -> None:
    def told(*message: Any, **options: Any) -> str:
        with pytest.raises(RequestError) as caught:
            session.next(*message, **options)
        return str(caught.value)

    with start(client, {"keep": 2}) as session, start(client, {"keep": 2}) as other:
        zeros = np.zeros((25, 6, 3), np.float32)
        assert told({"actions": zeros}).startswith("terra.actions: expected fewer items, got 25. At most 24")
        # the last frame is what is left at least
        refused = "max_tokens: expected at most 1686 more tokens in this window, got 1700 of the prompt"
        assert told(None, [1] * 1700).startswith(refused)
        assert told({"actions": zeros[:1, :5]}).startswith("terra.actions[0]: expected a (6, 3) float32 tensor")
        after = session.next({"actions": zeros[:1]}, max_tokens=8)
        assert after.slid is None
        assert after.token_ids == other.next({"actions": zeros[:1]}, max_tokens=8).token_ids

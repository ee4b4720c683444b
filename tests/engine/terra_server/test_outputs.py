"""What comes out of a real server as an output: pictures of frames, whole, streamed and in a session."""

import numpy as np
import pytest

from examples.terra.world import render
from mmkit.serve import RequestError
from tests.night.malformed import ACTIONS, FRAMES, prompt_of

pytestmark = pytest.mark.timeout(600)

PROMPT, ITEMS = prompt_of(0, 3), {"actions": ACTIONS[0, :3]}
FRAME = {"output": "frame", "temperature": 0.0}
WILD = {"output": "frame", "temperature": 2.0}


def picture(ids):
    return np.array(render(ids))


def test_the_model_tells_its_outputs(client):
    (frame,) = client.modalities().outputs
    assert frame.model_dump() == {
        "name": "frame",
        "tokens": 64,
        "shape": [192, 192, 3],
        "dtype": "uint8",
        "png": True,
    }


@pytest.mark.parametrize("form", [{}, {"output_format": "tensor"}, {"output_format": "png"}])
def test_a_request_is_answered_with_the_picture_of_the_reference_frame(client, frames, form):
    (choice,) = client.generate(PROMPT, ITEMS, **FRAME, **form).choices
    assert choice.token_ids == frames[0].tolist()
    assert (choice.output == picture(frames[0])).all()
    assert (choice.produced.png is not None) == (form.get("output_format") == "png")


def test_each_of_several_answers_has_its_own(client):
    unheard = {"actions": np.full((3, 6, 3), 500.0, np.float32)}
    choices = client.generate(PROMPT, unheard, **WILD, n=3, seed=1).choices
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    for choice in choices:
        assert (choice.output == picture(choice.token_ids)).all()


def test_a_stream_ends_with_it(client, frames):
    *before, last = [c for event in client.stream(PROMPT, ITEMS, **FRAME) for c in event.choices]
    assert all(choice.output is None for choice in before)
    assert (last.output == picture(frames[0])).all()


def test_every_chunk_of_a_session_has_one(client, frames):
    with client.session(PROMPT, ITEMS, **FRAME) as session:
        chunks = [session.first, *(session.next({"actions": [action]}) for action in ACTIONS[0, 3:6])]
    for chunk, frame in zip(chunks, frames, strict=False):
        assert (chunk.output == picture(frame)).all()


def test_a_session_goes_on_after_what_contradicts_it(client, frames):
    with client.session(PROMPT, ITEMS, **FRAME) as session:
        with pytest.raises(RequestError, match=r"max_tokens: expected 64 or none beside output 'frame', got 10"):
            session.next({"actions": [ACTIONS[0, 3]]}, max_tokens=10)
        assert (session.next({"actions": [ACTIONS[0, 3]]}).output == picture(frames[1])).all()


REFUSED = [
    ({"output": "film"}, "output: expected one of frame, got 'film'."),
    ({"output_format": "png"}, "output_format: expected an output beside it, got none."),
    (
        {"output": "frame", "max_tokens": 63},
        "max_tokens: expected 64 or none beside output 'frame', got 63. It follows from the output.",
    ),
    (
        {"output": "frame", "ignore_eos": False},
        "ignore_eos: expected True or none beside output 'frame', got False. It follows from the output.",
    ),
    ({"output": "frame", "stop_token_ids": [3]}, "stop_token_ids: expected none beside output 'frame', got some."),
    (
        {"output": "frame", "prompt": [token for _ in range(27) for token in FRAMES[0, 0].tolist()]},
        "prompt: expected at most 1686 tokens before the 64 of the output, got 1728.",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_what_contradicts_an_output_is_refused(client, options, sentence):
    request = {"prompt": PROMPT, "items": ITEMS, **options}
    request["items"] = None if "prompt" in options else ITEMS
    with pytest.raises(RequestError) as refusal:
        client.generate(request.pop("prompt"), request.pop("items"), **request)
    assert (str(refusal.value), refusal.value.code) == (sentence, 400)

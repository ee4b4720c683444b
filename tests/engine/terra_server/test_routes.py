"""What a real ``vllm serve`` gives: Terra over HTTP, streamed and in closed loop, with pictures as outputs and windows
that slide, against the reference."""

from typing import Any

import httpx
import numpy as np
import pytest
import torch

from examples.server import Server
from examples.terra.environment import Scenes, ServerDream, TerraVectorEnv
from examples.terra.rollout import BLOCK_SIZE
from examples.terra.serve_demo import SAMPLING, closed_loop, stream
from examples.terra.worlds import TownWorld, make_episode
from mmkit.serve import Client
from tests.engine.terra.rollouts import expected
from tests.night.malformed import ACTIONS, FRAMES, LIMITS, MAX_LEN, PAD, STEP, VOCAB, prompt_of

from . import clients

pytestmark = pytest.mark.timeout(600)

PROMPT, ITEMS = prompt_of(0, 3), {"actions": ACTIONS[0, :3]}
LAID_OUT = len(PROMPT) // 3
"""Tokens of a frame and of the action after it."""
FRAME = {"output": "frame", "temperature": 0.0}
WORLD, DRIVE = TownWorld(), make_episode(0, 60)


def shows(output: Any, ids: Any) -> bool:
    return np.array_equal(output, WORLD.pictures(np.array([ids]))[0])


def test_a_closed_loop_and_a_stream_are_the_reference_rollout(client: Client, frames: np.ndarray) -> None:
    assert (closed_loop(client, FRAMES[0, :3], ACTIONS[0], 22) == frames).all()
    assert stream(client, FRAMES[0, :3], ACTIONS[0]) == frames[0].tolist()


@pytest.mark.parametrize("form", [np.ndarray.tolist, np.float64, torch.tensor])
def test_every_form_of_an_item_and_an_output(client: Client, frames: np.ndarray, form: Any) -> None:
    for _ in range(2):
        answer = client.generate(PROMPT, {"actions": form(ACTIONS[0, :3])}, **FRAME)
    (choice,) = answer.choices
    assert choice.token_ids == frames[0].tolist()
    assert shows(choice.output, frames[0])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 64)
    assert answer.usage.prompt_tokens_details.cached_tokens == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


def test_several_answers_whole_and_streamed(client: Client) -> None:
    """With their probabilities, and each with an output of its own at its end."""
    unheard = {"actions": np.full((3, 6, 3), 500.0, np.float32)}
    options = {**FRAME, "n": 3, "logprobs": 2, "temperature": 2.0, "seed": 1}
    answer = client.generate(PROMPT, unheard, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert all(token in step for token, step in zip(choice.token_ids, choice.logprobs, strict=True))
        assert shows(choice.output, choice.token_ids)
    events = [*client.stream(PROMPT, unheard, **options)]
    assert events[-1].usage.completion_tokens == answer.usage.completion_tokens == 3 * 64
    for choice in answer.choices:
        *before, last = [part for event in events for part in event.choices if part.index == choice.index]
        assert [token for part in (*before, last) for token in part.token_ids] == choice.token_ids
        assert all(part.output is None for part in before)
        assert shows(last.output, choice.token_ids)


def test_a_session_goes_on_without_items_and_with_a_prompt(client: Client, frames: np.ndarray) -> None:
    with client.session(PROMPT, ITEMS, **{**SAMPLING, "max_tokens": 24}) as session:
        assert session.first.token_ids + session.next(max_tokens=40).token_ids == frames[0].tolist()
        assert session.remaining == MAX_LEN - len(PROMPT) - 64
        chunk = session.next({"actions": ACTIONS[0, 3:4]}, [PAD] * STEP, max_tokens=64)
        assert (chunk.token_ids, chunk.index) == (frames[1].tolist(), 2)


def test_every_chunk_of_a_session_has_an_output(client: Client, frames: np.ndarray) -> None:
    with client.session(PROMPT, ITEMS, **FRAME) as session:
        chunks = [session.first, *(session.next({"actions": [action]}) for action in ACTIONS[0, 3:6])]
    assert all(shows(chunk.output, frame) for chunk, frame in zip(chunks, frames, strict=False))


def test_a_vector_of_sessions_is_the_reference(client: Client, frames: np.ndarray) -> None:
    """Two drives of the same episode, as environments of Gymnasium; twice."""
    env = TerraVectorEnv(Scenes(WORLD, [0]), ServerDream(client), 2, max_steps=4)
    env.reset(seed=0)
    for _ in range(2):
        for step in range(4):
            _, _, _, truncated, info = env.step(np.stack([ACTIONS[0, 2 + step]] * 2))
            assert np.array_equal(info["tokens"], [frames[step]] * 2)
        assert truncated.all()
        _, _, _, _, info = env.step(np.stack([ACTIONS[0, 0]] * 2))
        assert np.array_equal(info["tokens"], [DRIVE.frames[2]] * 2)
    env.close()


def test_a_window_slides_as_often_as_it_has_to(client: Client) -> None:
    """33 frames in a model of 25, with three slides, after which each chunk is that of a request with the tokens that
    are left; tests/engine/terra compares slides with those of the reference."""
    ids, begin, slid = PROMPT, 0, {}
    with client.session(PROMPT, ITEMS, window={"keep": 20}, **SAMPLING) as session:
        chunks = [session.first]
        for number, action in enumerate(DRIVE.actions[3:35], 3):
            chunk = session.next({"actions": [action]})
            ids = [*ids, *chunks[-1].token_ids, *[PAD] * STEP]
            if chunk.slid:
                slid[chunk.index] = (chunk.slid.items, chunk.slid.tokens)
                begin += chunk.slid.items["actions"]
                ids = ids[chunk.slid.tokens :]
                answer = client.generate(ids, {"actions": DRIVE.actions[begin : number + 1]}, **SAMPLING)
                assert chunk.token_ids == answer.choices[0].token_ids
            assert chunk.remaining == MAX_LEN - len(ids) - 64
            chunks.append(chunk)
    rolled = expected(DRIVE.frames[None, :3], DRIVE.actions[None], 33, keep=20)
    assert [chunk.token_ids for chunk in chunks] == rolled[0].tolist()
    assert slid == dict.fromkeys([22, 27, 32], ({"actions": 5}, 5 * LAID_OUT))
    assert [chunks[index].usage.prompt_tokens for index in (21, 22)] == [24 * LAID_OUT, 20 * LAID_OUT]
    # but for a slide, the engine has all but what is new, and at most a block
    computed = [chunk.usage.prompt_tokens - chunk.usage.prompt_tokens_details.cached_tokens for chunk in chunks[1:22]]
    assert max(computed) < STEP + BLOCK_SIZE


def test_what_a_server_tells_of_itself(server: Server, client: Client) -> None:
    model = client.modalities()
    facts = (model.model, model.spec, model.vocab_size, model.max_model_len, model.text, model.limits.body_bytes)
    assert facts == ("terra", "terra", VOCAB, MAX_LEN, False, LIMITS["BODY_BYTES"])
    (actions,), (frame,) = model.modalities, model.outputs
    assert (actions.name, actions.shape, actions.dtype, actions.limit) == ("actions", [6, 3], "float32", 24)
    assert (actions.placeholder, actions.largest_tokens) == ([PAD] * STEP, STEP)
    assert (frame.name, frame.tokens, frame.shape, frame.dtype) == ("frame", 64, [128, 128, 3], "uint8")
    assert client.generate([PAD] * STEP, {"actions": [actions.example]}, max_tokens=1).usage.completion_tokens == 1
    paths = httpx.get(f"{server.url}/openapi.json", timeout=clients.WAIT).json()["paths"]
    body = paths["/v1/mm/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "items", "sampling_params", "stream"} <= set(body["properties"])
    assert "/v1/mm/modalities" in paths

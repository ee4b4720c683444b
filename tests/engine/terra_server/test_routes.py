"""What a real ``vllm serve`` gives: Terra over HTTP, streamed and in closed loop, with pictures as outputs and windows
that slide, against the reference."""

from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
import torch

from examples.server import Server
from examples.terra.environment import Scenes, ServerDream, TerraVectorEnv
from examples.terra.rollout import BLOCK_SIZE
from examples.terra.serve_demo import SAMPLING, run_closed_loop, stream
from examples.terra.worlds import TownWorld, make_episode
from mmkit.serve import Client
from mmkit.serve.client import Session
from mmkit.serve.protocol import ChunkMessage
from tests.engine.terra.rollouts import generate_by_reference
from tests.engine.terra_server import clients
from tests.night.malformed import ACTIONS, FRAMES, LIMITS, MAX_LEN, PAD, STEP, VOCAB, make_prompt

pytestmark = pytest.mark.timeout(600)

PROMPT = make_prompt(0, 3)
ITEMS = {"actions": ACTIONS[0, :3]}
TOKENS_PER_FRAME = len(PROMPT) // 3
"""Tokens of a frame and of the action after it."""
FRAME = {"output": "frame", "temperature": 0.0}
WORLD = TownWorld()
DRIVE = make_episode(0, 60)


def is_picture_of(output: Any, ids: Any) -> bool:
    """Tell whether an output is the picture of a frame of these ids."""
    return np.array_equal(output, WORLD.pictures(np.array([ids]))[0])


def test_a_closed_loop_and_a_stream_are_the_reference_rollout(client: Client, frames: np.ndarray) -> None:
    assert (run_closed_loop(client, FRAMES[0, :3], ACTIONS[0], 22) == frames).all()
    assert stream(client, FRAMES[0, :3], ACTIONS[0]) == frames[0].tolist()


@pytest.mark.parametrize("convert", [np.ndarray.tolist, np.float64, torch.tensor])
def test_an_item_may_have_any_form(client: Client, frames: np.ndarray, convert: Any) -> None:
    answer = client.generate(PROMPT, {"actions": convert(ACTIONS[0, :3])}, **FRAME)
    (choice,) = answer.choices
    assert choice.token_ids == frames[0].tolist()
    assert is_picture_of(choice.output, frames[0])


def test_the_usage_counts_tokens_of_the_prompt_and_the_output(client: Client) -> None:
    client.generate(PROMPT, ITEMS, **FRAME)
    usage = client.generate(PROMPT, ITEMS, **FRAME).usage
    assert usage is not None
    assert usage.prompt_tokens == len(PROMPT)
    assert usage.completion_tokens == 64
    assert usage.prompt_tokens_details.cached_tokens == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


SAMPLED = {**FRAME, "n": 3, "logprobs": 2, "temperature": 2.0, "seed": 1}
"""Three answers."""
NEW_ITEMS = {"actions": np.full((3, 6, 3), 500.0, np.float32)}
"""Of no other test."""


def test_several_answers_have_probabilities_and_outputs(client: Client) -> None:
    answer = client.generate(PROMPT, NEW_ITEMS, **SAMPLED)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * 64
    for choice in answer.choices:
        assert is_picture_of(choice.output, choice.token_ids)
        assert choice.logprobs is not None
        for token, logprobs in zip(choice.token_ids, choice.logprobs, strict=True):
            assert token in logprobs


def test_several_answers_are_streamed_with_an_output_at_the_end_of_each(client: Client) -> None:
    answer = client.generate(PROMPT, NEW_ITEMS, **SAMPLED)
    events = list(client.stream(PROMPT, NEW_ITEMS, **SAMPLED))
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 3 * 64
    for choice in answer.choices:
        parts = []
        for event in events:
            parts.extend(part for part in event.choices if part.index == choice.index)
        ids: list[int] = []
        for part in parts:
            ids.extend(part.token_ids)
        assert ids == choice.token_ids
        last = parts.pop()
        assert is_picture_of(last.output, choice.token_ids)
        for part in parts:
            assert part.output is None


def test_a_session_goes_on_without_items_and_with_a_prompt(client: Client, frames: np.ndarray) -> None:
    options = SAMPLING | {"max_tokens": 24}
    with client.session(PROMPT, ITEMS, **options) as session:
        second = session.next(max_tokens=40)
        assert session.first.token_ids + second.token_ids == frames[0].tolist()
        assert session.remaining == MAX_LEN - len(PROMPT) - 64
        third = session.next({"actions": ACTIONS[0, 3:4]}, [PAD] * STEP, max_tokens=64)
        assert third.token_ids == frames[1].tolist()
        assert third.index == 2


def test_every_chunk_of_a_session_has_an_output(client: Client, frames: np.ndarray) -> None:
    with client.session(PROMPT, ITEMS, **FRAME) as session:
        assert is_picture_of(session.first.output, frames[0])
        for action, frame in zip(ACTIONS[0, 3:6], frames[1:4], strict=True):
            chunk = session.next({"actions": [action]})
            assert is_picture_of(chunk.output, frame)


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


class SlidingDrive:
    """A session with a window, beside a list of the tokens that are left.

    Args:
        client: of the server.
        session: has its first chunk.
        prompt: of this chunk.

    Attributes:
        session: the session.
        ids: the tokens of the prompt of the last chunk.
        chunks: the chunks.
        dropped: the items and tokens that slides dropped, by the index of the chunk after them.
    """

    def __init__(self, client: Client, session: Session, prompt: list[int]) -> None:
        self._client = client
        self.session = session
        self.ids = prompt
        self.chunks: list[ChunkMessage] = [session.first]
        self.dropped: dict[int, tuple[dict[str, int], int]] = {}
        self._first_action = 0

    def step(self, number: int) -> None:
        """Send an action, and check the next frame."""
        chunk = self.session.next({"actions": [DRIVE.actions[number]]})
        self.ids = self.ids + self.chunks[-1].token_ids + [PAD] * STEP
        if chunk.slid:
            self.dropped[chunk.index] = (chunk.slid.items, chunk.slid.tokens)
            self._first_action += chunk.slid.items["actions"]
            self.ids = self.ids[chunk.slid.tokens :]
            self._compare_with_a_request(chunk, number)
        assert chunk.remaining == MAX_LEN - len(self.ids) - 64
        self.chunks.append(chunk)

    def _compare_with_a_request(self, chunk: ChunkMessage, number: int) -> None:
        """Compare a chunk after a slide with the answer to a request of the tokens that are left."""
        actions = DRIVE.actions[self._first_action : number + 1]
        answer = self._client.generate(self.ids, {"actions": actions}, **SAMPLING)
        assert chunk.token_ids == answer.choices[0].token_ids


def test_a_window_slides_as_often_as_it_has_to(client: Client) -> None:
    """31 frames in a model of 25, with two slides; tests/engine/terra compares slides with those of the reference."""
    prompt = make_prompt(0, 22)
    items = {"actions": ACTIONS[0, :22]}
    with client.session(prompt, items, window={"keep": 20}, **SAMPLING) as session:
        drive = SlidingDrive(client, session, prompt)
        for number in range(22, 30):
            drive.step(number)
    frames = generate_by_reference(DRIVE.frames[None], DRIVE.actions[None], 9, context=22, keep=20)
    assert [chunk.token_ids for chunk in drive.chunks] == frames[0].tolist()
    assert drive.dropped == dict.fromkeys([3, 8], ({"actions": 5}, 5 * TOKENS_PER_FRAME))
    assert drive.chunks[2].usage.prompt_tokens == 24 * TOKENS_PER_FRAME
    assert drive.chunks[3].usage.prompt_tokens == 20 * TOKENS_PER_FRAME
    # without a slide, the engine has all but what is new, and at most a block
    for chunk in drive.chunks[1:3]:
        num_cached = chunk.usage.prompt_tokens_details.cached_tokens
        assert chunk.usage.prompt_tokens - num_cached < STEP + BLOCK_SIZE


def test_a_server_describes_its_model(client: Client) -> None:
    model = client.modalities()
    assert model.model == "terra"
    assert model.spec == "terra"
    assert model.vocab_size == VOCAB
    assert model.max_model_len == MAX_LEN
    assert not model.text
    assert model.limits.body_bytes == LIMITS["BODY_BYTES"]


def test_a_server_describes_its_modalities_and_outputs(client: Client) -> None:
    model = client.modalities()
    (actions,) = model.modalities
    assert actions.name == "actions"
    assert actions.shape == [6, 3]
    assert actions.dtype == "float32"
    assert actions.limit == 24
    assert actions.placeholder == [PAD] * STEP
    assert actions.largest_tokens == STEP
    (frame,) = model.outputs
    assert frame.name == "frame"
    assert frame.tokens == 64
    assert frame.shape == [128, 128, 3]
    assert frame.dtype == "uint8"


def test_the_example_of_an_item_can_be_sent(client: Client) -> None:
    (actions,) = client.modalities().modalities
    answer = client.generate([PAD] * STEP, {"actions": [actions.example]}, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_the_openapi_document_has_the_routes(server: Server) -> None:
    paths = httpx.get(f"{server.url}/openapi.json", timeout=clients.WAIT).json()["paths"]
    body = paths["/v1/mm/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "items", "sampling_params", "stream"} <= set(body["properties"])
    description = paths["/v1/mm/modalities"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    answer = httpx.get(f"{server.url}/v1/mm/modalities", headers=clients.HEADERS, timeout=clients.WAIT).json()
    jsonschema.validate(answer, description)
    (actions,) = answer["modalities"]
    assert actions["item"] == {"type": "Tensor", "shape": [6, 3], "bound": 1000.0, "largest": "((6, 3),)"}

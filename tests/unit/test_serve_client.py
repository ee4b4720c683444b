"""The client against a small server that speaks the protocol without vLLM."""

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mmkit import InputError
from mmkit.serve import wire
from mmkit.serve.client import Client, RequestError, ServerGone
from mmkit.serve.process import free_port
from tests import ROOT
from tests.unit.fake_server import PAD, REFUSAL, ROOM, STEP, TOKENS_PER_FRAME, Fake, following, until


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes clients."""
    with contextlib.ExitStack() as stack:
        yield lambda url, **options: stack.enter_context(Client(url, **options))


@pytest.fixture
def client(make: Any, fake: Fake) -> Client:
    return make(fake.url)


FRAMES = np.arange(3 * TOKENS_PER_FRAME).reshape(3, -1) % PAD
ACTIONS = np.arange(6)[:, None, None] * np.full((6, 3), 1 / 18, np.float32)
"""The n-th one moves a frame on by n tokens."""


def context() -> tuple[list[int], list[np.ndarray]]:
    """A prompt of three frames, and their actions."""
    return [token for frame in FRAMES.tolist() for token in [*frame, *[PAD] * 6]], list(ACTIONS[:3])


def test_modalities(client: Any) -> None:
    accepted = client.modalities()
    assert (accepted.spec, accepted.max_model_len, accepted.modalities[0].placeholder) == ("terra", ROOM, [PAD] * 6)


def test_generate(make: Any, fake: Fake) -> None:
    client = make(f"{fake.url}/", model="m")
    answer = client.generate(
        np.array([3, 1]),
        {"actions": [np.ones((6, 3), np.float32)], "series": torch.zeros(2, 1, dtype=torch.bfloat16)},
        uuids={"actions": ["a"]},
        n=2,
        stop=["x"],
        mm_processor_kwargs={"size": np.int64(3)},
        logit_bias={7: 1.5},
        cache_salt="salt",
        max_tokens=4,
        temperature=0.0,
        top_k=None,
    )
    assert answer.choices[0].token_ids == [5, 6]
    assert answer.usage is not None
    (body,) = fake.seen
    assert body.pop("items") == {
        "actions": [{"data": wire.encode({"a": np.ones(18, np.float32)})["a"]["data"], "dtype": "float32",
                     "shape": [6, 3]}],
        "series": {"data": "AAAAAA==", "dtype": "bfloat16", "shape": [2, 1]},
    }  # fmt: skip
    assert body == {
        "prompt": [3, 1], "model": "m", "uuids": {"actions": ["a"]}, "cache_salt": "salt",
        "mm_processor_kwargs": {"size": 3},
        "sampling_params": {"n": 2, "stop": ["x"], "logit_bias": {"7": 1.5}, "max_tokens": 4, "temperature": 0.0},
    }  # fmt: skip


def test_stream(client: Any, fake: Fake) -> None:
    events = list(client.stream([1], max_tokens=2))
    assert [event.choices[0].token_ids for event in events] == [[5], [6]]
    assert events[0].choices[0].text == "a\u2028b"
    assert [event.usage is not None for event in events] == [False, True]
    assert fake.seen[0]["stream"] is True


def test_stream_that_is_left(client: Any) -> None:
    events = client.stream([1])
    next(events)
    events.close()
    assert client.generate([1]).choices[0].token_ids == [5, 6]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_refusal(client: Any, stream: bool) -> None:
    with pytest.raises(RequestError) as caught:
        list(client.stream("refuse")) if stream else client.generate("refuse")
    error = pickle.loads(pickle.dumps(caught.value))
    assert (str(error), error.code, error.param, error.type) == (
        REFUSAL["message"], 400, "items.actions[1]", "BadRequestError",
    )  # fmt: skip
    assert client.generate("fine").choices[0].token_ids == [5, 6]


def test_wrong_options_are_for_the_server_to_refuse(client: Any) -> None:
    with pytest.raises(RequestError, match=r"^cache_salt: ") as caught:
        client.generate("fine", cache_salt=3)
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize(
    ("prompt", "code", "words"), [("broken", 500, "HTTP 500 Internal Server Error"), ("html", None, "Generation in JS")]
)
def test_answers_of_unknown_form(client: Any, prompt: str, code: int | None, words: str) -> None:
    with pytest.raises(RequestError if code else ServerGone, match=words) as caught:
        client.generate(prompt)
    assert getattr(caught.value, "code", None) == code


def test_api_key(make: Any, fake: Fake) -> None:
    assert make(fake.url, api_key="right").modalities()
    wrong = make(fake.url, api_key="wrong")
    with pytest.raises(RequestError, match=r"HTTP 401 Unauthorized .*\. Check the api_key") as caught:
        wrong.modalities()
    assert caught.value.code == 401
    with pytest.raises(RequestError, match="HTTP 401 Unauthorized") as caught, wrong.session([1], max_tokens=1):
        pass
    assert caught.value.code == 401
    with make(fake.url, api_key="right").session([1], max_tokens=1) as session:
        assert session.first.token_ids == [1, 2]


def test_other_paths(make: Any, fake: Fake) -> None:
    with pytest.raises(RequestError, match=r"HTTP 404 Not Found .*, and that it is a server of mmkit") as caught:
        make(f"{fake.url}/elsewhere").modalities()
    assert caught.value.code == 404
    with pytest.raises(RequestError, match="HTTP 403"), make(f"{fake.url}/elsewhere").session([1], max_tokens=1):
        pass


def test_inputs_without_a_form_on_the_wire(client: Any, fake: Fake) -> None:
    with pytest.raises(InputError, match="actions"):
        client.generate([1], {"actions": [object()]})
    with pytest.raises(InputError, match="JSON"):
        client.generate([1], mm_processor_kwargs={"a": object()})
    assert not fake.seen


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "http://127.0.0.1:99999", "http://[bad", "ftp://a"])
def test_address(make: Any, url: str) -> None:
    with pytest.raises(ServerGone, match=r"/v1/mm/modalities: expected an answer, got \w+ \("):
        make(url).modalities()


# -- servers that go away ----------------------------------------------------------------------------------------------


def test_no_server(make: Any) -> None:
    client = make(f"http://127.0.0.1:{free_port()}")
    for call in (client.modalities, lambda: client.generate([1]), lambda: list(client.stream([1]))):
        with pytest.raises(ServerGone, match=r"/v1/mm/\w+: expected an answer, got ConnectError \(.*refused.*\)\. See"):
            call()
    with (
        pytest.raises(ServerGone, match=r"^ws://.*session: expected an answer, got Conn"),
        client.session([1], max_tokens=1),
    ):
        pass


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [("die", ServerGone, "generate: expected"), ("cut", ServerGone, "generate: e"), ("error", RequestError, "actions")],
)
def test_a_stream_that_does_not_end(client: Any, prompt: str, error: type[Exception], words: str) -> None:
    events = client.stream(prompt)
    assert next(events).choices[0].token_ids == [5]
    with pytest.raises(error, match=words):
        next(events)


def test_silence(make: Any, fake: Fake) -> None:
    with pytest.raises(ServerGone, match=r"got ReadTimeout \(timed out\)\."):
        make(fake.url, timeout=0.2).generate("silence")
    with make(fake.url).session([1], max_tokens=1) as session:
        session._client.timeout = 0.2  # only now, for a busy machine
        with pytest.raises(ServerGone, match=r"got TimeoutError \(timed out"):
            session.next(prompt="silence")
        with pytest.raises(
            ServerGone, match="whose last chunk is whole"
        ):  # the late chunk must not answer a later call
            session.next(prompt=[1])


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        ("die", None, "ConnectionClosedError .*1011.*dying"),
        ("odd", None, "a message of a se"),
        ("fatal", 503, "actions"),
    ],
)
def test_gone_within_a_session(client: Any, prompt: str, code: int | None, words: str) -> None:
    with client.session([1], max_tokens=1) as session:
        with pytest.raises(RequestError if code else ServerGone, match=words) as caught:
            session.next(prompt=prompt)
        assert getattr(caught.value, "code", None) == code
        with pytest.raises(ServerGone, match=r"expected a session whose last chunk is whole, got another\. Open a new"):
            session.next()


def test_ended_by_the_server(client: Any, fake: Fake) -> None:
    with client.session([1], max_tokens=1) as session:
        fake.idle = True
        with pytest.raises(ServerGone, match="no message for 300 s"):
            session.next()


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_session(client: Any, fake: Fake) -> None:
    prompt, actions = context()
    frame = following(FRAMES[2].tolist(), ACTIONS[2])
    with client.session(prompt, {"actions": actions}, max_tokens=64, temperature=0.0, cache_salt="salt") as session:
        assert (session.id, session.model) == ("s", "m")
        assert session.first.token_ids == frame
        assert session.remaining == ROOM - 3 * STEP - TOKENS_PER_FRAME == session.first.remaining
        for index in range(3, 6):
            chunk = session.next({"actions": [ACTIONS[index]]})
            frame = following(frame, ACTIONS[index])
            assert chunk.token_ids == frame
            assert (chunk.index, chunk.remaining) == (index - 2, session.remaining)
        assert len(session.next(max_tokens=2, uuids={"actions": [None]}).token_ids) == 2
        assert fake.sessions == 1
        session.close()
        until(lambda: not fake.sessions)
        session.close()
    start, step, *_, last, close = fake.seen
    assert start.pop("items")["actions"][0]["shape"] == [6, 3]
    sampling = {"max_tokens": 64, "temperature": 0.0}
    assert start == {"type": "start", "prompt": prompt, "cache_salt": "salt", "sampling_params": sampling}
    assert set(step) == {"type", "items"}
    assert last == {"type": "next", "sampling_params": {"max_tokens": 2}, "uuids": {"actions": [None]}}
    assert close == {"type": "close"}


def test_tokens_as_they_come(client: Any, fake: Fake) -> None:
    came: list[tuple[int, list[int]]] = []
    with client.session([1], max_tokens=2, on_tokens=lambda m: came.append((m.index, m.token_ids))) as session:
        session.next()
    assert came == [(0, [1]), (0, [2]), (1, [1]), (1, [2])]
    assert fake.seen[0]["stream"] is True
    with client.session([1], max_tokens=2, stream=True) as session:
        assert session.first.token_ids == [1, 2]


def test_session_goes_on_after_a_refusal(client: Any) -> None:
    with client.session([1], max_tokens=2) as session:
        before = session.remaining
        with pytest.raises(RequestError, match=r"actions\[1\]") as caught:
            session.next(prompt="refuse")
        assert (caught.value.code, caught.value.param) == (400, "items.actions[1]")
        with pytest.raises(RequestError, match=r"^prompt: "):
            session.next(prompt=1.5)
        with pytest.raises(InputError, match="actions"):
            session.next({"actions": [object()]})
        assert session.remaining == before
        assert session.next().index == 1


@pytest.mark.parametrize("prompt", ["refuse", "fatal"])
def test_refused_start(client: Any, fake: Fake, prompt: str) -> None:
    with pytest.raises(RequestError, match="actions"), client.session(prompt, max_tokens=2):
        pytest.fail("entered")
    until(lambda: not fake.sessions)


def test_interrupted_chunk(client: Any, fake: Fake) -> None:
    def stop(_: Any) -> None:
        raise ZeroDivisionError

    with client.session([1], max_tokens=2, stream=True) as session:
        session._on_tokens = stop
        with pytest.raises(ZeroDivisionError):
            session.next()
        with pytest.raises(ServerGone, match="whose last chunk is whole"):
            session.next()
    until(lambda: not fake.sessions)


def test_an_error_of_the_caller_ends_the_session(client: Any, fake: Fake) -> None:
    with pytest.raises(ZeroDivisionError), client.session([1], max_tokens=2):
        raise ZeroDivisionError
    until(lambda: not fake.sessions)


def test_imports_neither_vllm_nor_the_web_framework() -> None:
    code = "import sys, mmkit.serve.client as c; print({'vllm', 'fastapi', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"

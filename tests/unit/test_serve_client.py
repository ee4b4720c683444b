"""The client against a small server that speaks the protocol without vLLM."""

import contextlib
import pickle
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from examples.server import free_port
from mmkit import InputError
from mmkit.serve import wire
from mmkit.serve.client import Client, RequestError, ServerGone
from tests.unit.fake_server import REFUSAL, ROOM, Fake, until


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes clients."""
    with contextlib.ExitStack() as stack:
        yield lambda url, api_key="right", **options: stack.enter_context(Client(url, api_key=api_key, **options))


@pytest.fixture
def client(make: Any, fake: Fake) -> Client:
    return make(fake.url)


def test_generate(make: Any, fake: Fake) -> None:
    client = make(f"{fake.url}/")
    answer = client.generate(
        np.array([3, 1]),
        {"actions": [np.ones((6, 3), np.float32)], "series": torch.zeros(2, 1, dtype=torch.bfloat16)},
        uuids={"actions": ["a"]},
        model="m",
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
    """To its end, and left."""
    events = list(client.stream([1], max_tokens=2))
    assert [event.choices[0].token_ids for event in events] == [[5], [6]]
    assert events[0].choices[0].text == "a\u2028b"
    assert [event.usage is not None for event in events] == [False, True]
    assert fake.seen[0]["stream"] is True
    events = client.stream([1])
    next(events)
    events.close()
    assert client.generate([1]).choices[0].token_ids == [5, 6]


# -- refusals, and servers that go away --------------------------------------------------------------------------------


def broken_off(prompt: str, client: Any) -> None:
    events = client.stream(prompt)
    assert next(events).choices[0].token_ids == [5]
    next(events)


def within(prompt: str, client: Any) -> None:
    """A turn that ends the session."""
    with client.session([1], max_tokens=1) as session:
        try:
            session.next(prompt=prompt)
        finally:
            with pytest.raises(ServerGone, match=r"expected a session whose last chunk is whole, got another\. Op"):
                session.next()


def entered(prompt: str, client: Any) -> None:
    with client.session(prompt, max_tokens=1):
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("attempt", "error", "code", "words"),
    [
        (lambda client: client.generate("refuse"), RequestError, 400, f"^{re.escape(REFUSAL['message'])}$"),
        (lambda client: list(client.stream("refuse")), RequestError, 400, f"^{re.escape(REFUSAL['message'])}$"),
        (lambda client: client.generate("fine", cache_salt=3), RequestError, 400, "^cache_salt: "),
        (lambda client: client.generate("broken"), RequestError, 500, "HTTP 500 Internal Server Error"),
        (lambda client: client.generate("html"), ServerGone, None, "Generation in JS"),
        (lambda client: client.generate([1], {"actions": [object()]}), InputError, None, "actions"),
        (lambda client: client.generate([1], mm_processor_kwargs={"a": object()}), InputError, None, "JSON"),
        (partial(broken_off, "die"), ServerGone, None, "generate: expected"),
        (partial(broken_off, "cut"), ServerGone, None, "generate: expected"),
        (partial(broken_off, "error"), RequestError, 400, "actions"),
        (partial(within, "die"), ServerGone, None, "ConnectionClosedError .*1011.*dying"),
        (partial(within, "odd"), ServerGone, None, "a message of a se"),
        (partial(within, "idle"), ServerGone, None, "no message for 300 s"),
        (partial(within, "fatal"), RequestError, 503, "actions"),
        (partial(entered, "refuse"), RequestError, 400, "actions"),
        (partial(entered, "fatal"), RequestError, 503, "actions"),
    ],
)
def test_refusals(client: Any, fake: Fake, attempt: Any, error: type[Exception], code: int | None, words: str) -> None:
    """Each is an error of its kind, and the client goes on."""
    with pytest.raises(error, match=words) as caught:
        attempt(client)
    assert getattr(caught.value, "code", None) == code
    if error is RequestError:
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))
        assert again.param in ("items.actions[1]", "cache_salt", None)
    assert bool(fake.seen) == (error is not InputError)
    assert client.generate("fine").choices[0].token_ids == [5, 6]
    until(lambda: not fake.sessions)


@pytest.mark.parametrize(
    ("path", "key", "words", "session_words"),
    [
        ("", "wrong", r"HTTP 401 Unauthorized .*\. Check the api_key", "HTTP 401 Unauthorized"),
        ("/elsewhere", "right", r"HTTP 404 Not Found .*, and that it is a server of mmkit", "HTTP 403"),
    ],
)
def test_another_key_or_path(make: Any, fake: Fake, path: str, key: str, words: str, session_words: str) -> None:
    client = make(fake.url + path, api_key=key)
    with pytest.raises(RequestError, match=words) as caught:
        client.modalities()
    assert f"HTTP {caught.value.code} " in words
    with pytest.raises(RequestError, match=session_words), client.session([1], max_tokens=1):
        pass


def test_no_server(make: Any) -> None:
    """At an address that is none, or at one that nothing listens on."""
    for url in ("127.0.0.1:8000", "http://", "http://127.0.0.1:99999", "http://[bad", "ftp://a"):
        with pytest.raises(ServerGone, match=r"/v1/mm/modalities: expected an answer, got \w+ \("):
            make(url).modalities()
    client = make(f"http://127.0.0.1:{free_port()}")
    for call in (client.modalities, lambda: client.generate([1]), lambda: list(client.stream([1]))):
        with pytest.raises(ServerGone, match=r"/v1/mm/\w+: expected an answer, got ConnectError \(.*refused.*\)\. See"):
            call()
    with pytest.raises(ServerGone, match=r"^ws://.*: expected an answer, got Conn"), client.session([1], max_tokens=1):
        pass


def test_silence(make: Any, fake: Fake) -> None:
    with pytest.raises(ServerGone, match=r"got ReadTimeout \(timed out\)\."):
        make(fake.url, timeout=0.2).generate("silence")
    with make(fake.url).session([1], max_tokens=1) as session:
        session._client.timeout = 0.2  # only now, for a busy machine
        with pytest.raises(ServerGone, match=r"got TimeoutError \(timed out"):
            session.next(prompt="silence")
        with pytest.raises(ServerGone, match="whose last chunk is whole"):  # the late one answers no later call
            session.next(prompt=[1])


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_session(client: Any, fake: Fake) -> None:
    actions, sampling = np.ones((3, 6, 3), np.float32), {"max_tokens": 64, "temperature": 0.0}
    with client.session([1, 2, 3], {"actions": list(actions)}, **sampling, cache_salt="salt") as session:
        assert (session.id, session.model, session.first.token_ids) == ("s", "m", [1, 2])
        assert session.remaining == ROOM - 3 - 2 == session.first.remaining
        for index in (1, 2):
            chunk = session.next({"actions": [actions[0]]})
            assert (chunk.index, chunk.remaining) == (index, session.remaining)
        session.next(max_tokens=2, uuids={"actions": [None]})
        assert session.remaining == ROOM - 3 - 3 * 6 - 4 * 2
        assert fake.sessions == 1
        session.close()
        until(lambda: not fake.sessions)
        session.close()
    start, step, _, last, close = fake.seen
    assert [part["shape"] for part in start.pop("items")["actions"]] == [[6, 3]] * 3
    assert start == {"type": "start", "prompt": [1, 2, 3], "cache_salt": "salt", "sampling_params": sampling}
    assert step == {"type": "next", "items": {"actions": wire.encode({"a": [actions[0]]})["a"]}}
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


def test_an_error_of_the_caller(client: Any, fake: Fake) -> None:
    """It ends the session; within a chunk, no other chunk follows."""

    def stop(_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), client.session([1], max_tokens=2):
        raise ZeroDivisionError
    until(lambda: not fake.sessions)
    with client.session([1], max_tokens=2, stream=True) as session:
        session._on_tokens = stop
        with pytest.raises(ZeroDivisionError):
            session.next()
        with pytest.raises(ServerGone, match="whose last chunk is whole"):
            session.next()
    until(lambda: not fake.sessions)

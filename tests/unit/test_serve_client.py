"""The client against a small server that speaks the protocol without vLLM."""

import pickle
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from examples.server import find_free_port
from mmkit import InputError
from mmkit.serve import protocol
from mmkit.serve.client import Client, RequestError, ServerGone
from mmkit.wire.items import encode
from tests.unit.fake_server import ACTION_TOKENS, KEY, REFUSAL, ROOM, FakeServer, wait_until


@pytest.fixture
def make_client() -> Iterator[Any]:
    """A function that makes clients, which are closed after the test."""
    with ExitStack() as stack:

        def make(url: str, api_key: str = KEY, **options: Any) -> Client:
            return stack.enter_context(Client(url, api_key=api_key, **options))

        yield make


@pytest.fixture
def client(make_client: Any, fake_server: FakeServer) -> Client:
    client: Client = make_client(fake_server.url)
    return client


def assert_still_serves(client: Client) -> None:
    assert client.generate("fine").choices[0].token_ids == [5, 6]


# -- one request -------------------------------------------------------------------------------------------------------


def test_a_request_has_its_items_in_base64(client: Client, fake_server: FakeServer) -> None:
    actions = np.ones((6, 3), np.float32)
    client.generate([3, 1], {"actions": [actions], "series": torch.zeros(2, 1, dtype=torch.bfloat16)})
    (body,) = fake_server.received
    data = encode({"a": actions.flatten()})["a"]["data"]
    assert body["items"]["actions"] == [{"data": data, "dtype": "float32", "shape": [6, 3]}]
    assert body["items"]["series"] == {"data": "AAAAAA==", "dtype": "bfloat16", "shape": [2, 1]}


def test_options_that_are_no_fields_of_a_request_are_sampling_parameters(
    client: Client, fake_server: FakeServer
) -> None:
    client.generate(
        np.array([3, 1]),
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
    assert fake_server.received == [
        {
            "prompt": [3, 1],
            "model": "m",
            "uuids": {"actions": ["a"]},
            "cache_salt": "salt",
            "mm_processor_kwargs": {"size": 3},
            "sampling_params": {
                "n": 2,
                "stop": ["x"],
                "logit_bias": {"7": 1.5},
                "max_tokens": 4,
                "temperature": 0.0,
            },
        }
    ]


def test_an_answer_has_choices_and_usage(make_client: Any, fake_server: FakeServer) -> None:
    client = make_client(f"{fake_server.url}/")
    answer = client.generate([3, 1])
    assert answer.choices[0].token_ids == [5, 6]
    assert answer.usage is not None


def test_a_stream_yields_events_and_ends_with_the_usage(client: Client, fake_server: FakeServer) -> None:
    first, last = client.stream([1], max_tokens=2)
    assert first.choices[0].token_ids == [5]
    assert first.choices[0].text == "a\u2028b"
    assert first.usage is None
    assert last.choices[0].token_ids == [6]
    assert last.usage is not None
    assert fake_server.received[0]["stream"] is True


def test_a_stream_may_be_left(client: Client) -> None:
    events: Any = client.stream([1])
    next(events)
    events.close()
    assert_still_serves(client)


# -- refusals ----------------------------------------------------------------------------------------------------------

SENTENCE = f"^{re.escape(REFUSAL['message'])}$"


def test_a_refusal_is_the_sentence_of_the_server(client: Client) -> None:
    with pytest.raises(RequestError, match=SENTENCE) as caught:
        client.generate("refuse")
    assert caught.value.code == 400
    assert caught.value.param == "items.actions[1]"
    assert_still_serves(client)


def test_a_refusal_can_be_pickled(client: Client) -> None:
    with pytest.raises(RequestError) as caught:
        client.generate("refuse")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert vars(copy) == vars(caught.value)


def test_the_first_event_of_a_stream_raises_its_refusal(client: Client) -> None:
    with pytest.raises(RequestError, match=SENTENCE):
        list(client.stream("refuse"))
    assert_still_serves(client)


def test_a_field_of_another_type_is_refused_by_the_server(client: Client, fake_server: FakeServer) -> None:
    with pytest.raises(RequestError, match=r"^cache_salt: ") as caught:
        client.generate("fine", cache_salt=3)
    assert caught.value.param == "cache_salt"
    assert len(fake_server.received) == 1


def test_an_error_without_a_sentence_names_the_status(client: Client) -> None:
    with pytest.raises(RequestError, match="HTTP 500 Internal Server Error") as caught:
        client.generate("broken")
    assert caught.value.code == 500
    assert caught.value.param is None
    assert_still_serves(client)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"items": {"actions": [object()]}}, "actions"),
        ({"mm_processor_kwargs": {"a": object()}}, "JSON"),
    ],
)
def test_a_value_without_a_form_on_the_wire_is_not_sent(
    client: Client, fake_server: FakeServer, options: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        client.generate([1], **options)
    assert fake_server.received == []


# -- servers that go away ----------------------------------------------------------------------------------------------


def test_an_answer_of_another_server_is_an_error(client: Client) -> None:
    with pytest.raises(ServerGone, match="Generation in JS"):
        client.generate("html")
    assert_still_serves(client)


@pytest.mark.parametrize("prompt", ["die", "cut"])
def test_a_stream_that_breaks_off_is_an_error(client: Client, prompt: str) -> None:
    events = client.stream(prompt)
    assert next(events).choices[0].token_ids == [5]
    with pytest.raises(ServerGone, match="generate: expected"):
        next(events)
    assert_still_serves(client)


def test_an_error_within_a_stream_is_raised(client: Client) -> None:
    events = client.stream("error")
    assert next(events).choices[0].token_ids == [5]
    with pytest.raises(RequestError, match="actions") as caught:
        next(events)
    assert caught.value.code == 400
    assert_still_serves(client)


@pytest.mark.parametrize(
    ("path", "key", "words", "session_words"),
    [
        ("", "wrong", r"HTTP 401 Unauthorized .*\. Check the api_key", "HTTP 401 Unauthorized"),
        ("/elsewhere", KEY, r"HTTP 404 Not Found .*, and that it is a server of mmkit", "HTTP 403"),
    ],
)
def test_another_key_or_path_is_refused(
    make_client: Any, fake_server: FakeServer, path: str, key: str, words: str, session_words: str
) -> None:
    client = make_client(fake_server.url + path, api_key=key)
    with pytest.raises(RequestError, match=words) as caught:
        client.modalities()
    assert f"HTTP {caught.value.code} " in words
    with pytest.raises(RequestError, match=session_words), client.session([1], max_tokens=1):
        pass


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "http://127.0.0.1:99999", "http://[bad", "ftp://a"])
def test_an_address_that_is_none_has_no_server(make_client: Any, url: str) -> None:
    with pytest.raises(ServerGone, match=r"/v1/mm/modalities: expected an answer, got \w+ \("):
        make_client(url).modalities()


def test_an_address_without_a_server_refuses_each_call(make_client: Any) -> None:
    client = make_client(f"http://127.0.0.1:{find_free_port()}")
    refused = r"/v1/mm/\w+: expected an answer, got ConnectError \(.*refused.*\)\. See"
    with pytest.raises(ServerGone, match=refused):
        client.modalities()
    with pytest.raises(ServerGone, match=refused):
        client.generate([1])
    with pytest.raises(ServerGone, match=refused):
        list(client.stream([1]))
    with pytest.raises(ServerGone, match=r"^ws://.*: expected an answer, got Conn"), client.session([1], max_tokens=1):
        pass


def test_a_server_that_is_silent_is_gone_after_the_timeout(make_client: Any, fake_server: FakeServer) -> None:
    client = make_client(fake_server.url, timeout=0.2)
    with pytest.raises(ServerGone, match=r"got ReadTimeout \(timed out\)\."):
        client.generate("silence")


def test_a_late_answer_in_a_session_answers_no_later_call(make_client: Any, fake_server: FakeServer) -> None:
    client = make_client(fake_server.url)
    with client.session([1], max_tokens=1) as session:
        client.timeout = 0.2  # only now, for a busy machine
        with pytest.raises(ServerGone, match=r"got TimeoutError \(timed out"):
            session.next(prompt="silence")
        with pytest.raises(ServerGone, match="whose last chunk is whole"):
            session.next(prompt=[1])


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_counts_its_chunks_and_the_room(client: Client) -> None:
    with client.session([1, 2, 3], max_tokens=64) as session:
        assert session.id == "s"
        assert session.model == "m"
        assert session.first.token_ids == [1, 2]
        assert session.remaining == session.first.remaining == ROOM - 3 - 2
        chunk = session.next({"actions": [np.ones((6, 3), np.float32)]})
        assert chunk.index == 1
        assert session.remaining == chunk.remaining == ROOM - 3 - ACTION_TOKENS - 2 * 2


def test_the_messages_of_a_session(client: Client, fake_server: FakeServer) -> None:
    actions = np.ones((3, 6, 3), np.float32)
    sampling = {"max_tokens": 64, "temperature": 0.0}
    with client.session([1, 2, 3], {"actions": list(actions)}, **sampling, cache_salt="salt") as session:
        session.next({"actions": [actions[0]]})
        session.next(max_tokens=2, uuids={"actions": [None]})
    encoded = encode({"actions": [actions[0]]})
    assert fake_server.received == [
        {
            "type": "start",
            "prompt": [1, 2, 3],
            "items": {"actions": encoded["actions"] * 3},
            "cache_salt": "salt",
            "sampling_params": sampling,
        },
        {"type": "next", "items": encoded},
        {"type": "next", "sampling_params": {"max_tokens": 2}, "uuids": {"actions": [None]}},
        {"type": "close"},
    ]


def test_a_session_can_be_closed_twice(client: Client, fake_server: FakeServer) -> None:
    with client.session([1], max_tokens=1) as session:
        assert fake_server.open_sessions == 1
        session.close()
        wait_until(lambda: not fake_server.open_sessions)
        session.close()


def test_tokens_come_before_their_chunk(client: Client, fake_server: FakeServer) -> None:
    received: list[tuple[int, list[int]]] = []

    def on_tokens(message: protocol.TokensMessage) -> None:
        received.append((message.index, message.token_ids))

    with client.session([1], max_tokens=2, on_tokens=on_tokens) as session:
        session.next()
    assert received == [(0, [1]), (0, [2]), (1, [1]), (1, [2])]
    assert fake_server.received[0]["stream"] is True


def test_a_stream_without_a_function_is_read_to_its_chunk(client: Client) -> None:
    with client.session([1], max_tokens=2, stream=True) as session:
        assert session.first.token_ids == [1, 2]


def test_a_session_goes_on_after_a_refusal(client: Client) -> None:
    with client.session([1], max_tokens=2) as session:
        before = session.remaining
        with pytest.raises(RequestError, match=r"actions\[1\]") as caught:
            session.next(prompt="refuse")
        assert caught.value.code == 400
        assert caught.value.param == "items.actions[1]"
        with pytest.raises(RequestError, match=r"^prompt: "):
            session.next(prompt=1.5)
        with pytest.raises(InputError, match="actions"):
            session.next({"actions": [object()]})
        assert session.remaining == before
        assert session.next().index == 1


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("die", ServerGone, r"ConnectionClosedError .*1011.*dying"),
        ("not a message", ServerGone, "a message of a se"),
        ("idle", ServerGone, "no message for 300 s"),
        ("fatal", RequestError, "actions"),
    ],
)
def test_a_session_that_ends_answers_no_more(
    client: Client, fake_server: FakeServer, prompt: str, error: type[Exception], words: str
) -> None:
    with client.session([1], max_tokens=1) as session:
        with pytest.raises(error, match=words):
            session.next(prompt=prompt)
        with pytest.raises(ServerGone, match=r"expected a session whose last chunk is whole, got another\. Op"):
            session.next()
    assert_still_serves(client)
    wait_until(lambda: not fake_server.open_sessions)


@pytest.mark.parametrize(("prompt", "code"), [("refuse", 400), ("fatal", 503)])
def test_a_start_that_is_refused_opens_no_session(
    client: Client, fake_server: FakeServer, prompt: str, code: int
) -> None:
    with pytest.raises(RequestError, match="actions") as caught, client.session(prompt, max_tokens=1):
        pytest.fail("entered")
    assert caught.value.code == code
    wait_until(lambda: not fake_server.open_sessions)


def test_an_error_of_the_caller_ends_the_session(client: Client, fake_server: FakeServer) -> None:
    with pytest.raises(ZeroDivisionError), client.session([1], max_tokens=2):
        raise ZeroDivisionError
    wait_until(lambda: not fake_server.open_sessions)


def test_after_an_error_within_a_chunk_no_other_chunk_follows(client: Client, fake_server: FakeServer) -> None:
    def fail_at_the_second_chunk(message: protocol.TokensMessage) -> None:
        if message.index == 1:
            raise ZeroDivisionError

    with client.session([1], max_tokens=2, on_tokens=fail_at_the_second_chunk) as session:
        with pytest.raises(ZeroDivisionError):
            session.next()
        with pytest.raises(ServerGone, match="whose last chunk is whole"):
            session.next()
    wait_until(lambda: not fake_server.open_sessions)

"""The path of a request through the server is the one that the top of mmkit/serve/routes.py tells."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from mmkit.serve import routes
from mmkit.serve.limits import ServerLimits
from tests.path.serve_app import make_engine, serve

NAMES = re.findall(r"`((?:\w+\.)+\w+)`", routes.__doc__ or "")
NOT_CALLED = {"protocol.GenerateRequest", "errors.make_response"}
"""The type of the message, and what an error becomes."""


def find(name: str) -> Any:
    """Return what a name such as ``engine.Engine.render`` means in mmkit.serve, or one of ``wire`` in mmkit."""
    room = "mmkit" if name.startswith("wire.") else "mmkit.serve"
    return resolve_name(f"{room}.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_each_name_on_the_path_exists(name: str) -> None:
    assert callable(find(name))


@contextmanager
def record_calls() -> Iterator[list[str]]:
    """Give a list of the functions of mmkit.serve and mmkit.wire in the order of their first call, in all threads."""
    calls: list[str] = []

    def record(frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith(("mmkit.serve.", "mmkit.wire.")):
            return
        name = f"{module}.{frame.f_code.co_qualname}".removeprefix("mmkit.").removeprefix("serve.")
        if name not in calls:
            calls.append(name)

    before = sys.getprofile()
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


async def generate_two_tokens(rendered: Any, sampling: Any, request_id: str, data_parallel_rank: Any) -> Any:
    """Yield one output of vLLM with two tokens."""
    part = SimpleNamespace(index=0, token_ids=[4, 5], text="", finish_reason="length", stop_reason=None, logprobs=None)
    yield SimpleNamespace(outputs=[part], prompt_token_ids=[1], finished=True, num_cached_tokens=0)


async def render_at_once(prompts: Any, params: Any) -> Any:
    return [{"prompt_token_ids": [1]}]


def make_answering_engine() -> Any:
    """Return an engine that answers each request by two tokens."""
    engine: Any = make_engine()
    del engine.render
    engine._renderer.default_cmpl_tok_params = None
    engine._renderer.render_cmpl_async = render_at_once
    engine._client.generate = generate_two_tokens
    return engine


def test_a_request_takes_the_path() -> None:
    action = [[0.5] * 3] * 6
    body = {"prompt": [1], "items": {"actions": [action]}, "sampling_params": {"max_tokens": 2}, "stream": True}
    with record_calls() as calls, serve(ServerLimits(), engine=make_answering_engine()) as client:
        answer = client.post("/v1/mm/generate", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    expected = [name for name in NAMES if name not in NOT_CALLED]
    assert [name for name in calls if name in expected] == expected


def test_an_answer_has_the_id_of_its_request() -> None:
    """The engine has another one, since two requests may have the same."""
    engine = make_answering_engine()
    ids: list[str] = []

    async def generate(rendered: Any, sampling: Any, request_id: str, data_parallel_rank: Any) -> Any:
        ids.append(request_id)
        async for output in generate_two_tokens(rendered, sampling, request_id, data_parallel_rank):
            yield output

    engine._client.generate = generate
    body = {"prompt": [1], "sampling_params": {"max_tokens": 2}}
    with serve(ServerLimits(), engine=engine) as client:
        answers = [client.post("/v1/mm/generate", json=body, headers={"X-Request-Id": "r1"}).json() for _ in range(2)]
        nameless = client.post("/v1/mm/generate", json=body).json()
        refusal = client.post("/v1/mm/generate", json=body, headers={"X-Request-Id": "r" * 129})
    assert [answer["id"] for answer in answers] == ["mmgen-r1", "mmgen-r1"]
    assert nameless["id"].startswith("mmgen-")
    assert len(set(ids)) == 3
    assert refusal.status_code == 400
    assert refusal.json()["error"]["message"] == "X-Request-Id: expected at most 128 characters, got 129."

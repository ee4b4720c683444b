"""The client against a small server that speaks the protocol without vLLM, and the game that it plays."""

import asyncio
import contextlib
import json
import os
import pickle
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
import typer
import uvicorn
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse
from typer.testing import CliRunner

from examples.terra import play
from examples.terra.world import (
    CAR_COL,
    CAR_ROW,
    CARS,
    GRID,
    HEADINGS,
    NUM_TILES,
    ROADS,
    SCENERY,
    TILE_IDS,
    TOKENS_PER_FRAME,
    draw_frame,
    make_action,
    make_episode,
)
from mmkit import InputError
from mmkit.serve import protocol, wire
from mmkit.serve.client import AsyncClient, Client, RequestError, SamplingOptions, ServerGone

ROOT = Path(__file__).parents[2]
PAD, ROOM, STEP = 31, 1750, 70
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
REFUSAL = {
    "message": "terra.actions[1]: expected a (6, 3) float32 tensor, got shape (5, 3).",
    "type": "BadRequestError",
    "param": "items.actions[1]",
    "code": 400,
}


# -- the server --------------------------------------------------------------------------------------------------------


def following(frame: list[int], action: list[list[float]]) -> list[int]:
    """The next frame, as the world itself has it."""
    view = np.array(frame).reshape(GRID, GRID)
    road, heading = CARS[view[CAR_ROW, CAR_COL] - len(ROADS) - len(SCENERY)]
    view[CAR_ROW, CAR_COL] = TILE_IDS[road]
    cols, rows = round(action[-1][0]), -round(action[-1][1])
    if rows or cols:
        heading = ("south" if rows > 0 else "north") if rows else ("east" if cols > 0 else "west")
    return draw_frame(view, CAR_ROW + rows, CAR_COL + cols, heading).tolist()


class Fake:
    """Answers as the prompt says; a prompt of ids is one of the road world."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.spec = "terra"
        self.sessions = 0
        self.room = ROOM
        self.idle = False
        app = FastAPI()
        app.get("/v1/mm/modalities")(self.modalities)
        app.post("/v1/mm/generate")(self.generate)
        app.websocket("/v1/mm/session")(self.session)
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="critical", ws="websockets-sansio", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def modalities(self, request: Request) -> Response:
        if request.headers.get("authorization", "Bearer right") != "Bearer right":
            return JSONResponse({"error": "Unauthorized"}, 401)
        info = {
            "name": "actions", "expected": "a (6, 3) float32 tensor", "shape": [6, 3], "dtype": "float32", "limit": 24,
            "largest_tokens": 6, "placeholder": [PAD] * 6, "in_place": True, "embeds": None, "example": [],
        }  # fmt: skip
        limits = {"body_bytes": 1, "elements": 1, "items": 1, "sessions": 1, "idle_seconds": 1.0, "newer": 1}
        told = {"model": "m", "spec": self.spec, "vocab_size": NUM_TILES + 1, "max_model_len": self.room, "text": False}
        if self.spec != "terra":
            told["vocab_size"] = 7
        return JSONResponse({**told, "modalities": [info], "limits": limits})

    async def generate(self, request: Request) -> Response:
        raw = await request.body()
        self.seen.append(json.loads(raw))
        try:
            asked = protocol.parse(protocol.GenerateRequest, raw)
        except InputError as error:
            info = {"message": str(error), "type": "BadRequestError", "param": error.where, "code": 400}
            return JSONResponse({"error": info}, 400)
        if asked.prompt == "refuse":
            return JSONResponse({"error": REFUSAL}, 400)
        if asked.prompt == "html":
            return Response("<html>hello</html>", media_type="text/html")
        if asked.prompt == "broken":
            return Response("Internal Server Error", 500)
        if asked.prompt == "slow":
            await asyncio.sleep(1)
        if not asked.stream:
            return JSONResponse(generation([5, 6], USAGE))
        return StreamingResponse(self.events(asked), media_type="text/event-stream")

    async def events(self, asked: protocol.GenerateRequest) -> Any:
        first = b": a comment\r\n\r\ndata: " + json.dumps(generation([5], text="a\u2028b"), ensure_ascii=False).encode()
        middle = len(first) - 40
        yield first[:middle]
        await asyncio.sleep(0.01)
        yield first[middle:] + b"\r\n\r\n"
        if asked.prompt == "die":
            raise RuntimeError
        if asked.prompt == "cut":
            return
        if asked.prompt == "error":
            yield "data: " + json.dumps({"error": REFUSAL}) + "\n\n"
            return
        yield "data: " + json.dumps(generation([6], USAGE)) + "\n\n"
        yield "data: [DONE]\n\n"

    async def session(self, ws: WebSocket) -> None:
        if ws.headers.get("authorization", "Bearer right") != "Bearer right":
            await ws.send_denial_response(JSONResponse({"error": "Unauthorized"}, 401))
            return
        await ws.accept()
        self.sessions += 1
        try:
            await self.turns(ws)
        finally:
            self.sessions -= 1

    async def turns(self, ws: WebSocket) -> None:
        remaining, index, frame, chunk_tokens, stream = self.room, 0, [], 0, False

        async def say(kind: str, **fields: Any) -> None:
            await ws.send_text(json.dumps({"type": kind, "remaining": remaining, "newer": 1, **fields}))

        await say("ready", session="s", model="m")
        async for raw in ws.iter_text():
            self.seen.append(json.loads(raw))
            if self.idle:
                self.idle = False
                await say("closed", reason="no message for 300 s")
                await ws.close(1001)
                return
            kind = json.loads(raw)["type"]
            try:
                asked = protocol.parse(protocol.MESSAGES[kind], raw)
            except InputError as error:
                await say("error", error={"message": str(error), "type": "B", "code": 400}, fatal=False)
                continue
            if isinstance(asked, protocol.CloseMessage):
                await say("closed", reason="the client closed it")
                await ws.close()
                return
            assert isinstance(asked, (protocol.StartMessage, protocol.NextMessage))
            if asked.prompt == "refuse":
                await say("error", error=REFUSAL, fatal=False)
                continue
            if asked.prompt == "fatal":
                await say("error", error=REFUSAL | {"code": 503}, fatal=True)
                await say("closed", reason="fatal")
                await ws.close(1011)
                return
            if asked.prompt == "die":
                await ws.close(1011, "dying")
                return
            if asked.prompt == "odd":
                await ws.send_text("{}")
                continue
            if asked.prompt == "slow":
                await asyncio.sleep(1)
            if isinstance(asked, protocol.StartMessage):
                stream, chunk_tokens = asked.stream, asked.max_tokens
                remaining -= len(asked.prompt or ())
            else:
                remaining -= 6
            actions = wire.Decoder(10**6, 100).decode(asked.items).get("actions") or [make_action(0, 0)]
            frame = list(asked.prompt or frame)
            frame = frame[:-6][-TOKENS_PER_FRAME:] if kind == "start" else frame
            if len(frame) == TOKENS_PER_FRAME:
                frame = following(frame, np.asarray(actions[-1]).tolist())
                tokens = frame[: asked.max_tokens or chunk_tokens]
            else:
                tokens, frame = [1, 2], [1, 2]
            remaining -= len(tokens)
            if stream:
                for token in tokens[:3]:
                    await say("tokens", index=index, token_ids=[token])
            await say("chunk", index=index, token_ids=tokens, finish_reason="length", usage=USAGE)
            index += 1


def generation(ids: list[int], usage: Any = None, text: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": ids, "text": text, "finish_reason": "length" if usage else None}
    kind = "mm.generation"
    return {"id": "g", "object": kind, "created": 1, "model": "m", "choices": [choice], "usage": usage, "newer": 1}


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def running() -> Iterator[Fake]:
    fake = Fake()
    yield fake
    fake.stop()


@pytest.fixture
def fake(running: Fake) -> Fake:
    until(lambda: not running.sessions)  # those that a test left asleep
    running.seen.clear()
    running.spec, running.room, running.idle = "terra", ROOM, False
    return running


# -- both clients, called alike ----------------------------------------------------------------------------------------


class Blocking:
    """An `AsyncClient`, or a session of one, called as the other kind is."""

    def __init__(self, inner: Any, runner: asyncio.Runner) -> None:
        self.inner, self.runner = inner, runner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return self._blocking(value) if callable(value) else value

    def _blocking(self, call: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            made = call(*args, **options)
            if hasattr(made, "__anext__"):
                return self._iterated(made)
            if hasattr(made, "__aenter__"):
                return Blocking(made, self.runner)
            return self.runner.run(made)

        return called

    def _iterated(self, events: Any) -> Iterator[Any]:
        async def following() -> Any:
            return await anext(events, None)

        try:
            while (event := self.runner.run(following())) is not None:
                yield event
        finally:
            self.runner.run(events.aclose())

    def __enter__(self) -> Any:
        self._blocking(self.inner.__aenter__)()
        return self

    def __exit__(self, *error: Any) -> None:
        self._blocking(self.inner.__aexit__)(*error)


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes clients."""
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner()) if request.param == "async" else None

        def made(url: str, **options: Any) -> Any:
            client = Blocking(AsyncClient(url, **options), runner) if runner else Client(url, **options)
            return stack.enter_context(client)

        yield made


@pytest.fixture
def client(make: Any, fake: Fake) -> Any:
    return make(fake.url)


def context(seed: int = 0) -> tuple[list[int], list[np.ndarray]]:
    """A prompt of three frames, and their actions."""
    episode = make_episode(seed)
    prompt = [token for frame in episode.frames[:3].tolist() for token in [*frame, *[PAD] * 6]]
    return prompt, list(episode.actions[:3])


def test_modalities(client: Any) -> None:
    told = client.modalities()
    assert (told.spec, told.max_model_len, told.modalities[0].placeholder) == ("terra", ROOM, [PAD] * 6)


def test_generate(make: Any, fake: Fake) -> None:
    client = make(f"{fake.url}/", model="m")
    answer = client.generate(
        np.array([3, 1]),
        {"actions": [np.ones((6, 3), np.float32)], "series": torch.zeros(2, 1, dtype=torch.bfloat16)},
        uuids={"actions": ["a"]},
        n=2,
        stop=["x"],
        mm_processor_kwargs={"size": np.int64(3)},
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
        "prompt": [3, 1], "model": "m", "uuids": {"actions": ["a"]}, "n": 2, "stop": ["x"], "cache_salt": "salt",
        "mm_processor_kwargs": {"size": 3}, "max_tokens": 4, "temperature": 0.0, "stream": False,
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


def test_options_are_those_of_the_protocol() -> None:
    assert set(get_type_hints(SamplingOptions)) == set(protocol.Sampling.model_fields)


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


def test_refusal_within_a_stream(client: Any) -> None:
    events = client.stream("error")
    next(events)
    with pytest.raises(RequestError, match=r"actions\[1\]"):
        next(events)


def test_wrong_sampling_is_for_the_server_to_refuse(client: Any) -> None:
    with pytest.raises(RequestError, match=r"^temperature: ") as caught:
        client.generate("fine", temperature="hot")
    assert caught.value.param == "temperature"
    with pytest.raises(RequestError, match=r"^temprature: expected no field"):
        client.generate("fine", temprature=1.0)


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
    with pytest.raises(RequestError, match=r"HTTP 401 Unauthorized\. Give the client") as caught:
        wrong.modalities()
    assert caught.value.code == 401
    with pytest.raises(RequestError, match="HTTP 401 Unauthorized") as caught, wrong.session([1], max_tokens=1):
        pass
    assert caught.value.code == 401
    with make(fake.url, api_key="right").session([1], max_tokens=1) as session:
        assert session.first.token_ids == [1, 2]


def test_other_paths(make: Any, fake: Fake) -> None:
    with pytest.raises(RequestError, match=r"HTTP 404 Not Found\. Check that it is a server of mmkit") as caught:
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
    with pytest.raises(InputError, match=r"^base_url: expected an address such as"):
        make(url)


# -- servers that go away ----------------------------------------------------------------------------------------------


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_no_server(make: Any, nobody: str) -> None:
    client = make(nobody)
    for call in (client.modalities, lambda: client.generate([1]), lambda: list(client.stream([1]))):
        with pytest.raises(ServerGone, match=r"/v1/mm/\w+: expected a server, got no connection \(.*\)\. Start"):
            call()
    with pytest.raises(ServerGone, match=r"^ws://.*session: expected a server"), client.session([1], max_tokens=1):
        pass


@pytest.mark.parametrize("prompt", ["die", "cut"])
def test_gone_within_a_stream(client: Any, prompt: str) -> None:
    events = client.stream(prompt)
    assert next(events).choices[0].token_ids == [5]
    with pytest.raises(ServerGone, match="generate: expected"):
        next(events)


def test_silence(make: Any, fake: Fake) -> None:
    client = make(fake.url, timeout=0.2)
    with pytest.raises(ServerGone, match=r"none for 0.2 s\. Give the client a longer timeout"):
        client.generate("slow")
    with client.session([1], max_tokens=1) as session:
        with pytest.raises(ServerGone, match=r"none for 0\.2 s"):
            session.next(prompt="slow")
        with pytest.raises(ServerGone, match="a closed one"):  # the late chunk must not answer a later call
            session.next(prompt=[1])


@pytest.mark.parametrize(
    ("prompt", "words"), [("die", "closed connection .*1011.*dying"), ("odd", "a message of a se")]
)
def test_gone_within_a_session(client: Any, prompt: str, words: str) -> None:
    with client.session([1], max_tokens=1) as session:
        with pytest.raises(ServerGone, match=words):
            session.next(prompt=prompt)
        with pytest.raises(ServerGone, match=r"expected an open session, got a closed one\. Open a new one\."):
            session.next()


def test_ended_by_the_server(client: Any, fake: Fake) -> None:
    with client.session([1], max_tokens=1) as session:
        fake.idle = True
        with pytest.raises(ServerGone, match="no message for 300 s"):
            session.next()


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_session(client: Any, fake: Fake) -> None:
    prompt, actions = context()
    episode = make_episode(0)
    with client.session(prompt, {"actions": actions}, max_tokens=64, temperature=0.0, cache_salt="salt") as session:
        assert (session.id, session.model) == ("s", "m")
        assert session.first.token_ids == episode.frames[3].tolist()
        assert session.remaining == ROOM - 3 * STEP - TOKENS_PER_FRAME == session.first.remaining
        for index in range(3, 6):
            chunk = session.next({"actions": [episode.actions[index]]})
            assert chunk.token_ids == episode.frames[index + 1].tolist()
            assert (chunk.index, chunk.remaining) == (index - 2, session.remaining)
        assert len(session.next(max_tokens=2, uuids={"actions": [None]}).token_ids) == 2
        assert fake.sessions == 1
        session.close()
        until(lambda: not fake.sessions)
        session.close()
    start, step, *_, last, close = fake.seen
    assert start.pop("items")["actions"][0]["shape"] == [6, 3]
    assert start == {"type": "start", "prompt": prompt, "max_tokens": 64, "temperature": 0.0, "cache_salt": "salt"}
    assert set(step) == {"type", "items"}
    assert last == {"type": "next", "items": {}, "max_tokens": 2, "uuids": {"actions": [None]}}
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
        with pytest.raises(RequestError, match=r"^max_tokens: "):
            session.next(max_tokens=0)
        with pytest.raises(InputError, match="actions"):
            session.next({"actions": [object()]})
        assert session.remaining == before
        assert session.next().index == 1


def test_fatal_refusal(client: Any) -> None:
    with client.session([1], max_tokens=2) as session:
        with pytest.raises(RequestError) as caught:
            session.next(prompt="fatal")
        assert caught.value.code == 503
        with pytest.raises(ServerGone, match="closed one"):
            session.next()


@pytest.mark.parametrize("prompt", ["refuse", "fatal"])
def test_refused_start(client: Any, fake: Fake, prompt: str) -> None:
    with pytest.raises(RequestError, match="actions"), client.session(prompt, max_tokens=2):
        pytest.fail("entered")
    until(lambda: not fake.sessions)


def test_interrupted_chunk(client: Any, fake: Fake) -> None:
    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with client.session([1], max_tokens=2, stream=True) as session:
        inner = getattr(session, "inner", session)
        inner._on_tokens = stop
        with pytest.raises(KeyboardInterrupt):
            session.next()
        with pytest.raises(InputError, match="the last chunk to be whole"):
            session.next()
    until(lambda: not fake.sessions)


def test_cancelled_chunk(fake: Fake) -> None:
    async def run() -> None:
        async with AsyncClient(fake.url) as client, client.session([1], max_tokens=2) as session:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.next(prompt="slow"), 0.1)
            with pytest.raises(InputError, match="interrupted"):
                await session.next()

    asyncio.run(run())
    until(lambda: not fake.sessions)


def test_an_error_of_the_caller_ends_the_session(client: Any, fake: Fake) -> None:
    with pytest.raises(ZeroDivisionError), client.session([1], max_tokens=2):
        raise ZeroDivisionError
    until(lambda: not fake.sessions)


def test_imports_neither_vllm_nor_the_web_framework() -> None:
    code = "import sys, mmkit.serve.client as c; print({'vllm', 'fastapi', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"


# -- the game ----------------------------------------------------------------------------------------------------------

APP = typer.Typer()
APP.command()(play.main)


def played(fake: Fake, keys: str, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(APP, ["--url", fake.url, "--keys", keys, *options], catch_exceptions=False)
    return done.exit_code, done.output


def pictured(frame: Any) -> str:
    return play.letters(np.asarray(frame)).plain


def driven(seed: int, count: int) -> tuple[str, list[Any]]:
    """Keys of an episode after its context, and its frames."""
    episode = make_episode(seed)
    keys = {}
    for key, (heading, speed) in play.MOVES.items():
        rows, cols = HEADINGS.get(heading, (0, 0))
        keys[make_action(speed * rows, speed * cols).tobytes()] = key
    pressed = "".join(keys[action.tobytes()] for action in episode.actions[2 : 2 + count])
    return pressed, list(episode.frames[2 : 3 + count])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_keys_drive_the_world(fake: Fake, seed: int) -> None:
    keys, frames = driven(seed, 22)
    code, output = played(fake, keys, "--seed", str(seed))
    assert code == 0, output
    places = [output.find(pictured(frame)) for frame in frames]
    assert -1 not in places
    assert "frame 0, 22 left" in output
    assert "frame 22, 0 left" in output
    assert output.rstrip().endswith(play.USED_UP)
    assert sum(message["type"] == "start" for message in fake.seen) == 1
    until(lambda: not fake.sessions)


def test_moves_that_the_world_lacks(fake: Fake) -> None:
    episode = make_episode(0)
    road, heading = CARS[episode.frames[2][CAR_ROW * GRID + CAR_COL] - len(ROADS) - len(SCENERY)]
    wrong = {"_h": "U", "_v": "R", "ng": {"north": "D", "south": "U", "east": "L", "west": "R"}[heading]}[road[-2:]]
    code, output = played(fake, f"{wrong}.")
    assert code == 0
    assert "There is no road to the" in output or "Cars do not turn back" in output
    assert "frame 1, 21 left" in output
    assert all(message["type"] == "start" or message["type"] == "close" for message in fake.seen)


def test_new_world_and_the_end(fake: Fake) -> None:
    fake.room = 5 * STEP
    code, output = played(fake, ".... n.q.")
    assert code == 0
    assert output.count(play.USED_UP) == 2
    assert "world 0, frame 2, 0 left" in output
    assert "world 1, frame 1, 1 left" in output
    assert "frame 2, 0 left" not in output.partition("world 1")[2]


def test_idle_session_is_opened_again(fake: Fake) -> None:
    keys, frames = driven(3, 4)
    with Client(fake.url) as client:
        game = play.Game(client, play.World.of(client, fake.url), 3, False)
        for index, key in enumerate(play.parse_keys(keys)):
            fake.idle = index == 2
            assert game.press(key) == ""
        game.close()
    assert np.array_equal(game.frames[2:], frames)
    assert [message["type"] for message in fake.seen] == ["start", "next", "next", "start", "next", "close"]


def test_errors_of_the_game(fake: Fake, nobody: str) -> None:
    done = CliRunner().invoke(APP, ["--url", nobody, "--keys", "U"])
    assert done.exit_code == 1
    assert "expected a server, got no connection" in done.output
    assert len(done.output.strip().splitlines()) == 1
    fake.spec = "other"
    assert "expected a server of Terra's road world, got one of other" in played(fake, "U")[1]
    assert "got 'X'" in played(fake, "X")[1]
    done = CliRunner().invoke(APP, ["--url", fake.url])
    assert done.exit_code == 2
    assert "expected a terminal" in done.output


@contextlib.contextmanager
def terminal(fake: Fake) -> Iterator[tuple[subprocess.Popen[bytes], int, Any]]:
    """The game in a terminal of its own: the process, the keyboard, and what waits for words on the screen."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LINES": "40", "COLUMNS": "100"}
    command = [sys.executable, "-m", "examples.terra.play", "--url", fake.url]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment)
    screen = b""

    def wait(words: str) -> None:
        nonlocal screen
        deadline = time.monotonic() + 60
        while words.encode() not in screen:
            assert time.monotonic() < deadline, screen[-2000:]
            if select.select([ours], [], [], 0.1)[0]:
                screen += os.read(ours, 65536)
        screen = screen.partition(words.encode())[2]

    try:
        yield process, ours, wait
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


LEFT_THE_SCREEN = "\x1b[?1049l"


def test_keyboard(fake: Fake) -> None:
    with terminal(fake) as (process, keyboard, wait):
        wait("frame 0")
        wait("▀")
        os.write(keyboard, b" ")
        wait("frame 1, 21 left")
        os.write(keyboard, b"\x1b[C")
        wait("frame 2, 20 left")
        os.write(keyboard, b"\x1b[1;2D")
        wait("frame 3, 19 left")
        os.write(keyboard, b"x\x1b[A")
        wait("There is no road to the north.")
        os.write(keyboard, b"n")
        wait("world 1, frame 0")
        os.write(keyboard, b"q")
        wait(LEFT_THE_SCREEN)
        assert process.wait(10) == 0
    until(lambda: not fake.sessions)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_terminal_is_restored(fake: Fake, sent: int, status: int) -> None:
    with terminal(fake) as (process, _, wait):
        wait("frame 0")
        process.send_signal(sent)
        wait(LEFT_THE_SCREEN)
        assert process.wait(10) == status


def test_server_that_goes_away_while_playing() -> None:
    fake = Fake()
    try:
        with terminal(fake) as (process, keyboard, wait):
            wait("frame 0")
            os.write(keyboard, b" ")
            wait("frame 1")
            fake.stop()
            os.write(keyboard, b" ")
            wait(LEFT_THE_SCREEN)
            wait("expected a server, got no connection")
            assert process.wait(10) == 1
    finally:
        fake.stop()

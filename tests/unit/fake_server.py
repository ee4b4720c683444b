"""A small server that speaks the protocol without vLLM. Prompts that are texts say what goes wrong."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mmkit import InputError
from mmkit.serve import protocol
from mmkit.wire.decoding import decode_json

KEY = "right"
"""The key of the server."""

ROOM = 1750
"""Tokens that fit into a new session."""

ACTION_TOKENS = 6
"""Tokens of a message without a prompt."""

USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}

REFUSAL = {
    "message": "terra.actions[1]: expected a (6, 3) float32 tensor, got shape (5, 3).",
    "type": "BadRequestError",
    "param": "items.actions[1]",
    "code": 400,
}


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FakeServer:
    """Serves clients with the key.

    Attributes:
        received: the messages of clients.
        open_sessions: number of sessions that are open.
        url: its address.
    """

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.open_sessions = 0
        app = FastAPI()
        app.get("/v1/mm/modalities")(self.answer_modalities)
        app.post("/v1/mm/generate")(self.answer_generate)
        app.websocket("/v1/mm/session")(self.serve_session)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="critical", ws="websockets-sansio", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def reset(self) -> None:
        """Forget what was received, when all sessions have ended."""
        wait_until(lambda: not self.open_sessions)
        self.received.clear()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    # -- modalities ----------------------------------------------------------------------------------------------------

    async def answer_modalities(self, request: Request) -> Response:
        """Refuse a client without the key; tests/engine/terra_server has the answer of a server."""
        assert request.headers.get("authorization") != f"Bearer {KEY}"
        return JSONResponse({"error": "Unauthorized"}, 401)

    # -- generate ------------------------------------------------------------------------------------------------------

    async def answer_generate(self, request: Request) -> Response:
        body = await request.body()
        self.received.append(json.loads(body))
        try:
            message = decode_json(protocol.GenerateRequest, body)
        except InputError as error:
            return JSONResponse({"error": make_refusal(error)}, 400)
        if message.prompt == "refuse":
            return JSONResponse({"error": REFUSAL}, 400)
        if message.prompt == "broken":
            return Response("Internal Server Error", 500)
        if message.prompt == "html":
            return Response("<html>hello</html>")
        if message.prompt == "silence":
            await wait_for_disconnect(request)
        if message.stream:
            return StreamingResponse(make_events(message.prompt), media_type="text/event-stream")
        return Response(make_generation([5, 6], USAGE))

    # -- sessions ------------------------------------------------------------------------------------------------------

    async def serve_session(self, ws: WebSocket) -> None:
        if ws.headers.get("authorization") != f"Bearer {KEY}":
            await ws.send_denial_response(JSONResponse({"error": "Unauthorized"}, 401))
            return
        await ws.accept()
        self.open_sessions += 1
        try:
            await FakeSession(ws, self.received).run()
        finally:
            self.open_sessions -= 1


class FakeSession:
    """A session that generates the tokens 1 and 2 for each message."""

    def __init__(self, ws: WebSocket, received: list[dict[str, Any]]) -> None:
        self._ws = ws
        self._received = received
        self._remaining = ROOM
        self._index = 0
        self._streams = False

    async def run(self) -> None:
        await self._send("ready", session="s", model="m")
        async for text in self._ws.iter_text():
            self._received.append(json.loads(text))
            try:
                message: Any = decode_json(protocol.ClientMessage, text)
            except InputError as error:
                await self._send("error", error=make_refusal(error), fatal=False)
                continue
            is_over = await self._answer(message)
            if is_over:
                return

    async def _answer(self, message: Any) -> bool:
        """Answer a message, and tell whether the session is over."""
        if isinstance(message, protocol.CloseMessage):
            return await self._close(1000, "the client closed it")
        if isinstance(message.prompt, str) and message.prompt:
            return await self._go_wrong(message.prompt)
        await self._send_chunk(message)
        return False

    async def _go_wrong(self, prompt: str) -> bool:
        """Do what a text asks for, and tell whether the session is over."""
        if prompt == "refuse":
            await self._send("error", error=REFUSAL, fatal=False)
        elif prompt == "not a message":
            await self._ws.send_text("{}")
        elif prompt == "fatal":
            await self._send("error", error={**REFUSAL, "code": 503}, fatal=True)
            return await self._close(1011, "fatal")
        elif prompt == "idle":
            return await self._close(1001, "no message for 300 s")
        elif prompt == "die":
            await self._ws.close(1011, "dying")
            return True
        elif prompt == "silence":
            await self._ws.receive()  # the end of the connection
            return True
        return False

    async def _send_chunk(self, message: Any) -> None:
        if isinstance(message, protocol.StartMessage):
            self._streams = message.stream
        num_prompt_tokens = len(message.prompt) if message.prompt else ACTION_TOKENS
        self._remaining -= num_prompt_tokens + 2
        if self._streams:
            await self._send("tokens", index=self._index, token_ids=[1])
            await self._send("tokens", index=self._index, token_ids=[2])
        await self._send("chunk", index=self._index, token_ids=[1, 2], finish_reason="length", usage=USAGE)
        self._index += 1

    async def _close(self, code: int, reason: str) -> bool:
        await self._send("closed", reason=reason)
        await self._ws.close(code)
        return True

    async def _send(self, kind: str, **fields: Any) -> None:
        """Send a message; as a newer server, with a field that the client lacks."""
        message = {"type": kind, "remaining": self._remaining, "newer": 1} | fields
        await self._ws.send_text(json.dumps(message))


# -- messages ----------------------------------------------------------------------------------------------------------


def make_refusal(error: InputError) -> dict[str, Any]:
    return {**REFUSAL, "message": str(error), "param": error.where}


def make_generation(ids: list[int], usage: Any = None, text: str | None = None) -> str:
    """Return a generation; as of a newer server, with a field that the client lacks."""
    choice = {"index": 0, "token_ids": ids, "text": text, "finish_reason": None}
    if usage:
        choice["finish_reason"] = "length"
    generation = {
        "id": "g",
        "object": "mm.generation",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
        "newer": 1,
    }
    return json.dumps(generation, ensure_ascii=False)


async def make_events(prompt: Any) -> AsyncIterator[str | bytes]:
    """Yield the parts of a stream, of which the first ends within an event."""
    first = b": a comment\r\n\r\ndata: " + make_generation([5], text="a\u2028b").encode()
    middle = len(first) - 40
    yield first[:middle]
    await asyncio.sleep(0.01)
    yield first[middle:] + b"\r\n\r\n"
    if prompt == "die":
        raise RuntimeError
    if prompt == "cut":
        return
    if prompt == "error":
        yield "data: " + json.dumps({"error": REFUSAL}) + "\n\n"
        return
    yield f"data: {make_generation([6], USAGE)}\n\n"
    yield "data: [DONE]\n\n"


async def wait_for_disconnect(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)

"""A small server that speaks the protocol without vLLM. Prompts that are texts say what goes wrong."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mmkit import InputError
from mmkit.serve import protocol
from mmkit.serve.decoding import decode_json

PAD, ROOM = 31, 1750
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
REFUSAL = {
    "message": "terra.actions[1]: expected a (6, 3) float32 tensor, got shape (5, 3).",
    "type": "BadRequestError",
    "param": "items.actions[1]",
    "code": 400,
}
ANSWERS = {
    "refuse": (400, json.dumps({"error": REFUSAL})),
    "broken": (500, "Internal Server Error"),
    "html": (200, "<html>hello</html>"),
}
ENDS = {"close": (1000, "the client closed it"), "idle": (1001, "no message for 300 s"), "fatal": (1011, "fatal")}
"""How sessions end, by what was sent."""


def generation(ids: list[int], usage: Any = None, text: str | None = None) -> str:
    choice = {"index": 0, "token_ids": ids, "text": text, "finish_reason": "length" if usage else None}
    answer = {"id": "g", "object": "mm.generation", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps({**answer, "newer": 1}, ensure_ascii=False)


def refusal(error: InputError) -> dict[str, Any]:
    return {**REFUSAL, "message": str(error), "param": error.where}


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Fake:
    """Serves whoever has the key ``right``; keeps what it was sent, and counts open sessions."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.sessions = 0
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
        until(lambda: self._server.started)

    def forget(self) -> None:
        """Be as new."""
        until(lambda: not self.sessions)
        self.seen.clear()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def modalities(self, request: Request) -> Response:
        """Only whoever lacks the key asks here; tests/engine/terra_server has the answer of a server."""
        assert request.headers.get("authorization") != "Bearer right"
        return JSONResponse({"error": "Unauthorized"}, 401)

    async def generate(self, request: Request) -> Response:
        raw = await request.body()
        self.seen.append(json.loads(raw))
        try:
            asked = decode_json(protocol.GenerateRequest, raw)
        except InputError as error:
            return JSONResponse({"error": refusal(error)}, 400)
        if isinstance(asked.prompt, str) and asked.prompt in ANSWERS:
            code, answer = ANSWERS[asked.prompt]
            return Response(answer, code)
        while asked.prompt == "silence" and not await request.is_disconnected():
            await asyncio.sleep(0.05)
        if not asked.stream:
            return Response(generation([5, 6], USAGE))
        return StreamingResponse(self.events(asked.prompt), media_type="text/event-stream")

    async def events(self, prompt: Any) -> Any:
        first = b": a comment\r\n\r\ndata: " + generation([5], text="a\u2028b").encode()
        middle = len(first) - 40
        yield first[:middle]
        await asyncio.sleep(0.01)
        yield first[middle:] + b"\r\n\r\n"
        if prompt == "die":
            raise RuntimeError
        if prompt == "error":
            yield "data: " + json.dumps({"error": REFUSAL}) + "\n\n"
        elif prompt != "cut":
            yield f"data: {generation([6], USAGE)}\n\ndata: [DONE]\n\n"

    async def session(self, ws: WebSocket) -> None:
        if ws.headers.get("authorization") != "Bearer right":
            return await ws.send_denial_response(JSONResponse({"error": "Unauthorized"}, 401))
        await ws.accept()
        self.sessions += 1
        try:
            await self.turns(ws)
        finally:
            self.sessions -= 1

    async def turns(self, ws: WebSocket) -> None:
        """Two tokens a turn."""
        remaining, index, stream = ROOM, 0, False

        async def say(kind: str, **fields: Any) -> None:
            await ws.send_text(json.dumps({"type": kind, "remaining": remaining, "newer": 1, **fields}))

        await say("ready", session="s", model="m")
        async for raw in ws.iter_text():
            self.seen.append(json.loads(raw))
            try:
                asked: Any = decode_json(protocol.ClientMessage, raw)
            except InputError as error:
                await say("error", error=refusal(error), fatal=False)
                continue
            prompt = getattr(asked, "prompt", "close")
            if prompt in ("refuse", "fatal"):
                await say("error", error=REFUSAL | {"code": 503 if prompt == "fatal" else 400}, fatal=prompt == "fatal")
            if isinstance(prompt, str) and prompt in ENDS:
                code, reason = ENDS[prompt]
                await say("closed", reason=reason)
                return await ws.close(code)
            if prompt == "die":
                return await ws.close(1011, "dying")
            if prompt == "odd":
                await ws.send_text("{}")
            if prompt == "silence":
                await ws.receive()  # the end of the connection
                return None
            if isinstance(prompt, str) and prompt:
                continue
            stream |= getattr(asked, "stream", False)
            remaining -= len(prompt or [PAD] * 6) + 2
            for token in [1, 2] if stream else []:
                await say("tokens", index=index, token_ids=[token])
            await say("chunk", index=index, token_ids=[1, 2], finish_reason="length", usage=USAGE)
            index += 1
        return None

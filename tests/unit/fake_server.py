"""A small server that speaks the protocol without vLLM; a prompt of ids is one of a small world of frames."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse
from msgspec import Raw

from mmkit import InputError
from mmkit.serve import protocol, wire

PAD, ROOM, TOKENS_PER_FRAME, STEP = 31, 1750, 64, 70
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
REFUSAL = {
    "message": "terra.actions[1]: expected a (6, 3) float32 tensor, got shape (5, 3).",
    "type": "BadRequestError",
    "param": "items.actions[1]",
    "code": 400,
}


def following(frame: list[int], action: Any) -> list[int]:
    """The next frame: the last one, moved on as the action says."""
    return np.roll(frame, round(float(np.sum(action)))).tolist()


def generation(ids: list[int], usage: Any = None, text: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": ids, "text": text, "finish_reason": "length" if usage else None}
    kind = "mm.generation"
    return {"id": "g", "object": kind, "created": 1, "model": "m", "choices": [choice], "usage": usage, "newer": 1}


def unauthorized(connection: Request | WebSocket) -> Response | None:
    if connection.headers.get("authorization", "Bearer right") != "Bearer right":
        return JSONResponse({"error": "Unauthorized"}, 401)
    return None


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Fake:
    """Answers as the prompt says."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.sessions = 0
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
        until(lambda: self._server.started)

    def forget(self) -> None:
        """Be as new."""
        until(lambda: not self.sessions)
        self.seen.clear()
        self.idle = False

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def modalities(self, request: Request) -> Response:
        info = {
            "name": "actions", "expected": "a (6, 3) float32 tensor", "shape": [6, 3], "dtype": "float32", "limit": 24,
            "largest_tokens": 6, "placeholder": [PAD] * 6, "in_place": True, "embeds": None, "example": [],
        }  # fmt: skip
        limits = {"body_bytes": 1, "elements": 1, "items": 1, "sessions": 1, "idle_seconds": 1.0, "newer": 1}
        model = {"model": "m", "spec": "terra", "vocab_size": PAD + 1, "max_model_len": ROOM, "text": False}
        return unauthorized(request) or JSONResponse({**model, "modalities": [info], "limits": limits})

    async def generate(self, request: Request) -> Response:
        raw = await request.body()
        self.seen.append(json.loads(raw))
        try:
            asked = protocol.decoded(protocol.GenerateRequest, raw)
        except InputError as error:
            info = {"message": str(error), "type": "BadRequestError", "param": error.where, "code": 400}
            return JSONResponse({"error": info}, 400)
        if asked.prompt == "refuse":
            return JSONResponse({"error": REFUSAL}, 400)
        if asked.prompt == "html":
            return Response("<html>hello</html>", media_type="text/html")
        if asked.prompt == "broken":
            return Response("Internal Server Error", 500)
        while asked.prompt == "silence" and not await request.is_disconnected():
            await asyncio.sleep(0.05)
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
        if asked.prompt == "error":
            yield "data: " + json.dumps({"error": REFUSAL}) + "\n\n"
        elif asked.prompt != "cut":
            yield "data: " + json.dumps(generation([6], USAGE)) + "\n\n"
            yield "data: [DONE]\n\n"

    async def session(self, ws: WebSocket) -> None:
        if refusal := unauthorized(ws):
            await ws.send_denial_response(refusal)
            return
        await ws.accept()
        self.sessions += 1
        try:
            await self.turns(ws)
        finally:
            self.sessions -= 1

    async def turns(self, ws: WebSocket) -> None:
        remaining, index, frame, chunk_tokens, stream = ROOM, 0, [], 0, False

        async def say(kind: str, **fields: Any) -> None:
            await ws.send_text(json.dumps({"type": kind, "remaining": remaining, "newer": 1, **fields}))

        async def end(reason: str, code: int) -> None:
            await say("closed", reason=reason)
            await ws.close(code)

        await say("ready", session="s", model="m")
        async for raw in ws.iter_text():
            self.seen.append(json.loads(raw))
            if self.idle:
                self.idle = False
                return await end("no message for 300 s", 1001)
            kind = self.seen[-1]["type"]
            try:
                asked: Any = protocol.decoded(protocol.StartMessage | protocol.NextMessage | protocol.CloseMessage, raw)
            except InputError as error:
                await say("error", error={"message": str(error), "type": "B", "code": 400}, fatal=False)
                continue
            if kind == "close":
                return await end("the client closed it", 1000)
            if asked.prompt == "fatal":
                await say("error", error=REFUSAL | {"code": 503}, fatal=True)
                return await end("fatal", 1011)
            if asked.prompt == "die":
                return await ws.close(1011, "dying")
            if asked.prompt == "silence":
                await ws.receive()  # the end of the connection
                return None
            if asked.prompt == "refuse":
                await say("error", error=REFUSAL, fatal=False)
                continue
            if asked.prompt == "odd":
                await ws.send_text("{}")
                continue
            if kind == "start":
                stream = asked.stream
                frame = list(asked.prompt)[:-6][-TOKENS_PER_FRAME:]
            most = self.seen[-1].get("sampling_params", {}).get("max_tokens", chunk_tokens)
            chunk_tokens = most if kind == "start" else chunk_tokens
            remaining -= len(asked.prompt) if kind == "start" else 6
            tokens = [1, 2]
            if len(frame) == TOKENS_PER_FRAME:
                actions = [np.zeros((6, 3))]
                for items in protocol.named(asked.items, {"actions": Raw}, "items").values():
                    actions = wire.Decoder(protocol.Limits()).items(items, "items", None, [""])
                frame = following(frame, np.asarray(actions[-1]))
                tokens = frame[:most]
            remaining -= len(tokens)
            for token in tokens[: 3 * stream]:
                await say("tokens", index=index, token_ids=[token])
            await say("chunk", index=index, token_ids=tokens, finish_reason="length", usage=USAGE)
            index += 1
        return None

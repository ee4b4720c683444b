"""``WS /v1/mm/session``: a closed loop of items in, tokens out, on vLLM's resumable requests.

One message at a time: the client starts, receives a chunk of tokens, sends what comes next, and so
on. The server says with every message how many tokens still fit, and refuses what does not fit
before the engine sees it.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketState

from ..errors import InputError
from . import errors, metrics, parsing, protocol, weigh
from .answers import choice, usage
from .engine import TRIES, EngineDeadError, Lost, after, is_lost, part, tokens
from .errors import TooBusy
from .protocol import (
    ChunkMessage,
    ClosedMessage,
    CloseMessage,
    ErrorMessage,
    ReadyMessage,
    StartMessage,
    TokensMessage,
)

if TYPE_CHECKING:
    from .door import Door

NORMAL, GOING_AWAY, POLICY, ERROR, BUSY = 1000, 1001, 1008, 1011, 1013
"""Close codes of websockets."""


class _Left(Exception):
    """The client is gone."""


class _End(Exception):
    """The session ends: why, and the close code."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.reason, self.code = reason, code


class Session:
    """One session.

    Args:
        door: the server's.
        socket: not accepted yet.
    """

    def __init__(self, door: Door, socket: WebSocket) -> None:
        self._door, self._socket = door, socket
        self._id = f"mmsession-{uuid4().hex}"
        self._model = door.models[0]
        self._used = 0
        self._items: Counter[str] = Counter()
        self._index = 0
        self._last: list[int] = []
        self._asked: StartMessage | None = None
        self._feed: asyncio.Queue[Any] = asyncio.Queue()
        self._outputs: AsyncGenerator[Any, None] | None = None
        self._incoming: asyncio.Task[Any] | None = None

    @property
    def remaining(self) -> int:
        """Tokens that still fit."""
        return self._door.engine.max_model_len - self._used

    async def run(self) -> None:
        """Serve the session until it ends; whatever ends it, its request is gone from the engine
        then."""
        await self._socket.accept()
        end = _End("the client left", NORMAL)
        door = self._door
        if door.sessions >= door.most_sessions:
            most = f"at most {door.most_sessions} open at once"
            error = TooBusy("session", most, "one more", "Try again later.")
            await self._finish(await self._refuse(error, fatal=True, code=BUSY))
            return
        door.sessions += 1
        metrics.SESSIONS.inc()
        try:
            ready = ReadyMessage(session=self._id, model=self._model, remaining=self.remaining)
            await self._send(ready)
            while True:
                await self._turn(await self._receive())
        except _Left:
            pass
        except _End as reason:
            end = reason
        except Exception as error:
            end = await self._refuse(error, fatal=True, code=ERROR)
        finally:
            door.sessions -= 1
            metrics.SESSIONS.dec()
            await self._abort()
        await self._finish(end)

    # -- messages ----------------------------------------------------------------------------------

    async def _send(self, message: Any) -> None:
        """Send a message; a client that does not read for too long is gone."""
        if self._socket.application_state is not WebSocketState.CONNECTED:
            raise _Left
        try:
            async with asyncio.timeout(self._door.limits.idle_seconds):
                await self._socket.send_text(message.model_dump_json(exclude_none=True))
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            raise _Left from None

    def _listen(self) -> asyncio.Task[Any]:
        """The client's next message, as it arrives."""
        if self._incoming is None:
            self._incoming = asyncio.ensure_future(self._socket.receive())
        return self._incoming

    async def _receive(self) -> Any:
        """The client's next message, parsed. Malformed ones are refused, and the next one is
        awaited."""
        while True:
            seconds = self._door.limits.idle_seconds
            waited = {self._listen(), self._door.over}
            done, _ = await asyncio.wait(waited, timeout=seconds, return_when=FIRST_COMPLETED)
            if self._door.over in done:
                raise EngineDeadError
            if not done:
                raise _End(f"no message for {seconds:g} s", GOING_AWAY)
            try:
                return await self._message()
            except InputError as error:
                await self._refuse(error)

    async def _message(self) -> Any:
        """The message that has arrived."""
        assert self._incoming is not None
        raw, self._incoming = await self._incoming, None
        if raw["type"] == "websocket.disconnect":
            raise _Left
        text = raw.get("text")
        if text is None:
            raise InputError("message", "JSON text", "bytes", "Send text frames.")
        await asyncio.to_thread(weigh.Scale(self._door.limits, "message").add, text)
        return await asyncio.to_thread(_parsed, text)

    async def _refuse(
        self, error: BaseException, *, fatal: bool = False, code: int = ERROR
    ) -> _End:
        info = errors.info(error, self._door.plan, "session")
        try:
            await self._send(ErrorMessage(error=info, fatal=fatal, remaining=self.remaining))
        except _Left:
            if not fatal:
                raise
        return _End(info.message, code)

    async def _finish(self, end: _End) -> None:
        """Say farewell, if there is anybody."""
        try:
            await self._send(ClosedMessage(reason=end.reason, remaining=self.remaining))
            async with asyncio.timeout(self._door.limits.idle_seconds):
                await self._socket.close(end.code)
        except (_Left, TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            pass

    # -- turns -------------------------------------------------------------------------------------

    async def _turn(self, message: Any) -> None:
        """Answer one message by a chunk."""
        if isinstance(message, CloseMessage):
            raise _End("the client closed it", NORMAL)
        try:
            sampling = self._sampling(message)
            prompt = await self._door.prompt(message, self._asked or message, self._last)
            rendered = await self._rendered(prompt, sampling.max_tokens)
        except Exception as error:
            if not errors.of_caller(error):
                raise
            await self._refuse(error)
            return
        if self._asked is not None:
            await self._chunk(prompt, rendered, sampling)
            return
        # without the items, whose bytes would stay in memory as long as the session
        self._asked = msgspec.structs.replace(
            message,
            prompt=None,
            items=protocol.no_items(),
            uuids=protocol.nothing(),
            messages=protocol.nothing(),
        )
        try:
            await self._chunk(prompt, rendered, sampling)
        except Exception as error:
            if self._last or not errors.of_caller(error):
                raise
            # what vLLM refuses only now, as more logprobs than the server allows: the session has
            # not begun
            self._door.engine.forget(rendered)
            self._asked = self._outputs = None
            self._feed, self._used = asyncio.Queue(), 0
            await self._refuse(error)

    def _sampling(self, message: Any) -> Any:
        """vLLM's sampling parameters of the chunk after a message, if it may come now."""
        asked = self._asked
        if isinstance(message, StartMessage):
            if asked is not None:
                expected = '"next" or "close" in a session that has started'
                raise InputError("type", expected, '"start"')
            self._model = self._door.check_model(message.model)
            return self._door.engine.sampling(message, stream=True)
        if asked is None:
            raise InputError("type", '"start" as the first message', '"next"')
        max_tokens = message.max_tokens or asked.max_tokens
        chunk = msgspec.structs.replace(asked, max_tokens=max_tokens)
        return self._door.engine.sampling(chunk, stream=True)

    async def _rendered(self, prompt: Mapping[str, Any], max_tokens: int) -> Any:
        """The part of the prompt, if it fits."""
        engine = self._door.engine
        if not prompt.get("prompt") and not prompt.get("prompt_token_ids"):
            if not self._last:
                raise InputError("prompt", "at least one token in the first message", "none")
            rendered: Any = tokens([])
        else:
            rendered = await self._watching(engine.render(prompt))
        try:
            self._check_room(rendered, max_tokens)
        except InputError:
            engine.forget(rendered)
            raise
        return rendered

    def _check_room(self, rendered: Mapping[str, Any], max_tokens: int) -> None:
        """Refuse what goes beyond the model's context or its limits on items."""
        length = len(rendered["prompt_token_ids"])
        if length + max_tokens > self.remaining:
            expected = f"at most {self.remaining} more tokens in this session"
            got = f"{length} of the prompt and max_tokens={max_tokens}"
            remedy = "Ask for less, or start a new session."
            raise InputError("max_tokens", expected, got, remedy)
        places = rendered.get("mm_placeholders", {})
        for name, limit in self._door.engine.limits().items():
            count = self._items[name] + len(places.get(name, ()))
            if count > limit:
                expected = f"at most {limit} item(s) in one session"
                raise InputError(f"items.{name}", expected, str(count), "Start a new session.")

    async def _chunk(self, prompt: Mapping[str, Any], rendered: Any, sampling: Any) -> None:
        """Generate one chunk and send it."""
        for _ in range(TRIES):
            self._feed.put_nowait(part(after(self._last, rendered), sampling))
            if await self._generated(rendered, sampling):
                return
            rendering = self._door.engine.render(prompt)
            rendered = await self._watching(rendering)
        raise Lost

    async def _generated(self, rendered: Any, sampling: Any) -> bool:
        """Whether the engine had all items, and so made the chunk."""
        asked = self._asked
        assert asked is not None
        if self._outputs is None:
            self._outputs = self._door.engine.chunks(sampling, self._id, self._parts())
        length = len(rendered["prompt_token_ids"])
        ids: list[int] = []
        text, logprobs, cached = "", [], 0
        used = self._used + length
        while True:
            output = await self._watching(anext(self._outputs, None))
            if output is None:
                raise _End("the server is closing it", GOING_AWAY)
            if not ids and is_lost(output):
                return False
            new = choice(output.outputs[0])
            ids += new.token_ids
            text += new.text or ""
            logprobs += new.logprobs or []
            if not self._index:  # vLLM goes on telling that of the first part
                cached = max(cached, output.num_cached_tokens or 0)
            self._used = used + len(ids)
            if new.finish_reason is not None:
                break
            if asked.stream and new.token_ids:
                message = TokensMessage(
                    index=self._index,
                    token_ids=new.token_ids,
                    text=new.text,
                    remaining=self.remaining,
                )
                await self._send(message)
        if new.finish_reason not in ("stop", "length"):
            raise _End(f"the server ended the chunk: {new.finish_reason}", GOING_AWAY)
        for name, places in rendered.get("mm_placeholders", {}).items():
            self._items[name] += len(places)
        self._last = ids[-1:]  # vLLM drops it, and wants it before the next part
        chunk = ChunkMessage(
            index=self._index,
            token_ids=ids,
            text=text or None,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            logprobs=logprobs or None,
            usage=usage(length, len(ids), cached),
            remaining=self.remaining,
        )
        self._index += 1
        await self._send(chunk)
        return True

    async def _parts(self) -> AsyncGenerator[Any, None]:
        """The prompt's parts, as vLLM takes them."""
        while True:
            yield await self._feed.get()

    async def _watching(self, work: Any) -> Any:
        """The outcome of some work, during which the client may leave, close, or wrongly send
        more."""
        working = asyncio.ensure_future(work)
        try:
            while True:
                waited = {working, self._listen(), self._door.over}
                await asyncio.wait(waited, return_when=FIRST_COMPLETED)
                # also when tokens come so fast that they are always there first
                if self._listen().done():
                    await self._interrupted()
                if working.done():
                    break
                if self._door.over.done():
                    raise EngineDeadError
            return await working
        finally:
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    async def _interrupted(self) -> None:
        try:
            message = await self._message()
            if isinstance(message, CloseMessage):
                raise _End("the client closed it", NORMAL)
            expected = "none before the chunk is complete"
            remedy = "Wait for the chunk, or close the session."
            raise InputError("message", expected, f'"{message.type}"', remedy)
        except InputError as error:
            await self._refuse(error)

    async def _abort(self) -> None:
        """Take the request from the engine."""
        if self._incoming is not None:
            self._incoming.cancel()
            await asyncio.gather(self._incoming, return_exceptions=True)
        if self._outputs is not None:
            with suppress(Exception):  # a dead engine has nothing to take it from
                await self._outputs.aclose()


def _parsed(text: str) -> Any:
    """A client's message."""
    kind = parsing.decoded(parsing.decoder(_Kind), text, where="message").type
    if kind not in protocol.MESSAGES:
        raise InputError("type", f"one of {', '.join(protocol.MESSAGES)}", parsing.shown(kind))
    try:
        return parsing.parse(protocol.MESSAGES[kind], text)
    except parsing.UnknownField as error:
        if error.object or error.name not in _CONSTRAINTS:
            raise
        expected = "none in a session, where vLLM begins no grammar anew with a chunk"
        remedy = "Ask /v1/mm/generate, with all that came before."
        raise InputError(error.name, expected, "one", remedy) from None


_CONSTRAINTS = ("structured_outputs", "response_format")


class _Kind(msgspec.Struct):
    """What every message has."""

    type: str

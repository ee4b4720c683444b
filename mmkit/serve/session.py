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
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import msgspec
from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketState

from ..errors import InputError
from . import errors, metrics, parsing, protocol, weigh
from .answers import Output, choice, usage
from .engine import TRIES, EngineDeadError, Lost, after, is_lost, part, tokens
from .errors import TooBusy
from .protocol import (
    ChunkMessage,
    ClosedMessage,
    CloseMessage,
    ErrorMessage,
    ReadyMessage,
    Slid,
    StartMessage,
    TokensMessage,
    Window,
)
from .window import History, places

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


class _Step(NamedTuple):
    """A message on its way to the engine.

    Attributes:
        prompt: vLLM's.
        rendered: that, rendered.
        sent: what the engine reads, which begins with what has to stand before it.
        cut: where the window begins from now on; None where it does not slide.
    """

    prompt: Mapping[str, Any]
    rendered: Mapping[str, Any]
    sent: Mapping[str, Any]
    cut: int | None


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
        self._output: Output | None = None
        self._feed: asyncio.Queue[Any] = asyncio.Queue()
        self._outputs: AsyncGenerator[Any, None] | None = None
        self._history: History | None = None
        self._incoming: asyncio.Task[Any] | None = None
        self._copy: int | None = None

    @property
    def remaining(self) -> int:
        """Tokens that still fit, without a slide."""
        return self._door.engine.max_model_len - self._used

    async def run(self) -> None:
        """Serve the session until it ends; whatever ends it, its request is gone from the engine
        then."""
        await self._socket.accept()
        door = self._door
        if door.engine.encodes_only:
            remedy = "Open it at the consumer of what is encoded here."
            away = InputError("session", "a server that generates", "one that encodes", remedy)
            await self._finish(await self._refuse(away, fatal=True, code=POLICY))
            return
        with door.place() as place:
            if place is None:
                most = f"at most {door.most_sessions} open at once"
                error = TooBusy("session", most, "one more", "Try again later.")
                end = await self._refuse(error, fatal=True, code=BUSY)
            else:
                self._copy = door.engine.copy_of(place)
                end = await self._served()
        await self._finish(end)

    async def _served(self) -> _End:
        """Answer messages until the session ends; why it does."""
        metrics.SESSIONS.inc()
        end = _End("the client left", NORMAL)
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
            metrics.SESSIONS.dec()
            await self._abort()
        return end

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
        """Send the last message, if the client is still there."""
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
            sampling = await self._sampling(message)
            prompt = await self._door.prompt(message, self._asked or message, self._last)
            step = await self._rendered(message, prompt, sampling.max_tokens)
        except Exception as error:
            if not errors.of_caller(error):
                raise
            await self._refuse(error)
            return
        if self._asked is not None:
            await self._chunk(step, sampling)
            return
        # without the items, whose bytes would stay in memory as long as the session; a window has
        # those that it may need again
        self._asked = msgspec.structs.replace(
            message,
            prompt=None,
            items=protocol.no_items(),
            uuids=protocol.nothing(),
            messages=protocol.nothing(),
        )
        window = message.window
        self._history = None if window is None else History(window)
        try:
            await self._chunk(step, sampling)
        except Exception as error:
            if self._last or not errors.of_caller(error):
                raise
            # what vLLM refuses only now, as more logprobs than the server allows: the session has
            # not begun
            self._door.engine.forget(step.rendered)
            self._asked = self._outputs = self._history = None
            self._feed, self._used = asyncio.Queue(), 0
            await self._refuse(error)

    async def _sampling(self, message: Any) -> Any:
        """vLLM's sampling parameters of the chunk after a message, if it may come now."""
        asked = self._asked
        if isinstance(message, StartMessage):
            if asked is not None:
                expected = '"next" or "close" in a session that has started'
                raise InputError("type", expected, '"start"')
            self._model = self._door.check_model(message.model)
            self._output = await self._door.output(message)
            if self._output is None and message.max_tokens is None:
                raise InputError("max_tokens", "a value", "none")
            return self._sampled(message)
        if asked is None:
            raise InputError("type", '"start" as the first message', '"next"')
        max_tokens = message.max_tokens or asked.max_tokens
        return self._sampled(msgspec.structs.replace(asked, max_tokens=max_tokens))

    def _sampled(self, chunk: StartMessage) -> Any:
        output = None if self._output is None else self._output.bound
        return self._door.engine.sampling(chunk, output=output, stream=True)

    async def _rendered(self, message: Any, prompt: Mapping[str, Any], max_tokens: int) -> _Step:
        """The prompt of the engine for a message, if it fits."""
        engine = self._door.engine
        if not prompt.get("prompt") and not prompt.get("prompt_token_ids"):
            if not self._last:
                raise InputError("prompt", "at least one token in the first message", "none")
            rendered: Any = tokens([])
        else:
            rendered = await self._watching(engine.render(prompt))
        try:
            if isinstance(message, StartMessage) and message.window is not None:
                self._check_window(message.window, rendered)
            cut = self._fitting(rendered, max_tokens)
            return await self._step(prompt, rendered, cut)
        except BaseException:
            engine.forget(rendered)
            raise

    async def _step(self, prompt: Mapping[str, Any], rendered: Any, cut: int | None) -> _Step:
        """A message with what has to stand before it."""
        if cut is None or self._history is None:
            return _Step(prompt, rendered, after(self._last, rendered), None)
        left = self._door.engine.render_left(self._history, cut, rendered)
        return _Step(prompt, rendered, await self._watching(left), cut)

    def _check_window(self, window: Window, rendered: Mapping[str, Any]) -> None:
        """Refuse a window that does not go with the model or the first prompt."""
        if self._door.plan.spec.decoder_prompt is not None:
            raise InputError("window", "none for a model with an encoder", "one")
        History(window).check(rendered["prompt_token_ids"], places(rendered))

    def _fitting(self, rendered: Mapping[str, Any], max_tokens: int) -> int | None:
        """Where the window has to begin for a message; None where nothing falls out.

        Raises:
            InputError: the message goes beyond the model's context or its limits on items.
        """
        history, new = self._history, Counter(place.name for place in places(rendered))
        size = len(rendered["prompt_token_ids"]), max_tokens
        if history is None:
            self._check_room("session", self._used, self._items + new, *size)
            return None

        def check(used: int, items: Counter[str]) -> None:
            history.check_count(items + new)
            self._check_room("window", used, items + new, *size)

        return history.fitting(new.total(), check)

    def _check_room(
        self, within: str, used: int, items: Counter[str], length: int, max_tokens: int
    ) -> None:
        """Refuse what goes beyond the model's context or its limits on items."""
        engine = self._door.engine
        room = engine.max_model_len - used
        if length + max_tokens > room:
            expected = f"at most {room} more tokens in this {within}"
            got = f"{length} of the prompt and max_tokens={max_tokens}"
            remedy = "Ask for less, or start a new session."
            raise InputError("max_tokens", expected, got, remedy)
        for name, limit in engine.limits().items():
            if items[name] > limit:
                expected = f"at most {limit} item(s) in one {within}"
                remedy = "Start a new session."
                raise InputError(f"items.{name}", expected, str(items[name]), remedy)

    async def _chunk(self, step: _Step, sampling: Any) -> None:
        """Generate one chunk and send it."""
        slid = None if step.cut is None else await self._slide(step.cut)
        for _ in range(TRIES):
            self._feed.put_nowait(part(step.sent, sampling))
            if await self._generated(step, sampling, slid):
                return
            rendered = await self._watching(self._door.engine.render(step.prompt))
            step = await self._step(step.prompt, rendered, step.cut)
        raise Lost

    async def _slide(self, cut: int) -> Slid:
        """Let go of what is before a cut: the engine's request ends, and another one begins."""
        assert self._history is not None
        if self._outputs is not None:
            await self._outputs.aclose()
        self._outputs, self._feed = None, asyncio.Queue()
        slid = self._history.slide(cut)
        self._used, self._items = self._history.at(cut)
        return slid

    async def _generated(self, step: _Step, sampling: Any, slid: Slid | None) -> bool:
        """Whether the engine had all items, and so made the chunk."""
        asked = self._asked
        assert asked is not None
        if self._outputs is None:
            name = f"{self._id}-{self._index}"
            self._outputs = self._door.engine.chunks(sampling, name, self._parts(), self._copy)
        begins = slid is not None or not self._index
        length = len(step.rendered["prompt_token_ids"])
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
            if begins:  # vLLM goes on telling that of a request's first part
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
        produced = None if self._output is None else await self._output.produced(ids)
        self._items.update(place.name for place in places(step.rendered))
        self._last = ids[-1:]  # vLLM drops it, and wants it before the next part
        if self._history is not None:
            self._history.add(step.prompt, step.rendered, ids)
        read = len(step.sent["prompt_token_ids"]) if begins else length
        chunk = ChunkMessage(
            index=self._index,
            token_ids=ids,
            text=text or None,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            logprobs=logprobs or None,
            usage=usage(read, len(ids), cached),
            slid=slid,
            remaining=self.remaining,
            produced=produced,
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
    """The fields of every message."""

    type: str

"""``WS /v1/mm/session``: a closed loop of items in, tokens out, on vLLM's resumable requests.

One message at a time: the client starts, receives a chunk of tokens, sends what comes next, and so
on. The server says with every message how many tokens still fit, and refuses what does not fit
before the engine sees it. `Session` is the connection; `_Talk` is there once a start is taken.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketState
from vllm.v1.engine.exceptions import EngineDeadError

from ..errors import InputError
from . import errors
from .engine import TRIES, after, chosen, is_lost, part, tokens
from .errors import SESSIONS, Lost, TooBusy
from .protocol import (
    ChunkMessage,
    ClosedMessage,
    CloseMessage,
    ErrorMessage,
    NextMessage,
    ReadyMessage,
    Slid,
    StartMessage,
    TokensMessage,
    decoded,
    named,
    nothing,
)
from .state import ServerState, choice, produced, usage
from .window import History, places
from .wire import weigh

NORMAL, GOING_AWAY, POLICY, ERROR, BUSY = 1000, 1001, 1008, 1011, 1013
"""Close codes of websockets."""

_ALONE = ("n", "stop", "structured_outputs")
"""Sampling parameters that vLLM does not take for a request that is resumed, or not again."""


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
        state: the server's.
        socket: not accepted yet.
    """

    def __init__(self, state: ServerState, socket: WebSocket) -> None:
        self._state, self._socket = state, socket
        self._id = f"mmsession-{uuid4().hex}"
        self._talk: _Talk | None = None
        self._incoming: asyncio.Task[Any] | None = None

    @property
    def remaining(self) -> int:
        """Tokens that still fit, without a slide."""
        return self._state.engine.max_model_len - (self._talk.used if self._talk else 0)

    async def run(self) -> None:
        """Serve the session until it ends; whatever ends it, its request is gone from the engine
        then."""
        await self._socket.accept()
        state = self._state
        with state.place() as place:
            if state.engine.encodes_only:
                remedy = "Open it at the consumer of what is encoded here."
                away = InputError("session", "a server that generates", "one that encodes", remedy)
                end = await self._refuse(away, fatal=True, code=POLICY)
            elif place is None:
                most = f"at most {state.most_sessions} open at once"
                error = TooBusy("session", most, "one more", "Try again later.")
                end = await self._refuse(error, fatal=True, code=BUSY)
            else:
                end = await self._served(state.engine.copy_of(place))
        with suppress(_Left, TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            await self.send(ClosedMessage(reason=end.reason, remaining=self.remaining))
            async with asyncio.timeout(state.limits.idle_seconds):
                await self._socket.close(end.code)

    async def _served(self, copy: int | None) -> _End:
        """Answer messages until the session ends; why it does."""
        SESSIONS.inc()
        try:
            model = self._state.models[0]
            await self.send(ReadyMessage(session=self._id, model=model, remaining=self.remaining))
            while True:
                await self._turn(await self._received(), copy)
        except _Left:
            return _End("the client left", NORMAL)
        except _End as end:
            return end
        except Exception as error:
            return await self._refuse(error, fatal=True, code=ERROR)
        finally:
            SESSIONS.dec()
            if self._incoming is not None:
                self._incoming.cancel()
                await asyncio.gather(self._incoming, return_exceptions=True)
            if self._talk is not None:
                await self._talk.close()

    async def _turn(self, message: Any, copy: int | None) -> None:
        """Answer one message by a chunk."""
        begun = talk = self._talk
        try:
            if isinstance(message, CloseMessage):
                raise _End("the client closed it", NORMAL)
            if isinstance(message, StartMessage):
                if begun is not None:
                    expected = '"next" or "close" in a session that has started'
                    raise InputError("type", expected, '"start"')
                self._state.check_model(message.model)
                output = await self._state.output(message)
                talk = _Talk(self, self._state, message, output, f"{self._id}-%d", copy)
            if talk is None:
                raise InputError("type", '"start" as the first message', '"next"')
            sampling = talk.sampling(message)
            step = await talk.step(message, sampling.max_tokens)
        except Exception as error:
            if not errors.of_caller(error):
                raise
            await self._refuse(error)
            return
        self._talk = talk
        try:
            await talk.chunk(step, sampling)
        except Exception as error:
            if begun is not None or not errors.of_caller(error):
                raise
            # what vLLM refuses only now, as more logprobs than the server allows
            self._state.engine.forget(step.rendered)
            self._talk = None
            await talk.close()
            await self._refuse(error)

    # -- messages ----------------------------------------------------------------------------------

    async def send(self, message: Any) -> None:
        """Send a message; a client that does not read for too long is gone."""
        if self._socket.application_state is not WebSocketState.CONNECTED:
            raise _Left
        try:
            async with asyncio.timeout(self._state.limits.idle_seconds):
                await self._socket.send_text(msgspec.json.encode(message).decode())
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            raise _Left from None

    def _listen(self) -> asyncio.Task[Any]:
        """The client's next message, as it arrives."""
        if self._incoming is None:
            self._incoming = asyncio.ensure_future(self._socket.receive())
        return self._incoming

    async def _received(self) -> Any:
        """The client's next message. Malformed ones are refused, and the next one is awaited."""
        seconds = self._state.limits.idle_seconds
        while True:
            waited = {self._listen(), self._state.over}
            done, _ = await asyncio.wait(waited, timeout=seconds, return_when=FIRST_COMPLETED)
            if self._state.over in done:
                raise EngineDeadError
            if not done:
                raise _End(f"no message for {seconds:g} s", GOING_AWAY)
            try:
                return await self._message()
            except InputError as error:
                await self._refuse(error)

    async def _message(self) -> Any:
        """The message that has arrived."""
        raw, self._incoming = await self._listen(), None
        if raw["type"] == "websocket.disconnect":
            raise _Left
        if raw.get("text") is None:
            raise InputError("message", "JSON text", "bytes", "Send text frames.")

        def parse() -> Any:
            body = raw["text"].encode(errors="surrogatepass")
            weigh(body, "message", self._state.limits)
            return decoded(StartMessage | NextMessage | CloseMessage, body)

        return await asyncio.to_thread(parse)

    async def _refuse(
        self, error: BaseException, *, fatal: bool = False, code: int = ERROR
    ) -> _End:
        info = errors.info(error, self._state.plan, "session")
        try:
            await self.send(ErrorMessage(error=info, fatal=fatal, remaining=self.remaining))
        except _Left:
            if not fatal:
                raise
        return _End(info.message, code)

    async def watching(self, work: Any) -> Any:
        """The outcome of some work, during which the client may leave, close, or wrongly send
        more."""
        working = asyncio.ensure_future(work)
        try:
            while True:
                waited = {working, self._listen(), self._state.over}
                await asyncio.wait(waited, return_when=FIRST_COMPLETED)
                # also when tokens come so fast that they are always there first
                if self._listen().done():
                    await self._interrupted()
                if working.done():
                    return await working
                if self._state.over.done():
                    raise EngineDeadError
        finally:
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    async def _interrupted(self) -> None:
        try:
            message = await self._message()
            if isinstance(message, CloseMessage):
                raise _End("the client closed it", NORMAL)
            expected, got = "none before the chunk is complete", message.__struct_config__.tag
            remedy = "Wait for the chunk, or close the session."
            raise InputError("message", expected, f'"{got}"', remedy)
        except InputError as error:
            await self._refuse(error)


class _Talk:
    """What a session is once it has begun: its settings, what the engine has read, and the
    engine's request, which is another one after the window has slid.

    Attributes:
        used: tokens.
    """

    def __init__(
        self, session: Session, state: ServerState, start: Any, output: Any, name: str, copy: Any
    ) -> None:
        self._session, self._state, self._output = session, state, output
        self._name, self._copy = name, copy
        self._sampling = {n: raw.copy() for n, raw in chosen(start.sampling_params).items()}
        # without the items, whose bytes would stay in memory as long as the session; a window has
        # those that it may need again
        bare = dict.fromkeys(("items", "uuids", "messages", "sampling_params"), nothing())
        kwargs = start.mm_processor_kwargs.copy()
        self._start = msgspec.structs.replace(
            start, prompt=None, mm_processor_kwargs=kwargs, **bare
        )
        self._history = None if start.window is None else History(start.window)
        self.used = 0
        self._items: Counter[str] = Counter()
        self._last: list[int] = []
        self._index = 0
        self._feed: asyncio.Queue[Any] = asyncio.Queue()
        self._outputs: AsyncGenerator[Any, None] | None = None

    async def close(self) -> None:
        """Take the request from the engine."""
        if self._outputs is not None:
            with suppress(Exception):  # a dead engine has nothing to take it from
                await self._outputs.aclose()

    def sampling(self, message: Any) -> Any:
        """vLLM's sampling parameters of the chunk after a message."""
        sent = self._sampling
        if isinstance(message, NextMessage):
            sent = sent | named(message.sampling_params, ["max_tokens"], "sampling_params")
        if name := next((name for name in _ALONE if name in sent), None):
            expected = "none in a session, which vLLM resumes for each chunk"
            remedy = "Ask /v1/mm/generate, with all that came before."
            raise InputError(f"sampling_params.{name}", expected, "one", remedy)
        sampling = self._state.engine.sampling(
            sent, self._state.limits, output=self._output, stream=True
        )
        if sampling.max_tokens is None:
            raise InputError("sampling_params.max_tokens", "a value", "none")
        return sampling

    async def step(self, message: Any, max_tokens: int) -> _Step:
        """A message as the engine takes it, if it fits."""
        engine = self._state.engine
        prompt = await self._state.prompt(message, self._start, self._last)
        if prompt.get("prompt") or prompt.get("prompt_token_ids"):
            rendered = await self._session.watching(engine.render(prompt))
        elif self._last:
            rendered = tokens([])
        else:
            raise InputError("prompt", "at least one token in the first message", "none")
        try:
            if self._history is not None and not self._last:
                if self._state.plan.spec.decoder_prompt is not None:
                    raise InputError("window", "none for a model with an encoder", "one")
                self._history.check(rendered["prompt_token_ids"], places(rendered))
            cut = self._fitting(rendered, max_tokens)
            return await self._stepped(prompt, rendered, cut)
        except BaseException:
            engine.forget(rendered)
            raise

    async def _stepped(self, prompt: Mapping[str, Any], rendered: Any, cut: int | None) -> _Step:
        """A message with what has to stand before it."""
        if cut is None or self._history is None:
            return _Step(prompt, rendered, after(self._last, rendered), None)
        left = self._state.engine.render_left(self._history, cut, rendered)
        return _Step(prompt, rendered, await self._session.watching(left), cut)

    def _fitting(self, rendered: Mapping[str, Any], max_tokens: int) -> int | None:
        """Where the window has to begin for a message; None where nothing falls out.

        Raises:
            InputError: the message goes beyond the model's context or its limits on items.
        """
        new = Counter(place.name for place in places(rendered))
        history, length = self._history, len(rendered["prompt_token_ids"])

        def check(used: int, items: Counter[str]) -> None:
            within = "session" if history is None else "window"
            room = self._state.engine.max_model_len - used
            if history is not None:
                history.check_count(items + new)
            if length + max_tokens > room:
                expected = f"at most {room} more tokens in this {within}"
                got = f"{length} of the prompt and max_tokens={max_tokens}"
                remedy = "Ask for less, or start a new session."
                raise InputError("sampling_params.max_tokens", expected, got, remedy)
            for name, limit in self._state.engine.limits().items():
                if (count := (items + new)[name]) > limit:
                    expected = f"at most {limit} item(s) in one {within}"
                    remedy = "Start a new session."
                    raise InputError(f"items.{name}", expected, str(count), remedy)

        if history is not None:
            return history.fitting(new.total(), check)
        check(self.used, self._items)
        return None

    async def chunk(self, step: _Step, sampling: Any) -> None:
        """Generate one chunk and send it."""
        slid = None if step.cut is None else await self._slide(step.cut)
        for _ in range(TRIES):
            self._feed.put_nowait(part(step.sent, sampling))
            if await self._generated(step, sampling, slid):
                return
            rendered = await self._session.watching(self._state.engine.render(step.prompt))
            step = await self._stepped(step.prompt, rendered, step.cut)
        raise Lost

    async def _slide(self, cut: int) -> Slid:
        """Let go of what is before a cut: the engine's request ends, and another one begins."""
        assert self._history is not None
        if self._outputs is not None:
            await self._outputs.aclose()
        self._outputs, self._feed = None, asyncio.Queue()
        slid = self._history.slide(cut)
        self.used, self._items = self._history.at(cut)
        return slid

    async def _generated(self, step: _Step, sampling: Any, slid: Slid | None) -> bool:
        """Whether the engine had all items, and so made the chunk."""
        if self._outputs is None:
            name = self._name % self._index
            self._outputs = self._state.engine.chunks(sampling, name, self._parts(), self._copy)
        begins = slid is not None or not self._index
        length, start, used = len(step.rendered["prompt_token_ids"]), self._start, self.used
        ids: list[int] = []
        text, logprobs, cached = "", [], 0
        while True:
            output = await self._session.watching(anext(self._outputs, None))
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
            self.used = used + length + len(ids)
            told: Any = {"index": self._index, "remaining": self._session.remaining}
            if new.finish_reason is not None:
                break
            if start.stream and new.token_ids:
                message = TokensMessage(token_ids=new.token_ids, text=new.text, **told)
                await self._session.send(message)
        if new.finish_reason not in ("stop", "length"):
            raise _End(f"the server ended the chunk: {new.finish_reason}", GOING_AWAY)
        made = self._output and await produced(self._output, ids, start.output_format)
        self._items.update(place.name for place in places(step.rendered))
        self._last = ids[-1:]  # vLLM drops it, and wants it before the next part
        if self._history is not None:
            self._history.add(step.prompt, step.rendered, ids)
        read = len(step.sent["prompt_token_ids"]) if begins else length
        chunk = ChunkMessage(
            token_ids=ids,
            text=text or None,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            logprobs=logprobs or None,
            usage=usage(read, len(ids), cached),
            slid=slid,
            produced=made,
            **told,
        )
        self._index += 1
        await self._session.send(chunk)
        return True

    async def _parts(self) -> AsyncGenerator[Any, None]:
        """The prompt's parts, as vLLM takes them."""
        while True:
            yield await self._feed.get()

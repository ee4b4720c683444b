"""``WS /v1/mm/session``: a closed loop of items in, tokens out, on vLLM's resumable requests.

One message at a time: the client starts, receives a chunk of tokens, sends what comes next, and so
on. The server says with every message how many tokens still fit, and refuses what does not fit
before the engine sees it. `Session` is the connection, with a task that reads and one that answers;
`_Talk` is there once a start is taken.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketState

from ..errors import InputError
from . import errors, protocol
from .engine import TRIES, after, is_lost, part
from .errors import SESSIONS, Lost, TooBusy
from .protocol import NULL, decoded, named
from .state import ServerState, choice, produced, usage
from .window import Held, History, held, together
from .wire import weigh

NORMAL, GOING_AWAY, POLICY, ERROR, BUSY = 1000, 1001, 1008, 1011, 1013
"""Close codes of websockets."""

_ALONE = ("n", "stop", "structured_outputs")
"""Sampling parameters that vLLM does not take for a request that is resumed, or not again."""


class _End(Exception):
    """The session ends: why, and the close code."""

    def __init__(self, reason: str, code: int = NORMAL) -> None:
        super().__init__(reason)
        self.reason, self.code = reason, code


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
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._is_busy = False

    @property
    def _remaining(self) -> int:
        """Tokens that still fit, without a slide."""
        return self._talk.room if self._talk else self._state.engine.max_model_len

    async def run(self) -> None:
        """Serve the session until it ends; whatever ends it, its request is gone from the engine
        then."""
        await self._socket.accept()
        try:
            if self._state.engine.encodes_only:
                remedy = "Open it at the consumer of what is encoded here."
                away = InputError("session", "a server that generates", "one that encodes", remedy)
                end = await self._refuse(away, POLICY)
            else:
                with self._state.place():
                    end = await self._served()
        except TooBusy as error:
            end = await self._refuse(error, BUSY)
        with suppress(_End, TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            await self._send(protocol.ClosedMessage(reason=end.reason, remaining=self._remaining))
            async with asyncio.timeout(self._state.limits.idle_seconds):
                await self._socket.close(end.code)

    async def _served(self) -> _End:
        """Read and answer messages until the session ends; why it does."""
        SESSIONS.inc()
        tasks = [asyncio.ensure_future(work) for work in (self._read(), self._answer())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=FIRST_COMPLETED)
            await done.pop()
            raise AssertionError("both tasks end by an exception")
        except _End as end:
            return end
        except Exception as error:
            return await self._refuse(error, ERROR)
        finally:
            SESSIONS.dec()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._talk is not None:
                await self._talk.close()

    async def _send(self, message: Any) -> None:
        """Send a message; a client that does not read for too long is gone."""
        try:
            if self._socket.application_state is not WebSocketState.CONNECTED:
                raise WebSocketDisconnect
            async with asyncio.timeout(self._state.limits.idle_seconds):
                await self._socket.send_text(msgspec.json.encode(message).decode())
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            raise _End("the client left") from None

    async def _refuse(self, error: BaseException, code: int | None = None) -> _End:
        """Tell an error; with a close code, it is the end of the session."""
        info = errors.info(error, self._state.plan, "session")
        fatal = code is not None
        try:
            await self._send(
                protocol.ErrorMessage(error=info, fatal=fatal, remaining=self._remaining)
            )
        except _End:
            if not fatal:
                raise
        return _End(info.message, code or NORMAL)

    async def _read(self) -> None:
        """Hand messages over, one at a time. Malformed ones are refused, and those that come before
        a chunk is complete."""
        while True:
            raw = await self._socket.receive()
            if raw["type"] == "websocket.disconnect":
                raise _End("the client left")
            try:
                message = await asyncio.to_thread(self._parsed, raw.get("text"))
                if isinstance(message, protocol.CloseMessage):
                    raise _End("the client closed it")
                if self._is_busy:
                    remedy = "Wait for the chunk, or close the session."
                    expected = "none before the chunk is complete"
                    raise InputError("message", expected, _tag(message), remedy)
            except InputError as error:
                await self._refuse(error)
            else:
                self._is_busy = True
                self._messages.put_nowait(message)

    def _parsed(self, text: str | None) -> Any:
        if text is None:
            raise InputError("message", "JSON text", "bytes", "Send text frames.")
        body = text.encode(errors="surrogatepass")
        weigh(body, "message", self._state.limits)
        return decoded(protocol.StartMessage | protocol.NextMessage | protocol.CloseMessage, body)

    async def _answer(self) -> None:
        """Answer messages by chunks, or by refusals after which the session is as it was."""
        model, seconds = self._state.models[0], self._state.limits.idle_seconds
        await self._send(
            protocol.ReadyMessage(session=self._id, model=model, remaining=self._remaining)
        )
        while True:
            try:
                message = await asyncio.wait_for(self._messages.get(), seconds)
            except TimeoutError:
                raise _End(f"no message for {seconds:g} s", GOING_AWAY) from None
            await self._turn(message)

    async def _turn(self, message: Any) -> None:
        """Answer one message."""
        begun, step = self._talk, None
        try:
            if isinstance(message, protocol.StartMessage) == (begun is not None):
                first = '"start" as the first message'
                expected = '"next" or "close" in a session that has started' if begun else first
                raise InputError("type", expected, _tag(message))
            talk = begun or _Talk(self._state, message, f"{self._id}-%d")
            step = await talk.step(message)
            self._talk = talk
            async for told in talk.chunk(step):
                self._is_busy = isinstance(told, protocol.TokensMessage)
                await self._send(told)
        except Exception as error:
            if not errors.of_caller(error) or (begun and step):
                raise
            if step is not None:  # what vLLM refuses only now, as more logprobs than it allows
                self._state.engine.forget(step.rendered)
                self._talk = None
                await talk.close()
            self._is_busy = False
            await self._refuse(error)


def _tag(message: Any) -> str:
    return f'"{message.__struct_config__.tag}"'


class _Step(NamedTuple):
    """A message on its way to the engine.

    Attributes:
        prompt: vLLM's, as `Engine.render` takes it.
        rendered: that, rendered.
        ids: the tokens of the message.
        items: its items.
        sampling: vLLM's parameters.
        left: the history that stands before it; after a slide, another one.
    """

    prompt: Mapping[str, Any]
    rendered: Mapping[str, Any]
    ids: list[int]
    items: list[Held]
    sampling: Any
    left: History


class _Talk:
    """What a session is once it has begun: its settings, what the engine has read, and the
    engine's request, which is another one after the window has slid.

    Raises:
        InputError: the settings of the start are refused.
    """

    def __init__(self, state: ServerState, start: Any, name: str) -> None:
        self._state, self._engine, self._plan = state, state.engine, state.plan
        self._name = name
        state.check_model(start.model)
        self._output = state.output(start)
        self._sampling = self._engine.chosen(start.sampling_params, state.limits)
        for alone in _ALONE:
            if alone in self._sampling:
                expected = "none in a session, which vLLM resumes for each chunk"
                remedy = "Ask /v1/mm/generate, with all that came before."
                raise InputError(f"sampling_params.{alone}", expected, "one", remedy)
        if start.window and self._plan.spec.decoder_prompt is not None:
            raise InputError("window", "none for a model with an encoder", "one")
        # without the items, whose bytes would stay in memory as long as the session
        bare = dict.fromkeys(("items", "uuids", "sampling_params"), NULL)
        kwargs = start.mm_processor_kwargs.copy()
        self._start = msgspec.structs.replace(
            start, prompt=None, mm_processor_kwargs=kwargs, **bare
        )
        self._history = History(start.window and start.window.keep)
        self._index = 0
        self._feed: asyncio.Queue[Any] = asyncio.Queue()
        self._outputs: AsyncGenerator[Any, None] | None = None

    @property
    def room(self) -> int:
        """Tokens that still fit, without a slide."""
        return self._engine.max_model_len - len(self._history.ids)

    async def close(self) -> None:
        """Take the request from the engine."""
        outputs, self._outputs, self._feed = self._outputs, None, asyncio.Queue()
        if outputs is not None:
            with suppress(Exception):  # a dead engine has nothing to take it from
                await outputs.aclose()

    # -- a message ---------------------------------------------------------------------------------

    async def step(self, message: Any) -> _Step:
        """A message as the engine takes it, if it fits; nothing changes by it.

        Raises:
            InputError: the message is refused.
        """
        sampling, before = self._sampled(message), self._history
        prompt = await self._state.prompt(message, self._start, special=not before.ids)
        if prompt.get("prompt") or prompt.get("prompt_token_ids"):
            rendered = await self._engine.render(prompt)
        elif before.ids:
            rendered = {"type": "token", "prompt_token_ids": []}
        else:
            raise InputError("prompt", "at least one token in the first message", "none")
        try:
            ids, items = list(rendered["prompt_token_ids"]), self._items(prompt, rendered)
            check = partial(self._check, len(ids), items, sampling.max_tokens)
            left = before.fitting(len(items), check)
        except BaseException:
            self._engine.forget(rendered)
            raise
        if left is not before:
            # the engine may have let go of the items that are left: all come once more
            self._engine.forget(rendered)
            prompt = self._whole(left, ids, items, prompt)
            rendered = await self._engine.render(prompt)
            if list(rendered["prompt_token_ids"]) != [*left.ids, *ids]:
                self._engine.forget(rendered)
                expected = "a spec that leaves the placeholders of an expanded prompt as they are"
                raise InputError("window", expected, "another")
        return _Step(prompt, rendered, ids, items, sampling, left)

    def _sampled(self, message: Any) -> Any:
        """vLLM's sampling parameters of the chunk after a message."""
        options = self._sampling
        if isinstance(message, protocol.NextMessage):
            names, where = ["max_tokens"], "sampling_params"
            options = options | named(message.sampling_params, names, where, int | None)
        sampling = self._engine.sampling(options, output=self._output, stream=True)
        if sampling.max_tokens is None:
            raise InputError("sampling_params.max_tokens", "a value", "none")
        return sampling

    def _items(self, prompt: Mapping[str, Any], rendered: Mapping[str, Any]) -> list[Held]:
        """The items of a message; with a window, what they came as."""
        if self._start.window is None:
            return held(rendered)
        data, size = prompt.get("multi_modal_data", {}), self._plan.hidden_size
        values = {n: self._plan.modalities[n].intake.take(data[n], size)[0] for n in data}
        return held(rendered, values, prompt.get("multi_modal_uuids", {}))

    def _check(
        self, length: int, new: list[Held], max_tokens: int, used: int, items: Counter[str]
    ) -> None:
        """Refuse a message that goes beyond the model's context or its limits on items."""
        within = "session" if self._start.window is None else "window"
        room, all_items = self._engine.max_model_len - used, items + Counter(i.name for i in new)
        if length + max_tokens > room:
            expected = f"at most {room} more tokens in this {within}"
            got = f"{length} of the prompt and max_tokens={max_tokens}"
            remedy = "Ask for less, or start a new session."
            raise InputError("sampling_params.max_tokens", expected, got, remedy)
        for name, limit in self._engine.limits().items():
            if all_items[name] > limit:
                expected = f"at most {limit} item(s) in one {within}"
                remedy = "Start a new session."
                raise InputError(f"items.{name}", expected, str(all_items[name]), remedy)

    def _whole(
        self, left: History, ids: list[int], new: list[Held], prompt: Mapping[str, Any]
    ) -> dict[str, Any]:
        """vLLM's prompt of what is left of a session, and of a message after it."""
        items: dict[str, list[Held]] = {}
        for item in (*left.items, *new):
            items.setdefault(item.name, []).append(item)
        return {
            **prompt,
            "prompt_token_ids": [*left.ids, *ids],
            "multi_modal_data": {name: together(of) for name, of in items.items()},
            "multi_modal_uuids": {name: [item.uuid for item in of] for name, of in items.items()},
        }

    # -- its chunk ---------------------------------------------------------------------------------

    async def chunk(
        self, step: _Step
    ) -> AsyncIterator[protocol.TokensMessage | protocol.ChunkMessage]:
        """Generate the chunk after a message: what to tell of it, at last the whole."""
        slid = self._history.slid(step.left)
        if slid is not None:
            await self.close()
        self._history, begins = step.left, self._outputs is None
        ids: list[int] = []
        text, logprobs, cached, room = "", [], 0, self.room - len(step.ids)
        async for output in self._answers(step):
            new = choice(output.outputs[0])
            ids += new.token_ids
            text += new.text or ""
            logprobs += new.logprobs or []
            if begins:  # vLLM goes on telling that of a request's first part
                cached = max(cached, output.num_cached_tokens or 0)
            if new.finish_reason is None and self._start.stream and new.token_ids:
                left = room - len(ids)
                yield protocol.TokensMessage(
                    index=self._index, token_ids=new.token_ids, text=new.text, remaining=left
                )
        if new.finish_reason not in ("stop", "length"):
            raise _End(f"the server ended the chunk: {new.finish_reason}", GOING_AWAY)
        made = self._output and await produced(self._output, ids)
        read = len(step.rendered["prompt_token_ids"]) if begins else len(step.ids)
        self._history.add([*step.ids, *ids], step.items)
        self._index += 1
        yield protocol.ChunkMessage(
            index=self._index - 1,
            token_ids=ids,
            text=text or None,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            logprobs=logprobs or None,
            usage=usage(read, len(ids), cached),
            slid=slid,
            produced=made,
            remaining=self.room,
        )

    async def _answers(self, step: _Step) -> AsyncIterator[Any]:
        """vLLM's outputs of one chunk; the message is sent again if the engine lacks an item."""
        rendered, begun = step.rendered, False
        # vLLM drops the last token of a request that goes on, and wants it before the next part
        last = self._history.ids[-1:] if self._outputs is not None else []
        for _ in range(TRIES):
            self._feed.put_nowait(part(after(last, rendered), step.sampling))
            if self._outputs is None:
                name = self._name % self._index
                parts = self._parts(self._feed)
                self._outputs = self._engine.outputs(parts, step.sampling, name)
            async for output in self._outputs:
                if not begun and is_lost(output):
                    break
                begun = begun or bool(output.outputs[0].token_ids)
                yield output
                if output.outputs[0].finish_reason is not None:
                    return
            else:
                raise _End("the server is closing it", GOING_AWAY)
            rendered = await self._engine.render(step.prompt)
        raise Lost

    async def _parts(self, feed: asyncio.Queue[Any]) -> AsyncGenerator[Any, None]:
        """The prompt's parts, as vLLM takes them."""
        while True:
            yield await feed.get()

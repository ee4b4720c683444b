"""``WS /v1/mm/session``: a closed loop of items in, tokens out.

One message at a time: the client starts, receives a chunk of tokens, sends what comes next, and so
on. The server says with every message how many tokens still fit, and refuses what does not fit
before the engine sees it. `Session` is the connection, with a task that reads and one that answers;
`_Talk` is there once a start is taken.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketState

from ..errors import InputError
from . import errors, protocol
from .errors import SESSIONS, TooBusy
from .protocol import NULL, decoded, named
from .state import ServerState, choice, produced, usage
from .window import History, held, together
from .wire import weigh

NORMAL, GOING_AWAY, POLICY, ERROR, BUSY = 1000, 1001, 1008, 1011, 1013
"""Close codes of websockets."""


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
        most = self._state.limits.sessions
        if self._state.sessions < most:
            end = await self._served()
        else:
            expected = f"at most {most} open at once"
            error = TooBusy("session", expected, "one more", "Try again later.")
            end = await self._refuse(error, BUSY)
        with suppress(_End, TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            await self._send(protocol.ClosedMessage(reason=end.reason, remaining=self._remaining))
            async with asyncio.timeout(self._state.limits.idle_seconds):
                await self._socket.close(end.code)

    async def _served(self) -> _End:
        """Read and answer messages until the session ends; why it does."""
        SESSIONS.inc()
        self._state.sessions += 1
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
            self._state.sessions -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
            text = raw.pop("text", None)
            body = None if text is None else text.encode(errors="surrogatepass")
            del text  # which may be large
            try:
                message = await asyncio.to_thread(self._parsed, body)
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

    def _parsed(self, body: bytes | None) -> Any:
        if body is None:
            raise InputError("message", "JSON text", "bytes", "Send text frames.")
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
        begun = self._talk
        try:
            if isinstance(message, protocol.StartMessage) == (begun is not None):
                first = '"start" as the first message'
                expected = '"next" or "close" in a session that has started' if begun else first
                raise InputError("type", expected, _tag(message))
            talk = begun or _Talk(self._state, message, self._id)
            async with aclosing(talk.chunk(await talk.step(message))) as chunk:
                async for told in chunk:
                    self._is_busy = isinstance(told, protocol.TokensMessage)
                    self._talk = talk
                    await self._send(told)
        except Exception as error:
            if not errors.of_caller(error):
                raise
            self._is_busy, self._talk = False, begun
            await self._refuse(error)


def _tag(message: Any) -> str:
    return f'"{message.__struct_config__.tag}"'


class _Step(NamedTuple):
    """A message on its way to the engine.

    Attributes:
        prompt: vLLM's, of what is left of the session and the message.
        items: what all items in it came as, by modality, and their names for the cache.
        sampling: vLLM's parameters.
        left: the history that stands before the message; after a slide, another one.
    """

    prompt: Mapping[str, Any]
    items: tuple[Mapping[str, Any], Mapping[str, Any]]
    sampling: Any
    left: History


class _Talk:
    """What a session is once it has begun: its settings, and all that the model has read and
    written. Each chunk is a request of its own, whose prompt is that; the engine has it in its
    prefix cache.

    Raises:
        InputError: the settings of the start are refused.
    """

    def __init__(self, state: ServerState, start: Any, name: str) -> None:
        self._state, self._engine, self._plan = state, state.engine, state.plan
        self._name, self._copy = name, state.next_copy()
        state.check_model(start.model)
        self._output = state.output(start)
        self._sampling = self._engine.chosen(start.sampling_params, state.limits)
        if self._sampling.get("n", 1) != 1:
            raise InputError("sampling_params.n", "1 in a session", str(self._sampling["n"]))
        if self._plan.spec.decoder_prompt is not None:
            raise InputError("session", "a model without an encoder", "one with it")
        # without the items, whose bytes would stay in memory as long as the session
        bare = dict.fromkeys(("items", "uuids", "sampling_params"), NULL)
        kwargs = start.mm_processor_kwargs.copy()
        self._start = msgspec.structs.replace(
            start, prompt=None, mm_processor_kwargs=kwargs, **bare
        )
        self._history = History(start.window and start.window.keep)
        self._index = 0

    @property
    def room(self) -> int:
        """Tokens that still fit, without a slide."""
        return self._engine.max_model_len - len(self._history.ids)

    async def step(self, message: Any) -> _Step:
        """A message as the engine takes it, if it fits; nothing changes by it.

        Raises:
            InputError: the message is refused.
        """
        sampling, before = self._sampled(message), self._history
        prompt = await self._state.prompt(message, self._start, special=not before.ids)
        ids = await self._engine.ids(prompt)
        if not ids and not before.ids:
            raise InputError("prompt", "at least one token in the first message", "none")
        length = len(ids)
        if self._start.window and ids:  # how long it is with all its placeholders
            rendered = await self._engine.render(prompt)
            self._engine.forget(rendered)
            length = len(rendered["prompt_token_ids"])
        new = await self._engine.beside(self._taken, prompt.pop("multi_modal_data", {}))
        counts = Counter({name: len(values) for name, values in new.items()})
        check = partial(self._check, length, counts, sampling.max_tokens)
        left = before.fitting(counts.total(), check)
        values, uuids = left.came_as(new, prompt.pop("multi_modal_uuids", {}))
        prompt.pop("prompt", None)
        whole = {
            **prompt,
            "prompt_token_ids": [*left.ids, *ids],
            "multi_modal_data": {name: together(name, of) for name, of in values.items()},
            "multi_modal_uuids": uuids,
        }
        return _Step(whole, (values, uuids), sampling, left)

    def _taken(self, data: Mapping[str, Any]) -> dict[str, list[Any]]:
        """What the items of a message came as."""
        of, size = self._plan.modalities, self._plan.hidden_size
        return {name: [*of[name].intake.take(sent, size).values] for name, sent in data.items()}

    def _sampled(self, message: Any) -> Any:
        """vLLM's sampling parameters of the chunk after a message."""
        options = self._sampling
        if (seed := options.get("seed")) is not None:
            options = options | {"seed": seed ^ self._index}  # no chunk is drawn as another one
        if isinstance(message, protocol.NextMessage):
            names, where = ["max_tokens"], "sampling_params"
            options = options | named(message.sampling_params, names, where, int | None)
        sampling = self._engine.sampling(options, output=self._output, stream=True)
        if sampling.max_tokens is None:
            raise InputError("sampling_params.max_tokens", "a value", "none")
        return sampling

    def _check(
        self, length: int, new: Counter[str], max_tokens: int, used: int, items: Counter[str]
    ) -> None:
        """Refuse a message that goes beyond the model's context or its limits on items."""
        within = "session" if self._start.window is None else "window"
        room = self._engine.max_model_len - used
        if length + max_tokens > room:
            expected = f"at most {room} more tokens in this {within}"
            got = f"{length} of the prompt and max_tokens={max_tokens}"
            remedy = "Ask for less, or start a new session."
            raise InputError("sampling_params.max_tokens", expected, got, remedy)
        for name, limit in self._engine.limits().items():
            if (count := items[name] + new[name]) > limit:
                expected = f"at most {limit} item(s) in one {within}"
                raise InputError(f"items.{name}", expected, str(count), "Start a new session.")

    async def chunk(
        self, step: _Step
    ) -> AsyncGenerator[protocol.TokensMessage | protocol.ChunkMessage, None]:
        """Generate the chunk after a message: what to tell of it, at last the whole.

        Raises:
            InputError: vLLM refuses the message; the session is as it was before.
        """
        ids: list[int] = []
        text, logprobs, cached = "", [], 0
        name = f"{self._name}-{self._index}"
        outputs = self._engine.generate(step.prompt, step.sampling, name, self._copy, fits=True)
        async with aclosing(outputs):
            async for rendered, output in outputs:
                read = list(rendered["prompt_token_ids"])
                if not ids and read[: len(step.left.ids)] != list(step.left.ids):
                    expected = "a spec that leaves placeholders that are whole as they are"
                    raise InputError("session", expected, "another one")
                new = choice(output.outputs[0])
                ids += new.token_ids
                text += new.text or ""
                logprobs += new.logprobs or []
                cached = max(cached, output.num_cached_tokens or 0)
                left = self._engine.max_model_len - len(read) - len(ids)
                told: Any = {"index": self._index, "remaining": left}
                if new.finish_reason is None and self._start.stream and new.token_ids:
                    yield protocol.TokensMessage(token_ids=new.token_ids, text=new.text, **told)
        if new.finish_reason not in ("stop", "length"):
            raise _End(f"the server ended the chunk: {new.finish_reason}", GOING_AWAY)
        made = self._output and await produced(self._output, ids)
        slid = self._history.slid(step.left)
        self._history = step.left._replace(ids=[*read, *ids], items=held(rendered, *step.items))
        self._index += 1
        yield protocol.ChunkMessage(
            token_ids=ids,
            text=text or None,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            logprobs=logprobs or None,
            usage=usage(len(read), len(ids), cached),
            slid=slid,
            produced=made,
            **told,
        )

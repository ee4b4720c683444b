"""``WS /v1/mm/session``: a closed loop of items in, tokens out.

One message at a time: the client starts, receives a chunk of tokens, sends what comes next, and so
on. The server says with every message how many tokens still fit, and refuses what does not fit
before the engine sees it. `Session` is the connection: it waits for a message and, if one was
taken, for the chunk after it. `_Conversation` is there once a start is answered.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED, ensure_future
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import WebSocket, WebSocketDisconnect
from msgspec import structs

from ..errors import InputError
from . import errors, protocol
from .decoding import decode_fields, run_in_thread_if_large
from .errors import TooBusy
from .history import History, SessionItem, group_by_modality, locate_items, merge_values
from .protocol import NULL, ClientMessage
from .state import Answer, ServerState
from .wire import parse_message

NORMAL, GOING_AWAY, ERROR, RESTART, BUSY = 1000, 1001, 1011, 1012, 1013
"""Close codes of websockets."""

_STOPS = "the server stops: open a new session elsewhere"


class _End(Exception):
    """The session ends. Its arguments are why, and the close code."""


class Session:
    """One session.

    Args:
        state: the server's.
        socket: not accepted yet.
    """

    def __init__(self, state: ServerState, socket: WebSocket) -> None:
        self._state, self._socket = state, socket
        self._id = f"mmsession-{uuid4().hex}"
        self._talk: _Conversation | None = None
        # tokens that still fit, without a slide
        self._remaining = state.engine.max_model_len

    async def run(self) -> None:
        """Serve the session until it ends; whatever ends it, its request is gone from the engine
        then."""
        await self._socket.accept()
        with suppress(_End, TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            try:
                async with self._state.open_session():
                    await self._served()
            except _End as end:
                reason, code = end.args
            except Exception as error:
                code = _code(error)
                reason = await self._refuse(error, fatal=True)
            await self._send(protocol.ClosedMessage(reason=reason, remaining=self._remaining))
            async with asyncio.timeout(self._state.limits.idle_seconds):
                await self._socket.close(code)

    async def _served(self) -> None:
        """Read messages and answer them by chunks, or by refusals after which the session is as it
        was. Ends by an exception; when the server stops, after the chunk that is under way."""
        model, seconds = self._state.models[0], self._state.limits.idle_seconds
        ready = protocol.ReadyMessage(session=self._id, model=model, remaining=self._remaining)
        await self._send(ready)
        reading: asyncio.Future[Any] = ensure_future(self._message())
        stopping: asyncio.Future[Any] = ensure_future(self._state.stopping.wait())
        turn: asyncio.Future[Any] | None = None
        try:
            while True:
                waiting, patience = [reading, turn or stopping], None if turn else seconds
                done, _ = await asyncio.wait(waiting, timeout=patience, return_when=FIRST_COMPLETED)
                if stopping in done:
                    raise _End(_STOPS, RESTART)
                if not done:
                    raise _End(f"no message for {seconds:g} s", GOING_AWAY)
                try:
                    if turn in done:
                        answered, turn = turn, None
                        self._talk, chunk = answered.result()
                        self._remaining = chunk.remaining
                        await self._send(chunk)
                    else:
                        came, reading = reading, ensure_future(self._message())
                        asked = came.result()
                        if turn:
                            expected = "none before the chunk is complete"
                            remedy = "Wait for the chunk, or close the session."
                            raise InputError("message", expected, _tag(asked), remedy)
                        turn = ensure_future(self._turn(asked))
                except Exception as error:
                    if not errors.is_callers_mistake(error):
                        raise
                    await self._refuse(error, fatal=False)
        finally:
            stopping.cancel()
            tasks = [task for task in (reading, turn) if task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _refuse(self, error: Exception, *, fatal: bool) -> str:
        """Tell an error; returns its sentence."""
        info = errors.make_info(error, self._state.plan, "session")
        told = protocol.ErrorMessage(error=info, fatal=fatal, remaining=self._remaining)
        await self._send(told)
        return info.message

    async def _send(self, message: Any) -> None:
        """Send a message; a client that does not read for too long is gone."""
        try:
            async with asyncio.timeout(self._state.limits.idle_seconds):
                await self._socket.send_text(msgspec.json.encode(message).decode())
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            raise _End("the client left", NORMAL) from None

    async def _message(self) -> Any:
        """The next message that is not the last one.

        Raises:
            InputError: a malformed one.
        """
        raw = await self._socket.receive()
        if raw["type"] == "websocket.disconnect":
            raise _End("the client left", NORMAL)
        if (body := raw.get("bytes")) is None:
            body = raw.pop("text").encode(errors="surrogatepass")
        message = await run_in_thread_if_large(
            len(body), parse_message, ClientMessage, body, "message", self._state.limits
        )
        if isinstance(message, protocol.CloseMessage):
            raise _End("the client closed it", NORMAL)
        return message

    async def _turn(self, message: Any) -> tuple[_Conversation, protocol.ChunkMessage]:
        """What the session is after a message, and its chunk."""
        talk = self._talk
        if isinstance(message, protocol.StartMessage) == (talk is not None):
            expected = '"next" or "close" after the start' if talk else '"start" at first'
            raise InputError("type", expected, _tag(message))
        talk = talk or _Conversation(self._state, message, self._id)
        return talk, await talk.chunk(message, self._send)


def _code(error: Exception) -> int:
    """The close code of a session that an error ends."""
    if isinstance(error, TooBusy):
        return BUSY
    return RESTART if errors.is_end_of_server(error) else ERROR


def _tag(message: Any) -> str:
    return f'"{message.__struct_config__.tag}"'


class _Conversation:
    """What a session is once it has begun: its settings, and all that the model has read and
    written. Each chunk is a request of its own, whose prompt is that; the engine has it in its
    prefix cache.

    Raises:
        InputError: the settings of the start are refused.
    """

    def __init__(self, state: ServerState, start: Any, name: str) -> None:
        self._state, self._engine, self._plan = state, state.engine, state.plan
        self._name, self._copy = name, state.engine.next_data_parallel_rank()
        state.resolve_model(start.model)
        self._output = state.find_output(start)
        self._sampling = self._engine.parse_sampling_params(start.sampling_params, state.limits)
        if self._sampling.get("n", 1) != 1:
            raise InputError("sampling_params.n", "1 in a session", str(self._sampling["n"]))
        if self._plan.spec.decoder_prompt is not None:
            raise InputError("session", "a model without an encoder", "one with it")
        # without the items, whose bytes would stay in memory as long as the session
        bare = dict.fromkeys(("items", "uuids", "sampling_params"), NULL)
        self._start = structs.replace(start, prompt=None, **bare)
        self._history = History(start.window and start.window.keep)
        self._index = 0

    async def chunk(
        self, message: Any, tell: Callable[[Any], Awaitable[None]]
    ) -> protocol.ChunkMessage:
        """The chunk after a message.

        Args:
            message: the start or a next one.
            tell: is given the tokens as they come, if the session streams.

        Raises:
            InputError: the message is refused; nothing has changed.
        """
        sampling = self._sampled(message)
        prompt, left, new_items = await self._continued(message, sampling.max_tokens)
        answer, text, logprobs = Answer(self._output), "", []
        name = f"{self._name}-{self._index}"
        outputs = self._engine.generate(prompt, sampling, name, self._copy, fits=True)
        async with aclosing(outputs):
            async for rendered, output in outputs:
                read = list(rendered["prompt_token_ids"])
                if not answer.ids and read[: len(left.ids)] != list(left.ids):
                    expected = "a spec that leaves placeholders that are whole as they are"
                    raise InputError("session", expected, "another one")
                new = await answer.make_choice(output.outputs[0])
                text += new.text or ""
                logprobs += new.logprobs or []
                ids = [*read, *answer.ids[0]]
                room = self._engine.max_model_len - len(ids)
                told = {**structs.asdict(new), "index": self._index, "remaining": room}
                if new.finish_reason is None and new.token_ids:
                    await tell(protocol.TokensMessage(**told | {"logprobs": None}))
        told |= {"token_ids": answer.ids[0], "text": text or None, "logprobs": logprobs or None}
        slid = self._history.count_dropped(left)
        self._history = left._replace(
            ids=ids, items=locate_items([*left.items, *new_items], rendered)
        )
        self._index += 1
        return protocol.ChunkMessage(**told, usage=answer.make_usage(output), slid=slid)

    def _sampled(self, message: Any) -> Any:
        """vLLM's sampling parameters of the chunk after a message."""
        options = self._sampling
        if (seed := options.get("seed")) is not None:
            options = options | {"seed": seed ^ self._index}  # no chunk is drawn as another one
        if isinstance(message, protocol.NextMessage):
            kinds, where = {"max_tokens": int | None}, "sampling_params"
            options = options | decode_fields(message.sampling_params, kinds, where)
        sampling = self._engine.make_sampling_params(
            options, output=self._output, stream=self._start.stream
        )
        if sampling.max_tokens is None:
            raise InputError("sampling_params.max_tokens", "a value", "none")
        return sampling

    async def _continued(
        self, message: Any, max_tokens: int
    ) -> tuple[dict[str, Any], History, list[SessionItem]]:
        """vLLM's prompt of the history and a message, if it fits.

        Returns:
            The prompt, the part of the history in it, and the items of the message.

        Raises:
            InputError: the message is refused.
        """
        before = self._history
        prompt = await self._state.make_prompt(message, self._start)
        written = prompt.pop("prompt") if "prompt" in prompt else prompt["prompt_token_ids"]
        ids = await self._engine.tokenize(written, add_special_tokens=not before.ids)
        if not ids and not before.ids:
            raise InputError("prompt", "at least one token in the first message", "none")
        length = len(ids)
        if self._start.window and ids:  # how long it is with all its placeholders
            rendered = await self._engine.render({**prompt, "prompt_token_ids": ids})
            length = len(rendered["prompt_token_ids"])
        data, uuids = prompt.pop("multi_modal_data", {}), prompt.pop("multi_modal_uuids", {})
        new = await self._engine.run_on_item_thread(self._taken, data, uuids)
        left = before.drop_until_fits(len(new), partial(self._check, length, new, max_tokens))
        whole = group_by_modality([*left.items, *new])
        prompt |= {
            "prompt_token_ids": [*left.ids, *ids],
            "multi_modal_data": {name: merge_values(own) for name, own in whole.items()},
            "multi_modal_uuids": {name: [one.uuid for one in own] for name, own in whole.items()},
        }
        return prompt, left, new

    def _taken(self, data: Mapping[str, Any], uuids: Mapping[str, Any]) -> list[SessionItem]:
        """The items of a message, as they came."""
        items: list[SessionItem] = []
        for name, sent in data.items():
            taken = self._plan.modalities[name].parser.parse(sent, self._plan.hidden_size)
            names = uuids.get(name) or [None] * taken.total
            if len(names) != taken.total:
                raise InputError(f"uuids.{name}", f"{taken.total} names", str(len(names)))
            items += map(partial(SessionItem, name), taken.values, names)
        return items

    def _check(self, length: int, new: list[SessionItem], max_tokens: int, left: History) -> None:
        """Refuse a message that goes beyond the model's context or its limits on items."""
        room = self._engine.max_model_len - len(left.ids)
        if length + max_tokens > room:
            expected = f"at most {room} more tokens"
            got = f"{length} of the prompt and max_tokens={max_tokens}"
            remedy = "Ask for less, or start a new session."
            raise InputError("sampling_params.max_tokens", expected, got, remedy)
        for name, count in Counter(item.name for item in (*left.items, *new)).items():
            parser = self._plan.modalities[name].parser
            parser.check_count(count, self._engine.most_items.get(name))

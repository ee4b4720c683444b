"""``WS /v1/mm/session``: a closed loop of items in, tokens out.

One message at a time: the client starts, receives a chunk of tokens, sends what comes next, and so
on. The server says with every message how many tokens still fit, and refuses what does not fit
before the engine sees it.

`Session` is the connection: it waits for a message and, if one was accepted, for the chunk after
it. `Conversation` begins with the start message, and makes the chunks.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from fastapi import WebSocket, WebSocketDisconnect
from msgspec import structs

from ..errors import InputError
from ..wire.decoding import SAMPLING_FIELD, decode_fields
from ..wire.limits import parse_message
from . import errors, protocol
from .errors import TooBusy
from .history import History, SessionItem, group_by_modality, locate_items, merge_values
from .protocol import NULL, ClientMessage
from .state import Answer, ServerState
from .threads import run_in_thread_if_large

NORMAL, GOING_AWAY, ERROR, RESTART, BUSY = 1000, 1001, 1011, 1012, 1013
"""Close codes of websockets."""

Send = Callable[[Any], Awaitable[None]]
"""Sends a message of `protocol.ServerMessage`."""


class SessionEnd(Exception):
    """The session ends.

    Attributes:
        reason: why, for the client.
        code: the close code.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


class Turn(NamedTuple):
    """What an accepted message led to.

    Attributes:
        conversation: the new conversation after a start, or the session's.
        chunk: the answer.
    """

    conversation: Conversation
    chunk: protocol.ChunkMessage


# -- the connection --------------------------------------------------------------------------------


class Session:
    """One session.

    It is in one of two states. While it answers, `_turn_task` is there, which makes a chunk.

    ========= ================================= ===================================================
    state     what may happen                   what follows
    ========= ================================= ===================================================
    waiting   a message comes (`_take_message`) answering; a malformed message is refused
    waiting   the server stops, or silence      the end
    answering the chunk is made                 waiting, also where the message was refused
              (`_finish_turn`)
    answering a message comes (`_take_message`) answering; the message is refused
    any       the client closes it, or leaves   the end
    ========= ================================= ===================================================

    The end is the exception `SessionEnd`, wherever it is found out.

    Args:
        state: the server's.
        socket: not accepted yet.
    """

    def __init__(self, state: ServerState, socket: WebSocket) -> None:
        self._state = state
        self._socket = socket
        self._id = f"mmsession-{uuid4().hex}"
        self._conversation: Conversation | None = None
        # The tasks that `_serve` starts and cancels. In both states, one receives the next message
        # and one waits until the server stops.
        self._receive_task: asyncio.Task[Any]
        self._stop_task: asyncio.Task[Any]
        self._turn_task: asyncio.Task[Turn] | None = None
        # tokens that still fit, without a slide of the window
        self._remaining = state.engine.max_model_len

    async def run(self) -> None:
        """Serve the session until it ends.

        Whatever ends it, its request is gone from the engine afterwards.
        """
        await self._socket.accept()
        # what goes wrong when the end is sent: the client is gone
        with suppress(SessionEnd, TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            try:
                async with self._state.open_session():
                    await self._serve()
            except SessionEnd as end:
                reason = end.reason
                code = end.code
            except Exception as error:
                code = choose_close_code(error)
                reason = await self._send_error(error, fatal=True)
            await self._send(protocol.ClosedMessage(reason=reason, remaining=self._remaining))
            async with asyncio.timeout(self._state.limits.idle_seconds):
                await self._socket.close(code)

    async def _serve(self) -> None:
        """Receive messages, and answer each by a chunk or by a refusal.

        While a chunk is made, the next message is received already: it may close the session, and
        any other one is refused. After a refusal the session is as it was.

        Raises:
            SessionEnd: the session is over; when the server stops, after the current chunk.
        """
        ready = protocol.ReadyMessage(
            session=self._id, model=self._state.models[0], remaining=self._remaining
        )
        await self._send(ready)
        self._receive_task = asyncio.create_task(self._receive())
        self._stop_task = asyncio.create_task(self._state.stop_event.wait())
        try:
            while True:
                await self._wait_for_event()
                try:
                    if self._turn_task is not None and self._turn_task.done():
                        await self._finish_turn(self._turn_task)
                    else:
                        self._take_message()
                except Exception as error:
                    if not errors.is_callers_mistake(error):
                        raise
                    await self._send_error(error, fatal=False)
        finally:
            await self._cancel_tasks()

    async def _wait_for_event(self) -> None:
        """Wait until a message is received, or the current turn is done.

        Raises:
            SessionEnd: no chunk is being made, and the server stops or the client is silent.
        """
        if self._turn_task is not None:
            await asyncio.wait([self._receive_task, self._turn_task], return_when=FIRST_COMPLETED)
            return
        seconds = self._state.limits.idle_seconds
        done, _ = await asyncio.wait(
            [self._receive_task, self._stop_task], timeout=seconds, return_when=FIRST_COMPLETED
        )
        if self._stop_task in done:
            raise SessionEnd("the server stops: open a new session elsewhere", RESTART)
        if not done:
            raise SessionEnd(f"no message for {seconds:g} s", GOING_AWAY)

    def _take_message(self) -> None:
        """Begin to answer the message that was received, and receive the next one.

        While a chunk is made, the message is refused.

        Raises:
            InputError: the message is malformed, or comes before the chunk is complete.
            SessionEnd: the message is the last one.
        """
        receive_task = self._receive_task
        self._receive_task = asyncio.create_task(self._receive())
        message = receive_task.result()
        if self._turn_task is not None:
            expected = "none before the chunk is complete"
            remedy = "Wait for the chunk, or close the session."
            raise InputError("message", expected, _quote_tag(message), remedy)
        self._turn_task = asyncio.create_task(self._answer(message))

    async def _finish_turn(self, turn: asyncio.Task[Turn]) -> None:
        """Send the chunk of a turn that is done.

        Raises:
            Exception: any exception of the turn, which has changed nothing then.
        """
        self._turn_task = None
        self._conversation, chunk = turn.result()
        self._remaining = chunk.remaining
        await self._send(chunk)

    async def _cancel_tasks(self) -> None:
        """End what the session waits for; a request that is cancelled leaves the engine."""
        self._stop_task.cancel()
        tasks: list[asyncio.Task[Any]] = [self._receive_task]
        if self._turn_task is not None:
            tasks.append(self._turn_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self) -> Any:
        """Return the next message, unless it is the last one.

        Raises:
            InputError: it is malformed.
            TooLarge: it is beyond a limit.
            SessionEnd: the client closes the session, or has left.
        """
        event = await self._socket.receive()
        if event["type"] == "websocket.disconnect":
            raise SessionEnd("the client left", NORMAL)
        body = event.get("bytes")
        if body is None:
            body = event.pop("text").encode(errors="surrogatepass")
        limits = self._state.limits
        message = await run_in_thread_if_large(
            len(body), parse_message, ClientMessage, body, "message", limits
        )
        if isinstance(message, protocol.CloseMessage):
            raise SessionEnd("the client closed it", NORMAL)
        return message

    async def _answer(self, message: Any) -> Turn:
        """Make the chunk after a message.

        Raises:
            InputError: the message is refused.
        """
        conversation = self._conversation
        is_start = isinstance(message, protocol.StartMessage)
        if conversation is None:
            if not is_start:
                raise InputError("type", '"start" at first', _quote_tag(message))
            conversation = Conversation(self._state, message, self._id)
        elif is_start:
            raise InputError("type", '"next" or "close" after the start', _quote_tag(message))
        chunk = await conversation.make_chunk(message, self._send)
        return Turn(conversation, chunk)

    async def _send(self, message: Any) -> None:
        """Send a message; a client that does not read for too long counts as gone.

        Raises:
            SessionEnd: the client is gone.
        """
        try:
            async with asyncio.timeout(self._state.limits.idle_seconds):
                await self._socket.send_text(msgspec.json.encode(message).decode())
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            raise SessionEnd("the client left", NORMAL) from None

    async def _send_error(self, error: Exception, *, fatal: bool) -> str:
        """Send a refusal, and return its sentence."""
        info = errors.make_info(error, self._state.plan, "session")
        message = protocol.ErrorMessage(error=info, fatal=fatal, remaining=self._remaining)
        await self._send(message)
        return info.message


def choose_close_code(error: Exception) -> int:
    """Return the close code of a session that an error ends."""
    if isinstance(error, TooBusy):
        return BUSY
    if errors.is_end_of_server(error):
        return RESTART
    return ERROR


def _quote_tag(message: Any) -> str:
    """Return the type of a message, as errors show it."""
    return f'"{message.__struct_config__.tag}"'


# -- the conversation ------------------------------------------------------------------------------


class ChunkPrompt(NamedTuple):
    """What the model is to read for one chunk.

    Attributes:
        prompt: vLLM's prompt: the history and the message.
        history: the part of the history in it.
        items: the items of the message.
    """

    prompt: dict[str, Any]
    history: History
    items: list[SessionItem]


class ChunkOutput(NamedTuple):
    """What the engine has returned of one chunk so far.

    Attributes:
        choice: the new tokens of the latest output.
        output: the latest output of the engine.
        rendered: vLLM's input for its engine.
        prompt_ids: the ids of this input.
        text: the text of all tokens so far.
        logprobs: the log probabilities of all tokens so far.
    """

    choice: protocol.Choice
    output: Any
    rendered: Any
    prompt_ids: list[int]
    text: str
    logprobs: list[dict[int, float]]


class Conversation:
    """A session that has begun: its settings, and all that the model has read and written.

    Each chunk is a request of its own, whose prompt is the whole history; the engine has it in its
    prefix cache.

    Args:
        state: the server's.
        start: the first message.
        session_id: the name of the session.

    Raises:
        InputError: the settings of the start are refused.
    """

    def __init__(self, state: ServerState, start: protocol.StartMessage, session_id: str) -> None:
        self._state = state
        self._engine = state.engine
        self._plan = state.plan
        self._id = session_id
        self._data_parallel_rank = state.engine.next_data_parallel_rank()
        state.resolve_model(start.model)
        self._output = state.find_output(start)
        self._sampling = self._engine.parse_sampling_params(start.sampling_params, state.limits)
        if self._sampling.get("n", 1) != 1:
            raise InputError(f"{SAMPLING_FIELD}.n", "1 in a session", str(self._sampling["n"]))
        if self._plan.spec.decoder_prompt is not None:
            raise InputError("session", "a model without an encoder", "one with it")
        # without the items, whose bytes would stay in memory as long as the session
        self._settings = structs.replace(
            start, prompt=None, items=NULL, uuids=NULL, sampling_params=NULL
        )
        keep = None
        if start.window is not None:
            keep = start.window.keep
        self._history = History(keep)
        self._index = 0

    async def make_chunk(self, message: Any, send: Send) -> protocol.ChunkMessage:
        """Make the chunk after a message, and add both to the history.

        Tokens are sent as they come. The chunk itself is returned, so that the session is ready for
        the next message before the client has the chunk.

        Args:
            message: the start or a next one.
            send: sends the tokens as they come, if the session streams.

        Raises:
            InputError: the message is refused; nothing has changed.
        """
        sampling = self._make_sampling_params(message)
        prompt = await self._make_prompt(message, sampling.max_tokens)
        answer = Answer(self._engine, sampling, self._output)
        last = await self._generate(prompt, answer, sampling, send)
        ids = last.prompt_ids + answer.ids[0]
        fields = structs.asdict(last.choice)
        fields.update(
            index=self._index,
            token_ids=answer.ids[0],
            text=last.text or None,
            logprobs=last.logprobs or None,
        )
        if self._settings.stream:
            fields["parts"] = await answer.make_all_parts(0, last.prompt_ids)
        chunk = protocol.ChunkMessage(
            **fields,
            remaining=self._count_remaining(ids),
            usage=answer.make_usage(last.output),
            slid=self._history.count_dropped(prompt.history),
        )
        items = locate_items(list(prompt.history.items) + prompt.items, last.rendered)
        self._history = prompt.history._replace(ids=ids, items=items)
        self._index += 1
        return chunk

    async def _generate(
        self, prompt: ChunkPrompt, answer: Answer, sampling: Any, send: Send
    ) -> ChunkOutput:
        """Generate a chunk, and send its tokens as they come; return the last output.

        Args:
            prompt: what the model reads.
            answer: receives the tokens.
            sampling: vLLM's sampling parameters.
            send: sends the tokens of all outputs but the last, which the chunk has.
        """
        text = ""
        logprobs: list[dict[int, float]] = []
        last: ChunkOutput | None = None
        outputs = self._engine.generate(
            prompt.prompt,
            sampling,
            f"{self._id}-{self._index}",
            data_parallel_rank=self._data_parallel_rank,
            must_fit=True,
        )
        async with aclosing(outputs):
            async for rendered, output in outputs:
                prompt_ids = list(rendered["prompt_token_ids"])
                if not answer.ids:
                    _check_history_is_kept(prompt.history, prompt_ids)
                choice = await answer.make_choice(
                    output.outputs[0], prompt_ids, stream=self._settings.stream
                )
                text += choice.text or ""
                logprobs.extend(choice.logprobs or [])
                if choice.finish_reason is None and choice.token_ids:
                    await self._send_tokens(choice, prompt_ids + answer.ids[0], send)
                last = ChunkOutput(choice, output, rendered, prompt_ids, text, logprobs)
        if last is None:
            raise RuntimeError("the engine ended a request without an output")
        return last

    async def _send_tokens(self, choice: protocol.Choice, ids: list[int], send: Send) -> None:
        """Send new tokens of a chunk.

        Args:
            choice: the new tokens.
            ids: all that the model has read and written, with these.
            send: sends a message.
        """
        fields = structs.asdict(choice)
        fields.update(index=self._index, logprobs=None)
        await send(protocol.TokensMessage(**fields, remaining=self._count_remaining(ids)))

    def _count_remaining(self, ids: list[int]) -> int:
        """Return how many tokens still fit into the model's context after these."""
        return self._engine.max_model_len - len(ids)

    def _make_sampling_params(self, message: Any) -> Any:
        """Return vLLM's sampling parameters of the chunk after a message."""
        options = dict(self._sampling)
        seed = options.get("seed")
        if seed is not None:
            # with the seed of the start, every chunk would be sampled as the first one
            options["seed"] = seed ^ self._index
        if isinstance(message, protocol.NextMessage):
            types = {"max_tokens": int | None}
            options.update(decode_fields(message.sampling_params, types, SAMPLING_FIELD))
        sampling = self._engine.make_sampling_params(
            options, output=self._output, stream=self._settings.stream
        )
        if sampling.max_tokens is None:
            raise InputError(f"{SAMPLING_FIELD}.max_tokens", "a value", "none")
        return sampling

    async def _make_prompt(self, message: Any, max_tokens: int) -> ChunkPrompt:
        """Return vLLM's prompt of the history and a message, if it fits.

        Raises:
            InputError: the message is refused.
        """
        is_first = not self._history.ids
        prompt = await self._state.make_prompt(message, self._settings)
        if "prompt" in prompt:
            text_or_ids = prompt.pop("prompt")
        else:
            text_or_ids = prompt["prompt_token_ids"]
        ids = await self._engine.tokenize(text_or_ids, add_special_tokens=is_first)
        if is_first and not ids:
            raise InputError("prompt", "at least one token in the first message", "none")
        num_tokens = len(ids)
        if self._settings.window is not None and ids:
            # with all its placeholders, since the window must make room for them
            rendered = await self._engine.render({**prompt, "prompt_token_ids": ids})
            num_tokens = len(rendered["prompt_token_ids"])
        data = prompt.pop("multi_modal_data", {})
        uuids = prompt.pop("multi_modal_uuids", {})
        new_items = await self._engine.run_on_item_thread(self._parse_items, data, uuids)

        def check(history: History) -> None:
            self._check_room(history, num_tokens, max_tokens)
            self._check_item_counts(list(history.items) + new_items)

        history = self._history.drop_until_fits(len(new_items), check)
        items = group_by_modality(list(history.items) + new_items)
        prompt["prompt_token_ids"] = list(history.ids) + ids
        prompt["multi_modal_data"] = {}
        prompt["multi_modal_uuids"] = {}
        for name, group in items.items():
            prompt["multi_modal_data"][name] = merge_values(group)
            prompt["multi_modal_uuids"][name] = [item.uuid for item in group]
        return ChunkPrompt(prompt, history, new_items)

    def _parse_items(self, data: Mapping[str, Any], uuids: Mapping[str, Any]) -> list[SessionItem]:
        """Return the items of a message, in canonical form.

        Args:
            data: as in ``multi_modal_data``.
            uuids: of each modality the names of the items, if they have names.

        Raises:
            InputError: an item is malformed, or there are more or fewer names than items.
        """
        items = []
        for modality, modality_data in data.items():
            parser = self._plan.modalities[modality].parser
            parsed = parser.parse(modality_data, self._plan.hidden_size)
            names = uuids.get(modality) or [None] * parsed.total
            if len(names) != parsed.total:
                expected = f"{parsed.total} names"
                raise InputError(f"uuids.{modality}", expected, str(len(names)))
            for value, uuid in zip(parsed.values, names, strict=True):
                items.append(SessionItem(modality, value, uuid))
        return items

    def _check_room(self, history: History, num_tokens: int, max_tokens: int) -> None:
        """Refuse a message that goes beyond the model's context after a history.

        Args:
            history: the part that remains.
            num_tokens: number of tokens of the message.
            max_tokens: the most tokens of the chunk after it.
        """
        room = self._engine.max_model_len - len(history.ids)
        if num_tokens + max_tokens > room:
            expected = f"at most {room} more tokens"
            got = f"{num_tokens} of the prompt and max_tokens={max_tokens}"
            remedy = "Ask for less, or start a new session."
            raise InputError(f"{SAMPLING_FIELD}.max_tokens", expected, got, remedy)

    def _check_item_counts(self, items: list[SessionItem]) -> None:
        """Refuse more items than one request may have."""
        counts = Counter(item.modality for item in items)
        for modality, count in counts.items():
            parser = self._plan.modalities[modality].parser
            parser.check_count(count, self._engine.most_items.get(modality))


def _check_history_is_kept(history: History, prompt_ids: list[int]) -> None:
    """Refuse a session whose spec changes placeholders that are whole.

    The history then does not begin the prompt, so its items are elsewhere.
    """
    num_tokens = len(history.ids)
    if prompt_ids[:num_tokens] != list(history.ids):
        expected = "a spec that leaves placeholders that are whole as they are"
        raise InputError("session", expected, "another one")

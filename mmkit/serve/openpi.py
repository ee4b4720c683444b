"""``WS /v1/realtime/robot/openpi``: a robot sends an observation, and gets the actions to take.

The protocol is that of openpi's `WebsocketClientPolicy`: the server speaks first and says what it
is; then each message of the client is an observation, and each answer a map with ``actions`` and
the times that it took. An observation is a request of its own; a connection keeps nothing of the
one before.

A refused observation is answered by one sentence, as a text, which the client raises as an error;
the connection stays open.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Mapping
from contextlib import aclosing, suppress
from time import perf_counter
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import WebSocket, WebSocketDisconnect
from msgspec import Raw

from ..errors import InputError, SpecError
from ..language.policy import PROMPT_KEY
from ..plan.policy import BoundPolicy
from . import errors
from .errors import SessionRefused
from .observations import MESSAGE, decode_observation, encode_answer
from .session import GOING_AWAY, NORMAL, RESTART, SessionEnd, choose_close_code
from .state import ServerState
from .threads import run_in_thread_if_large

OPENPI_ROUTE = "/v1/realtime/robot/openpi"
"""The path of the route, by which it is behind vLLM's check of keys."""

MAX_INLINE_BYTES = 2**20
"""Bytes of an observation that is read on the event loop. Arrays are read where they lie, so that
this is less work than the change to a thread and back."""

VLLM_PROMPT_PARAMS = ("input_tokens", "input_text")
"""What vLLM calls the prompt in its own refusals, for example of a prompt that is too long."""

MAX_REASON_BYTES = 120
"""Bytes of the reason in a websocket's last frame."""


# -- the layer before vLLM's check of keys ---------------------------------------------------------


class OpenpiMiddleware:
    """Translates what openpi's clients ask for into what vLLM's server has.

    A websocket at ``/`` is one at `OPENPI_ROUTE`, since a client that is given a host and a port
    knows no path. Its header ``Authorization: Api-Key ...`` becomes the header that vLLM checks.
    ``GET /healthz`` is ``GET /health``.

    It has to come before vLLM's check of keys, which lets every path pass that it does not know.

    Args:
        app: the next layer.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        root_path = scope.get("root_path", "")
        path = scope.get("path", "").removeprefix(root_path)
        if scope["type"] == "websocket" and path.rstrip("/") in ("", OPENPI_ROUTE):
            headers = [_translate_key(name, value) for name, value in scope["headers"]]
            scope = {**scope, "headers": headers}
            _set_path(scope, root_path + OPENPI_ROUTE)
        elif scope["type"] == "http" and path == "/healthz":
            scope = dict(scope)
            _set_path(scope, f"{root_path}/health")
        await self.app(scope, receive, send)


def _set_path(scope: dict[str, Any], path: str) -> None:
    scope["path"] = path
    scope["raw_path"] = path.encode()


def _translate_key(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Return a header; in place of openpi's header with a key, the header that vLLM checks."""
    scheme, _, key = value.partition(b" ")
    if name == b"authorization" and scheme.lower() == b"api-key":
        return name, b"Bearer " + key
    return name, value


# -- when the server starts ------------------------------------------------------------------------


def check_policy(state: ServerState, policy: BoundPolicy) -> None:
    """Refuse a policy that no observation could be served by, before the server takes any.

    Raises:
        SpecError: vLLM does not take its sampling parameters, or its prompt has other targets than
            there are items.
    """
    where = f"{state.plan.spec.name}, policy"
    try:
        make_sampling_params(state, policy, parse_sampling(state, policy))
        state.plan.expand(**policy.make_largest_request())
    except InputError as error:
        raise SpecError(f"{where}: {error}") from error


def parse_sampling(state: ServerState, policy: BoundPolicy) -> dict[str, Any]:
    """Return the fields of vLLM's sampling parameters that a policy states.

    Raises:
        InputError: vLLM has no such fields.
    """
    raw = Raw(msgspec.json.encode(policy.spec.sampling))
    return state.engine.parse_sampling_params(raw, state.limits)


def make_sampling_params(
    state: ServerState, policy: BoundPolicy, options: Mapping[str, Any]
) -> Any:
    """Return vLLM's sampling parameters of an observation, from what `parse_sampling` returns.

    vLLM writes into them, so that each observation has its own.

    Raises:
        InputError: vLLM does not take the sampling parameters of the policy.
    """
    return state.engine.make_sampling_params(options, output=policy.output, stream=False)


# -- a connection ----------------------------------------------------------------------------------


class RobotConnection:
    """The connection of one robot.

    Args:
        state: the server's.
        policy: the policy of its model.
        socket: not accepted yet.
    """

    def __init__(self, state: ServerState, policy: BoundPolicy, socket: WebSocket) -> None:
        self._state = state
        self._policy = policy
        self._socket = socket
        self._sampling = parse_sampling(state, policy)
        self._id = f"mmrobot-{uuid4().hex}"
        self._num_requests = 0
        # seconds from an observation to the end of its answer
        self._previous_seconds: float | None = None

    async def run(self) -> None:
        """Serve the robot until it leaves.

        Whatever ends the connection, its request is gone from the engine afterwards.
        """
        reason = ""
        code = NORMAL
        # what goes wrong when the end is sent: the client is gone
        with suppress(SessionEnd, TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            try:
                async with self._state.open_session():
                    await self._socket.accept()
                    description = await self._state.engine.run_on_item_thread(self._describe)
                    await self._send(encode_answer(description))
                    await self._serve()
            except SessionRefused as error:
                refusal = errors.make_response(error, self._state.plan, "openpi")
                await self._socket.send_denial_response(refusal)
                return
            except SessionEnd as end:
                reason = end.reason
                code = end.code
            except Exception as error:
                code = choose_close_code(error)
                await self._send(self._write_refusal(error))
            async with asyncio.timeout(self._state.limits.idle_seconds):
                await self._socket.close(code, reason[:MAX_REASON_BYTES])

    def _describe(self) -> dict[str, Any]:
        """Return the first message: what the robot talks to."""
        horizon, *sizes = self._policy.shape
        description = {
            "model": self._state.models[0],
            "spec": self._state.plan.spec.name,
            "observation": self._policy.expected,
            "action_horizon": horizon,
            "action_dim": sizes[0] if len(sizes) == 1 else sizes,
        }
        description.update(self._policy.spec.metadata)
        return description

    async def _serve(self) -> None:
        """Answer each observation by actions, or by the sentence of a refusal.

        While an observation is answered, the next message is received already, so that a client
        that leaves is seen at once.

        Raises:
            SessionEnd: the client is gone or silent, or the server stops.
        """
        self._receive_task = asyncio.create_task(self._receive())
        self._stop_task = asyncio.create_task(self._state.stop_event.wait())
        tasks: list[asyncio.Task[Any]] = []
        try:
            while True:
                message = await self._wait_for_message()
                started = perf_counter()
                self._receive_task = asyncio.create_task(self._receive())
                answer_task = asyncio.create_task(self._answer(message))
                tasks = [answer_task]
                await asyncio.wait([answer_task, self._receive_task], return_when=FIRST_COMPLETED)
                if not answer_task.done() and self._receive_task.exception() is not None:
                    self._receive_task.result()  # raises it
                await self._send(await answer_task)
                self._previous_seconds = perf_counter() - started
        finally:
            tasks += [self._receive_task, self._stop_task]
            for task in tasks:
                task.cancel()  # a request that is cancelled leaves the engine
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_message(self) -> bytes | None:
        """Return the next message; see `_receive`.

        Raises:
            SessionEnd: the client is gone or silent, or the server stops.
        """
        seconds = self._state.limits.robot_idle_seconds
        done, _ = await asyncio.wait(
            [self._receive_task, self._stop_task], timeout=seconds, return_when=FIRST_COMPLETED
        )
        if self._stop_task in done:
            raise SessionEnd("the server stops: connect to another one", RESTART)
        if not done:
            raise SessionEnd(f"no observation for {seconds:g} s", GOING_AWAY)
        return self._receive_task.result()

    async def _receive(self) -> bytes | None:
        """Return the next message; None for a text.

        Raises:
            SessionEnd: the client is gone.
        """
        event = await self._socket.receive()
        if event["type"] == "websocket.disconnect":
            raise SessionEnd("the client left", NORMAL)
        message: bytes | None = event.get("bytes")
        return message

    async def _send(self, message: bytes | str) -> None:
        """Send a message; a client that does not read for too long counts as gone.

        Raises:
            SessionEnd: the client is gone.
        """
        try:
            async with asyncio.timeout(self._state.limits.idle_seconds):
                if isinstance(message, str):
                    await self._socket.send_text(message)
                else:
                    await self._socket.send_bytes(message)
        except (TimeoutError, WebSocketDisconnect, RuntimeError, OSError):
            raise SessionEnd("the client left", NORMAL) from None

    # -- an observation ----------------------------------------------------------------------------

    async def _answer(self, message: bytes | None) -> bytes | str:
        """Return the answer to a message: actions, or the sentence of a refusal.

        Raises:
            Exception: the server is at fault.
        """
        try:
            return encode_answer(await self._act(message))
        except Exception as error:
            if not errors.is_callers_mistake(error):
                raise
            return self._write_refusal(error)

    def _write_refusal(self, error: Exception) -> str:
        """Return the sentence of a refusal, with the keys of the observation that it is about."""
        info = errors.make_info(error, self._state.plan, "openpi")
        if info.param in VLLM_PROMPT_PARAMS:
            return f"{PROMPT_KEY}: {info.message}"
        return self._policy.name_keys(info.message)

    async def _act(self, message: bytes | None) -> dict[str, Any]:
        """Return the actions for an observation, and the times that they took.

        Raises:
            InputError: the observation is refused.
        """
        if message is None:
            raise InputError(MESSAGE, "an observation in MessagePack", "a text")
        # a request is rendered again if the engine's cache lacks one of its items
        rendered_at: list[float] = []

        def note_time() -> None:
            rendered_at.append(perf_counter())

        started_at = perf_counter()
        request = await run_in_thread_if_large(
            len(message), self._make_request, message, most_bytes=MAX_INLINE_BYTES
        )
        unpacked_at = perf_counter()
        ids = await self._generate(request, on_rendered=note_time)
        generated_at = perf_counter()
        actions = await self._state.engine.run_on_item_thread(self._policy.decode, ids)
        decoded_at = perf_counter()
        processed_at = rendered_at[0]
        server_timing = {
            "infer_ms": 1000 * (decoded_at - started_at),
            "unpack_ms": 1000 * (unpacked_at - started_at),
            "process_ms": 1000 * (processed_at - unpacked_at),
            "decode_ms": 1000 * (decoded_at - generated_at),
        }
        if self._previous_seconds is not None:
            server_timing["prev_total_ms"] = 1000 * self._previous_seconds
        policy_timing = {"infer_ms": 1000 * (generated_at - processed_at)}
        return {
            "actions": actions,
            "policy_timing": policy_timing,
            "server_timing": server_timing,
        }

    def _make_request(self, message: bytes) -> dict[str, Any]:
        """Return vLLM's prompt of an observation."""
        observation = decode_observation(message, self._state.limits, self._policy.is_ignored)
        return self._policy.make_request(observation)

    async def _generate(self, request: Mapping[str, Any], on_rendered: Any) -> list[int]:
        """Return the ids of a chunk of actions.

        Args:
            request: vLLM's prompt.
            on_rendered: called each time that the request is processed.
        """
        self._num_requests += 1
        outputs = self._state.engine.generate(
            request,
            make_sampling_params(self._state, self._policy, self._sampling),
            f"{self._id}-{self._num_requests}",
            data_parallel_rank=None,
            # a text with the actions in it may be cut off, as any text
            must_fit=self._policy.output.after is None,
            on_rendered=on_rendered,
        )
        async with aclosing(outputs):
            async for _, output in outputs:
                ids = list(output.outputs[0].token_ids)
        return ids

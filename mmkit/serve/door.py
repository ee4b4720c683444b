"""What the routes of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..errors import InputError
from . import protocol
from .engine import Engine, EngineDeadError
from .limits import Limits
from .wire import Decoder

_POLL = 0.25
"""Seconds between two looks at the engine."""


class Door:
    """The model, the limits and the open sessions of one server.

    Attributes:
        engine: vLLM.
        limits: what one client may ask.
        models: the names under which the model is served.
        sessions: how many are open.
        over: done when the engine is dead or shut down.
    """

    def __init__(self, engine: Engine, limits: Limits, models: list[str]) -> None:
        self.engine, self.limits, self.models = engine, limits, models
        self.plan = engine.plan
        self.sessions = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.ensure_future(self._watching())

    async def _watching(self) -> None:
        while not self.engine.dead:
            await asyncio.sleep(_POLL)
        self.over.set_result(None)

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Raise in what waits for the engine when that is over: vLLM says nothing to requests of an engine that is shut
        down.

        Raises:
            EngineDeadError: it is.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as scope:

                def end(_: object) -> None:
                    scope.reschedule(loop.time())

                self.over.add_done_callback(end)
                try:
                    yield
                finally:
                    self.over.remove_done_callback(end)
        except TimeoutError:
            if scope.expired():
                raise EngineDeadError from None
            raise

    @property
    def most_sessions(self) -> int:
        """Sessions that may be open at once."""
        return self.limits.sessions or self.engine.spare_sessions

    def check_model(self, asked: str | None) -> str:
        """The name of the model that a request asks for.

        Raises:
            InputError: another one.
        """
        if asked is not None and asked not in self.models:
            raise InputError("model", f"one of {', '.join(self.models)}", protocol.shown(asked))
        return asked or self.models[0]

    async def prompt(self, asked: Any) -> dict[str, Any]:
        """vLLM's prompt of a request or session message; without one, the placeholders of its items.

        Raises:
            InputError: items, ids or names that the model does not take.
        """
        decoder = Decoder(self.limits.elements, self.limits.items)
        data = await self.engine.load(decoder.decode(asked.items))
        self.plan.check_names(data)
        written: Any = asked.prompt
        if written is None:
            written = await asyncio.to_thread(self.plan.spell, data)
        prompt: dict[str, Any] = {}
        if isinstance(written, str):
            if not self.engine.has_tokenizer:
                raise InputError("prompt", "token ids, since the server has no tokenizer", "a text")
            prompt["prompt"] = written
        else:
            self.plan.check_ids(written)
            prompt["prompt_token_ids"] = written
        if data:
            prompt["multi_modal_data"] = data
        if asked.uuids:
            if unknown := [name for name in asked.uuids if name not in data]:
                remedy = "Send null for an item that the server has."
                raise InputError(f"uuids.{unknown[0]}", "items of that modality beside their uuids", "none", remedy)
            prompt["multi_modal_uuids"] = asked.uuids
        if getattr(asked, "mm_processor_kwargs", None) and not self.engine.trust_kwargs:
            remedy = "They can make a request costly: start the server with --trust-request-mm-kwargs to allow them."
            raise InputError("mm_processor_kwargs", "none", "some", remedy)
        for name in ("mm_processor_kwargs", "cache_salt"):
            if (value := getattr(asked, name, None)) is not None:
                prompt[name] = value
        return prompt

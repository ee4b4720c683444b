"""The endpoint plugin: what mmkit adds to vLLM's server where VLLM_PLUGINS names it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter

from ..errors import DISTRIBUTION, InputError
from ..plan.modality import BoundModality
from ..vllm_api import offload
from ..vllm_api.media import can_decode_audio
from ..vllm_api.processor import CommonProcessor
from .answers import AnswerMiddleware
from .engine import Engine
from .errors import handle_input_error
from .middleware import BodyMiddleware
from .protocol import Limits
from .routes import router
from .state import ServerState

logger = logging.getLogger(__name__)

MAX_FRAMES = 4096
"""Fragments and pings of a websocket between two messages."""

_UNREAD = 3
_LARGE = 2**20


class MmkitEndpoints:
    """Adds the routes of `mmkit.serve.routes` to ``vllm serve``."""

    name = "mmkit"
    required_tasks = ("generate", "embed", "classify", "token_embed", "token_classify", "plugin")

    def attach_router(self, app: Any) -> None:
        """Register the routes, and the bounds of what bodies cost."""
        app.add_middleware(BodyMiddleware)
        app.add_middleware(AnswerMiddleware)  # comes before the other one
        app.add_exception_handler(InputError, handle_input_error)
        app.include_router(router)
        app.include_router(APIRouter(lifespan=configure_server))
        # what vLLM's own routes load has no other limit of ours
        os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", str(Limits.from_environment().pixels))
        os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")  # they may lead anywhere

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find the spec of the model that is served; without one the routes answer 404."""
        processor = engine_client and getattr(engine_client.renderer, "mm_processor", None)
        if not isinstance(processor, CommonProcessor):
            logger.warning("mmkit: the model has no mmkit spec, so /v1/mm answers 404.")
            return
        if processes := offload.install(engine_client.renderer):
            await asyncio.to_thread(processes.wait)
        # before 0.32 vLLM trusted every request
        trust = getattr(args, "trust_request_mm_kwargs", True)
        engine = Engine(engine_client, processor, trust_kwargs=trust)
        models = list(args.served_model_name or [args.model])
        origins = getattr(args, "allowed_origins", "*")
        state.mmkit = ServerState(engine, Limits.from_environment(), models, origins)
        engine.call_before_shutdown(state.mmkit.stop)
        if not can_decode_audio() and any(map(_takes_audio, processor.plan.modalities.values())):
            text = "mmkit: files of audio are refused: pip install %s[audio] brings a decoder."
            logger.warning(text, DISTRIBUTION)


def _takes_audio(modality: BoundModality) -> bool:
    """Whether an item of a modality is audio, or has a part that is."""
    parts = modality.item.parts.values() or [modality.item]
    return any(part.media == "audio" for part in parts)


# -- uvicorn ---------------------------------------------------------------------------------------


@asynccontextmanager
async def configure_server(app: Any) -> AsyncIterator[None]:
    """Sets what vLLM leaves at uvicorn's defaults, before the server listens: it would wait for
    ever for half-sent bodies when it is to stop, and unpack messages of sessions.

    Args:
        app: vLLM's, which knows its server; under Ray Serve, something else stands in its place.
    """
    state = getattr(app.state, "mmkit", None)
    config = getattr(getattr(app.state, "server", None), "config", None)
    if state is not None and config is not None:
        config.timeout_graceful_shutdown = _UNREAD
        config.ws_max_size = state.limits.body_bytes + _LARGE
        config.ws_per_message_deflate = False
        if hasattr(config.ws_protocol_class, "send_receive_event_to_app"):
            config.ws_protocol_class = type("Framed", (_Framed, config.ws_protocol_class), {})
    yield


class _Framed:
    """Comes before uvicorn's protocol of websockets, whose frames no proxy looks at: a client that
    sends many without a message is cut off."""

    transport: Any
    _frames = 0

    def handle_cont(self, event: Any) -> None:
        self._count()
        super().handle_cont(event)  # type: ignore[misc]

    def handle_ping(self) -> None:
        self._count()
        super().handle_ping()  # type: ignore[misc]

    def send_receive_event_to_app(self) -> None:
        self._frames = 0
        super().send_receive_event_to_app()  # type: ignore[misc]

    def _count(self) -> None:
        self._frames += 1
        if self._frames > MAX_FRAMES:
            self.transport.abort()

"""The endpoint plugin: what mmkit adds to vLLM's server where VLLM_PLUGINS names it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter

from ..errors import DISTRIBUTION, InputError
from ..plan.modality import BoundModality
from ..vllm_api import offload
from ..vllm_api.media import can_decode_audio
from ..vllm_api.processor import Processor
from .answers import AnswerMiddleware, handle_input_error
from .bodies import BodyMiddleware
from .engine import Engine
from .limits import ServerLimits
from .openpi import OpenpiMiddleware, check_policy
from .routes import router
from .state import ServerState, find_state

logger = logging.getLogger(__name__)

engine_death = threading.Event()
"""Set in an API server whose engine died. `mmkit.serve.__main__` makes it the exit status."""

MAX_FRAMES = 4096
"""Fragments and pings of a websocket between two messages."""

SHUTDOWN_SECONDS = 3
"""Seconds for which a server that stops waits for connections whose requests are half-sent."""

FRAME_OVERHEAD_BYTES = 2**20
"""Bytes by which a message of a websocket may exceed the limit of a body. Beyond it uvicorn cuts
the connection; below it a session refuses the message in a sentence."""


class MmkitEndpoints:
    """Adds the routes of `mmkit.serve.routes` to ``vllm serve``."""

    name = "mmkit"
    required_tasks = ("generate", "embed", "classify", "token_embed", "token_classify", "plugin")

    def attach_router(self, app: Any) -> None:
        """Register the routes, and the layers before them."""
        self._app = app
        app.add_middleware(BodyMiddleware)
        app.add_middleware(AnswerMiddleware)  # the layer that is added last comes first
        app.add_exception_handler(InputError, handle_input_error)
        app.include_router(router)
        app.include_router(APIRouter(lifespan=configure_uvicorn))
        # vLLM's own loaders have no other limit of ours
        most_pixels = ServerLimits.from_environment().pixels
        os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", str(most_pixels))
        # a redirect may lead to a host that is not allowed
        os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find the spec of the model that is served; without one the routes answer 404."""
        processor = _find_processor(engine_client)
        if processor is None:
            logger.warning("mmkit: the model has no mmkit spec, so /v1/mm answers 404.")
            return
        render_processes = offload.install(engine_client.renderer)
        if render_processes:
            await asyncio.to_thread(render_processes.wait)
        # before 0.32 vLLM trusted every request
        trust_kwargs = getattr(args, "trust_request_mm_kwargs", True)
        engine = Engine(
            engine_client,
            processor,
            trust_kwargs=trust_kwargs,
            has_render_processes=render_processes is not None,
        )
        models = list(args.served_model_name or [args.model])
        origins = getattr(args, "allowed_origins", "*")
        state.mmkit = ServerState(engine, ServerLimits.from_environment(), models, origins)
        engine.call_before_shutdown(partial(end_service, state.mmkit))
        if processor.plan.policy is not None:
            await asyncio.to_thread(check_policy, state.mmkit, processor.plan.policy)
            put_first(self._app, OpenpiMiddleware)
        _warn_without_audio_decoder(processor.plan.modalities.values())


def end_service(state: ServerState) -> None:
    """Take no more requests, because the server is to stop or because its engine died.

    It can be called again, and from any thread.
    """
    # at a later call, vLLM has stopped the engine itself
    if not state.is_stopping and state.engine.has_died:
        engine_death.set()
    state.stop()


def put_first(app: Any, middleware: Any) -> None:
    """Add a layer before all that vLLM has added, its check of keys among them.

    Args:
        app: vLLM's, with all its layers, which serves nobody yet.
        middleware: the class of the layer.
    """
    if app.middleware_stack is None:
        app.add_middleware(middleware)
    else:
        # what vLLM has for SageMaker puts the layers together before the server starts
        app.middleware_stack = middleware(app.middleware_stack)


def _find_processor(engine_client: Any) -> Processor | None:
    """Return the processor of the model; None for a model without a spec, or for no engine."""
    if not engine_client:
        return None
    processor = getattr(engine_client.renderer, "mm_processor", None)
    if not isinstance(processor, Processor):
        return None
    return processor


def _warn_without_audio_decoder(modalities: Iterable[BoundModality]) -> None:
    """Log that files of audio are refused, if a modality takes them."""
    if can_decode_audio():
        return
    for modality in modalities:
        if _takes_audio(modality):
            text = "mmkit: files of audio are refused: pip install %s[audio] brings a decoder."
            logger.warning(text, DISTRIBUTION)
            return


def _takes_audio(modality: BoundModality) -> bool:
    """Tell whether an item of a modality is audio, or has a part that is."""
    return any(part.vllm_modality == "audio" for part in modality.item.leaves())


# -- uvicorn ---------------------------------------------------------------------------------------


@asynccontextmanager
async def configure_uvicorn(app: Any) -> AsyncIterator[None]:
    """Set what vLLM leaves at uvicorn's defaults, before the server listens.

    By default it would wait for half-sent bodies without an end when it is to stop, and decompress
    messages of sessions, whose size is then known too late.

    Args:
        app: vLLM's, which knows its server; under Ray Serve, something else stands in its place.
    """
    state = find_state(app)
    config = getattr(getattr(app.state, "server", None), "config", None)
    if state is not None and config is not None:
        config.timeout_graceful_shutdown = SHUTDOWN_SECONDS
        config.ws_max_size = state.limits.body_bytes + FRAME_OVERHEAD_BYTES
        config.ws_per_message_deflate = False
        if hasattr(config.ws_protocol_class, "send_receive_event_to_app"):
            bases = (FrameLimit, config.ws_protocol_class)
            config.ws_protocol_class = type("LimitedProtocol", bases, {})
    yield


class FrameLimit:
    """A base before uvicorn's protocol of websockets, which cuts off a client of many frames.

    uvicorn keeps the fragments of a message until its last one, and answers every ping.
    """

    transport: Any
    _num_frames = 0

    def handle_cont(self, event: Any) -> None:
        """Count a fragment."""
        self._count_frame()
        super().handle_cont(event)  # type: ignore[misc]

    def handle_ping(self) -> None:
        """Count a ping."""
        self._count_frame()
        super().handle_ping()  # type: ignore[misc]

    def send_receive_event_to_app(self) -> None:
        """Begin to count anew after a message."""
        self._num_frames = 0
        super().send_receive_event_to_app()  # type: ignore[misc]

    def _count_frame(self) -> None:
        self._num_frames += 1
        if self._num_frames > MAX_FRAMES:
            self.transport.abort()

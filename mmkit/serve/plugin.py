"""The endpoint plugin: vLLM calls it when VLLM_PLUGINS names it, as it does for no other plugin
that adds routes."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

logger = logging.getLogger(__name__)


class MmkitEndpoints:
    """Adds the routes of `mmkit.serve.routes` to ``vllm serve``."""

    name = "mmkit"
    required_tasks = ("generate", "embed", "classify", "token_embed", "token_classify", "plugin")

    def attach_router(self, app: Any) -> None:
        """Register the routes, and the bounds of what bodies cost."""
        from .gate import Gate
        from .limits import Limits
        from .routes import router

        app.add_middleware(Gate)
        app.include_router(router)
        # what vLLM's own routes load has no other limit of ours
        os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", str(Limits.of().pixels))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find the spec of the model that is served; without one the routes answer 404."""
        from ..vllm_api import elsewhere
        from ..vllm_api.processor import CommonProcessor
        from ..vllm_api.undecoded import leave_images_undecoded
        from .door import Door
        from .engine import Engine
        from .limits import Limits
        from .urls import install

        processor = engine_client and getattr(engine_client.renderer, "mm_processor", None)
        if not isinstance(processor, CommonProcessor):
            logger.warning(
                "mmkit: %s has no mmkit spec, so /v1/mm answers 404.",
                getattr(args, "model", "the model"),
            )
            return
        install()
        if processes := elsewhere.of(engine_client.renderer):
            await asyncio.to_thread(processes.wait)
            leave_images_undecoded()
        # before 0.32 vLLM trusted every request
        trust = getattr(args, "trust_request_mm_kwargs", True)
        engine = Engine(engine_client, processor, state.online_renderer, trust_kwargs=trust)
        models = list(args.served_model_name or [args.model])
        origins = getattr(args, "allowed_origins", "*")
        state.mmkit_door = Door(engine, Limits.of(), models, origins)

"""The endpoint plugin: vLLM calls it when VLLM_PLUGINS names it, as it does for no other plugin that adds routes."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class MmkitEndpoints:
    """Adds the routes of `mmkit.serve.routes` to ``vllm serve``."""

    name = "mmkit"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Register the routes."""
        from .routes import router

        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find the spec of the model that is served; without one the routes answer 404."""
        from ..vllm_api.processor import CommonProcessor
        from .door import Door
        from .engine import Engine
        from .limits import Limits

        processor = engine_client and getattr(engine_client.renderer, "mm_processor", None)
        if not isinstance(processor, CommonProcessor):
            logger.warning("mmkit: %s has no mmkit spec, so /v1/mm answers 404.", getattr(args, "model", "the model"))
            return
        trust = getattr(args, "trust_request_mm_kwargs", True)  # before 0.32 vLLM trusted every request
        engine = Engine(engine_client, processor, trust_kwargs=trust)
        state.mmkit_door = Door(engine, Limits.of(), list(args.served_model_name or [args.model]))

"""A page in the browser in which Terra's world is driven: ``GET /terra`` of a server of Terra.

An endpoint plugin of vLLM, named "terra" like the plugin that registers the model, so that VLLM_PLUGINS loads both.
The page speaks with the server by ``WS /v1/mm/session``, as any client does, and loads nothing from elsewhere.
"""

import base64
import io
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import FileResponse
from PIL import Image

from ..worlds import CONTEXT_FRAMES, TownWorld, load_world

router = APIRouter(tags=["terra"])

PAGE = Path(__file__).parent / "index.html"


class TerraPage:
    """Adds the page to ``vllm serve``; it answers 404 for other models."""

    name = "terra"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Register the routes."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find the world of the model that is served."""
        config = engine_client.model_config.hf_config if engine_client else None
        state.terra = config if getattr(config, "model_type", None) == "llama_action" else None


@router.get("/terra", response_class=FileResponse)
async def page(request: Request) -> FileResponse:
    """Return the page."""
    _config(request)
    return FileResponse(PAGE, media_type="text/html", headers={"Cache-Control": "no-cache"})


@router.get("/terra/world")
def world(request: Request, seed: Annotated[int, Query(ge=0)] = 0) -> dict[str, Any]:
    """Return where a drive begins.

    That is what the session gets first, the picture of the last frame of the context, and how the vehicle is steered.
    """
    config = _config(request)
    here = load_world(config)
    if not isinstance(here, TownWorld):
        raise HTTPException(404, "terra: expected a checkpoint with an image tokenizer, got one without.")
    episode = here.episode(seed % here.num_episodes)
    return {
        "frames": episode.frames[:CONTEXT_FRAMES].tolist(),
        "actions": episode.actions[:CONTEXT_FRAMES].tolist(),
        "placeholder": [config.pad_token_id] * config.num_action_tokens,
        "picture": encode_png(episode.pictures[CONTEXT_FRAMES - 1]),
        "steering": here.steering(episode, CONTEXT_FRAMES),
    }


def encode_png(picture: np.ndarray) -> str:
    """Return a picture, uint8 (height, width, 3), as base64 of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _config(request: Request) -> Any:
    """Return the config of the model that is served, if it is a Terra."""
    config = getattr(request.app.state, "terra", None)
    if config is None:
        raise HTTPException(404, "terra: expected a server of Terra, got one of another model.")
    return config

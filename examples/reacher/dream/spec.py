"""The multimodal side of the world model, all of it."""

import numpy as np

from mmkit import Modality, ModelSpec, Output, Scope, Tensor, any_id, batched, cfg, replace, tok

from ..world import SCENE_PIXELS, STATE_SIZE, STEPS, render
from .places import NUM_COORDINATES, NUM_PLACES, NUM_SIDES, decode_places

PROMPT = "<frame> <state> <chunk>"


def to_places(ids: np.ndarray, scope: Scope) -> np.ndarray:
    """Return the places of ids, int64 (NUM_COORDINATES + 1,), as `encode_places` has them."""
    places = ids - scope.cfg.first_place_id
    places[-1] -= NUM_PLACES
    return places


def to_ids(places: np.ndarray, scope: Scope) -> np.ndarray:
    """Return the ids of places, of one scene or of many."""
    ids = places + scope.cfg.first_place_id
    ids[..., -1] += NUM_PLACES
    return ids


def draw_picture(ids: np.ndarray, scope: Scope) -> np.ndarray:
    """Return the picture of a frame, uint8 (SCENE_PIXELS, SCENE_PIXELS, 3)."""
    scenes = decode_places(to_places(ids, scope)[None], np.zeros(1, np.int64))
    return render(scenes)[0]


FIRST_SIDE_ID = cfg.first_place_id + NUM_PLACES
PLACE = any_id(cfg.first_place_id, FIRST_SIDE_ID)
SIDE = any_id(FIRST_SIDE_ID, FIRST_SIDE_ID + NUM_SIDES)
FRAME = PLACE * NUM_COORDINATES + SIDE

DREAM = ModelSpec(
    "dream",
    Modality(
        "frame",
        item=Tensor((SCENE_PIXELS, SCENE_PIXELS, 3), "uint8"),
        placeholder="<frame>",
        tokens=cfg.tokens_per_camera,
        update=replace(tok["<frame>"]),
        fields={"frame": batched()},
    ),
    Modality(
        "state",
        item=Tensor((STATE_SIZE,)),
        placeholder="<state>",
        tokens=1,
        update=replace(tok["<state>"]),
        fields={"state": batched()},
    ),
    Modality(
        "chunk",
        item=Tensor((STEPS, 2)),
        placeholder="<chunk>",
        tokens=1,
        update=replace(tok["<chunk>"]),
        fields={"chunk": batched()},
    ),
    # the same ids, as numbers and as a picture
    outputs=[Output("places", FRAME, to_places), Output("picture", FRAME, draw_picture)],
)

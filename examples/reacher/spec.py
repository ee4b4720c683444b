"""The multimodal side of the model, all of it: a state and two pictures in, a chunk of actions out."""

import numpy as np

from examples.vla.spec import decode_action, encode_action
from mmkit import Modality, ModelSpec, Output, Policy, Scope, Tensor, any_id, batched, cfg, replace, tok

from .world import STEPS

DIMENSIONS = 2
"""Of an action: how far the tip moves in x and in y."""


def decode_chunk(ids: np.ndarray, scope: Scope) -> np.ndarray:
    """Return the actions of ids, int64 (STEPS * DIMENSIONS,), as float64 (STEPS, DIMENSIONS)."""
    return decode_action(ids.reshape(STEPS, DIMENSIONS), scope)


def encode_chunk(actions: np.ndarray, scope: Scope) -> np.ndarray:
    """Return the ids of actions (STEPS, DIMENSIONS)."""
    return encode_action(actions, scope).reshape(-1)


FIRST_PADDING_ID = cfg.vocab_size - cfg.pad_to_multiple_of
BIN = any_id(FIRST_PADDING_ID - cfg.n_action_bins, FIRST_PADDING_ID)

REACHER = ModelSpec(
    "reacher",
    Modality(
        "state",
        item=Tensor((cfg.state_size,)),
        placeholder="<state>",
        tokens=1,
        update=replace(tok["<state>"]),
        fields={"state": batched()},
    ),
    Modality(
        "wrist",
        item=Tensor((cfg.wrist_pixels, cfg.wrist_pixels, 3), "uint8"),
        placeholder="<wrist>",
        tokens=cfg.tokens_per_camera,
        update=replace(tok["<wrist>"]),
        fields={"wrist": batched()},
    ),
    Modality(
        "scene",
        item=Tensor((cfg.scene_pixels, cfg.scene_pixels, 3), "uint8"),
        placeholder="<scene>",
        tokens=cfg.tokens_per_camera,
        update=replace(tok["<scene>"]),
        fields={"scene": batched()},
    ),
    outputs=[
        Output(
            "chunk",
            BIN * (STEPS * DIMENSIONS),
            decode_chunk,
            encode_chunk,
        ),
    ],
    policy=Policy(
        "chunk",
        {
            "state": "observation/state",
            "wrist": "observation/wrist_image",
            "scene": "observation/image",
        },
        # the instruction is last, since the first action follows from it
        prompt="<state> <wrist> <scene> {prompt}",
    ),
)

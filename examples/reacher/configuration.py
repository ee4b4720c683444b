"""Configuration of the model: a Llama decoder, what it sees, and the units of its actions."""

from typing import Any

from transformers import LlamaConfig

from .world import MAX_DELTA, SCENE_PIXELS, STATE_SIZE, WRIST_PIXELS

STATISTICS = {
    "reacher": {"action": {"q01": [-MAX_DELTA, -MAX_DELTA], "q99": [MAX_DELTA, MAX_DELTA], "mask": [True, True]}}
}
"""In the form of OpenVLA's: by data set the ranges of each dimension, here of the tip in x and in y."""


class ReacherConfig(LlamaConfig):
    """Sizes of a `ReacherForCausalLM`; `norm_stats` and the two after it are OpenVLA's fields."""

    model_type = "reacher"

    state_size: int = STATE_SIZE
    """Numbers of a measured state."""
    scene_pixels: int = SCENE_PIXELS
    """Height and width of the picture of the camera above the table."""
    wrist_pixels: int = WRIST_PIXELS
    """Height and width of the picture of the camera at the tip."""
    tokens_per_camera: int = 4
    """Positions of one picture in the prompt."""
    num_maps: int = 16
    """Points that an encoder looks for in a picture."""
    sharpness: float = 1.0
    """By what maps are multiplied before their softmax."""
    norm_stats: dict[str, Any] | None = None
    """See `STATISTICS`."""
    n_action_bins: int = 32
    """Ids of an action's dimension. They are the last of the vocabulary."""
    pad_to_multiple_of: int = 0
    """Ids behind those of the actions, which mean nothing."""

"""Configuration of the world model: a Llama decoder, and what it sees."""

from transformers import LlamaConfig

from ..world import SCENE_PIXELS


class DreamConfig(LlamaConfig):
    """Sizes of a `DreamForCausalLM`."""

    model_type = "reacher_dream"

    scene_pixels: int = SCENE_PIXELS
    """Height and width of a picture."""
    tokens_per_camera: int = 8
    """Positions of a picture in the prompt."""
    num_maps: int = 32
    """Points that the encoder looks for in a picture."""
    sharpness: float = 1.0
    """By what maps are multiplied before their softmax."""
    first_place_id: int | None = None
    """The id of the first place, behind which come the others, and the two sides."""

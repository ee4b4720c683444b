"""Configuration of the model: a Llama decoder, and what a recording is."""

from transformers import LlamaConfig


class VowelsConfig(LlamaConfig):
    """Sizes of a `VowelsForCausalLM`, and the means and deviations of the recordings that it was trained on."""

    model_type = "vowels"

    channels: int = 12
    """Coefficients per frame."""
    max_frames: int = 32
    """The most frames of one recording."""
    means: list[float] | None = None
    """The mean of each channel in the recordings for training."""
    deviations: list[float] | None = None
    """The standard deviation of each channel in the recordings for training."""

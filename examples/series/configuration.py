"""Configuration of the model: a Llama decoder, and the sizes of a series."""

from transformers import LlamaConfig


class WavesConfig(LlamaConfig):
    """Sizes of a `WavesForCausalLM`."""

    model_type = "waves"

    channels: int = 1
    """Numbers per step."""
    max_steps: int = 64
    """The most steps of one series."""
    steps_per_token: int = 4
    """Steps that share one position of the prompt."""

"""A model of satellite images, as vLLM's Terratorch runs them: raw input, no prompt, no attention, a pooled answer."""

ARCHITECTURE = "TerratorchLike"
"""Name of the model class."""


def register() -> None:
    """Tell transformers and vLLM about the model: the plugin that vLLM runs in each process. Can be called again."""
    from vllm import ModelRegistry

    from . import configuration as configuration

    ModelRegistry.register_model(ARCHITECTURE, f"examples.terratorch_like.model:{ARCHITECTURE}")

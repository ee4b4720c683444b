"""A time-series model from nothing: a Llama that reads one channel of measurements and names the wave in them."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained checkpoint; ``python -m examples.series.train examples/series/checkpoint`` makes it anew."""


def register() -> None:
    """Tell transformers and vLLM about the model: the plugin that vLLM runs in each process. Can be called again."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .configuration import WavesConfig

    AutoConfig.register("waves", WavesConfig, exist_ok=True)
    ModelRegistry.register_model("WavesForCausalLM", "examples.series.model:WavesForCausalLM")

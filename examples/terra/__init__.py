"""Terra: an action-conditioned video world model, served frame by frame."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained checkpoint of the road world."""


def register() -> None:
    """Tell transformers and vLLM about Terra: the plugin that vLLM runs in each process. Can be called again."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .configuration import LlamaActionConfig

    AutoConfig.register("llama_action", LlamaActionConfig, exist_ok=True)
    ModelRegistry.register_model("LlamaActionForCausalLM", "examples.terra.model:LlamaActionForCausalLM")

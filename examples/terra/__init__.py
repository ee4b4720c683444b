"""Terra: an action-conditioned video world model, served frame by frame.

To read first: `spec` (what vLLM has to know), `model` (in vLLM), `reference` (in transformers), `rollout` (frame by
frame). The town that it drives in is `drive`.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained checkpoint, with its image tokenizer."""


def register() -> None:
    """Tell transformers and vLLM about Terra: the plugin that vLLM runs in each process. Can be called again."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .configuration import LlamaActionConfig

    AutoConfig.register("llama_action", LlamaActionConfig, exist_ok=True)
    ModelRegistry.register_model("LlamaActionForCausalLM", "examples.terra.model:LlamaActionForCausalLM")

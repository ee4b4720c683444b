"""A LLaVA-like vision-language model: CLIP, a projector and Llama, with its multimodal side declared in mmkit."""

ARCHITECTURE = "LlavaLikeForConditionalGeneration"
"""Name of the model class. LLaVA checkpoints name transformers' class, so it is chosen by ``hf_overrides``."""


def register() -> None:
    """Tell vLLM about the model: the plugin that vLLM runs in each process. Can be called again."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"examples.llava_like.model:{ARCHITECTURE}")

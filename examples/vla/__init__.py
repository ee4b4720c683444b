"""A vision-language-action model, as OpenVLA: a picture and an instruction in, the action of a robot out."""

ARCHITECTURE = "VlaForActionPrediction"
"""Name of the model class."""


def register() -> None:
    """Tell vLLM about the model: the plugin that vLLM runs in each process. Can be called again."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"examples.vla.model:{ARCHITECTURE}")

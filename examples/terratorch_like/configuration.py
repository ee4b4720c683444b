"""Configuration of the model: sizes of an image, of its patches and of the answer."""

from transformers import AutoConfig, PretrainedConfig


class TerratorchLikeConfig(PretrainedConfig):
    """Sizes of a `TerratorchLike`."""

    model_type = "terratorch_like"

    bands: int = 6
    """Channels of an image, as satellites have them."""
    image_size: int = 32
    """Height and width of an image, in pixels."""
    patch_size: int = 8
    """Height and width of a patch."""
    hidden_size: int = 32
    classes: int = 5
    """Numbers per patch that the model answers with."""
    num_hidden_layers: int = 2
    num_attention_heads: int = 1
    """vLLM asks for it, whether there is attention or not."""
    vocab_size: int = 2
    """vLLM looks at the ids of a prompt, whether the model does or not, from 0.33 on."""


AutoConfig.register(TerratorchLikeConfig.model_type, TerratorchLikeConfig, exist_ok=True)

"""Configuration of the Terra world model: a Llama decoder over image tokens and action embeddings."""

from typing import Any

from transformers import LlamaConfig

_SIZES = ("num_spatio_embeddings", "num_temporal_embeddings", "num_action_tokens", "num_image_patches", "action_dim")


class LlamaActionConfig(LlamaConfig):
    """Sizes of a ``LlamaActionForCausalLM``; the defaults are the published ones.

    One frame takes ``num_image_patches`` image-token positions followed by ``num_action_tokens`` action positions.
    ``pad_token_id`` is the placeholder that stands at the action positions of ``input_ids``; it is never generated.
    """

    model_type = "llama_action"

    vocab_size: int = 262_145
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 22
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 14_550
    pad_token_id: int | None = 262_144
    bos_token_id: int | None = 262_144
    eos_token_id: int | list[int] | None = 262_144

    num_spatio_embeddings: int = 582
    """Rows of the spatial position table: positions per frame, image tokens and actions together."""
    num_temporal_embeddings: int = 25
    """Rows of the temporal position table: the most frames a sequence may hold."""
    num_action_tokens: int = 6
    """Action positions per frame, one per waypoint."""
    num_image_patches: int = 576
    """Image tokens per frame."""
    action_dim: int = 3
    """Numbers per waypoint: x, y and t."""

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the sizes."""
        super().__post_init__(**kwargs)
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        if self.num_spatio_embeddings != self.num_image_patches + self.num_action_tokens:
            raise ValueError(
                f"num_spatio_embeddings ({self.num_spatio_embeddings}) must equal num_image_patches "
                f"({self.num_image_patches}) + num_action_tokens ({self.num_action_tokens})."
            )
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id ({self.pad_token_id}) must lie inside the vocabulary of {self.vocab_size} ids."
            )

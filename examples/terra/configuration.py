"""Configuration of the Terra world model: a Llama decoder over image tokens and action embeddings."""

import math
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
    num_image_rows: int | None = None
    """Rows of them; by default, as many as make the grid that is nearest to a square and no higher than wide."""
    action_dim: int = 3
    """Numbers per waypoint: x, y and t."""
    image_tokenizer: str | None = None
    """What makes pictures of the image tokens, a name of `worlds`; None for a checkpoint that comes without."""

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
        if self.num_image_rows is not None and (
            self.num_image_rows < 1 or self.num_image_patches % self.num_image_rows
        ):
            raise ValueError(
                f"num_image_rows ({self.num_image_rows}) must divide num_image_patches ({self.num_image_patches})."
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of a frame's image tokens."""
        cells = self.num_image_patches
        rows = self.num_image_rows or max(n for n in range(1, math.isqrt(cells) + 1) if cells % n == 0)
        return rows, cells // rows

    def falling(self, frames: int, keep: int | None) -> int:
        """Tell how many of the oldest frames fall out before the next one is generated.

        Positions count from the first frame of the sequence, so nothing that was computed holds once that is another
        one, and all that is left is read again. Several fall out at once, so that this does not happen for each frame.

        Args:
            frames: known frames.
            keep: how many of them are left when the model is full; None to refuse more than it holds.

        Returns:
            0 as long as there is a temporal position for the next frame.
        """
        most = self.num_temporal_embeddings
        if keep is not None and not 1 <= keep < most:
            raise ValueError(f"keep must be from 1 to {most - 1} frames, not {keep}.")
        if frames < most:
            return 0
        if keep is None:
            raise ValueError(f"The model holds at most {most} frames, not {frames + 1}. Say how many to keep.")
        return frames - keep

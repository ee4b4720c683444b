"""The learned position of Terra, shared by the Hugging Face reference and the vLLM model."""

import torch
from torch import Tensor, nn

from .configuration import LlamaActionConfig


class SpatioTemporalEmbedding(nn.Module):
    """Learned position embedding, factorised into the place inside a frame and the index of the frame."""

    def __init__(self, config: LlamaActionConfig) -> None:
        super().__init__()
        self.spatio_embeddings = nn.Embedding(config.num_spatio_embeddings, config.hidden_size)
        self.temporal_embeddings = nn.Embedding(config.num_temporal_embeddings, config.hidden_size)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Embed positions counted from the start of the sequence.

        Args:
            position_ids: int64, any shape.

        Returns:
            Float, the shape of ``position_ids`` + (hidden,).
        """
        positions_per_frame = self.spatio_embeddings.num_embeddings
        frames = torch.div(position_ids, positions_per_frame, rounding_mode="floor")
        places = position_ids % positions_per_frame
        embeddings: Tensor = self.spatio_embeddings(places) + self.temporal_embeddings(frames)
        return embeddings

"""The world model, a class of transformers: it is trained, and vLLM runs it as it is."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM

from mmkit.training import MultiModalMixin

from ..encoder import PointEncoder
from ..world import STATE_SIZE, STEPS, Observations
from .configuration import DreamConfig
from .spec import DREAM, PROMPT


class DreamForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama that reads a picture, a state and a chunk of actions."""

    mm_spec = DREAM
    config_class = DreamConfig

    def __init__(self, config: DreamConfig) -> None:
        super().__init__(config)
        self.frame_encoder = PointEncoder(config)
        self.state_encoder = nn.Linear(STATE_SIZE, config.hidden_size)
        self.chunk_encoder = nn.Linear(2 * STEPS, config.hidden_size)
        self.post_init()

    def embed_frame(self, frame: torch.Tensor) -> torch.Tensor:
        """Encode pictures as rows (items, tokens_per_camera, hidden_size)."""
        return self.frame_encoder(frame)  # type: ignore[no-any-return]

    def embed_state(self, state: torch.Tensor) -> torch.Tensor:
        """Encode states (items, STATE_SIZE) as rows (items, 1, hidden_size)."""
        rows: torch.Tensor = self.state_encoder(state.to(self.state_encoder.weight.dtype))
        return rows[:, None]

    def embed_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """Encode chunks (items, STEPS, 2) as rows (items, 1, hidden_size)."""
        flat = chunk.flatten(1).to(self.chunk_encoder.weight.dtype)
        rows: torch.Tensor = self.chunk_encoder(flat)
        return rows[:, None]

    def imagine(self, processor: Any, observations: Observations, chunks: Any) -> list[list[int]]:
        """Return the ids of the frames after observations and chunks, the likeliest in turn."""
        inputs = process(processor, observations, chunks)
        num_tokens = processor.plan.outputs["picture"].num_tokens
        ids = self.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        answers: list[list[int]] = ids[:, inputs["input_ids"].shape[1] :].tolist()
        return answers


def process(processor: Any, observations: Observations, chunks: Any) -> Any:
    """Return the batch of observations and of the chunks (observations, STEPS, 2) that are executed then."""
    items = {"frame": list(observations.scene), "state": list(observations.state), "chunk": list(chunks)}
    return processor([PROMPT] * len(observations.scene), **items)

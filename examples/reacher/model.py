"""The model, a class of transformers: it is trained, and vLLM runs it as it is."""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaForCausalLM

from mmkit.training import MultiModalMixin

from .configuration import ReacherConfig
from .encoder import PointEncoder
from .spec import REACHER
from .world import Observations


class ReacherForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama that reads a state and two pictures."""

    mm_spec = REACHER
    config_class = ReacherConfig

    def __init__(self, config: ReacherConfig) -> None:
        super().__init__(config)
        self.state_encoder = nn.Linear(config.state_size, config.hidden_size)
        self.wrist_encoder = PointEncoder(config)
        self.scene_encoder = PointEncoder(config)
        self.post_init()

    def embed_state(self, state: torch.Tensor) -> torch.Tensor:
        """Encode states (items, state_size) as rows (items, 1, hidden_size)."""
        rows: torch.Tensor = self.state_encoder(state.to(self.state_encoder.weight.dtype))
        return rows[:, None]

    def embed_wrist(self, wrist: torch.Tensor) -> torch.Tensor:
        """Encode pictures of the camera at the tip as rows (items, tokens_per_camera, hidden_size)."""
        return self.wrist_encoder(wrist)  # type: ignore[no-any-return]

    def embed_scene(self, scene: torch.Tensor) -> torch.Tensor:
        """Encode pictures of the camera above as rows (items, tokens_per_camera, hidden_size)."""
        return self.scene_encoder(scene)  # type: ignore[no-any-return]

    def act(self, processor: Any, observations: Observations) -> np.ndarray:
        """Return the chunks of observations, float64 (observations, STEPS, DIMENSIONS), the likeliest ids in turn."""
        output = processor.plan.outputs["chunk"]
        inputs = process(processor, observations)
        ids = self.generate(**inputs, max_new_tokens=output.num_tokens, do_sample=False)
        answers = ids[:, inputs["input_ids"].shape[1] :]
        return np.stack([output.decode(answer) for answer in answers.tolist()])


def process(processor: Any, observations: Observations) -> Any:
    """Return the batch of observations, with the prompts of the policy."""
    prompts = []
    for instruction in observations.instructions:
        prompts.append(processor.plan.policy.spec.prompt.replace("{prompt}", instruction))
    items = {"state": list(observations.state), "wrist": list(observations.wrist), "scene": list(observations.scene)}
    return processor(prompts, **items)

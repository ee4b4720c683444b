"""Terra for vLLM: a Llama decoder whose inputs carry a learned position in space and time."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.sequence import IntermediateTensors

from mmkit import MultiModalModel

from .positions import SpatioTemporalEmbedding
from .spec import TERRA


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": {0: "b"},
        "positions": {0: "b"},
        "intermediate_tensors": {0: "b"},
        "inputs_embeds": {0: "b"},
    }
)
class TerraModel(LlamaModel):
    """Llama with the position added inside the compiled module, so that CUDA graphs see one input buffer."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.pos_embedding_spatio_temporal = SpatioTemporalEmbedding(config)
        self.last_position = config.num_spatio_embeddings * config.num_temporal_embeddings - 1

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
        if intermediate_tensors is None:  # the first rank of a pipeline
            if inputs_embeds is None:
                inputs_embeds = self.embed_input_ids(input_ids)
            positions_in_table = positions.clamp(max=self.last_position)  # profiling may run past the end
            inputs_embeds = inputs_embeds + self.pos_embedding_spatio_temporal(positions_in_table)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)


@TERRA.register
class LlamaActionForCausalLM(MultiModalModel, LlamaForCausalLM):
    """The published checkpoint, unchanged: its position tables move into the decoder when it loads."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.action_projection = ReplicatedLinear(config.action_dim, config.hidden_size, return_bias=False)

    def _init_model(
        self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] | None = None
    ) -> TerraModel:
        return TerraModel(vllm_config=vllm_config, prefix=prefix)

    def embed_actions(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the rows of waypoints.

        Args:
            actions: float (items, num_action_tokens, action_dim).

        Returns:
            Float (items, num_action_tokens, hidden_size).
        """
        return self.action_projection(actions.to(self.action_projection.weight.dtype))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a state dict with the published names."""
        return super().load_weights(move_position_tables(weights))


def move_position_tables(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, with the names that the position tables have in the decoder."""
    for name, weight in weights:
        if name.startswith("pos_embedding_spatio_temporal."):
            name = f"model.{name}"
        yield name, weight

"""The references of the examples as models that vLLM runs as they are."""

from typing import Any

import torch
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration

from examples.llava_like.spec import LLAVA_LIKE
from examples.series.configuration import WavesConfig
from examples.terra.configuration import LlamaActionConfig
from examples.terra.reference import LlamaActionForCausalLM
from examples.terra.spec import TERRA
from mmkit import serve_transformers
from mmkit.training import MultiModalMixin


class OneClassLlavaForConditionalGeneration(MultiModalMixin, LlavaForConditionalGeneration):
    """LLaVA of transformers."""

    mm_spec = LLAVA_LIKE

    def embed_image(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        return list(self.model.get_image_features(pixel_values=pixel_values).pooler_output)


class OneClassTerraForCausalLM(LlamaActionForCausalLM):
    """Terra's reference, whose positions in space and time are added outside the decoder."""

    mm_spec = TERRA

    def embed_actions(self, actions: torch.Tensor) -> torch.Tensor:
        return self.action_projection(actions.to(self.action_projection.weight.dtype))

    def forward(  # type: ignore[override]
        self, input_ids: Any = None, inputs_embeds: Any = None, position_ids: Any = None, **options: Any
    ) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids)
        last_position = self.config.num_spatio_embeddings * self.config.num_temporal_embeddings - 1
        positions = self.pos_embedding_spatio_temporal(position_ids.clamp(max=last_position))  # profiling runs past it
        return LlamaForCausalLM.forward(
            self, inputs_embeds=inputs_embeds + positions, position_ids=position_ids, **options
        )


def register() -> None:
    """Tell transformers and vLLM about the models."""
    serve_transformers(f"{__name__}:OneClassLlavaForConditionalGeneration")
    serve_transformers(f"{__name__}:OneClassTerraForCausalLM", LlamaActionConfig)
    serve_transformers("tests.engine.one_class:OneClassWavesForCausalLM", WavesConfig)

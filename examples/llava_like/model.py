"""LLaVA for vLLM: a CLIP vision tower, a projector, and a Llama that reads its rows among the token embeddings."""

from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.clip import CLIPVisionTransformer
from vllm.model_executor.models.interfaces import SupportsEagle, SupportsEagle3, SupportsLoRA, SupportsPP
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import (
    WeightsMapper,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from mmkit import MultiModalModel

from .spec import LLAVA_LIKE


class Projector(nn.Module):
    """Two layers from the vision tower's width to the language model's, split over the tensor-parallel processes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        quant = vllm_config.quant_config
        width = config.text_config.hidden_size
        bias = config.multimodal_projector_bias
        # columns, then rows: the processes exchange results once, after the second
        self.linear_1 = ColumnParallelLinear(
            config.vision_config.hidden_size,
            width,
            bias=bias,
            quant_config=quant,
            prefix=maybe_prefix(prefix, "linear_1"),
            return_bias=False,
        )
        self.act = get_act_fn(config.projector_hidden_act)
        self.linear_2 = RowParallelLinear(
            width, width, bias=bias, quant_config=quant, prefix=maybe_prefix(prefix, "linear_2"), return_bias=False
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear_2(self.act(self.linear_1(features)))


@LLAVA_LIKE.register
class LlavaLikeForConditionalGeneration(
    MultiModalModel, nn.Module, SupportsLoRA, SupportsPP, SupportsEagle, SupportsEagle3
):
    """Runs any LLaVA 1.5 checkpoint with a CLIP vision tower and one vision feature layer."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    supports_tower_connector_lora = True
    # from 0.28 on, vLLM sends the pixels as bytes
    supports_mm_device_do_normalize = True

    # to the names that the published checkpoints have, less "vision_model."
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.language_model.": "language_model.model.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            "lm_head.": "language_model.lm_head.",
            "vision_tower.vision_model.": "vision_tower.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        tower = config.vision_config.model_type
        depth = config.vision_config.num_hidden_layers
        layer = config.vision_feature_layer
        if tower != "clip_vision_model" or not isinstance(layer, int):
            raise ValueError(
                f"llava_like: expected a clip_vision_model and one vision_feature_layer, got a {tower} and {layer}."
            )
        # the vision tower ends at the layer whose output the projector takes
        num_layers = layer if layer >= 0 else depth + layer + 1
        unused_weights: dict[str, None] = {"vision_tower.post_layernorm.": None}
        for unused_layer in range(num_layers, depth):
            unused_weights[f"vision_tower.encoder.layers.{unused_layer}."] = None
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_prefix=unused_weights)
        with self._mark_tower_model(vllm_config, "image"):
            self.vision_tower = CLIPVisionTransformer(
                config.vision_config,
                quant_config=vllm_config.quant_config,
                num_hidden_layers_override=num_layers,
                require_post_norm=False,
                prefix=maybe_prefix(prefix, "vision_tower"),
            )
            self.multi_modal_projector = Projector(
                vllm_config=vllm_config, prefix=maybe_prefix(prefix, "multi_modal_projector")
            )
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=config.text_config,
                prefix=maybe_prefix(prefix, "language_model"),
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    def get_mm_mapping(self) -> MultiModelKeys:
        """Return the names of the parts, for LoRA."""
        return MultiModelKeys.from_string_field("language_model.", "multi_modal_projector.", "vision_tower.")

    def get_mm_lora_token_counts(self, *, num_mm_embeds: int, **_: Any) -> tuple[int, int]:
        """Return the positions that the tower and the projector compute for an image.

        The tower always has a class token.
        """
        return num_mm_embeds + (self.config.vision_feature_select_strategy == "default"), num_mm_embeds

    def embed_image(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode pixels (items, 3, image_size, image_size) to rows (items, rows, hidden_size)."""
        pixels = self.normalize_pixels(pixel_values)
        features = self.vision_tower(pixels, feature_select_strategy=self.config.vision_feature_select_strategy)
        return self.multi_modal_projector(features)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        return self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

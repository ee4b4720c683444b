"""LLaVA for vLLM: a CLIP vision tower, a projector, and a Llama that reads its rows among the token embeddings."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.clip import CLIPVisionTransformer
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    init_vllm_registered_model,
    is_pp_missing_parameter,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from mmkit import MultiModalModel

from .spec import LLAVA_LIKE


class Projector(nn.Module):
    """Two layers from the vision tower's width to the language model's, split over the tensor-parallel processes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        width, bias = config.text_config.hidden_size, config.multimodal_projector_bias
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
class LlavaLikeForConditionalGeneration(MultiModalModel, nn.Module, SupportsPP):
    """Runs any LLaVA 1.5 checkpoint with a CLIP vision tower and one vision feature layer."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

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

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What stands for an image in the text of a chat message."""
        return "<image>"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        tower, depth = config.vision_config.model_type, config.vision_config.num_hidden_layers
        layer = config.vision_feature_layer
        if tower != "clip_vision_model" or not isinstance(layer, int):
            raise ValueError(
                f"llava_like: expected a clip_vision_model and one vision_feature_layer, got a {tower} and {layer}."
            )
        used = layer if layer >= 0 else depth + layer + 1
        # the vision tower ends at the layer whose output the projector takes
        layers = (f"vision_tower.encoder.layers.{n}." for n in range(used, depth))
        self.unused_weights = ("vision_tower.post_layernorm.", *layers)
        with self._mark_tower_model(vllm_config, "image"):
            self.vision_tower = CLIPVisionTransformer(
                config.vision_config,
                quant_config=vllm_config.quant_config,
                num_hidden_layers_override=used,
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

    def embed_image(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Pixels (items, 3, image_size, image_size) to rows (items, rows, hidden_size)."""
        features = self.vision_tower(pixel_values, feature_select_strategy=self.config.vision_feature_select_strategy)
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

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a LLaVA checkpoint, with the names of any version of transformers.

        Raises:
            ValueError: weights are missing or unexpected. vLLM alone would take a fused weight for complete when one
                of its parts has come, and drop unexpected biases and vision layers.
        """
        mapper = self.hf_to_vllm_mapper | AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER
        names: set[str] = set()

        def used() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in mapper.apply(weights):
                if not name.startswith(self.unused_weights):
                    names.add(name)
                    yield name, weight

        loaded = AutoWeightsLoader(self).load_weights(used())
        if self.language_model.quant_config is None:
            # tied weights may come under either name
            missing = self._checkpoint_names(remove_duplicate=True) - names
            unexpected = {
                name
                for name in names - self._checkpoint_names(remove_duplicate=False)
                if not is_pp_missing_parameter(name, self)
            }
            if missing or unexpected:
                raise ValueError(
                    f"llava_like.load_weights: expected the weights of the model, got {sorted(missing)} missing "
                    f"and {sorted(unexpected)} unexpected."
                )
        return loaded

    def _checkpoint_names(self, remove_duplicate: bool) -> set[str]:
        """Names of the parameters, the parts of fused ones each by itself."""
        names = {name for name, _ in self.named_parameters(remove_duplicate=remove_duplicate)}
        for fused, parts in self.packed_modules_mapping.items():
            names = {name.replace(fused, part) for name in names for part in (parts if fused in name else [fused])}
        return names

"""The references of the examples as models that vLLM runs as they are."""

import re
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from examples.gallery.qwen2_vl import QWEN2_VL
from examples.llava_like.spec import LLAVA_LIKE
from examples.series.configuration import WavesConfig
from examples.series.encoder import PatchEncoder
from examples.series.spec import WAVES
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


class ShardedLlavaForConditionalGeneration(OneClassLlavaForConditionalGeneration):
    """The same, with vLLM's layers in the tower and the projector."""

    vllm_towers = ("model.vision_tower", "model.multi_modal_projector")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tp_plan.update(
            {
                "model.vision_tower.*mlp.fc1": "colwise",
                "model.vision_tower.*mlp.fc2": "rowwise",
                "model.multi_modal_projector.linear_1": "colwise",
                "model.multi_modal_projector.linear_2": "rowwise",
            }
        )


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


class OneClassQwen2VLForConditionalGeneration(MultiModalMixin, Qwen2VLForConditionalGeneration):
    """Qwen2-VL of transformers, with positions in three dimensions."""

    mm_spec = QWEN2_VL

    def embed_image(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> list[torch.Tensor]:
        return list(self.get_image_features(pixel_values, image_grid_thw).pooler_output)

    def embed_video(self, pixel_values_videos: torch.Tensor, video_grid_thw: torch.Tensor) -> list[torch.Tensor]:
        return list(self.get_video_features(pixel_values_videos, video_grid_thw).pooler_output)


class NestedConfig(PreTrainedConfig):
    """The config of a language model inside that of the whole."""

    model_type = "nested_waves"
    sub_configs: ClassVar = {"text_config": AutoConfig}
    channels = 1
    max_steps = 64
    steps_per_token = 4

    def __init__(self, text_config: Any = None, **options: Any) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config or AutoConfig.for_model("llama")
        super().__init__(**options)


class TrainedForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model inside, as in much code of research: it says nothing of a head."""

    config_class = NestedConfig

    def __init__(self, config: NestedConfig) -> None:
        super().__init__(config)
        sizes = WavesConfig(hidden_size=config.text_config.hidden_size, intermediate_size=64)
        self.encoder = PatchEncoder(sizes)
        self.language_model = AutoModelForCausalLM.from_config(config.text_config)
        self.post_init()

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **options: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        return self.language_model(inputs_embeds=inputs_embeds, **options)


class NestedForCausalLM(MultiModalMixin, TrainedForCausalLM):
    mm_spec = WAVES

    def embed_series(self, series: Any) -> list[torch.Tensor]:
        return [self.encoder(item) for item in series]


class HeadBesideForCausalLM(MultiModalMixin, PreTrainedModel, GenerationMixin):
    """A decoder with embeddings that its config shares with a head, and another head."""

    mm_spec = WAVES
    config_class = NestedConfig

    def __init__(self, config: NestedConfig) -> None:
        super().__init__(config)
        sizes = WavesConfig(hidden_size=config.text_config.hidden_size, intermediate_size=64)
        self.encoder = PatchEncoder(sizes)
        self.language_model = AutoModel.from_config(config.text_config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def forward(  # type: ignore[override]
        self, input_ids: Any = None, inputs_embeds: Any = None, **options: Any
    ) -> Any:
        is_dict = options.pop("return_dict", True)
        outputs = self.language_model(input_ids=input_ids, inputs_embeds=inputs_embeds, **options)
        logits = self.lm_head(outputs[0])
        return CausalLMOutputWithPast(logits=logits) if is_dict else (logits,)

    def embed_series(self, series: Any) -> list[torch.Tensor]:
        return [self.encoder(item) for item in series]


PARTS = ("vision_tower", "multi_modal_projector")
"""Of LLaVA, beside its language model."""

SHARDED = re.compile(r"(q_proj|k_proj|v_proj|fc1|linear_1)|(out_proj|fc2|linear_2)\.weight")
"""The weights of which each of two processes has a half, as vLLM and `tp_plan` shard layers."""


def count_weights(model: Any) -> dict[str, int]:
    """Return the numbers of weights of the parts."""
    counts = {}
    for name in PARTS:
        counts[name] = sum(weight.numel() for weight in model.model.get_submodule(name).parameters())
    return counts


def count_sharded_weights(model: Any) -> dict[str, int]:
    """Return the numbers of weights of the parts in each of two processes that share them."""
    counts = count_weights(model)
    for name in PARTS:
        for weight, values in model.model.get_submodule(name).named_parameters():
            if SHARDED.search(weight):
                counts[name] -= values.numel() // 2
    return counts


def count_served_weights(served: Any) -> dict[str, int]:
    """Return the numbers of weights of the parts of a model of vLLM, in this process."""
    counts = {}
    for name in PARTS:
        counts[name] = 0
        for module in served.model.model.get_submodule(name).modules():
            counts[name] += sum(weight.numel() for weight in module.parameters(recurse=False))
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                # on a CPU the parameter is empty, and the kernel has the values
                counts[name] -= module.weight.numel()
                counts[name] += module.input_size_per_partition * module.output_size_per_partition
    return counts


def register() -> None:
    """Tell transformers and vLLM about the models."""
    serve_transformers(f"{__name__}:OneClassLlavaForConditionalGeneration")
    serve_transformers(f"{__name__}:ShardedLlavaForConditionalGeneration")
    serve_transformers(f"{__name__}:OneClassQwen2VLForConditionalGeneration")
    serve_transformers(f"{__name__}:OneClassTerraForCausalLM", LlamaActionConfig)
    serve_transformers(f"{__name__}:NestedForCausalLM", NestedConfig)
    serve_transformers(f"{__name__}:HeadBesideForCausalLM", NestedConfig)
    serve_transformers("tests.engine.one_class:OneClassWavesForCausalLM", WavesConfig)

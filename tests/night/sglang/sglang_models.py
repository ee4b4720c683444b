"""Models for SGLang: of examples/llava_like, of `notes`, of Qwen2-VL, and one whose encoder is wrong for some items."""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from torch import nn
from transformers import CLIPVisionModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from examples.gallery.qwen2_vl import QWEN2_VL
from examples.llava_like.spec import LLAVA_LIKE
from examples.series.encoder import PatchEncoder
from examples.series.sglang_model import WavesForCausalLM
from examples.series.spec import WAVES
from mmkit.sglang_api import MultiModalModel, register

from .notes import NOTES, encode_record

__all__ = [
    "FaultyForCausalLM",
    "LlavaForConditionalGeneration",
    "NotesForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "WavesForCausalLM",
]


@register(NOTES)
class NotesForCausalLM(MultiModalModel, LlamaForCausalLM):
    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        self.encoder = PatchEncoder(config)

    def embed_notes(self, values: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        return [encode_record(self.encoder, record) for record in values]


@register(WAVES)
class FaultyForCausalLM(MultiModalModel, LlamaForCausalLM):
    """An encoder that returns a row too many for a series of 64 steps, and NaN for one of 63."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        self.encoder = PatchEncoder(config)

    def embed_series(self, series: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        rows = []
        for item in series:
            encoded = self.encoder(item)
            if len(item) == 64:
                encoded = torch.cat([encoded, encoded[:1]])
            elif len(item) == 63:
                encoded = encoded * torch.nan
            rows.append(encoded)
        return rows


@register(QWEN2_VL)
class Qwen2VLForConditionalGeneration(MultiModalModel, nn.Module):
    """The vision tower of transformers, and a Qwen2 of SGLang's, whose positions have three dimensions."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.visual = Qwen2VisionTransformerPretrainedModel._from_config(config.vision_config)
        config.text_config.tie_word_embeddings = config.tie_word_embeddings  # which Qwen2 reads there
        self.language_model = Qwen2ForCausalLM(config.text_config, quant_config)
        self.bind(config)

    def embed_image(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> list[torch.Tensor]:
        rows = self.visual(pixel_values, grid_thw=image_grid_thw).pooler_output
        counts = image_grid_thw.prod(-1) // self.visual.spatial_merge_size**2
        return list(rows.split(counts.tolist()))

    def embed_video(self, pixel_values_videos: torch.Tensor, video_grid_thw: torch.Tensor) -> list[torch.Tensor]:
        return self.embed_image(pixel_values_videos, video_grid_thw)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint with the published names of the weights."""
        of_language_model = []
        of_tower = {}
        for name, weight in weights:
            if name.startswith("visual."):
                of_tower[name.removeprefix("visual.")] = weight
            else:
                of_language_model.append((name, weight))
        self.language_model.load_weights(of_language_model)
        self.visual.load_state_dict(of_tower)


@register(LLAVA_LIKE)
class LlavaForConditionalGeneration(MultiModalModel, nn.Module):
    """A LLaVA checkpoint: the vision tower of transformers, and a Llama of SGLang's."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = config
        self.vision_tower = CLIPVisionModel(config.vision_config)
        self.linear_1 = nn.Linear(config.vision_config.hidden_size, config.text_config.hidden_size)
        self.linear_2 = nn.Linear(config.text_config.hidden_size, config.text_config.hidden_size)
        self.language_model = LlamaForCausalLM(config.text_config, quant_config)
        self.bind(config)

    def embed_image(self, pixel_values: torch.Tensor) -> torch.Tensor:
        output = self.vision_tower(pixel_values, output_hidden_states=True)
        features = output.hidden_states[self.config.vision_feature_layer][:, 1:]
        return self.linear_2(nn.functional.gelu(self.linear_1(features)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint with the published names of the weights."""
        of_language_model = []
        others = {}
        for name, weight in weights:
            if name.startswith("language_model."):
                of_language_model.append((name.removeprefix("language_model."), weight))
            else:
                others[name.removeprefix("multi_modal_projector.")] = weight
        self.language_model.load_weights(of_language_model)
        parameters = dict(self.named_parameters())
        for name, weight in others.items():
            for known in (name, name.replace("vision_model.", "")):
                if known in parameters:
                    parameters[known].data.copy_(weight)

"""A model whose class extends a language model, as repositories publish it: trained with transformers alone."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import CausalLMOutputWithPast

NUM_GROUPS = 8
NUM_ROWS = NUM_GROUPS + 1


class PointLLMConfig(LlamaConfig):
    model_type = "pointllm"


class PointBackbone(nn.Module):
    """Points to a row for each group of neighbours, and one for all of them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first_conv = nn.Sequential(nn.Conv1d(6, width, 1), nn.BatchNorm1d(width), nn.ReLU())
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Points (clouds, points, 6) to rows (clouds, rows, width)."""
        centers = points[:, :NUM_GROUPS, :3]
        nearest = torch.cdist(centers, points[..., :3]).topk(8, largest=False).indices
        clouds = torch.arange(len(points), device=points.device)[:, None, None]
        groups = points[clouds, nearest].flatten(0, 1)
        rows = self.first_conv(groups.transpose(1, 2)).amax(-1).unflatten(0, (len(points), NUM_GROUPS))
        return self.block(torch.cat([self.cls_token.expand(len(points), -1, -1), rows], 1))


class PointLLMLlamaModel(LlamaModel):
    config_class = PointLLMConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.point_backbone = PointBackbone()
        self.point_proj = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, config.hidden_size))
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        use_cache: Any = None,
        point_clouds: Any = None,
    ) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if point_clouds is not None and input_ids.shape[1] > 1:
            rows = self.point_proj(self.point_backbone(point_clouds))
            is_patch = input_ids == self.config.point_patch_token
            inputs_embeds = inputs_embeds.masked_scatter(is_patch[..., None], rows)
        return super().forward(
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )


class PointLLMLlamaForCausalLM(LlamaForCausalLM):
    config_class = PointLLMConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = PointLLMLlamaModel(config)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        use_cache: Any = None,
        point_clouds: Any = None,
        return_dict: Any = None,
    ) -> Any:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            point_clouds=point_clouds,
        )
        return CausalLMOutputWithPast(logits=self.lm_head(outputs[0]), past_key_values=outputs.past_key_values)

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if past_key_values is not None and past_key_values.get_seq_length() > 0:
            input_ids = input_ids[:, -1:]
        return {
            "input_ids": input_ids,
            "past_key_values": past_key_values,
            "use_cache": kwargs.get("use_cache"),
            "attention_mask": attention_mask,
            "point_clouds": kwargs.get("point_clouds"),
        }

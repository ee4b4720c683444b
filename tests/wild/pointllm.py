"""PointLLM at 77bf64c: pointllm/data/utils.py, pointllm/eval/PointLLM_chat.py, pointllm/conversation.py.

The published checkpoint is a Vicuna, with three tokens more. A marker `<point>` in the text becomes, before it is
tokenized, a start token, as many patch tokens as the point encoder has groups (one more for the class), and an end
token. Points are normalised when they are loaded.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.wild.pointllm import POINTLLM
from mmkit.training import MultiModalMixin

from .common import (
    ASSISTANT,
    SIZES,
    Expansion,
    Message,
    WildModel,
    collect_items,
    draw_text,
    make_item_part,
    make_llama_tokenizer,
    make_message,
    make_text_part,
    make_vicuna_template,
    write_vicuna,
)


class PointLLMConfig(LlamaConfig):
    """A Llama's, and what the published config and the config of the point encoder say."""

    model_type = "wild_pointllm"

    mm_use_point_start_end: bool = True
    point_token_len: int = 5
    num_group: int = 4
    max_points: int = 64
    DEFAULT_POINT_PATCH_TOKEN: str = "<point_patch>"
    DEFAULT_POINT_START_TOKEN: str = "<point_start>"
    DEFAULT_POINT_END_TOKEN: str = "<point_end>"


class PointLLMForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama, with an encoder that makes of a cloud the rows of its groups, and one of the whole."""

    mm_spec = POINTLLM
    config_class = PointLLMConfig

    def __init__(self, config: PointLLMConfig) -> None:
        super().__init__(config)
        self.encoder = nn.Linear(6, config.hidden_size)
        self.post_init()

    def embed_point(self, point_clouds: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        """Encode clouds (points, 6) to rows (point_token_len, hidden_size)."""
        rows = []
        for cloud in point_clouds:
            points = self.encoder(cloud)
            groups = torch.tensor_split(points, self.config.num_group)
            rows.append(torch.stack([points.mean(0)] + [group.amax(0) for group in groups]))
        return rows


def make_tokenizer() -> Any:
    special = ["<point_patch>", "<point_start>", "<point_end>", "<point>"]
    return make_llama_tokenizer(special, make_vicuna_template(ASSISTANT, r"'<point>\n'"))


def draw(rng: random.Random) -> list[Message]:
    """Draw one to three turns, with one cloud before the first question, as the demo has it."""
    messages = []
    turns = rng.randint(1, 3)
    for turn in range(turns):
        parts = [make_text_part(draw_text(rng) + "?")]
        if turn == 0:
            cloud = np.random.RandomState(rng.randrange(1000)).randn(rng.choice([4, 5, 17, 63, 64]), 6)
            parts.insert(0, make_item_part("point", cloud.astype(np.float32)))
        messages.append(make_message("user", *parts))
        if turn < turns - 1:
            messages.append(make_message("assistant", make_text_part(draw_text(rng) + "!")))
    return messages


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what PointLLM makes of a chat."""
    patches = config.DEFAULT_POINT_PATCH_TOKEN * config.point_token_len
    marks = {"point": patches + "\n"}
    if config.mm_use_point_start_end:
        marks["point"] = config.DEFAULT_POINT_START_TOKEN + patches + config.DEFAULT_POINT_END_TOKEN + "\n"
    prompt = write_vicuna(ASSISTANT, messages, marks)

    expansion = Expansion()
    (cloud,) = collect_items(messages)["point"]
    coordinates = cloud[:, :3] - np.mean(cloud[:, :3], axis=0)
    coordinates = coordinates / np.max(np.sqrt(np.sum(coordinates**2, axis=1)))
    expansion.add_item("point", point_clouds=torch.from_numpy(np.concatenate([coordinates, cloud[:, 3:]], axis=1)))
    patch = tokenizer.convert_tokens_to_ids(config.DEFAULT_POINT_PATCH_TOKEN)
    expansion.add_tokens(tokenizer(prompt).input_ids, patch)
    return expansion


def make_config(vocab_size: int) -> PointLLMConfig:
    return PointLLMConfig(vocab_size=vocab_size, **SIZES)


MODEL = WildModel(POINTLLM, "PointLLMForCausalLM", make_tokenizer, make_config, draw, expand)

"""OpenOneRec at 1f4a99e: README.md, data/onerec_data/sft, benchmarks/benchmark/tasks/v1_0/recommendation/utils.py.

A video is written as `<|sid_begin|><s_a_340><s_b_6566><s_c_5603><|sid_end|>` into the text of a Qwen's chat. So are
those in an answer, perhaps behind `<think>` and `</think>`.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.wild.onerec import ONEREC
from mmkit.training import MultiModalMixin

from .common import (
    SIZES,
    Expansion,
    Message,
    WildModel,
    draw_text,
    make_byte_tokenizer,
    make_item_part,
    make_message,
    make_qwen_template,
    make_text_part,
)

TEMPLATE = make_qwen_template("'<|video|>'")

CODEBOOK_SIZE = 16
"""Codes of each level; of the published model 8,192."""


class OneRecConfig(Qwen2Config):
    """A Qwen's, and the size of the code books."""

    model_type = "wild_onerec"

    codebook_size: int = CODEBOOK_SIZE


class OneRecForCausalLM(MultiModalMixin, Qwen2ForCausalLM):
    """A Qwen, as it is."""

    mm_spec = ONEREC
    config_class = OneRecConfig


def make_tokenizer() -> Any:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|sid_begin|>", "<|sid_end|>", "<|video|>"]
    tokenizer = make_byte_tokenizer(special, TEMPLATE, eos="<|im_end|>")
    for level in "abc":
        tokenizer.add_tokens([f"<s_{level}_{code}>" for code in range(CODEBOOK_SIZE)])
    return tokenizer


def draw(rng: random.Random) -> list[Message]:
    """Draw a history of videos, some of them twice."""
    parts = [make_text_part(draw_text(rng))]
    for _ in range(rng.randint(0, 5)):
        codes = [rng.choice([0, 1, CODEBOOK_SIZE - 1]) for _ in range(3)]
        parts.append(make_item_part("video", torch.tensor(codes)))
        parts.append(make_text_part(draw_text(rng)))
    return [make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what OpenOneRec makes of a chat."""
    expansion = Expansion()
    prompt = "<|im_start|>user\n"
    for part in messages[0]["content"]:
        if part["type"] == "text":
            prompt += part["text"]
        else:
            first, second, third = part["video"].tolist()
            prompt += f"<|sid_begin|><s_a_{first}><s_b_{second}><s_c_{third}><|sid_end|>"
            expansion.add_item("video")
    prompt += "<|im_end|>\n<|im_start|>assistant\n"
    expansion.add_ids(tokenizer(prompt).input_ids)
    return expansion


def make_config(vocab_size: int) -> OneRecConfig:
    return OneRecConfig(vocab_size=vocab_size, **SIZES)


MODEL = WildModel(ONEREC, "OneRecForCausalLM", make_tokenizer, make_config, draw, expand)

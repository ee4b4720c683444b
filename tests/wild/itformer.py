"""ITFormer at b80142f: dataset/dataset.py, models/TimeLanguageModel.py.

The question holds `<ts>`. Qwen's chat template writes it into a conversation, in which `<ts>` becomes 25 of Qwen's
`<|image_pad|>`; the rows of the series stand there. The ids of the question alone, with `<ts>` as text, are what the
series is read with.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.wild.itformer import ITFORMER
from mmkit.training import MultiModalMixin

from .common import (
    SIZES,
    Expansion,
    Message,
    WildModel,
    collect_items,
    draw_text,
    make_byte_tokenizer,
    make_item_part,
    make_message,
    make_qwen_template,
    make_text_part,
)

SYSTEM = "You are a helpful assistant."
TEMPLATE = make_qwen_template("'<|image_pad|>'")


class ITFormerConfig(Qwen2Config):
    """A Qwen's, and what the published code has in a file."""

    model_type = "wild_itformer"

    ts_pad_num: int = 25
    channels: int = 3
    max_steps: int = 32
    max_question: int = 200


class ITFormerForCausalLM(MultiModalMixin, Qwen2ForCausalLM):
    """A Qwen, with an encoder of series that reads the question."""

    mm_spec = ITFORMER
    config_class = ITFormerConfig

    def __init__(self, config: ITFormerConfig) -> None:
        super().__init__(config)
        self.steps = nn.Linear(config.channels, config.hidden_size)
        self.stages = nn.Embedding(5, config.hidden_size)
        self.queries = nn.Parameter(torch.randn(config.ts_pad_num, config.hidden_size))
        self.post_init()

    def embed_ts(self, ts_values: Any, query_ids: Any, stage: Any) -> list[torch.Tensor]:
        """Encode series (steps, channels) to rows (ts_pad_num, hidden_size), by the ids of their questions."""
        rows = []
        for series, ids, number in zip(ts_values, query_ids, stage, strict=True):
            states = self.steps(series)
            question = self.get_input_embeddings()(ids).mean(0)
            queries = self.queries + question + self.stages(number)
            rows.append(queries / 2 + (queries @ states.T / 8).softmax(-1) @ states)
        return rows


def make_tokenizer() -> Any:
    return make_byte_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"], TEMPLATE, eos="<|im_end|>"
    )


def draw(rng: random.Random) -> list[Message]:
    before = draw_text(rng)
    after = draw_text(rng) + "?"
    item = {
        "ts_values": torch.randn(
            rng.choice([1, 2, 31, 32]), 3, generator=torch.Generator().manual_seed(rng.randrange(99))
        ),
        "question": before + "<ts>" + after,
        "stage": torch.tensor(rng.randint(1, 4)),
    }
    parts = [make_text_part(before), make_item_part("ts", item), make_text_part(after)]
    return [make_message("system", make_text_part(SYSTEM)), make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what ITFormer makes of a question."""
    (item,) = collect_items(messages)["ts"]
    prompt = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{item['question']}<|im_end|>\n"
    prompt += "<|im_start|>assistant\n"
    prompt = prompt.replace("<ts>", "<|image_pad|>" * 25)
    query_ids = tokenizer(item["question"], add_special_tokens=False).input_ids

    expansion = Expansion()
    expansion.add_item("ts", ts_values=item["ts_values"], query_ids=torch.tensor(query_ids), stage=item["stage"])
    row = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    expansion.add_tokens(tokenizer(prompt, add_special_tokens=False).input_ids, row)
    return expansion


def make_config(vocab_size: int) -> ITFormerConfig:
    return ITFormerConfig(vocab_size=vocab_size, **SIZES)


MODEL = WildModel(ITFORMER, "ITFormerForCausalLM", make_tokenizer, make_config, draw, expand)

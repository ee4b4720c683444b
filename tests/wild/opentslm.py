"""OpenTSLM at 559c59f: src/opentslm/model/llm/OpenTSLMSP.py, src/opentslm/time_series_datasets/util.py.

A request is a text, pairs of a text and a series, and a text. Each text is tokenized by itself, and so begins with the
token that begins every text of Llama 3. The series are padded to the longest of the request, and that to whole patches
of four steps; each patch is a row, also where it is padding. A batch of one request is meant: in a larger one the
published code pads to the longest series of all requests.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.wild.opentslm import OPENTSLM
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
    make_text_part,
)

BEGIN = "<|begin_of_text|>"
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ bos_token + part.text if part.type == 'text' else '<series>' }}{% endfor %}{% endfor %}"
)


class OpenTSLMConfig(LlamaConfig):
    """A Llama's, and the published code's constants."""

    model_type = "wild_opentslm"

    patch_size: int = 4
    max_steps: int = 64
    max_text: int = 200


class OpenTSLMForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama, with an encoder of patches, each of which sees its predecessors."""

    mm_spec = OPENTSLM
    config_class = OpenTSLMConfig

    def __init__(self, config: OpenTSLMConfig) -> None:
        super().__init__(config)
        self.encoder = nn.Linear(config.patch_size, config.hidden_size)
        self.post_init()

    def embed_series(self, time_series: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        """Encode series (steps,) to rows (patches, hidden_size)."""
        rows = []
        for series in time_series:
            patches = self.encoder(series.reshape(-1, self.config.patch_size))
            rows.append(patches + patches.cumsum(0) / 4)
        return rows


def make_tokenizer() -> Any:
    special = [BEGIN, "<|end_of_text|>", "<series>", "<patch>"]
    return make_byte_tokenizer(special, TEMPLATE, bos=BEGIN, eos="<|end_of_text|>")


def draw(rng: random.Random) -> list[Message]:
    """Draw up to four series, half of the time all of one length."""
    parts = [make_text_part(draw_text(rng) + ":")]
    length = rng.choice([1, 3, 4, 5, 8, 63, 64])
    is_equal = rng.random() < 0.5
    for _ in range(rng.randint(1, 4)):
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        steps = length if is_equal else rng.choice([1, 3, 4, 5, 8, 63, 64])
        series = torch.randn(steps, generator=generator)
        parts.append(make_item_part("series", {"text": draw_text(rng) + ":", "series": series}))
    parts.append(make_text_part(draw_text(rng) + "?"))
    return [make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what OpenTSLM makes of a request."""
    before, *pairs, after = messages[0]["content"]
    longest = max(len(pair["series"]["series"]) for pair in pairs)
    patches = (longest + 3) // 4

    expansion = Expansion()
    expansion.add_ids(tokenizer(before["text"]).input_ids)
    for pair in pairs:
        expansion.add_ids(tokenizer(pair["series"]["text"]).input_ids)
        padded = torch.zeros(patches * 4)
        padded[: len(pair["series"]["series"])] = pair["series"]["series"]
        expansion.add_item("series", time_series=padded)
        expansion.add_rows(patches, tokenizer.convert_tokens_to_ids("<patch>"))
    expansion.add_ids(tokenizer(after["text"]).input_ids)
    return expansion


def make_config(vocab_size: int) -> OpenTSLMConfig:
    return OpenTSLMConfig(vocab_size=vocab_size, **SIZES)


MODEL = WildModel(OPENTSLM, "OpenTSLMForCausalLM", make_tokenizer, make_config, draw, expand)

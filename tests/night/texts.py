"""A language model that reads time series, each with a text in front of it.

`process` makes the ids of a whole item, among them those of the caller's text. The encoder has a bug: it returns one
row too few for a series that begins with `UNLUCKY`. A note becomes the ids of its text only.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig
from transformers import LlamaForCausalLM as HuggingFaceLlama
from vllm.model_executor.models.llama import LlamaForCausalLM

from mmkit import (
    Modality,
    ModelSpec,
    MultiModalModel,
    Record,
    Tensor,
    Text,
    batched,
    between,
    cfg,
    fields,
    item,
    replace,
    select,
    tok,
)
from tests.unit.test_vocabulary import make_tokenizer

UNLUCKY = 13.0
PATCH = 4


class SeriesWithTextsConfig(LlamaConfig):
    model_type = "series_with_texts"
    max_steps: int = 64


AutoConfig.register("series_with_texts", SeriesWithTextsConfig, exist_ok=True)


def process_series(items: list[dict[str, Any]], scope: Any) -> dict[str, Any]:
    """Return the values of each item, and its ids: a text, and a placeholder for each patch of the series."""
    values = []
    ids = []
    for part in items:
        num_patches = math.ceil(len(part["values"]) / PATCH)
        ids_of_text = list(scope.tok.text("{}", part["text"]))
        placeholders = [scope.tok["<ts_patch>"]] * num_patches
        values.append(part["values"])
        ids.append(torch.tensor(ids_of_text + placeholders))
    return {"values": values, "ids": ids}


TEXTS = ModelSpec(
    "texts",
    Modality(
        "ts",
        item=Record(values=Tensor((between(1, cfg.max_steps),)), text=Text(most=200)),
        layout=select(fields.ids, embed=tok["<ts_patch>"]),
        update=replace(tok["<ts>"]),
        fields={"values": batched(), "ids": batched(hidden=True)},
        process=process_series,
    ),
    Modality("note", item=Text(most=200), layout=tok.text("[{}]", item.text), update=replace(tok["<|image_1|>"])),
)


@TEXTS.register
class SeriesWithTextsForCausalLM(MultiModalModel, LlamaForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.encoder = nn.Linear(PATCH, vllm_config.model_config.hf_config.hidden_size)

    def embed_ts(self, values: Any) -> list[torch.Tensor]:
        return [self.encode(series) for series in values]

    def encode(self, series: torch.Tensor) -> torch.Tensor:
        """Return a row for each patch, or one row too few for an unlucky series."""
        padding = -len(series) % PATCH
        patches = nn.functional.pad(series, (0, padding)).reshape(-1, PATCH)
        rows: torch.Tensor = self.encoder(patches.to(self.encoder.weight.dtype))
        if series[0] == UNLUCKY:
            return rows[1:]
        return rows


def make_checkpoint(folder: Path) -> Path:
    """Write a checkpoint with random weights, and return its folder."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer("bytes")
    config = SeriesWithTextsConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
        dtype="float32",
        eos_token_id=tokenizer.eos_token_id,
    )
    model = HuggingFaceLlama(config)
    model.encoder = nn.Linear(PATCH, 64)
    model.save_pretrained(folder)
    # saving the model sets this to transformers' class
    config.architectures = ["SeriesWithTextsForCausalLM"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

"""A language model that reads time series with a text before each, all of a request as one item.

`process` lays out the ids of the whole item, those of the caller's texts among them. An encoder with a mistake: it
returns a row too few for a series that begins with `UNLUCKY`.
"""

from __future__ import annotations

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
    replace,
    select,
    tok,
)
from tests.unit.test_vocabulary import tokenizer

UNLUCKY = 13.0
PATCH = 4


class SeriesWithTextsConfig(LlamaConfig):
    model_type = "series_with_texts"
    max_steps: int = 64


AutoConfig.register("series_with_texts", SeriesWithTextsConfig, exist_ok=True)


def laid_out(items: list[dict[str, Any]], scope: Any) -> dict[str, Any]:
    """A text, and a placeholder for each patch of the series."""
    ids = []
    for one in items:
        patches = -(-len(one["values"]) // PATCH)
        text = scope.tok.text("{}", one["text"])
        ids.append(torch.tensor([*text, *[scope.tok["<ts_patch>"]] * patches]))
    return {"values": [one["values"] for one in items], "laid_out": ids}


TEXTS = ModelSpec(
    "texts",
    Modality(
        "ts",
        item=Record(values=Tensor((between(1, cfg.max_steps),)), text=Text(most=200)),
        layout=select(fields.laid_out, embed=tok["<ts_patch>"]),
        update=replace(tok["<ts>"]),
        fields={"values": batched(), "laid_out": batched(hidden=True)},
        process=laid_out,
    ),
)


@TEXTS.register
class SeriesWithTextsForCausalLM(MultiModalModel, LlamaForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.encoder = nn.Linear(PATCH, vllm_config.model_config.hf_config.hidden_size)

    def embed_ts(self, values: Any) -> list[torch.Tensor]:
        return [self.rows(series) for series in values]

    def rows(self, series: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(series, (0, -len(series) % PATCH)).reshape(-1, PATCH)
        rows: torch.Tensor = self.encoder(padded.to(self.encoder.weight.dtype))
        return rows[1:] if series[0] == UNLUCKY else rows


def make_checkpoint(folder: Path) -> Path:
    """A checkpoint with random weights."""
    torch.manual_seed(0)
    words = tokenizer("bytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = SeriesWithTextsConfig(
        vocab_size=len(words), **sizes, **heads, initializer_range=0.3, dtype="float32", eos_token_id=words.eos_token_id
    )
    model = HuggingFaceLlama(config)
    model.encoder = nn.Linear(PATCH, 64)
    model.save_pretrained(folder)
    config.architectures = ["SeriesWithTextsForCausalLM"]  # which saving the model sets to its own class
    config.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder

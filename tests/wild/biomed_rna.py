"""Biomed RNA at 78d2ba1: vllm/vllm_biomed_rna_plugin/biomed_rna.py.

A request is a prompt of one id, which says nothing, and a cell: numbers of genes, their logarithmic expression, and a
mask of the genes that are no padding. All three reach the model as they are, as int64, float32 and bool.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig

from tests.random_specs import write_checkpoint

GENES = 30
PROMPT = [1]


class BiomedRnaConfig(LlamaConfig):
    """What the published config says of the genes, as objects."""

    model_type = "wild_biomed_rna"

    max_genes: int = 12
    num_genes: int = GENES

    @property
    def fields(self) -> list[Any]:
        return [
            SimpleNamespace(field_name="expressions", vocab_size=4),
            SimpleNamespace(field_name="genes", vocab_size=self.num_genes),
        ]


AutoConfig.register(BiomedRnaConfig.model_type, BiomedRnaConfig, exist_ok=True)


def draw_cell(rng: random.Random) -> dict[str, list[Any]]:
    """Draw the genes of a cell; the numbers 0 to 2 are special."""
    count = rng.choice([1, 2, 11, 12])
    genes = [rng.randrange(3, GENES) for _ in range(count)]
    return {"gene_ids": genes, "expr_values": [rng.uniform(0, 9) for _ in range(count)]}


def read_cell(cell: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    """Return what the plugin sends to the model, but for the mask, in which all genes are."""
    return {
        "gene_ids": torch.as_tensor(cell["gene_ids"]).long(),
        "expr_values": torch.as_tensor(cell["expr_values"]).float(),
    }


def write_config(folder: Path) -> Path:
    """Write a checkpoint of a config alone, and return its folder."""
    architectures = ["MmkitMadeUp"]
    return write_checkpoint(
        folder, (), (), model_type=BiomedRnaConfig.model_type, vocab_size=2, architectures=architectures
    )

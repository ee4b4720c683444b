"""BioReason at 2e298be: bioreason/models/dl/processing_dl.py, chat_template_dl.py, bioreason/models/dna_llm.py.

The chat template of Qwen 3 writes a start token, one `<|dna_pad|>` and an end token for each sequence. The processor
tokenizes all sequences by the tokenizer of the DNA model, cut off at a length, and repeats each `<|dna_pad|>` for every
id that is not the padding; then the text is tokenized.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import EsmTokenizer, Qwen2Config, Qwen2ForCausalLM

from examples.wild.bioreason import BIOREASON
from mmkit.training import MultiModalMixin

from .common import (
    SIZES,
    Expansion,
    Message,
    WildModel,
    collect_items,
    draw_text,
    join_parts,
    make_byte_tokenizer,
    make_item_part,
    make_message,
    make_text_part,
)

CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% for part in message.content %}"
    "{% if part.type == 'dna' %}<|dna_start|><|dna_pad|><|dna_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The published template without tools, reasoning and numbers of sequences."""

LETTERS = 20
"""Ids at which a sequence is cut off; in the published code 2,048."""


class BioReasonConfig(Qwen2Config):
    """A Qwen's, and what the published code has as arguments."""

    model_type = "wild_bioreason"

    dna_model_name: str = ""
    dna_vocab_size: int = 80
    max_length_dna: int = LETTERS
    max_dna_letters: int = 100


class BioReasonForCausalLM(MultiModalMixin, Qwen2ForCausalLM):
    """A Qwen, with an encoder of the ids of a sequence."""

    mm_spec = BIOREASON
    config_class = BioReasonConfig

    def __init__(self, config: BioReasonConfig) -> None:
        super().__init__(config)
        self.encoder = nn.Embedding(config.dna_vocab_size, config.hidden_size)
        self.post_init()

    def embed_dna(self, dna_ids: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        """Encode ids (letters,) to rows (letters, hidden_size), each with its predecessors."""
        return [self.encoder(ids).cumsum(0) / 4 for ids in dna_ids]


def make_tokenizer() -> Any:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|dna_start|>", "<|dna_pad|>", "<|dna_end|>"]
    return make_byte_tokenizer(special, CHAT, eos="<|im_end|>")


@cache
def write_dna_tokenizer() -> str:
    """Write a tokenizer like the Nucleotide Transformer's, of three letters in place of six, and return its folder."""
    folder = Path(tempfile.mkdtemp(prefix="mmkit-dna-"))
    codons = ["".join(letters) for letters in itertools.product("ACGT", repeat=3)]
    words = ["<unk>", "<pad>", "<mask>", "<cls>"] + codons + list("ACGTN")
    (folder / "vocab.txt").write_text("\n".join(words))
    EsmTokenizer(str(folder / "vocab.txt"), eos_token=None).save_pretrained(folder)
    return str(folder)


def draw(rng: random.Random) -> list[Message]:
    """Draw up to four sequences among texts."""
    parts = [make_text_part(draw_text(rng))]
    for _ in range(rng.randint(0, 4)):
        length = rng.choice([1, 2, 3, 6, 19, 57, 58, 59, 60, 61, 100])
        parts.append(make_item_part("dna", "".join(rng.choices("ACGTN", k=length))))
        if rng.random() < 0.5:
            parts.append(make_text_part(draw_text(rng)))
    return [make_message("user", *parts)]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what BioReason makes of a chat."""
    dna_tokenizer = EsmTokenizer.from_pretrained(config.dna_model_name)
    (message,) = messages
    prompt = "<|im_start|>user\n" + join_parts(message, {"dna": "<|dna_start|><|dna_pad|><|dna_end|>"})
    prompt += "<|im_end|>\n<|im_start|>assistant\n"

    expansion = Expansion()
    pad = tokenizer.convert_tokens_to_ids("<|dna_pad|>")
    sequences = iter(collect_items(messages).get("dna", []))
    for token in tokenizer(prompt, add_special_tokens=False).input_ids:
        if token != pad:
            expansion.add_ids([token])
            continue
        ids = dna_tokenizer(next(sequences), truncation=True, max_length=LETTERS).input_ids
        expansion.add_item("dna", dna_ids=torch.tensor(ids))
        expansion.add_rows(sum(number != 1 for number in ids), pad)
    return expansion


def make_config(vocab_size: int) -> BioReasonConfig:
    return BioReasonConfig(vocab_size=vocab_size, dna_model_name=write_dna_tokenizer(), **SIZES)


MODEL = WildModel(BIOREASON, "BioReasonForCausalLM", make_tokenizer, make_config, draw, expand)

"""ECG-Byte at bfa1652: ecg_byte/data_loader.py, ecg_byte/utils/tokenizer_utils.py, ecg_byte/rust_bpe/src/lib.rs.

A signal is scaled by two percentiles of the training data, and each value becomes one of 26 letters. From left to
right the longest known sequence of letters becomes its number, and a number N the token `signal_N`. A prompt is the
token that begins a text, these tokens between two others, and the question, which is tokenized by itself.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM

from examples.wild.ecg_byte import ECG_BYTE
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
    make_text_part,
)

BEGIN = "<|begin_of_text|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<signal>' }}{% endfor %}{% endfor %}"
)
MERGES = [["nn", 256], ["mm", 257], ["nnn", 258], ["nnmm", 259], ["mn", 260], ["nnnnnn", 261], ["opq", 262]]
"""Sequences of letters and their numbers, of which the published code learns some thousand."""


class ECGByteConfig(LlamaConfig):
    """A Llama's, and what the published code has in files."""

    model_type = "wild_ecg_byte"

    leads: int = 2
    max_steps: int = 40
    percentile_1: float = -1.5
    percentile_99: float = 1.5
    merges: Any = None


class ECGByteForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama, as it is."""

    mm_spec = ECG_BYTE
    config_class = ECGByteConfig


def make_tokenizer() -> Any:
    special = [BEGIN, "<|end_of_text|>", "<sig_start>", "<sig_end>", "<signal>"]
    tokenizer = make_byte_tokenizer(special, TEMPLATE, bos=BEGIN, eos="<|end_of_text|>")
    numbers = list(range(ord("a"), ord("z") + 1)) + [number for _, number in MERGES]
    tokenizer.add_tokens([f"signal_{number}" for number in numbers])
    return tokenizer


def draw(rng: random.Random) -> list[Message]:
    """Draw a smooth signal, so that letters repeat, and a question."""
    steps = np.random.RandomState(rng.randrange(1000)).randn(2, rng.choice([1, 2, 7, 39, 40]))
    signal = np.cumsum(steps, axis=1) * rng.choice([0.01, 0.1, 1.0])
    return [make_message("user", make_item_part("ecg", signal), make_text_part(draw_text(rng) + "?"))]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what ECG-Byte makes of a question."""
    (signal,) = collect_items(messages)["ecg"]
    low = config.percentile_1 - 0.5
    high = config.percentile_99 + 0.5
    clipped = np.clip((signal - low) / (high - low + 1e-6), 0, 1)
    levels = np.minimum(np.floor(clipped * 26), 25).astype(np.uint8)
    letters = "".join("abcdefghijklmnopqrstuvwxyz"[level] for level in levels.flatten())

    numbers = []
    while letters:
        matches = [(len(piece), number) for piece, number in MERGES if letters.startswith(piece)]
        length, number = max(matches, default=(1, ord(letters[0])))
        numbers.append(number)
        letters = letters[length:]

    expansion = Expansion()
    expansion.add_item("ecg")
    expansion.add_ids([tokenizer.bos_token_id])
    names = ["<sig_start>"] + [f"signal_{number}" for number in numbers] + ["<sig_end>"]
    expansion.add_ids(tokenizer.convert_tokens_to_ids(names))
    expansion.add_ids(tokenizer(messages[0]["content"][1]["text"], add_special_tokens=False).input_ids)
    return expansion


def make_config(vocab_size: int) -> ECGByteConfig:
    return ECGByteConfig(vocab_size=vocab_size, merges=MERGES, **SIZES)


MODEL = WildModel(ECG_BYTE, "ECGByteForCausalLM", make_tokenizer, make_config, draw, expand)

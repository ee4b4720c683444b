"""SALMONN, branch salmonn at a58bba7: models/salmonn.py, dataset.py, configs/config.yaml.

A sound is padded to a second, or cut off after thirty; then come Whisper's spectrogram of thirty seconds and the
samples. The frames of Whisper and BEATs stand side by side, padded to the longer, and a window goes over them. The
prompt is cut at `<SpeechHere>`, and both halves are tokenized by themselves, behind one <s>.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, WhisperFeatureExtractor

from examples.wild.salmonn import SALMONN
from mmkit.training import MultiModalMixin

from .common import (
    SIZES,
    Expansion,
    Message,
    WildModel,
    collect_items,
    draw_text,
    join_parts,
    make_item_part,
    make_llama_tokenizer,
    make_message,
    make_text_part,
)

RATE = 16_000
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}USER: {% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<Speech><SpeechHere></Speech> ' }}{% endfor %}{% endfor %}"
    "{{ '\n' }}ASSISTANT:"
)


class SalmonnConfig(LlamaConfig):
    """A Llama's, and the published model's; it hears two seconds in place of thirty."""

    model_type = "wild_salmonn"

    second_per_window: float = 0.333333
    second_stride: float = 0.333333
    num_speech_query_token: int = 1
    num_mel_bins: int = 8
    max_seconds: int = 2
    max_upload_seconds: int = 4
    speech_token: str = "<speech_row>"


class SalmonnForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama, with two encoders of frames, and a row of each window."""

    mm_spec = SALMONN
    config_class = SalmonnConfig

    def __init__(self, config: SalmonnConfig) -> None:
        super().__init__(config)
        self.whisper = nn.Linear(config.num_mel_bins, config.hidden_size)
        self.beats = nn.Linear(320, config.hidden_size)
        self.post_init()

    def embed_speech(self, raw_wav: Any, spectrogram: Any) -> list[torch.Tensor]:
        """Encode sounds to rows (windows, hidden_size)."""
        width = round(50 * self.config.second_per_window)
        rows = []
        for samples, bins in zip(raw_wav, spectrogram, strict=True):
            speech = self.whisper(bins.T[::2])
            sounds = self.beats(samples[: len(samples) // 320 * 320].reshape(-1, 320))
            frames = speech.clone()
            frames[: len(sounds)] += sounds
            rows.append(frames.unfold(0, width, width).mean(-1))
        return rows


def make_tokenizer() -> Any:
    return make_llama_tokenizer(["<speech_row>", "<SpeechHere>"], TEMPLATE)


def draw(rng: random.Random) -> list[Message]:
    """Draw a sound between nearly nothing and twice of what the model hears."""
    length = rng.choice([1, 400, 15_999, 16_000, 16_001, 31_999, 32_000, 32_001, 64_000])
    samples = np.random.RandomState(rng.randrange(1000)).uniform(-1, 1, length).astype(np.float32)
    return [make_message("user", make_item_part("speech", samples), make_text_part(draw_text(rng) + "?"))]


def expand(tokenizer: Any, config: Any, messages: list[Message]) -> Expansion:
    """Return what SALMONN makes of a question."""
    prompt = "USER: " + join_parts(messages[0], {"speech": "<Speech><SpeechHere></Speech> "}) + "\nASSISTANT:"
    before, after = prompt.split("<SpeechHere>")
    (samples,) = collect_items(messages)["speech"]
    if len(samples) < RATE:
        samples = np.concatenate([samples, np.zeros(RATE - len(samples), np.float32)])
    samples = samples[: RATE * config.max_seconds]
    extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=config.max_seconds)
    spectrogram = extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"].squeeze()

    # as many frames as Whisper's encoder has, in windows of a third of a second
    frames = 50 * config.max_seconds
    windows = 0
    start = 0
    while start + 17 <= frames:
        windows += 1
        start += 17

    expansion = Expansion()
    expansion.add_ids([tokenizer.bos_token_id])
    expansion.add_ids(tokenizer(before, add_special_tokens=False).input_ids)
    expansion.add_item("speech", raw_wav=torch.from_numpy(samples), spectrogram=spectrogram)
    expansion.add_rows(windows, tokenizer.convert_tokens_to_ids("<speech_row>"))
    expansion.add_ids(tokenizer(after, add_special_tokens=False).input_ids)
    return expansion


def make_config(vocab_size: int) -> SalmonnConfig:
    return SalmonnConfig(vocab_size=vocab_size, **SIZES)


MODEL = WildModel(SALMONN, "SalmonnForCausalLM", make_tokenizer, make_config, draw, expand)

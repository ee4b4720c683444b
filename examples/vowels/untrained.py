"""What the training begins with: a tokenizer and a freshly initialised model."""

from typing import Any

import numpy as np
import torch

from .recordings import NUM_SPEAKERS, QUESTION, load_recordings

SPECIAL = ["<unk>", "<s>", "</s>", "<recording>", "<frame>"]
WORDS = [*QUESTION.split(), "speaker"] + [str(speaker) for speaker in range(1, NUM_SPEAKERS + 1)]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<recording>' }} {% endfor %}{% endfor %}"
)
"""Writes the target of each recording where the recording stands in the message."""


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per word, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(SPECIAL + WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(seed: int, vocab_size: int) -> Any:
    """Return a freshly initialised model of 0.2 million parameters."""
    from .configuration import VowelsConfig
    from .model import VowelsForCausalLM

    frames = np.concatenate([recording.frames for recording in load_recordings("train")])
    config = VowelsConfig(
        means=frames.mean(0).tolist(),
        deviations=frames.std(0).tolist(),
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,  # the smallest that vLLM's attention on CPUs takes
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    return VowelsForCausalLM(config)

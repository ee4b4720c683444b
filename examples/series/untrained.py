"""What the training begins with: a tokenizer and a freshly initialised model."""

from typing import Any

import torch

from .waves import PERIODS, SHAPES

SPECIAL = ["<unk>", "<s>", "</s>", "<series>", "<patch>"]
WORDS = ["is", "a", "wave", "of", "period", "."] + list(SHAPES) + [str(period) for period in PERIODS]


def make_tokenizer() -> Any:
    """Return a tokenizer with one token per word."""
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
    )


def make_model(seed: int, vocab_size: int) -> Any:
    """Return a freshly initialised model of 0.3 million parameters."""
    from .configuration import WavesConfig
    from .reference import WavesForCausalLM

    config = WavesConfig(
        vocab_size=vocab_size,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
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
    return WavesForCausalLM(config)

"""What the training begins with: a tokenizer and a freshly initialised model."""

from collections.abc import Sequence
from typing import Any

import torch

from .world import COLOURS

WORDS = ["touch", *COLOURS]


def make_tokenizer() -> Any:
    """Return the tokenizer. The ids of actions come after its own, and have no text."""
    return make_word_tokenizer(["<state>", "<wrist>", "<scene>"], WORDS)


def make_word_tokenizer(targets: list[str], words: Sequence[str] = ()) -> Any:
    """Return a tokenizer with one token for each target of items and each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", *targets, *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=targets,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int, num_words: int) -> Any:
    """Return a freshly initialised model of 0.4 million parameters for a tokenizer of so many tokens."""
    from .configuration import STATISTICS, ReacherConfig
    from .model import ReacherForCausalLM

    config = ReacherConfig(
        norm_stats=STATISTICS,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,  # the smallest that vLLM's attention on CPUs takes
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        sharpness=5.0,  # with 1 it takes about twice as many steps to find the discs
        initializer_range=0.06,  # about that of torch, which the encoders learn from in fewer steps
        tie_word_embeddings=False,
        dtype="float32",
    )
    config.vocab_size = num_words + config.n_action_bins
    torch.manual_seed(seed)
    model = ReacherForCausalLM(config)
    model.generation_config.suppress_tokens = list(range(num_words))  # as vLLM does for the output
    return model

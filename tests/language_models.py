"""Small pretrained language models, with what `mmkit new --language-model` meets in the large ones."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SENTENCES = [f"channel {channel} {verb}" for channel in range(4) for verb in ("falls", "rises")]


def train_language_model(
    folder: Path, config_class: Any, *, chat_template: str | None, steps: int = 100, **options: Any
) -> Path:
    """Train a language model on the answers of the data that `mmkit new` writes, and return its folder."""
    tokenizer = train_tokenizer(chat_template)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        dtype="float32",
        **({"eos_token_id": 2} | options),
    )
    model = AutoModelForCausalLM.from_config(config)

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(steps):
        sentence = SENTENCES[step % len(SENTENCES)]
        ids = torch.tensor([tokenizer.encode(sentence + "<|im_end|>")])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=chat_template)

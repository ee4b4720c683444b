"""BioReason reads sequences of DNA beside a question, and reasons about what a variant does.

Source: https://github.com/bowang-lab/BioReason at 2e298be, paper arXiv 2505.23579, Apache 2.0.

A sequence is tokenized by the tokenizer of another model, that of the DNA encoder, and cut off.
"""

from typing import Any

from transformers import AutoTokenizer

from mmkit import Modality, ModelSpec, Text, batched, cfg, fields, hf, later


def load_dna_tokenizer(model_name: str) -> Any:
    """Return the tokenizer of the DNA encoder."""
    return AutoTokenizer.from_pretrained(model_name)


def repeat_unknown_base(length: int) -> str:
    """Return the sequence with the most tokens: one for each letter."""
    return "N" * length


BIOREASON = ModelSpec(
    "bioreason",
    Modality(
        "dna",
        item=Text(cfg.max_dna_letters, largest=later(repeat_unknown_base)(cfg.max_dna_letters)),
        process=hf(
            later(load_dna_tokenizer)(cfg.dna_model_name),
            inputs={"dna": "text"},
            outputs={"input_ids": "dna_ids"},
            kwargs={"truncation": True, "max_length": cfg.max_length_dna},
            one_by_one=True,
        ),
        fields={"dna_ids": batched(dtype="int64")},
        placeholder="<|dna_pad|>",
        tokens=fields.dna_ids.shape[0],
    ),
    tokenization_kwargs={"add_special_tokens": False},
)

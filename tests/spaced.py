"""Tokenizers that write a space before a text, as that of Llama 2 does, made of a few tokens."""

from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

MERGES = [
    "▁ <",
    ". <",
    "g r",
    "gr a",
    "p h",
    "gra ph",
    "> )",
    "> <",
    "▁ a",
    "▁ ▁",
    ". .",
    ". .<",
    "▁< gra",
    "ph >",
    "x .",
]
"""Tokens that reach across an edge of ``<graph>``, or do so where it stands alone."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def spaced(prepend: Literal["always", "first", "never"], *, strip: bool = True) -> Any:
    """A tokenizer that begins a text with a space, as that of Llama 2 does: every stretch between special tokens, only
    the first one, or none."""
    names = ["<unk>", "<s>", "<p>", *BYTES, *"▁<>graphx.:)", *(merge.replace(" ", "") for merge in MERGES)]
    merges = [tuple(merge.split()) for merge in MERGES]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.BPE(numbers, merges, byte_fallback=True, unk_token="<unk>"))
    written: list[Any] = [normalizers.Prepend("▁")] if prepend == "always" else []
    backend.normalizer = normalizers.Sequence([*written, normalizers.Replace(" ", "▁")])
    if prepend == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>", "unk_token": "<unk>", "additional_special_tokens": ["<p>"]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)

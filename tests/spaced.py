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
"""Tokens that reach across an edge of ``<graph>``, or do so where nothing else stands."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def make_spaced_tokenizer(prepend: Literal["always", "first", "never"], *, strip: bool = True) -> Any:
    """Return a tokenizer that writes a space before a text, as that of Llama 2 does.

    Args:
        prepend: before every stretch between special tokens, only before the first one, or never.
        strip: whether decoding removes that space.
    """
    backend = Tokenizer(make_model())
    normalize = [normalizers.Replace(" ", "▁")]
    if prepend == "always":
        normalize.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(normalize)
    if prepend == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        decode.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decode)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="<unk>", additional_special_tokens=["<p>"]
    )


def make_model() -> Any:
    """Return byte-pair encoding of a few characters, with the merges above."""
    tokens = ["<unk>", "<s>", "<p>"] + BYTES + list("▁<>graphx.:)")
    merges: list[tuple[str, str]] = []
    for merge in MERGES:
        first, second = merge.split()
        merges.append((first, second))
        tokens.append(first + second)
    vocabulary: dict[str, int] = {}
    for token in tokens:
        vocabulary.setdefault(token, len(vocabulary))
    return models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")

"""ECG-Byte reads an electrocardiogram as a text of 26 letters, whose frequent sequences are tokens; it has no encoder.

Source: https://github.com/willxxy/ECG-Byte at bfa1652, paper arXiv 2412.14373, MIT.

The config has what the published code keeps in files: the percentiles by which signals are scaled, and the merges, as
pairs of letters and the number of their token.
"""

from collections.abc import Sequence

import torch

from mmkit import Modality, ModelSpec, Scope, Tensor, batched, between, cfg, fields, literal, replace, tok

LETTERS = 26
FIRST_LETTER = ord("a")


def write_letters(signal: torch.Tensor, low: float, high: float) -> str:
    """Write each value of a signal (leads, steps) as one of 26 letters, lead by lead."""
    scaled = (signal - (low - 0.5)) / ((high + 0.5) - (low - 0.5) + 1e-6)
    levels = (scaled.clamp(0, 1) * LETTERS).floor().clamp(max=LETTERS - 1)
    return "".join(chr(FIRST_LETTER + int(level)) for level in levels.flatten())


def merge(letters: str, merges: dict[str, int]) -> list[int]:
    """Return the numbers of tokens: from left to right the longest sequence that is a token, or the letter's byte."""
    longest = max(map(len, merges), default=1)
    numbers = []
    start = 0
    while start < len(letters):
        for length in range(longest, 0, -1):
            piece = letters[start : start + length]
            if piece in merges:
                numbers.append(merges[piece])
                break
        else:
            piece = letters[start]
            numbers.append(ord(piece))
        start += len(piece)
    return numbers


def tokenize(items: Sequence[torch.Tensor], scope: Scope) -> dict[str, list[torch.Tensor]]:
    """Return the ids of signals."""
    merges = dict(scope.cfg.merges)
    codes = []
    for signal in items:
        letters = write_letters(signal, scope.cfg.percentile_1, scope.cfg.percentile_99)
        ids = [scope.tok["signal_{}", number] for number in merge(letters, merges)]
        codes.append(torch.tensor(ids))
    return {"codes": codes}


ECG_BYTE = ModelSpec(
    "ecg_byte",
    Modality(
        "ecg",
        item=Tensor((cfg.leads, between(1, cfg.max_steps)), "float64"),
        process=tokenize,
        fields={"codes": batched(dtype="int64")},
        # no embed(): the signal becomes ids of the vocabulary
        layout=literal(tok["<sig_start>"], fields.codes, tok["<sig_end>"]),
        update=replace(tok["<signal>"]),
    ),
)

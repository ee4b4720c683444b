"""A long sequence of words in few words: ``31 31 7 31 31 7`` as ``(31 ×2 7) ×2``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RUN = re.compile(r"(?<![^ ])([^ ]+ )\1+")
"""A word at least twice."""

_BLOCKS = re.compile(r"(?<![^ ])((?:[^ ]+ ){2,24}?)\1+")
"""A block of words at least twice. Longer blocks are searched in vain at a cost."""

_JOINT = "\0"
"""Stands for a space within a word, so that the patterns see one word."""


def fold_repetitions(words: Iterable[str]) -> list[str]:
    """Return words with a count in place of repetitions."""
    text = ""
    for word in words:
        text += word.replace(" ", _JOINT) + " "
    text = _RUN.sub(_count_repetitions, text)
    before = ""
    while text != before:  # blocks of blocks, from the inside to the outside
        before = text
        text = _BLOCKS.sub(_count_repetitions, text)
    return [word.replace(_JOINT, " ") for word in text.split()]


def _count_repetitions(match: re.Match[str]) -> str:
    """Return a block of words and its count, as one word."""
    block = match[1].rstrip()
    count = len(match[0]) // len(match[1])
    if " " in block:
        block = f"({block})"
    return f"{block} ×{count}".replace(" ", _JOINT) + " "

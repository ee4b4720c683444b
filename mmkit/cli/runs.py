"""A long sequence of ids in few words: runs of one id, and blocks of runs that are repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Run:
    """One id, some times in a row."""

    token: int
    embeds: bool
    count: int


@dataclass(frozen=True)
class Block:
    """Some runs, several times in a row: rows, tiles, frames."""

    body: tuple[Runs, ...]
    count: int


Runs: TypeAlias = Run | Block


def runs(ids: Sequence[int], mask: Sequence[Any]) -> list[Runs]:
    """Ids, and which of them receive encoder rows, as runs and repeated blocks of runs."""
    flags = map(bool, mask)
    grouped = ((key, sum(1 for _ in same)) for key, same in groupby(zip(ids, flags, strict=True)))
    return _folded([Run(token, embeds, count) for (token, embeds), count in grouped])


_LONGEST_BLOCK = 24  # runs of one row or tile; longer periods are searched in vain at a cost


def _folded(sequence: list[Runs]) -> list[Runs]:
    """A sequence with its repetitions as blocks, and these likewise, until there is none left."""
    folded: list[Runs] = []
    position = 0
    while position < len(sequence):
        length, count = _repetition(sequence, position)
        body = sequence[position : position + length]
        folded += [Block(tuple(_folded(body)), count)] if count > 1 else body
        position += length * count
    return folded if folded == sequence else _folded(folded)


def _repetition(sequence: list[Runs], start: int) -> tuple[int, int]:
    """Length of the block that starts here and covers most by repetition, and how often it stands
    there."""
    best = 1, 1
    for length in range(1, min(_LONGEST_BLOCK, (len(sequence) - start) // 2) + 1):
        block, count = sequence[start : start + length], 1
        while sequence[(at := start + count * length) : at + length] == block:
            count += 1
        if count > 1 and length * count > best[0] * best[1]:
            best = length, count
    return best


def notation(sequence: Sequence[Runs], name: Callable[[int], str] = str) -> str:
    """Runs as text: ``(31 ×4, 7) ×3, 1``."""
    parts = []
    for run in sequence:
        text = name(run.token) if isinstance(run, Run) else f"({notation(run.body, name)})"
        parts.append(text if run.count == 1 else f"{text} ×{run.count}")
    return ", ".join(parts) or "nothing"

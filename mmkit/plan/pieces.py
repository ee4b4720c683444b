"""Text around items, tokenized as a whole and in pieces.

vLLM, and mmkit, tokenize a prompt as a whole. Much code for training cuts it at its items and
tokenizes each piece by itself, as LLaVA's. Some tokenizers then make other tokens: those that write
a space before every text, and those that do not know the target as a token and merge it with its
neighbours. A model that was trained in one way then reads other ids in the other way, and nothing
fails. `compare_pieces` finds out whether the two differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import MmkitError
from ..language.layout import Replace, Target
from ..language.vocabulary import Vocabulary
from .plan import Plan
from .text_targets import TextTargets

TEXTS_BEFORE = ("", "a", "a ", "a  ", "a\n", "a.", "a:", "(", "1", "<", "'", "漢", "USER: ", "\n")
TEXTS_AFTER = (
    "",
    "a",
    " a",
    "  a",
    "\na",
    "\n\na",
    "\n",
    " ",
    ".",
    ". A",
    "'s",
    ")",
    "1",
    ">",
    "漢",
)
"""What may stand beside an item: each class of characters that tokenizers cut texts at."""

TEXTS_BETWEEN = ("", " ", "\n", "a", " a ", ", ")
"""What may stand between two items."""


class PieceDifference(NamedTuple):
    """A prompt that has other ids in pieces.

    Attributes:
        prompt: the text.
        whole: its ids as mmkit reads it, with the ids of targets where the items stand.
        pieces: the ids of its pieces, with the ids of targets between them.
    """

    prompt: str
    whole: list[int]
    pieces: list[int]


class PieceComparison(NamedTuple):
    """How texts around items are tokenized.

    Attributes:
        num_prompts: the prompts that were tokenized in both ways.
        differences: those that have other ids in pieces, in the order in which they were tried.
    """

    num_prompts: int
    differences: list[PieceDifference]


def compare_pieces(plan: Plan, prompts: Sequence[str] = ()) -> PieceComparison | None:
    """Tokenize prompts with targets as a whole and in pieces, and compare the ids.

    The tokens with which the tokenizer surrounds a text are left out of both.

    Args:
        plan: the bound spec.
        prompts: texts with targets; by default some hundred short ones.

    Returns:
        None where no caller writes a target into a text: without a tokenizer, with `insert` and
        `already_expanded`, and where targets have no text.
    """
    if plan.vocabulary is None:
        return None
    targets = _find_targets(plan, plan.vocabulary)
    if not targets:
        return None
    num_prompts = 0
    differences: list[PieceDifference] = []
    for prompt in prompts or _make_prompts(list(targets)):
        num_prompts += 1
        whole = _encode_whole(plan, plan.vocabulary, prompt, targets)
        pieces = _encode_pieces(plan, prompt, targets)
        if whole != pieces:
            differences.append(PieceDifference(prompt, whole, pieces))
    return PieceComparison(num_prompts, differences)


def _find_targets(plan: Plan, vocabulary: Vocabulary) -> dict[str, Target]:
    """Return the target of a first item of each modality, by its text."""
    targets: dict[str, Target] = {}
    for name, modality in plan.modalities.items():
        if not isinstance(modality.updates[0], Replace):
            continue
        smallest = modality.item.small() or modality.item.candidates()
        try:
            target = tuple(plan.spell({name: [smallest[0]]}))
        except MmkitError:  # a Hugging Face processor that was not loaded, or that refuses the item
            continue
        text = _write_target(target, vocabulary)
        if text:
            targets.setdefault(text, target)
    return targets


def _write_target(target: Target, vocabulary: Vocabulary) -> str:
    """Return the text that a caller writes for a target; empty where it has none."""
    if len(target) > 1:
        return vocabulary.decode_target(target)
    texts = vocabulary.find_texts(target)
    return texts[0] if texts else ""


def _make_prompts(texts: Sequence[str]) -> Iterator[str]:
    """Yield prompts with one and with two targets."""
    for text in texts:
        for before in TEXTS_BEFORE:
            for after in TEXTS_AFTER:
                yield before + text + after
        for between in TEXTS_BETWEEN:
            for other in texts:
                yield "a " + text + between + other + " a"


def _encode_whole(
    plan: Plan, vocabulary: Vocabulary, prompt: str, targets: Mapping[str, Target]
) -> list[int]:
    """Return the ids of a prompt that is tokenized as a whole, as items are placed in it."""
    ids = plan.encode(prompt, add_special_tokens=False)
    text_targets = TextTargets(targets.values(), vocabulary)
    return text_targets.restore(ids, text_targets.find({}))


def _encode_pieces(plan: Plan, prompt: str, targets: Mapping[str, Target]) -> list[int]:
    """Return the ids of a prompt of which each piece of text is tokenized by itself."""
    texts = sorted(targets, key=len, reverse=True)  # of two at one position, the longer
    pattern = "|".join([re.escape(text) for text in texts])
    ids: list[int] = []
    end = 0
    for match in re.finditer(pattern, prompt):
        ids += plan.encode(prompt[end : match.start()], add_special_tokens=False)
        ids += targets[match[0]]
        end = match.end()
    return ids + plan.encode(prompt[end:], add_special_tokens=False)

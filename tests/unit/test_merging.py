"""Runs of one character that a tokenizer has as tokens."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmkit import SpecError
from mmkit.language.vocabulary import Vocabulary
from mmkit.plan.merging import MergedRuns
from mmkit.plan.placement import ItemTokens, PlacedPrompt, Placement

from .common import Tokenizer

STAR = ord("*")


class RunTokenizer(Tokenizer):
    """One, two and three stars in a row are the tokens 42, 190 and 191; a longer run begins with threes."""

    def encode(self, text, add_special_tokens):
        ids = []
        for part in re.findall(r"\*{1,3}|.", text):
            ids.append(ord(part) if len(part) == 1 else 188 + len(part))
        return ids


RUNS = MergedRuns("*", Vocabulary(RunTokenizer()), "spec")


def test_the_tokens_of_runs():
    assert RUNS.tokens_by_length == {1: STAR, 2: 190, 3: 191}
    assert RUNS.split([65, 191, 66, 190]) == [65, STAR, STAR, STAR, 66, STAR, STAR]
    assert MergedRuns(None, None, "spec").split([STAR, 190]) == [STAR, 190]
    with pytest.raises(SpecError, match="a character that the tokenizer has as a token, got 'ab'"):
        MergedRuns("ab", Vocabulary(RunTokenizer()), "spec")


@given(st.text(alphabet="a*", max_size=12), st.data())
def test_merging_is_what_the_tokenizer_does(text, data):
    """A layout covers the tokens of its characters, but for one that begins in the layout before."""
    ids = RunTokenizer().encode(text, False)
    characters = [ord(character) for character in text]
    assert RUNS.split(ids) == characters

    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    tokens = ItemTokens(characters[start:end], bytes([1]) * (end - start))
    placements = [Placement("m", 0, start, tokens)] if start < end else []
    placed = RUNS.merge(PlacedPrompt(characters, placements))
    assert placed.token_ids == ids
    for placement in placed.placements:
        covered = RUNS.split(placed.token_ids[placement.start : placement.end])
        before = RUNS.split(placed.token_ids[: placement.start])
        assert len(before) <= start
        assert end <= len(before) + len(covered)
        assert placement.tokens.mask == bytes([1]) * len(placement.tokens.ids)

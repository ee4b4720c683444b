"""How vLLM is asked for drafts of frames."""

import re

import pytest

from examples.terra import drafts


def test_before_0_22_1_ngrams_draft_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "find_spec", lambda name: None)
    sentence = r"This vLLM takes no drafts of frames, as 0\.22\.1 and later do: n-grams draft 8 tokens instead\."
    with pytest.warns(UserWarning, match=re.compile(f"^{sentence}$")):
        assert drafts.speculation(63) == drafts.ngrams(8)

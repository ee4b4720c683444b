"""The README's specs are the ones that run."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmkit
from examples.terra.spec import TERRA

README = Path(__file__).parents[2].joinpath("README.md").read_text()
PUBLIC = {name: getattr(mmkit, name) for name in mmkit.__all__ if name != "MultiModalModel"}


class Tokenizer:
    """Words, one id each."""

    words = ("look:", "<series>", "<part>")

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.words.index(word) for word in text.split()]


def block(name: str) -> dict[str, Any]:
    """The names that the README's block that assigns `name` defines."""
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if f"\n{name} = " in f"\n{code}"]
    scope = dict(PUBLIC)
    exec(code, scope)
    return scope


def test_terra() -> None:
    assert block("TERRA")["TERRA"] == TERRA


@pytest.mark.parametrize("steps", [1, 9, 64])
def test_series(steps: int) -> None:
    spec = block("SERIES")["SERIES"]
    config, tokenizer = SimpleNamespace(vocab_size=3), Tokenizer()
    spec.check(config, tokenizer)
    preview = spec.bind(config, tokenizer).preview(
        tokenizer.encode("look: <series>"), {"series": [torch.zeros(steps, 4)]}
    )
    assert preview.prompt_token_ids == [0] + [2] * -(-steps // 4)
    assert [placement.start for placement in preview.placements] == [1]
    assert preview.fields["series"][0]["series"].shape == (steps, 4)

"""What stands for an item in a chat message."""

import pytest

from mmkit import ModelSpec, already_expanded, cfg, insert, item, replace, tok
from mmkit.layout import Update

from .common import modality


@pytest.mark.parametrize(
    ("update", "text"),
    [
        (replace(tok["<image>"]), "<image>"),
        (replace(tok["<|image_{}|>", item.index + 1]), "<|image_2|>"),
        (replace(tok.text("Picture {}: ", item.index)), "Picture 1: "),
        (replace([tok["<a>"], tok["<b>"]]), "<a><b>"),
        ([insert(at="start"), replace(tok["<image>"])], "<image>"),
        (replace(cfg.image_token_index), None),
        (replace(5), None),
        (replace(tok["<{}>", item.length]), None),
        (already_expanded(), None),
    ],
)  # fmt: skip
def test_the_text_of_a_target(update: Update, text: str | None) -> None:
    spec = ModelSpec("robot", modality("image", update=update))
    assert spec.placeholder_text("image", 1) == text
    assert spec.placeholder_text("video", 1) is None

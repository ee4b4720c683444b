"""CoLLM tells whether a user will like an item, from rows of a collaborative model beside the titles.

Source: https://github.com/zyang1580/CoLLM at 48042b1, paper arXiv 2310.19488, BSD 3-clause.

A user, the items that he interacted with, and the item in question are three modalities. The published code has the
unknown token at the rows of all three. Here each has a token, so that an expanded prompt tells them apart.
"""

from typing import Any

from mmkit import Modality, ModelSpec, Tensor, batched, between, cfg, each, embed, item, replace, tok

ITEM_NUMBER = between(0, cfg.item_num - 1)


def make_rows(token: str) -> Any:
    """Return the layout of a user or an item: its rows, with dots between."""
    return each(cfg.proj_token_num, lambda row: embed(tok[token]), sep=tok.text("."))


COLLM = ModelSpec(
    "collm",
    Modality(
        "user",
        item=Tensor((), "int64", bound=between(0, cfg.user_num - 1)),
        fields={"user": batched()},
        layout=make_rows("<user>"),
        update=replace(tok["<UserID>"]),
        limit=1,
    ),
    Modality(
        "history",
        item=Tensor((between(1, cfg.max_history),), "int64", bound=ITEM_NUMBER),
        fields={"history": batched()},
        layout=each(item.length, lambda number: make_rows("<item>"), sep=tok.text(", ")),
        update=replace(tok["<ItemIDList>"]),
        limit=1,
    ),
    Modality(
        "target",
        item=Tensor((), "int64", bound=ITEM_NUMBER),
        fields={"target": batched()},
        layout=make_rows("<target>"),
        update=replace(tok["<TargetItemID>"]),
        limit=1,
    ),
)

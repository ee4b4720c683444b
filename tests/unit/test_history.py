"""What a session remembers is what a list of its tokens would hold, after any slides of its window."""

from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmkit import InputError
from mmkit.serve.history import History, SessionItem, group_by_modality, locate_items


class Item(NamedTuple):
    """An item of a message, with an identity of its own."""

    modality: str
    number: int


class Token(NamedTuple):
    """A token, and the item that it is a placeholder of, if any."""

    id: int
    item: Item | None = None


class Message(NamedTuple):
    """A message of a client with its chunk: the tokens of both, and the items."""

    tokens: list[Token]
    items: list[Item]


@st.composite
def messages(draw):
    """Draw the messages of a session, whose tokens and items all differ."""
    drawn = []
    next_id = 0
    next_number = 0
    for _ in range(draw(st.integers(1, 12))):
        tokens = []
        items = []
        for _ in range(draw(st.integers(0, 3))):
            item = Item(draw(st.sampled_from("ab")), next_number)
            next_number += 1
            items.append(item)
            tokens.extend([None] * draw(st.integers(0, 3)))
            tokens.extend([item] * draw(st.integers(1, 3)))
        tokens.extend([None] * draw(st.integers(1, 4)))  # what the model generates
        tokens = [Token(next_id + index, item) for index, item in enumerate(tokens)]
        next_id += len(tokens)
        drawn.append(Message(tokens, items))
    return drawn


def list_items(tokens: list[Token]) -> list[Item]:
    """Return the items whose placeholders are among tokens, in order."""
    items = dict.fromkeys(token.item for token in tokens)
    items.pop(None, None)
    return list(items)


def render(tokens: list[Token], items: list[SessionItem]) -> dict:
    """Return a prompt as vLLM renders it, with the ranges of its items."""
    owners = [token.item for token in tokens]
    ranges = {}
    for modality, group in group_by_modality(items).items():
        ranges[modality] = []
        for item in group:
            offset = owners.index(item.value)
            ranges[modality].append(SimpleNamespace(offset=offset, length=owners.count(item.value)))
    return {"mm_placeholders": ranges}


class Model:
    """A session as a list of tokens, beside its history.

    Args:
        keep: of the window; None without one.
        room: the most tokens.
    """

    def __init__(self, keep: int | None, room: int) -> None:
        self.keep = keep
        self.room = room
        self.history = History(keep)
        self.tokens: list[Token] = []

    def add(self, message: Message) -> None:
        """Add a message to the history and to the tokens, and compare both.

        Raises:
            InputError: the message does not fit.
        """

        def check(history: History) -> None:
            if len(history.ids) + len(message.tokens) > self.room:
                raise InputError("tokens", "fewer", str(len(history.ids)))

        remaining = self.history.drop_until_fits(len(message.items), check)
        self.check_dropped(remaining, len(message.items))
        num_dropped = len(self.history.ids) - len(remaining.ids)
        self.tokens = self.tokens[num_dropped:] + message.tokens
        items = list(remaining.items)
        for group in group_by_modality(SessionItem(item.modality, item) for item in message.items).values():
            items.extend(group)  # a message has its items by modality
        ids = [token.id for token in self.tokens]
        assert list(remaining.ids) == ids[: len(remaining.ids)]
        located = locate_items(items, render(self.tokens, items))
        assert [item.value for item in located] == list_items(self.tokens)
        self.history = remaining._replace(ids=ids, items=located)

    def check_dropped(self, remaining: History, num_new_items: int) -> None:
        """Compare what the history says it dropped with the tokens that are gone."""
        dropped = self.history.count_dropped(remaining)
        num_dropped = len(self.history.ids) - len(remaining.ids)
        if dropped is None:
            assert num_dropped == 0
            return
        dropped_items = list_items(self.tokens[:num_dropped])
        assert dropped.tokens == num_dropped
        assert dropped.items == Counter(item.modality for item in dropped_items)
        kept_items = list_items(self.tokens[num_dropped:])
        assert set(dropped_items).isdisjoint(kept_items), "an item is whole or gone"
        assert not kept_items or len(kept_items) + num_new_items <= self.keep


@given(messages(), st.none() | st.integers(1, 3), st.integers(8, 30))
def test_what_remains_is_what_was_there(drawn, keep, room) -> None:
    """Each token stays with the item that it belongs to, until a message does not fit."""
    model = Model(keep, room)
    for message in drawn:
        try:
            model.add(message)
        except InputError:
            return


def test_without_a_window_nothing_is_dropped() -> None:
    history = History(None, [1, 2, 3], [SessionItem("a", 0, stop=2)])

    def refuse(history: History) -> None:
        raise InputError("tokens", "fewer", str(len(history.ids)))

    with pytest.raises(InputError, match="got 3"):
        history.drop_until_fits(1, refuse)


def test_a_window_drops_the_oldest_items_with_the_tokens_up_to_their_end() -> None:
    first = SessionItem("a", 0, stop=2)
    second = SessionItem("b", 1, stop=4)
    history = History(2, [10, 11, 12, 13, 14], [first, second])

    def refuse_the_whole(history: History) -> None:
        if len(history.ids) == 5:
            raise InputError("tokens", "fewer", "5")

    remaining = history.drop_until_fits(1, refuse_the_whole)
    assert remaining.ids == [12, 13, 14]
    assert remaining.items == [second]
    dropped = history.count_dropped(remaining)
    assert dropped is not None
    assert (dropped.tokens, dropped.items) == (2, {"a": 1})

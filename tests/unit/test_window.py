"""What a session remembers is what a list of its tokens would hold, after any slides."""

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from mmkit import InputError
from mmkit.serve.protocol import Window
from mmkit.serve.window import History

turns = st.tuples(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 3)), max_size=3), st.integers(1, 4)
)
"""Of each item its modality, the tokens before it and those of it; then the tokens that are generated."""


@given(
    st.lists(turns, min_size=1, max_size=12),
    st.integers(0, 5),
    st.sampled_from(["item", "turn"]),
    st.integers(1, 3),
    st.integers(8, 30),
)
def test_what_is_left_is_what_was_there(drawn, prefix, cut, keep, room) -> None:
    history, left, count = History(Window(keep=keep, cut=cut, prefix=prefix)), [], 0

    def check(tokens: int, items: Counter[str]) -> None:
        if tokens + size > room:
            raise InputError("tokens", "fewer", str(tokens))

    for items, generated in drawn:
        tokens, places = [], {}
        for name, before, length in items:
            tokens += [None] * before
            places.setdefault(name, []).append(SimpleNamespace(offset=len(tokens), length=length))
            tokens += [name] * length
        size = len(tokens) + generated
        if not left and len(tokens) < prefix:
            return
        try:
            at = history.fitting(len(items), check)
        except InputError:
            return
        if at is not None:
            before = Counter(name for _, name, first in left if first)
            slid = history.slide(at)
            assert slid.tokens > 0
            left = left[:prefix] + left[prefix + slid.tokens :]
            after = Counter(name for _, name, first in left if first)
            assert slid.items == before - after
            behind = sum(first for _, _, first in left[prefix:])
            assert not behind or behind + len(items) <= keep
            assert history.at(at) == (len(left), after)
            assert history.ids(at) == [number for number, _, _ in left]
            for turn in history.turns:
                for place in turn.places:
                    position = history.position(place.start, at)
                    assert position is None or left[position][1:] == (place.name, True)
        firsts = {place.offset for own in places.values() for place in own}
        ids = range(count, count + size)
        count += size
        left += [(number, tokens[i] if i < len(tokens) else None, i in firsts) for i, number in enumerate(ids)]
        history.add({}, {"prompt_token_ids": list(ids[: len(tokens)]), "mm_placeholders": places}, ids[len(tokens) :])

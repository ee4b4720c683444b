"""What a session remembers is what a list of its tokens would hold, after any slides."""

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from mmkit import InputError
from mmkit.serve.window import History, held

turns = st.tuples(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 3)), max_size=3), st.integers(1, 4)
)
"""Of each item its modality, the tokens before it and those of it; then the tokens that are generated."""


@given(st.lists(turns, min_size=1, max_size=12), st.none() | st.integers(1, 3), st.integers(8, 30))
def test_what_is_left_is_what_was_there(drawn, keep, room) -> None:
    history, known, count = History(keep), [], 0

    def check(tokens: int, items: Counter[str]) -> None:
        if tokens + size > room:
            raise InputError("tokens", "fewer", str(tokens))

    for items, generated in drawn:
        owners, places = [], {}
        for name, before, length in items:
            owners += [None] * before
            places.setdefault(name, []).append(SimpleNamespace(offset=len(owners), length=length))
            owners += [(name, count + len(owners))] * length
        size = len(owners) + generated
        try:
            left = history.fitting(len(items), check)
        except InputError:
            return
        slid, dropped = history.slid(left), len(history.ids) - len(left.ids)
        assert (slid is None) == (left is history)
        if slid is not None:
            gone = Counter(name for name, _ in {owner for _, owner in known[:dropped]} - {None})
            assert (slid.tokens, slid.items) == (dropped, gone)
            assert known[dropped - 1][1] != known[dropped][1], "an item is whole or gone"
            assert not left.items or len(left.items) + len(items) <= keep
        history, known = left, known[dropped:]
        values = {name: [(name, count + place.offset) for place in of] for name, of in places.items()}
        ids = range(count, count + size)
        history.add(ids, held({"mm_placeholders": places}, values))
        known += zip(ids, [*owners, *[None] * generated], strict=True)
        count += size
        assert history.ids == [number for number, _ in known]
        for item in history.items:
            assert {owner for _, owner in known[item.start : item.stop]} == {item.value}

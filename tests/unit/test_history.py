"""What a session remembers is what a list of its tokens would hold, after any slides."""

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from mmkit import InputError
from mmkit.serve.history import History, SessionItem, group_by_modality, locate_items

turns = st.tuples(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 3)), max_size=3), st.integers(1, 4)
)
"""Of each item its modality, the tokens before it and those of it; then the tokens that are generated."""


@given(st.lists(turns, min_size=1, max_size=12), st.none() | st.integers(1, 3), st.integers(8, 30))
def test_what_is_left_is_what_was_there(drawn, keep, room) -> None:
    """Each token is known with the item that it belongs to."""
    history, known, count = History(keep), [], 0

    def check(left: History) -> None:
        if len(left.ids) + len(new) > room:
            raise InputError("tokens", "fewer", str(len(left.ids)))

    for items, generated in drawn:
        new, values = [], {}
        for name, before, length in items:
            item = (name, count + len(new) + before)
            values.setdefault(name, []).append(item)
            new += [None] * before + [item] * length
        new = list(zip(range(count, count + len(new) + generated), [*new, *[None] * generated], strict=True))
        count += len(new)
        try:
            left = history.drop_until_fits(len(items), check)
        except InputError:
            return
        slid, dropped = history.count_dropped(left), len(history.ids) - len(left.ids)
        if slid is not None:
            gone = Counter(name for name, _ in {owner for _, owner in known[:dropped]} - {None})
            assert (slid.tokens, slid.items) == (dropped, gone)
            assert known[dropped - 1][1] != known[dropped][1], "an item is whole or gone"
            assert not left.items or len(left.items) + len(items) <= keep
        known = known[dropped:] + new
        whole = [*left.items, *(SessionItem(name, value) for name, of in values.items() for value in of)]
        owners = [owner for _, owner in known]
        places = {
            name: [SimpleNamespace(offset=owners.index(i.value), length=owners.count(i.value)) for i in of]
            for name, of in group_by_modality(whole).items()
        }
        ids = [number for number, _ in known]
        assert [*left.ids, *(number for number, _ in new)] == ids
        history = left._replace(ids=ids, items=locate_items(whole, {"mm_placeholders": places}))
        assert [item.value for item in history.items] == list(dict.fromkeys(filter(None, owners)))

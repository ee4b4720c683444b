"""Placing layouts in prompts: against requests whose result is known by construction, and against naive.py."""

import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from mmkit import (
    InputError,
    Modality,
    ModelSpec,
    Tensor,
    already_expanded,
    batched,
    cfg,
    embed,
    insert,
    item,
    literal,
    replace,
    tok,
)
from mmkit.expr import Scope
from mmkit.layout import Placeholder, nothing
from mmkit.placement import EMPTY, Alternative, Placement, place
from mmkit.vocabulary import Vocabulary

from . import naive
from .common import NAMES, Tokenizer

UPDATES = {
    "replace": replace(0),
    "in_place": already_expanded(),
    "start": insert(at="start"),
    "end": insert(at="end"),
    "after": insert(after=0),
}


def kind_of(alternative):
    return next(kind for kind, update in UPDATES.items() if update == alternative.update)


def alternative(kind, target, ids, embeds):
    """One alternative of an item. `embeds` are the ids at which encoder rows go."""
    return Alternative(UPDATES[kind], tuple(target), Placeholder(list(ids), bytes(token in embeds for token in ids)))


def check(prompt, items, ids, placements):
    """Law L2: what holds of every result, whatever the request."""
    assert [(p.modality, p.index) for p in placements] != [] or not any(items.values())
    assert sorted((p.modality, p.index) for p in placements) == sorted(
        (modality, index) for modality, alternatives in items.items() for index in range(len(alternatives))
    )
    position = 0
    outside = []
    for p in placements:
        placeholder = p.placeholder
        assert any(placeholder is one.placeholder for one in items[p.modality][p.index])
        assert p.start >= position, "ranges overlap, or are not in prompt order"
        outside += ids[position : p.start]
        position = p.start + len(placeholder)
        assert ids[p.start : position] == placeholder.ids
    outside += ids[position:]
    for modality in items:
        of_modality = [p.index for p in placements if p.modality == modality]
        assert of_modality == sorted(of_modality), "the items of a modality change places"
    assert is_subsequence(outside, prompt), "something outside the ranges is not the caller's"


def is_subsequence(short, long):
    rest = iter(long)
    return all(any(token == other for other in rest) for token in short)


def run(prompt, items, reserved=EMPTY):
    """Place, with everything that always holds checked; None where the request is refused."""
    before = list(prompt)
    try:
        ids, placements = place(prompt, items, "spec", reserved)
    except InputError:
        assert prompt == before, "the caller's prompt was changed"
        return None
    assert prompt == before, "the caller's prompt was changed"
    check(prompt, items, ids, placements)
    return ids, placements


def as_naive(items):
    return {
        modality: [
            [(kind_of(w), list(w.target), w.placeholder.ids, set(w.placeholder.embed_ids)) for w in alternatives]
            for alternatives in of
        ]
        for modality, of in items.items()
    }


def as_tuples(result):
    return result and (result[0], [(p.modality, p.index, p.start, p.placeholder.ids) for p in result[1]])


# -- by construction: fillers, targets and layouts of separate alphabets ---------------------------------------------

FILLER = st.lists(st.integers(0, 4), max_size=4)
# modality: its target, its embed id, its brackets; "same" shares its target with "image"
KINDS = {
    "image": ([10], 11, [12], [13]),
    "bare": ([20], 20, [], []),
    "wrapped": ([30], 30, [31], [32]),
    "long": ([40, 41, 42], 43, [41], [42]),
    "gemma": ([50], 51, [5, 50], [52]),
    "same": ([10], 61, [], [10]),
}
# Where the target is the embed id itself, two adjacent placeholders also read as one expanded item of two tokens.
CLEAR = tuple(name for name, (target, embed_id, *_) in KINDS.items() if target != [embed_id])


@st.composite
def requests(draw, modes=("replace", "in_place", "start", "end", "after"), kinds=tuple(KINDS)):
    """A prompt in pieces, the items of several modalities, and the result that they must give."""
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3, unique=True))
    mode = {name: draw(st.sampled_from(modes)) for name in chosen}
    prefix = draw(FILLER)
    items = {name: [] for name in chosen}
    written = draw(st.lists(st.sampled_from(chosen), max_size=5))
    # of modalities that share a target, the one that comes first takes the first occurrences
    if {"image", "same"} <= set(chosen) and mode["image"] == mode["same"] == "replace":
        shared = iter(sorted((n for n in written if n in ("image", "same")), key=chosen.index))
        written = [next(shared) if n in ("image", "same") else n for n in written]
    pieces = [(None, prefix)]
    for name in written:
        target, embed_id, opening, closing = KINDS[name]
        # a layout with one embed position that is the target itself can be read in two ways
        least = 2 if name == "wrapped" else 1
        ids = opening + [embed_id] * draw(st.integers(least, 3)) + closing
        aim = {"after": prefix, "replace": target}.get(mode[name], [])
        items[name].append([alternative(mode[name], aim, ids, {embed_id})])
        pieces += [(name, ids), (None, draw(FILLER))]
    if "end" in mode.values():
        pieces.append((None, [0]))  # see test_start_and_end_of_an_empty_prompt
    prompt, ids, where = [], [], []
    anchored = {kind: [n for n in chosen if mode[n] == kind] for kind in ("start", "after", "end")}

    def emit(names):
        for name in names:
            for index, (only,) in enumerate(items[name]):
                where.append(Placement(name, index, len(ids), only.placeholder))
                ids.extend(only.placeholder.ids)

    counts = dict.fromkeys(chosen, 0)
    at_prefix = [n for n in chosen if mode[n] in ("start", "after")] if not prefix else anchored["after"]
    emit(anchored["start"] if prefix else at_prefix)
    for number, (name, piece) in enumerate(pieces):
        if name is None:
            prompt += piece
            ids += piece
        elif mode[name] in ("replace", "in_place"):
            prompt += KINDS[name][0] if mode[name] == "replace" else piece
            where.append(Placement(name, counts[name], len(ids), items[name][counts[name]][0].placeholder))
            counts[name] += 1
            ids += piece
        if number == 0 and prefix:
            emit(at_prefix)
    emit(anchored["end"])
    return prompt, items, ids, where


@given(requests())
def test_results_known_by_construction(request_):
    prompt, items, ids, where = request_
    result = run(prompt, items)
    assert result is not None
    assert result[0] == ids
    assert sorted(result[1], key=str) == sorted(where, key=str)
    assert [p.start for p in result[1]] == sorted(p.start for p in where)


@given(requests())
def test_an_expanded_prompt_is_not_expanded_again(request_):
    """Law L10."""
    prompt, items, *_ = request_
    ids, placements = run(prompt, items)
    again = run(ids, items)
    assert again is not None, "the result is refused as a prompt"
    assert again[0] == ids
    assert [p.start for p in again[1]] == [p.start for p in placements]


def test_start_and_end_of_an_empty_prompt():
    items = {"last": [[alternative("end", [], [9], {9})]], "first": [[alternative("start", [], [8], {8})]]}
    assert place([1], items, "spec")[0] == [8, 1, 9]
    assert place([], items, "spec")[0] == [8, 9]


@given(requests(modes=("replace",), kinds=CLEAR), st.data())
def test_partly_expanded_prompts(request_, data):
    """A caller may have expanded some of the placeholders."""
    _, items, ids, where = request_
    mixed, position = [], 0
    for p in where:
        ((only,),) = [items[p.modality][p.index]]
        mixed += ids[position : p.start]
        mixed += only.placeholder.ids if data.draw(st.booleans()) else only.target
        position = p.start + len(only.placeholder)
    mixed += ids[position:]
    shared = {"image", "same"} <= items.keys()
    result = run(mixed, items)
    if not shared:  # which of two modalities a shared target belongs to is no longer determined
        assert result is not None
        assert result[0] == ids


@given(requests(modes=("replace", "in_place")), st.data())
def test_a_missing_placeholder_is_refused(request_, data):
    prompt, items, _, where = request_
    if not where:
        return
    lost = data.draw(st.sampled_from(where))
    (only,) = items[lost.modality][lost.index]
    text = list(only.target) if kind_of(only) == "replace" else only.placeholder.ids
    begin = next(i for i in range(len(prompt)) if prompt[i : i + len(text)] == list(text))
    assert run(prompt[:begin] + prompt[begin + len(text) :], items) is None


@given(requests(modes=("replace", "in_place"), kinds=CLEAR), st.data())
def test_a_surplus_placeholder_is_refused(request_, data):
    prompt, items, _, where = request_
    if not where:
        return
    extra = data.draw(st.sampled_from(where))
    (only,) = items[extra.modality][extra.index]
    stray = (
        list(only.target)
        if kind_of(only) == "replace"
        else [data.draw(st.sampled_from(sorted(only.placeholder.embed_ids)))]
    )
    assert run([*stray, 0, *prompt], items) is None
    assert run([*prompt, 0, *stray], items) is None


@given(requests(kinds=CLEAR), st.sampled_from(["first", "last"]))
def test_a_surplus_or_missing_item_is_refused(request_, which):
    prompt, items, _, where = request_
    searched = [p for p in where if items[p.modality][p.index][0].update in (UPDATES["replace"], UPDATES["in_place"])]
    if not searched or {"image", "same"} <= items.keys():
        return
    name = searched[0 if which == "first" else -1].modality
    more = {n: [*alternatives, alternatives[-1]] if n == name else alternatives for n, alternatives in items.items()}
    assert run(prompt, more) is None
    fewer = {n: alternatives[:-1] if n == name else alternatives for n, alternatives in items.items()}
    if fewer[name]:  # a modality without items is the business of Plan.check_bare
        assert run(prompt, fewer) is None


# -- against the reference: small alphabets, where everything collides -----------------------------------------------

small = st.integers(1, 4)
layouts = st.lists(small, min_size=1, max_size=4)


@st.composite
def collisions(draw):
    """Targets, layouts and text over four ids. Most prompts are pieced together from what they may contain."""
    items = {}
    pieces = [draw(st.lists(small, max_size=2))]
    for name in draw(st.sampled_from([("a",), ("a", "b"), ("b", "a"), ("a", "b", "c")])):
        kinds = draw(st.lists(st.sampled_from(["replace", "replace", "in_place", "start", "end", "after"]), max_size=1))
        kinds = kinds or ["replace", draw(st.sampled_from(["replace", "in_place", "start", "end", "after"]))]
        targets = [draw(st.lists(small, min_size=1, max_size=3)) if k in ("replace", "after") else [] for k in kinds]
        items[name] = []
        for _ in range(draw(st.integers(0, 3))):
            ids = draw(layouts)
            embeds = {draw(st.sampled_from(ids))}
            items[name].append([alternative(k, t, ids, embeds) for k, t in zip(kinds, targets, strict=True)])
            pieces.append(draw(st.sampled_from([*targets, ids])))
            if draw(st.booleans()):
                pieces.append(draw(st.lists(small, max_size=2)))
    if draw(st.booleans()):
        pieces = draw(st.permutations(pieces))
    return [token for piece in pieces for token in piece], items


@given(collisions(), st.lists(st.lists(small, min_size=1, max_size=3), max_size=1))
def test_agrees_with_the_naive_reference(request_, reserved):
    prompt, items = request_
    result = run(prompt, items, {tuple(target): "a" for target in reserved})
    event("placed" if result else "refused")
    assert as_tuples(result) == naive.place(prompt, as_naive(items), reserved)
    if result:
        run(result[0], items)


# -- examples --------------------------------------------------------------------------------------------------------

E = 9  # embeds


def only(kind, target, ids=(E, E)):
    return [alternative(kind, target, ids, {E})]


@pytest.mark.parametrize(
    ("prompt", "alternatives", "ids", "starts"),
    [
        pytest.param([1, 9, 2], [only("replace", [9])], [1, 9, 9, 2], [1], id="replace"),
        pytest.param([9, 9, 9, 9], [only("replace", [9])] * 2, [9] * 4, [0, 2], id="adjacent, expanded"),
        pytest.param([9, 9, 9], [only("replace", [9])] * 2, [9] * 4, [0, 2], id="adjacent, first expanded"),
        pytest.param([9, 1, 9, 9], [only("replace", [9])] * 2, [9, 9, 1, 9, 9], [0, 3], id="second expanded"),
        pytest.param([9, 9], [only("replace", [9])], [9, 9], [0], id="expanded"),
        pytest.param([1, 2, 3], [only("replace", [1, 2, 3])], [9, 9], [0], id="long target"),
        pytest.param([1, 1, 2], [only("replace", [1, 2])], [1, 9, 9], [1], id="false start"),
        pytest.param([1, 1, 1], [only("replace", [1, 1])], [9, 9, 1], [0], id="half a target is text"),
        pytest.param([1, 2], [only("after", [])], [9, 9, 1, 2], [0], id="after nothing"),
        pytest.param([], [only("start", [])], [9, 9], [0], id="empty prompt, start"),
        pytest.param([], [only("end", [])], [9, 9], [0], id="empty prompt, end"),
        pytest.param([9, 9, 1], [only("start", [])], [9, 9, 1], [0], id="already at the start"),
        pytest.param([1, 9, 9, 9, 9], [only("end", [])] * 2, [1, 9, 9, 9, 9], [1, 3], id="already at the end"),
        pytest.param([2], [only("replace", [1]) + only("replace", [2])], [9, 9], [0], id="second alternative"),
        pytest.param([1], [only("replace", [2]) + only("end", [])], [1, 9, 9], [1], id="or else at the end"),
        pytest.param([2, 1], [only("replace", [2]) + only("end", [])], [9, 9, 1], [0], id="rather than at the end"),
    ],
)
def test_examples(prompt, alternatives, ids, starts):
    result = run(prompt, {"image": alternatives})
    assert result is not None
    assert result[0] == ids
    assert [p.start for p in result[1]] == starts


def test_the_first_alternative_wins_where_both_match_at_the_same_place():
    both = [alternative("replace", [1, 2], [E, E], {E}), alternative("replace", [1], [E], {E})]
    long, short = (Placement("image", 0, 0, one.placeholder) for one in both)
    assert run([1, 2], {"image": [both]}) == ([E, E], [long])
    assert run([1, 2], {"image": [both[::-1]]}) == ([E, 2], [short])
    assert run([1, 3], {"image": [both]}) == ([E, 3], [short])


def test_modalities_that_share_a_target_take_it_in_the_order_of_the_spec():
    image = [alternative("replace", [1], [8, 8], {8})]
    audio = [alternative("replace", [1], [9], {9})]
    assert run([1, 0, 1, 1], {"image": [image], "audio": [audio, audio]})[0] == [8, 8, 0, 9, 9]
    assert run([1, 0, 1, 1], {"audio": [audio, audio], "image": [image]})[0] == [9, 0, 9, 8, 8]
    assert run([1, 0, 1], {"image": [image], "audio": [audio, audio]}) is None


def test_an_anchor_inside_a_target_is_refused():
    items = {"a": [[alternative("after", [1, 2], [8], {8})]], "b": [[alternative("replace", [2, 3], [9], {9})]]}
    assert run([1, 2, 3], items) is None


# -- tokens that merge ------------------------------------------------------------------------------------------------


class Lines(Tokenizer):
    """One id per character, and one per run of line breaks."""

    def encode(self, text, add_special_tokens):
        runs = (match[0] for match in re.finditer(r"\n+|.", text))
        return [1000 + len(run) if run[0] == "\n" else ord(run) for run in runs]


LINES = Lines()
IN_LINES = Modality(
    "image",
    item=Tensor(shape=(2,)),
    layout=tok.text("\n\n(") + embed(E) * 2 + tok.text(")\n\n"),
    update=replace(tok.text("@")),
    fields={"x": batched()},
)


@given(st.lists(st.sampled_from(["", "\n", "\n\n\n", "a\n", "a", "\nb"]), min_size=2, max_size=5))
def test_line_breaks_merge_as_in_a_text(gaps):
    plan = ModelSpec("lines", IN_LINES, merges="\n").bind(SimpleNamespace(vocab_size=2000), LINES)
    items = {"image": [torch.ones(2)] * (len(gaps) - 1)}
    expected = LINES.encode("\n\n(xx)\n\n".join(gaps).replace("x", chr(E)), False)
    written = [LINES.encode(gap, False) for gap in gaps]
    prompt = [*written[0], *(token for gap in written[1:] for token in [ord("@"), *gap])]
    preview = plan.preview(prompt, items)
    assert preview.prompt_token_ids == expected
    assert all(expected[at.start : at.end] == at.placeholder.ids for at in preview.placements)
    assert plan.preview(expected, items).placements == preview.placements
    assert plan.unexpand(expected, items) == prompt


# -- declarations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "target"),
    [
        (replace(tok["<image>"]), (7,)),
        (replace(tok.text("ab")), (97, 98)),
        (replace([1, 2]), (1, 2)),
        (replace(5), (5,)),
        (replace(lambda s: [s.item.index, 5]), (1, 5)),
        (replace(tok["<|image_{}|>", item.index + 1]), (182,)),
        (insert(at="start"), ()),
        (insert(at="end"), ()),
        (insert(after=cfg.bos), (3,)),
        (insert(after=nothing), ()),
        (insert(after=literal(tok.text("a"), 1)), (97, 1)),
        (already_expanded(), ()),
    ],
    ids=repr,
)
def test_resolving(update, target):
    scope = Scope(cfg={"bos": 3}, tok=Vocabulary(Tokenizer()), item=SimpleNamespace(index=1))
    assert update.resolve(scope) == target
    assert update.bind(Scope(cfg=scope.cfg, tok=scope.tok)).resolve(scope) == target
    assert hash(update) == hash(update)
    if "lambda" not in repr(update):
        assert pickle.loads(pickle.dumps(update)) == update
        assert eval(repr(update), dict(NAMES)).resolve(scope) == target

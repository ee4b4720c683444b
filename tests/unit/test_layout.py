"""Layouts against an independent evaluator that builds the tokens one by one (tests/unit/naive.py)."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import SpecError, cfg, each, embed, fields, item, literal, tok, where
from mmkit.language.expr import Scope
from mmkit.language.layout import Fixed, layout, nothing
from mmkit.language.vocabulary import Vocabulary

from . import naive
from .common import NAMES, Tokenizer

CONFIG = {"a": 0, "b": 1, "c": 3, "rows": [2, 0, 5]}
ITEM = {"width": 2, "height": 3, "tiles": (4, 1), "none": 0}
ENV = {"cfg": CONFIG, "item": ITEM}

SCOPE = Scope(cfg=SimpleNamespace(**CONFIG), item=SimpleNamespace(**ITEM), tok=Vocabulary(Tokenizer()))
STATIC = Scope(cfg=SCOPE.cfg, tok=SCOPE.tok)

NUMBERS = [("cfg", "a"), ("cfg", "b"), ("cfg", "c"), ("item", "width"), ("item", "height"), ("item", "none")]
SEQUENCES = [("cfg", "rows"), ("item", "tiles")]
ROOTS = {"cfg": cfg, "item": item}


@st.composite
def trees(draw, depth: int = 3, loops: int = 0, names=NUMBERS, sequences=SEQUENCES):
    """A layout tree over numbers and sequences of these names; shrinks towards one literal token."""
    loop_variables = [("loop", index) for index in range(loops)]
    numbers = st.integers(0, 4) | st.sampled_from(names + loop_variables)
    kinds = ["token", "embed"]
    if depth:
        kinds += ["sequence", "repeat", "where", "each", "each"]

    kind = draw(st.sampled_from(kinds))
    if kind in ("token", "embed"):
        return kind, draw(numbers)
    inner = trees(depth - 1, loops, names, sequences)
    if kind == "sequence":
        return kind, draw(st.lists(inner, max_size=3))
    if kind == "repeat":
        return kind, draw(inner), draw(numbers)
    if kind == "where":
        return kind, draw(numbers), draw(st.integers(0, 3)), draw(inner), draw(inner)

    over = draw(numbers | st.sampled_from(sequences) | st.lists(st.integers(0, 3), max_size=3))
    body = draw(trees(depth - 1, loops + 1, names, sequences))
    separator = draw(st.none() | inner)
    last = draw(st.none() | inner)
    return kind, over, body, separator, last


class Builder:
    """Writes the layout that a tree stands for with the public combinators.

    `mark` makes an embed(), `token` a literal, and names are attributes of these roots.
    """

    def __init__(self, mark=embed, token=literal, roots=ROOTS):
        self.mark = mark
        self.token = token
        self.roots = roots

    def build(self, tree, loops=()):
        """Return the layout of a tree inside loops of these variables."""
        match tree:
            case ("token", value):
                return self.token(self.build_value(value, loops))
            case ("embed", value):
                return self.mark(self.build_value(value, loops))
            case ("repeat", body, count):
                return self.build(body, loops) * self.build_value(count, loops)
            case ("where", value, limit, then, other):
                is_more = self.build_value(value, loops) > limit
                return layout(where(is_more, self.build(then, loops), self.build(other, loops)))
            case ("sequence", parts):
                sequence = nothing
                for part in parts:
                    sequence = sequence + self.build(part, loops)
                return sequence
            case ("each", over, body, separator, last):
                return self.build_each(over, body, separator, last, loops)

    def build_each(self, over, body, separator, last, loops):
        def build_body(variable):
            return self.build(body, (*loops, variable))

        options = {}
        if separator is not None:
            options["sep"] = self.build(separator, loops)
        if last is not None:
            options["last"] = self.build(last, loops)
        return each(self.build_value(over, loops), build_body, **options)

    def build_value(self, value, loops):
        if isinstance(value, list):
            return tuple(value)
        if not isinstance(value, tuple):
            return value
        root, name = value
        if root == "loop":
            return loops[name]
        return getattr(self.roots[root], name)


def build(tree, **options):
    """Return the layout that a tree stands for; the options are those of Builder."""
    return Builder(**options).build(tree)


@given(trees())
def test_agrees_with_the_naive_evaluator(tree):
    tokens = build(tree).lay(SCOPE)

    ids = []
    mask = []
    embed_ids = set()
    for token, embeds in naive.lay(tree, ENV):
        ids.append(token)
        mask.append(embeds)
        if embeds:
            embed_ids.add(token)
    assert tokens.ids == ids
    assert list(tokens.mask) == mask
    assert len(tokens) == len(ids)
    assert tokens.num_embeds == sum(mask)
    assert tokens.embed_ids == embed_ids
    if all(mask):
        assert tokens.is_embed is None
    else:
        assert torch.equal(tokens.is_embed, torch.tensor(mask))


@given(trees())
def test_binding_changes_nothing(tree):
    whole = build(tree)
    bound = whole.bind(STATIC)
    tokens = whole.lay(SCOPE)
    assert bound.lay(SCOPE) == tokens
    assert bound.lay(Scope(item=SCOPE.item)) == tokens, "a bound layout still asks for the config"
    assert bound.bind(STATIC).lay(SCOPE) == tokens
    assert pickle.loads(pickle.dumps(bound)).lay(SCOPE) == tokens
    assert not any(leaf.root == "cfg" for leaf in bound.dependencies())
    if not any(leaf.root == "item" for leaf in whole.dependencies()):
        assert isinstance(bound, Fixed)
        assert list(bound.find_fixed_parts()) == [tokens]
        assert eval(repr(bound), dict(NAMES)).lay(SCOPE) == tokens
    assert (bound + literal(1) + 2 * bound).lay(SCOPE).ids == tokens.ids + [1] + tokens.ids + tokens.ids
    assert bound.lay(SCOPE) == tokens, "layouts are reused between requests"


@given(trees())
def test_structure_and_leaves(tree):
    """Two scopes that agree on the leaves give the same layout; loop variables are nobody's leaves."""
    whole = build(tree)
    assert build(tree) == whole == pickle.loads(pickle.dumps(whole))
    assert hash(build(tree)) == hash(whole)
    assert eval(repr(whole), dict(NAMES)).lay(SCOPE) == whole.lay(SCOPE)
    names = {repr(leaf) for leaf in whole.dependencies()}
    assert all(name.startswith(("cfg.", "item.")) for name in names)
    facts = dict.fromkeys(ITEM)
    for key, value in ITEM.items():
        if f"item.{key}" in names:
            facts[key] = value
    assert whole.lay(Scope(cfg=SCOPE.cfg, item=SimpleNamespace(**facts))) == whole.lay(SCOPE)


# -- single combinators ----------------------------------------------------------------------------------------------

FACTS = SimpleNamespace(width=2, grid=[(1, 2), (0, 1)], n=np.int64(2))
WITH_FIELDS = Scope(
    cfg=SCOPE.cfg, tok=SCOPE.tok, item=FACTS, fields={"n": torch.tensor(3), "ids": torch.tensor([1, 2])}
)


def nest_loops(variables=()):
    """Return eight loops inside each other, around one literal of all their variables."""
    if len(variables) == 8:
        return literal(variables)

    def nest_next(variable):
        return nest_loops((*variables, variable))

    return each([len(variables)], nest_next)


def name_by_function(value):
    """Return the name of a function, or the text of another value, as the id of a test."""
    return getattr(value, "__name__", str(value))


def list_ids_of_config(scope):
    return [scope.cfg.c, 9]


def embed_per_pixel_of_width(scope):
    return embed(4) * scope.item.width


def take_field_as_array(scope):
    return scope.fields["ids"].numpy()


def make_no_ids(scope):
    return torch.tensor([])


def count_to_n(scope):
    return range(scope.item.n)


def lay_five(element):
    return 5


def lay_grid(size):
    return embed(1) * size[0] + literal(9) * size[1]


def count_up_to(number):
    return each(number + 1, embed)


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (5, [5]),
        ([5, 6], [5, 6]),
        (nothing, []),
        ([cfg.c, 5], [3, 5]),
        (list_ids_of_config, [3, 9]),
        (embed_per_pixel_of_width, [4, 4]),
        (tok["<image>"] + where(cfg.a, embed(1), literal(2) * 2) + tok["<image>"], [7, 2, 2, 7]),
        (tok["<image>"], [7]),
        (tok.text("ab"), [97, 98]),
        (tok.text(""), []),
        (literal(tok["<image>"], [1, 2], tok.text("a") * 2), [7, 1, 2, 97, 97]),
        ([1, 2] + embed(3), [1, 2, 3]),
        (np.int64(4), [4]),
        (embed(np.int64(4)) * np.int64(2), [4, 4]),
        (embed(torch.tensor(4)) * torch.tensor(2), [4, 4]),
        (embed(1) * fields.n, [1, 1, 1]),
        (fields.ids, [1, 2]),
        (take_field_as_array, [1, 2]),
        (make_no_ids, []),
        (each(fields.n, lay_five), [5, 5, 5]),
        (each(count_to_n, literal), [0, 1]),
        (each(item.grid, lay_grid), [1, 9, 9, 9]),
        (each(item.n, count_up_to), [0, 0, 1]),
        (nest_loops(), list(range(8))),
        (eval(repr(nest_loops()), dict(NAMES)), list(range(8))),
    ],
    ids=name_by_function,
)
def test_what_can_be_a_layout(value, ids):
    tokens = layout(value).lay(WITH_FIELDS)
    assert tokens.ids == ids
    assert layout(value).bind(STATIC).lay(WITH_FIELDS) == tokens


def test_the_variable_of_a_loop_has_any_name():
    assert each(2, lambda x: literal(x)) == each(2, lambda y: literal(y))


def test_each_restores_its_depth_after_an_error():
    def divide_by_zero(element):
        return literal(1 // 0)

    with pytest.raises(ZeroDivisionError):
        each(2, divide_by_zero)
    assert repr(each(2, literal)) == "each(2, lambda x: x)"


# -- refusals --------------------------------------------------------------------------------------------------------

NOT_NUMBERS = [-1, 1.0, 2.5, True, False, None, "3", float("nan"), np.float32(1), np.bool_(True), -(2**70)]
NOT_ONE_NUMBER = [[1], torch.tensor([1, 2])]


def refuses_number(what):
    """Check that the block refuses the value `bad` of the config or of the item."""
    return pytest.raises(SpecError, match=rf"\.bad: expected {what}, a whole number >= 0, got")


@pytest.mark.parametrize("bad", NOT_NUMBERS + NOT_ONE_NUMBER, ids=repr)
@pytest.mark.parametrize("value", [cfg.bad, item.bad], ids=repr)
def test_bad_ids_and_counts_are_refused(bad, value):
    scope = Scope(cfg=SimpleNamespace(bad=bad), item=SimpleNamespace(bad=bad))
    with refuses_number("a token id"):
        embed(value).lay(scope)
    with refuses_number("a repetition count"):
        (embed(1) * value).lay(scope)


@pytest.mark.parametrize("bad", NOT_NUMBERS, ids=repr)
def test_a_literal_that_is_no_number_is_refused(bad):
    scope = Scope(cfg=SimpleNamespace(bad=bad), item=SimpleNamespace(bad=bad))
    with refuses_number("a token id"):
        (literal(cfg.bad) + 1).bind(scope)


@pytest.mark.parametrize("bad", NOT_NUMBERS, ids=repr)
def test_each_over_what_is_no_number_is_refused(bad):
    scope = Scope(cfg=SimpleNamespace(bad=bad), item=SimpleNamespace(bad=bad))
    with refuses_number(r"the number of elements of each\(\), or a sequence"):
        each(cfg.bad, lay_five).lay(scope)


def test_equal_layouts():
    assert literal([1, 2]) == literal((1, 2)) == layout([1, 2])
    assert hash(each([1, 2], literal)) == hash(each((1, 2), literal))
    assert nothing + embed(1) == embed(1), "a sequence of one part is that part"
    assert embed(tok["<image>"]) == embed(tok["<image>"]) != literal(tok["<image>"])

"""Outputs: which ids may stand where, and what becomes of those that do, and of those that may not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.terra import CHECKPOINT
from examples.terra.configuration import LlamaActionConfig
from examples.terra.spec import TERRA
from examples.terra.world import NUM_TILES, render
from mmkit import InputError, ModelSpec, Output, SpecError, any_id, cfg, each, embed, item, kwargs, literal, tok, where
from mmkit.bound.output import BoundOutput
from mmkit.expr import Scope
from mmkit.vocabulary import Vocabulary

from .common import NAMES, Tokenizer, modality

CONFIG = SimpleNamespace(vocab_size=200, n=2, pad=100, rows=2, cols=3)
SCOPE = Scope(cfg=CONFIG, tok=Vocabulary(Tokenizer()))


def grid(ids, scope):
    return ids.reshape(scope.cfg.rows, scope.cfg.cols) - 10


def flat(array, scope):
    return array.reshape(-1) + 10


GRID = (any_id(10, cfg.pad) * cfg.cols + tok["<image>"]) * cfg.rows + literal(150, 151)


def spec(*outputs):
    return ModelSpec("robot", modality(layout=embed(120)), outputs=outputs)


def bound(layout=GRID, decode=grid, encode=flat, **options):
    return spec(Output("map", layout, decode, encode, **options)).bind(CONFIG, Tokenizer()).outputs["map"]


MAP = bound()

# -- the layout --------------------------------------------------------------------------------------------------------

PIECES = st.one_of(
    st.tuples(st.just("id"), st.integers(0, 99)),
    st.tuples(st.just("range"), st.integers(0, 99), st.integers(1, 50)),
)
TREES = st.recursive(
    PIECES,
    lambda trees: st.one_of(
        st.tuples(st.just("repeat"), trees, st.integers(0, 3)),
        st.tuples(st.just("each"), trees, st.integers(0, 3), trees),
        st.tuples(st.just("sequence"), st.lists(trees, max_size=3)),
        st.tuples(st.just("where"), trees, trees, st.booleans()),
    ),
    max_leaves=6,
)


def built(tree):
    match tree:
        case "id", token:
            return literal(token)
        case "range", start, count:
            return any_id(start, start + count)
        case "repeat", inner, count:
            return built(inner) * count
        case "each", inner, count, sep:
            return each(count, lambda _: built(inner), sep=built(sep))
        case "sequence", parts:
            return literal(*map(built, parts))
        case "where", one, other, first:
            return literal(where(cfg.pad == (100 if first else 0), built(one), built(other)))


def naive(tree):
    match tree:
        case "id", token:
            return [{token}]
        case "range", start, count:
            return [set(range(start, start + count))]
        case "repeat", inner, count:
            return [ids for _ in range(count) for ids in naive(inner)]
        case "each", inner, count, sep:
            return [ids for i in range(count) for ids in [*(naive(sep) if i else []), *naive(inner)]]
        case "sequence", parts:
            return [ids for part in parts for ids in naive(part)]
        case "where", one, other, first:
            return naive(one if first else other)


@given(TREES)
def test_a_layout_allows_what_it_says(tree):
    layout, expected = built(tree), naive(tree)
    allowed = [set(ids) if isinstance(ids, range) else {ids} for ids in layout.allowed(SCOPE)]
    assert allowed == expected
    again = eval(repr(layout), dict(NAMES))
    assert again.allowed(SCOPE) == layout.allowed(SCOPE)
    assert (again, hash(again)) == (layout, hash(layout))


@given(TREES, st.data())
def test_ids_are_taken_exactly_where_they_may_stand(tree, data):
    expected = naive(tree)
    layout = literal(built(tree), any_id(0, 5))  # at least one position to choose
    output = BoundOutput(Output("x", layout, lambda ids, _: ids), "m", SCOPE, 200)
    ids = [data.draw(st.sampled_from(sorted(one))) for one in [*expected, set(range(5))]]
    pairs = zip(ids, layout.allowed(SCOPE), strict=True)
    chosen = [token for token, allowed in pairs if isinstance(allowed, range)]
    assert output.decode(ids).tolist() == chosen
    at = data.draw(st.integers(0, len(ids) - 1))
    other = data.draw(st.integers(-3, 200).filter(lambda token: token not in output.allowed[at]))
    with pytest.raises(InputError, match=rf"^m\.outputs\.x\[{at}\]: expected "):
        output.decode([*ids[:at], other, *ids[at + 1 :]])
    with pytest.raises(InputError, match=r"^m\.outputs\.x: expected "):
        output.decode(ids[:at] + ids[at + 1 :])
    with pytest.raises(InputError, match=r"^m\.outputs\.x: expected "):
        output.decode([*ids[:at], ids[at], *ids[at:]])


# -- decode and encode -------------------------------------------------------------------------------------------------


def test_literals_are_checked_and_dropped():
    ids = [10, 11, 12, 7, 20, 21, 22, 7, 150, 151]
    array = MAP.decode(ids)
    assert array.tolist() == [[0, 1, 2], [10, 11, 12]]
    assert MAP.encode(array) == ids
    assert (MAP.num_tokens, MAP.shape, MAP.dtype, MAP.is_image) == (10, (2, 3), "int64", False)
    for form in (tuple(ids), np.array(ids), np.array(ids, np.uint8), torch.tensor(ids)):
        assert (MAP.decode(form) == array).all()


def test_a_function_sees_config_and_tokenizer_and_nothing_else():
    seen = []
    bound(decode=lambda ids, scope: seen.append(scope) or ids).decode([10] * 3 + [7] + [10] * 3 + [7, 150, 151])
    (scope,) = seen
    assert (scope.cfg, scope.tok["<image>"]) == (CONFIG, 7)
    assert (scope.item, scope.fields, scope.prompt, scope.kwargs) == (None, None, None, {})


@given(st.lists(st.integers(0, NUM_TILES - 1), min_size=64, max_size=64))
def test_a_frame_of_tiles_is_the_picture_that_the_world_draws(ids):
    frame = TERRA.bind(LlamaActionConfig.from_pretrained(CHECKPOINT)).outputs["frame"]
    picture = frame.decode(ids)
    assert (picture == np.array(render(ids))).all()
    assert (frame.is_image, frame.allows_all) == (True, True)
    assert frame.encode(picture) == ids
    with pytest.raises(InputError, match="no tile looks like row 0, column 0 of the picture"):
        frame.encode(picture // 2)


def test_a_frame_without_an_image_tokenizer_is_its_ids():
    frame = TERRA.bind(LlamaActionConfig()).outputs["frame"]
    ids = np.random.default_rng(0).integers(0, 262_144, 576)
    assert (frame.decode(ids) == ids).all()
    assert frame.encode(ids) == ids.tolist()


OUT = "robot.outputs.map"
GOOD = [10, 11, 12, 7, 20, 21, 22, 7, 150, 151]
BEGINS = "Check where the output begins, and that sampling was confined to it."
DAMAGED = {
    "short": (
        GOOD[1:],
        f"{OUT}: expected 10 ids, got 9. Sampling for this output stops after one; send the ids of one alone.",
    ),
    "two of them": (
        GOOD * 2,
        f"{OUT}: expected 10 ids, got 20. Sampling for this output stops after one; send the ids of one alone.",
    ),
    "out of its range": ([9, *GOOD[1:]], f"{OUT}[0]: expected an id from 10 to 99, got 9. {BEGINS}"),
    "another literal": ([*GOOD[:3], 8, *GOOD[4:]], f"{OUT}[3]: expected the id 7, got 8. {BEGINS}"),
    "shifted": ([*GOOD[1:], 10], f"{OUT}[2]: expected an id from 10 to 99, got 7. {BEGINS}"),
    "a float": ([10.0, *GOOD[1:]], f"{OUT}[0]: expected a token id, got float 10.0. Send integers."),
    "a bool": ([True, *GOOD[1:]], f"{OUT}[0]: expected a token id, got bool True. Send integers."),
    "a text": ("0123456789", f"{OUT}: expected a sequence of token ids, got a str."),
    "a number": (7, f"{OUT}: expected a sequence of token ids, got a int."),
    "rows": (
        np.array([GOOD]),
        f"{OUT}: expected 10 ids, got 1. Sampling for this output stops after one; send the ids of one alone.",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_ids_are_a_sentence(name):
    ids, sentence = DAMAGED[name]
    with pytest.raises(InputError) as refused:
        MAP.decode(ids)
    assert str(refused.value) == sentence


ARRAYS = {
    "another shape": (
        MAP,
        np.zeros((3, 2), np.int64),
        f"{OUT}: expected a (2, 3) array of int64, got (3, 2) of int64. Nothing is cast or resized.",
    ),
    "another dtype": (
        MAP,
        np.zeros((2, 3)),
        f"{OUT}: expected a (2, 3) array of int64, got (2, 3) of float64. Nothing is cast or resized.",
    ),
    "no encode": (
        bound(encode=None),
        np.zeros((2, 3), np.int64),
        f"{OUT}: expected an output with encode, got one without.",
    ),
    "not taken": (
        bound(encode=lambda array, _: [][0]),
        np.zeros((2, 3), np.int64),
        f"{OUT}: expected an array that the output can be, got IndexError: list index out of range.",
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_is_none_is_a_sentence(name):
    output, array, sentence = ARRAYS[name]
    with pytest.raises(InputError) as refused:
        output.encode(array)
    assert str(refused.value) == sentence


WRONG = {
    "no array": (
        lambda: bound(decode=lambda ids, _: ids.tolist()).decode(GOOD),
        f"{OUT}, decode: expected a "
        "numpy array of float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64, bool, got a list.",
    ),
    "objects": (
        lambda: bound(decode=lambda ids, _: ids.astype(object)).decode(GOOD),
        f"{OUT}, decode: "
        "expected a numpy array of float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64, bool, got a "
        "ndarray of object.",
    ),
    "decode raises": (
        lambda: bound(decode=lambda ids, _: ids.reshape(7)).decode(GOOD),
        f"{OUT}, decode: expected an array for ids that may stand there, got ValueError: "
        "cannot reshape array of size 6 into shape (7,).",
    ),
    "too few": (
        lambda: bound(encode=lambda array, _: array[0]).encode(np.zeros((2, 3), np.int64)),
        f"{OUT}, encode: expected (6,) integers, one for each any_id(), got (3,) of int64.",
    ),
    "floats": (
        lambda: bound(encode=lambda array, _: array.reshape(6) / 1).encode(np.zeros((2, 3), np.int64)),
        f"{OUT}, encode: expected (6,) integers, one for each any_id(), got (6,) of float64.",
    ),
    "encoded out of range": (
        lambda: bound(encode=lambda array, _: array.reshape(6)).encode(np.zeros((2, 3), np.int64)),
        f"{OUT}, encode, position 0: expected an id from 10 to 99, got 0.",
    ),
    "a placeholder": (
        lambda: bound(any_id(110, 130) * 2),
        f"{OUT}, layout: expected ids that may be sampled, "
        "got the placeholder id 120. End the range before it, or begin behind it.",
    ),
    "a literal placeholder": (
        lambda: bound(any_id(0, 9) + literal(120)),
        f"{OUT}, layout: expected ids that "
        "may be sampled, got the placeholder id 120. End the range before it, or begin behind it.",
    ),
    "outside": (
        lambda: bound(any_id(130, 201) * 2),
        f"{OUT}, layout: expected token ids below the vocabulary size 200, got 200.",
    ),
    "nothing to choose": (lambda: bound(literal(1, 2)), f"{OUT}, layout: expected at least one any_id(), got none."),
    "an empty range": (
        lambda: bound(any_id(5, 5)),
        f"{OUT}, layout: any_id(5, 5): expected at least one id, got range(5, 5).",
    ),
    "rows of an encoder": (
        lambda: bound(any_id(1, 2) + embed(5)),
        f"{OUT}, layout: any_id(1, 2) + embed(5): "
        "expected ids and any_id(), got embed(). What comes out receives no encoder rows.",
    ),
    "in a modality": (
        lambda: ModelSpec("robot", modality(layout=any_id(1, 2) * 2)).bind(CONFIG),
        "robot.m, layout: "
        "any_id(1, 2): expected ids and embed(), got any_id(). It belongs into the layout of an Output.",
    ),
    "of an item": (
        lambda: Output("map", any_id(1, item.width), grid),
        "output 'map', layout: expected values of cfg and tok, got item.width.",
    ),
    "of a request": (
        lambda: Output("map", any_id(1, 2) * kwargs.get("n", 3), grid),
        "output 'map', layout: expected values of cfg and tok, got kwargs.get('n', 3).",
    ),
    "a name": (
        lambda: Output("a map", GRID, grid),
        "output 'a map': expected a name that is a Python identifier, got 'a map'.",
    ),
    "no function": (
        lambda: Output("map", GRID, None),
        "output 'map', decode: expected a function (value, scope), got None.",
    ),
    "two of a name": (
        lambda: spec(*[Output("map", GRID, grid)] * 2),
        "spec 'robot': expected one output named 'map', got several.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_is_a_sentence(name):
    wrong, sentence = WRONG[name]
    with pytest.raises(SpecError) as refused:
        wrong()
    assert str(refused.value) == sentence


def test_an_output_is_part_of_what_a_spec_says():
    one, other = Output("map", GRID, grid, flat), Output("map", GRID, grid, flat, lossy=True)
    again = spec(Output("map", GRID, grid, flat))
    assert (spec(one), hash(spec(one))) == (again, hash(again))
    assert spec(one) != spec(other) != spec()
    assert repr(other) == f"Output('map', {GRID!r}, grid, flat, lossy=True)"
    assert repr(other) in repr(spec(other))
    assert spec(one).model_copy(update={"outputs": ()}) == spec()

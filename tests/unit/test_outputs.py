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
from examples.terra.worlds import TownWorld
from mmkit import InputError, ModelSpec, Output, SpecError, any_id, cfg, embed, item, kwargs, literal, tok
from mmkit.language.expr import Scope
from mmkit.language.vocabulary import Vocabulary
from mmkit.plan.output import BoundOutput

from . import test_layout
from .common import NAMES, Tokenizer, expect_refusal, make_modality

CONFIG = SimpleNamespace(vocab_size=200, n=2, pad=100, rows=2, cols=3)
SCOPE = Scope(cfg=CONFIG, tok=Vocabulary(Tokenizer()))
TRAINED = LlamaActionConfig.from_pretrained(CHECKPOINT, name_or_path=str(CHECKPOINT))
FRAME = TERRA.bind(TRAINED).outputs["frame"]


def grid(ids, scope):
    return ids.reshape(scope.cfg.rows, scope.cfg.cols) - 10


def flat(array, scope):
    return array.reshape(-1) + 10


GRID = (any_id(10, cfg.pad) * cfg.cols + tok["<image>"]) * cfg.rows + literal(150, 151)


def spec(*outputs):
    return ModelSpec("robot", make_modality(layout=embed(120)), outputs=outputs)


def bound(layout=GRID, decode=grid, encode=flat, **options):
    return spec(Output("map", layout, decode, encode, **options)).bind(CONFIG, Tokenizer()).outputs["map"]


MAP = bound()

# -- the layout --------------------------------------------------------------------------------------------------------

SOME = 3


def chosen(token):
    return any_id(token, token + SOME)


def allowed(tree):
    """The ids that may stand at each position of a layout in which embed() is any_id()."""
    return [
        set(range(token, token + SOME)) if is_chosen else {token}
        for token, is_chosen in test_layout.naive.lay(tree, test_layout.ENV)
    ]


@given(test_layout.trees())
def test_a_layout_allows_what_it_says(tree):
    layout, scope = test_layout.build(tree, mark=chosen), test_layout.SCOPE
    pairs = layout.list_allowed_ids(scope)
    assert [set(ids) if isinstance(ids, range) else {ids} for ids in pairs] == allowed(tree)
    again = eval(repr(layout), dict(NAMES))
    assert again.list_allowed_ids(scope) == pairs
    assert (again, hash(again)) == (layout, hash(layout))


@given(test_layout.trees(), st.data())
def test_ids_are_taken_exactly_where_they_may_stand(tree, data):
    """In every form; literals are checked and dropped, and come back."""
    expected = [*allowed(tree), set(range(5))]  # at least one position to choose
    layout = literal(*(any_id(min(ids), max(ids) + 1) if len(ids) > 1 else min(ids) for ids in expected))
    output = BoundOutput(Output("x", layout, lambda ids, _: ids, lambda array, _: array), "m", SCOPE, 200)
    ids = [data.draw(st.sampled_from(sorted(one))) for one in expected]
    chosen = [token for token, may in zip(ids, expected, strict=True) if len(may) > 1]
    for form in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint8), torch.tensor(ids)):
        assert output.decode(form).tolist() == chosen
    assert output.encode(np.array(chosen)) == ids
    assert (output.num_tokens, output.shape, output.dtype) == (len(ids), (len(chosen),), "int64")
    at = data.draw(st.integers(0, len(ids) - 1))
    other = data.draw(st.integers(-3, 200).filter(lambda token: token not in output.allowed[at]))
    with pytest.raises(InputError, match=rf"^m\.outputs\.x\[{at}\]: expected "):
        output.decode([*ids[:at], other, *ids[at + 1 :]])
    for others in (ids[:at] + ids[at + 1 :], [*ids[:at], ids[at], *ids[at:]]):
        with pytest.raises(InputError, match=r"^m\.outputs\.x: expected "):
            output.decode(others)


# -- decode and encode -------------------------------------------------------------------------------------------------


def test_a_function_sees_config_and_tokenizer_and_nothing_else():
    seen = []
    bound(decode=lambda ids, scope: seen.append(scope) or ids).decode([10] * 3 + [7] + [10] * 3 + [7, 150, 151])
    (scope,) = seen
    assert (scope.cfg, scope.tok["<image>"]) == (CONFIG, 7)
    assert (scope.item, scope.fields, scope.prompt, scope.kwargs) == (None, None, None, {})


@given(st.lists(st.integers(0, TRAINED.pad_token_id - 1), min_size=64, max_size=64))
def test_a_frame_of_patches_is_the_picture_that_they_make(ids):
    picture = FRAME.decode(ids)
    assert (picture == TownWorld().pictures(np.array([ids]))[0]).all()
    assert FRAME.allows_all
    assert FRAME.encode(picture) == ids


def test_a_frame_without_an_image_tokenizer_is_its_ids():
    frame = TERRA.bind(LlamaActionConfig()).outputs["frame"]
    ids = np.random.default_rng(0).integers(0, 262_144, 576)
    assert (frame.decode(ids) == ids).all()
    assert frame.encode(ids) == ids.tolist()


GOOD, PICTURE = [10, 11, 12, 7, 20, 21, 22, 7, 150, 151], np.zeros((2, 3), np.int64)
ONE = "Sampling for this output stops after one; send the ids of one alone."
BEGINS = "Check where the output begins, and that sampling was confined to it."
RESERVED = "layout: expected ids that may be sampled, got the placeholder id 120. End the range …"


def decoded(decode):
    return bound(decode=decode).decode(GOOD)


def encoded(encode):
    return bound(encode=encode).encode(PICTURE)


def declared(name="map", layout=GRID, decode=grid):
    return Output(name, layout, decode)


# fmt: off
IDS = [
    (f": expected 10 ids, got 9. {ONE}", GOOD[1:]),
    (f": expected 10 ids, got 20. {ONE}", GOOD * 2),
    (f": expected 10 ids, got 1. {ONE}", np.array([GOOD])),
    (f"[0]: expected an id from 10 to 99, got 9. {BEGINS}", [9, *GOOD[1:]]),
    (f"[3]: expected the id 7, got 8. {BEGINS}", [*GOOD[:3], 8, *GOOD[4:]]),
    (f"[2]: expected an id from 10 to 99, got 7. {BEGINS}", [*GOOD[1:], 10]),
    (f"[0]: expected an id from 10 to 99, got float 10.0. {BEGINS}", [10.0, *GOOD[1:]]),
    (f"[0]: expected an id from 10 to 99, got bool True. {BEGINS}", [True, *GOOD[1:]]),
    (": expected a sequence of token ids, got a str.", "0123456789"),
    (": expected a sequence of token ids, got a int.", 7),
]
"""Ids that MAP refuses; after `robot.outputs.map`, as are the next two."""

ARRAYS = [
    (": expected an array of shape (2, 3) of int64, got shape (3, 2) of int64. Nothing is …", MAP, PICTURE.T),
    (": expected an array of shape (2, 3) of int64, got shape (2, 3) of float64. …", MAP, PICTURE / 1),
    (": expected an output with encode, got one without.", bound(encode=None), PICTURE),
    (": expected an array that the output can be, got IndexError: …", bound(encode=lambda *_: [][0]), PICTURE),
]
"""Arrays that an output refuses."""

BOUND = [
    ("decode: expected a numpy array of float16, …, bool, got a list.", decoded, lambda ids, _: ids.tolist()),
    ("decode: expected a numpy array of …, got shape (6,) of object.", decoded, lambda ids, _: ids.astype(object)),
    ("decode: expected an array for ids that may …, got ValueError: …", decoded, lambda ids, _: ids.reshape(7)),
    ("encode: expected (6,) integers, one for each any_id(), got shape (3,) …", encoded, lambda array, _: array[0]),
    ("encode: expected (6,) integers, …, got shape (6,) of float64.", encoded, lambda array, _: array.reshape(6) / 1),
    ("encode, position 0: expected an id from 10 to 99, got 0.", encoded, lambda array, _: array.reshape(6)),
    (RESERVED, bound, any_id(110, 130) * 2),
    (RESERVED, bound, any_id(0, 9) + literal(120)),
    ("layout: expected token ids below the vocabulary size 200, got 200. Use …", bound, any_id(130, 201) * 2),
    ("layout: expected at least one any_id(), got none.", bound, literal(1, 2)),
    ("layout: any_id(5, 5): expected at least one id, got range(5, 5).", bound, any_id(5, 5)),
    ("layout: …: expected ids and any_id(), got embed(). What comes out …", bound, any_id(1, 2) + embed(5)),
]
"""Outputs that cannot be bound, or whose functions do not keep their word."""

DECLARED = [
    ("robot.m, layout: any_id(1, 2): expected ids and embed(), got any_id(). It belongs into the layout of an Output.",
     lambda: ModelSpec("robot", make_modality(layout=any_id(1, 2) * 2)).bind(CONFIG)),
    ("output 'map', layout: expected values of cfg and tok, got item.width.",
     lambda: declared(layout=any_id(1, item.width))),
    ("output 'map', layout: expected values of cfg and tok, got kwargs.get('n', 3).",
     lambda: declared(layout=any_id(1, 2) * kwargs.get("n", 3))),
    ("output 'a map': expected a name that is a Python identifier, got 'a map'.", lambda: declared("a map")),
    ("output 'map', decode: expected a function (value, scope), got None.", lambda: declared(decode=None)),
    ("spec 'robot': expected one output named 'map', got several.", lambda: spec(declared(), declared())),
]
# fmt: on
OUT = "robot.outputs.map"
REFUSED = [
    *[(InputError, OUT + text, lambda ids: MAP.decode(ids), (ids,)) for text, ids in IDS],
    *[(InputError, OUT + text, lambda output, array: output.encode(array), way) for text, *way in ARRAYS],
    *[(SpecError, f"{OUT}, {text}", provoke, (way,)) for text, provoke, way in BOUND],
    *[(SpecError, text, provoke, ()) for text, provoke in DECLARED],
]


@pytest.mark.parametrize(("error", "text", "provoke", "way"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_wrong_is_a_sentence(error, text, provoke, way):
    expect_refusal(error, text, provoke, *way)

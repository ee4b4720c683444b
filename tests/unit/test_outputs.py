"""Outputs: which ids may stand where, and what becomes of those that do, and of those that may not."""

from types import SimpleNamespace
from typing import NamedTuple

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

from . import naive, test_layout
from .common import NAMES, Tokenizer, make_modality, refuses

CONFIG = SimpleNamespace(vocab_size=200, n=2, pad=100, rows=2, cols=3)
SCOPE = Scope(cfg=CONFIG, tok=Vocabulary(Tokenizer()))
TRAINED = LlamaActionConfig.from_pretrained(CHECKPOINT, name_or_path=str(CHECKPOINT))
FRAME = TERRA.bind(TRAINED).outputs["frame"]


def decode_grid(ids, scope):
    return ids.reshape(scope.cfg.rows, scope.cfg.cols) - 10


def encode_grid(array, scope):
    return array.reshape(-1) + 10


def keep(value, scope):
    return value


GRID = (any_id(10, cfg.pad) * cfg.cols + tok["<image>"]) * cfg.rows + literal(150, 151)


def make_spec(*outputs):
    return ModelSpec("robot", make_modality(layout=embed(120)), outputs=outputs)


def declare_output(name="map", layout=GRID, decode=decode_grid):
    return Output(name, layout, decode)


def bind_output(layout=GRID, decode=decode_grid, encode=encode_grid, **options):
    spec = make_spec(Output("map", layout, decode, encode, **options))
    return spec.bind(CONFIG, Tokenizer()).outputs["map"]


MAP = bind_output()

# -- the layout --------------------------------------------------------------------------------------------------------

NUM_CHOICES = 3


def choose_from(token):
    """Return any_id() of a few ids from this one."""
    return any_id(token, token + NUM_CHOICES)


def list_allowed(tree):
    """Return the ids that may stand at each position of a layout in which embed() is any_id()."""
    allowed = []
    for token, is_choice in naive.lay(tree, test_layout.ENV):
        last = token + NUM_CHOICES if is_choice else token + 1
        allowed.append(range(token, last))
    return allowed


def as_range(ids):
    """Return the ids of a position as a range; a literal position has one number."""
    if isinstance(ids, range):
        return ids
    return range(ids, ids + 1)


@given(test_layout.trees())
def test_a_layout_allows_what_it_says(tree):
    layout = test_layout.build(tree, mark=choose_from)
    allowed = layout.list_allowed_ids(test_layout.SCOPE)
    assert [as_range(ids) for ids in allowed] == list_allowed(tree)
    again = eval(repr(layout), dict(NAMES))
    assert again.list_allowed_ids(test_layout.SCOPE) == allowed
    assert again == layout
    assert hash(again) == hash(layout)


class Sample(NamedTuple):
    """An output, ids that it allows, and those of them that its layout does not fix."""

    output: BoundOutput
    ids: list[int]
    chosen: list[int]


@st.composite
def samples(draw):
    """Outputs of random layouts, which have at least one position to choose, with ids that they allow."""
    allowed = list_allowed(draw(test_layout.trees()))
    allowed.append(range(5))
    parts = []
    ids = []
    chosen = []
    for choices in allowed:
        token = draw(st.sampled_from(choices))
        ids.append(token)
        if len(choices) > 1:
            parts.append(any_id(choices.start, choices.stop))
            chosen.append(token)
        else:
            parts.append(token)
    output = BoundOutput(Output("x", literal(*parts), keep, keep), "m", SCOPE, 200)
    return Sample(output, ids, chosen)


@given(samples())
def test_literals_are_dropped_and_come_back(sample):
    ids = sample.ids
    for form in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint8), torch.tensor(ids)):
        assert sample.output.decode(form).tolist() == sample.chosen
    assert sample.output.encode(np.array(sample.chosen)) == ids


@given(samples())
def test_an_output_says_its_size(sample):
    assert sample.output.num_tokens == len(sample.ids)
    assert sample.output.shape == (len(sample.chosen),)
    assert sample.output.dtype == "int64"


@given(samples(), st.data())
def test_an_id_that_may_not_stand_at_its_position_is_refused(sample, data):
    index = data.draw(st.integers(0, len(sample.ids) - 1))
    allowed = sample.output.allowed[index]
    other = data.draw(st.integers(-3, 200).filter(lambda token: token not in allowed))
    ids = list(sample.ids)
    ids[index] = other
    with pytest.raises(InputError, match=rf"^m\.outputs\.x\[{index}\]: expected "):
        sample.output.decode(ids)


@given(samples(), st.data())
def test_too_few_and_too_many_ids_are_refused(sample, data):
    index = data.draw(st.integers(0, len(sample.ids) - 1))
    too_few = list(sample.ids)
    del too_few[index]
    too_many = list(sample.ids)
    too_many.insert(index, sample.ids[index])
    for ids in (too_few, too_many):
        with pytest.raises(InputError, match=r"^m\.outputs\.x: expected "):
            sample.output.decode(ids)


# -- decode and encode -------------------------------------------------------------------------------------------------

GOOD = [10, 11, 12, 7, 20, 21, 22, 7, 150, 151]
"""Ids that MAP allows."""


def test_a_function_sees_config_and_tokenizer_and_nothing_else():
    scopes = []

    def decode(ids, scope):
        scopes.append(scope)
        return ids

    bind_output(decode=decode).decode(GOOD)
    (scope,) = scopes
    assert scope.cfg is CONFIG
    assert scope.tok["<image>"] == 7
    assert scope.item is None
    assert scope.fields is None
    assert scope.prompt is None
    assert scope.kwargs == {}


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


# -- refusals ----------------------------------------------------------------------------------------------------------

PICTURE = np.zeros((2, 3), np.int64)
ONE = "Sampling for this output stops after one; send the ids of one alone."
BEGINS = "Check where the output begins, and that sampling was confined to it."


@pytest.mark.parametrize(
    ("sentence", "ids"),
    [
        (f": expected 10 ids, got 9. {ONE}", GOOD[1:]),
        (f": expected 10 ids, got 20. {ONE}", GOOD * 2),
        (f": expected 10 ids, got 1. {ONE}", np.array([GOOD])),
        (f"[0]: expected an id from 10 to 99, got 9. {BEGINS}", [9] + GOOD[1:]),
        (f"[3]: expected the id 7, got 8. {BEGINS}", GOOD[:3] + [8] + GOOD[4:]),
        (f"[2]: expected an id from 10 to 99, got 7. {BEGINS}", GOOD[1:] + [10]),
        (f"[0]: expected an id from 10 to 99, got float 10.0. {BEGINS}", [10.0] + GOOD[1:]),
        (f"[0]: expected an id from 10 to 99, got bool True. {BEGINS}", [True] + GOOD[1:]),
        (": expected a sequence of token ids, got a str.", "0123456789"),
        (": expected a sequence of token ids, got a int.", 7),
    ],
)
def test_ids_that_an_output_refuses(sentence, ids):
    with refuses(InputError, f"robot.outputs.map{sentence}"):
        MAP.decode(ids)


def test_an_array_has_the_shape_and_dtype_of_the_output():
    sentence = "robot.outputs.map: expected an array of shape (2, 3) of int64, got shape (3, 2) of int64. Nothing is …"
    with refuses(InputError, sentence):
        MAP.encode(PICTURE.T)
    sentence = "robot.outputs.map: expected an array of shape (2, 3) of int64, got shape (2, 3) of float64. …"
    with refuses(InputError, sentence):
        MAP.encode(PICTURE / 1)


def test_an_output_without_encode_encodes_nothing():
    output = bind_output(encode=None)
    with refuses(InputError, "robot.outputs.map: expected an output with encode, got one without."):
        output.encode(PICTURE)


def test_an_array_that_encode_fails_for():
    def fail(array, scope):
        return [][0]

    output = bind_output(encode=fail)
    with refuses(InputError, "robot.outputs.map: expected an array that the output can be, got IndexError: …"):
        output.encode(PICTURE)


def return_list(ids, scope):
    return ids.tolist()


def return_objects(ids, scope):
    return ids.astype(object)


def return_seven(ids, scope):
    return ids.reshape(7)


@pytest.mark.parametrize(
    ("sentence", "decode"),
    [
        ("expected a numpy array of float16, …, bool, got a list.", return_list),
        ("expected a numpy array of …, got shape (6,) of object.", return_objects),
        ("expected an array for ids that may …, got ValueError: …", return_seven),
    ],
)
def test_what_decode_returns_is_refused(sentence, decode):
    output = bind_output(decode=decode)
    with refuses(SpecError, f"robot.outputs.map, decode: {sentence}"):
        output.decode(GOOD)


def return_first_row(array, scope):
    return array[0]


def return_floats(array, scope):
    return array.reshape(6) / 1


def return_zeros(array, scope):
    return array.reshape(6)


@pytest.mark.parametrize(
    ("sentence", "encode"),
    [
        ("encode: expected (6,) integers, one for each any_id(), got shape (3,) …", return_first_row),
        ("encode: expected (6,) integers, …, got shape (6,) of float64.", return_floats),
        ("encode, position 0: expected an id from 10 to 99, got 0.", return_zeros),
    ],
)
def test_what_encode_returns_is_refused(sentence, encode):
    output = bind_output(encode=encode)
    with refuses(SpecError, f"robot.outputs.map, {sentence}"):
        output.encode(PICTURE)


RESERVED = "expected ids that may be sampled, got the placeholder id 120. End the range …"


@pytest.mark.parametrize(
    ("sentence", "layout"),
    [
        (RESERVED, any_id(110, 130) * 2),
        (RESERVED, any_id(0, 9) + literal(120)),
        ("expected token ids below the vocabulary size 200, got 200. Use …", any_id(130, 201) * 2),
        ("expected at least one any_id(), got none.", literal(1, 2)),
        ("any_id(5, 5): expected at least one id, got range(5, 5).", any_id(5, 5)),
        ("…: expected ids and any_id(), got embed(). What comes out …", any_id(1, 2) + embed(5)),
    ],
)
def test_a_layout_that_no_output_can_have(sentence, layout):
    with refuses(SpecError, f"robot.outputs.map, layout: {sentence}"):
        bind_output(layout)


def test_the_layout_of_items_has_no_any_id():
    spec = ModelSpec("robot", make_modality(layout=any_id(1, 2) * 2))
    sentence = (
        "robot.m, layout: any_id(1, 2): expected ids and embed(), got any_id(). It belongs into the layout of an "
        "Output."
    )
    with refuses(SpecError, sentence):
        spec.bind(CONFIG)


def test_the_layout_of_an_output_reads_the_config_and_the_tokenizer_only():
    with refuses(SpecError, "output 'map', layout: expected values of cfg and tok, got item.width."):
        declare_output(layout=any_id(1, item.width))
    with refuses(SpecError, "output 'map', layout: expected values of cfg and tok, got kwargs.get('n', 3)."):
        declare_output(layout=any_id(1, 2) * kwargs.get("n", 3))


def test_an_output_needs_a_name_that_is_an_identifier():
    with refuses(SpecError, "output 'a map': expected a name that is a Python identifier, got 'a map'."):
        declare_output("a map")


def test_an_output_needs_a_function():
    with refuses(SpecError, "output 'map', decode: expected a function (value, scope), got None."):
        declare_output(decode=None)


def test_outputs_have_different_names():
    with refuses(SpecError, "spec 'robot': expected one output named 'map', got several."):
        make_spec(declare_output(), declare_output())

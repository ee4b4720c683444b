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
from mmkit import (
    InputError,
    ModelSpec,
    Output,
    Policy,
    SpecError,
    Tensor,
    any_id,
    cfg,
    embed,
    item,
    kwargs,
    literal,
    tok,
)
from mmkit.language.expr import Scope
from mmkit.language.vocabulary import Vocabulary
from mmkit.plan.output import AnswerPart, AnswerReader, BoundOutput

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
CONFINED = "Check that sampling was confined to the output."
UNITS = "a mark, 1 to 3 times 3 ids, and a mark"
ONE_OF_TEXT = "Send the ids of one output, with its marks; split_answer() finds them."


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
    spec = ModelSpec("robot", make_modality(layout=embed(120) + any_id(1, 2)))
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


# -- outputs that the config names -------------------------------------------------------------------------------------


def make_outputs(scope):
    return [declare_output(name, any_id(10, scope.cfg.pad) * 6 + tok["<image>"]) for name in scope.cfg.robots]


def bind_outputs(outputs, **config):
    spec = ModelSpec("robot", make_modality(layout=embed(120)), outputs=outputs)
    return spec.bind(SimpleNamespace(**vars(CONFIG), **config), Tokenizer()).outputs


def test_a_function_makes_the_outputs_of_a_config():
    assert list(bind_outputs(make_outputs, robots=["arm", "rover"])) == ["arm", "rover"]
    outputs = bind_outputs(make_outputs, robots=["arm"])
    assert outputs["arm"].where == "robot.outputs.arm"
    assert outputs["arm"].num_tokens == 7
    spec = ModelSpec("robot", make_modality(layout=embed(120)), outputs=make_outputs)
    assert repr(spec).endswith(", outputs=make_outputs)")
    assert spec.model_copy(update={"name": "robot"}) == spec


def test_a_policy_of_an_output_that_the_config_lacks():
    modality = make_modality(name="state", item=Tensor((2,)), layout=embed(120))
    policy = Policy("rover", items={"state": "state"})
    spec = ModelSpec("robot", modality, outputs=make_outputs, policy=policy)
    with refuses(SpecError, "robot.policy, output: expected an output among ['arm'], got 'rover'."):
        spec.bind(SimpleNamespace(**vars(CONFIG), robots=["arm"]), Tokenizer())


@pytest.mark.parametrize(
    ("sentence", "outputs"),
    [
        ("robot.outputs: expected the outputs for this config, got AttributeError: …", lambda scope: scope.cfg.missing),
        ("robot.outputs, outputs: expected outputs, got 'map'.", lambda scope: ["map"]),
        ("robot.outputs: expected one output named 'map', got several.", lambda scope: [declare_output()] * 2),
    ],
)
def test_functions_that_make_no_outputs(sentence, outputs):
    with refuses(SpecError, sentence):
        bind_outputs(outputs)


# -- outputs in a text -------------------------------------------------------------------------------------------------

BEGIN = 7
"""The id of <image>, as the mark of outputs."""
END = 8
"""The id of </image>."""
UNIT = any_id(10, 14) + literal(30) + any_id(12, 18)
MOST = 3


def decode_pairs(ids, scope):
    return ids.reshape(-1, 2) - 10


def encode_pairs(array, scope):
    return array.reshape(-1) + 10


def bind_pairs(layout=UNIT, config=CONFIG, decode=decode_pairs, **marks):
    """Return an output in a text, from id 7 to id 8, of one to three units, unless `marks` has others."""
    marks = {"after": BEGIN, "until": END, "most": MOST, **marks}
    spec = make_spec(Output("pairs", layout, decode, encode_pairs, **marks))
    return spec.bind(config, Tokenizer()).outputs["pairs"]


PAIRS = bind_pairs()
PAIR = bind_pairs(until=None, most=None)

TEXT_IDS = st.integers(0, 6) | st.integers(9, 150)


@st.composite
def bodies(draw):
    """The chosen ids of the units of an output, (units, 2)."""
    num_units = draw(st.integers(1, MOST))
    return [[draw(st.integers(10, 13)), draw(st.integers(12, 17))] for _ in range(num_units)]


def write_output(units):
    """Return the ids of an output of these units, with its marks."""
    ids = [BEGIN]
    for first, last in units:
        ids += [first, 30, last]
    return [*ids, END]


ANSWERS = st.lists(st.lists(TEXT_IDS, min_size=1, max_size=4) | bodies().map(write_output), max_size=5)
"""Answers as lists of texts and outputs."""


@given(bodies())
def test_each_number_of_units_is_encoded_and_decoded(units):
    array = np.array(units) - 10
    ids = PAIRS.encode(array)
    assert ids == write_output(units)
    assert (PAIRS.decode(ids) == array).all()


@given(ANSWERS, st.data())
def test_an_answer_is_split_however_it_comes(answer, data):
    expected = []
    ids = []
    for part in answer:
        is_output = part[0] == BEGIN
        if expected and not is_output and not expected[-1].is_output:  # texts next to one another are one
            expected[-1] = expected[-1]._replace(ids=expected[-1].ids + part)
        else:
            array = PAIRS.decode(part) if is_output else None
            expected.append(AnswerPart(len(ids), part, is_output, array))
        ids += part
    assert_parts(PAIRS.split_answer(ids), expected)
    # an output that the prompt has begun
    cut = data.draw(st.integers(0, len(ids)))
    remainder = PAIRS.split_answer(ids[cut:], ids[:cut])
    outputs = [part for part in expected if part.is_output and part.start + len(part.ids) > cut]
    moved = [part._replace(start=part.start - cut) for part in outputs]
    assert_parts([part for part in remainder if part.is_output], moved)
    # id by id: an output comes when it begins, and when it is whole
    reader = AnswerReader(PAIRS)
    begun = []
    whole = []
    for token in ids:
        for part in reader.find_parts([token]):
            if part.array is not None:
                whole.append(part)
            elif part.is_output:
                begun.append(part.start)
    outputs = [part for part in expected if part.is_output]
    assert begun == [part.start for part in outputs]
    assert_parts(whole, outputs)


def assert_parts(parts, expected):
    assert [part[:3] for part in parts] == [part[:3] for part in expected]
    for part, other in zip(parts, expected, strict=True):
        assert np.array_equal(part.array, other.array)


@given(ANSWERS, st.data())
def test_a_position_depends_on_the_last_ids_alone(answer, data):
    ids = [token for part in answer for token in part]
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    noise = data.draw(st.lists(st.sampled_from([BEGIN, END, 10, 12, 30, 5]), max_size=4))
    for output in (PAIRS, PAIR):
        position = output.find_position(ids)
        assert output.find_position(ids[-output.window :]) == position
        if len(ids) >= output.window:
            assert output.find_position(noise + ids) == position


@pytest.mark.parametrize(
    ("position", "ids"),
    [
        (None, []),
        (None, [5, 10]),
        (0, [BEGIN]),
        (2, [5, BEGIN, 10, 30]),
        (3, [BEGIN, 10, 30, 12]),
        (9, [BEGIN, *[10, 30, 12] * 3]),
        (None, [BEGIN, 10, 30, 12, END]),
        (0, [BEGIN, 10, 30, 12, END, BEGIN]),
        (0, [BEGIN, 10, BEGIN]),
        (None, [BEGIN, 5]),  # a prompt may speak of the mark
        (None, [BEGIN, 10, 30, 5]),
        (None, [BEGIN, 10, END]),
        (None, [BEGIN, *[10, 30, 12] * 4]),
    ],
)
def test_the_position_behind_a_mark(position, ids):
    assert PAIRS.find_position(ids) == position
    assert bind_pairs(until=None, most=None).find_position([BEGIN, 10, 30, 12]) is None


def test_an_output_that_is_cut_off_has_no_array():
    text, pair, cut_off = PAIRS.split_answer([5, *write_output([[10, 12]]), BEGIN, 10])
    assert (text.start, text.ids, text.is_output, text.array) == (0, [5], False, None)
    assert (pair.start, pair.array.tolist()) == (1, [[0, 2]])
    assert (cut_off.start, cut_off.ids, cut_off.is_output, cut_off.array) == (6, [BEGIN, 10], True, None)


def test_an_output_in_a_text_says_its_size():
    assert (PAIRS.num_tokens, PAIRS.window, PAIRS.shape, PAIRS.dtype) == (11, 10, (1, 2), "int64")
    assert (PAIR.num_tokens, PAIR.window, PAIR.shape) == (4, 4, (1, 2))
    assert PAIRS.common is None
    assert not PAIRS.allows_all


@pytest.mark.parametrize(
    ("sentence", "ids"),
    [
        (f"[1]: expected an id from 10 to 13, got 5. {CONFINED}", [BEGIN, 5]),
        (f"[2]: expected the id 30, got 12. {CONFINED}", [BEGIN, 10, 12]),
        (f"[4]: expected an id from 10 to 13 or 8, got 30. {CONFINED}", [BEGIN, 10, 30, 12, 30]),
        (f"[10]: expected the id 8, got 10. {CONFINED}", [BEGIN, *[10, 30, 12] * 3, 10]),
        (": expected a sequence of token ids, got a str.", "0123456789"),
    ],
)
def test_answers_that_cannot_be_split(sentence, ids):
    with refuses(InputError, f"robot.outputs.pairs{sentence}"):
        PAIRS.split_answer(ids)


@pytest.mark.parametrize(
    ("sentence", "ids"),
    [
        (f": expected {UNITS}, got 4 ids. {ONE_OF_TEXT}", [BEGIN, 10, 30, 12]),
        (f": expected {UNITS}, got 14 ids. {ONE_OF_TEXT}", write_output([[10, 12]] * 4)),
        (f": expected {UNITS}, got 2 ids. {ONE_OF_TEXT}", [BEGIN, END]),
        (f"[0]: expected the id 7, got 5. {BEGINS}", [5, 10, 30, 12, END]),
        (f"[4]: expected the id 8, got 10. {BEGINS}", [BEGIN, 10, 30, 12, 10]),
    ],
)
def test_ids_that_are_no_output_of_several_units(sentence, ids):
    with refuses(InputError, f"robot.outputs.pairs{sentence}"):
        PAIRS.decode(ids)


def test_ids_that_are_no_output_of_one_unit():
    remedy = "Send the ids of one output, from its mark on; split_answer() finds them."
    with refuses(InputError, f"robot.outputs.pairs: expected 4 ids, got 3. {remedy}"):
        PAIR.decode([10, 30, 12])


def test_an_array_of_no_number_of_units():
    sentence = "robot.outputs.pairs: expected an array of shape (2, 2) of int64, got shape (4,) of int64. Nothing is …"
    with refuses(InputError, sentence):
        PAIRS.encode(np.zeros(4, np.int64))
    sentence = "robot.outputs.pairs, encode: expected 1 to 3 times 2 integers, one for each any_id(), got …"
    with refuses(SpecError, sentence):
        PAIRS.encode(np.zeros((4, 2), np.int64))
    with refuses(SpecError, sentence):
        PAIRS.encode(np.zeros((0, 2), np.int64))


ENDS = SimpleNamespace(**vars(CONFIG), eos_token_id=[1, 12])


@pytest.mark.parametrize(
    ("sentence", "options"),
    [
        ("after: expected an id that is sampled, got the placeholder id 120. Use another token: …", {"after": 120}),
        ("until: expected an id that is sampled, got the placeholder id 120. Use another token: …", {"until": 120}),
        ("after: expected an id that the layout does not allow, got 30. A mark inside an …", {"after": 30}),
        ("until: expected an id that the layout does not allow, got 17. A mark inside an …", {"until": 17}),
        ("until: expected another id than that of after, got 7.", {"until": BEGIN}),
        ("after: expected token ids below the vocabulary size 200, got 200. …", {"after": 200}),
        ("after: -1: expected a token id, a whole number >= 0, got -1.", {"after": -1}),
        ("most: expected at least one unit, got 0.", {"most": 0}),
        ("most: 2.5: expected a number of units, a whole number >= 0, got 2.5. …", {"most": 2.5}),
        ("most: expected at most 131072 ids of an output, got 50000 units of 3.", {"most": 50000}),
        ("layout: expected ids that end no answer, got 12, with which an answer ends. …", {"config": ENDS}),
    ],
)
def test_marks_that_no_output_can_have(sentence, options):
    with refuses(SpecError, f"robot.outputs.pairs, {sentence}"):
        bind_pairs(**options)


def test_the_end_of_an_answer_may_end_an_output():
    assert bind_pairs(config=SimpleNamespace(**vars(CONFIG), eos_token_id=END)).until == END


@pytest.mark.parametrize(
    ("sentence", "options"),
    [
        (
            ", after: expected one token id, got '<image>'. Write tok[\"<action>\"] or cfg.some_token_id.",
            {"after": "<image>"},
        ),
        (", until: expected one token id, got tok.text('a'). Write tok[…", {"until": tok.text("a")}),
        (", after: expected values of cfg and tok, got item.width.", {"after": item.width}),
        (", most: expected values of cfg and tok, got kwargs.get('n', 3).", {"most": kwargs.get("n", 3)}),
        (": expected until and most together, got no most. most= is the largest number of …", {"most": None}),
        (": expected until and most together, got no until. most= is the largest number of …", {"until": None}),
        (": expected after beside until, got none. The token after begins an output …", {"after": None}),
    ],
)
def test_marks_that_cannot_be_declared(sentence, options):
    with refuses(SpecError, f"output 'pairs'{sentence}"):
        bind_pairs(**options)


def test_marks_are_part_of_the_source():
    output = Output("pairs", UNIT, decode_pairs, after=tok["<image>"], until=cfg.pad, most=cfg.rows)
    assert repr(output).endswith("after=tok['<image>'], until=cfg.pad, most=cfg.rows)")
    assert eval(repr(output), dict(NAMES) | {"decode_pairs": decode_pairs}) == output
    assert output != output.model_copy(update={"most": 2})

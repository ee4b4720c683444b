"""What binding tries out: functions on random items, the largest item in a context, bounds of what a spec may state."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import (
    Audio,
    Image,
    InputError,
    ModelSpec,
    Record,
    SpecError,
    Tensor,
    Text,
    Video,
    batched,
    between,
    cfg,
    derived,
    each,
    embed,
    ending_with,
    fields,
    insert,
    item,
    literal,
    replace,
    tok,
)
from mmkit.language.expr import Scope
from mmkit.language.layout import nothing
from mmkit.plan.bind import bind

from .common import CONFIG, Tokenizer, bind_modality, bind_plan, make_modality

SHAPE = (between(1, 8), 2)
DIFFERS_BESIDE_OTHERS = "different values when other items were beside it"
DIFFERS_NEXT_TIME = "different values when it was processed again, after another item"


# -- functions that make the fields of an item depend on others --------------------------------------------------------


def divide_by_the_largest(items, scope):
    largest = torch.cat(items).abs().max().clamp(min=1e-3)
    return {"x": [value / largest for value in items]}


def repeat_the_first(items, scope):
    return {"x": [items[0]] * len(items)}


def make_process_that_remembers_by_length():
    by_length = {}

    def process(items, scope):
        return {"x": [by_length.setdefault(len(value), value) for value in items]}

    return process


def make_process_that_returns_the_item_before():
    before = []

    def process(items, scope):
        values = []
        for value in items:
            has_other = before and before[-1].shape == value.shape
            values.append(before[-1] if has_other else value)
        before.append(items[-1].clone())
        return {"x": values}

    return process


def reverse(items, scope):
    return {"x": items[::-1]}


def sort_by_length(items, scope):
    return {"x": sorted(items, key=len)}


def divide_by_their_number(items, scope):
    return {"x": [value / len(items) for value in items]}


def subtract_the_running_mean(items, scope):
    means = torch.stack([value.mean() for value in items]).cumsum(0) / torch.arange(1, len(items) + 1)
    return {"x": [value - mean for value, mean in zip(items, means, strict=True)]}


def round_to_bfloat16_if_several(items, scope):
    dtype = torch.float32 if len(items) == 1 else torch.bfloat16
    return {"x": [value.to(dtype).float() for value in items]}


@pytest.mark.parametrize(
    ("process", "got"),
    [
        (divide_by_the_largest, DIFFERS_BESIDE_OTHERS),
        (repeat_the_first, DIFFERS_BESIDE_OTHERS),
        (reverse, DIFFERS_BESIDE_OTHERS),
        (sort_by_length, DIFFERS_BESIDE_OTHERS),
        (divide_by_their_number, DIFFERS_BESIDE_OTHERS),
        (subtract_the_running_mean, DIFFERS_BESIDE_OTHERS),
        (round_to_bfloat16_if_several, DIFFERS_BESIDE_OTHERS),
        pytest.param(make_process_that_returns_the_item_before(), DIFFERS_NEXT_TIME, id="return_the_item_before"),
        pytest.param(
            make_process_that_remembers_by_length(),
            "those of an earlier item of the same sizes",
            id="remember_by_length",
        ),
    ],
)
def test_fields_that_depend_on_other_items_are_refused(process, got):
    expected = "process to return (the same )?x (for an item|of each item), which is cached"
    remedy = "Process each item by itself, or say by cacheable= when to keep the results"
    with pytest.raises(SpecError, match=rf"^spec\.m, process: expected {expected}, got {got}\. {remedy}\.$"):
        bind_modality(item=Tensor(SHAPE), process=process)


def sum_all(items, scope):
    return {"x": [torch.cat(items).sum() for _ in items]}


def round_to_float16(items, scope):
    return {"x": [(value * 3).half().float() / 3 for value in items]}


def count_rows(items, scope):
    return {"x": [torch.tensor(len(value)) for value in items]}


def list_twice(items, scope):
    return {"x": [[value, value] for value in items]}


def number_the_first_character(items, scope):
    return {"x": [torch.tensor(ord(text[0])) for text in items]}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(process=round_to_float16), id="rounding"),
        pytest.param(dict(process=sum_all, cacheable=False), id="a sum of all items that are not cached"),
        pytest.param(dict(process=sum_all, limit=1), id="a sum of all items where there is one"),
        pytest.param(dict(process=count_rows), id="a number per item"),
        pytest.param(dict(process=list_twice), id="a list per item"),
        pytest.param(dict(item=Text(most=9), process=number_the_first_character), id="a number per text"),
    ],
)
def test_functions_that_may_bind(options):
    bind_modality(**({"item": Tensor(SHAPE)} | options))


@pytest.mark.parametrize("kind", [InputError, ValueError])
def test_a_random_item_that_is_refused_says_nothing(kind):
    """What a function takes, no type may be able to say: increasing times, a SMILES."""

    def refuse_decreasing(items):
        for value in items:
            if bool((value.diff() < 0).any()):
                raise kind("times that increase")

    def process(items, scope):
        refuse_decreasing(items)
        return {"x": items}

    def process_together(items, scope):
        refuse_decreasing(items)
        return {"x": [value + len(items) for value in items]}

    bind_modality(item=Tensor((between(5, 9),)), process=process)
    with pytest.raises(SpecError, match="expected process to return the same x"):
        bind_modality(item=Tensor((between(5, 9),)), process=process_together)


def make_process_that_returns(value):
    def process(items, scope):
        return {"x": [copy.deepcopy(value) for _ in items]}

    return process


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (np.ones(2), "a numpy.ndarray"),
        ("text", "a str"),
        ({"a": 1}, "a dict"),
        ([np.int64(1)], "a numpy.int64"),
    ],
)
def test_only_what_vllm_can_send_is_a_field(value, got):
    expected = "tensors, numbers or lists of them as x"
    with pytest.raises(SpecError, match=rf"^spec\.m, process: expected {expected}, got {got}\. vLLM sends"):
        bind_modality(process=make_process_that_returns(value))


def test_a_hidden_field_is_not_sent_and_may_be_anything():
    bind_modality(fields={"x": batched(hidden=True), "n": derived(1)}, process=make_process_that_returns(np.ones(2)))


def divide_by_zero(items, scope):
    return {"x": [value / 0 for value in items]}


def test_fields_without_a_finite_number_are_refused():
    with pytest.raises(SpecError, match="expected process to return finite values as x, got none for random items"):
        bind_modality(process=divide_by_zero)


def test_layouts_that_differ_from_call_to_call_are_refused():
    random = np.random.default_rng(0)

    def lay_out_at_random(scope):
        return embed(5) * int(random.integers(1, 4))

    expected = r"^spec\.m, layout: expected the same layout and target for an item every time"
    with pytest.raises(SpecError, match=expected):
        bind_modality(layout=lay_out_at_random)


def test_rows_that_values_decide_are_refused():
    """An item of zeros does not have the most."""
    expected = "the most encoder rows for the largest item, got 1, and 4 for a random one"
    with pytest.raises(SpecError, match=rf"^spec\.m, item: expected {expected}\. The sizes of an item"):
        bind_modality(item=Tensor((between(1, 8),), "int64", bound=between(1, 4)), layout=embed(5) * fields.x[0])


# -- random items ------------------------------------------------------------------------------------------------------

TYPES = [
    Tensor(SHAPE),
    Tensor((), bound=0.5),
    Tensor((between(0, 3),), "int64"),
    Tensor((3,), "int16", bound=between(7, 9)),
    Tensor((3,), "int8", bound=5),
    Tensor((3,), "uint8"),
    Tensor((3,), "bool"),
    Tensor((3,), "bfloat16", bound=1e-3),
    Text(most=5, least=2),
    Image(largest=(9, 5)),
    Video(largest=(3, 4, 5)),
    Video(largest=(3, 4, 5), metadata=True),
    Audio(largest=50, most=60),
    Record(
        a=Tensor((between(1, 4),)), b=Tensor((item.a.length, 2), "int64", bound=between(0, item.a.length)), c=Text(3)
    ),
]


@pytest.mark.parametrize("kind", TYPES, ids=repr)
@given(sizes=st.lists(st.integers(1, 70), min_size=4, max_size=4), seed=st.integers(0, 9))
def test_random_items_are_accepted_as_they_are(kind, sizes, seed):
    kind = kind.bind(Scope(CONFIG))
    first, second = [kind.random(sizes[: kind.num_sizes], np.random.default_rng(seed)) for _ in range(2)]
    for value in (first, second):
        canonical = kind.canonical(value, "m[0]")
        assert kind.sizes(canonical) == kind.sizes(value)
        assert len(kind.sizes(value)) == kind.num_sizes
    assert repr(first) == repr(second) or isinstance(kind, (Image, Record))


@pytest.mark.parametrize("kind", TYPES, ids=repr)
def test_random_items_may_have_the_sizes_of_the_largest(kind):
    kind = kind.bind(Scope(CONFIG))
    for blank in kind.candidates():
        random = kind.random(kind.sizes(blank), np.random.default_rng(0))
        assert kind.sizes(random) == kind.sizes(blank)
        assert kind.num_bytes(kind.sizes(blank)) > 0


# -- the largest item in a context -------------------------------------------------------------------------------------

LAYOUTS = [
    literal(9) * item.note.length + embed(5) * item.x.length,
    embed(5) * item.x.length + literal(9) * (item.note.length // 3),
    (embed(5) * item.x.length + literal(9)) * item.note.length,
    literal(9) * 3 + embed(5) * (item.x.length + item.note.length),
]
MOST_VALUES = 40
MOST_CHARACTERS = 90


def get_values(items, scope):
    return {"x": [value["x"] for value in items]}


def bind_notes(context, layout, most_values=MOST_VALUES, most_characters=MOST_CHARACTERS):
    """Return the plan of a model whose items are values with a note, for a context."""
    kind = Record(x=Tensor((between(1, most_values),)), note=Text(most=most_characters))
    part = make_modality(item=kind, layout=layout, update=replace(7), fields={"x": batched()}, process=get_values)
    return bind(ModelSpec("spec", part), CONFIG, Tokenizer(), max_model_len=context)


@pytest.mark.parametrize("context", [None, 600, 69])
def test_a_good_item_is_accepted_in_a_context(context):
    """The rows of an item stay as they are where another of its sizes makes the layout long."""
    plan = bind_notes(context, LAYOUTS[0], most_values=64, most_characters=2000)
    assert len(plan.expand([7], {"m": {"x": torch.zeros(64), "note": "short"}})) == 69
    assert plan.modalities["m"].largest.rows == plan.modalities["m"].most_rows == 64


def test_an_item_of_more_rows_than_the_context_has_positions_is_refused():
    plan = bind_notes(50, LAYOUTS[0], most_values=64, most_characters=2000)
    expected = r"^spec\.m\[0\]: expected at most 50 encoder row\(s\), as the context has positions, got 64\."
    with pytest.raises(InputError, match=expected):
        plan.expand([7], {"m": {"x": torch.zeros(64), "note": "short"}})


SIZES = st.tuples(st.integers(1, MOST_VALUES), st.integers(1, MOST_CHARACTERS))


@given(layout=st.sampled_from(LAYOUTS), context=st.integers(5, 300), items=st.lists(SIZES, min_size=1, max_size=5))
def test_what_fits_the_context_is_accepted(layout, context, items):
    """As without a context; and vLLM never gets an item of more rows than it was told."""
    plan = bind_notes(context, layout)
    without_context = bind_notes(None, layout)
    modality = plan.modalities["m"]
    value, rows = modality.largest
    assert rows == modality.lay_out_spec_item(value).num_embeds <= modality.most_rows
    for num_values, num_characters in items:
        data = {"m": {"x": torch.zeros(num_values), "note": "a" * num_characters}}
        expected = without_context.preview([7], data)
        (placement,) = expected.placements
        if len(placement.tokens) <= context:
            assert plan.preview([7], data).prompt_token_ids == expected.prompt_token_ids
            assert placement.tokens.num_embeds <= modality.most_rows


@given(context=st.integers(2, 200), sizes=st.tuples(st.integers(1, 30), st.integers(1, 30)))
def test_the_largest_picture_fits_the_context(context, sizes):
    part = make_modality(
        item=Image(largest=sizes),
        layout=(embed(5) * item.width + literal(9)) * item.height,
        update=replace(7),
        process=make_process_that_returns(1),
    )
    modality = bind(ModelSpec("spec", part), CONFIG, Tokenizer(), max_model_len=context).modalities["m"]
    value, rows = modality.largest
    assert len(modality.lay_out_spec_item(value)) <= context
    most_rows = 0
    for width in range(1, sizes[0] + 1):
        for height in range(1, sizes[1] + 1):
            if (width + 1) * height <= context:
                most_rows = max(most_rows, width * height)
    assert most_rows * 0.6 <= rows <= most_rows


# -- bounds ------------------------------------------------------------------------------------------------------------

BIG_CONFIG = SimpleNamespace(vocab_size=200, big=10**9, text="x" * 100, n=7, ids=[1, 2], form="{:>3000000000}")


def each_of_four_million(body):
    return each(4_000_000, lambda _: body)


LONG_LITERAL = literal(5) * 4_000_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layout=embed(5) * (cfg.big**cfg.big)), "a whole number of more than 4096 bits, with 1000000000, 1000"),
        (dict(layout=embed(5) * ((cfg.n ** (cfg.n ** (cfg.n**cfg.n))) % 5)), "a whole number of more than 4096 bits"),
        (dict(layout=embed(5) * ((cfg.n**1400) * (cfg.n**1400) % 5 + 1)), "a whole number of more than 4096 bits"),
        (
            dict(layout=embed(5) + literal(cfg.ids * cfg.big)),
            "a list or text of 2000000000 elements, of at most 4194304",
        ),
        (dict(layout=embed(5) + literal(tok.text(cfg.text * cfg.big))), "a list or text of 100000000000 elements"),
        (dict(layout=embed(5) * (cfg.form % 7)), "a text has no remainder"),
        (dict(layout=embed(5) * round(cfg.n, -cfg.big)), "a number of more than 4096 digits"),
        (dict(layout=embed(5) + tok.text("{:>3000000000}", cfg.n)), "the width '>3000000000' in the template"),
        (dict(layout=embed(5) + tok.text(cfg.form, cfg.n)), "the width '>3000000000' in the template"),
        (dict(layout=embed(5) + tok.text("{:{}}", cfg.n, cfg.big)), "the width '{}' in the template"),
        (
            dict(layout=embed(5) + each_of_four_million(each_of_four_million(nothing))),
            "expected at most 131072 rounds of all each() of a layout, got 4000000",
        ),
        (dict(layout=embed(5) + each(cfg.big, lambda x: nothing)), "expected at most 131072 rounds of all each()"),
        (dict(layout=embed(5) + literal(LONG_LITERAL, LONG_LITERAL)), "expected at most 4194304 ids, got 8000001"),
        (
            dict(item=Tensor((10**9,))),
            "item: Tensor.largest: expected an item of at most 2 GiB, got (1000000000,), which takes 4 GiB.",
        ),
        (dict(item=Tensor((between(1, 10**10),))), "got (10000000000,), which takes 38 GiB."),
        (dict(item=Tensor((0, 10**30))), "expected an item of at most 2 GiB"),
        (dict(item=Text(most=10**12)), "item: Text.largest: expected an item of at most 2 GiB"),
        (dict(item=Image(largest=(10**6, 10**6))), "item: Image.largest: expected an item of at most 2 GiB"),
        (dict(item=Video(largest=(10**6, 10**3, 10**3))), "item: Video.largest: expected an item of at most 16 GiB"),
        (dict(item=Audio(largest=10**10)), "item: Audio.largest: expected an item of at most 2 GiB"),
        (
            dict(process=get_values, item=Record(a=Tensor((10**9,)))),
            "item: Record.a: Tensor.largest: expected an item of at most 2 GiB",
        ),
    ],
)
def test_what_takes_all_time_or_memory_is_refused(options, message):
    spec = ModelSpec("spec", make_modality(**({"item": Tensor((2,)), "update": replace(7)} | options)))
    with pytest.raises(SpecError) as caught:
        spec.bind(BIG_CONFIG, Tokenizer())
    assert message in str(caught.value), str(caught.value)


def repeat_by_each(body):
    """Return a layout that has the body once for each of the values of an item."""
    return each(item.length, lambda _: body)


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        pytest.param(repeat_by_each(repeat_by_each(literal(6))), 4, id="inside one another"),
        pytest.param(repeat_by_each(literal(6)) + repeat_by_each(literal(6)) * 3, 10, id="one after the other"),
    ],
)
def test_the_rounds_of_all_loops_count(monkeypatch, layout, most):
    """Each evaluation of a layout begins anew."""
    monkeypatch.setattr("mmkit.language.layout.MAX_ROUNDS", 20)
    bind_modality(item=Tensor((between(1, 99),), largest=(most,)), layout=embed(5) + layout)
    with pytest.raises(SpecError, match="at most 20 rounds of all each"):
        bind_modality(item=Tensor((between(1, 99),), largest=(most + 1,)), layout=embed(5) + layout)


def test_many_rounds_bind():
    layout = embed(5) + each(100, lambda _: each(100, lambda _: literal(6)))
    part = make_modality(layout=layout, item=Tensor((2,)), update=replace(7))
    plan = ModelSpec("spec", part).bind(BIG_CONFIG)
    assert len(plan.expand([7], {"m": torch.zeros(2)})) == 10_001


def test_large_powers_bind():
    assert bind_modality(item=Tensor((2,)), layout=embed(5) * (cfg.n**12 // cfg.n**11)) is not None


def test_a_repeated_list_of_the_config_binds():
    part = make_modality(layout=embed(5) + literal(cfg.ids * 3), update=replace(7), item=Tensor((2,)))
    assert ModelSpec("spec", part).bind(BIG_CONFIG)


# -- placeholders of other modalities ----------------------------------------------------------------------------------

PLACEHOLDER_OF_M = r"'\x05', the placeholder of m"
PLACEHOLDER_OF_N = r"'\x06', the placeholder of n"


@pytest.mark.parametrize(
    ("options", "sentence", "token"),
    [
        pytest.param(
            dict(update=replace(5)),
            "spec.n, update: expected ids that are no placeholder of another modality",
            PLACEHOLDER_OF_M,
            id="a target",
        ),
        pytest.param(
            dict(update=replace([9, 5])),
            "spec.n, update: expected ids that are no placeholder of another modality",
            PLACEHOLDER_OF_M,
            id="in a target",
        ),
        pytest.param(
            dict(update=insert(after=5)),
            "spec.n, update: expected ids that are no placeholder",
            PLACEHOLDER_OF_M,
            id="a prefix",
        ),
        pytest.param(
            dict(update=insert(after=6)),
            "spec.n, update: expected ids that are no placeholder",
            PLACEHOLDER_OF_N,
            id="the placeholder of the modality as its prefix",
        ),
        pytest.param(
            dict(layout=embed(6) + literal(5)),
            "spec.n, layout: expected ids that are no placeholder of another modality",
            PLACEHOLDER_OF_M,
            id="in a layout",
        ),
    ],
)
def test_placeholders_of_others_are_refused_where_no_item_stands(options, sentence, token):
    """Without items of the other modality, each such prompt would be refused."""
    second = make_modality("n", **({"layout": embed(6), "fields": {"y": batched()}} | options))
    with pytest.raises(SpecError) as caught:
        bind_plan(make_modality(), second)
    assert str(caught.value).startswith(f"{sentence}, got {token}. Use another token: without items of ")


def test_placeholders_are_refused_at_the_end_of_a_prompt():
    second = make_modality("n", layout=embed(6), fields={"y": batched()})
    with pytest.raises(SpecError) as caught:
        bind_plan(make_modality(), second, prompt=ending_with([9, 5]))
    sentence = f"spec.prompt: expected ids that are no placeholder, got {PLACEHOLDER_OF_M}."
    assert str(caught.value).startswith(f"{sentence} Use another token: without items of ")


def test_a_placeholder_that_modalities_share_may_be_the_target_of_each():
    bind_plan(
        make_modality(update=replace(5)),
        make_modality("n", layout=embed(5), update=replace(9), fields={"y": batched()}),
    )


# -- derived fields ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (item.length / 2, "int64"),
        (fields.n[0] * 200, "uint8"),
        (item.length * 100, "uint8"),
    ],
)
def test_derived_numbers_are_not_cut_off(value, dtype):
    """Neither halves, nor what the dtype does not hold."""

    def process(items, scope):
        return {"x": items, "n": [torch.tensor([len(value)]) for value in items]}

    declared = {"x": batched(), "n": batched(hidden=True), "d": derived(value, dtype=dtype)}
    expected = rf"fields\['d'\]: (value: )*expected numbers (that {dtype} holds|for a {dtype})"
    with pytest.raises(SpecError, match=expected):
        bind_modality(item=Tensor((between(3, 8),)), fields=declared, process=process)


def test_a_derived_field_without_a_value_is_a_mistake_of_the_spec():
    def find_number(scope):
        raise ValueError("no number")

    def process(items, scope):
        return {"x": items}

    with pytest.raises(SpecError, match=r"spec\.m, fields\['d'\]: expected a value, got ValueError: no number\.$"):
        bind_modality(fields={"x": batched(), "d": derived(find_number)}, process=process)

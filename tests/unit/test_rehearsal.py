"""What binding tries out: functions on random items, the largest item in a context, bounds of what a spec may state."""

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
OTHERS = "different values when other items were beside it"
AGAIN = "different values when it was processed again, after another item"


# -- functions that make the fields of an item depend on others --------------------------------------------------------


def divided_by_the_largest(items, scope):
    largest = torch.cat(items).abs().max().clamp(min=1e-3)
    return {"x": [value / largest for value in items]}


def the_first_for_all(items, scope):
    return {"x": [items[0]] * len(items)}


def by_length():
    known = {}
    return lambda items, scope: {"x": [known.setdefault(len(value), value) for value in items]}


def the_one_before():
    before = []

    def process(items, scope):
        made = [before[-1] if before and before[-1].shape == value.shape else value for value in items]
        before.append(items[-1].clone())
        return {"x": made}

    return process


def in_reverse(items, scope):
    return {"x": items[::-1]}


def by_length_in_order(items, scope):
    return {"x": sorted(items, key=len)}


def divided_by_their_number(items, scope):
    return {"x": [value / len(items) for value in items]}


def running_mean(items, scope):
    means = torch.stack([value.mean() for value in items]).cumsum(0) / torch.arange(1, len(items) + 1)
    return {"x": [value - mean for value, mean in zip(items, means, strict=True)]}


def in_bfloat16_if_several(items, scope):
    dtype = torch.float32 if len(items) == 1 else torch.bfloat16
    return {"x": [value.to(dtype).float() for value in items]}


@pytest.mark.parametrize(
    ("process", "got"),
    [
        (divided_by_the_largest, OTHERS),
        (the_first_for_all, OTHERS),
        (in_reverse, OTHERS),
        (by_length_in_order, OTHERS),
        (divided_by_their_number, OTHERS),
        (running_mean, OTHERS),
        (in_bfloat16_if_several, OTHERS),
        (the_one_before(), AGAIN),
        (by_length(), "those of an earlier item of the same sizes"),
    ],
)
def test_fields_that_depend_on_other_items_are_refused(process, got):
    expected = "process to return (the same )?x (for an item|of each item), which is cached"
    remedy = "Process each item by itself, or say by cacheable= when to keep the results"
    with pytest.raises(SpecError, match=rf"^spec\.m, process: expected {expected}, got {got}\. {remedy}\.$"):
        bind_modality(item=Tensor(SHAPE), process=process)


def sum_of_all(items, scope):
    return {"x": [torch.cat(items).sum() for _ in items]}


def rounded(items, scope):
    return {"x": [(value * 3).half().float() / 3 for value in items]}


@pytest.mark.parametrize(
    "options",
    [
        dict(process=rounded),
        dict(process=sum_of_all, cacheable=False),
        dict(process=sum_of_all, limit=1),
        dict(process=lambda items, scope: {"x": [torch.tensor(len(value)) for value in items]}),
        dict(process=lambda items, scope: {"x": [[value, value] for value in items]}),
        dict(item=Text(most=9), process=lambda items, scope: {"x": [torch.tensor(ord(text[0])) for text in items]}),
    ],
)
def test_functions_that_may_bind(options):
    bind_modality(**{"item": Tensor(SHAPE), **options})


@pytest.mark.parametrize("kind", [InputError, ValueError])
def test_a_random_item_that_is_refused_says_nothing(kind):
    """What a function takes, no type may be able to say: increasing times, a SMILES."""

    def process(items, scope):
        for value in items:
            if bool((value.diff() < 0).any()):
                raise kind("times that increase")
        return {"x": items}

    bind_modality(item=Tensor((between(5, 9),)), process=process)
    with pytest.raises(SpecError, match="expected process to return the same x"):
        bind_modality(
            item=Tensor((between(5, 9),)),
            process=lambda items, scope: process(items, scope) and {"x": [value + len(items) for value in items]},
        )


def test_only_what_vllm_can_send_is_a_field():
    for made, got in (
        (np.ones(2), "a numpy.ndarray"),
        ("text", "a str"),
        ({"a": 1}, "a dict"),
        ([np.int64(1)], "a numpy.int64"),
    ):
        expected = "tensors, numbers or lists of them as x"
        with pytest.raises(SpecError, match=rf"^spec\.m, process: expected {expected}, got {got}\. vLLM sends"):
            bind_modality(process=lambda items, scope, made=made: {"x": [made for _ in items]})
    bind_modality(
        fields={"x": batched(hidden=True), "n": derived(1)},
        process=lambda items, scope: {"x": [np.ones(2) for _ in items]},
    )


def test_fields_without_a_finite_number_are_refused():
    with pytest.raises(SpecError, match="expected process to return finite values as x, got none for random items"):
        bind_modality(process=lambda items, scope: {"x": [value / 0 for value in items]})


def test_layouts_that_differ_from_call_to_call_are_refused():
    random = np.random.default_rng(0)
    with pytest.raises(
        SpecError, match=r"^spec\.m, layout: expected the same layout and target for an item every time"
    ):
        bind_modality(layout=lambda scope: embed(5) * int(random.integers(1, 4)))


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
    wanted = sizes[: kind.num_sizes]
    values = [kind.random(wanted, np.random.default_rng(seed)) for _ in range(2)]
    for value in values:
        made = kind.canonical(value, "m[0]")
        assert kind.sizes(made) == kind.sizes(value)
        assert len(kind.sizes(value)) == kind.num_sizes
    assert repr(values[0]) == repr(values[1]) or isinstance(kind, (Image, Record))
    for blank in kind.candidates():
        again = kind.random(kind.sizes(blank), np.random.default_rng(0))
        assert kind.sizes(again) == kind.sizes(blank)
        assert kind.num_bytes(kind.sizes(blank)) > 0


# -- the largest item in a context -------------------------------------------------------------------------------------

LAYOUTS = [
    literal(9) * item.note.length + embed(5) * item.x.length,
    embed(5) * item.x.length + literal(9) * (item.note.length // 3),
    (embed(5) * item.x.length + literal(9)) * item.note.length,
    literal(9) * 3 + embed(5) * (item.x.length + item.note.length),
]
MANY, LONG = 40, 90


def plan_in(context, layout):
    kind = Record(x=Tensor((between(1, MANY),)), note=Text(most=LONG))
    part = make_modality(item=kind, layout=layout, update=replace(7), fields={"x": batched()}, process=first_part)
    return bind(ModelSpec("spec", part), CONFIG, Tokenizer(), max_model_len=context)


def first_part(items, scope):
    return {"x": [value["x"] for value in items]}


def test_a_good_item_is_accepted_in_a_context():
    """The rows of an item stay as they are where another of its sizes makes the layout long."""
    kind = Record(x=Tensor((between(1, 64),)), note=Text(most=2000))
    part = make_modality(item=kind, layout=LAYOUTS[0], update=replace(7), fields={"x": batched()}, process=first_part)
    data = {"m": {"x": torch.zeros(64), "note": "short"}}
    for context in (None, 600, 69):
        plan = bind(ModelSpec("spec", part), CONFIG, Tokenizer(), max_model_len=context)
        assert len(plan.expand([7], data)) == 69
        assert plan.modalities["m"].largest[1] == plan.modalities["m"].most_rows == 64
    short = bind(ModelSpec("spec", part), CONFIG, Tokenizer(), max_model_len=50)
    expected = r"^spec\.m\[0\]: expected at most 50 encoder row\(s\), as the context has positions, got 64\."
    with pytest.raises(InputError, match=expected):
        short.expand([7], data)


@given(
    layout=st.sampled_from(LAYOUTS),
    context=st.integers(5, 300),
    sent=st.lists(st.tuples(st.integers(1, MANY), st.integers(1, LONG)), min_size=1, max_size=5),
)
def test_what_fits_the_context_is_accepted(layout, context, sent):
    """As without a context; and vLLM never gets an item of more rows than it was told."""
    plan = plan_in(context, layout)
    own = plan.modalities["m"]
    value, rows = own.largest
    assert rows == own.lay_out_spec_item(value).num_embeds <= own.most_rows
    for length, note in sent:
        data = {"m": {"x": torch.zeros(length), "note": "a" * note}}
        free = plan_in(None, layout).preview([7], data)
        (placed,) = free.placements
        if len(placed.tokens) > context:
            continue
        assert plan.preview([7], data).prompt_token_ids == free.prompt_token_ids
        assert placed.tokens.num_embeds <= own.most_rows


@given(context=st.integers(2, 200), sizes=st.tuples(st.integers(1, 30), st.integers(1, 30)))
def test_the_largest_picture_fits_the_context(context, sizes):
    layout = (embed(5) * item.width + literal(9)) * item.height
    part = make_modality(
        item=Image(largest=sizes),
        layout=layout,
        update=replace(7),
        process=lambda items, scope: {"x": [1] * len(items)},
    )
    own = bind(ModelSpec("spec", part), CONFIG, Tokenizer(), max_model_len=context).modalities["m"]
    value, rows = own.largest
    assert len(own.lay_out_spec_item(value)) <= context
    best = max(w * h for w in range(1, sizes[0] + 1) for h in range(1, sizes[1] + 1) if (w + 1) * h <= context)
    assert best * 0.6 <= rows <= best


# -- bounds ------------------------------------------------------------------------------------------------------------

BIG = SimpleNamespace(vocab_size=200, big=10**9, text="x" * 100, n=7, ids=[1, 2], form="{:>3000000000}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layout=embed(5) * (cfg.big**cfg.big)), "a whole number of more than 4096 bits, with 1000000000, 1000"),
        (dict(layout=embed(5) * ((cfg.n ** (cfg.n ** (cfg.n**cfg.n))) % 5)), "a whole number of more than 4096 bits"),
        (dict(layout=embed(5) * ((cfg.n**1400) * (cfg.n**1400) % 5 + 1)), "a whole number of more than 4096 bits"),
        (dict(layout=literal(cfg.ids * cfg.big)), "a list or text of 2000000000 elements, of at most 4194304"),
        (dict(layout=embed(5) + literal(tok.text(cfg.text * cfg.big))), "a list or text of 100000000000 elements"),
        (dict(layout=embed(5) * (cfg.form % 7)), "a text has no remainder"),
        (dict(layout=embed(5) * round(cfg.n, -cfg.big)), "a number of more than 4096 digits"),
        (dict(layout=embed(5) + tok.text("{:>3000000000}", cfg.n)), "the width '>3000000000' in the template"),
        (dict(layout=embed(5) + tok.text(cfg.form, cfg.n)), "the width '>3000000000' in the template"),
        (dict(layout=embed(5) + tok.text("{:{}}", cfg.n, cfg.big)), "the width '{}' in the template"),
        (
            dict(layout=embed(5) + each(4_000_000, lambda x: each(4_000_000, lambda y: nothing))),
            "expected at most 131072 rounds of all each() of a layout, got 4000000",
        ),
        (dict(layout=embed(5) + each(cfg.big, lambda x: nothing)), "expected at most 131072 rounds of all each()"),
        (dict(layout=literal(*[literal(5) * 4_000_000] * 2)), "expected at most 4194304 ids, got 8000000"),
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
            dict(process=first_part, item=Record(a=Tensor((10**9,)))),
            "item: Record.a: Tensor.largest: expected an item of at most 2 GiB",
        ),
    ],
)
def test_what_takes_all_time_or_memory_is_refused(options, message):
    spec = ModelSpec("spec", make_modality(**{"item": Tensor((2,)), "update": replace(7), **options}))
    with pytest.raises(SpecError) as caught:
        spec.bind(BIG, Tokenizer())
    assert message in str(caught.value), str(caught.value)


def test_the_rounds_of_all_loops_count(monkeypatch):
    """Inside one another, and one after the other; each evaluation of a layout begins anew."""
    monkeypatch.setattr("mmkit.language.layout.MAX_ROUNDS", 20)
    inside = each(item.length, lambda x: each(item.length, lambda y: literal(6)))
    after = each(item.length, lambda x: literal(6)) + each(item.length, lambda x: literal(6)) * 3
    for layout, most in ((inside, 4), (after, 10)):
        bind_modality(item=Tensor((between(1, 99),), largest=(most,)), layout=embed(5) + layout)
        with pytest.raises(SpecError, match="at most 20 rounds of all each"):
            bind_modality(item=Tensor((between(1, 99),), largest=(most + 1,)), layout=embed(5) + layout)


def test_what_is_large_and_reasonable_binds():
    layout = embed(5) + each(100, lambda x: each(100, lambda y: literal(6)))
    part = make_modality(layout=layout, item=Tensor((2,)), update=replace(7))
    assert len(ModelSpec("spec", part).bind(BIG).expand([7], {"m": torch.zeros(2)})) == 10_001
    assert bind_modality(item=Tensor((2,)), layout=embed(5) * (cfg.n**12 // cfg.n**11)) is not None
    assert ModelSpec(
        "spec", make_modality(layout=embed(5) + literal(cfg.ids * 3), update=replace(7), item=Tensor((2,)))
    ).bind(BIG)


# -- ids of others -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "others", "options"),
    [
        ("spec.n, update: expected ids that are no placeholder of another modality", dict(update=replace(5)), {}),
        ("spec.n, update: expected ids that are no placeholder of another modality", dict(update=replace([9, 5])), {}),
        ("spec.n, update: expected ids that are no placeholder", dict(update=insert(after=5)), {}),
        ("spec.n, update: expected ids that are no placeholder", dict(update=insert(after=6)), {}),
        (
            "spec.n, layout: expected ids that are no placeholder of another modality",
            dict(layout=embed(6) + literal(5)),
            {},
        ),
        ("spec.prompt: expected ids that are no placeholder", {}, dict(prompt=ending_with([9, 5]))),
    ],
)
def test_placeholders_of_others_are_refused_where_no_item_stands(where, others, options):
    """Without items of the other modality, each such prompt would be refused."""
    with pytest.raises(SpecError) as caught:
        bind_plan(
            make_modality(), make_modality("n", **{"layout": embed(6), "fields": {"y": batched()}, **others}), **options
        )
    token = (
        r"'\x06', the placeholder of n" if others.get("update") == insert(after=6) else r"'\x05', the placeholder of m"
    )
    assert str(caught.value).startswith(f"{where}, got {token}. Use another token: without items of ")


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
    declared = {"x": batched(), "n": batched(hidden=True), "d": derived(value, dtype=dtype)}
    with pytest.raises(
        SpecError, match=rf"fields\['d'\]: (value: )*expected numbers (that {dtype} holds|for a {dtype})"
    ):
        bind_modality(
            item=Tensor((between(3, 8),)),
            fields=declared,
            process=lambda items, scope: {"x": items, "n": [torch.tensor([len(value)]) for value in items]},
        )

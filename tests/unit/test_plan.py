"""Plans: what a bound spec makes of data, prompts and requests, without vLLM."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit import (
    Image,
    InputError,
    List,
    Modality,
    ModelSpec,
    Record,
    SpecError,
    Tensor,
    Text,
    Video,
    already_expanded,
    batched,
    between,
    cfg,
    constant,
    derived,
    each,
    embed,
    ending_with,
    fields,
    flat,
    hf,
    insert,
    item,
    kwargs,
    later,
    literal,
    proc,
    replace,
    select,
    tok,
    where,
)
from mmkit.plan.bind import bind, plan_for_options
from mmkit.plan.item import Item, make_items
from mmkit.plan.parsing import ItemBatch

from .common import CONFIG, Tokenizer, bind_modality, bind_plan, expect_refusal, make_modality

ONE = torch.zeros(2, 2)
IMAGE = Modality(
    "image",
    item=Tensor(shape=(between(0, 4),)),
    layout=embed(tok["<image>"]) * (item.length + 1),
    update=replace(tok["<image>"]),
    fields={"image": batched()},
)
NUMBERED = replace(tok["<|image_{}|>", item.index + 1])
UP_TO_FOUR = Tensor((between(1, 4),))


def lay_out_one_row(scope):
    """A layout of a function: of it nothing is known before it is called."""
    return embed(5)


def list_ids(modality, value=ONE, index=0, fields=None, is_embedding=False):
    """Return the ids of the layout of an item, which may be a namespace of its facts: the same list where the layout
    is not evaluated again."""
    evaluator = modality.embedding_layout_evaluator if is_embedding else modality.layout_evaluator
    return evaluator.evaluate(modality.scopes.make(value, index, fields)).tokens.ids


def make_facts(**facts):
    """Return the facts of a first item."""
    return SimpleNamespace(index=0, **facts)


def count_largest_rows(modality):
    return modality.largest.rows


# -- limits and caches -------------------------------------------------------------------------------------------------


def test_by_default_items_have_no_limit_and_are_cached():
    modality = bind_modality()
    assert modality.limit is None
    assert modality.are_independent(3)
    assert modality.parser.embeds_field == "m_embeds"
    assert not modality.layout_evaluator.depends_on_index
    assert modality.field_processor.hf_call is None


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (cfg.n, 2)], ids=["a number", "a number of the config"])
def test_the_limit_is_bound(limit, expected):
    assert bind_modality(limit=limit).limit == expected


def test_items_are_not_cached_where_the_spec_says_so():
    assert not bind_modality(cacheable=False).are_independent(1)


def test_whether_items_are_cached_may_depend_on_their_number():
    modality = bind_modality(layout=embed(5) * item.count, cacheable=item.count <= 2)
    assert modality.are_independent(1)
    assert modality.are_independent(2)
    assert not modality.are_independent(3)
    assert modality.are_independent(2), "the last count decides nothing"


# -- layouts of items --------------------------------------------------------------------------------------------------


def test_a_numbered_target_depends_on_the_index():
    modality = bind_modality(update=NUMBERED)
    assert modality.layout_evaluator.depends_on_index
    targets = []
    for index in (0, 1, 0):
        layout = modality.layout_evaluator.evaluate(modality.scopes.make(ONE, index))
        targets.append(layout.updates[0].target)
    assert targets == [(181,), (182,), (181,)]


def test_a_layout_that_reads_no_index_is_evaluated_once_for_all_indices():
    modality = bind_modality(layout=embed(5) * item.length)
    assert list_ids(modality) is list_ids(modality, index=1)


def test_a_layout_of_a_function_is_evaluated_per_item():
    modality = bind_modality(layout=lay_out_one_row)
    assert list_ids(modality) is not list_ids(modality)
    assert modality.layout_evaluator.depends_on_index
    assert modality.layout_evaluator.varies
    assert modality.needs_row_count


def test_a_layout_of_a_function_may_read_the_index():
    def lay_out_by_index(scope):
        return embed(5) * scope.item.index + embed(5)

    assert list_ids(bind_modality(layout=lay_out_by_index), index=2) == [5, 5, 5]


def test_embeddings_may_have_another_layout():
    modality = bind_modality(embeds=embed(6) * item.rows)
    assert modality.embedding_layout_evaluator.varies
    assert not modality.layout_evaluator.varies
    assert list_ids(modality, make_facts(rows=3), is_embedding=True) == [6, 6, 6]
    assert list_ids(modality, make_facts(rows=3)) == [5]


def test_embeddings_have_the_layout_of_raw_items_if_the_spec_gives_no_other():
    assert list_ids(bind_modality(embeds=True), make_facts(rows=3), is_embedding=True) == [5]


def test_a_layout_may_read_the_metadata_of_a_video():
    rows = where(item.metadata == None, 4, item.metadata["n"])  # noqa: E711
    modality = bind_modality(item=Video(largest=(2, 4, 4)), layout=embed(5) * rows)
    assert len(list_ids(modality, make_facts(metadata=None))) == 4
    assert len(list_ids(modality, make_facts(metadata={"n": 2}))) == 2


def lay_out_by_length(scope):
    return embed(5 + scope.item.length // 2)


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        pytest.param(
            dict(item=UP_TO_FOUR, layout=where(item.length > 3, embed(5), embed(6))), {5, 6}, id="of both branches"
        ),
        pytest.param(dict(item=UP_TO_FOUR, layout=lay_out_by_length), {5, 6, 7}, id="of a function, on its items"),
        pytest.param(dict(layout=select(fields.x, embed=tok["<image>"]), process=hf()), {7}, id="of selected ids"),
        pytest.param(dict(embeds=embed(6)), {5, 6}, id="of embeddings"),
    ],
)
def test_prompts_are_guarded_against_the_placeholders_of_every_layout(options, ids):
    assert bind_modality(**options).layout_evaluator.guard.ids == ids


TWO_BY_THREE = {"x": torch.tensor([2, 3])}
TWO_BY_FOUR = {"x": torch.tensor([2, 4])}


def test_items_that_differ_in_what_no_layout_reads_share_a_layout():
    modality = bind_modality(layout=embed(5) * fields.x[0], process=hf())
    assert list_ids(modality, fields=TWO_BY_THREE) is list_ids(modality, fields=TWO_BY_FOUR)


def test_items_that_differ_in_what_the_layout_reads_share_none():
    modality = bind_modality(layout=embed(5) * fields.x[0] * fields.x[1], process=hf())
    assert len(list_ids(modality, fields=TWO_BY_THREE)) == 6
    assert len(list_ids(modality, fields=TWO_BY_FOUR)) == 8


COUNTS = {"n": batched(shape=(), dtype="int64"), "k": batched(shape=(1,), dtype="int64")}
COUNTS_AND_X = {"n": COUNTS["n"], "k": COUNTS["k"], "x": COUNTS["n"]}
SUM_OF_COUNTS = embed(5) * (fields.n + fields.k[0])


def test_the_rows_of_embeddings_are_counted_from_their_fields():
    modality = bind_modality(layout=embed(5) * fields.n, fields=COUNTS, embeds=True, process=hf())
    assert modality.embedding_layout_evaluator.count_rows({"n": torch.tensor(4)}) == 4


def test_each_layout_tells_the_fields_that_it_reads():
    layout_of_embeddings = embed(5) * (fields.k[0] + fields.x)
    modality = bind_modality(layout=SUM_OF_COUNTS, embeds=layout_of_embeddings, fields=COUNTS_AND_X, process=hf())
    assert modality.layout_evaluator.fields == {"n", "k"}
    assert modality.embedding_layout_evaluator.fields == {"k", "x"}


BY_INDEX = tok.text("{}", item.index) + embed(5)


@pytest.mark.parametrize(
    ("options", "needs_row_count"),
    [
        pytest.param({}, False, id="of one layout and a batched field"),
        pytest.param(dict(fields={"x": flat(2)}), True, id="whose fields do not tell their number"),
        pytest.param(dict(layout=embed(5) * item.length), True, id="of different lengths"),
        pytest.param(dict(layout=SUM_OF_COUNTS, fields=COUNTS_AND_X, process=hf()), True, id="of different fields"),
        pytest.param(dict(layout=embed(5) * (item.index + 1), cacheable=False), True, id="of rows by index"),
        pytest.param(dict(layout=BY_INDEX, cacheable=False), True, id="of texts by index"),
    ],
)
def test_the_model_gets_the_number_of_rows_of_items(options, needs_row_count):
    assert bind_modality(**options).needs_row_count == needs_row_count


def test_the_model_gets_the_number_of_rows_where_options_change_it():
    """Otherwise the model would count with the fixed number of the server's plan."""
    plan = bind_plan(make_modality(layout=embed(5) * kwargs.get("size", 1)))
    assert not plan.modalities["m"].needs_row_count
    assert not plan_for_options(plan, {"other": 1}, None).modalities["m"].needs_row_count
    assert plan_for_options(plan, {"size": 2}, None).modalities["m"].needs_row_count


# -- the largest item --------------------------------------------------------------------------------------------------

FOUR_OR_ONE = Tensor((between(1, 4),), largest=[(4,), (1,)])
ROWS_OF_X = embed(5) * fields.x[0]


def test_the_largest_item_has_the_most_rows():
    assert count_largest_rows(bind_modality(item=UP_TO_FOUR, layout=embed(5) * (item.length + 1))) == 5


def test_the_largest_of_several_sizes_is_the_one_with_the_most_rows():
    modality = bind_modality(item=Image(largest=[(9, 1), (3, 4), (2, 2)]), layout=embed(5) * item.width * item.height)
    assert modality.largest_item().size == (3, 4)
    assert count_largest_rows(modality) == 12
    assert modality.largest_item({"width": 2}).size == (2, 4)


def test_the_largest_item_may_be_the_smallest_one():
    assert count_largest_rows(bind_modality(item=FOUR_OR_ONE, layout=embed(5) * (9 - item.length))) == 8


def test_the_fields_of_a_function_tell_the_largest_item():
    def process(items, scope):
        return {"x": [[9 - len(value)] for value in items]}

    modality = bind_modality(item=FOUR_OR_ONE, layout=ROWS_OF_X, process=process)
    assert not modality.needs_hf
    assert count_largest_rows(modality) == 8


def test_a_layout_that_reads_no_field_needs_no_hugging_face_processor():
    modality = bind_modality(process=hf())
    assert not modality.needs_hf
    assert count_largest_rows(modality) == 1


def test_a_layout_that_reads_derived_fields_of_facts_needs_no_hugging_face_processor():
    declared = {"half": derived(item.length + 1, hidden=True), "n": derived(fields.half * 2), "x": batched()}
    modality = bind_modality(process=hf(), item=FOUR_OR_ONE, fields=declared, layout=embed(5) * fields.n)
    assert not modality.needs_hf
    assert count_largest_rows(modality) == 10


def test_a_layout_that_reads_a_field_needs_the_hugging_face_processor():
    modality = bind_modality(process=hf(), layout=ROWS_OF_X)
    assert modality.needs_hf
    assert modality.largest_item().shape == (2, 2)


def test_a_layout_of_a_function_may_need_the_hugging_face_processor():
    assert bind_modality(process=hf(), layout=lay_out_one_row).needs_hf


# -- targets and calls -------------------------------------------------------------------------------------------------


def resolve_seven(scope):
    return 7


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        pytest.param(dict(update=[already_expanded(), NUMBERED]), {(181,): True, (182,): True}, id="numbered tokens"),
        pytest.param(dict(update=NUMBERED, limit=1), {(181,): True}, id="numbered tokens up to the limit"),
        pytest.param(
            dict(update=[replace(9), replace(literal(tok.text("a"), 10))]), {(9,): False, (97, 10): False}, id="words"
        ),
        pytest.param(
            dict(update=[replace(tok["<image>"]), insert(at="start")]), {(7,): True}, id="an insertion has none"
        ),
        pytest.param(dict(update=replace(resolve_seven)), {}, id="of a function, unknown"),
        pytest.param(
            dict(update=replace(item.index + 1), limit=100),
            dict.fromkeys([(token,) for token in range(1, 65)], True),
            id="of at most 64 items",
        ),
    ],
)
def test_a_modality_tells_its_targets_and_which_are_special(options, targets):
    assert bind_modality(**options).layout_evaluator.targets() == targets


def test_without_a_tokenizer_every_target_is_special():
    plan = ModelSpec("spec", make_modality(update=[replace(9), replace([9, 10])])).bind(CONFIG)
    assert plan.modalities["m"].layout_evaluator.targets() == {(9,): True, (9, 10): False}


def test_the_arguments_of_a_hugging_face_processor_are_bound():
    call = bind_modality(process=hf(kwargs={"size": {"height": cfg.n, "all": [cfg.size]}})).field_processor.hf_call
    assert call.hf.kwargs == {"size": {"height": 2, "all": [7]}}


def test_the_part_and_the_text_of_a_call_may_be_computed():
    process = hf(later(len)(cfg.text), text=later("<{}>".format)(cfg.n))
    call = bind_modality(process=process).field_processor.hf_call
    assert (call.part, call.text) == (1, "<2>")


def test_the_part_of_a_call_may_be_a_function():
    def read_n(scope):
        return scope.cfg.n

    call = bind_modality(process=hf(read_n)).field_processor.hf_call
    assert (call.part, call.text) == (2, None)


# -- cached layouts ----------------------------------------------------------------------------------------------------


def test_the_layout_that_was_used_longest_ago_leaves_the_cache(monkeypatch):
    monkeypatch.setattr("mmkit.plan.layouts.MAX_CACHED_IDS", 2000)
    modality = bind_modality(layout=embed(5) * (item.index + 1), cacheable=False)
    ids_600 = list_ids(modality, index=600)
    ids_601 = list_ids(modality, index=601)
    assert list_ids(modality, index=600) is ids_600
    ids_400 = list_ids(modality, index=400)
    assert list_ids(modality, index=600) is ids_600
    assert list_ids(modality, index=400) is ids_400
    assert list_ids(modality, index=601) is not ids_601
    assert list_ids(modality, index=3000) is not list_ids(modality, index=3000)
    assert list_ids(modality, index=601) is list_ids(modality, index=601), "what is too large lets nothing go"


@pytest.mark.parametrize(("length", "is_cached"), [(256, True), (257, False)])
def test_a_layout_that_depends_on_a_large_tensor_is_not_cached(monkeypatch, length, is_cached):
    monkeypatch.setattr("mmkit.plan.layouts.MAX_CACHED_IDS", 2000)
    modality = bind_modality(layout=embed(5) * later(len)(fields.x))
    large = {"x": torch.zeros(length)}
    assert (list_ids(modality, fields=large) is list_ids(modality, fields=large)) == is_cached


def count_elements(values, scope):
    return {"x": [torch.zeros(len(elements)) for elements in values]}


@pytest.mark.parametrize(
    ("elements", "is_cached"),
    [
        pytest.param(["a"] * 9, True, id="few texts"),
        pytest.param(["a"] * 300, False, id="many texts"),
        pytest.param(["a" * 300], False, id="a long text"),
    ],
)
def test_a_layout_that_depends_on_many_facts_is_not_cached(elements, is_cached):
    modality = bind_modality(
        item=List(Text(300), most=300),
        layout=each(item.elements, lambda element: embed(5) * element.length),
        process=count_elements,
    )
    assert (list_ids(modality, elements) is list_ids(modality, elements)) == is_cached


@pytest.mark.parametrize(("context", "rows"), [(64, 64), (65, 64), (10, 9), (2, 1), (1, 1)])
def test_the_largest_item_fits_into_the_context(context, rows):
    layout = embed(5) * item.length + where(item.length == 64, [], 9)
    spec = ModelSpec("m", make_modality(item=Tensor(shape=(between(1, 64),)), layout=layout, update=replace(7)))
    plan = bind(spec, CONFIG, Tokenizer(), max_model_len=context)
    assert count_largest_rows(plan.modalities["m"]) == rows


# -- grids of positions, targets, embeddings ---------------------------------------------------------------------------

SIDES = st.integers(1, 3)
ONE_TIME = embed(5) * (fields.g[1] * fields.g[2])
GRIDS_AND_LENGTHS = st.lists(st.tuples(SIDES, SIDES, SIDES, st.integers(1, 9)), min_size=1, max_size=5)


@pytest.mark.parametrize(
    "layout", [embed(5) * item.length, embed(5) * fields.g[0], ONE_TIME * fields.g[0], (ONE_TIME + 6) * 2]
)
@given(items=GRIDS_AND_LENGTHS)
def test_a_grid_is_compared_with_the_layout_of_each_item(layout, items):
    """Its rows are one run, or one of each time. Also where items share a layout that does not read the whole grid."""
    modality = bind_modality(
        item=Tensor((between(1, 9),)),
        layout=layout,
        process=hf(),
        fields={"g": batched()},
        positions=(fields.g[0], fields.g[1], fields.g[2]),
    )
    evaluator = modality.layout_evaluator
    for times, rows, columns, length in items:
        grid = (times, rows, columns)
        item_fields = {"g": torch.tensor(grid)}
        scope = modality.scopes.make(torch.zeros(length), 0, item_fields)
        tokens = layout.lay(scope)
        runs = [count for _, count in tokens.runs]
        if sum(runs) == math.prod(grid) and len(runs) in (1, times):
            evaluator.evaluate(scope)
            continue
        expected = f"spec.m, positions: layout: expected embed() positions for a grid of {grid}, got runs of {runs}."
        expect_refusal(SpecError, expected, evaluator.evaluate, scope)
        expect_refusal(SpecError, expected, evaluator.evaluate_positions, item_fields, list(tokens.mask))


def test_each_run_of_rows_between_literals_is_a_frame_in_m_rope():
    layout = literal(7) + embed(5) * 6 + literal(7) + embed(5) * 6
    evaluator = bind_modality(layout=layout, positions=(2, 2, 3)).layout_evaluator
    frames = evaluator.evaluate_positions({}, [0] + [1] * 6 + [0] + [1] * 6)
    assert [start for start, _ in frames] == [1, 8]
    for _, positions in frames:
        assert positions.tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]


def write_nine(items, scope):
    return {"x": [[9]] * len(items)}


@pytest.mark.parametrize(
    ("update", "layout", "ids", "has_target"),
    [
        pytest.param(replace(tok["<image>"]), embed(5) * 2, [7], True, id="a token"),
        pytest.param(NUMBERED, embed(5) * 2, [182], True, id="a numbered token"),
        pytest.param(replace(fields.x[0]), embed(5) * 2, [9], True, id="the value of a field"),
        pytest.param([already_expanded(), replace(9)], embed(5) * item.length, [5, 5], False, id="the layout"),
        pytest.param([insert(at="start"), replace(9)], embed(5), [], False, id="nothing"),
    ],
)
def test_what_a_caller_writes_for_an_item(update, layout, ids, has_target):
    modality = bind_modality(update=update, layout=layout, process=write_nine)
    larger_than_largest = torch.zeros(3, 2)
    batch = ItemBatch.whole([larger_than_largest, ONE])
    _, second = modality.list_caller_ids(make_items("m", batch))
    assert list(second.ids) == ids
    assert list(second.target) == (ids if has_target else [])


MODALITIES_OF_EMBEDDINGS = [
    bind_modality(layout=SUM_OF_COUNTS, fields=COUNTS, embeds=True, process=hf()),
    bind_modality(layout=SUM_OF_COUNTS, fields=COUNTS, embeds=flat(item.rows), process=hf()),
    bind_modality(layout=SUM_OF_COUNTS * 2, fields=COUNTS, embeds=SUM_OF_COUNTS, process=hf()),
]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from(MODALITIES_OF_EMBEDDINGS))
def test_embeddings_come_with_the_fields_that_their_layout_reads(sizes, modality):
    """One by one, or all rows as one tensor; the model class gets the rows of each."""
    rows = [torch.full((size, 3), float(index)) for index, size in enumerate(sizes)]
    data = {"n": sizes, "k": [[0]] * len(sizes)}
    for embeddings in (rows, torch.cat(rows)):
        batch = modality.parser.parse({"m_embeds": embeddings, **data}, 3)
        assert batch.are_embeddings
        parts = []
        for embedding, expected, size in zip(batch.values, rows, sizes, strict=True):
            assert torch.equal(embedding.rows, expected)
            assert (embedding["n"], embedding["k"]) == (size, 0)
            parts.append(embedding["m_embeds"])
        model_inputs = {
            "m_embeds": modality.fields_and_embeds["m_embeds"].batch(parts),
            "n": torch.tensor(sizes),
            "k": torch.tensor(data["k"]),
        }
        for received, expected in zip(modality.parser.split_embeddings(model_inputs), rows, strict=True):
            assert torch.equal(received, expected)
    assert modality.parser.split_embeddings({"n": sizes}) == []


# -- requests ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([1, 2, 3]), max_size=9), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_unexpanding_is_the_inverse_of_expanding(ids, lengths):
    counted = make_modality(
        "n",
        fields={"y": batched()},
        layout=embed(5) * item.count + 6,
        cacheable=False,
        update=[insert(after=[1]), insert(at="start")],
    )
    expanded_already = make_modality("w", fields={"z": batched()}, layout=embed(9))
    plan = bind_plan(IMAGE, counted, expanded_already, prompt=ending_with([3, 3]))
    items = {"image": [torch.zeros(n) for n in lengths], "n": torch.zeros(2, 2, 2), "w": torch.zeros(1, 2, 2)}
    prompt = ids + [9]
    for _ in lengths:
        prompt += [7] + ids

    expanded = plan.expand(prompt, items)
    unexpanded = plan.unexpand(expanded, items)

    preview = plan.preview(prompt, items)
    assert expanded == preview.prompt_token_ids
    for placement in preview.placements:
        assert expanded[placement.start : placement.end] == placement.tokens.ids
    assert plan.expand(unexpanded, items) == expanded
    if prompt[-2:] != [3, 3]:
        assert unexpanded == prompt


def test_the_hugging_face_processor_of_a_plan():
    def processor(*, ms, scale=1, size, return_tensors):
        assert return_tensors == "pt"
        return {"x": torch.stack(ms) * scale, "rows": [torch.full((), size)] * len(ms)}

    options = hf(inputs={"m": "ms"}, kwargs={"size": cfg.n})
    declared = {"x": batched(dtype="float16"), "rows": batched(dtype="int64")}
    spec = ModelSpec("spec", make_modality(layout=embed(5) * fields.rows, process=options, fields=declared))
    plan = spec.bind(CONFIG, processor=processor, kwargs={"scale": 3, "other": 1}, dtype=torch.float16)
    preview = plan.preview([5, 5], {"m": torch.ones(1, 2, 2)})
    assert preview.fields["m"][0]["x"].tolist() == [[3.0, 3.0]] * 2
    (placement,) = preview.placements
    assert (placement.start, placement.tokens.num_embeds) == (0, 2)
    assert count_largest_rows(plan.modalities["m"]) == 2
    assert options.key != hf(text="<2>", inputs=options.inputs, kwargs=options.kwargs).key


def test_parts_of_a_record_go_under_the_names_that_the_spec_gives_them():
    def processor(values, b):
        return {"x": [values[0] - b[0]]}

    modality = make_modality(item=Record(a=Tensor((2,)), b=Tensor((2,))), process=hf(inputs={"a": "values"}))
    plan = bind_plan(modality, processor=processor)
    preview = plan.preview([5], {"m": {"a": [1.0, 2.0], "b": [3.0, 3.0]}})
    assert preview.fields["m"][0]["x"].tolist() == [-2.0, -1.0]


def test_modalities_that_name_one_processor_share_a_call():
    """And another processor where its options differ."""
    calls = []

    def multiply(factor, m, n, return_tensors):
        calls.append((factor, len(m), len(n)))
        return {"x": [factor * value for value in m], "y": [factor * value for value in n]}

    process = hf(later(partial)(multiply, kwargs.get("factor", 2)))
    plan = bind_plan(
        make_modality(process=process), make_modality("n", process=process, layout=embed(6), fields={"y": batched()})
    )
    items = {"m": [ONE + 1, ONE + 1], "n": ONE + 1}
    for factor, options in ((2, {}), (5, {"factor": 5}), (2, {}), (5, {"factor": 5})):
        preview = plan_for_options(plan, options, None).preview([5, 5, 6], items)
        first, second = preview.fields["m"]
        assert float(first["x"].mean()) == float(second["x"].mean()) == factor
        assert float(preview.fields["n"][0]["y"].mean()) == factor
    assert calls == [(2, 2, 1), (5, 2, 1)] * 2


def test_spelling_writes_what_a_caller_writes_for_each_item():
    plan = bind_plan(
        IMAGE,
        make_modality("written", layout=embed(5) * fields.y.shape[0] + 6, fields={"y": batched()}),
        make_modality("inserted", update=insert(at="start"), fields={"z": batched()}),
        make_modality("called", process=hf(), update=[replace(9), already_expanded()], fields={"w": batched()}),
    )
    items = {"written": ONE, "image": [[0.0], []], "inserted": ONE, "called": [ONE, ONE]}
    assert plan.spell(items) == [5, 5, 6, 7, 7, 9, 9]


def test_spelling_gives_each_item_its_index():
    plan = bind_plan(make_modality(layout=embed(5) * (item.index + item.count), cacheable=False))
    assert plan.spell({"m": [ONE, ONE]}) == [5] * 5


def begin_with_three_and_four(scope):
    return [3, 4] + list(scope.prompt)


@pytest.mark.parametrize(
    ("prompt", "shortest"), [(None, [3, 4, 9]), (begin_with_three_and_four, [9])], ids=["caller writes", "spec writes"]
)
def test_the_shortest_prompt_begins_with_the_prefix_of_an_insertion(prompt, shortest):
    """Unless the spec writes it; what is spelled goes into a prompt that has begun."""
    plan = bind_plan(
        make_modality("after", update=insert(after=[3, 4]), fields={"a": batched()}),
        make_modality("first", update=insert(at="start"), fields={"f": batched()}),
        make_modality("replaced", update=replace(9), fields={"r": batched()}),
        prompt=prompt,
    )
    items = dict.fromkeys(plan.modalities, ONE)
    assert plan.spell(items) == [9]
    assert plan.shortest_prompt(plan.parse_items(items)) == shortest


@pytest.mark.parametrize("config", [CONFIG, SimpleNamespace(n=2)])
def test_an_item_without_positions(config):
    spec = ModelSpec("spec", make_modality(layout=None, update=None, tokens=0))
    assert spec == spec.model_copy() == ModelSpec("spec", spec["m"].model_copy(update={"limit": 1}))
    plan = spec.bind(config)
    items = {"m": torch.ones(1, 2, 2)}
    assert plan.spell(items) == []
    for prompt in ([], [5], [3, 1, 4]):
        preview = plan.preview(prompt, items)
        assert preview.prompt_token_ids == [0]
        (placement,) = preview.placements
        assert placement.start == 0
    assert plan.unexpand([0], items) == [0]


def begin_with_size(scope):
    return [scope.cfg.size] + list(scope.prompt)


@given(st.lists(st.integers(1, 3), max_size=6), st.lists(st.integers(1, 3)))
def test_what_a_prompt_ends_with_stands_there_once(ids, ending):
    plan = bind_plan(make_modality(), prompt=ending_with(ending), decoder_prompt=begin_with_size)
    assert plan.rewrite("decoder_prompt", ids) == [7] + ids
    assert bind_plan(make_modality()).rewrite("prompt", ids) is ids
    once = plan.rewrite("prompt", ids)
    assert once in (ids, ids + ending)
    assert once[len(once) - len(ending) :] == ending
    assert plan.rewrite("prompt", once) == once


def test_plans_for_options_are_kept():
    sized = make_modality(layout=embed(5) * kwargs.get("size", proc.n), item=Tensor(shape=(2,)))
    plan = bind_plan(sized, processor=SimpleNamespace(n=1))
    of_size_3 = plan_for_options(plan, {"size": 3}, SimpleNamespace(n=1))
    of_other_processor = plan_for_options(plan, {"other": 3}, SimpleNamespace(n=4))
    with_value_that_json_lacks = plan_for_options(plan, {"size": 2, "other": {1}}, None)

    assert plan_for_options(plan, {}, None) is plan
    assert plan_for_options(plan, {"size": 3}, None) is of_size_3
    assert count_largest_rows(plan.modalities["m"]) == 1
    assert count_largest_rows(of_size_3.modalities["m"]) == 3
    assert count_largest_rows(of_other_processor.modalities["m"]) == 4
    assert count_largest_rows(with_value_that_json_lacks.modalities["m"]) == 2


@pytest.mark.parametrize(("update", "target"), [(NUMBERED, 182), (replace(tok["<image>"]), 7)], ids=["numbered", "one"])
def test_a_target_without_its_item_is_refused(update, target):
    """Whatever other items there are; what may be an ordinary word is not."""
    plan = bind_plan(make_modality(update=update), make_modality("other", update=replace(9), fields={"y": batched()}))
    plan.preview([9], {"other": ONE})
    plan.preview([1, 9, 97], {})
    for prompt, items in (([target, 1], {}), ([1, target, 9], {"other": ONE})):
        with pytest.raises(InputError, match=r"^spec\.m: .* the target .+ without its item"):
            plan.preview(prompt, items)


def test_placeholders_without_items_are_refused():
    plan = bind_plan(make_modality("a"), make_modality("b", layout=embed(6) + literal(9), fields={"y": batched()}))
    plan.check_ids([0, 1, 199])
    plan.check_bare([1, 2, 3])
    plan.check_bare([1, 5], ["a"])
    for ids, present, name in (([5], [], "a"), ([1, 6], ["a"], "b"), ([5, 6], ["b"], "a"), ([6, 5], [], "a")):
        with pytest.raises(InputError, match=rf"^spec\.{name}: .* no item"):
            plan.check_bare(ids, present)


def test_a_placeholder_that_modalities_share_needs_an_item_of_any_of_them():
    bind_plan(make_modality("a"), make_modality("b", fields={"y": batched()})).check_bare([5], ["b"])


def test_the_order_of_the_data_means_nothing():
    """Nor where several modalities have one anchor."""
    start = insert(at="start")
    plan = bind_plan(
        make_modality("a", layout=embed(5) * 2, update=start),
        make_modality("b", layout=embed(6), update=start, fields={"y": batched()}),
    )
    in_order = plan.preview([1], {"a": ONE, "b": ONE})
    in_reverse = plan.preview([1], {"b": ONE, "a": ONE})
    assert in_order.prompt_token_ids == in_reverse.prompt_token_ids
    assert in_order.placements == in_reverse.placements
    layouts = {}
    for name, modality in plan.modalities.items():
        layouts[name] = [modality.layout_evaluator.evaluate(modality.scopes.make(ONE, 0))]
    assert plan.place_layouts([1], layouts) == plan.place_layouts([1], dict(reversed(layouts.items())))


class MergingTokenizer(Tokenizer):
    """A digit before a full stop is another token than elsewhere, as tokenizers of texts have them."""

    def encode(self, text, add_special_tokens):
        ids = []
        for part in re.findall(r"\d\.|.", text):
            ids.append(ord(part) if len(part) == 1 else ord(part[0]) + 140)
        return ids

    def decode(self, ids, skip_special_tokens):
        text = ""
        for token in ids:
            text += chr(token) if token < 180 else f"{chr(token - 140)}."
        return text


def test_targets_that_the_tokenizer_splits_otherwise():
    tokenizer = MergingTokenizer()
    update = replace(tok.text("x{}", item.index + 1))
    numbered = make_modality(item=UP_TO_FOUR, layout=embed(150) * item.length, update=update)
    plan = ModelSpec("spec", numbered).bind(CONFIG, tokenizer)
    items = {"m": [torch.zeros(1), torch.zeros(2)]}

    preview = plan.preview(tokenizer.encode("a x1. x2.", False), items)
    assert preview.prompt_token_ids == list(b"a ") + [150] + list(b". ") + [150, 150, ord(".")]
    assert [(placement.index, placement.start) for placement in preview.placements] == [(0, 2), (1, 5)]

    for text in ("x2. a x1.", "x1. x1. x2.", "x1. x2. x3.", "x1."):
        with pytest.raises(InputError, match=r"^spec\.m"):
            plan.preview(tokenizer.encode(text, False), items)


# -- processing --------------------------------------------------------------------------------------------------------


def test_derived_fields():
    declared = {
        "rows": flat(fields.twice, dtype="float32"),
        "twice": derived(fields.length * 2, dtype="int64"),
        "length": batched(),
        "constant": constant(tok["<image>"]),
        "count": derived(item.count),
    }

    def process(items, scope):
        return {"rows": torch.cat(items).repeat_interleave(2), "length": [len(value) for value in items]}

    modality = bind_modality(item=UP_TO_FOUR, fields=declared, process=process, cacheable=item.count < 3)
    short, long = modality.field_processor.run(ItemBatch.whole([torch.zeros(1), torch.ones(3)]))
    assert short["rows"].tolist() == [0.0] * 2
    assert long["rows"].tolist() == [1.0] * 6
    for item_fields, twice in ((short, 2), (long, 6)):
        assert type(item_fields["twice"]) is torch.Tensor
        assert item_fields["twice"] == twice
        assert item_fields["constant"] == 7
        assert item_fields["count"] == 2


def test_the_count_of_a_derived_field_includes_cached_items():
    declared = {"x": batched(), "count": derived(item.count)}
    modality = bind_modality(item=UP_TO_FOUR, fields=declared, cacheable=item.count < 3)
    (item_fields,) = modality.field_processor.run(ItemBatch([torch.zeros(1)], are_embeddings=False, total=5))
    assert item_fields["count"] == 5


@pytest.mark.parametrize(
    "requests", [[[0, 1, 2], [9]], [[0], [1], [2, 9]]], ids=["by the next item", "by the next request"]
)
def test_a_buffer_that_is_overwritten_is_copied(requests):
    buffer = torch.zeros(2, 2)

    def process(items, scope):
        return {"x": [buffer.copy_(value) for value in items]}

    declared = {"x": batched(), "count": derived(item.count)}
    modality = bind_modality(process=process, fields=declared, cacheable=item.count < 9)
    processed = []
    counts = []
    for numbers in requests:
        values = [torch.full((2, 2), float(number)) for number in numbers]
        processed += modality.field_processor.run(ItemBatch.whole(values))
        counts += [len(numbers)] * len(numbers)
    assert [item_fields["x"].unique().tolist() for item_fields in processed] == [[0.0], [1.0], [2.0], [9.0]]
    assert [item_fields["count"] for item_fields in processed] == counts


def test_what_is_no_number_is_the_same_the_next_time():
    """A comparison of a function's outputs does not take it for a buffer that was overwritten."""

    def process(items, scope):
        return {"x": torch.tensor([[torch.nan, 1.0]] * len(items))}

    modality = bind_modality(process=process)
    (item_fields,) = modality.field_processor.run(ItemBatch.whole([ONE]))
    assert item_fields["x"].isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", [None, (item.length,)])
def test_unpadding(shape):
    """A processor that pads to the largest of the batch must not be seen (law `independence`)."""
    process = hf(outputs={"lengths": "n", "values": "x"}, unpad={"x": fields.n})
    declared = {"x": batched(shape=shape), "n": batched()}
    modality = bind_modality(item=Tensor((between(1, 8),)), fields=declared, process=process)
    padded = {"values": torch.tensor([[1.0, 0.0], [2.0, 3.0]]), "lengths": torch.tensor([1, 2])}
    processed = modality.field_processor.finish(padded, ItemBatch.whole([torch.zeros(1), torch.zeros(2)]))
    assert [item_fields["x"].tolist() for item_fields in processed] == [[1.0], [2.0, 3.0]]


# -- options of a request ----------------------------------------------------------------------------------------------

PAD = kwargs.get("pad", 5)


def lay_out_pads(scope):
    return embed(scope.kwargs.get("pad", 5)) * scope.item.length


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(embed(PAD), id="a token"),
        pytest.param(embed(PAD) + where(item.length > 1, 1, 2), id="a token before others"),
        pytest.param(where(kwargs.get("pad", 0) == 9, embed(9), embed(5)), id="a branch"),
        pytest.param(lay_out_pads, id="a function"),
    ],
)
def test_options_bring_no_placeholder_that_prompts_are_not_guarded_against(layout):
    """It would pass in a prompt without items, and could be sampled."""
    plan = bind_plan(make_modality(layout=layout), make_modality("other", layout=embed(6), fields={"y": batched()}))
    assert plan.embed_ids == {5, 6}
    for options in ({"pad": 5}, {"n": 1}):
        with_options = plan_for_options(plan, options, None)
        assert with_options.embed_ids == {5, 6}
        assert with_options.modalities["m"].layout_evaluator.guard.ids == {5, 6}
        prompt = with_options.spell({"m": ONE})
        assert 5 in with_options.preview(prompt, {"m": ONE}).prompt_token_ids
    with pytest.raises(InputError, match=r"^spec, mm_processor_kwargs: spec\.m, layout: .* without .*, got \[9\]\. No"):
        plan_for_options(plan, {"pad": 9}, None).preview([9], {"m": ONE})


OPTION_NAMES = st.sampled_from(["pad", "rows", "size", "when", "images_kwargs"])
OPTION_VALUES = st.sampled_from([None, "x", -1, 0, 1.5, 300, [], {}, {"pad": "x"}])


@given(st.dictionaries(OPTION_NAMES, OPTION_VALUES))
def test_bad_options_are_the_callers(options):
    """Whatever part of a spec reads them: the request is refused, or answered."""

    def process(items, scope):
        return {"x": torch.stack(items)[: scope.kwargs.get("size", 9)]}

    modality = make_modality(
        "m",
        item=Tensor((2, 2)),
        layout=embed(kwargs.get("pad", 5)) * kwargs.get("rows", 2),
        when=kwargs.get("when", 1) + 1 > 0,
        process=process,
    )
    plan = bind_plan(modality, make_modality("other", fields={"y": batched()}, layout=embed(6)))
    with suppress(InputError):
        plan_for_options(plan, options, None).preview([5, 5], {"m": ONE})


def test_a_function_that_refuses_a_cached_item_names_it():
    """Its fields are computed without an index, since a cache gives them back at any."""

    def refuse_three(scope):
        if scope.item.length == 3:
            raise ValueError("three is too many")
        return scope.item.length

    plan = bind_plan(make_modality(item=UP_TO_FOUR, fields={"x": batched(), "n": derived(refuse_three)}))
    sentence = "spec.m[1]: expected an item that has a layout, got an item of shape (3,): three is too many."
    expect_refusal(InputError, sentence, plan.preview, [5, 5], {"m": [torch.ones(2), torch.ones(3)]})


def test_an_error_beside_a_cached_item_names_the_item_of_the_request():
    plan = bind_plan(
        make_modality(item=UP_TO_FOUR, layout=embed(5) * item.length, fields={"x": batched(shape=(item.length,))})
    )
    missing = ItemBatch([None], are_embeddings=False, total=2, indices=[1])
    expect_refusal(InputError, "spec.m[1]: expected a …, got None, …", plan.compute_fields, {"m": missing})
    too_long = Item(modality="m", index=1, count=2, value=torch.ones(5))
    with pytest.raises(InputError, match=r"^spec\.m\[1\]: expected at most 4 encoder row"):
        plan.fill_in_layouts([too_long])


def test_what_binding_has_learned_holds_with_options():
    """A function that writes to its own memory again is copied."""
    buffer = torch.zeros(1, 2, 2)

    def process(items, scope):
        buffer[:] = items[0] * scope.kwargs.get("scale", 1)
        return {"x": buffer}

    plan = bind_plan(make_modality(process=process, limit=2))
    scaled_by_3 = plan_for_options(plan, {"scale": 3}, None)
    first, second = scaled_by_3.preview([5, 5], {"m": [ONE + 1, ONE + 2]}).fields["m"]
    assert float(first["x"].mean()) == 3
    assert float(second["x"].mean()) == 6
    assert scaled_by_3.modalities["m"].forms is plan.modalities["m"].forms


OF_IMAGES = {"images_kwargs": {"a": 1}}
OF_VIDEOS = {"videos_kwargs": {"a": 2}}


@pytest.mark.parametrize(
    ("options", "expected_calls"),
    [
        pytest.param({"a": 3}, [(1, 1, {"a": 3})], id="of all items, one call"),
        pytest.param({"a": 3} | OF_IMAGES, [(1, 0, OF_IMAGES), (0, 1, {"a": 3})], id="of images and of all"),
        pytest.param(
            {"b": 3} | OF_IMAGES | OF_VIDEOS,
            [(1, 0, {"b": 3} | OF_IMAGES), (0, 1, {"b": 3} | OF_VIDEOS)],
            id="of images, of videos and of all",
        ),
        pytest.param({"common_kwargs": {"a": 1}}, [(1, 1, {"common_kwargs": {"a": 1}})], id="common, one call"),
    ],
)
def test_a_call_gets_the_options_of_its_items(options, expected_calls):
    """A whole processor with their scopes, each option once; modalities of other options are another call."""
    calls = []

    def processor(images=(), videos=(), return_tensors=None, truncation=None, **options):
        calls.append((len(images), len(videos), options))
        return {"x": [ONE] * len(images), "y": [ONE] * len(videos)}

    plan = bind_plan(
        make_modality("image", item=Image(largest=(4, 4)), process=hf(), layout=embed(5)),
        make_modality("video", item=Video(largest=(2, 4, 4)), process=hf(), layout=embed(6), fields={"y": batched()}),
        processor=processor,
    )
    items = {"image": torch.zeros(4, 4, 3, dtype=torch.uint8), "video": torch.zeros(2, 4, 4, 3, dtype=torch.uint8)}
    plan.preview([5, 6], items)
    calls.clear()
    plan_for_options(plan, options, processor).preview([5, 6], items)
    assert calls == expected_calls


@dataclass  # which has no hash
class Multiplier:
    factor: int = 2

    def __call__(self, m, return_tensors):
        return {"x": [value * self.factor for value in m]}


def make_doubling_module():
    module = torch.nn.Identity()
    module.forward = Multiplier()
    return module


def make_multiplier(factor, scope):
    return Multiplier(factor)


@pytest.mark.parametrize(
    "processor",
    [
        pytest.param(Multiplier(), id="an object"),
        pytest.param(later(Multiplier)(), id="a class that is called later"),
        pytest.param(later(Multiplier)(2), id="with an argument"),
        pytest.param(later(Multiplier)(cfg.n), id="with an expression"),
        pytest.param(lambda scope: Multiplier(), id="of a function of a scope"),
        pytest.param(partial(make_multiplier, 2), id="of a partial function of a scope"),
        pytest.param(make_doubling_module(), id="a module of torch"),
    ],
)
def test_an_object_that_is_called_like_a_processor(processor):
    """Only plain functions are functions of a scope."""
    plan = bind_plan(make_modality(process=hf(processor)))
    assert plan.preview([5], {"m": ONE + 1}).fields["m"][0]["x"].tolist() == [[2.0, 2.0]] * 2
    assert plan.spec == ModelSpec("spec", make_modality(process=hf(processor)))


def test_the_largest_items_become_zeros_of_the_shape_that_the_spec_states():
    """The processor gets only a small item, whose fields have their dtype."""
    lengths = []

    def processor(m, return_tensors):
        lengths.extend(len(value) for value in m)
        return {"x": [value.half() + 1 for value in m]}

    modality = make_modality(
        item=Tensor((between(1, 9), 2)),
        layout=embed(5) * item.length,
        fields={"x": batched(shape=(item.length, 2))},
        process=hf(),
    )
    plan = bind_plan(modality, processor=processor)
    largest = plan.modalities["m"].largest_item()
    lengths.clear()
    processed = plan.compute_fields({"m": ItemBatch([largest] * 2, are_embeddings=False, total=2, are_largest=True)})
    assert len(largest) == 9
    assert set(lengths) == {1}
    for item_fields in processed["m"]:
        assert item_fields["x"].dtype == torch.half
        assert item_fields["x"].tolist() == [[0, 0]] * 9


def return_one(values, scope):
    return {"x": [torch.tensor(1)] * len(values)}


def test_a_layout_of_many_facts_and_a_field_waits_for_the_field():
    text = dict.fromkeys([f"text_{position}" for position in range(20)], "a")
    length = sum(getattr(item, name).length for name in text)
    record = Record(**dict.fromkeys(text, Text(2)))
    layout = embed(5) * (length + fields.x)
    plan = bind_plan(make_modality(item=record, layout=layout, update=replace(7), process=return_one))
    assert plan.preview([7], {"m": text}).prompt_token_ids == [5] * 21


# -- forms of fields ---------------------------------------------------------------------------------------------------


def make_plan_of_changing_form(declared, is_hf):
    """Return a plan whose items of whole numbers become int64, and have more dimensions by the option `deeper`."""

    def make_field(m, deeper=0, return_tensors=None):
        batch = torch.stack(list(m))
        if bool((batch == batch.round()).all()):
            batch = batch.long()
        batch = batch.reshape(batch.shape + (1,) * deeper)
        if isinstance(declared, batched):
            return {"x": batch}
        return {"x": torch.cat(list(batch), declared.dim)}

    def process(items, scope):
        return make_field(items, **scope.kwargs)

    def get_processor(scope):
        return make_field

    return bind_plan(make_modality(process=hf(get_processor) if is_hf else process, fields={"x": declared}))


@pytest.mark.parametrize("declared", [batched(), flat(2), flat(2, dim=1)], ids=repr)
@pytest.mark.parametrize("is_hf", [False, True], ids=["function", "hf"])
def test_the_content_of_an_item_changes_no_dtype(declared, is_hf):
    plan = make_plan_of_changing_form(declared, is_hf)
    plan.preview([5], {"m": ONE + 1})
    where = r"spec\.m\[0\], fields\['x'\]"
    dtypes = r"expected a int64 tensor.*, as all items have, got a float32 tensor.*"
    with pytest.raises(InputError, match=rf"^{where}: {dtypes}\. The items of .*$"):
        plan.preview([5], {"m": ONE + 0.5})
    deeper = plan_for_options(plan, {"deeper": 1}, None)
    remedy = r"Leave out those of mm_processor_kwargs that change it: deeper\."
    with pytest.raises(InputError, match=rf"^{where}: {dtypes}\. {remedy}$"):
        deeper.preview([5], {"m": ONE + 0.5})


@pytest.mark.parametrize("is_hf", [False, True], ids=["function", "hf"])
def test_an_option_may_change_the_rank_of_a_batched_field(is_hf):
    plan = make_plan_of_changing_form(batched(), is_hf)
    plan.preview([5], {"m": ONE + 1})
    plan_for_options(plan, {"deeper": 1}, None).preview([5], {"m": ONE + 1})


@pytest.mark.parametrize("declared", [flat(2), flat(2, dim=1)], ids=repr)
@pytest.mark.parametrize("is_hf", [False, True], ids=["function", "hf"])
def test_no_option_changes_the_rank_of_a_flat_field(declared, is_hf):
    plan = make_plan_of_changing_form(declared, is_hf)
    plan.preview([5], {"m": ONE + 1})
    sentence = r"expected a int64 tensor of 2 dimension.*, got a int64 tensor of 3 dimension"
    with pytest.raises(InputError, match=rf"^spec\.m\[0\], fields\['x'\]: {sentence}"):
        plan_for_options(plan, {"deeper": 1}, None).preview([5], {"m": ONE + 1})


def test_fields_that_hold_nothing_have_every_form():
    """An empty list, and None: vLLM leaves them in a list."""

    def process(items, scope):
        crops = [list(value[1:]) for value in items]
        nothing_for_one = [value if len(value) > 1 else None for value in items]
        return {"x": items, "crops": crops, "none": nothing_for_one}

    declared = {"x": batched(), "crops": batched(), "none": batched()}
    plan = bind_plan(make_modality(item=Tensor((between(1, 3), 2)), process=process, fields=declared))
    for length in (1, 2, 3):
        plan.preview([5], {"m": torch.ones(length, 2)})


def test_embeddings_are_in_the_dtype_of_the_model():
    plan = ModelSpec("spec", make_modality(layout=embed(5), embeds=True)).bind(CONFIG, dtype=torch.float16)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        embeddings = {"m_embeds": [torch.full((1, 2), 0.1, dtype=dtype)]}
        (item_fields,) = plan.preview([5], {"m": embeddings}).fields["m"]
        assert item_fields["m_embeds"].dtype == torch.float16

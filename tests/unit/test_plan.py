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
    Modality,
    ModelSpec,
    Record,
    SpecError,
    Tensor,
    Video,
    already_expanded,
    batched,
    between,
    cfg,
    constant,
    derived,
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
from mmkit.plan.parsing import Taken

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


# -- what a bound modality tells ---------------------------------------------------------------------------------------


def ids(own, value=ONE, index=0, fields=None, embeds=False):
    """The layout of an item, which may be given by its facts."""
    placeholders = own.embedding_layout_evaluator if embeds else own.layout_evaluator
    return placeholders.evaluate(own.scopes.make(value, index, fields)).tokens.ids


def target_of(own, index):
    return own.layout_evaluator.evaluate(own.scopes.make(ONE, index)).updates[0].target


def largest(own):
    return own.largest[1]


def called(own):
    return own.field_processor.hf_call.part, own.field_processor.hf_call.text


def targets(own):
    return own.layout_evaluator.targets()


def guarded(own):
    """The placeholder ids of the plan."""
    return own.layout_evaluator.guard.ids


def facts(**known):
    return SimpleNamespace(index=0, **known)


BESIDE = {"n": batched(shape=(), dtype="int64"), "k": batched(shape=(1,), dtype="int64")}
READS, OTHERS = embed(5) * (fields.n + fields.k[0]), dict(fields={**BESIDE, "x": BESIDE["n"]}, process=hf())
FOUR, GUARDED = Tensor((between(1, 4),)), where(item.metadata == None, 4, item.metadata["n"])  # noqa: E711
GRIDS = [{"x": torch.tensor([2, columns])} for columns in (3, 4)]
EITHER, PROCESSED = Tensor((between(1, 4),), largest=[(4,), (1,)]), embed(5) * fields.x[0]
SHRINKS = dict(item=EITHER, layout=embed(5) * (9 - item.length))
DERIVED = {"half": derived(item.length + 1, hidden=True), "n": derived(fields.half * 2), "x": batched()}
SIZED = dict(kwargs={"size": {"height": cfg.n, "all": [cfg.size]}})
AREA = dict(item=Image(largest=[(9, 1), (3, 4), (2, 2)]), layout=embed(5) * item.width * item.height)


# fmt: off
@pytest.mark.parametrize(
    ("options", "ask", "answer"),
    [
        ({}, lambda own: (own.limit, own.may_cache(3), own.parser.embeds_field), (None, True, "m_embeds")),
        ({}, lambda own: (own.layout_evaluator.depends_on_index, own.field_processor.hf_call), (False, None)),
        (dict(limit=0, cacheable=False), lambda own: (own.limit, own.may_cache(1)), (0, False)),
        (dict(limit=cfg.n), lambda own: own.limit, 2),
        (dict(layout=embed(5) * item.count, cacheable=item.count <= 2),
         lambda own: [own.may_cache(count) for count in (1, 2, 3, 2)], [True, True, False, True]),
        (dict(update=NUMBERED), lambda own: [target_of(own, index) for index in (0, 1, 0)], [(181,), (182,), (181,)]),
        (dict(update=NUMBERED), lambda own: own.layout_evaluator.depends_on_index, True),
        (dict(layout=lambda s: embed(5)), lambda own: ids(own) is ids(own), False),
        (dict(layout=embed(5) * item.length), lambda own: ids(own) is ids(own, index=1), True),
        (dict(layout=lambda s: embed(5)),
         lambda own: (own.layout_evaluator.depends_on_index, own.sends_rows, own.layout_evaluator.varies),
         (True, True, True)),
        (dict(layout=lambda s: embed(5) * s.item.index + embed(5)), lambda own: len(ids(own, index=2)), 3),
        (dict(embeds=embed(6) * item.rows),
         lambda own: (own.embedding_layout_evaluator.varies, own.layout_evaluator.varies), (True, False)),
        (dict(embeds=embed(6) * item.rows),
         lambda own: [ids(own, facts(rows=3), embeds=sent) for sent in (True, False)], [[6, 6, 6], [5]]),
        (dict(embeds=True), lambda own: ids(own, facts(rows=3), embeds=True), [5]),
        (dict(item=FOUR, layout=where(item.length > 3, embed(5), embed(6))), guarded, {5, 6}),
        (dict(item=FOUR, layout=lambda s: embed(5 + s.item.length // 2)), guarded, {5, 6, 7}),
        (dict(layout=select(fields.x, embed=tok["<image>"]), process=hf()), guarded, {7}),
        (dict(embeds=embed(6)), guarded, {5, 6}),
        (dict(item=Video(largest=(2, 4, 4)), layout=embed(5) * GUARDED),
         lambda own: [len(ids(own, facts(metadata=known))) for known in (None, {"n": 2})], [4, 2]),
        (dict(layout=PROCESSED, process=hf()), lambda own: len({id(ids(own, fields=grid)) for grid in GRIDS}), 1),
        (dict(layout=PROCESSED * fields.x[1], process=hf()),
         lambda own: [len(ids(own, fields=grid)) for grid in GRIDS], [6, 8]),
        (dict(layout=embed(5) * fields.n, fields=BESIDE, embeds=True, process=hf()),
         lambda own: own.embedding_layout_evaluator.count_rows({"n": torch.tensor(4)}), 4),
        (dict(OTHERS, layout=embed(5) * (fields.n + fields.k[0]), embeds=embed(5) * (fields.k[0] + fields.x)),
         lambda own: [own.layout_evaluator.fields, own.embedding_layout_evaluator.fields], [{"n", "k"}, {"k", "x"}]),
        (dict(OTHERS, layout=READS), lambda own: own.sends_rows, True),
        (dict(layout=embed(5) * item.length), lambda own: own.sends_rows, True),
        (dict(layout=embed(5) * (item.index + 1), cacheable=False), lambda own: own.sends_rows, True),
        (dict(layout=tok.text("{}", item.index) + embed(5), cacheable=False), lambda own: own.sends_rows, True),
        ({}, lambda own: own.sends_rows, False),
        (dict(fields={"x": flat(2)}), lambda own: own.sends_rows, True),
        (dict(item=FOUR, layout=embed(5) * (item.length + 1)), largest, 5),
        (AREA, lambda own: (own.largest_item().size, largest(own)), ((3, 4), 12)),
        (AREA, lambda own: own.largest_item({"width": 2}).size, (2, 4)),
        (SHRINKS, largest, 8),
        (dict(item=EITHER, layout=PROCESSED, process=lambda items, scope: {"x": [[9 - len(one)] for one in items]}),
         lambda own: (own.needs_hf, largest(own)), (False, 8)),
        (dict(process=hf()), lambda own: (own.needs_hf, largest(own)), (False, 1)),
        (dict(process=hf(), item=EITHER, fields=DERIVED, layout=embed(5) * fields.n),
         lambda own: (own.needs_hf, largest(own)), (False, 10)),
        (dict(process=hf(), layout=PROCESSED), lambda own: (own.needs_hf, own.largest_item().shape), (True, (2, 2))),
        (dict(process=hf(), layout=lambda s: embed(5)), lambda own: own.needs_hf, True),
        (dict(update=[already_expanded(), NUMBERED]), targets, {(181,): True, (182,): True}),
        (dict(update=NUMBERED, limit=1), targets, {(181,): True}),
        (dict(update=[replace(9), replace(literal(tok.text("a"), 10))]), targets, {(9,): False, (97, 10): False}),
        (dict(update=[replace(tok["<image>"]), insert(at="start")]), targets, {(7,): True}),
        (dict(update=replace(lambda s: 7)), targets, {}),
        (dict(update=replace(item.index + 1), limit=100), targets, {(n,): True for n in range(1, 65)}),
        (dict(process=hf(**SIZED)), lambda own: own.field_processor.hf_call.hf.kwargs,
         {"size": {"height": 2, "all": [7]}}),
        (dict(process=hf(later(len)(cfg.text), text=later("<{}>".format)(cfg.n))), called, (1, "<2>")),
        (dict(process=hf(lambda s: s.cfg.n)), called, (2, None)),
    ],
)
def test_what_a_bound_modality_tells(options, ask, answer):
    assert ask(bind_modality(**options)) == answer
# fmt: on


def test_layouts_are_kept_up_to_a_size(monkeypatch):
    """The least recently used goes; what is larger, or depends on a large tensor, is not kept."""
    monkeypatch.setattr("mmkit.plan.layouts.MAX_CACHED_IDS", 2000)
    by_index = bind_modality(layout=embed(5) * (item.index + 1), cacheable=False)
    first, second = ids(by_index, index=600), ids(by_index, index=601)
    assert ids(by_index, index=600) is first
    third = ids(by_index, index=400)
    kept = [ids(by_index, index=index) is before for index, before in ((600, first), (400, third), (601, second))]
    assert kept == [True, True, False]
    assert ids(by_index, index=3000) is not ids(by_index, index=3000)
    assert ids(by_index, index=601) is ids(by_index, index=601), "what is too large lets nothing go"
    by_values = bind_modality(layout=embed(5) * later(len)(fields.x))
    for length, stays in ((256, True), (257, False)):
        read = {"x": torch.zeros(length)}
        assert (ids(by_values, fields=read) is ids(by_values, fields=read)) == stays


@pytest.mark.parametrize(("context", "rows"), [(64, 64), (65, 64), (10, 9), (2, 1), (1, 1)])
def test_the_largest_item_fits_into_the_context(context, rows):
    layout = embed(5) * item.length + where(item.length == 64, [], 9)
    spec = ModelSpec("m", make_modality(item=Tensor(shape=(between(1, 64),)), layout=layout, update=replace(7)))
    assert largest(bind(spec, CONFIG, Tokenizer(), max_model_len=context).modalities["m"]) == rows


def test_targets_without_a_tokenizer():
    bare = ModelSpec("spec", make_modality(update=[replace(9), replace([9, 10])])).bind(CONFIG)
    assert targets(bare.modalities["m"]) == {(9,): True, (9, 10): False}


SIDES, ROW = st.integers(1, 3), embed(5) * (fields.g[1] * fields.g[2])


@pytest.mark.parametrize("layout", [embed(5) * item.length, embed(5) * fields.g[0], ROW * fields.g[0], (ROW + 6) * 2])
@given(sent=st.lists(st.tuples(SIDES, SIDES, SIDES, st.integers(1, 9)), min_size=1, max_size=5))
def test_a_grid_is_compared_with_the_layout_of_each_item(layout, sent):
    """Its rows are one run, or one of each time. Also where items share a layout that does not read the whole grid."""
    own = bind_modality(item=Tensor((between(1, 9),)), layout=layout, process=hf(), fields={"g": batched()},
                positions=(fields.g[0], fields.g[1], fields.g[2]))  # fmt: skip
    for *grid, length in sent:
        known = {"g": torch.tensor(grid)}
        scope = own.scopes.make(torch.zeros(length), 0, known)
        laid = layout.lay(scope)
        runs = [count for _, count in laid.runs]
        if sum(runs) == math.prod(grid) and len(runs) in (1, grid[0]):
            own.layout_evaluator.evaluate(scope)
        else:
            expected = f"layout: expected embed() positions for a grid of {tuple(grid)}, got runs of {runs}."
            for ask, *way in (
                (own.layout_evaluator.evaluate, scope),
                (own.layout_evaluator.grids, known, [*laid.mask]),
            ):
                expect_refusal(SpecError, f"spec.m, positions: {expected}", ask, *way)


@pytest.mark.parametrize(
    ("update", "layout", "written"),
    [
        (replace(tok["<image>"]), embed(5) * 2, [7]),
        (NUMBERED, embed(5) * 2, [182]),
        (replace(fields.x[0]), embed(5) * 2, [9]),
        ([already_expanded(), replace(9)], embed(5) * item.length, [5, 5]),
        ([insert(at="start"), replace(9)], embed(5), []),
    ],
    ids=repr,
)
def test_what_a_caller_writes_for_an_item(update, layout, written):
    own = bind_modality(update=update, layout=layout, process=lambda items, scope: {"x": [[9]] * len(items)})
    items = Taken.whole([torch.zeros(3, 2), ONE])  # one that is larger than the largest
    _, (target, ids) = own.list_caller_ids(items)
    assert list(ids) == written
    assert list(target) == (written if repr(update).startswith("replace") else [])


ROWS_READ = [
    bind_modality(layout=layout, fields=BESIDE, embeds=embeds, process=hf())
    for layout, embeds in ((READS, True), (READS, flat(item.rows)), (READS * 2, READS))
]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from(ROWS_READ))
def test_embeddings_come_with_the_fields_that_their_layout_reads(sizes, own):
    """One by one, or all rows as one tensor; the model class gets the rows of each."""
    rows = [torch.full((n, 3), float(i)) for i, n in enumerate(sizes)]
    sent = {"n": sizes, "k": [[0]] * len(sizes)}
    for form in (rows, torch.cat(rows)):
        taken, are_embeddings, *_ = own.parser.parse({"m_embeds": form, **sent}, 3)
        assert are_embeddings
        assert [one.rows.tolist() for one in taken] == [one.tolist() for one in rows]
        assert [(one["n"], one["k"]) for one in taken] == [(n, 0) for n in sizes]
        batch = own.fields_and_embeds["m_embeds"].batch([one["m_embeds"] for one in taken])
        received = own.parser.split_rows({"m_embeds": batch, "n": torch.tensor(sizes), "k": torch.tensor(sent["k"])})
        assert [one.tolist() for one in received] == [one.tolist() for one in rows]
    assert own.parser.split_rows({"n": sizes}) == []


# -- requests ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([1, 2, 3]), max_size=9), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_unexpanding_is_the_inverse_of_expanding(ids, lengths):
    inserted = dict(cacheable=False, update=[insert(after=[1]), insert(at="start")])
    plan = bind_plan(
        IMAGE,
        make_modality("n", fields={"y": batched()}, layout=embed(5) * item.count + 6, **inserted),
        make_modality("w", fields={"z": batched()}, layout=embed(9)),
        prompt=ending_with([3, 3]),
    )
    items = {"image": [torch.zeros(n) for n in lengths], "n": torch.zeros(2, 2, 2), "w": torch.zeros(1, 2, 2)}
    prompt = [*ids, 9]
    for _ in lengths:
        prompt += [7, *ids]
    expanded = plan.expand(prompt, items)
    preview = plan.preview(prompt, items)
    assert expanded == preview.prompt_token_ids
    assert all(expanded[at.start : at.end] == at.tokens.ids for at in preview.placements)
    written = plan.unexpand(expanded, items)
    assert plan.expand(written, items) == expanded
    if prompt[-2:] != [3, 3]:
        assert written == prompt


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
    assert [(at.start, at.tokens.num_embeds) for at in preview.placements] == [(0, 2)]
    assert largest(plan.modalities["m"]) == 2
    assert options.key != hf(text="<2>", inputs=options.inputs, kwargs=options.kwargs).key


def test_parts_of_a_record_go_under_the_names_that_the_spec_gives_them():
    options = dict(item=Record(a=Tensor((2,)), b=Tensor((2,))), process=hf(inputs={"a": "values"}))
    plan = bind_plan(make_modality(**options), processor=lambda values, b: {"x": [values[0] - b[0]]})
    assert plan.preview([5], {"m": {"a": [1.0, 2.0], "b": [3.0, 3.0]}}).fields["m"][0]["x"].tolist() == [-2.0, -1.0]


def test_modalities_that_name_one_processor_share_a_call():
    """And another processor where its options differ."""
    calls = []

    def called(factor, m, n, return_tensors):
        calls.append((factor, len(m), len(n)))
        return {"x": [factor * value for value in m], "y": [factor * value for value in n]}

    shared = hf(later(partial)(called, kwargs.get("factor", 2)))
    other = make_modality("n", process=shared, layout=embed(6), fields={"y": batched()})
    plan = bind_plan(make_modality(process=shared), other)
    for factor, asked in ((2, {}), (5, {"factor": 5}), (2, {}), (5, {"factor": 5})):
        got = plan_for_options(plan, asked, None).preview([5, 5, 6], {"m": [ONE + 1, ONE + 1], "n": ONE + 1}).fields
        assert [float(one["x"].mean()) for one in got["m"]] == [factor] * 2
        assert float(got["n"][0]["y"].mean()) == factor
    assert calls == [(2, 2, 1), (5, 2, 1)] * 2


def test_spelling():
    plan = bind_plan(
        IMAGE,
        make_modality("written", layout=embed(5) * fields.y.shape[0] + 6, fields={"y": batched()}),
        make_modality("inserted", update=insert(at="start"), fields={"z": batched()}),
        make_modality("called", process=hf(), update=[replace(9), already_expanded()], fields={"w": batched()}),
    )
    items = {"written": ONE, "image": [[0.0], []], "inserted": ONE, "called": [ONE, ONE]}
    assert plan.spell(items) == [5, 5, 6, 7, 7, 9, 9]
    by_index = make_modality(layout=embed(5) * (item.index + item.count), cacheable=False)
    assert bind_plan(by_index).spell({"m": [ONE, ONE]}) == [5] * 5


@pytest.mark.parametrize(("prompt", "shortest"), [(None, [3, 4, 9]), (lambda s: [3, 4, *s.prompt], [9])])
def test_the_shortest_prompt_begins_with_the_prefix_of_an_insertion(prompt, shortest):
    """Unless the spec writes it; what is spelled goes into a prompt that has begun."""
    updates = {"after": insert(after=[3, 4]), "first": insert(at="start"), "replaced": replace(9)}
    plan = bind_plan(*[make_modality(name, update=own, fields={name[0]: batched()}) for name, own in updates.items()],
                   prompt=prompt)  # fmt: skip
    items = dict.fromkeys(plan.modalities, ONE)
    assert plan.spell(items) == [9]
    assert plan.shortest_prompt(plan.take(items)) == shortest


@pytest.mark.parametrize("config", [CONFIG, SimpleNamespace(n=2)])
def test_an_item_without_positions(config):
    spec = ModelSpec("spec", make_modality(layout=None, update=None, tokens=0))
    assert spec == spec.model_copy() == ModelSpec("spec", spec["m"].model_copy(update={"limit": 1}))
    plan = spec.bind(config)
    items = {"m": torch.ones(1, 2, 2)}
    assert plan.spell(items) == []
    for prompt in ([], [5], [3, 1, 4]):
        preview = plan.preview(prompt, items)
        assert (preview.prompt_token_ids, [at.start for at in preview.placements]) == ([0], [0])
    assert plan.unexpand([0], items) == [0]


@given(st.lists(st.integers(1, 3), max_size=6), st.lists(st.integers(1, 3)))
def test_what_a_prompt_ends_with_stands_there_once(ids, after):
    plan = bind_plan(make_modality(), prompt=ending_with(after), decoder_prompt=lambda s: [s.cfg.size, *s.prompt])
    assert plan.rewrite("decoder_prompt", ids) == [7, *ids]
    assert bind_plan(make_modality()).rewrite("prompt", ids) is ids
    once = plan.rewrite("prompt", ids)
    assert once in (ids, [*ids, *after])
    assert once[len(once) - len(after) :] == after
    assert plan.rewrite("prompt", once) == once


def test_request_options():
    sized = make_modality(layout=embed(5) * kwargs.get("size", proc.n), item=Tensor(shape=(2,)))
    plan = bind_plan(sized, processor=SimpleNamespace(n=1))
    other = plan_for_options(plan, {"size": 3}, SimpleNamespace(n=1))
    assert plan_for_options(plan, {}, None) is plan
    assert other is plan_for_options(plan, {"size": 3}, None)
    again = plan_for_options(plan, {"other": 3}, SimpleNamespace(n=4))
    odd = plan_for_options(plan, {"size": 2, "other": {1}}, None)  # a value that JSON lacks
    assert [largest(one.modalities["m"]) for one in (plan, other, again, odd)] == [1, 3, 4, 2]


@pytest.mark.parametrize(("update", "ids"), [(NUMBERED, [182]), (replace(tok["<image>"]), [7])])
def test_a_forgotten_item(update, ids):
    """Refused, whatever other items there are; what may be an ordinary word is not."""
    plan = bind_plan(make_modality(update=update), make_modality("other", update=replace(9), fields={"y": batched()}))
    plan.preview([9], {"other": ONE})
    plan.preview([1, 9, 97], {})
    for written, data in (([*ids, 1], {}), ([1, *ids, 9], {"other": ONE})):
        with pytest.raises(InputError, match=r"^spec\.m: .* the target .+ without its item"):
            plan.preview(written, data)


def test_placeholders_without_items_are_refused():
    plan = bind_plan(make_modality("a"), make_modality("b", layout=embed(6) + literal(9), fields={"y": batched()}))
    plan.check_ids([0, 1, 199])
    plan.check_bare([1, 2, 3])
    plan.check_bare([1, 5], ["a"])
    for ids, present, name in (([5], [], "a"), ([1, 6], ["a"], "b"), ([5, 6], ["b"], "a"), ([6, 5], [], "a")):
        with pytest.raises(InputError, match=rf"^spec\.{name}: .* no item"):
            plan.check_bare(ids, present)
    bind_plan(make_modality("a"), make_modality("b", fields={"y": batched()})).check_bare([5], ["b"])


def test_the_order_of_the_data_means_nothing():
    """Nor where several modalities have one anchor."""
    start = insert(at="start")
    plan = bind_plan(
        make_modality("a", layout=embed(5) * 2, update=start),
        make_modality("b", layout=embed(6), update=start, fields={"y": batched()}),
    )
    one, other = (plan.preview([1], dict.fromkeys(names, ONE)) for names in ("ab", "ba"))
    assert (one.prompt_token_ids, one.placements) == (other.prompt_token_ids, other.placements)
    items = {name: [own.layout_evaluator.evaluate(own.scopes.make(ONE, 0))] for name, own in plan.modalities.items()}
    assert plan.place([1], items) == plan.place([1], dict(reversed(items.items())))


class Merging(Tokenizer):
    """A digit before a full stop is another token than elsewhere, as tokenizers of texts have them."""

    def encode(self, text, add_special_tokens):
        return [ord(part) if len(part) == 1 else ord(part[0]) + 140 for part in re.findall(r"\d\.|.", text)]

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(i) if i < 180 else f"{chr(i - 140)}." for i in ids)


def test_targets_that_the_tokenizer_splits_otherwise():
    update = replace(tok.text("x{}", item.index + 1))
    numbered = make_modality(item=FOUR, layout=embed(150) * item.length, update=update)
    plan = ModelSpec("spec", numbered).bind(CONFIG, Merging())

    def preview(text):
        return plan.preview(Merging().encode(text, False), {"m": [torch.zeros(1), torch.zeros(2)]})

    rendered = preview("a x1. x2.")
    assert rendered.prompt_token_ids == [*b"a ", 150, *b". ", 150, 150, ord(".")]
    assert [(p.index, p.start) for p in rendered.placements] == [(0, 2), (1, 5)]
    for text in ("x2. a x1.", "x1. x1. x2.", "x1. x2. x3.", "x1."):
        with pytest.raises(InputError, match=r"^spec\.m"):
            preview(text)


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

    own = bind_modality(item=FOUR, fields=declared, process=process, cacheable=item.count < 3)
    short, long = own.field_processor.run(Taken.whole([torch.zeros(1), torch.ones(3)]))
    assert (short["rows"].tolist(), long["rows"].tolist()) == ([0.0] * 2, [1.0] * 6)
    for part, twice in ((short, 2), (long, 6)):
        assert (type(part["twice"]), part["twice"], part["constant"], part["count"]) == (torch.Tensor, twice, 7, 2)
    assert own.field_processor.run(Taken([torch.zeros(1)], False, 5))[0]["count"] == 5


def test_a_buffer_that_is_written_again():
    """By the next item, or by the next request. What is no number is the same the next time."""
    buffer, declared = torch.zeros(2, 2), {"x": batched(), "count": derived(item.count)}

    def process(items, scope):
        return {"x": [buffer.copy_(value) for value in items]}

    for requests in ([[0, 1, 2], [9]], [[0], [1], [2, 9]]):
        run = bind_modality(process=process, fields=declared, cacheable=item.count < 9).field_processor.run
        parts = [part for ids in requests for part in run(Taken.whole([torch.full((2, 2), float(i)) for i in ids]))]
        assert [part["x"].unique().tolist() for part in parts] == [[0.0], [1.0], [2.0], [9.0]]
        assert [part["count"] for part in parts] == [len(ids) for ids in requests for _ in ids]
    own = bind_modality(process=lambda items, scope: {"x": torch.tensor([[torch.nan, 1.0]] * len(items))})
    assert own.field_processor.run(Taken.whole([ONE]))[0]["x"].isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", [None, (item.length,)])
def test_unpadding(shape):
    """A processor that pads to the largest of the batch must not be seen (law `independence`)."""
    called = hf(outputs={"lengths": "n", "values": "x"}, unpad={"x": fields.n})
    own = bind_modality(
        item=Tensor((between(1, 8),)), fields={"x": batched(shape=shape), "n": batched()}, process=called
    )
    padded = {"values": torch.tensor([[1.0, 0.0], [2.0, 3.0]]), "lengths": torch.tensor([1, 2])}
    finished = own.field_processor.finish(padded, Taken.whole([torch.zeros(1), torch.zeros(2)]))
    assert [part["x"].tolist() for part in finished] == [[1.0], [2.0, 3.0]]


# -- options of a request ----------------------------------------------------------------------------------------------

PAD = kwargs.get("pad", 5)


@pytest.mark.parametrize(
    "layout",
    [embed(PAD), embed(PAD) + where(item.length > 1, 1, 2), where(kwargs.get("pad", 0) == 9, embed(9), embed(5)),
     lambda s: embed(s.kwargs.get("pad", 5)) * s.item.length],
)  # fmt: skip
def test_options_bring_no_placeholder_that_prompts_are_not_guarded_against(layout):
    """It would pass in a prompt without items, and could be sampled."""
    plan = bind_plan(make_modality(layout=layout), make_modality("other", layout=embed(6), fields={"y": batched()}))
    assert plan.embed_ids == {5, 6}
    for pad in (5, None):
        asked = plan_for_options(plan, {"pad": pad} if pad else {"n": 1}, None)
        assert (asked.embed_ids, guarded(asked.modalities["m"])) == ({5, 6}, {5, 6})
        assert 5 in asked.preview(asked.spell({"m": ONE}), {"m": ONE}).prompt_token_ids
    with pytest.raises(InputError, match=r"^spec, mm_processor_kwargs: spec\.m, layout: .* without .*, got \[9\]\. No"):
        plan_for_options(plan, {"pad": 9}, None).preview([9], {"m": ONE})


@given(st.dictionaries(st.sampled_from(["pad", "rows", "size", "when", "images_kwargs"]),
                       st.sampled_from([None, "x", -1, 0, 1.5, 300, [], {}, {"pad": "x"}])))  # fmt: skip
def test_bad_options_are_the_callers(options):
    """Whatever part of a spec reads them: the request is refused, or answered."""

    def process(items, scope):
        return {"x": torch.stack(items)[: scope.kwargs.get("size", 9)]}

    own = make_modality("m", item=Tensor((2, 2)), layout=embed(kwargs.get("pad", 5)) * kwargs.get("rows", 2),
                   when=kwargs.get("when", 1) + 1 > 0, process=process)  # fmt: skip
    plan = bind_plan(own, make_modality("other", fields={"y": batched()}, layout=embed(6)))
    with suppress(InputError):
        plan_for_options(plan, options, None).preview([5, 5], {"m": ONE})


def test_a_function_that_refuses_a_cached_item_names_it():
    """Its fields are computed without an index, since a cache gives them back at any."""

    def length(scope):
        if scope.item.length == 3:
            raise ValueError("three is too many")
        return scope.item.length

    declared = {"x": batched(), "n": derived(length)}
    plan = bind_plan(make_modality(item=FOUR, fields=declared))
    expected = "an item that has a layout, got an item of shape (3,): three is too many."
    expect_refusal(
        InputError, f"spec.m[1]: expected {expected}", plan.preview, [5, 5], {"m": [torch.ones(2), torch.ones(3)]}
    )


def test_an_error_beside_a_cached_item_names_the_item_of_the_request():
    plan = bind_plan(
        make_modality(item=FOUR, layout=embed(5) * item.length, fields={"x": batched(shape=(item.length,))})
    )
    only_second = Taken([torch.ones(3)], embeds=False, total=2, indices=[1])
    own = plan.modalities["m"]
    expect_refusal(
        InputError, "spec.m[1]: expected a …, got None, …", plan.process, {"m": only_second._replace(values=[None])}
    )
    longer = only_second._replace(values=[torch.ones(5)])
    with pytest.raises(InputError, match=r"^spec\.m\[1\]: expected at most 4 encoder row"):
        own.lay_out_all(longer)


def test_what_binding_has_learned_holds_with_options():
    """A function that writes to its own memory again is copied."""
    buffer = torch.zeros(1, 2, 2)

    def process(items, scope):
        buffer[:] = items[0] * scope.kwargs.get("scale", 1)
        return {"x": buffer}

    plan = bind_plan(make_modality(process=process, limit=2))
    asked = plan_for_options(plan, {"scale": 3}, None)
    got = asked.preview([5, 5], {"m": [ONE + 1, ONE + 2]}).fields["m"]
    assert [float(own["x"].mean()) for own in got] == [3, 6]
    assert asked.modalities["m"].forms is plan.modalities["m"].forms


def test_a_call_gets_the_options_of_its_items():
    """A whole processor with their scopes, each option once; modalities of other options are another call."""
    calls = []

    def processor(images=(), videos=(), return_tensors=None, truncation=None, **options):
        calls.append((len(images), len(videos), options))
        return {"x": [ONE for _ in images], "y": [ONE for _ in videos]}

    plan = bind_plan(
        make_modality("image", item=Image(largest=(4, 4)), process=hf(), layout=embed(5)),
        make_modality("video", item=Video(largest=(2, 4, 4)), process=hf(), layout=embed(6), fields={"y": batched()}),
        processor=processor,
    )
    data = {"image": torch.zeros(4, 4, 3, dtype=torch.uint8), "video": torch.zeros(2, 4, 4, 3, dtype=torch.uint8)}
    plan.preview([5, 6], data)
    of_images, of_videos = {"images_kwargs": {"a": 1}}, {"videos_kwargs": {"a": 2}}
    for options, expected in (
        ({"a": 3}, [(1, 1, {"a": 3})]),
        ({"a": 3} | of_images, [(1, 0, of_images), (0, 1, {"a": 3})]),
        ({"b": 3} | of_images | of_videos, [(1, 0, {"b": 3} | of_images), (0, 1, {"b": 3} | of_videos)]),
        ({"common_kwargs": {"a": 1}}, [(1, 1, {"common_kwargs": {"a": 1}})]),
    ):
        calls.clear()
        plan_for_options(plan, options, processor).preview([5, 6], data)
        assert calls == expected


@dataclass  # which has no hash
class Doubled:
    factor: int = 2

    def __call__(self, m, return_tensors):
        return {"x": [own * self.factor for own in m]}


@pytest.mark.parametrize(
    "processor",
    [Doubled(), later(Doubled)(), later(Doubled)(2), later(Doubled)(cfg.n), lambda s: Doubled(),
     partial(lambda factor, s: Doubled(factor), 2), torch.nn.Identity()],
)  # fmt: skip
def test_an_object_that_is_called_like_a_processor(processor):
    """Only plain functions are functions of a scope."""
    if isinstance(processor, torch.nn.Identity):
        processor.forward = lambda m, return_tensors: {"x": [own * 2 for own in m]}
    plan = bind_plan(make_modality(process=hf(processor)))
    assert plan.preview([5], {"m": ONE + 1}).fields["m"][0]["x"].tolist() == [[2.0, 2.0]] * 2
    assert plan.spec == ModelSpec("spec", make_modality(process=hf(processor)))


@pytest.mark.parametrize("declared", [batched(), flat(2), flat(2, dim=1)])
@pytest.mark.parametrize("is_hf", [False, True])
def test_a_field_has_one_form(declared, is_hf):
    """Whatever an option, or the content of an item, makes of it; of a batched field, the rank may differ."""

    def made(m, deeper=0, return_tensors=None):
        batch = torch.stack(list(m))
        batch = batch.long() if bool((batch == batch.round()).all()) else batch
        batch = batch.reshape(*batch.shape, *[1] * deeper)
        return {"x": batch if isinstance(declared, batched) else torch.cat(list(batch), declared.dim)}

    process = hf(lambda s: made) if is_hf else lambda items, s: made(items, **s.kwargs)
    plan = bind_plan(make_modality(process=process, fields={"x": declared}))
    deeper = plan_for_options(plan, {"deeper": 1}, None)
    plan.preview([5], {"m": ONE + 1})
    remedies = {plan: r"The items of .*", deeper: r"Leave out those of mm_processor_kwargs that change it: deeper\."}
    where = r"spec\.m\[0\], fields\['x'\]"
    for asked, remedy in remedies.items():
        if asked is deeper and isinstance(declared, batched):
            asked.preview([5], {"m": ONE + 1})
        expected, got = "a int64 tensor.*, as all items have", "a float32 tensor.*"
        with pytest.raises(InputError, match=rf"^{where}: expected {expected}, got {got}\. {remedy}$"):
            asked.preview([5], {"m": ONE + 0.5})
    if isinstance(declared, flat):
        got = "a int64 tensor of 3 dimension"
        with pytest.raises(InputError, match=rf"^{where}: expected a int64 tensor of 2 dimension.*, got {got}"):
            deeper.preview([5], {"m": ONE + 1})


def test_fields_that_hold_nothing_have_every_form():
    """An empty list, and None: vLLM leaves them in a list."""

    def process(items, scope):
        return {
            "x": items,
            "crops": [list(own[1:]) for own in items],
            "none": [own if len(own) > 1 else None for own in items],
        }

    names = ("x", "crops", "none")
    plan = bind_plan(
        make_modality(item=Tensor((between(1, 3), 2)), process=process, fields={name: batched() for name in names})
    )
    for length in (1, 2, 3):
        plan.preview([5], {"m": torch.ones(length, 2)})


def test_embeddings_are_in_the_dtype_of_the_model():
    plan = ModelSpec("spec", make_modality(layout=embed(5), embeds=True)).bind(CONFIG, dtype=torch.float16)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        got = plan.preview([5], {"m": {"m_embeds": [torch.full((1, 2), 0.1, dtype=dtype)]}}).fields["m"][0]
        assert got["m_embeds"].dtype == torch.float16

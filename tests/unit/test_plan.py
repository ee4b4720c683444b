"""Plans: what a bound spec makes of data, prompts and requests, without vLLM."""

import re
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
from mmkit.bound.intake import Taken
from mmkit.expr import evaluate
from mmkit.plan import Plan

from .common import CONFIG, Tokenizer, bound, modality, plan_of

IMAGE = Modality(
    "image",
    item=Tensor(shape=(between(0, 4),)),
    layout=embed(tok["<image>"]) * (item.length + 1),
    update=replace(tok["<image>"]),
    fields={"image": batched()},
)
NUMBERED = replace(tok["<|image_{}|>", item.index + 1])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_layouts_are_kept_by_geometry(lengths):
    """The same geometry gives the same objects; another geometry never does."""
    bound = plan_of(IMAGE).modalities["image"]
    seen = {}
    for index, length in enumerate(lengths):
        alternatives = bound.placeholders.alternatives(bound.scope(torch.zeros(length), index))
        assert len(alternatives[0].placeholder) == length + 1
        assert seen.setdefault(length, alternatives) is alternatives


def test_item_numbered_targets_are_not_confused_by_the_cache():
    plan = plan_of(modality(item=Tensor(shape=(1,)), layout=embed(tok["<image>"]) * 2, update=NUMBERED))
    assert plan.modalities["m"].placeholders.depends_on_index
    assert not plan_of(IMAGE).modalities["image"].placeholders.depends_on_index
    items = {"m": [[0.0], [0.0]]}
    assert plan.preview([181, 5, 182], items).prompt_token_ids == [7, 7, 5, 7, 7]
    with pytest.raises(InputError):
        plan.preview([182, 5, 181], items)


@pytest.mark.parametrize(("metadata", "rows"), [(None, 4), ({"n": 2}, 2)])
def test_where_guards_a_fact_that_may_be_missing(metadata, rows):
    layout = embed(5) * where(item.metadata == None, 4, item.metadata["n"])  # noqa: E711
    video = bound(item=Video(largest=(2, 4, 4)), layout=layout)
    scope = video.scope(SimpleNamespace(index=0, metadata=metadata), 0)
    assert len(video.placeholders.alternatives(scope)[0].placeholder) == rows


def test_the_largest_item():
    value, length = plan_of(IMAGE).modalities["image"].largest()
    assert (value.shape, length) == ((4,), 5)
    value, length = bound(
        item=Image(largest=[(9, 1), (3, 4), (2, 2)]), layout=embed(5) * item.width * item.height
    ).largest()
    assert (value.size, length) == ((3, 4), 12)
    kind = Tensor(shape=(between(1, 4),), largest=[(1,), (4,)])
    assert bound(item=kind, layout=embed(5) * (9 - item.length)).largest()[1] == 8, "a layout that shrinks"


# -- requests --------------------------------------------------------------------------------------------------------


def test_preview():
    inserted = modality("n", fields={"y": flat(item.length)}, update=insert(at="start"))
    plan = plan_of(IMAGE, inserted, prompt=ending_with(3))
    preview = plan.preview([7, 1], {"n": torch.ones(1, 2, 2), "image": [[0.0], [0.0, 0.0]][:1]})
    assert preview.prompt_token_ids == [5, 7, 7, 1, 3]
    assert [(p.modality, p.start) for p in preview.placements] == [("n", 0), ("image", 1)]
    assert preview.fields["image"][0]["image"].tolist() == [0.0]
    assert preview.fields["n"][0]["y"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


@given(st.lists(st.sampled_from([1, 2, 3]), max_size=9), st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_unexpanding_is_the_inverse_of_expanding(ids, lengths):
    plan = plan_of(
        IMAGE,
        modality("n", fields={"y": batched()}, layout=embed(5) * item.count + 6, cacheable=False, update=[
            insert(after=[1]), insert(at="start")
        ]),
        modality("w", fields={"z": batched()}, layout=embed(9)),
        prompt=ending_with([3, 3]),
    )  # fmt: skip
    items = {"image": [torch.zeros(n) for n in lengths], "n": torch.zeros(2, 2, 2), "w": torch.zeros(1, 2, 2)}
    prompt = [*ids, 9]
    for _ in lengths:
        prompt += [7, *ids]
    expanded = plan.expand(prompt, items)
    preview = plan.preview(prompt, items)
    assert expanded == preview.prompt_token_ids
    assert all(expanded[at.start : at.end] == at.placeholder.ids for at in preview.placements)
    written = plan.unexpand(expanded, items)
    assert plan.expand(written, items) == expanded
    if prompt[-2:] != [3, 3]:
        assert written == prompt


def test_the_hugging_face_processor_of_a_plan():
    def processor(*, ms, scale=1, size, return_tensors):
        assert return_tensors == "pt"
        return {"x": torch.stack(ms) * scale, "rows": [torch.full((), size)] * len(ms)}

    called = modality(
        layout=embed(5) * fields.rows,
        process=hf(inputs={"m": "ms"}, kwargs={"size": cfg.n}),
        fields={"x": batched(dtype="float16"), "rows": batched(dtype="int64")},
    )
    spec, data = ModelSpec("spec", called), {"m": torch.ones(1, 2, 2)}
    options = {"scale": 3, "other": 1}
    plan = spec.bind(CONFIG, processor=processor, kwargs=options, dtype=torch.float16)
    preview = plan.preview([5, 5], data)
    assert preview.fields["m"][0]["x"].tolist() == [[3.0, 3.0]] * 2
    assert [(at.start, at.placeholder.num_embeds) for at in preview.placements] == [(0, 2)]


def test_spelling():
    plan = plan_of(
        IMAGE,
        modality("written", layout=embed(5) * fields.y.shape[0] + 6, fields={"y": batched()}),
        modality("inserted", update=insert(at="start"), fields={"z": batched()}),
        modality("called", process=hf(), update=[replace(9), already_expanded()], fields={"w": batched()}),
    )
    one = torch.zeros(2, 2)
    items = {"written": one, "image": [[0.0], []], "inserted": one, "called": [one, one]}
    assert plan.spell(items) == [5, 5, 6, 7, 7, 9, 9]
    by_index = modality(layout=embed(5) * (item.index + item.count), cacheable=False)
    assert plan_of(by_index).spell({"m": [one, one]}) == [5] * 5


@pytest.mark.parametrize(("prompt", "shortest"), [(None, [3, 4, 9]), (lambda s: [3, 4, *s.prompt], [9])])
def test_the_shortest_prompt_begins_with_the_prefix_of_an_insertion(prompt, shortest):
    """Unless the spec writes it; what is spelled goes into a prompt that has begun."""
    plan = plan_of(
        modality("after", update=insert(after=[3, 4])),
        modality("first", update=insert(at="start"), fields={"y": batched()}),
        modality("replaced", update=replace(9), fields={"z": batched()}),
        prompt=prompt,
    )
    items = dict.fromkeys(plan.modalities, torch.zeros(2, 2))
    assert plan.spell(items) == [9]
    assert plan.shortest_prompt(plan.take(items)) == shortest


@pytest.mark.parametrize("config", [CONFIG, SimpleNamespace(n=2)])
def test_an_item_without_positions(config):
    spec = ModelSpec("spec", modality(layout=None, update=None, tokens=0))
    assert spec == spec.model_copy() == ModelSpec("spec", spec["m"].model_copy(update={"limit": 1}))
    plan = spec.bind(config)
    items = {"m": torch.ones(1, 2, 2)}
    assert plan.spell(items) == []
    for prompt in ([], [5], [3, 1, 4]):
        preview = plan.preview(prompt, items)
        assert (preview.prompt_token_ids, [at.start for at in preview.placements]) == ([0], [0])
    assert plan.unexpand([0], items) == [0]
    for data, words in (
        ({}, "one item per request, got none. The model reads"),
        (2, "fewer items, got 2. At most 1 m(s)"),
    ):
        with pytest.raises(InputError, match=f"^spec.m: expected {re.escape(words)}"):
            plan.preview([5], data and {"m": torch.ones(2, 2, 2)})


def test_rewriting():
    plan = plan_of(modality(), decoder_prompt=lambda s: [s.cfg.size, *s.prompt])
    ids = [1, 2]
    assert plan.rewrite("prompt", ids) is ids
    assert plan.preview(ids, {}).prompt_token_ids == ids
    assert plan.rewrite("decoder_prompt", ids) == [7, 1, 2]


@given(st.lists(st.integers(1, 3), max_size=6), st.lists(st.integers(1, 3)))
def test_what_a_prompt_ends_with_stands_there_once(ids, after):
    plan = plan_of(modality(), prompt=ending_with(after))
    once = plan.rewrite("prompt", ids)
    assert once in (ids, [*ids, *after])
    assert once[len(once) - len(after) :] == after
    assert plan.rewrite("prompt", once) == once


def test_request_options():
    sized = modality(layout=embed(5) * kwargs.get("size", proc.n), item=Tensor(shape=(2,)))
    plan = plan_of(sized, processor=SimpleNamespace(n=1))
    other = plan.configured({"size": 3}, SimpleNamespace(n=1))
    assert plan.configured({}, None) is plan
    assert other is plan.configured({"size": 3}, None)
    again = plan.configured({"other": 3}, SimpleNamespace(n=4))
    assert [p.modalities["m"].largest()[1] for p in (plan, other, again)] == [1, 3, 4]
    odd = {"size": 2, "other": {1}}
    assert plan.configured(odd, None).modalities["m"].largest()[1] == 2, "values that JSON lacks"


def test_a_modality_may_be_absent():
    plan = plan_of(modality("a"), modality("b", fields={"y": batched()}, when=cfg.n > 2))
    assert list(plan.modalities) == ["a"]


def test_what_is_not_a_number_is_the_same_the_next_time():
    own = bound(process=lambda items, scope: {"x": torch.full((len(items), 2), torch.nan)})
    assert own.processing.run([torch.zeros(2, 2)])[0]["x"].isnan().all()


def test_what_may_be_cached():
    by_count = bound(layout=embed(5) * item.count, cacheable=item.count <= 2)
    assert [by_count.may_cache(count) for count in (1, 2, 3, 2)] == [True, True, False, True]
    assert bound().may_cache(3)
    assert not bound(cacheable=False).may_cache(1)


def test_limits():
    bound().intake.check_count(100, None)
    bound().intake.check_count(2, 2)
    assert (bound().limit, bound(limit=cfg.n).limit, bound(limit=0).limit) == (None, 2, 0)


def test_rows():
    assert bound(layout=embed(5) * cfg.n).placeholders.rows({}) == 2
    assert bound(layout=embed(5) * (item.index + 1)).placeholders.rows({"x": 1}) is None
    by_out = bound(layout=embed(5) * fields.x, process=hf())
    assert by_out.placeholders.rows({"x": torch.tensor(4)}) == 4
    assert by_out.placeholders.rows({"y": 4}) is None


def test_the_largest_item_by_what_is_processed():
    two = Tensor(shape=(between(1, 4),), largest=[(4,), (1,)])
    options = dict(item=two, layout=embed(5) * fields.x[0])
    with pytest.raises(SpecError, match="expected one largest item, since only the Hugging Face processor"):
        bound(process=hf(), **options)
    own = bound(process=lambda items, scope: {"x": [[9 - len(value)] for value in items]}, **options)
    assert own.largest()[1] == 8
    by_hf = modality(process=hf(), layout=embed(5) * fields.x[0])
    called = plan_of(by_hf, processor=lambda **items: {"x": [[3]]}).modalities["m"]
    assert called.largest()[1] == 3
    assert [b.needs_hf for b in (called, own, bound(process=hf()))] == [True, False, False]
    assert bound(process=hf()).largest()[1] == 1, "nothing is processed where the layout does not read it"
    derives = {"x": batched(), "n": derived(fields.half * 2), "half": derived(item.length + 1, hidden=True)}
    told = bound(process=hf(), item=two, fields=dict(reversed(derives.items())), layout=embed(5) * fields.n)
    assert (told.needs_hf, told.largest()[1]) == (False, 10), "the facts of the item tell"


@pytest.mark.parametrize(("context", "rows"), [(64, 64), (65, 64), (10, 9), (2, 1), (1, 1)])
def test_the_largest_item_fits_into_the_context(context, rows):
    layout = embed(5) * item.length + where(item.length == 64, [], 9)
    spec = ModelSpec("m", modality(item=Tensor(shape=(between(1, 64),)), layout=layout, update=replace(7)))
    assert Plan(spec, CONFIG, Tokenizer(), max_model_len=context).modalities["m"].largest()[1] == rows


@pytest.mark.parametrize(
    ("update", "limit", "targets"),
    [
        ([already_expanded(), NUMBERED], None, {(181,): True, (182,): True}),
        (NUMBERED, 1, {(181,): True}),
        ([replace(9), replace(literal(tok.text("a"), 10))], None, {(9,): False, (97, 10): False}),
        ([replace(tok["<image>"]), insert(at="start")], None, {(7,): True}),
        (replace(lambda s: 7), None, {}),
        (replace(item.index + 1), 100, {(n,): True for n in range(1, 65)}),
    ],
)
def test_targets_that_stand_for_items_alone(update, limit, targets):
    assert bound(update=update, limit=limit).placeholders.targets() == targets


def test_targets_without_a_tokenizer():
    bare = ModelSpec("spec", modality(update=[replace(9), replace([9, 10])])).bind(CONFIG)
    assert bare.modalities["m"].placeholders.targets() == {(9,): True, (9, 10): False}


def test_places_for_items_that_are_not_known_yet():
    """Targets and placeholders of its own; None where the items decide, or where nobody writes anything."""
    plan = plan_of(
        modality(update=[replace(9), replace([10, 11])]), modality("n", layout=embed(6), fields={"y": batched()})
    )
    assert plan.standing("m")([9, 1, 5, 10, 11, 6, 9]) == 4
    for update in (already_expanded(), NUMBERED, insert(at="start"), [replace(9), NUMBERED]):
        assert plan_of(modality(update=update)).standing("m") is None


@pytest.mark.parametrize(("update", "ids"), [(NUMBERED, [182]), (replace(tok["<image>"]), [7])])
def test_a_forgotten_item(update, ids):
    """Refused, whatever other items there are; what may be an ordinary word is not."""
    plan = plan_of(modality(update=update), modality("other", update=replace(9), fields={"y": batched()}))
    one = torch.zeros(2, 2)
    plan.preview([9], {"other": one})
    plan.preview([1, 9, 97], {})
    for written, data in (([*ids, 1], {}), ([1, *ids, 9], {"other": one})):
        with pytest.raises(InputError, match=r"^spec\.m: .* the placeholder \[\d+\] without its item"):
            plan.preview(written, data)


@pytest.mark.parametrize(
    ("updates", "ids"),
    [
        ((insert(at="start"), insert(at="start")), [1]),
        ((insert(at="end"), replace(9)), [9]),
        ((replace([9, 10]), replace([10, 11])), [9, 10, 11, 9, 10]),
        ((replace([9, 10]), replace(9)), [9, 10, 9]),
    ],
    ids=repr,
)
def test_the_order_of_the_data_means_nothing(updates, ids):
    """Nor where targets overlap, or several modalities have one anchor."""
    plan = plan_of(
        modality("a", layout=embed(5) * 2, update=updates[0]),
        modality("b", layout=embed(6), update=updates[1], fields={"y": batched()}),
    )
    one = torch.zeros(2, 2)

    def result(*names):
        try:
            preview = plan.preview(ids, dict.fromkeys(names, one))
        except InputError as error:
            return str(error)
        return preview.prompt_token_ids, preview.placements

    assert result("a", "b") == result("b", "a")


class Merging(Tokenizer):
    """A digit before a full stop is another token than elsewhere, as tokenizers of texts have them."""

    def encode(self, text, add_special_tokens):
        return [ord(part) if len(part) == 1 else ord(part[0]) + 140 for part in re.findall(r"\d\.|.", text)]

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(i) if i < 180 else f"{chr(i - 140)}." for i in ids)


def test_targets_that_the_tokenizer_splits_otherwise():
    numbered = modality(
        item=Tensor(shape=(between(1, 4),)),
        layout=embed(150) * item.length,
        update=replace(tok.text("x{}", item.index + 1)),
    )
    merging = Merging()
    plan = ModelSpec("spec", numbered).bind(CONFIG, merging)
    one, two = torch.zeros(1), torch.zeros(2)

    def preview(text):
        return plan.preview(merging.encode(text, False), {"m": [one, two]})

    rendered = preview("a x1. x2.")
    assert rendered.prompt_token_ids == [*b"a ", 150, *b". ", 150, 150, ord(".")]
    assert [(p.index, p.start) for p in rendered.placements] == [(0, 2), (1, 5)]
    for text in ("x2. a x1.", "x1. x1. x2.", "x1. x2. x3.", "x1."):
        with pytest.raises(InputError, match=r"^spec\.m"):
            preview(text)


def test_layouts_of_embeddings():
    rows = bound(embeds=embed(6) * item.rows)
    scope = rows.scope(SimpleNamespace(index=0, rows=3), 0)
    assert rows.placeholders.alternatives(scope, embeds=True)[0].placeholder.ids == [6, 6, 6]
    assert rows.placeholders.alternatives(scope)[0].placeholder.ids == [5]
    assert (rows.placeholders.varies(True), rows.placeholders.varies(False)) == (True, False)
    assert bound(embeds=True).placeholders.alternatives(scope, embeds=True)[0].placeholder.ids == [5]
    assert bound().intake.embeds_field == "m_embeds"
    assert plan_of(modality(embeds=embed(6))).embed_ids == {5, 6}


BESIDE = {"n": batched(shape=(), dtype="int64"), "k": batched(shape=(1,), dtype="int64")}
READS = embed(5) * (fields.n + fields.k[0])
ROWS_READ = [
    bound(layout=layout, fields=BESIDE, embeds=embeds, process=hf())
    for layout, embeds in ((READS, True), (READS, flat(item.rows)), (READS * 2, READS))
]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from(ROWS_READ))
def test_embeddings_come_with_the_fields_that_their_layout_reads(sizes, own):
    """One by one, or all rows as one tensor; the model class gets the rows of each."""
    rows = [torch.full((n, 3), float(i)) for i, n in enumerate(sizes)]
    sent = {"n": sizes, "k": [[0]] * len(sizes)}
    for form in (rows, torch.cat(rows)):
        taken, are_embeddings, _ = own.intake.take({"m_embeds": form, **sent}, 3)
        assert are_embeddings
        assert [one.rows.tolist() for one in taken] == [one.tolist() for one in rows]
        assert [(one["n"], one["k"]) for one in taken] == [(n, 0) for n in sizes]
        batch = own.fields_and_embeds["m_embeds"].batch([one["m_embeds"] for one in taken])
        received = own.intake.received({"m_embeds": batch, "n": torch.tensor(sizes), "k": torch.tensor(sent["k"])})
        assert [one.tolist() for one in received] == [one.tolist() for one in rows]
    assert own.intake.received({"n": sizes}) == []


@pytest.mark.parametrize("rows", [item.length, fields.g[0], fields.g[0] * fields.g[1]])
@given(sent=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_grid_is_compared_with_the_layout_of_each_item(rows, sent):
    """Also where items share a layout that does not read the whole grid."""
    own = bound(item=Tensor((between(1, 9),)), layout=embed(5) * rows, process=hf(), fields={"g": batched()},
                positions=(1, fields.g[0], fields.g[1]))  # fmt: skip
    for height, width, length in sent:
        grid = {"g": torch.tensor([height, width])}
        scope = own.scope(torch.zeros(length), 0, grid)
        if height * width == (count := evaluate(rows, scope)):
            own.placeholders.alternatives(scope)
        else:
            with pytest.raises(SpecError, match=rf"a grid of \(1, {height}, {width}\), got runs of \[{count}\]"):
                own.placeholders.alternatives(scope)


@pytest.mark.parametrize(
    ("update", "layout", "written"),
    [
        (replace(tok["<image>"]), embed(5) * 2, [7]),
        (NUMBERED, embed(5) * 2, [182]),
        (replace(fields.x[0]), embed(5) * 2, [9]),
        (already_expanded(), embed(5) * item.length, [5, 5]),
        ([insert(at="start"), replace(9)], embed(5), []),
    ],
    ids=repr,
)
def test_what_a_caller_writes_for_an_item(update, layout, written):
    own = bound(update=update, layout=layout, process=lambda items, scope: {"x": [[9]] * len(items)})
    items = Taken.whole([torch.zeros(1, 2), torch.zeros(2, 2)])
    _, (target, ids) = own.written(items, lambda: {"m": [{"x": [9]}] * 2})
    assert list(ids) == written
    assert list(target) == (written if repr(update).startswith("replace") else [])


def test_functions_may_read_anything():
    opaque = bound(layout=lambda s: embed(5) * s.item.index + embed(5))
    scopes = [opaque.scope(torch.zeros(2, 2), index) for index in (0, 2)]
    assert [len(opaque.placeholders.alternatives(scope)[0].placeholder) for scope in scopes] == [1, 3]
    assert opaque.placeholders.alternatives(scopes[0]) is not opaque.placeholders.alternatives(scopes[0])
    assert opaque.placeholders.depends_on_index
    assert opaque.placeholders.varies(False)
    assert bound(layout=lambda s: embed(5), process=hf()).needs_hf


def test_layouts_are_kept_up_to_a_size(monkeypatch):
    """The least recently used goes; what is larger, or depends on a large tensor, is not kept."""
    monkeypatch.setattr("mmkit.bound.placeholders._LAYOUT_IDS", 2000)
    by_index = bound(layout=embed(5) * (item.index + 1))

    def ways(index):
        return by_index.placeholders.alternatives(by_index.scope(torch.zeros(2, 2), index))

    first, second = ways(600), ways(601)
    assert ways(600) is first
    third = ways(400)
    assert (ways(600) is first, ways(400) is third, ways(601) is second) == (True, True, False)
    assert ways(3000) is not ways(3000)
    assert ways(601) is ways(601), "what is too large lets nothing go"
    by_values = bound(layout=embed(5) * later(len)(fields.x), fields={"x": batched()})
    for length, stays in ((256, True), (257, False)):
        scope = by_values.scope(torch.zeros(2, 2), 0, {"x": torch.zeros(length)})
        assert (by_values.placeholders.alternatives(scope) is by_values.placeholders.alternatives(scope)) == stays


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_ids_of_the_vocabulary():
    plan = plan_of(modality())
    plan.check_ids([0, 1, 199])


def test_placeholders_without_items_are_refused():
    plan = plan_of(modality("a"), modality("b", layout=embed(6) + literal(5), fields={"y": batched()}))
    assert plan.embed_ids == {5, 6}
    plan.check_bare([1, 2, 3])
    plan.check_bare([1, 5], ["a"])
    for ids, present, name in (([5], [], "a"), ([1, 6], ["a"], "b"), ([5, 6], ["b"], "a"), ([6, 5], [], "a")):
        with pytest.raises(InputError, match=rf"^spec\.{name}: .* no item"):
            plan.check_bare(ids, present)
    both = plan_of(modality("a"), modality("b", fields={"y": batched()}))
    both.check_bare([5], ["b"])


def test_every_placeholder_id_is_known():
    kind = Tensor(shape=(between(1, 4),))
    assert plan_of(modality(item=kind, layout=where(item.length > 3, embed(5), embed(6)))).embed_ids == {5, 6}
    assert plan_of(modality(layout=select(fields.x, embed=tok["<image>"]), process=hf())).embed_ids == {7}
    plan = plan_of(modality(item=kind, layout=lambda s: embed(5 + s.item.length // 2)))
    assert plan.embed_ids == {5, 7}
    with pytest.raises(SpecError, match=r"layout: expected embed\(\) of ids that the largest .* got \[6\]"):
        plan.preview([6], {"m": torch.zeros(2)})


# -- processing ------------------------------------------------------------------------------------------------------


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

    own = bound(item=Tensor(shape=(between(1, 4),)), fields=declared, process=process, cacheable=item.count < 3)
    short, long = own.processing.run([torch.zeros(1), torch.ones(3)])
    assert (short["rows"].tolist(), long["rows"].tolist()) == ([0.0] * 2, [1.0] * 6)
    for part, twice in ((short, 2), (long, 6)):
        assert (type(part["twice"]), part["twice"], part["constant"], part["count"]) == (torch.Tensor, twice, 7, 2)
    assert own.processing.run([torch.zeros(1)], 5)[0]["count"] == 5


def test_a_buffer_that_is_written_again():
    """By the next item, or by the next request."""
    buffer = torch.zeros(2, 2)

    def process(items, scope):
        return {"x": [buffer.copy_(value) for value in items]}

    for requests in ([[0, 1, 2], [9]], [[0], [1], [2, 9]]):
        run = bound(process=process).processing.run
        parts = [part["x"] for ids in requests for part in run([torch.full((2, 2), float(i)) for i in ids])]
        assert [part.unique().tolist() for part in parts] == [[0.0], [1.0], [2.0], [9.0]]


def test_what_is_called():
    options = hf(text="<1>", kwargs={"size": {"height": cfg.n, "all": [cfg.size]}})
    assert bound(process=options).processing.hf.kwargs == {"size": {"height": 2, "all": [7]}}
    assert options.key != hf(text="<2>", kwargs=options.kwargs).key
    called = bound(process=hf(later(len)(cfg.text), text=later("<{}>".format)(cfg.n)))
    assert (called.processing.hf_processor, called.processing.hf_text) == (1, "<2>")
    assert bound(process=hf(lambda s: s.cfg.n)).processing.hf_processor == 2
    for plain in (bound(), bound(process=hf())):
        assert (plain.processing.hf_processor, plain.processing.hf_text) == (None, None)
    with pytest.raises(SpecError, match=r"^spec\.m, process: cfg\.missing"):
        bound(process=hf(cfg.missing)).processing.hf_processor  # noqa: B018


RAGGED = Tensor(shape=(between(0, 8), 2))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_processing_ragged_items(lengths):
    """`round_trip`, for a process that returns one field of each kind; `independence`, against each item on its own."""
    declared = {
        "rows": flat(fields.count * 2, dim=1, shape=(2, fields.count * 2), dtype="float32"),
        "count": batched(shape=(), dtype="int64"),
        "table": constant(cfg.n, dtype="int64"),
    }

    def process(items, scope):
        return {
            "rows": torch.cat([x.repeat(2, 1).T for x in items], dim=1),
            "count": torch.tensor([len(x) for x in items]),
        }

    modality = bound(item=RAGGED, fields=declared, process=process)
    items = [torch.full((n, 2), float(i)) for i, n in enumerate(lengths)]
    processed = modality.processing.run(items)
    assert [part["rows"].shape[1] for part in processed] == [2 * n for n in lengths]
    for value, part in zip(items, processed, strict=True):
        (alone,) = modality.processing.run([value])
        assert alone.keys() == part.keys() == declared.keys()
        assert all(torch.equal(alone[name], part[name]) for name in declared)


@pytest.mark.parametrize("shape", [None, (item.length,)])
def test_unpadding(shape):
    """A processor that pads to the largest of the batch must not be seen (law `independence`)."""
    modality = bound(
        item=Tensor(shape=(between(1, 8),)),
        fields={"x": batched(shape=shape), "n": batched()},
        process=hf(outputs={"lengths": "n", "values": "x"}, unpad={"x": fields.n}),
    )
    padded = {"values": torch.tensor([[1.0, 0.0], [2.0, 3.0]]), "lengths": torch.tensor([1, 2])}
    finished = modality.processing.finish(padded, [torch.zeros(1), torch.zeros(2)])
    assert [part["x"].tolist() for part in finished] == [[1.0], [2.0, 3.0]]

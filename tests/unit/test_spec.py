"""Specs: declaration, structure, binding and checking, and the plan's refusals before placement."""

import copy
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmkit
from mmkit import (
    Audio,
    Image,
    InputError,
    Modality,
    ModelSpec,
    SpecError,
    Tensor,
    Video,
    after,
    batched,
    between,
    call,
    cfg,
    each,
    embed,
    end,
    equal,
    flat,
    fmt,
    hf,
    in_place,
    insert,
    item,
    maximum,
    out,
    proc,
    prompt,
    replace,
    shared,
    tok,
    token,
    where,
)

NAMES = {name: getattr(mmkit, name) for name in mmkit.__all__ if name != "MultiModalModel"}
CONFIG = SimpleNamespace(vocab_size=200, n=3, d=2, pad=7, outside=200, text="x", minus=-1)


class Tokenizer:
    def get_vocab(self):
        return {"<image>": 100, "<far>": 200, "<|image_1|>": 111, "<|image_2|>": 112}

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return list(map(ord, text))

    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(chr, ids))


def modality(name="x", **options):
    plain = dict(item=Tensor(shape=(cfg.n,)), layout=embed(cfg.pad) * cfg.n, update=in_place(), fields={"x": batched()})
    return Modality(name, **{**plain, **options})


def check(*, tokenizer=None, config=CONFIG, processor=None, **options):
    ModelSpec("spec", modality(**options)).check(config, tokenizer or Tokenizer(), processor=processor)


# -- structure -------------------------------------------------------------------------------------------------------

ITEMS = [
    Tensor(shape=(cfg.n, 3)),
    Tensor(shape=(), dtype="int64", finite=False),
    Image(largest=(cfg.n, 3)),
    Audio(largest=9),
]
LAYOUTS = [
    embed(5),
    embed(tok["<image>"]) * cfg.n,
    token(1) + embed(cfg.pad) * (cfg.n // 2) + [2, 3],
    each(item.n, lambda y: each(cfg.n, lambda x: embed(x) * y, sep=1), last=tok("end")),
    embed(5) * maximum(out.x, 1),
]
UPDATES = [in_place(), replace(tok["<image>"]), insert(after(tok("a"))), [replace(7), insert(end())]]
FIELDS = [{"x": batched()}, {"x": batched(), "y": flat(item.n, dim=1)}, {"x": shared(shape=(cfg.n,)), "z": batched()}]
FIELDS.append({"x": batched(value=item.n + 1, dtype="int64"), "z": shared(value=tok["<image>"])})


@st.composite
def modalities(draw):
    fields = draw(st.sampled_from(FIELDS))
    kind = draw(st.sampled_from(ITEMS))
    processes = [hf(), hf(inputs={"a": "b"}, outputs={"c": "x"}, text="t", unpad={"x": (item.n, 2)}), len]
    processes.append(hf(call(len, cfg.n), text="t"))
    processes += [None] if not isinstance(kind, Tensor) or len(fields) == 1 else []
    return dict(
        item=kind,
        layout=draw(st.sampled_from(LAYOUTS)),
        update=draw(st.sampled_from(UPDATES)),
        fields=fields,
        process=draw(st.sampled_from(processes)),
        limit=draw(st.sampled_from([None, 3, cfg.n - 1])),
        embeds=draw(st.sampled_from([False, embed(5) * item.length])),
        cache=draw(st.sampled_from([True, False, item.count < 3])),
        when=draw(st.sampled_from([True, cfg.n > 2])),
    )


PROMPTS = [{}, {"prompt": token(prompt) + 5}, {"decoder_prompt": token(cfg.pad)}, {"prompt": token(5) + token(prompt)}]


@given(modalities(), modalities(), st.sampled_from(PROMPTS), st.sampled_from(PROMPTS))
def test_structure(one, other, prompts, other_prompts):
    spec = ModelSpec("spec", Modality("m", **one), **prompts)
    for again in (
        ModelSpec("spec", Modality("m", **one), **prompts),
        pickle.loads(pickle.dumps(spec)),
        copy.deepcopy(spec),
    ):
        assert again == spec
        assert hash(again) == hash(spec)
        assert repr(again) == repr(spec) == str(spec)
    if one["process"] is not len:  # a function's repr is its name
        assert eval(repr(spec), dict(NAMES)) == spec
    different = ModelSpec("spec", Modality("m", **other), **other_prompts)
    assert (different == spec) == (repr(different) == repr(spec))
    assert spec != ModelSpec("other", Modality("m", **one))
    assert spec != "spec"


def test_repr_of_between():
    spec = modality(item=Tensor(shape=(between(1, cfg.n),)))
    assert eval(repr(spec), dict(NAMES)) == spec


def test_hash_agrees_with_equality():
    one = modality(fields={"x": batched(), "y": shared()}, process=hf())
    other = modality(fields={"y": shared(), "x": batched()}, process=hf())
    assert (one == other) == (hash(one) == hash(other))


def test_the_short_form_is_the_long_form():
    options = dict(item=Image(largest=(8, 8)), fields={"pixel_values": batched()})
    for tokens in (576, cfg.n * 2, item.width // 2):
        short = Modality("image", placeholder="<image>", tokens=tokens, **options)
        layout = embed(tok["<image>"]) * tokens
        long = Modality("image", layout=layout, update=replace(tok["<image>"]), **options)
        assert short == long
        assert hash(short) == hash(long)
        assert repr(short) == repr(long)


def test_defaults():
    plain = modality()
    assert (plain.limit, plain.embeds, plain.update) == (None, False, (in_place(),))
    assert repr(plain.process) == "identity()"
    assert repr(modality(item=Image(largest=(1, 1))).process) == "hf()"
    assert modality(update=[in_place(), replace(7)]).update == (in_place(), replace(7))


def test_specs_cannot_be_changed():
    spec = ModelSpec("spec", modality())
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"
    with pytest.raises(ValueError, match="frozen"):
        spec["x"].limit = 5


def test_modalities_by_name():
    spec = ModelSpec("spec", modality("a"), modality("b", fields={"y": batched()}))
    assert spec["b"] is spec.modalities[1]
    with pytest.raises(KeyError):
        spec["c"]


def test_leaves():
    every = modality(
        item=Tensor(shape=(between(1, cfg.a), cfg.b)),
        layout=embed(cfg.c) * item.length,
        update=replace(tok[fmt("{}", item.index)]),
        fields={"x": flat(out.y, shape=(cfg.e,)), "y": batched()},
        process=hf(text=proc.g, unpad={"x": out.y}),
        limit=cfg.f,
    )
    assert every.leaves() >= {cfg.a, cfg.b, cfg.c, item.length, out.y, cfg.e, cfg.f, proc.g}


def test_leaves_of_every_part():
    every = modality(item=Tensor(shape=(1,), bound=cfg.h), embeds=embed(cfg.g) * item.length)
    assert every.leaves() >= {cfg.h, cfg.g}


# -- declarations that cannot work -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layout=None), "expected layout and update, got one of them"),
        (dict(update=None), "expected layout and update, got one of them"),
        (dict(layout=None, update=None), "expected layout and update, got neither"),
        (dict(placeholder="<image>", tokens=5), "a mixture"),
        (dict(layout=None, update=None, placeholder="<image>"), "a mixture"),
        (dict(layout=None, update=None, tokens=5), "a mixture"),
        (dict(layout="<image>"), "tok"),
        (dict(update=[]), "at least one update"),
        (dict(update="x"), "update"),
        (dict(update=[5]), "update"),
        (dict(fields={}), "at least one field"),
        (dict(fields={"x": 5}), "fields"),
        (dict(fields={5: batched()}), "fields"),
        (dict(item="tensor"), "item"),
        (dict(item=Tensor), "item"),
        (dict(process=5), "process"),
        (dict(process="hf"), "process"),
        (dict(item=Image(largest=(1, 1)), process=mmkit.identity()), "identity"),
        (dict(fields={"x": batched(), "y": batched()}), "identity"),
        (dict(process=hf(unpad={"z": 3})), "unpad"),
        (dict(layout=embed(5) * out.z), "field among ['x'], got 'z'"),
        (dict(layout=embed(5) * out["z"][0].a), "field among ['x'], got 'z'"),
        (dict(fields={"x": flat(out.z)}), "'z'"),
        (dict(fields={"x": batched(shape=(out.z,))}), "'z'"),
        (dict(update=replace(out.z)), "'z'"),
        (dict(process=hf(unpad={"x": out.z})), "'z'"),
        (dict(layout=embed(5) * where(item.a, out.z, 1)), "'z'"),
        (dict(layout=embed(5) * item.length, embeds=True), "item.length"),
        (dict(layout=embed(5) * out.x, embeds=True), "item.length"),
        (dict(name="two words"), "identifier"),
        (dict(name=""), "identifier"),
        (dict(name=5), "name"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_bad_modalities_are_refused(options, message):
    with pytest.raises(SpecError) as caught:
        modality(**options)
    assert message in str(caught.value)
    assert str(caught.value).startswith(("modality ", "layout"))


@pytest.mark.parametrize("options", [dict(update=5), dict(fields=None), dict(fields=["x"]), dict(fields=5)], ids=str)
def test_parts_of_the_wrong_type_are_refused(options):
    with pytest.raises(SpecError):
        modality(**options)


def test_bad_specs_are_refused():
    for make in (
        lambda: ModelSpec("spec"),
        lambda: ModelSpec("two words", modality()),
        lambda: ModelSpec(5, modality()),
        lambda: ModelSpec("spec", "x"),
        lambda: ModelSpec("spec", modality("a"), modality("a")),
        lambda: ModelSpec("spec", modality("a", fields={"x": batched()}), modality("b", fields={"x": batched()})),
        lambda: ModelSpec("spec", modality("a"), modality("b")),
        lambda: ModelSpec("spec", modality("a", embeds=True), modality("b", fields={"a_embeds": batched()})),
        lambda: ModelSpec("spec", modality("b", fields={"a_embeds": batched()}), modality("a", embeds=True)),
    ):
        with pytest.raises(SpecError, match=r"^spec "):
            make()
    ModelSpec("spec", modality("a"), modality("b", fields={"a_embeds": batched()}))


def test_a_field_named_like_the_embeddings():
    with pytest.raises(SpecError):
        ModelSpec("spec", modality("a", fields={"a_embeds": batched()}, embeds=True))


# -- check -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "where_", "message"),
    [
        (dict(item=Tensor(shape=(cfg.missing,))), "item", "cfg.missing"),
        (dict(layout=embed(cfg.missing)), "layout", "cfg.missing"),
        (dict(layout=embed(5) * (item.length + cfg.missing)), "layout", "cfg.missing"),
        (dict(layout=each(item.length, lambda x: embed(cfg.missing))), "layout", "cfg.missing"),
        (dict(update=replace(cfg.missing)), "update", "cfg.missing"),
        (dict(update=insert(after(cfg.missing))), "update", "cfg.missing"),
        (dict(fields={"x": batched(shape=(cfg.missing,))}), "fields", "cfg.missing"),
        (dict(fields={"x": flat(cfg.missing)}), "fields", "cfg.missing"),
        (dict(limit=cfg.missing), "limit", "cfg.missing"),
        (dict(embeds=embed(cfg.missing)), "embeds", "cfg.missing"),
        (dict(layout=embed(tok["<imgae>"])), "layout", "<imgae>"),
        (dict(update=replace(tok["<imgae>"])), "update", "<imgae>"),
        (dict(layout=embed(cfg.outside)), "layout", "below the vocabulary size 200, got 200"),
        (dict(layout=embed(tok["<far>"])), "layout", "got 200"),
        (dict(layout=embed(5) + token(cfg.outside)), "layout", "got 200"),
        (dict(layout=embed(5) + each(out.x, lambda x: token(10**6))), "layout", "got 1000000"),
        (dict(update=replace(tok["<far>"])), "update", "got 200"),
        (dict(update=replace([])), "update", "at least one token"),
        (dict(layout=embed(cfg.minus)), "layout", "cfg.minus"),
        (dict(layout=embed(5) * cfg.minus), "layout", "cfg.minus"),
        (dict(layout=embed(cfg.text)), "layout", "cfg.text"),
        (dict(layout=token(5)), "layout", "embed() position"),
        (dict(layout=embed(5) * 0), "layout", "embed() position"),
        (dict(layout=embed(5) * (item.length - 3)), "layout", "embed() position"),
        (dict(limit=-1), "limit", "whole number"),
        (dict(limit=cfg.minus), "limit", "whole number"),
        (dict(limit=1.5), "limit", "whole number"),
        (dict(limit=True), "limit", "whole number"),
        (dict(limit=cfg.text), "limit", "whole number"),
        (dict(limit=item.length), "limit", "item"),
        (dict(limit=cfg.n // 0), "limit", "cfg.n // 0"),
        (dict(layout=embed(tok[cfg.pad])), "layout", "tok[7]"),
        (dict(item=Tensor(shape=(cfg.minus,))), "item", "cfg.minus"),
        (dict(item=Tensor(shape=(item.length,))), "item", "item.length"),
        (dict(item=Tensor(shape=(proc.n,))), "item", "proc"),
        (dict(item=Image(largest=(0, cfg.n))), "item", "Image.largest"),
        (dict(item=Video(largest=(cfg.n, cfg.n))), "item", "Video.largest"),
        (dict(item=Audio(largest=cfg.text)), "item", "Audio.largest"),
    ],
    ids=lambda value: "".join(map(repr, value.values())) if isinstance(value, dict) else "",
)
def test_check_finds(options, where_, message):
    with pytest.raises(SpecError) as caught:
        check(**options)
    assert str(caught.value).startswith(f"spec.x, {where_}")
    assert message in str(caught.value)


def test_check_finds_nothing_in_what_works():
    check()
    check(limit=0)
    check(limit=lambda s: s.cfg.n)
    check(layout=lambda s: embed(s.cfg.pad) * s.item.length)
    check(layout=embed(tok["<image>"]) * item.length, update=replace(tok("ab")))
    check(item=Tensor(shape=(proc.n,)), processor=SimpleNamespace(n=3))
    check(layout=embed(5) * where(equal(cfg.n, 3), 1, cfg.missing))
    check(layout=embed(199))


def test_no_tokenizer():
    ModelSpec("spec", modality()).check(CONFIG)
    with pytest.raises(SpecError, match=r"spec\.x, layout: tok\['<image>'\] has no value: the model runs without"):
        ModelSpec("spec", modality(layout=embed(tok["<image>"]))).check(CONFIG)


@pytest.mark.parametrize("config", [SimpleNamespace(n=3, pad=7), SimpleNamespace(vocab_size="x", n=3, pad=7), None])
def test_a_config_without_a_vocabulary_is_refused(config):
    with pytest.raises(SpecError, match=r"vocab_size|cfg"):
        ModelSpec("spec", modality(layout=embed(5), item=Tensor(shape=(1,)))).check(config)


def test_the_vocabulary_of_the_language_model_counts():
    text = SimpleNamespace(vocab_size=6)
    config = SimpleNamespace(vocab_size=1000, get_text_config=lambda: text, n=3, pad=5)
    ModelSpec("spec", modality()).check(config)
    text.vocab_size = 5
    with pytest.raises(SpecError, match="vocabulary size 5"):
        ModelSpec("spec", modality()).check(config)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(process=hf(text=cfg.missing)), id="attribute in hf(text=)"),
        pytest.param(dict(process=hf(unpad={"x": cfg.missing})), id="attribute in hf(unpad=)"),
        pytest.param(dict(embeds=embed(200) * item.length), id="id outside the vocabulary in embeds="),
        pytest.param(dict(layout=where(item.length < 3, embed(cfg.outside), embed(5))), id="id in a branch of where()"),
        pytest.param(dict(layout=where(item.length < 3, embed(cfg.missing), embed(5))), id="attribute in a branch"),
        pytest.param(
            dict(layout=where(item.length < 3, embed(cfg.missing), embed(5) * out.x)),
            id="attribute beside out",
        ),
        pytest.param(dict(embeds=embed(5) * out.z), id="undeclared out field in embeds="),
        pytest.param(
            dict(item=Image(largest=5)),
            id="Image.largest",
        ),
    ],
)
def test_check_finds_what_is_seldom_used(options):
    options = {"item": Tensor(shape=(between(1, 4),)), **options}
    with pytest.raises(SpecError, match=r"spec\.x, |modality 'x'"):
        check(**options)


# -- plans -----------------------------------------------------------------------------------------------------------


def bind(*modalities_):
    return ModelSpec("spec", *modalities_).bind(CONFIG, Tokenizer())


IMAGE = Modality(
    "image",
    item=Tensor(shape=(between(0, 4),)),
    layout=embed(tok["<image>"]) * (item.length + 1),
    update=replace(tok["<image>"]),
    fields={"image": batched()},
)


def place(plan, prompt, **items):
    ways = {}
    for name, values in items.items():
        bound = plan.modalities[name]
        ways[name] = [bound.ways(bound.scope(value, i)) for i, value in enumerate(bound.parse(values))]
    return plan.place(prompt, ways)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_from_data_to_placeholders(lengths):
    plan = bind(IMAGE)
    prompt, wanted, starts = [1], [1], []
    for length in lengths:
        prompt += [100, 2]
        starts.append(len(wanted))
        wanted += [100] * (length + 1) + [2]
    ids, placements = place(plan, prompt, image=[torch.zeros(n) for n in lengths])
    assert ids == wanted
    assert [p.start for p in placements] == starts
    assert place(plan, ids, image=[torch.zeros(n) for n in lengths])[0] == ids


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_layouts_are_kept_by_geometry(lengths):
    """The same geometry gives the same objects; another geometry never does."""
    bound = bind(IMAGE).modalities["image"]
    seen = {}
    for index, length in enumerate(lengths):
        ways = bound.ways(bound.scope(torch.zeros(length), index))
        assert len(ways[0].laid) == length + 1
        assert seen.setdefault(length, ways) is ways


def test_item_numbered_targets_are_not_confused_by_the_cache():
    numbered = Modality(
        "image",
        item=Tensor(shape=(1,)),
        layout=embed(tok["<image>"]) * 2,
        update=replace(tok[fmt("<|image_{}|>", item.index + 1)]),
        fields={"x": batched()},
    )
    plan = bind(numbered)
    assert plan.modalities["image"].depends_on_index
    assert not bind(IMAGE).modalities["image"].depends_on_index
    assert place(plan, [111, 5, 112], image=[[0.0], [0.0]])[0] == [100, 100, 5, 100, 100]
    with pytest.raises(InputError):
        place(plan, [112, 5, 111], image=[[0.0], [0.0]])


@pytest.mark.parametrize("metadata", [None, {"n": 2}], ids=repr)
def test_where_guards_a_fact_that_may_be_missing(metadata):
    video = Modality(
        "video",
        item=Video(largest=(2, 4, 4)),
        layout=embed(5) * where(equal(item.metadata, None), 4, item.metadata["n"]),
        update=in_place(),
        fields={"x": batched()},
    )
    bound = bind(video).modalities["video"]
    scope = bound.scope(SimpleNamespace(index=0, metadata=metadata), 0)
    assert len(bound.ways(scope)[0].laid) == (2 if metadata else 4)


def test_the_largest_item():
    bound = bind(IMAGE).modalities["image"]
    value, length = bound.largest()
    assert (value.shape, length) == ((4,), 5)
    several = modality(item=Image(largest=[(9, 1), (3, 4), (2, 2)]), layout=embed(5) * (item.width * item.height))
    value, length = bind(several).modalities["x"].largest()
    assert (value.size, length) == ((3, 4), 12)


def test_the_largest_item_of_a_layout_that_shrinks():
    kind = Tensor(shape=(between(1, 4),), largest=[(1,), (4,)])
    shrinking = modality(item=kind, layout=embed(5) * (9 - item.length))
    assert bind(shrinking).modalities["x"].largest()[1] == 8


def test_rows():
    assert bind(modality()).modalities["x"].rows({}) == 3
    assert bind(IMAGE).modalities["image"].rows({}) is None
    by_out = modality(layout=embed(5) * out.x, process=hf())
    assert bind(by_out).modalities["x"].rows({"x": torch.tensor(4)}) == 4


@pytest.mark.parametrize("bad", [True, 5.0, "5", None, torch.tensor(5), -1, 200, 10**30], ids=repr)
def test_bad_token_ids_are_refused(bad):
    plan = bind(modality())
    plan.check_ids([0, 1, 199])
    plan.check_ids([])
    with pytest.raises(InputError, match=r"^spec\.prompt\[2\]: expected a token id"):
        plan.check_ids([0, 1, bad, 3])


def test_placeholders_without_items_are_refused():
    plan = bind(modality("a", layout=embed(5)), modality("b", layout=embed(6) + token(5), fields={"y": batched()}))
    assert plan.embed_ids == {5, 6}
    plan.check_bare([1, 2, 3])
    plan.check_bare([1, 5], ["a"])
    for ids, present in (([5], []), ([1, 6], ["a"]), ([5, 6], ["b"])):
        with pytest.raises(InputError, match="no item"):
            plan.check_bare(ids, present)
    with pytest.raises(InputError, match=r"spec\.b"):
        place(plan, [5, 6], a=[[0.0, 0.0, 0.0]])


def test_a_modality_with_no_items_is_not_present():
    with pytest.raises(InputError):
        bind(modality("a", layout=embed(5) * 3)).place([5, 5, 5], {"a": []})


def test_every_placeholder_id_is_known():
    plan = bind(modality(item=Tensor(shape=(between(1, 4),)), layout=where(item.length > 3, embed(5), embed(6))))
    assert plan.embed_ids == {5, 6}


def test_missing_data_is_refused():
    bound = bind(IMAGE).modalities["image"]
    for data in (None, [], torch.zeros(0, 4)):
        with pytest.raises(InputError, match=r"^spec\.image: expected .* or leave the modality out\."):
            bound.parse(data)
    assert bound.parse([None, torch.zeros(2)])[0] is None
    with pytest.raises(InputError, match=r"^spec\.image\[1\]: "):
        bound.parse([torch.zeros(2), torch.zeros(5)])


# -- imports ---------------------------------------------------------------------------------------------------------


def test_declaring_and_binding_import_no_vllm():
    """The pure layers are for machines without vLLM too: a spec is checked before any engine is installed."""
    code = """
import sys
from types import SimpleNamespace
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "transformers"):
            raise ImportError("not allowed here: " + name)
sys.meta_path.insert(0, Refuse())
from mmkit import Modality, ModelSpec, Tensor, batched, cfg, embed, in_place
spec = ModelSpec("s", Modality("x", item=Tensor(shape=(cfg.n,)), layout=embed(5) * cfg.n, update=in_place(),
                 fields={"x": batched()}))
plan = spec.bind(SimpleNamespace(n=2, vocab_size=10))
x = plan.modalities["x"]
values = x.parse([[1.0, 2.0]])
assert plan.place([5, 5], {"x": [x.ways(x.scope(values[0], 0))]})[0] == [5, 5]
assert "vllm" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=120)


def test_public_names():
    for name in NAMES:
        assert getattr(mmkit, name) is not None
    assert sorted(mmkit.__all__) == mmkit.__all__
    with pytest.raises(AttributeError, match="nonsense"):
        mmkit.nonsense  # noqa: B018

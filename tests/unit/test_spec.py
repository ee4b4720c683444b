"""Specs: structure, defaults, and what the pure layers import."""

import copy
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmkit
from mmkit import (
    Audio,
    Image,
    Modality,
    ModelSpec,
    Record,
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
    later,
    literal,
    maximum,
    proc,
    replace,
    tok,
    where,
)
from mmkit.process import identity
from mmkit.vocabulary import Vocabulary
from tests import ROOT

from .common import CONFIG, NAMES, Tokenizer, leaves_of, modality

ITEMS = [
    Tensor(shape=(cfg.n, between(1, cfg.n))),
    Tensor(shape=(), dtype="int64"),
    Image(largest=(cfg.n, 3)),
    Video(largest=[(cfg.n, 3, 4)], metadata=True),
    Audio(largest=9),
    Record(a=Tensor(shape=(between(1, cfg.n),)), b=Text(most=cfg.n)),
]
LAYOUTS = [
    embed(5),
    embed(tok["<image>"]) * cfg.n,
    literal(1) + embed(cfg.size) * (cfg.n // 2) + [2, 3],
    each(item.n, lambda y: each(cfg.n, lambda x: embed(x) * y, sep=1), last=tok.text("end")),
    embed(5) * maximum(fields.x, 1),
]
UPDATES = [already_expanded(), replace(tok["<image>"]), insert(after=tok.text("a")), [replace(7), insert(at="end")]]
FIELDS = [
    {"x": batched()},
    {"x": batched(), "y": flat(item.n, dim=1)},
    {"x": batched(shape=(cfg.n,)), "z": constant(cfg.n)},
]
FIELDS.append({"x": derived(item.n + 1, dtype="int64"), "z": constant(tok["<image>"])})


@st.composite
def modalities(draw):
    declared = draw(st.sampled_from(FIELDS))
    kind = draw(st.sampled_from(ITEMS))
    called = hf(inputs={f"{kind.media}s" if kind.media else "m": "b"})
    processes = [hf(), called, hf(later(len)(cfg.n), text="t", outputs={"c": "x"}, unpad={"x": (item.n, 2)}), len]
    processes += [None] if not isinstance(kind, Tensor) or len(declared) == 1 else []
    return dict(
        item=kind,
        layout=draw(st.sampled_from(LAYOUTS)),
        update=draw(st.sampled_from(UPDATES)),
        fields=declared,
        process=draw(st.sampled_from(processes)),
        limit=draw(st.sampled_from([None, 3, cfg.n - 1])),
        embeds=draw(st.sampled_from([False, embed(5) * item.rows])),
        cacheable=draw(st.sampled_from([True, False, item.count < 3])),
        when=draw(st.sampled_from([True, cfg.n > 2])),
    )


SOURCES = [
    "batched()", "batched(shape=(cfg.n, 3), dtype='float32', keep_on_cpu=True, hidden=True)", "batched(shape=())",
    "flat(item.n)", "flat(fields.n * 2, shape=(2, 3), dim=1)", "flat(1, keep_on_cpu=True, hidden=True)",
    "derived(item.n)", "derived(fields.n + 1, dtype='int64', keep_on_cpu=True, hidden=True)",
    "constant(tok['<image>'])", "constant(cfg.n, dtype='int32', keep_on_cpu=True)", "between(1, cfg.n)",
    "replace(tok['<image>'])", "replace((1, 2))", "insert(at='end')", "insert(after=tok.text('a'))",
    "already_expanded()", "ending_with(5)", "ending_with(tok['<image>'])", "hf()", "hf(text='a', one_by_one=True)",
    "hf(processor=proc.a, inputs={'a': 'b'}, outputs={'c': 'd'}, unpad={'x': (item.n, 2)}, kwargs={'n': cfg.n})",
    "nothing", "literal((1, 2))", "tok['<a>'] + embed(5) * cfg.n + literal(6)", "(literal(1) + cfg.b) * (cfg.n - 1)",
    "embed(tok['<image>']) * 2", "select(tok.text('ab'), embed=7)", "any_id(1, cfg.n)", "literal(-cfg.a) + embed(5)",
    "each(item.n, lambda x: each(2, lambda y: embed(x)), sep=tok['<a>'], last=cfg.a)",
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_the_repr_of_a_part_is_its_source(source):
    """It states what is not as by default. Equal sources are equal declarations, and other ones are not."""
    part = eval(source, dict(NAMES))
    assert repr(part) == source
    for again in (eval(source, dict(NAMES)), pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
        assert (again, hash(again)) == (part, hash(part))
    assert [other for other in SOURCES if eval(other, dict(NAMES)) == part] == [source]


PROMPTS = [{}, {"prompt": ending_with(5)}, {"decoder_prompt": literal(cfg.size)}, {"prompt": len}]


@given(modalities(), modalities(), st.sampled_from(PROMPTS), st.sampled_from(PROMPTS))
def test_structure(one, other, prompts, other_prompts):
    spec = ModelSpec("spec", Modality("m", **one), **prompts)
    same = ModelSpec("spec", Modality("m", **one), **prompts)
    for again in (same, pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert again == spec
        assert hash(again) == hash(spec)
        assert repr(again) == repr(spec) == str(spec)
    with pytest.raises(AttributeError, match="cannot assign"):
        spec.name = "other"
    with pytest.raises(AttributeError, match="cannot assign"):
        spec["m"].limit = 5
    if one["process"] is not len and prompts.get("prompt") is not len:  # a function's repr is its name
        assert eval(repr(spec), dict(NAMES)) == spec
    different = ModelSpec("spec", Modality("m", **other), **other_prompts)
    assert (different == spec) == (repr(different) == repr(spec))
    assert spec != ModelSpec("other", Modality("m", **one))
    assert spec != "spec"


def test_hash_agrees_with_equality():
    one = modality(fields={"x": batched(), "y": constant(1)}, process=hf())
    other = modality(fields={"y": constant(1), "x": batched()}, process=hf())
    assert (one == other) == (hash(one) == hash(other))


@pytest.mark.parametrize("tokens", [576, cfg.n * 2, item.width // 2])
@pytest.mark.parametrize(("placeholder", "token"), [("<image>", tok["<image>"]), (cfg.image_id, cfg.image_id), (7, 7)])
@pytest.mark.parametrize("stated", [{}, {"update": insert(at="start")}, {"update": already_expanded()}])
def test_placeholder_and_tokens_are_a_layout(tokens, placeholder, token, stated):
    options = dict(item=Image(largest=(8, 8)), fields={"pixel_values": batched()})
    short = Modality("image", placeholder=placeholder, tokens=tokens, **stated, **options)
    long = Modality("image", layout=embed(token) * tokens, **({"update": replace(token)} | stated), **options)
    assert (short, hash(short), repr(short)) == (long, hash(long), repr(long))


def test_defaults():
    plain = modality()
    assert (plain.limit, plain.embeds, plain.update) == (None, False, (already_expanded(),))
    assert plain.process == identity()
    assert modality(item=Image(largest=(1, 1))).process == hf()
    assert modality(update=[already_expanded(), replace(7)]).update == (already_expanded(), replace(7))
    hidden = {"x": batched(), "n": batched(hidden=True)}
    named_alike = modality(fields=hidden, process=hf(), positions=(1, cfg.n, 1))
    assert named_alike.positions, "the attribute of the config is no hidden field"


def test_modalities_by_name():
    spec = ModelSpec("spec", modality("a"), modality("b", fields={"y": batched()}))
    assert spec["b"] is spec.modalities[1]
    with pytest.raises(KeyError):
        spec["c"]


def test_leaves():
    every = modality(
        item=Tensor(shape=(between(1, cfg.a), cfg.b), bound=cfg.h),
        layout=embed(cfg.c) * item.length,
        update=replace(tok["{}", item.index]),
        fields={"x": flat(fields.y, shape=(cfg.e,)), "y": batched()},
        process=hf(text=proc.g, unpad={"x": fields.y}),
        limit=cfg.f,
        embeds=embed(cfg.d) * item.rows,
    )
    config = leaves_of(cfg.a, cfg.b, cfg.c, cfg.d, cfg.e, cfg.f, cfg.h)
    assert every.leaves() == config | leaves_of(item.length, item.rows, item.index, fields.y, proc.g)


def test_check_finds_nothing_in_what_works():
    def check(processor=None, **options):
        for tokenizer in (Tokenizer(), Vocabulary(Tokenizer())):
            ModelSpec("spec", modality(**options)).check(CONFIG, tokenizer, processor=processor)

    check()
    check(limit=0)
    check(limit=lambda s: s.cfg.n)
    check(layout=lambda s: embed(s.cfg.size) * s.item.length)
    check(layout=embed(tok["<image>"]) * item.length, update=replace(tok.text("ab")))
    check(item=Tensor(shape=(proc.n,)), processor=SimpleNamespace(n=3))
    check(layout=embed(5) * where(cfg.n == 2, 1, cfg.missing))
    check(layout=embed(199))
    ModelSpec("spec", modality()).check(CONFIG)
    ModelSpec("spec", modality("a"), modality("b", fields={"a_embeds": batched()})).check(CONFIG)


def test_the_vocabulary_of_the_language_model_counts():
    text = SimpleNamespace(vocab_size=6)
    config = SimpleNamespace(vocab_size=1000, get_text_config=lambda: text, n=2)
    ModelSpec("spec", modality()).check(config)
    ModelSpec("spec", modality()).check({"vocab_size": 6, "n": 2})
    text.vocab_size = 5
    with pytest.raises(mmkit.SpecError, match="vocabulary size 5"):
        ModelSpec("spec", modality()).check(config)


# -- imports ---------------------------------------------------------------------------------------------------------


def test_the_pure_layers_import_no_vllm():
    """A spec is declared, bound and tried on machines without vLLM and transformers."""
    code = """
import sys
sys.modules |= dict.fromkeys(["vllm", "transformers"])  # whatever imports them fails
from tests.unit.common import bound, plan_of, modality
assert plan_of(modality()).preview([5], {"m": [[1, 2], [3, 4]]}).prompt_token_ids == [5]
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=ROOT, timeout=300)


def test_names_that_do_not_exist():
    with pytest.raises(AttributeError, match="nonsense"):
        mmkit.nonsense  # noqa: B018

"""Specs: structure, defaults, and what the pure layers import."""

import copy
import inspect
import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmkit
from mmkit import (
    Image,
    Modality,
    ModelSpec,
    Tensor,
    already_expanded,
    batched,
    cfg,
    constant,
    embed,
    hf,
    insert,
    item,
    proc,
    replace,
    tok,
    where,
)
from mmkit.language.vocabulary import Vocabulary
from tests import ROOT

from .common import CONFIG, NAMES, Tokenizer, make_modality


def declared(source):
    """What a source declares, a new one each time."""
    return eval(source, dict(NAMES))


PARTS = {
    "item": [
        "Tensor(shape=(cfg.n, between(1, cfg.n)))", "Tensor(shape=(), dtype='int64')",
        "Image(largest=(cfg.n, 3))", "Video(largest=[(cfg.n, 3, 4)], metadata=True)", "Audio(largest=9)",
        "Record(a=Tensor(shape=(between(1, cfg.n),)), b=Text(most=cfg.n))",
    ],
    "layout": [
        "embed(tok['<image>']) * 2", "literal(tok['<a>']) + embed(5) * cfg.n + literal(6)",
        "embed(5) * maximum(fields.x, 1)",
        "literal(-cfg.a) + embed(5)", "(literal(1) + embed(cfg.b)) * (cfg.n - 1)", "select(tok.text('ab'), embed=7)",
        "each(item.n, lambda x: each(2, lambda y: embed(x)), sep=tok['<a>'], last=cfg.a)",
    ],
    "update": [
        "replace(tok['<image>'])", "replace((1, 2))", "insert(after=tok.text('a'))",
        "already_expanded()",
    ],
    "x": [
        "batched()", "batched(shape=(cfg.n, 3), dtype='float32', keep_on_cpu=True, hidden=True)", "batched(shape=())",
        "flat(item.n)", "flat(fields.y * 2, shape=(2, 3), dim=1)", "flat(1, keep_on_cpu=True, hidden=True)",
    ],
    "y": [
        "derived(item.n)", "derived(fields.x + 1, dtype='int64', keep_on_cpu=True, hidden=True)",
        "constant(tok['<image>'])", "constant(cfg.n, dtype='int32', keep_on_cpu=True)",
    ],
    "process": [
        "hf()", "hf(text='a', one_by_one=True)", "hf(processor=later(len)(cfg.n), outputs={'c': 'x'})",
        "hf(processor=proc.a, outputs={'c': 'd'}, unpad={'x': (item.n, 2)}, kwargs={'n': cfg.n})",
    ],
    "prompt": ["ending_with(5)", "ending_with(tok['<image>'])", "literal(cfg.size)"],
    "output": ["Output('map', any_id(1, cfg.n), len)", "Output('map', any_id(1, 3) * 2, len, encode=abs, lossy=True)"],
    "else": ["nothing", "between(1, cfg.n)", "any_id(1, cfg.n)", "hf(inputs={'a': 'b'})"],
}  # fmt: skip
SOURCES = [source for sources in PARTS.values() for source in sources]


@pytest.mark.parametrize("source", SOURCES)
def test_the_repr_of_a_part_is_its_source(source):
    """It states what is not as by default. Equal sources are equal declarations, and other ones are not."""
    part = declared(source)
    assert repr(part) == source
    for again in (declared(source), pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
        assert (again, hash(again)) == (part, hash(part))
    assert [other for other in SOURCES if declared(other) == part] == [source]


def some(kind):
    return st.sampled_from(PARTS[kind])


MODALITY = st.fixed_dictionaries(
    {
        "item": some("item"),
        "layout": some("layout"),
        "update": some("update") | st.just("[replace(7), insert(at='start')]"),
        "fields": st.builds("{{'x': {}, 'y': {}}}".format, some("x"), some("y")),
        "process": some("process") | st.just("divmod"),
        "limit": st.sampled_from(["None", "3", "cfg.n - 1"]),
        "embeds": st.sampled_from(["False", "embed(5) * item.rows"]),
        "cacheable": st.sampled_from(["True", "False", "item.count < 3"]),
        "when": st.sampled_from(["True", "cfg.n > 2"]),
    }
)
PROMPTS = st.dictionaries(st.sampled_from(["prompt", "decoder_prompt"]), some("prompt") | st.just("len"), max_size=1)
PROMPTS |= st.fixed_dictionaries({"outputs": st.builds("[{}]".format, some("output"))})


def source_of(name, options, prompts):
    parts = [f"Modality('m', {', '.join(f'{key}={value}' for key, value in options.items())})"]
    return f"ModelSpec({name!r}, {', '.join([*parts, *(f'{key}={value}' for key, value in prompts.items())])})"


@given(MODALITY, PROMPTS, MODALITY, PROMPTS)
def test_structure(one, prompts, other, other_prompts):
    source = source_of("spec", one, prompts)
    spec, different = declared(source), declared(source_of("spec", other, other_prompts))
    for again in (declared(source), pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert (again, hash(again), repr(again)) == (spec, hash(spec), str(spec))
    assert "<built-in" in repr(spec) or declared(repr(spec)) == spec, "but for functions"
    for part in (spec, spec["m"]):
        with pytest.raises(AttributeError, match="cannot assign"):
            part.name = "other"
    assert (different == spec) == (repr(different) == repr(spec))
    assert spec != declared(source_of("other", one, prompts))
    assert spec.model_copy(update={"outputs": ()}) == declared(source_of("spec", one, {**prompts, "outputs": ()}))
    assert spec != source


def test_hash_agrees_with_equality():
    one = make_modality(fields={"x": batched(), "y": constant(1)}, process=hf())
    other = make_modality(fields={"y": constant(1), "x": batched()}, process=hf())
    assert (one == other) == (hash(one) == hash(other))


@pytest.mark.parametrize("tokens", [576, cfg.n * 2, item.width // 2])
@pytest.mark.parametrize(("placeholder", "token"), [("<image>", tok["<image>"]), (cfg.image_id, cfg.image_id), (7, 7)])
@pytest.mark.parametrize("stated", [{}, {"update": insert(at="start")}, {"update": already_expanded()}])
def test_placeholder_and_tokens_are_a_layout(tokens, placeholder, token, stated):
    options = dict(item=Image(largest=(8, 8)), fields={"pixel_values": batched()})
    short = Modality("image", placeholder=placeholder, tokens=tokens, **stated, **options)
    long = Modality("image", layout=embed(token) * tokens, **({"update": replace(token)} | stated), **options)
    assert (short, hash(short), repr(short)) == (long, hash(long), repr(long))


def test_modalities_by_name():
    spec = ModelSpec("spec", make_modality("a"), make_modality("b", fields={"y": batched()}))
    assert spec["b"] is spec.modalities[1]
    with pytest.raises(KeyError):
        spec["c"]


def test_check_finds_nothing_in_what_works():
    """What else works is bound in test_plan.py."""
    last = make_modality(layout=embed(199), update=replace(tok.text("ab")), limit=lambda s: s.cfg.n)
    for tokenizer in (Tokenizer(), Vocabulary(Tokenizer())):
        ModelSpec("spec", last).bind(CONFIG, tokenizer)
    ModelSpec("spec", make_modality(item=Tensor(shape=(proc.n,)))).bind(CONFIG, processor=SimpleNamespace(n=3))
    ModelSpec("spec", make_modality(layout=embed(5) * where(cfg.n == 2, 1, cfg.missing))).bind(CONFIG)
    ModelSpec("spec", make_modality("a"), make_modality("b", fields={"a_embeds": batched()})).bind(CONFIG)
    # the attribute of the config is no hidden field
    fields_of = {"x": batched(), "n": batched(hidden=True)}
    grid = make_modality(layout=embed(5) * cfg.n, positions=(1, cfg.n, 1), fields=fields_of, process=hf())
    ModelSpec("spec", grid).bind(CONFIG)


def test_the_vocabulary_of_the_language_model_counts():
    text = SimpleNamespace(vocab_size=6)
    config = SimpleNamespace(vocab_size=1000, get_text_config=lambda: text, n=2)
    ModelSpec("spec", make_modality()).bind(config)
    ModelSpec("spec", make_modality()).bind({"vocab_size": 6, "n": 2})
    text.vocab_size = 5
    with pytest.raises(mmkit.SpecError, match="vocabulary size 5"):
        ModelSpec("spec", make_modality()).bind(config)


# -- imports ---------------------------------------------------------------------------------------------------------


def test_the_pure_layers_import_no_vllm():
    """A spec is declared, bound and tried on machines without vLLM and transformers; so is a client."""
    code = """
import sys
sys.modules |= dict.fromkeys(["vllm", "transformers", "fastapi"])  # whatever imports them fails
import mmkit.serve.client
from tests.unit.common import bind_modality, bind_plan, make_modality
assert bind_plan(make_modality()).preview([5], {"m": [[1, 2], [3, 4]]}).prompt_token_ids == [5]
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=ROOT, timeout=300)


def test_names_that_do_not_exist():
    with pytest.raises(AttributeError, match=r"^module 'mmkit' has no attribute 'nonsense'$"):
        mmkit.nonsense  # noqa: B018


@pytest.mark.parametrize("declaration", [mmkit.Modality, mmkit.Output, mmkit.ModelSpec])
def test_signatures_show_what_an_author_writes(declaration):
    parameters = inspect.signature(declaration).parameters.values()
    assert not [parameter for parameter in parameters if parameter.name.startswith("_")]
    assert not [parameter for parameter in parameters if re.search("Stated|InitVar", str(parameter.annotation))]

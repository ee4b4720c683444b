"""Specs: structure, defaults, and what the pure layers import."""

import copy
import inspect
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


def declare(source):
    """Return what a source declares, a new one each time."""
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
SOURCES = []
for sources_of_a_part in PARTS.values():
    SOURCES += sources_of_a_part


def list_copies(source, declaration):
    """Return the declaration from its source again, from a pickle, and as a copy."""
    return [declare(source), pickle.loads(pickle.dumps(declaration)), copy.deepcopy(declaration)]


@pytest.mark.parametrize("source", SOURCES)
def test_the_repr_of_a_part_is_its_source(source):
    """The source says only what is not the default."""
    assert repr(declare(source)) == source


@pytest.mark.parametrize("source", SOURCES)
def test_equal_sources_are_equal_declarations(source):
    part = declare(source)
    for again in list_copies(source, part):
        assert again == part
        assert hash(again) == hash(part)


@pytest.mark.parametrize("source", SOURCES)
def test_other_sources_are_other_declarations(source):
    part = declare(source)
    assert [other for other in SOURCES if declare(other) == part] == [source]


def sources_of(kind):
    return st.sampled_from(PARTS[kind])


MODALITY = st.fixed_dictionaries(
    {
        "item": sources_of("item"),
        "layout": sources_of("layout"),
        "update": sources_of("update") | st.just("[replace(7), insert(at='start')]"),
        "fields": st.builds("{{'x': {}, 'y': {}}}".format, sources_of("x"), sources_of("y")),
        "process": sources_of("process") | st.just("divmod"),
        "limit": st.sampled_from(["None", "3", "cfg.n - 1"]),
        "embeds": st.sampled_from(["False", "embed(5) * item.rows"]),
        "cacheable": st.sampled_from(["True", "False", "item.count < 3"]),
        "when": st.sampled_from(["True", "cfg.n > 2"]),
    }
)
"""Options of a modality, as sources."""

PROMPT_SOURCES = sources_of("prompt") | st.just("len")
PROMPTS = st.dictionaries(st.sampled_from(["prompt", "decoder_prompt"]), PROMPT_SOURCES, max_size=1)
OUTPUTS = st.fixed_dictionaries({"outputs": st.builds("[{}]".format, sources_of("output"))})
SPEC_OPTIONS = PROMPTS | OUTPUTS
"""Options of a spec, as sources."""


def write_options(options):
    return [f"{key}={source}" for key, source in options.items()]


def write_spec(name, options, spec_options):
    """Return the source of a spec of one modality with these options."""
    modality = f"Modality('m', {', '.join(write_options(options))})"
    return f"ModelSpec({name!r}, {', '.join([modality] + write_options(spec_options))})"


@given(MODALITY, SPEC_OPTIONS)
def test_equal_sources_are_equal_specs(options, spec_options):
    source = write_spec("spec", options, spec_options)
    spec = declare(source)
    for again in list_copies(source, spec):
        assert again == spec
        assert hash(again) == hash(spec)
        assert repr(again) == str(spec)
    if "<built-in" not in repr(spec):  # a function has no source
        assert declare(repr(spec)) == spec
    assert spec != source


@given(MODALITY, SPEC_OPTIONS, MODALITY, SPEC_OPTIONS)
def test_specs_are_equal_where_their_reprs_are(options, spec_options, other_options, other_spec_options):
    spec = declare(write_spec("spec", options, spec_options))
    other = declare(write_spec("spec", other_options, other_spec_options))
    assert (other == spec) == (repr(other) == repr(spec))
    assert spec != declare(write_spec("other", options, spec_options))


@given(MODALITY, SPEC_OPTIONS)
def test_a_copy_of_a_spec_has_other_options(options, spec_options):
    spec = declare(write_spec("spec", options, spec_options))
    without_outputs = declare(write_spec("spec", options, {**spec_options, "outputs": ()}))
    assert spec.model_copy(update={"outputs": ()}) == without_outputs


@given(MODALITY, SPEC_OPTIONS)
def test_specs_and_modalities_are_frozen(options, spec_options):
    spec = declare(write_spec("spec", options, spec_options))
    for part in (spec, spec["m"]):
        with pytest.raises(AttributeError, match="cannot assign"):
            part.name = "other"


def test_hash_agrees_with_equality():
    in_order = make_modality(fields={"x": batched(), "y": constant(1)}, process=hf())
    reversed_order = make_modality(fields={"y": constant(1), "x": batched()}, process=hf())
    assert (in_order == reversed_order) == (hash(in_order) == hash(reversed_order))


@pytest.mark.parametrize("tokens", [576, cfg.n * 2, item.width // 2])
@pytest.mark.parametrize(("placeholder", "token"), [("<image>", tok["<image>"]), (cfg.image_id, cfg.image_id), (7, 7)])
@pytest.mark.parametrize("update", [None, insert(at="start"), already_expanded()])
def test_placeholder_and_tokens_are_a_layout(tokens, placeholder, token, update):
    options = dict(item=Image(largest=(8, 8)), fields={"pixel_values": batched()})
    short = Modality("image", placeholder=placeholder, tokens=tokens, update=update, **options)
    long = Modality("image", layout=embed(token) * tokens, update=update or replace(token), **options)
    assert short == long
    assert hash(short) == hash(long)
    assert repr(short) == repr(long)


def test_modalities_by_name():
    spec = ModelSpec("spec", make_modality("a"), make_modality("b", fields={"y": batched()}))
    assert spec["b"] is spec.modalities[1]
    with pytest.raises(KeyError):
        spec["c"]


# -- specs that bind, beside those of test_plan.py ---------------------------------------------------------------------


def get_limit(scope):
    return scope.cfg.n


@pytest.mark.parametrize("tokenizer", [Tokenizer(), Vocabulary(Tokenizer())], ids=["tokenizer", "vocabulary"])
def test_the_last_id_of_the_vocabulary_is_a_placeholder(tokenizer):
    last = make_modality(layout=embed(199), update=replace(tok.text("ab")), limit=get_limit)
    ModelSpec("spec", last).bind(CONFIG, tokenizer)


def test_a_shape_that_the_processor_says():
    spec = ModelSpec("spec", make_modality(item=Tensor(shape=(proc.n,))))
    spec.bind(CONFIG, processor=SimpleNamespace(n=3))


def test_a_branch_that_the_config_does_not_take_may_miss_a_value():
    spec = ModelSpec("spec", make_modality(layout=embed(5) * where(cfg.n == 2, 1, cfg.missing)))
    spec.bind(CONFIG)


def test_a_field_may_have_the_name_of_embeddings_that_nobody_sends():
    spec = ModelSpec("spec", make_modality("a"), make_modality("b", fields={"a_embeds": batched()}))
    spec.bind(CONFIG)


def test_an_attribute_of_the_config_is_no_hidden_field_of_its_name():
    fields_with_n = {"x": batched(), "n": batched(hidden=True)}
    grid = make_modality(layout=embed(5) * cfg.n, positions=(1, cfg.n, 1), fields=fields_with_n, process=hf())
    ModelSpec("spec", grid).bind(CONFIG)


class ConfigOfLayers:
    """A config whose language model has a vocabulary of its own."""

    n = 2
    vocab_size = 1000

    def __init__(self, vocab_size):
        self.text_config = SimpleNamespace(vocab_size=vocab_size)

    def get_text_config(self):
        return self.text_config


def test_the_vocabulary_of_the_language_model_counts():
    spec = ModelSpec("spec", make_modality())
    spec.bind(ConfigOfLayers(vocab_size=6))
    with pytest.raises(mmkit.SpecError, match="vocabulary size 5"):
        spec.bind(ConfigOfLayers(vocab_size=5))


def test_a_config_may_be_a_dict():
    ModelSpec("spec", make_modality()).bind({"vocab_size": 6, "n": 2})


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
    folders = [folder for folder in sys.path if folder]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=ROOT, timeout=300)


def test_names_that_do_not_exist():
    with pytest.raises(AttributeError, match=r"^module 'mmkit' has no attribute 'nonsense'$"):
        mmkit.nonsense  # noqa: B018


@pytest.mark.parametrize("declaration", [mmkit.Modality, mmkit.Output, mmkit.ModelSpec])
def test_signatures_show_what_an_author_writes(declaration):
    parameters = inspect.signature(declaration).parameters.values()
    for parameter in parameters:
        assert not parameter.name.startswith("_")
        assert "Stated" not in str(parameter.annotation)
        assert "InitVar" not in str(parameter.annotation)

"""Specs as documents: both ways for every spec of the repository, and what a document cannot do."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING
from dataclasses import fields as dataclass_fields
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from transformers import AutoConfig, AutoTokenizer

import mmkit.document.convert as convert
import mmkit.language.items.media as media
from mmkit import (
    ModelSpec,
    SpecError,
    any_id,
    batched,
    ceil_div,
    cfg,
    derived,
    each,
    embed,
    fields,
    flat,
    item,
    largest_of,
    later,
    literal,
    maximum,
    minimum,
    select,
    tok,
    where,
)
from mmkit.document import FunctionStubs, build_json_schema, find_differences, from_document, to_document
from mmkit.document.models import MODELS, PARTS, SpecModel
from mmkit.document.notations import HF_PROCESSORS
from mmkit.document.source import LIBRARY, MAX_CHARACTERS, MAX_DEPTH, MAX_NODES, parse_source
from mmkit.language import expr, layout, operations
from mmkit.language.field import Field
from mmkit.language.items import ItemType
from mmkit.language.items.size import Between
from mmkit.language.layout import Layout, Update
from mmkit.language.named_part import NamedPart
from mmkit.language.node import Node, Part, is_equal_declaration
from mmkit.language.policy import Concat
from mmkit.language.spec import Declaration
from tests.pages import ROOT
from tests.profiles import scaled
from tests.random_specs import checkpoint, specs
from tools import documents

from .common import make_modality, refuses

SCHEMA = ROOT / "docs" / "data" / "document.schema.json"


# -- every spec of the repository ------------------------------------------------------------------------------------


SPECS = documents.find_specs()

VALIDATOR = jsonschema.Draft202012Validator(build_json_schema())


@cache
def write_document(name: str) -> dict[str, Any]:
    return SPECS[name].to_document()


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_is_itself_again(name: str) -> None:
    spec = SPECS[name]
    text = json.dumps(write_document(name))
    has_functions = bool(documents.list_functions_by_part(json.loads(text)))
    again = ModelSpec.from_document(text, import_functions=has_functions)
    assert again == spec
    assert repr(again) == repr(spec)
    VALIDATOR.validate(json.loads(text))


def test_the_docs_say_which_specs_are_data_alone() -> None:
    page = documents.write_page({name: write_document(name) for name in SPECS})
    assert documents.PAGE.read_text(encoding="utf-8") == page, "Run python -m tools.documents."


# -- drawn specs -----------------------------------------------------------------------------------------------------


def list_functions(spec: ModelSpec) -> dict:
    """Return the functions of a drawn spec, which no process can import, by names."""
    return {f"drawn:process_{modality.name}": modality.process for modality in spec.modalities}


@cache
def load_config() -> Any:
    return AutoConfig.from_pretrained(checkpoint())


@cache
def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(checkpoint())


def describe_plan(spec: ModelSpec) -> list:
    """Return what a plan of a spec has, and what it makes of the largest items."""
    plan = spec.bind(load_config(), load_tokenizer())
    description: list = []
    data = {}
    for name, modality in plan.modalities.items():
        data[name] = [modality.largest_item()]
        layouts = modality.layout_evaluator
        description += [modality.item, layouts.layout, modality.fields, modality.limit]
    prompt = plan.shortest_prompt(plan.parse_items(data))
    preview = plan.preview(prompt, data)
    description += [preview.prompt_token_ids, [(p.start, p.end, p.modality) for p in preview.placements]]
    return description


@settings(max_examples=scaled(25), suppress_health_check=list(HealthCheck))
@given(specs())
def test_drawn_specs_are_themselves_again_and_so_are_their_plans(spec: ModelSpec) -> None:
    functions = list_functions(spec)
    text = json.dumps(spec.to_document(functions=functions))
    again = ModelSpec.from_document(text, functions=functions)
    assert again == spec
    assert is_equal_declaration(describe_plan(again), describe_plan(spec))


# -- expressions and layouts -----------------------------------------------------------------------------------------

OPERATIONS = {
    "root": cfg,
    "loop": each(cfg.rows, lambda x: embed(5) * x),
    "function": derived(len),
    ".": cfg.a.b,
    "[]": cfg.a[0] + cfg["x"] + fields.y[1:] + fields.y[1:3:2],
    "get": cfg.a.get("b", None),
    "where": where((cfg.n == 1) | (item.width > 2), "x", [1, 2.5]),
    "truth": where(True, 1, embed(5) * cfg.n),
    "largest_of": largest_of(cfg.sizes, by=lambda size: (size[0] * item.width, -size[1])),
    "later": later(sum)(fields.counts),
    "tok[]": tok["<|image_{}|>", item.index + 1],
    "tok.text": tok.text("at {:.4f}", fields.y[0]),
    "tok.has": tok.has("<image>"),
    "neg": -cfg.n,
    "~": ~cfg.flag,
    "abs": abs(cfg.n),
    "ceil": expr.Expr("ceil", (cfg.n / 2,)),
    "ceil_div": ceil_div(cfg.n, -2),
    "floor": expr.Expr("floor", (cfg.n / 2,)),
    "maximum": maximum(1, cfg.n, item.width),
    "minimum": minimum(1, cfg.n),
    "round": round(cfg.n / 3, 2),
    "==": cfg.text == "it's",
    "!=": cfg.n != (1, 2),
    "<": cfg.n > 2,
    "<=": cfg.n <= 2,
    ">": cfg.n > 2,
    ">=": cfg.n >= 2,
    "|": (cfg.a == 1) | cfg.b,
    "&": (cfg.a == 1) & cfg.b,
    "+": cfg.n + -1,
    "-": 3 - (cfg.n - 1),
    "*": (cfg.n + 1) * 2.5,
    "/": cfg.n / 3,
    "//": cfg.n // 3,
    "%": cfg.n % 3,
    "**": (-cfg.n) ** 2,
}
"""An expression of each operation."""


def test_every_operation_of_the_language_is_read() -> None:
    missing = set(operations._OPERATIONS) - set(OPERATIONS)
    assert not missing, f"mmkit/document/source.py: read the operations {missing}, and write an example of each here"
    for name, value in OPERATIONS.items():
        if name != "function":
            text = repr(value)
            again = parse_source(text, FunctionStubs().__getitem__)
            assert is_equal_declaration(again, value), text
            assert repr(again) == text


LAYOUTS = {
    "LiteralIds": literal(5, cfg.n, [1, 2]),
    "Embed": embed(tok["<image>"]),
    "AnyId": any_id(0, cfg.n) * 3,
    "Select": select(tok.text("<i><p>"), embed=tok["<p>"]),
    "Repeated": (embed(5) * 2 + 3) * cfg.n * 4,
    "Sequenced": embed(5) + [1, 2] + cfg.n,
    "Each": each(item.rows, lambda x: each(x, lambda y: embed(5) * (x + y), last=7), sep=literal(cfg.n)),
}


def test_every_layout_of_the_language_is_read() -> None:
    names = {kind.__name__ for kind in list_subclasses(Layout)} - {"Fixed"}  # which no author writes
    missing = names - set(LAYOUTS)
    assert not missing, f"mmkit/document/source.py: read the layouts {missing}, and write an example of each here"
    for value in LAYOUTS.values():
        again = layout.layout(parse_source(repr(value), FunctionStubs().__getitem__))
        assert again == value
        assert repr(again) == repr(value)


# -- the models and the language -------------------------------------------------------------------------------------


def list_subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        if subclass.__module__.startswith("mmkit."):
            yield subclass
            yield from list_subclasses(subclass)


BASES = {Node, operations.Recorded, Part, NamedPart, Layout, Update, Field, ItemType, media._Media}
"""Classes that no author writes."""

AS_TEXT = {expr.Expr, Between, Concat, *list_subclasses(Layout)}
"""Classes whose parts are text in a document."""

OF_PLANS = {media._ImageForFunction, ModelSpec}
"""Classes of bound parts, and the spec, which stands for `Declaration`."""


def test_every_part_of_the_language_has_a_model() -> None:
    for part in [Declaration, *list_subclasses(Node)]:
        is_known = part in PARTS or part in BASES | AS_TEXT | OF_PLANS
        assert is_known, f"documents do not know {part.__name__}: add a model of it to mmkit/document/models.py"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.part.__name__)
def test_every_model_has_the_arguments_of_its_part_with_their_defaults(model: type) -> None:
    place = f"mmkit/document/models.py, {model.__name__}"
    modelled = {name: field for name, field in model.model_fields.items() if name not in ("type", "mmkit")}
    declared = {field.name: field for field in dataclass_fields(model.part)}
    assert set(modelled) == set(declared), (
        f"{place}: state the arguments {set(declared) ^ set(modelled)} too, or no more"
    )
    for name, field in declared.items():
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if modelled[name].is_required() or model is SpecModel:
            assert default is MISSING or model is SpecModel, f"{place}.{name}: state the default {default!r}"
        else:
            own_default = modelled[name].get_default(call_default_factory=True)
            assert is_equal_declaration(own_default, default), f"{place}.{name}: state the default {default!r}"


def test_the_published_schema_is_current() -> None:
    remedy = "Run python -m tools.document_schema."
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == build_json_schema(), remedy


def test_the_schema_describes_what_an_author_writes() -> None:
    schema = build_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    tensor = schema["$defs"]["TensorModel"]
    assert tensor["title"] == "Tensor"
    assert tensor["properties"]["shape"]["description"].startswith("one size, expression")
    assert schema["$defs"]["FlatModel"]["properties"]["hidden"]["description"].startswith("layouts and other fields")


# -- attacks ---------------------------------------------------------------------------------------------------------

SMALL = {
    "mmkit": 1,
    "name": "small",
    "modalities": [
        {
            "name": "a",
            "item": {"type": "Tensor", "shape": ["cfg.n", 2]},
            "layout": "embed(5) * cfg.n",
            "update": [{"type": "replace", "target": "literal(6)"}],
            "fields": {"x": {"type": "batched"}},
            "process": {"type": "identity"},
        }
    ],
}
"""A document that is read."""


def change(path: str, value: object) -> dict:
    """Return the small document with another value at a path of its modality, or at one of its own that begins in /."""
    document = json.loads(json.dumps(SMALL))
    place = document if path.startswith("/") else document["modalities"][0]
    *parents, last = path.lstrip("/").split(".")
    for name in parents:
        place = place[name]
    place[last] = value
    return document


NO_EXPRESSION = "expected an expression over cfg, item, fields, proc, kwargs and tok, or a layout, got"

EXPRESSIONS = {
    # names, calls and attributes
    "cfg.__class__": f"{NO_EXPRESSION} the attribute '__class__' of 'cfg'.",
    "cfg._private": f"{NO_EXPRESSION} the attribute '_private' of 'cfg'.",
    "cfg.get('__class__', 0)": f"{NO_EXPRESSION} a call of 'cfg.get'.",
    "cfg.get(cfg.name, 0)": f"{NO_EXPRESSION} a call of 'cfg.get'.",
    "cfg.get": f"{NO_EXPRESSION} .get without a name and a default.",
    "''.__class__.__mro__": f"{NO_EXPRESSION} the attribute '__class__' of \"''\".",
    "__import__('os').system('id')": f"{NO_EXPRESSION} a call of '__import__'.",
    "eval('1')": f"{NO_EXPRESSION} a call of 'eval'.",
    "'%99999999s' % cfg.n": f"{NO_EXPRESSION} an operator after a text in \"'%99999999s' % cfg.n\".",
    "open('/etc/passwd')": f"{NO_EXPRESSION} a call of 'open'.",
    "getattr(cfg, 'n')": f"{NO_EXPRESSION} a call of 'getattr'.",
    "mmkit.cfg": f"{NO_EXPRESSION} the name 'mmkit'.",
    "proc.save_pretrained('x')": f"{NO_EXPRESSION} a call of 'proc.save_pretrained'.",
    "cfg.n()": f"{NO_EXPRESSION} a call of 'cfg.n'.",
    "(lambda: 1)()": f"{NO_EXPRESSION} a call of 'lambda: 1'.",
    "lambda s: 1": f"{NO_EXPRESSION} 'lambda s: 1', a Lambda.",
    "each(3, lambda *x: embed(5))": f"{NO_EXPRESSION} each() without a lambda of one element.",
    "each(3, lambda cfg: embed(5))": f"{NO_EXPRESSION} an element of each() called 'cfg'.",
    "largest_of(cfg.a, lambda x: x)": f"{NO_EXPRESSION} …, which is no largest_of(list, by=...).",
    "largest_of(cfg.a, by=eval)": f"{NO_EXPRESSION} largest_of() without a lambda of one element.",
    "largest_of(cfg.a, by=lambda x: largest_of(x, by=lambda y: y))": "largest_of(): expected a by= without …, got …",
    "each(3, eval)": f"{NO_EXPRESSION} each() without a lambda of one element.",
    "embed(*[1])": f"{NO_EXPRESSION} *arguments.",
    "embed(**{'token': 1})": f"{NO_EXPRESSION} **arguments.",
    # statements and other syntax
    "import os": "expected an expression or a layout, got 'import os', which is none: invalid syntax.",
    "x = 1": "expected an expression or a layout, got 'x = 1', which is none: invalid syntax.",
    "(x := 1)": f"{NO_EXPRESSION} '(x := 1)', a NamedExpr.",
    "[x for x in cfg.a]": f"{NO_EXPRESSION} '[x for x in cfg.a]', a ListComp.",
    "f'{cfg.a}'": f"{NO_EXPRESSION} …, a JoinedStr.",
    "cfg.a if cfg.b else 1": f"{NO_EXPRESSION} 'cfg.a if cfg.b else 1', a IfExp.",
    "cfg.a and cfg.b": f"{NO_EXPRESSION} 'cfg.a and cfg.b', a BoolOp.",
    "cfg.a in [1]": f"{NO_EXPRESSION} the comparison 'cfg.a in [1]'.",
    "1 < cfg.a < 3": f"{NO_EXPRESSION} a chain of comparisons. Write (a < b) & (b < c).",
    "cfg.a @ cfg.b": f"{NO_EXPRESSION} the operator of 'cfg.a @ cfg.b'.",
    "b'x'": f"{NO_EXPRESSION} a constant of type bytes.",
    "...": f"{NO_EXPRESSION} a constant of type ellipsis.",
    "2j * cfg.n": f"{NO_EXPRESSION} a constant of type complex.",
    "{cfg.a: 1}": f"{NO_EXPRESSION} a dict with a key that is no text.",
    "{'a': 1, 'a': 2}": f"{NO_EXPRESSION} the key 'a' twice.",
    "cfg\x00": "expected an expression or a layout, got 'cfg\\x00', which is none: …",
    # sizes
    "9**9**9": f"{NO_EXPRESSION} '9 ** 9', all constants. Write its value.",
    "'a' * 10**9": f"{NO_EXPRESSION} '10 ** 9', all constants. Write its value.",
    "[0] * 999999999": f"{NO_EXPRESSION} '[0] * 999999999', all constants. Write its value.",
    "abs(-5)": f"{NO_EXPRESSION} 'abs(-5)', all constants. Write its value.",
    f"cfg.n + {2**63}": f"{NO_EXPRESSION} a whole number of 2**63 or more.",
    "cfg.n * 1e999": f"{NO_EXPRESSION} a number that no float can hold.",
    "(" * 200 + "cfg.n" + ")" * 200: f"expected at most {MAX_DEPTH} brackets in each other, got more.",
    "~" * 3000 + "cfg.n": f"expected at most {MAX_DEPTH} operations in each other, got more.",
    "~" * 200 + "cfg.n": f"expected at most {MAX_DEPTH} operations in each other, got more.",
    "+".join(["cfg.n"] * 2000): f"expected at most {MAX_DEPTH} operations in each other, got more.",
    f"[{','.join(['1'] * MAX_NODES)}]": f"expected at most {MAX_NODES} parts of an expression, got more.",
    "1" * (MAX_CHARACTERS + 1): f"expected at most {MAX_CHARACTERS} characters, got {MAX_CHARACTERS + 1}.",
    # templates
    "tok.text('{:>9999999999}', cfg.n)": f"{NO_EXPRESSION} …, in which braces hold more than a form such as :.4f.",
    "tok.text('{0.__class__}', cfg.n)": f"{NO_EXPRESSION} …, in which braces hold more than a form such as :.4f.",
    "tok['{!r}', cfg.n]": f"{NO_EXPRESSION} …, in which braces hold more than a form such as :.4f.",
    "tok.text(cfg.template, cfg.n)": f"{NO_EXPRESSION} a template of tok that is not written out.",
    "tok.text('{', cfg.n)": "expected a template, got …",
    # functions
    "later(eval)(cfg.n)": f"{NO_EXPRESSION} later(eval). Name a function of {', '.join(LIBRARY)}.",
    "later('os:system')(cfg.n)": "expected functions that the reader passes, got 'os:system'. …",
    "later('os.system')(cfg.n)": "expected a function as package.module:function, got 'os.system'.",
    "later(cfg.save_pretrained)(cfg.n)": f"{NO_EXPRESSION} 'later(cfg.save_pretrained)' without the name of a …",
    "function('os:getcwd')": "expected functions that the reader passes, got 'os:getcwd'. …",
    "later('a:b', 1)(cfg.n)": f"{NO_EXPRESSION} a call of \"later('a:b', 1)\".",
}
"""What is no expression, with the sentence that refuses it."""


@pytest.mark.parametrize("text", EXPRESSIONS, ids=lambda text: text[:30])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with refuses(SpecError, f"document, modalities[0].limit: {EXPRESSIONS[text]}"):
        ModelSpec.from_document(change("limit", text))


PROCESSOR = f"expected a processor among {', '.join(HF_PROCESSORS)}, or a function, got"

DOCUMENTS = {
    "version": (change("/mmkit", 2), "mmkit: expected 1, got 2."),
    "no version": ({"name": "x"}, "mmkit: expected a value, got none."),
    "version as text": (change("/mmkit", "1"), "mmkit: expected 1, got '1'."),
    "unknown name": (change("/code", "x"), "code: expected a name that this part has, got 'code'."),
    "unknown argument": (change("item.code", 1), "modalities[0].item.code: expected a name that this part has, …"),
    "unknown type": (change("item", {"type": "Exec"}), "modalities[0].item: expected a type among …, got 'Exec'."),
    "no type": (change("item", {}), "modalities[0].item: expected an object with a type, …"),
    "no modality": (change("/modalities", []), "modalities: expected list should have at least 1 item…"),
    "many modalities": (change("/modalities", SMALL["modalities"] * 65), "modalities: expected …at most 64…"),
    "name": (change("/name", "a.b"), "name: expected a text of the form …, got 'a.b'."),
    "name of a modality": (change("name", "__import__('os')"), "modalities[0].name: expected a text of the form …"),
    "reserved name": (change("name", "text"), "modality 'text': expected a name that nothing else has …"),
    "flag as number": (change("fields.x.hidden", 1), "modalities[0].fields.x.hidden: expected a valid boolean, got 1."),
    "layout as number": (change("layout", 5), "modalities[0].layout: expected the source of a layout, got 5."),
    "layout of a text": (change("layout", "'<image>'"), "modalities[0].layout: layout: expected token ids, got …"),
    "shape as text": (
        change("item.shape", "(2,)"),
        "modalities[0].item.shape: expected an array of sizes, got '(2,)'.",
    ),
    "huge item": (change("item.shape", [2**70]), "modalities[0].item.shape: expected a number, true, false, …"),
    "dtype": (change("item.dtype", "os.system"), "modalities[0].item.dtype: expected a text of the form …"),
    "method": (
        change("process", {"type": "hf", "processor": "proc.save_pretrained"}),
        f"modalities[0].process.processor: {PROCESSOR} 'proc.save_pretrained'.",
    ),
    "chosen method": (
        change("process", {"type": "hf", "processor": "where(True, proc.from_pretrained, 1)"}),
        f"modalities[0].process.processor: {PROCESSOR} 'where(True, proc.from_pretrained, 1)'.",
    ),
    "method by a library": (
        change("process", {"type": "hf", "processor": "later(max)(proc.from_pretrained)"}),
        f"modalities[0].process.processor: {PROCESSOR} 'later(max)(proc.from_pretrained)'.",
    ),
    "file as image": (
        change("process", {"type": "hf", "kwargs": {"images": "'/etc/passwd'"}}),
        "modalities[0].process.kwargs: expected options of the processor, got 'images', by which items come.",
    ),
    "address in an option": (
        change("process", {"type": "hf", "kwargs": {"mask": "'http://10.0.0.1/'"}}),
        "modalities[0].process.kwargs: expected a number or a word for mask, got 'http://10.0.0.1/'.",
    ),
    "address in a list": (
        change("process", {"type": "hf", "kwargs": {"mask": "['http://10.0.0.1/']"}}),
        "modalities[0].process.kwargs: expected numbers for mask, got an array.",
    ),
    "function": (
        change("process", {"type": "function", "name": "os:system"}),
        "modalities[0].process.name: expected functions that the reader passes, got 'os:system'. …",
    ),
    "no object": ([SMALL], "expected an object, got an array."),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_no_document_is_refused(name: str) -> None:
    document, sentence = DOCUMENTS[name]
    separator = ": " if sentence.startswith(("expected", "modality")) else ", "
    with refuses(SpecError, f"document{separator}{sentence}"):
        ModelSpec.from_document(document)


TEXTS = {
    '{"mmkit": 1, "mmkit": 1}': "expected each name once, got 'mmkit' twice.",
    '{"mmkit": NaN}': "expected finite numbers, got NaN.",
    '{"mmkit": -Infinity}': "expected finite numbers, got -Infinity.",
    '{"mmkit": 1e999}': "expected finite numbers, got 1e999.",
    '{"mmkit": ' + "9" * 5000 + "}": "expected JSON, got ValueError: Exceeds the limit…",
    "{": "expected JSON, got JSONDecodeError: …",
    "": "expected JSON, got JSONDecodeError: …",
    "[" * 100_000: "expected fewer values in each other, got more.",
    " " * (convert.MAX_BYTES + 1): "expected at most 1048576 bytes, got 1048577.",
}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:20])
def test_what_is_no_json_is_refused(text: str) -> None:
    with refuses(SpecError, f"document: {TEXTS[text]}"):
        ModelSpec.from_document(text)


@pytest.mark.parametrize("inputs", [{}, {"a": "images"}, {"a": "video"}])
def test_a_text_of_a_caller_goes_to_a_processor_only_as_a_text(inputs: dict) -> None:
    """A processor of transformers opens a text in its `images` as a file or an address."""
    document = change("process", {"type": "hf", "processor": "proc.image_processor", "inputs": inputs})
    document["modalities"][0]["item"] = {"type": "Text", "most": 100}
    got = repr(inputs.get("a", "a"))
    sentence = f"document: a, process: expected a text as text or text_pair of a processor, got as {got}. …"
    with refuses(SpecError, sentence):
        ModelSpec.from_document(document)


BOMBS = {
    "cfg.big ** cfg.big": change("limit", "cfg.big ** cfg.big"),
    "a tower of powers": change("limit", "(cfg.n ** (cfg.n ** (cfg.n ** cfg.big))) % 5"),
    "loops in loops": change("layout", "embed(5) + each(4000000, lambda x: each(4000000, lambda y: nothing))"),
    "a long list": change("limit", "largest_of(cfg.long, by=lambda x: x)"),
    "ids": change("layout", "embed(5) * 1000000000000"),
    "a text times a number": change("layout", "embed(5) * where(cfg.text * cfg.big == '', 1, 2)"),
    "a tensor": change("item.shape", [10**9, 10**9]),
    "a text": change("item", {"type": "Text", "most": 10**10}),
}
"""Documents that are read, and would take all time or memory when they are bound."""


@pytest.mark.parametrize("name", BOMBS)
def test_what_takes_too_much_is_refused_when_it_is_bound(name: str) -> None:
    document = BOMBS[name]
    if name == "a text":
        document["modalities"][0]["process"] = {"type": "function", "name": "a:b"}
    spec = ModelSpec.from_document(document, functions=FunctionStubs())
    config = AutoConfig.for_model("llama", vocab_size=100, n=7, big=10**9, text="x" * 100, long=[1] * 2000)
    with pytest.raises(SpecError):
        spec.bind(config)


def test_a_document_without_functions_imports_nothing() -> None:
    code = f"""
import sys, mmkit
mmkit.ModelSpec  # its module is imported when it is asked for
assert not any(name.startswith("pydantic") for name in sys.modules)
import mmkit.document
before = set(sys.modules)
mmkit.ModelSpec.from_document({json.dumps(json.dumps(SMALL))})
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# -- functions -------------------------------------------------------------------------------------------------------


def halve(items, scope):
    return {"x": [value / 2 for value in items]}


@later
def double(value):
    return 2 * value


def test_functions_of_modules_are_in_a_document_by_their_names() -> None:
    modality = make_modality("a", layout=embed(5) * double(cfg.n), process=halve)
    document = ModelSpec("s", modality).to_document()
    (modality_document,) = document["modalities"]
    assert modality_document["layout"] == f"embed(5) * later('{__name__}:double')(cfg.n)"
    assert modality_document["process"] == {"type": "function", "name": f"{__name__}:halve"}
    assert ModelSpec.from_document(document, import_functions=True)["a"] == modality
    functions = {f"{__name__}:double": double, f"{__name__}:halve": halve}
    assert ModelSpec.from_document(document, functions=functions)["a"] == modality


def test_a_function_that_no_process_can_import_needs_a_name() -> None:
    spec = ModelSpec("s", make_modality("a", process=lambda items, scope: {}))
    sentence = "spec 's', modalities[0].process: expected functions of modules, got '<lambda>', which no other …"
    with refuses(SpecError, sentence.replace("got '<lambda>'", "got …")):
        spec.to_document()
    functions = {"mine:process": spec["a"].process}
    document = spec.to_document(functions=functions)
    assert document["modalities"][0]["process"]["name"] == "mine:process"
    assert ModelSpec.from_document(document, functions=functions) == spec


def test_a_document_can_be_looked_at_without_its_functions() -> None:
    spec = ModelSpec("s", make_modality("a", layout=embed(5) * double(cfg.n), process=halve))
    looked_at = from_document(spec.to_document(), ModelSpec, functions=FunctionStubs())
    assert to_document(looked_at) == spec.to_document()
    with refuses(SpecError, f"{__name__}:halve: expected a function that is passed or imported, got its name. …"):
        looked_at["a"].process([], None)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere:f", "got nowhere:f, which cannot be imported: ModuleNotFoundError: No module named 'nowhere'."),
        ("math:nothing", "got math:nothing, which cannot be imported: AttributeError: …"),
        ("math:pi", "got math:pi, a float."),
    ],
)
def test_a_function_that_is_none_is_refused(name: str, sentence: str) -> None:
    document = change("limit", f"later('{name}')(cfg.n)")
    with refuses(SpecError, f"document, modalities[0].limit: expected a function, {sentence}"):
        ModelSpec.from_document(document, import_functions=True)


def test_what_has_no_source_has_no_document() -> None:
    spec = ModelSpec("s", make_modality("a", fields={"x": batched(), "y": derived(cfg.n + np.float64(1))}))
    with refuses(SpecError, "spec 's', modalities[0].fields.y.value: expected …"):
        spec.to_document()


# -- differences -----------------------------------------------------------------------------------------------------


def test_documents_are_compared_part_by_part() -> None:
    spec = ModelSpec("s", make_modality("a"), make_modality("b", fields={"y": batched()}))
    other_b = make_modality("b", fields={"y": batched(shape=(2, 2))}, limit=3)
    other = ModelSpec("s", other_b, make_modality("c", fields={"z": flat(1)}))
    documents = [spec.to_document(), other.to_document()]
    assert find_differences(documents[0], documents[0]) == []
    differences = {path: (first, second) for path, first, second in find_differences(*documents)}
    assert differences.keys() == {
        "modalities.a",
        "modalities.b.fields.y.shape",
        "modalities.b.limit",
        "modalities.c",
    }
    assert differences["modalities.b.limit"] == (None, 3)
    assert differences["modalities.a"][0]["item"] == {"type": "Tensor", "shape": [2, "cfg.n"]}

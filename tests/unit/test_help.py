"""`help()` and signatures show what an author may write, and what each root reads."""

import inspect
import pydoc

import pytest

import mmkit
from mmkit import InputError, Modality, ModelSpec, Output, Record, SpecError, batched, each, embed

ROOTS = {
    "cfg": ["The Hugging Face config of the model", "cfg.image_token_id", "Known once a spec is bound"],
    "item": ["Facts of one raw item", "item.index", "item.count", "item.shape", "item.length", "item.width",
             "item.height", "item.frames", "item.rows"],
    "fields": ["The processed fields of one item", "fields.grid"],
    "proc": ["The model's Hugging Face processor", "proc.image_processor.size"],
    "kwargs": ["The request's `mm_processor_kwargs`", "kwargs.get"],
    "tok": ["the ids of tokens and texts", 'tok["<image>"]', "tok.text", "tok.has"],
}  # fmt: skip

DECLARATIONS = []
for public_name, public in vars(mmkit.public).items():
    if callable(public) and not public_name.startswith("_") and public_name not in ROOTS:
        DECLARATIONS.append(public_name)


@pytest.mark.parametrize(("name", "texts"), ROOTS.items(), ids=ROOTS)
def test_help_of_a_root_says_what_it_reads(name, texts):
    page = pydoc.plain(pydoc.render_doc(getattr(mmkit, name)))
    for text in texts:
        assert text in page
    assert "__add__" not in page


@pytest.mark.parametrize("name", DECLARATIONS)
def test_a_signature_has_no_private_types(name):
    signature = str(inspect.signature(getattr(mmkit, name)))
    assert "Converted" not in signature
    assert "_depth" not in signature


@pytest.mark.parametrize("declare", [each, batched, Modality, ModelSpec, Output, Record, embed])
def test_help_shows_the_types_that_an_author_writes(declare):
    assert "Converted" not in pydoc.plain(pydoc.render_doc(declare))


def test_the_types_of_each_are_those_of_an_author():
    annotations = {}
    for name, parameter in inspect.signature(each).parameters.items():
        annotations[name] = parameter.annotation
    assert annotations == {
        "over": "Value",
        "body": "Callable[[Expr], LayoutLike] | Layout",
        "sep": "LayoutLike",
        "last": "LayoutLike",
    }


def test_a_batched_field_has_no_value():
    assert set(inspect.signature(batched).parameters) == {"shape", "dtype", "keep_on_cpu", "hidden"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'value'"):
        batched(value=3)


def test_an_each_has_no_depth():
    with pytest.raises(TypeError, match="unexpected keyword argument 'depth'"):
        each(3, embed, depth=4)


@pytest.mark.parametrize("error", [SpecError, InputError])
def test_errors_have_their_place_and_their_parts(error):
    assert list(inspect.signature(error).parameters) == ["where", "expected", "got", "remedy"]

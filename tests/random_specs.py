"""A strategy for specs themselves: random layouts, updates, fields and items over a made-up config and vocabulary.

The `repr` of what is drawn is its source.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from mmkit import List, Record, Tensor, Text, between, optional
from mmkit.language.expr import cfg, fields, item, tok, where
from mmkit.language.field import FIELD_KINDS, Flat, batched, constant, derived, flat
from mmkit.language.layout import (
    Layout,
    Replace,
    already_expanded,
    each,
    embed,
    ending_with,
    insert,
    literal,
    replace,
)
from mmkit.language.modality import Modality
from mmkit.model_spec import ModelSpec
from tests.unit.test_layout import build, trees

NUMBERS = {"one": 1, "two": 2, "three": 3, "rows": (2, 1, 3)}
"""Attributes of the made-up config."""

LENGTHS = [("cfg", "one"), ("cfg", "two"), ("cfg", "three"), ("item", "length")]
"""What the layouts of its specs may count."""


class Marks(NamedTuple):
    """The tokens of a modality: its target, its placeholder, and two literals."""

    target: str
    placeholder: str
    opening: str
    closing: str


MARKS = {
    "alpha": Marks("<alpha>", "<alpha_embed>", "<alpha_open>", "<alpha_close>"),
    "beta": Marks("<beta>", "<beta_embed>", "<beta_open>", "<beta_close>"),
}
SPECIAL = [*MARKS["alpha"], *MARKS["beta"]]
WORDS = ["<unk>", "<s>", "</s>", "<pad>"] + SPECIAL + list("abcdefghijklmnop")


# -- checkpoints -------------------------------------------------------------------------------------------------------


@cache
def checkpoint(architecture: str = "MmkitMadeUp") -> Path:
    """Make a folder whose config has the attributes of `NUMBERS`."""
    return write_checkpoint(
        Path(tempfile.mkdtemp(prefix="mmkit-specs-")),
        WORDS,
        SPECIAL,
        max_position_embeddings=4096,
        architectures=[architecture],
        vocab_size=len(WORDS),
        **NUMBERS,
    )


def write_checkpoint(
    folder: Path, words: Sequence[str], added: Sequence[str], begins: bool = False, **config: Any
) -> Path:
    """Write a checkpoint without weights into a folder: a small config of a Llama and, for words, a tokenizer of these.

    Args:
        folder: the folder.
        words: begin with <unk>, <s> and </s>; empty for no tokenizer.
        added: words that split a text wherever they stand.
        begins: the tokenizer begins every text with <s>.
        config: attributes of the config.
    """
    if words:
        _save_tokenizer(folder, words, added, begins)
    settings = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def _save_tokenizer(folder: Path, words: Sequence[str], added: Sequence[str], begins: bool) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: token for token, word in enumerate(words)}
    whole = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        whole.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    # not special: no law may take those of absent items for words
    fast.add_tokens(list(added))
    fast.save_pretrained(folder)


# -- specs -------------------------------------------------------------------------------------------------------------


@st.composite
def specs(draw: Any) -> ModelSpec:
    """Draw a spec of one or two modalities. Shrinks towards one simple modality."""
    count = draw(st.integers(1, 2))
    modalities = []
    for name in list(MARKS)[:count]:
        modalities.append(draw(_modality(name)))
    prompt = None
    if draw(st.booleans()):
        prompt = ending_with(tok["</s>"])
    return ModelSpec("made_up", *modalities, prompt=prompt)


@st.composite
def _modality(draw: Any, name: str) -> Modality:
    """Draw a modality. Shrinks towards one fixed size, one placeholder, replacement and a batched field."""
    rows = draw(_rows())
    if draw(st.sampled_from([False, False, True])):
        return draw(_modality_of_ids(name, rows))
    update = draw(_update(name))
    is_record = draw(st.booleans())
    has_lists = is_record and draw(st.sampled_from([False, False, False, True]))
    # the expression that gives the rows of an item
    body = item.body if is_record else item
    layout = draw(_layout(name, body))
    if has_lists:
        layout += draw(_layout_of_lists(name))
    fields_of_modality = draw(_fields(name, body.length))
    takes_embeds = not _depends_on_item(layout) and draw(st.booleans())
    return Modality(
        name,
        item=_make_record(rows, has_lists) if is_record else rows,
        # an item has at least one placeholder
        layout=embed(tok[MARKS[name].placeholder]) + layout,
        update=update,
        fields=fields_of_modality,
        process=_make_process(f"{name}_data", fields_of_modality, is_record),
        embeds=takes_embeds,
    )


@st.composite
def _modality_of_ids(draw: Any, name: str, rows: Tensor) -> Modality:
    """Draw a modality whose items become ids only. Shrinks towards one literal token and no field."""
    marks = MARKS[name]
    has_codes = draw(st.booleans())
    layout = literal(tok[marks.opening]) + draw(_layout(name, item, with_rows=False))
    declared: dict[str, Any] = {}
    if has_codes:
        layout += literal(fields.codes)
        declared = {"fields": {"codes": batched(dtype="int64")}, "process": _make_codes}
    return Modality(name, item=rows, layout=layout, update=draw(_update(name, replaces=True)), **declared)


def _make_codes(values: Any, scope: Any) -> dict[str, Any]:
    """Make one of the tokens a to p of each row, which are those of texts, too."""
    first = WORDS.index("a")
    return {"codes": [first + value.sum(dim=1).abs().long() % 16 for value in values]}


@st.composite
def _update(draw: Any, name: str, replaces: bool = False) -> Any:
    """Draw the update of a modality; where it replaces, perhaps with a second target. Shrinks towards replacement."""
    target = tok[MARKS[name].target]
    text = replace(literal(target, tok["a"]))
    choices = [replace(target), text]
    if not replaces:
        choices += [already_expanded(), insert(at="start"), insert(after=tok["<s>"])]
    update = draw(st.sampled_from(choices))
    if isinstance(update, Replace) and draw(st.booleans()):
        return [text, replace(target)]
    return update


@st.composite
def _rows(draw: Any) -> Tensor:
    """Draw an item type of some rows. Shrinks towards one row."""
    least = draw(st.integers(1, 3))
    most = draw(st.integers(least, 4))
    # all sizes may be the largest: a longer item need not have more placeholders
    largest = [(count, 2) for count in range(least, most + 1)]
    return Tensor((between(least, most), 2), largest=largest)


def _make_record(rows: Tensor, has_lists: bool) -> Record:
    """Return an item type of rows, a mark and a word; perhaps of a list and a part that may be absent."""
    marked = Tensor((1,), "int64", bound=between(0, item.body.length - 1))
    parts: dict[str, Any] = {"body": rows, "marked": marked, "word": Text(most=3)}
    if has_lists:
        note = Record(weights=Tensor((between(0, 2),)), word=optional(Text(most=3)))
        parts["notes"] = List(note, most=item.body.length, least=0)
        parts["extra"] = optional(Record(weights=Tensor((between(1, 2),))))
    return Record(**parts)


@st.composite
def _layout_of_lists(draw: Any, name: str) -> Layout:
    """Draw a layout of the notes of an item, and of its extra part. Shrinks towards a token for each note."""
    marks = MARKS[name]
    rows = embed(tok[marks.placeholder])

    def lay_out_note(note: Any) -> Layout:
        parts = literal(tok[marks.opening])
        if has_rows:
            parts += rows * note.weights.length
        if has_words:
            parts += where(note.word, tok.text("{}", note.word.text), tok[marks.closing])
        return parts

    has_rows = draw(st.booleans())
    has_words = draw(st.booleans())
    extra = rows * item.extra.weights.length
    absent = draw(st.sampled_from([literal(), literal(tok[marks.closing]), rows]))
    return each(item.notes.elements, lay_out_note) + where(item.extra, extra, absent)


@st.composite
def _layout(draw: Any, name: str, body: Any, with_rows: bool = True) -> Layout:
    """Draw a layout of a modality. Shrinks towards one literal token."""
    marks = MARKS[name]

    def make_placeholder(value: Any) -> Layout:
        return embed(tok[marks.placeholder]) if with_rows else literal(tok[marks.closing])

    def make_literal(value: Any) -> Layout:
        if isinstance(value, int):
            return literal(tok[marks.closing])
        return literal(tok[marks.opening])

    tree = draw(trees(names=LENGTHS, sequences=[("cfg", "rows")]))
    layout: Layout = build(tree, mark=make_placeholder, token=make_literal, roots={"cfg": cfg, "item": body})
    return layout


def _depends_on_item(layout: Layout) -> bool:
    return any(leaf.root == "item" for leaf in layout.dependencies())


@st.composite
def _fields(draw: Any, name: str, length: Any) -> dict[str, Any]:
    """Draw the fields of a modality. Shrinks towards a batched field."""
    data = f"{name}_data"
    count = f"{name}_length"
    choices: list[dict[str, Any]] = [
        {data: batched()},
        {data: flat(length)},
        {count: derived(length, dtype="int64"), data: flat(fields[count])},
        {data: batched(), f"{name}_common": constant(cfg.two, dtype="int32")},
    ]
    kinds = {type(field) for choice in choices for field in choice.values()}
    assert kinds == set(FIELD_KINDS), "each kind of fields is drawn"
    return draw(st.sampled_from(choices))


def _make_process(data: str, declared: dict[str, Any], is_record: bool) -> Any:
    """Return a process function that puts the rows of all items into one field."""

    def process(values: Any, scope: Any) -> dict[str, Any]:
        rows = [value["body"] if is_record else value for value in values]
        # what `process` returns is a matter of the kind, not of how vLLM batches it
        if isinstance(declared[data], Flat):
            return {data: torch.cat(rows)}
        return {data: rows}

    return process

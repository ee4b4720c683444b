"""A strategy for specs themselves: random layouts, updates, fields and items over a made-up config
and vocabulary.

What is drawn is a description, plain data whose `repr` can be copied; `SpecSample.spec` builds the
spec from it with the public combinators. An independent evaluator of the same description can tell
what the spec must do.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mmkit.expr import cfg, fields, item, tok, where
from mmkit.field import Flat, batched, constant, derived, flat
from mmkit.items import between
from mmkit.items.tensor import Tensor
from mmkit.layout import Layout, each, embed, literal, nothing
from mmkit.model_spec import ModelSpec
from mmkit.spec import Modality
from mmkit.updates import Update, already_expanded, ending_with, insert, replace

__all__ = ["ModalitySample", "SpecSample", "checkpoint", "specs"]

NUMBERS = {"one": 1, "two": 2, "three": 3}
"""Attributes of the made-up config."""

ROWS = (2, 1, 3)
NAMES = ("alpha", "beta")
MARKS = {name: (f"<{name}>", f"<{name}_embed>", f"<{name}_open>", f"<{name}_close>") for name in NAMES}
"""Per modality: its target, its placeholder, and two literal tokens."""

WORDS = (
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    *(mark for marks in MARKS.values() for mark in marks),
    *"abcdefghijklmnop",
)


@cache
def checkpoint(architecture: str = "MmkitMadeUp") -> Path:
    """A checkpoint folder without weights: a small config with the attributes of `NUMBERS`, a
    tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="mmkit-specs-"))
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": [mark for marks in MARKS.values() for mark in marks]})
    tokenizer.save_pretrained(folder)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = {
        "model_type": "llama",
        "architectures": [architecture],
        "vocab_size": len(WORDS),
        **sizes,
        **NUMBERS,
    }
    (folder / "config.json").write_text(json.dumps({**config, "rows": list(ROWS), "max_position_embeddings": 4096}))
    return folder


Tree = tuple[Any, ...]
"""A layout: ``("literal", n)``, ``("embed",)``, ``("repeat", tree, number)``, ``("sequence",
trees)``, ``("where", n, tree, other)`` (the tree for items longer than n), ``("each", number or
"rows", tree, separator)``. A number is an int, the name of a config attribute, ``"length"`` of the
item, or ``"element"`` of the enclosing each."""


@dataclass(frozen=True)
class ModalitySample:
    """One modality, as plain data."""

    name: str
    least: int
    most: int
    tree: Tree
    updates: tuple[str, ...]
    fields: tuple[str, ...]
    embeds: bool

    @property
    def lengths(self) -> range:
        """Of the items."""
        return range(self.least, self.most + 1)

    def build(self) -> Modality:
        """The modality that it describes."""
        target, placeholder, *_ = MARKS[self.name]
        kinds = {
            "replace": replace(tok[target]),
            "replace text": replace(literal(tok[target], tok["a"])),
            "start": insert(at="start"),
            "end": insert(at="end"),
            "after": insert(after=tok["<s>"]),
            "in place": already_expanded(),
        }
        updates: list[Update] = [kinds[kind] for kind in self.updates]
        data, length, common = f"{self.name}_data", f"{self.name}_length", f"{self.name}_common"
        declared = {
            "batched": {data: batched()},
            "flat": {data: flat(item.length)},
            "derived": {length: derived(item.length, dtype="int64"), data: flat(fields[length])},
            "shared": {data: batched(), common: constant(cfg.two, dtype="int32")},
        }
        parts = {key: value for kind in self.fields for key, value in declared[kind].items()}
        return Modality(
            self.name,
            # a longer item need not have more placeholders
            item=Tensor(shape=(between(self.least, self.most), 2), largest=[(n, 2) for n in self.lengths]),
            # an item has at least one placeholder
            layout=embed(tok[placeholder]) + _build(self.tree, self.name, None),
            update=updates,
            fields=parts,
            process=_Process(data, isinstance(parts[data], Flat)),
            embeds=self.embeds,
        )


@dataclass(frozen=True)
class _Process:
    """Items as one field: one after the other where it is flat."""

    name: str
    joined: bool

    def __call__(self, values: Any, scope: Any) -> dict[str, Any]:
        import torch

        return {self.name: torch.cat(list(values)) if self.joined else list(values)}


def _number(value: Any, element: Any) -> Any:
    if value == "element":
        return element
    return (
        {"length": item.length, "rows": cfg.rows}.get(value, getattr(cfg, value)) if isinstance(value, str) else value
    )


def _build(tree: Tree, name: str, element: Any) -> Layout:
    match tree:
        case ("literal", n):
            return literal(tok[MARKS[name][2 + n]])
        case ("embed",):
            return embed(tok[MARKS[name][1]])
        case ("repeat", body, count):
            repeated: Layout = _build(body, name, element) * _number(count, element)
            return repeated
        case ("sequence", parts):
            layout: Layout = nothing
            for part in parts:
                layout += _build(part, name, element)
            return layout
        case ("where", limit, then, other):
            # a layout inside where() is chosen per item
            return literal(where(item.length > limit, _build(then, name, element), _build(other, name, element)))
    _, over, body, sep = tree
    separator = nothing if sep is None else _build(sep, name, element)
    return each(_number(over, element), lambda x: _build(body, name, x), sep=separator)


def _varies(tree: Any) -> bool:
    """Whether a layout depends on the item."""
    return tree in ("where", "length") or (isinstance(tree, tuple) and any(map(_varies, tree)))


@dataclass(frozen=True)
class SpecSample:
    """A spec of one or two modalities, as plain data."""

    modalities: tuple[ModalitySample, ...]
    suffix: bool = False

    @cached_property
    def spec(self) -> ModelSpec:
        modalities = (sample.build() for sample in self.modalities)
        return ModelSpec("made_up", *modalities, prompt=ending_with(tok["</s>"]) if self.suffix else None)


@cache
def trees(depth: int = 3, looped: bool = False) -> SearchStrategy[Tree]:
    """Layouts. Shrinks towards one literal token."""
    numbers = st.integers(0, 3) | st.sampled_from([*NUMBERS, "length", *(["element"] if looped else [])])
    flats: SearchStrategy[Tree] = st.tuples(st.just("literal"), st.integers(0, 1)) | st.just(("embed",))
    if not depth:
        return flats
    inner, inside = trees(depth - 1, looped), trees(depth - 1, True)
    return (
        flats
        | st.tuples(st.just("sequence"), st.lists(inner, max_size=3).map(tuple))
        | st.tuples(st.just("repeat"), inner, numbers)
        | st.tuples(st.just("where"), st.integers(0, 3), inner, inner)
        | st.tuples(st.just("each"), numbers | st.just("rows"), inside, st.none() | flats)
    )


@st.composite
def specs(draw: Any) -> SpecSample:
    """Specs. Shrinks towards one modality of one fixed size, one placeholder, replacement and a
    batched field."""
    modalities = []
    for name in NAMES[: draw(st.integers(1, 2))]:
        least = draw(st.integers(1, 3))
        kinds = ["replace", "replace text", "in place", "start", "end", "after"]
        updates: tuple[str, ...] = (draw(st.sampled_from(kinds)),)
        if updates[0].startswith("replace") and draw(st.booleans()):
            updates = ("replace text", "replace")
        tree = draw(trees())
        modalities.append(
            ModalitySample(
                name,
                least,
                draw(st.integers(least, 4)),
                tree,
                updates,
                (draw(st.sampled_from(["batched", "flat", "derived", "shared"])),),
                not _varies(tree) and draw(st.booleans()),
            )
        )
    at_the_end = any("end" in modality.updates for modality in modalities)
    return SpecSample(tuple(modalities), not at_the_end and draw(st.booleans()))

"""A strategy for specs themselves: random layouts, updates, fields and items over a made-up config
and vocabulary.

What is drawn is a description, plain data whose `repr` can be copied; `SpecSample.spec` builds the
spec from it with the public combinators. Layouts are trees of tests/unit/naive.py, which tells
independently what the spec must do.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mmkit.expr import cfg, fields, item, tok, where
from mmkit.field import Flat, batched, constant, derived, flat
from mmkit.items import between
from mmkit.items.tensor import Tensor
from mmkit.layout import Layout, Update, already_expanded, each, embed, ending_with, insert, literal, nothing, replace
from mmkit.model_spec import ModelSpec
from mmkit.spec import Modality

__all__ = ["ModalitySample", "SpecSample", "checkpoint", "specs", "write_checkpoint"]

NUMBERS = {"one": 1, "two": 2, "three": 3}
"""Attributes of the made-up config."""

ROWS = (2, 1, 3)
NAMES = ("alpha", "beta")
MARKS = {name: (f"<{name}>", f"<{name}_embed>", f"<{name}_open>", f"<{name}_close>") for name in NAMES}
"""Per modality: its target, its placeholder, and two literal tokens."""

WORDS = ("<unk>", "<s>", "</s>", "<pad>", *chain(*MARKS.values()), *"abcdefghijklmnop")


def write_checkpoint(
    folder: Path, words: Sequence[str], added: Sequence[str], begins: bool = False, **config: Any
) -> Path:
    """A checkpoint folder without weights: a small config of a Llama and, for words, a tokenizer of these. They begin
    with <unk>, <s> and </s>, and those that are added split a text wherever they stand."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if words:
        whole = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if begins:
            whole.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        fast = PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
        fast.add_tokens(list(added))  # not special: no law may take those of absent items for words
        fast.save_pretrained(folder)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **config}))
    return folder


@cache
def checkpoint(architecture: str = "MmkitMadeUp") -> Path:
    """A folder whose config has the attributes of `NUMBERS`."""
    config = {"architectures": [architecture], "vocab_size": len(WORDS), **NUMBERS, "rows": ROWS}
    folder = Path(tempfile.mkdtemp(prefix="mmkit-specs-"))
    return write_checkpoint(folder, WORDS, [*chain(*MARKS.values())], max_position_embeddings=4096, **config)


ID = {word: i for i, word in enumerate(WORDS)}
Tree = tuple[Any, ...]


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

    def build(self) -> Modality:
        """The modality that it describes."""
        target, placeholder, *_ = MARKS[self.name]
        kinds = {
            "replace": replace(tok[target]),
            "replace text": replace(literal(tok[target], tok["a"])),
            "start": insert(at="start"),
            "after": insert(after=tok["<s>"]),
            "in place": already_expanded(),
        }
        updates: list[Update] = [kinds[kind] for kind in self.updates]
        lengths = (self.least, self.most)
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
            item=Tensor((between(*lengths), 2), largest=[(n, 2) for n in range(lengths[0], lengths[1] + 1)]),
            # an item has at least one placeholder
            layout=embed(tok[placeholder]) + _build(self.tree),
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


def _build(tree: Tree, loops: tuple[Any, ...] = ()) -> Layout:
    def value(number: Any) -> Any:
        match number:
            case ("loop", depth):
                return loops[depth]
            case (root, name):
                return getattr({"cfg": cfg, "item": item}[root], name)
        return number

    match tree:
        case ("token", number):
            return literal(number)
        case ("embed", number):
            return embed(number)
        case ("repeat", body, count):
            repeated: Layout = _build(body, loops) * value(count)
            return repeated
        case ("sequence", parts):
            return sum((_build(part, loops) for part in parts), nothing)
        case ("where", number, limit, then, other):
            # a layout inside where() is chosen per item
            return literal(where(value(number) > limit, _build(then, loops), _build(other, loops)))
    _, over, body, sep, _ = tree
    separator = nothing if sep is None else _build(sep, loops)
    return each(value(over), lambda x: _build(body, (*loops, x)), sep=separator)


def _varies(tree: Any) -> bool:
    """Whether a layout depends on the item."""
    return tree == ("item", "length") or (isinstance(tree, tuple) and any(map(_varies, tree)))


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
def trees(name: str, depth: int = 3, loops: int = 0) -> SearchStrategy[Tree]:
    """Layouts. Shrinks towards one literal token."""
    known = [*(("cfg", number) for number in NUMBERS), ("item", "length"), *(("loop", n) for n in range(loops))]
    numbers = st.integers(0, 3) | st.sampled_from(known)
    _, placeholder, *marks = (ID[mark] for mark in MARKS[name])
    flats: SearchStrategy[Tree] = st.tuples(st.just("token"), st.sampled_from(marks)) | st.just(("embed", placeholder))
    if not depth:
        return flats
    inner, inside = trees(name, depth - 1, loops), trees(name, depth - 1, loops + 1)
    over, limit = numbers | st.just(("cfg", "rows")), st.integers(0, 3)
    return (
        flats
        | st.tuples(st.just("sequence"), st.lists(inner, max_size=3).map(tuple))
        | st.tuples(st.just("repeat"), inner, numbers)
        | st.tuples(st.just("where"), st.just(("item", "length")), limit, inner, inner)
        | st.tuples(st.just("each"), over, inside, st.none() | flats, st.none())
    )


@st.composite
def specs(draw: Any) -> SpecSample:
    """Specs. Shrinks towards one modality of one fixed size, one placeholder, replacement and a
    batched field."""
    modalities = []
    for name in NAMES[: draw(st.integers(1, 2))]:
        least = draw(st.integers(1, 3))
        kinds = ["replace", "replace text", "in place", "start", "after"]
        updates: tuple[str, ...] = (draw(st.sampled_from(kinds)),)
        if updates[0].startswith("replace") and draw(st.booleans()):
            updates = ("replace text", "replace")
        tree, most = draw(trees(name)), draw(st.integers(least, 4))
        fields = (draw(st.sampled_from(["batched", "flat", "derived", "shared"])),)
        embeds = not _varies(tree) and draw(st.booleans())
        modalities.append(ModalitySample(name, least, most, tree, updates, fields, embeds))
    return SpecSample(tuple(modalities), draw(st.booleans()))

"""A strategy for specs themselves: random layouts, updates, fields and items over a made-up config
and vocabulary. The `repr` of what is drawn is its source.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from mmkit import Record, Tensor, Text, between
from mmkit.language.expr import cfg, fields, item, tok
from mmkit.language.field import Flat, batched, constant, derived, flat
from mmkit.language.layout import (
    Layout,
    Replace,
    already_expanded,
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

LENGTHS = [*(("cfg", name) for name in ("one", "two", "three")), ("item", "length")]
"""What the layouts of its specs may count."""

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
    config = {"architectures": [architecture], "vocab_size": len(WORDS), **NUMBERS}
    folder = Path(tempfile.mkdtemp(prefix="mmkit-specs-"))
    return write_checkpoint(folder, WORDS, [*chain(*MARKS.values())], max_position_embeddings=4096, **config)


@st.composite
def _modality(draw: Any, name: str) -> Modality:
    """Shrinks towards one fixed size, one placeholder, replacement and a batched field."""
    target, placeholder, *marks = (tok[mark] for mark in MARKS[name])
    text = replace(literal(target, tok["a"]))
    inserted = [insert(at="start"), insert(after=tok["<s>"])]
    one = draw(st.sampled_from([replace(target), text, already_expanded(), *inserted]))
    both = isinstance(one, Replace) and draw(st.booleans())
    least = draw(st.integers(1, 3))
    most = draw(st.integers(least, 4))
    # a longer item need not have more placeholders
    rows = Tensor((between(least, most), 2), largest=[(n, 2) for n in range(least, most + 1)])
    marked = Tensor((1,), "int64", bound=between(0, item.body.length - 1))
    of_parts = draw(st.booleans())
    of = item.body if of_parts else item
    length = of.length
    data, count, common = f"{name}_data", f"{name}_length", f"{name}_common"
    fields_of = {
        "batched": {data: batched()},
        "flat": {data: flat(length)},
        "derived": {count: derived(length, dtype="int64"), data: flat(fields[count])},
        "shared": {data: batched(), common: constant(cfg.two, dtype="int32")},
    }
    layout: Layout = build(
        draw(trees(known=LENGTHS, sequences=[("cfg", "rows")])),
        mark=lambda _: embed(placeholder),
        token=lambda value: literal(marks[isinstance(value, int)]),
        roots={"cfg": cfg, "item": of},
    )
    parts = fields_of[draw(st.sampled_from([*fields_of]))]
    join = torch.cat if isinstance(parts[data], Flat) else list
    return Modality(
        name,
        item=Record(body=rows, marked=marked, word=Text(most=3)) if of_parts else rows,
        # an item has at least one placeholder
        layout=embed(placeholder) + layout,
        update=[text, replace(target)] if both else one,
        fields=parts,
        process=lambda values, scope: {data: join([one["body"] if of_parts else one for one in values])},
        embeds=not any(leaf.root == "item" for leaf in layout.dependencies()) and draw(st.booleans()),
    )


@st.composite
def specs(draw: Any) -> ModelSpec:
    """Specs of one or two modalities."""
    modalities = [draw(_modality(name)) for name in NAMES[: draw(st.integers(1, 2))]]
    return ModelSpec("made_up", *modalities, prompt=ending_with(tok["</s>"]) if draw(st.booleans()) else None)

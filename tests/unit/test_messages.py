"""The sentences of SpecError and InputError that a user meets, each with what provokes it.

A row is a sentence and one or more ways to get it. Branches of one condition are rows of their own, other words in the
same place are not.
"""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from mmkit import (
    Audio,
    Image,
    InputError,
    ModelSpec,
    Record,
    SpecError,
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
    proc,
    replace,
    shared,
    tok,
    where,
)
from mmkit.expr import Scope, evaluate
from mmkit.layout import Placeholder
from mmkit.placement import Alternative, NotFound, place
from mmkit.process import identity

from .common import CONFIG, bound, modality, plan_of

PIXELS, FRAMES = np.zeros((4, 5, 3), np.uint8), np.zeros((2, 4, 5, 3), np.uint8)

SPEC = ModelSpec("spec", modality())
NUMBERED = replace(tok["<|image_{}|>", item.index + 1])
PLAN = plan_of(modality())


CLIP = plan_of(modality(item=Audio(largest=3), layout=embed(5) * item.length, embeds=embed(5) * item.rows,
                        process=lambda items, scope: {"x": items}))  # fmt: skip
PICTURES = bound(item=Image(largest=(9, 9)), process=hf(), embeds=True)


def nested(levels):
    value = 1.0
    for _ in range(levels):
        value = [value]
    return value


def asking(**inputs):
    """As processors of models with a text do."""
    raise ValueError("You have to specify text.")


def parse(kind, data):
    return bound(item=kind, process=hf()).intake.parse(data)


UPDATES = {
    "replace": replace(0),
    "in_place": already_expanded(),
    "start": insert(at="start"),
    "after": insert(after=0),
}


def alternative(kind, target, ids=(5, 5)):
    return Alternative(UPDATES[kind], tuple(target), Placeholder(list(ids), b"\x01" * len(ids)))


def put(prompt, kind, target, ids=(5, 5), count=1):
    return place(prompt, {"m": [[alternative(kind, target, ids)]] * count}, "spec")


def raised(error):
    raise error


def rewritten(value):
    return plan_of(modality(), prompt=value).rewrite("prompt", [1, 2])


def picky(items, scope):
    """A process that refuses some items itself."""
    if items[0].any():
        raise InputError("spec.m[0]", "an item of mine", "another")
    return {"x": items}


RECORD = Record(a=Tensor((between(1, 4),), "int64"), b=Tensor((item.a.length,)))

RAW = dict(layout=None, update=None, tokens=0)

# fmt: off
MODALITIES = [
    ("modality 'm': item: Input should be an instance of ItemType, got 'tensor'.", dict(item="tensor")),
    ("modality 'm': expected placeholder and tokens together, or layout and update together, got a mixture.",
     dict(placeholder="<image>", tokens=5), dict(layout=None, update=None, placeholder="<image>"),
     dict(layout=None, update=None, tokens=5), dict(layout=None, placeholder="<image>", tokens=5),
     dict(update=None, placeholder="<image>", tokens=5)),
    ("modality 'm': expected layout and update, got one of them.", dict(layout=None), dict(update=None)),
    ("modality 'm': expected layout and update, got neither.", dict(layout=None, update=None)),
    ("layout: expected token ids, got '<image>'. Write tok['<image>'] for one token or tok.text('<image>') for text.",
     dict(layout="<image>")),
    ("modality 'a b': expected a name that is a Python identifier, got 'a b'.", dict(name="a b")),
    ("modality 5: name: Input should be a valid string, got 5.", dict(name=5)),
    ("modality 'm': expected at least one update, got none.", dict(update=[])),
    ("modality 'm', positions: expected (t, h, w) or (t, h, w, scale), got (1, 2).", dict(positions=(1, 2))),
    ("modality 'm', positions: expected (t, h, w) or (t, h, w, scale), got an item without positions.",
     dict(RAW, positions=(1, 1, 1))),
    ("modality 'm', positions: expected fields that the model gets, and cfg, got item.length. Declare a derived field.",
     dict(positions=(1, item.length, 1))),
    ("modality 'm': expected limit=1 for an item without positions, got 2.", dict(RAW, limit=2)),
    ("modality 'm': expected no embeds for an item without positions, got True.", dict(RAW, embeds=True)),
    ("modality 'm', fields['x']: expected batched, flat or constant fields of an item without positions, got shared().",
     dict(RAW, fields={"x": shared()}, process=hf())),
    ("modality 'm', update: expected replace(), insert(), already_expanded() or a list of them, got 5.",
     dict(update=5)),
    ("modality 'm': update.0: Input should be an instance of Update, got 5.", dict(update=[5])),
    ("modality 'm': expected at least one field, got none.", dict(fields={})),
    ("modality 'm', fields: expected a dict of batched(), flat(), shared(), derived() or constant(), got ['x'].",
     dict(fields=["x"])),
    ("modality 'm', fields['x']: expected batched(), flat(), shared(), derived() or constant(), got 'batched'.",
     dict(fields={"x": "batched"})),
    ("modality 'm': fields.5.[key]: Input should be a valid string, got 5.", dict(fields={5: batched()})),
    ("modality 'm': expected a Tensor item and one field, or a process, got Tensor(shape=(2, cfg.n), "
     "dtype='float32', finite=True, bound=None, largest=None) and fields ['x', 'y'].",
     dict(process=identity(), fields={"x": batched(), "y": batched()})),
    ("modality 'm': expected a Tensor item and one field, or a process, got Audio(largest=5, rate=None, least=None, "
     "most=None) and fields ['x'].",
     dict(process=identity(), item=Audio(largest=5))),
    ("modality 'm': expected a field for each of ['a'], or a process, got Record(a=Text(most=2, least=1, "
     "alphabet=None)) and fields ['a'].",
     dict(process=identity(), item=Record(a=Text(most=2)), fields={"a": batched()})),
    ("modality 'm': expected hf() or a function for process, got 5.", dict(process=5)),
    ("modality 'm': expected unpad to name fields among ['x'], got ['y'].", dict(process=hf(unpad={"y": 3}))),
    ("modality 'm', fields.z: expected a field among ['x'], got 'z'. Declare it in fields.",
     dict(layout=embed(5) * fields.z), dict(layout=embed(5) * where(item.a, fields.z, 1)),
     dict(update=replace(fields.z)),
     dict(fields={"x": flat(fields.z)}), dict(fields={"x": batched(shape=(fields.z,))}),
     dict(process=hf(unpad={"x": fields.z})),
     dict(embeds=embed(5) * fields.z)),
    ("modality 'm', fields['z'][0].a: expected a field among ['x'], got 'z'. Declare it in fields.",
     dict(layout=embed(5) * fields["z"][0].a)),
    ("modality 'm', embeds: expected a layout over item.rows, because the layout depends on item.length, got True.",
     dict(layout=embed(5) * item.length, embeds=True)),
    ("modality 'm', embeds: expected True, a layout, or flat(item.rows) where layout and targets read fields, got "
     "flat(item.rows).",
     dict(embeds=flat(item.rows)),
     dict(layout=embed(5) * fields.x[0], update=NUMBERED, fields={"x": batched(shape=(1,), dtype="int64")},
          embeds=flat(item.rows))),
    ("modality 'm', embeds: expected True, a layout, or flat(item.rows) where layout and targets read fields, got "
     "batched().",
     dict(embeds=batched())),
    ("modality 'm', fields['x']: expected a batched field with shape and dtype, which embeddings come with, "
     "got batched(). Or give embeds= a layout over item.rows.",
     dict(layout=embed(5) * fields.x, embeds=True)),
    ("modality 'm': expected no field named m_embeds, which carries precomputed embeddings, got one.",
     dict(fields={"m_embeds": batched()}, embeds=True)),
    ("modality 'm': expected cacheable to say for which item.count processed items may be kept, got none. Write "
     "cacheable=False, or a condition on item.count.",
     dict(layout=embed(5) * item.count)),
]
"""Options of `modality()`."""

SPECS = [
    ("spec 'a b': expected a name that is a Python identifier, got 'a b'.", lambda: ModelSpec("a b", modality())),
    ("spec 5: name: Input should be a valid string, got 5.", lambda: ModelSpec(5, modality())),
    ("spec 'a': expected at least one modality, got none.", lambda: ModelSpec("a")),
    ("spec, merges: expected a character that the tokenizer has as a token, got '\\u2028'.",
     lambda: ModelSpec("spec", modality(), merges="\u2028").bind(CONFIG)),
    ("spec 'a': expected modalities, each as an argument of its own, got a list.",
     lambda: ModelSpec("a", [modality()])),
    ("spec 'a': expected one modality named 'm', got several.",
     lambda: ModelSpec("a", modality(), modality(fields={"y": batched()}))),
    ("spec 'a', m: hf(inputs=...): expected arguments among ['audios'], got ['audio'].",
     lambda: ModelSpec("a", modality(item=Audio(largest=3), process=hf(inputs={"audio": "sound"})))),
    ("spec 'a': expected one field named 'x', got several.", lambda: ModelSpec("a", modality(), modality("n"))),
    ("spec 'a': expected one field named 'm_embeds', got several.",
     lambda: ModelSpec("a", modality(embeds=True), modality("n", fields={"m_embeds": batched()}))),
    ("spec 'a': expected nothing beside a modality without positions, whose fields take up forward, got m, n.",
     lambda: ModelSpec("a", modality(**RAW), modality("n", fields={"y": batched()}))),
    ("spec 'a': expected nothing beside a modality without positions, whose fields take up forward, got m, prompt.",
     lambda: ModelSpec("a", modality(**RAW), prompt=ending_with(7))),
    ('insert(): expected at="start", at="end" or after=a prefix, got nothing.', insert),
    ("insert(): expected at=\"start\", at=\"end\" or after=a prefix, got at='middle'.", lambda: insert(at="middle")),
    ("insert(): expected at=\"start\", at=\"end\" or after=a prefix, got at='end', after=5.",
     lambda: insert(at="end", after=5)),
    ("layout: expected token ids, got '<image>'. Write tok['<image>'] for one token or tok.text('<image>') for text.",
     lambda: "<image>" + embed(5), lambda: embed(5) + "<image>", lambda: each(2, lambda x: "<image>")),
    ("replace(): expected token ids, got '<image>'. Write tok['<image>'] for one token or tok.text('<image>') for "
     "text.", lambda: replace("<image>")),
    ("insert(): expected token ids, got '<image>'. Write tok['<image>'] for one token or tok.text('<image>') for text.",
     lambda: insert(after="<image>")),
    ("embed(): expected one token id, got '<image>'. Write embed(tok[\"<image>\"]) or embed(cfg.some_token_id).",
     lambda: embed("<image>")),
    ("embed(): expected one token id, got tok.text('ab'). Write embed(tok[\"<image>\"]) or embed(cfg.some_token_id).",
     lambda: embed(tok.text("ab"))),
    ('embed(): expected one token id, got embed(1) * 2. Write embed(tok["<image>"]) or embed(cfg.some_token_id).',
     lambda: embed(embed(1) * 2)),
    ("dtype of a field: expected a torch dtype or its name, got 'nn'.", lambda: batched(dtype="nn")),
    ("Tensor.dtype: expected one of float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64, bool, got"
     " 'float'.",
     lambda: Tensor(shape=(), dtype="float")),
    ("Tensor.shape: expected a tuple of sizes, one per dimension, got 3.", lambda: Tensor(shape=3)),
    ("Record: expected at least one part, got none.", lambda: Record()),
    ("Record.a: expected a Tensor or a Text, got <class 'mmkit.items.text.Text'>.", lambda: Record(a=Text)),
    ("Record: expected a part that is not called index, count, rows or _..., got 'count'.",
     lambda: Record(count=Text(most=2))),
    ("modality 'm': expected no part named m_embeds, as which precomputed embeddings come, got one.",
     lambda: modality(item=Record(m_embeds=Tensor(shape=())), fields={"m_embeds": batched()})),
    ("cfg.zzz has no value: object has no attribute 'zzz'.", lambda: evaluate(cfg.zzz, Scope(cfg=object()))),
    ("cfg.a.b has no value: dict has no attribute 'b'. It has: c, d.",
     lambda: evaluate(cfg.a.b, Scope(cfg={"a": {"c": 1, "d": 2}}))),
    ("fields.x has no value: the processed fields lack 'x'. It has: y.",
     lambda: evaluate(fields.x, Scope(fields={"y": 1}))),
    ("cfg.sizes[2] has no value: cfg.sizes is [1].",
     lambda: evaluate(cfg.sizes[2] + 1, Scope(cfg=SimpleNamespace(sizes=[1])))),
    ("cfg.sizes[50] has no value: cfg.sizes is [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, "
     "19, 20, 21....",
     lambda: evaluate(cfg.sizes[50], Scope(cfg=SimpleNamespace(sizes=list(range(50)))))),
    ("cfg has no value here: the spec is not bound to a config.", lambda: evaluate(cfg.a, Scope())),
    ("later(int)(cfg.text) has no value: invalid literal for int() with base 10: 'x', with 'x'.",
     lambda: evaluate(later(int)(cfg.text), Scope(cfg=CONFIG))),
    ("cfg.n + cfg.text has no value: unsupported operand type(s) for +: 'int' and 'str', with 2, 'x'.",
     lambda: evaluate(cfg.n + cfg.text, Scope(cfg=CONFIG))),
    ("config: expected a vocab_size in the language model's part, got None.",
     lambda: SPEC.bind(None), lambda: SPEC.bind(SimpleNamespace(n=2))),
    ("spec.m, layout: tok['<image>'] has no value: the model runs without a tokenizer. Use a token id from cfg "
     "instead.",
     lambda: ModelSpec("spec", modality(layout=embed(tok["<image>"]))).bind(CONFIG)),
    ("spec.m, layout: tok.text('text') has no value: the model runs without a tokenizer. Use a token id from cfg "
     "instead.",
     lambda: ModelSpec("spec", modality(layout=embed(5) + tok.text("text"))).bind(CONFIG)),
    ("spec.prompt: expected literal ids, since placeholders belong to items, got embed().",
     lambda: rewritten(ending_with(embed(5)))),
    ("spec.prompt: expected token ids below the vocabulary size 200, got 200. Use a reserved id inside the "
     "vocabulary: vLLM refuses prompts with other ids.",
     lambda: rewritten(ending_with(200))),
    ("modality 'm': expected a batched or flat field where there is no process, got shared().",
     lambda: bound(fields={"x": shared()})),
    ("spec.n, update: expected a target that no other modality has, got [181], which is that of m too. Give each a "
     "token of its own.",
     lambda: plan_of(modality(update=replace(181)), modality("n", update=NUMBERED, fields={"y": batched()}))),
    ("spec.m, update: expected no insert(at=\"end\") beside prompt=ending_with(...), got "
     "insert(at=\"end\"). Put these ids into the layout of the item.",
     lambda: plan_of(modality(update=insert(at="end")), prompt=ending_with(7))),
    ("spec.m, item: expected the most encoder rows for the largest item, got 1, and 4 for the smallest. State "
     "`largest=`, the shape of the item with the most.",
     lambda: bound(item=Tensor(shape=(between(1, 4), 2)), layout=embed(5) * (5 - item.length))),
    ("config: expected a vocab_size of at most 1114112, got 2000000.",
     lambda: SPEC.bind(SimpleNamespace(n=2, vocab_size=2_000_000))),
    ("spec, process: expected a Hugging Face processor for hf(), got none. Bind the spec with processor=.",
     lambda: plan_of(modality(process=hf())).preview([5], {"m": torch.zeros(2, 2)})),
]
"""Declarations, and expressions by themselves."""

BOUND = [
    ("layout: proc has no value here: the model has no Hugging Face processor.", dict(layout=embed(proc.a))),
    ("limit: item has no value here: it describes one raw item and is only known inside layout, update, fields and "
     "process.",
     dict(limit=item.length)),
    ("limit: fields has no value here: it holds the processed fields of one item and is only known after processing.",
     dict(limit=fields.x)),
    ("limit: cfg.sise has no value: SimpleNamespace has no attribute 'sise'. It has: size.", dict(limit=cfg.sise)),
    ("layout: cfg.zzz has no value: SimpleNamespace has no attribute 'zzz'.",
     dict(layout=embed(cfg.zzz)), dict(layout=embed(5) * (item.length + cfg.zzz)),
     dict(layout=each(item.length, lambda x: embed(cfg.zzz))),
     dict(layout=where(item.length < 3, embed(cfg.zzz), embed(5) * fields.x))),
    ("update: cfg.zzz has no value: SimpleNamespace has no attribute 'zzz'.",
     dict(update=replace(cfg.zzz)), dict(update=insert(after=cfg.zzz))),
    ("fields: cfg.zzz has no value: SimpleNamespace has no attribute 'zzz'.",
     dict(fields={"x": batched(shape=(cfg.zzz,))}), dict(fields={"x": flat(cfg.zzz)})),
    ("embeds: cfg.zzz has no value: SimpleNamespace has no attribute 'zzz'.", dict(embeds=embed(cfg.zzz))),
    ("process: cfg.zzz has no value: SimpleNamespace has no attribute 'zzz'.",
     dict(process=hf(text=cfg.zzz)), dict(process=hf(unpad={"x": cfg.zzz}))),
    ("when: cfg.zzz has no value: SimpleNamespace has no attribute 'zzz'.", dict(when=cfg.zzz)),
    ("item: Tensor.shape[0] = cfg.zzz: cfg.zzz has no value: SimpleNamespace has no attribute 'zzz'.",
     dict(item=Tensor(shape=(cfg.zzz,)))),
    ("layout: tok['<imgae>']: expected a token of the vocabulary, got a text that is none. Near: '<image>', "
     "'<|image_2|>', '<|image_1|>'. Use tok.text('<imgae>') for a text that the tokenizer splits.",
     dict(layout=embed(tok["<imgae>"]))),
    ("layout: tok['zzz']: expected a token of the vocabulary, got a text that is none. Use tok.text('zzz') for a text "
     "that the tokenizer splits.",
     dict(layout=embed(tok["zzz"]))),
    ("layout: tok[2]: expected the text of one token, got int. Use an id as it is.", dict(layout=embed(tok[cfg.n]))),
    ("limit: cfg.size // (cfg.n - 2) has no value: integer division or modulo by zero, with 7, 0.",
     dict(limit=cfg.size // (cfg.n - 2))),
    ("layout: cfg.n * 0.5: expected a token id, a whole number >= 0, got 1.0. Use // or ceil_div(), which give whole "
     "numbers.", dict(layout=embed(cfg.n * 0.5))),
    ("layout: cfg.minus: expected a token id, a whole number >= 0, got -1.", dict(layout=embed(cfg.minus))),
    ("layout: cfg.minus: expected a repetition count, a whole number >= 0, got -1.", dict(layout=embed(5) * cfg.minus)),
    ("layout: cfg.minus: expected the number of elements of each(), or a sequence, a whole number >= 0, got -1.",
     dict(layout=embed(5) + each(cfg.minus, literal))),
    ("layout: cfg.n * 0.5: expected the number of elements of each(), or a sequence, a whole number >= 0, got 1.0. Use "
     "// or ceil_div(), which give whole numbers.",
     dict(layout=embed(5) + each(cfg.n * 0.5, literal))),
    ("layout: embed(5) * 1000000000: expected at most 4194304 ids, got 1000000000.", dict(layout=embed(5) * 10**9)),
    ("layout: each(3, lambda x: embed(5) * 2000000): expected at most 4194304 ids, got 6000000.",
     dict(layout=each(3, lambda x: embed(5) * 2000000))),
    ("item: Tensor.shape[1] = cfg.n - 4: expected whole numbers >= 0, in order, got -2.",
     dict(item=Tensor(shape=(3, cfg.n - 4)))),
    ("item: Tensor.shape[0] = cfg.n * 1.0: expected whole numbers >= 0, in order, got 2.0.",
     dict(item=Tensor(shape=(cfg.n * 1.0,)))),
    ("item: Tensor.shape[0] = True: expected whole numbers >= 0, in order, got True.",
     dict(item=Tensor(shape=(True,)))),
    ("item: Tensor.shape[0] = item.length: item has no value here: it describes one raw item and is only known "
     "inside layout, update, fields and process.",
     dict(item=Tensor(shape=(item.length,)))),
    ("item: Tensor.shape[0] = 3..cfg.n: expected whole numbers >= 0, in order, got 3..2.",
     dict(item=Tensor(shape=(between(3, cfg.n),)))),
    ("item: Tensor.shape[0] = cfg.minus..3: expected whole numbers >= 0, in order, got -1..3.",
     dict(item=Tensor(shape=(between(cfg.minus, 3),)))),
    ("item: Tensor.bound: expected a number > 0 from cfg, got 0.", dict(item=Tensor(shape=(1,), bound=cfg.n - 2))),
    ("item: Tensor.bound: expected a number > 0 from cfg, got nan.", dict(item=Tensor(shape=(1,), bound=math.nan))),
    ("item: Tensor.bound: expected a number > 0 from cfg, got True.", dict(item=Tensor(shape=(1,), bound=True))),
    ("item: Tensor.bound: expected a number, got 0..3 of float32. State the largest magnitude.",
     dict(item=Tensor(shape=(1,), bound=between(0, 3)))),
    ("item: Tensor.bound: expected values that uint8 holds, got 0..256.",
     dict(item=Tensor(shape=(1,), dtype="uint8", bound=between(0, 256)))),
    ("item: Tensor.bound: expected whole numbers >= 0, in order, got -1..3.",
     dict(item=Tensor(shape=(1,), dtype="int64", bound=between(-1, 3)))),
    ("item: Tensor.largest: expected a shape within (1..4, 3), got (5, 3).",
     dict(item=Tensor(shape=(between(1, 4), 3), largest=(5, 3)))),
    ("item: Record.b: Tensor.shape[0] = item.c.length: item.c has no value: SimpleNamespace has no attribute 'c'.",
     dict(item=Record(a=Text(most=2), b=Tensor((item.c.length,))), process=hf())),
    ("item: Record.b: Tensor.shape[0] = item.count: item.count has no value: SimpleNamespace has no attribute "
     "'count'.",
     dict(item=Record(a=Text(most=2), b=Tensor((item.count,))), process=hf(), cacheable=False)),
    ("item: Record.a: Text.least, Text.most: expected whole numbers >= 0, in order, got 1..0.",
     dict(item=Record(a=Text(most=cfg.n - 2)), process=hf())),
    ("item: Text.alphabet: expected a string of characters, got ''.",
     dict(item=Text(most=2, alphabet=""), process=hf())),
    ("item: Image.largest: expected 2 whole number(s) >= 1, got (3, 0).", dict(item=Image(largest=(3, 0)))),
    ("item: Image.largest: expected an image of at least 28 x 28 pixels and at most 99 x 50 pixels, no side over 2 "
     "times the other, got 99 x 49 pixels.",
     dict(item=Image(largest=(99, 49), least=28, most=(99, 50), aspect=cfg.n))),
    ("item: Video.largest: expected a video of at most 2 frame(s) of 9 x 9 pixels, got 3 frame(s) of 9 x 9 pixels.",
     dict(item=Video(largest=(3, 9, 9), most=(cfg.n, 9, 9)))),
    ("item: Video.least: expected 3 whole number(s) >= 1, got (2,).", dict(item=Video(largest=(3, 9, 9), least=2))),
    ("item: Image.least: expected the sizes of one item, got [(1, 2), (3, 4)].",
     dict(item=Image(largest=(9, 9), least=[(1, 2), (3, 4)]))),
    ("item: Image.aspect: expected a number > 0 from cfg, got 0.", dict(item=Image(largest=(9, 9), aspect=0))),
    ("item: Image.largest: expected 2 whole number(s) >= 1, got (5,).", dict(item=Image(largest=5))),
    ("item: Image.largest: expected 2 whole number(s) >= 1, got (1.5, 2).", dict(item=Image(largest=(1.5, 2)))),
    ("item: Image.largest: expected 2 whole number(s) >= 1, got (3,).", dict(item=Image(largest=[(1, 2), (3,)]))),
    ("item: Video.largest: expected 3 whole number(s) >= 1, got (1, 2).", dict(item=Video(largest=(1, 2)))),
    ("item: Audio.largest: expected 1 whole number(s) >= 1, got (-1,).", dict(item=Audio(largest=cfg.minus))),
    ("item: Audio.rate: expected a number > 0 from cfg, got -1.", dict(item=Audio(largest=4, rate=-1))),
    ("limit: expected a whole number >= 0 or None, got 1.5.", dict(limit=1.5)),
    ("limit: expected a whole number >= 0 or None, got -1.", dict(limit=-1)),
    ("limit: expected a whole number >= 0 or None, got True.", dict(limit=True)),
    ("layout: expected at least one embed() position per item, got 2 literal ids.", dict(layout=literal([1, 2]))),
    ("layout: expected at least one embed() position per item, got 0 literal ids.",
     dict(layout=embed(5) * 0), dict(item=Tensor(shape=(between(2, 4),)), layout=embed(5) * (item.length - 2))),
    ("layout: expected token ids below the vocabulary size 200, got 200. Use a reserved id inside the vocabulary: "
     "vLLM refuses prompts with other ids.",
     dict(layout=embed(200)), dict(layout=embed(tok["<far>"])), dict(layout=embed(5) + literal(200)),
     dict(layout=embed(5) + each(fields.x.shape[0], lambda x: literal(200))),
     dict(layout=where(item.length < 3, embed(5), embed(200))), dict(embeds=embed(200) * item.rows)),
    ("update: expected token ids below the vocabulary size 200, got 200. Use a reserved id inside the vocabulary: "
     "vLLM refuses prompts with other ids.",
     dict(update=replace([1, 200])), dict(update=[already_expanded(), replace(200)])),
    ("update: expected a target of at least one token, got none.", dict(update=replace([]))),
    ("process: expected to take well-formed items, got KeyError: 'x'.", dict(process=lambda items, scope: {}["x"])),
    ("layout: expected a value, got AssertionError.", dict(layout=lambda s: raised(AssertionError()))),
    ("update: expected a value, got AttributeError: 'types.SimpleNamespace' object has no attribute 'x'.",
     dict(update=replace(lambda s: s.item.x))),
]
"""Options of a modality that is bound; after `spec.m, `."""

PROCESSED = [
    (", process: expected a dict of tensors, got int.", (3, {"x": batched()})),
    (", process: expected the fields ['x'], got [], without ['x'].", ({}, {"x": batched()})),
    (", process: expected the fields ['x'], got ['x'], without ['x'].", ({"x": None}, {"x": batched()})),
    (": expected process to return declared fields, ['x'], got ['y']. Declare them in fields, or do not return them.",
     ({"x": torch.zeros(1), "y": [2]}, {"x": batched()})),
    (": expected process to return declared fields, [], got ['x']. Declare them in fields, or do not return them.",
     ({"x": [1]}, {"x": derived(1)})),
    (", fields['x']: expected 1 items along the first dimension, got 3.", ({"x": torch.zeros(3)}, {"x": batched()})),
    (", fields['x']: expected a tensor with a dimension 0, got shape ().", ({"x": torch.zeros(())}, {"x": batched()})),
    (", fields['x']: expected a tensor with a dimension 0, got int.", ({"x": 3}, {"x": batched()})),
    (", fields['x']: expected sizes that add up to 3, the extent of dimension 0, got 2.",
     ({"x": torch.zeros(3)}, {"x": flat(item.length)}), ({"x": [0] * 3}, {"x": flat(item.length)})),
    (", fields['x']: expected a tensor with a dimension 1, got shape (4,).",
     ({"x": torch.zeros(4)}, {"x": flat(item.length, dim=1)})),
    (", fields['x']: expected a tensor with a dimension -2, got shape (4,).",
     ({"x": torch.zeros(4)}, {"x": flat(item.length, dim=-2)})),
    (", fields['x']: expected a tensor with a dimension 1, got ndarray.",
     ({"x": np.zeros((3, 4))}, {"x": flat(item.length, dim=1)})),
    (", fields['x']: <lambda>: expected a size, a whole number >= 0, got 0.5. Use // or ceil_div(), which give whole "
     "numbers.",
     ({"x": torch.zeros(4)}, {"x": flat(lambda s: 0.5)})),
    (", fields['x']: <lambda>: expected a size, a whole number >= 0, got -1.",
     ({"x": torch.zeros(4)}, {"x": flat(lambda s: -1)})),
    (", fields['x']: item 0: expected dtype int64, got torch.float32.",
     ({"x": torch.zeros(1)}, {"x": batched(dtype="int64")}), ({"x": torch.zeros(1)}, {"x": shared(dtype="int64")}),
     ({"x": torch.zeros(2)}, {"x": flat(item.length, dtype="int64")})),
    (", fields['x']: item 0: expected dtype int64, got list.", ({"x": [[0.0]]}, {"x": batched(dtype="int64")})),
    (", fields['x']: item 0: expected shape (2,) per item, got (3,).",
     ({"x": torch.zeros(1, 3)}, {"x": batched(shape=(cfg.n,))})),
    (", fields['x']: item 0: expected shape (0..2,) per item, got (3,).",
     ({"x": torch.zeros(1, 3)}, {"x": batched(shape=(between(0, cfg.n),))})),
    (", fields['x']: item 0: expected shape (2,) per item, got (3,).",
     ({"x": torch.zeros(1, 3), "n": torch.tensor([2])}, {"x": batched(shape=(fields.n,)), "n": batched()})),
    (", fields['x']: item 0: expected shape (1,) per item, got ().", ({"x": [[0]]}, {"x": batched(shape=(1,))})),
    (", fields['x']: item 0: expected shape (2, 2) per item, got (3, 2).",
     ({"x": torch.zeros(1, 3, 2)}, {"x": batched(shape=(item.length, 2))})),
    (", fields['x']: item has no value here: it describes one raw item and is only known inside layout, update, "
     "fields and process.",
     ({}, {"x": constant(item.length)})),
    (", fields['x']: value: expected numbers for a int64 tensor, got 'a'.",
     ({}, {"x": derived("a", dtype="int64")})),
]
"""What `process` returns, and the declared fields; after `spec.m`."""

TENSORS = [
    ("dict {'a': 1}.", [{"a": 1}]),
    ("a list that holds bool True.", [[0, 1], [2, True]]),
    ("dtype bool. Convert it to float32.", np.zeros((2, 2), bool), torch.zeros(2, 2, dtype=torch.bool)),
    ("dtype >f4. Convert it to float32.", np.zeros((2, 2), ">f4")),
    ("dtype object. Convert it to float32.", np.zeros((2, 2), object)),
    ("dtype <U1. Convert it to float32.", np.full((2, 2), "a")),
    ("shape (2,).", np.zeros(2, np.float32)),
    ("shape (3, 2).", np.zeros((3, 2), np.float32), [[[1.0] * 2, [1.0] * 2, [1.0] * 2]]),
    ("shape (0, 2).", torch.zeros(0, 2)),
    ("shape (2, 0).", [[], []]),
    ("shape (1, 2, 2). Send one tensor per item.", [torch.zeros(1, 2, 2)]),
    ("a ragged list.", [[1.0, 2.0], [3.0]], [[1.0, 2.0], 1.0], [[[1.0, 2.0], [3.0]]]),
    ("a list that holds None.", [[1.0, 2.0], [1.0, None]], [[1.0, 2.0], None]),
    ("a list that holds 9223372036854775808.", [[0, 1], [2, 2**63]]),
    ("a list that holds -9223372036854775809.", [[0, 1], [2, -(2**63) - 1]]),
    ("a list that holds a int.", [[10**5000] * 2] * 2),
    ("a list that holds more than 32 levels.", [nested(33)], [nested(1000)]),
    ("a torch.sparse_coo tensor on cpu.", torch.zeros(2, 2).to_sparse()),
    ("a torch.strided tensor on meta.", torch.zeros(2, 2, device="meta")),
    ("a masked array. Fill its gaps.", np.ma.masked_array(np.zeros((2, 2)))),
    ("the value 9223372036854775808.", np.full((2, 2), 2**63, np.uint64)),
]
"""Data of Tensor(shape=(2, 2)); after `spec.m[0]: expected a (2, 2) float32 tensor, got `."""

CONTAINERS = [
    ("a (2, 2) float32 tensor or a list of them, got None. Send the item, or leave the modality out.", None),
    ("a (2, 2) float32 tensor or a list of them, got a str.", "x" * 100),
    ("a (2, 2) float32 tensor or a list of them, got float 3.0.", 3.0),
    ("a (2, 2) float32 tensor or a list of them, got dict {'a': 1}.", {"a": 1}),
]
"""The same, after `spec.m: expected `."""

VALUES = [
    ("finite values of magnitude <= 65504, got nan at [1, 0].", (Tensor(shape=(2, 2)), [[0, 1], [math.nan, 1]])),
    ("finite values of magnitude <= 65504, got -inf at [1, 1].", (Tensor(shape=(2, 2)), [[0, 1], [1, -math.inf]])),
    ("finite values of magnitude <= 65504, got -70000 at [1, 1]. Check the units.",
     (Tensor(shape=(2, 2)), [[0, 1], [2, -7e4]])),
    ("finite values of magnitude <= 65504, got 70000 at [1]. Check the units.",
     (Tensor(shape=(2,), finite=False), [math.nan, 7e4]), (Tensor(shape=(2,), finite=False), [math.inf, 7e4])),
    ("finite values of magnitude <= 0.1, got 0.1 at [0]. Check the units.",
     (Tensor(shape=(2,), bound=0.1), np.full(2, np.nextafter(np.float32(0.1), np.float32(1))))),
    ("finite values of magnitude <= 65504, got 70000 at [0]. Check the units.",
     (Tensor(shape=(2,), dtype="float16", bound=1e6), [7e4, 0])),
    ("integers that float16 holds exactly, got 2049 at [1, 0]. Send floats to have them rounded.",
     (Tensor(shape=(2, 2), dtype="float16"), np.array([[4096, 0], [2049, 1]], np.uint16)),
     (Tensor(shape=(2, 2), dtype="float16"), torch.tensor([[4096, 0], [2049, 1]]))),
    ("integers that float32 holds exactly, got 9223372036854775807 at [0]. Send floats to have them rounded.",
     (Tensor(shape=(1,), bound=math.inf), np.array([2**63 - 1]))),
    ("finite values of magnitude <= 65504, got -65505 at [1]. Check the units.",
     (Tensor(shape=(2,)), np.array([65504, -65505]))),
    ("int32 values from -2147483648 to 2147483647, got values from 0 to 2147483648.",
     (Tensor(shape=(2,), dtype="int32"), [0, 2**31])),
    ("int32 values from -65504 to 65504, got values from 0 to 65505.",
     (Tensor(shape=(2,), dtype="int32", bound=65504.0), [0, 65505])),
    ("at most 4 samples at 16000 Hz, got 48000 of them from 3 at 1 Hz. Send less.",
     (Audio(largest=4, rate=16000), (np.zeros(3), 1))),
    ("a PIL image or 8-bit RGB pixels, got float32 values of shape (3, 4, 5). Convert it to uint8 values from 0 to "
     "255.",
     (Image(largest=(4, 4), arrays=False), torch.zeros(3, 4, 5))),
    ("a PIL image or 8-bit RGB pixels, got uint8 values of shape (1, 4, 5). Send three channels.",
     (Image(largest=(4, 4), arrays=False), torch.zeros(1, 4, 5, dtype=torch.uint8))),
    ("uint8 values from 0 to 255, got values from 1 to 256.", (Tensor(shape=(2,), dtype="uint8"), [1, 256])),
    ("uint8 values from 0 to 255, got values from -1 to 1.", (Tensor(shape=(2,), dtype="uint8"), [1, -1])),
    ("int64 values from -2 to 2, got values from -3 to 1.",
     (Tensor(shape=(2,), dtype="int64", bound=cfg.n), [-3, 1])),
    ("int64 values from -2 to 2, got values from 1 to 3.",
     (Tensor(shape=(2,), dtype="int64", bound=cfg.n), [3, 1])),
    ("whole numbers that int64 holds, got 1.5 at [1].",
     (Tensor(shape=(2,), dtype="int64"), [0.0, 1.5]), (Tensor(shape=(2,), dtype="int64"), np.array([0, 1.5], "f2"))),
    ("whole numbers that uint8 holds, got nan at [0, 1].",
     (Tensor(shape=(1, 2), dtype="uint8"), torch.tensor([[0.0, math.nan]]))),
    ("whole numbers that int64 holds, got 9.22337e+18 at [1].",
     (Tensor(shape=(2,), dtype="int64"), [0.0, 2.0**63])),
    ("uint8 values from 0 to 255, got values from 0 to 256.", (Tensor(shape=(2,), dtype="uint8"), [0.0, 256.0])),
    ("a (2,) int64 tensor, got dtype bool. Convert it to int64.",
     (Tensor(shape=(2,), dtype="int64"), np.zeros(2, bool))),
    ("a (2,) int64 tensor, got a list that holds bool True.", (Tensor(shape=(2,), dtype="int64"), [True, False])),
    ("a (2,) bool tensor, got dtype int64. Convert it to bool.", (Tensor(shape=(2,), dtype="bool"), np.zeros(2, int))),
    ("a (2,) bool tensor, got a list that holds int 1.", (Tensor(shape=(2,), dtype="bool"), [1, 0])),
    ("an image of at least 2 x 3 pixels, got 2 x 2 pixels.",
     (Image(largest=(4, 4), least=(2, 3)), PILImage.new("RGB", (2, 2)))),
    ("an image of at most 2 x 2 pixels, got 2 x 3 pixels.",
     (Image(largest=(2, 2), most=2), np.zeros((3, 2, 3), np.uint8))),
    ("an image, no side over 1.5 times the other, got 2 x 4 pixels.",
     (Image(largest=(2, 2), aspect=1.5), torch.zeros(3, 4, 2))),
    ("a video of at least 2 frame(s) of 1 x 1 pixels, got 1 frame(s) of 5 x 4 pixels.",
     (Video(largest=(2, 4, 4), least=(2, 1, 1)), FRAMES[:1])),
    ("a 1-D float array or an (array, sampling rate) pair of at least 2 samples and at most 4 samples, got 5 samples.",
     (Audio(largest=4, least=2, most=4), np.zeros(5)), (Audio(largest=4, least=2, most=4, rate=2), (np.zeros(5), 2))),
    ("a text of 1..2 characters, got int 3.", (Text(most=cfg.n), [3])),
    ("a text of 1..2 characters, got 3 of them.", (Text(most=cfg.n), "abc")),
    ("a text of 1..2 characters, got 0 of them.", (Text(most=cfg.n), "")),
    ("a text that UTF-8 can encode, got half of a surrogate pair at 1.", (Text(most=2), "a\ud800")),
    ("characters among 'ACGT', got 'U' at 1.", (Text(most=2, alphabet="ACGT"), "AU")),
    ("a dict of a and b, got one without b.", (RECORD, {"a": [1], "c": 2})),
    ("a dict of a and b, got one without a and b.", (RECORD, {})),
    ("a dict of a and b, got one with 'c' as well.", (RECORD, {"a": [1], "b": [1.0], "c": 2})),
    ("a dict of a and b, got int 3. A list or tuple is several items.", (RECORD, [3])),
]
"""Item types and data; after `spec.m[0]: expected `, as are the next three."""

IMAGES = [
    ("an image of at least 1 x 1 pixels, got size (0, 3).", PILImage.new("RGB", (0, 3))),
    ("a PIL image or an array, got str 'cat'.", "cat"),
    ("a PIL image or an array, got list [1, 2].", [[1, 2]]),
    ("an array of shape (height, width, 3) or (3, height, width), got shape (5, 6, 7).", np.zeros((5, 6, 7))),
    ("an array of shape (height, width, 3) or (3, height, width), got shape (0, 5, 3).", np.zeros((0, 5, 3))),
    ("an array of shape (height, width, 3) or (3, height, width), got a torch.sparse_coo tensor on cpu.",
     torch.zeros(3, 4, 5).to_sparse()),
    ("finite values of magnitude <= 65504, got NaN or an infinity.",
     torch.full((3, 4, 4), math.nan), torch.full((3, 4, 5), math.inf)),
    ("finite values of magnitude <= 65504, got 100000.", torch.full((3, 4, 4), 1e5)),
    ("real numbers, got dtype complex128.", np.zeros((3, 4, 4), complex)),
    ("real numbers, got dtype object.", np.zeros((4, 5, 3), object)),
]

VIDEOS = [
    ("an array of shape (frames, height, width, 3), got str 'cat'.", "cat"),
    ("an array of shape (frames, height, width, 3), got shape (4, 4, 3).", np.zeros((4, 4, 3))),
    ("an array of shape (frames, height, width, 3), got shape (2, 5, 6, 7).", np.zeros((2, 5, 6, 7))),
    ("an array of shape (frames, height, width, 3), got tuple ('x', {'fps': 2.0}).", ("x", {"fps": 2.0})),
    ("an array of shape (frames, height, width, 3), got shape (4, 5, 3).", (FRAMES[0], {"fps": 2.0})),
    ("frames of one shape and dtype, got float64 (4, 4, 3) and float64 (4, 5, 3).",
     [np.zeros((4, 4, 3)), np.zeros((4, 5, 3))]),
    ("frames of one shape and dtype, got uint8 (4, 5, 3) and uint8 (4, 5).",
     [PILImage.new("RGB", (5, 4)), PILImage.new("L", (5, 4))]),
    ("an array of shape (frames, height, width, 3), got a torch.sparse_coo tensor on cpu.",
     [torch.zeros(4, 5, 3).to_sparse()]),
    ("an array of shape (frames, height, width, 3), got a list.", [PIXELS, "x"]),
    ("finite values of magnitude <= 65504, got NaN or an infinity.",
     np.full((2, 4, 5, 3), np.nan), torch.full((2, 3, 4, 5), math.inf)),
    ("real numbers, got dtype object.", np.zeros((2, 4, 5, 3), object)),
]

SOUNDS = [
    ("a 1-D float array or an (array, sampling rate) pair, got shape (), dtype <U3.", "cat"),
    ("a 1-D float array or an (array, sampling rate) pair, got shape (), dtype float64.", 3.0),
    ("a 1-D float array or an (array, sampling rate) pair, got shape (3,), dtype int64.", np.zeros(3, int)),
    ("a 1-D float array or an (array, sampling rate) pair, got shape (0,), dtype float64.", np.zeros(0)),
    ("a 1-D float array or an (array, sampling rate) pair, got shape (1, 2, 2), dtype float64.", np.zeros((1, 2, 2))),
    ("a 1-D float array or an (array, sampling rate) pair, got a torch.sparse_coo tensor on cpu.",
     torch.zeros(3).to_sparse()),
    ("a 1-D float array or an (array, sampling rate) pair, got list [[1.0], [1.0, 2.0]].", [[[1.0], [1.0, 2.0]]]),
    ("a 1-D float array or an (array, sampling rate) pair, got shape (2,), dtype object.", [1.0, None]),
    ("a sampling rate >= 1 in Hz, got 0.", (np.zeros(3), 0)),
    ("samples alone, since the spec states no sampling rate, got 8000 Hz. Send the array.", (np.zeros(3), 8000)),
    ("a sampling rate >= 1 in Hz, got inf.", (np.zeros(3), math.inf)),
    ("a sampling rate >= 1 in Hz, got True.", (np.zeros(3), True)),
    ("finite values of magnitude <= 65504, got NaN or an infinity.", [1.0, math.nan], np.array([math.inf])),
    ("finite values of magnitude <= 65504, got 1e+300.", np.array([1e300])),
]

REQUESTS = [
    ("spec.m, limit_mm_per_prompt: expected a count and length, got width=3. State other sizes as largest in the spec.",
     lambda: bound(item=Audio(largest=4)).largest(sizes={"width": 3})),
    ("spec.m: expected a video with metadata or a list of them, got None. Send the item, or leave the modality out.",
     lambda: parse(Video(largest=(4, 4, 4), metadata=True), None)),
    ("spec.prompt: expected a prompt that the spec can rewrite, got ValueError: 7 is not in list.",
     lambda: rewritten(lambda s: s.prompt.index(7))),
    ("spec.prompt: expected a prompt, since the placeholders depend on the Hugging Face processor, got none.",
     lambda: plan_of(modality(layout=embed(5) * fields.x.shape[0], process=hf())).spell({"m": torch.zeros(2, 2)})),
    ("spec.prompt: expected the layout of each item, got a prompt without some of them. "
     "Give what expand() returns, and the same items.",
     lambda: plan_of(modality(update=replace(9))).unexpand([9], {"m": torch.zeros(2, 2)})),
    ("spec.prompt: expected token ids, got a text. The model has no tokenizer.",
     lambda: ModelSpec("spec", modality()).bind(CONFIG).expand("text", {})),
    ("spec.m[1]: expected a (2, 2) float32 tensor, got None. Send the item itself.",
     lambda: PLAN.spell({"m": [torch.zeros(2, 2), None]}),
     lambda: PLAN.preview([5, 5], {"m": [torch.zeros(2, 2), None]})),
    ("spec.m: expected items that the Hugging Face processor takes, got ValueError: You have to specify text. "
     "Name a part, for example hf(proc.image_processor), or give hf(text=...).",
     lambda: plan_of(modality(process=hf()), processor=asking).preview([5], {"m": torch.zeros(2, 2)})),
    ("spec.m[0]: expected an item of mine, got another.",
     lambda: plan_of(modality(process=picky)).preview([5], {"m": torch.ones(2, 2)})),
    ("spec.multi_modal_data: expected modalities among ['m'], got 'x'.",
     lambda: PLAN.spell({"x": [0.0]}), lambda: PLAN.preview([5], {"x": [0.0]})),
    ("spec.multi_modal_data: expected modalities among ['m'], got 'm_embeds'. "
     'Send embeddings as {"m": {"m_embeds": ...}}.',
     lambda: plan_of(modality(embeds=True)).preview([5], {"m_embeds": torch.zeros(1, 2, 2)})),
    ("spec.multi_modal_data: expected modalities among ['m'], got 'm_embeds'. "
     "Send the raw items of m: the spec takes no embeddings of them.",
     lambda: PLAN.preview([5], {"m_embeds": torch.zeros(1, 2, 2)})),
    ("spec.m: expected a (2, 2) float32 tensor, got m_embeds. Send the raw item.",
     lambda: PLAN.preview([5], {"m": {"m_embeds": torch.zeros(1, 2, 2)}})),
    ("spec.m[0]: expected at most 3 encoder row(s), as the stated largest item has, got 4. Send a smaller item, "
     "or state a larger `largest=` in the spec.",
     lambda: CLIP.preview([5] * 4, {"m": {"m_embeds": torch.zeros(4, 2)}}),
     lambda: CLIP.preview([5] * 4, {"m": [0.0] * 4})),
    ("spec.m[0]: expected 1 embedding row(s), got 2.",
     lambda: plan_of(modality(embeds=True)).preview([5], {"m": {"m_embeds": torch.zeros(2, 4)}})),
    ("spec.m[1]: expected pixels of three channels, got shape (1, 4, 6), which may be embeddings. "
     'Send embeddings as {"m_embeds": ...}, and pixels as uint8, or as an array or tensor in a list.',
     lambda: PICTURES.intake.take([torch.zeros(3, 4, 6), torch.zeros(1, 4, 6)], 6)),
    ("spec.m[0]: expected a finite floating (rows, 6) tensor, got shape (4, 5). "
     'Send embeddings as {"m_embeds": ...}, and pixels as uint8, or as an array or tensor in a list.',
     lambda: PICTURES.intake.take(torch.zeros(3, 4, 5), 6)),
    ("spec.m: expected fewer items, got 2. At most 1 m(s) may be provided in one prompt.",
     lambda: plan_of(modality(limit=1)).preview([5, 5], {"m": torch.zeros(2, 2, 2)})),
    ("spec.prompt[1]: expected a token id from 0 to 199, got -1. Check the tokenizer.",
     lambda: PLAN.preview([1, -1], {}), lambda: PLAN.check_ids([1, -1])),
    ("spec.prompt[1]: expected a token id, got float 2.0. Send integers.", lambda: PLAN.check_ids([1, 2.0])),
    ("spec.prompt[1]: expected a token id, got bool True. Send integers.", lambda: PLAN.check_ids([1, True])),
    ("spec.prompt[2]: expected a token id from 0 to 199, got 200. Check the tokenizer.",
     lambda: PLAN.check_ids([1, 2, 200])),
    ('spec.m: expected one item per placeholder, got 2 placeholder id(s) 5 and no item. Send multi_modal_data={"m": '
     "[...]}, or leave the placeholders out.",
     lambda: PLAN.place([1, 5, 5], {}), lambda: PLAN.place([1, 5, 5], {"m": []})),
    ("spec.m: expected 1 placeholder(s) [3] in the prompt for 1 item, got 2, and 1 placeholder id(s) beside. Write "
     "one placeholder per item, and nothing else with its id.",
     lambda: put([3, 1, 3, 5], "replace", [3])),
    ("spec.m: expected a prompt without placeholder ids, got 1 of them. Leave them out: the items' placeholders are "
     "inserted.",
     lambda: put([1, 5], "start", [])),
    ("spec.m: expected one item per placeholder, got the placeholder [2] without its item. Send the item, or leave "
     "the placeholder out.",
     lambda: place([1, 2], {}, "spec", {(2,): "m"})),
    ("spec.m[0]: expected a (frames, metadata) pair, got frames without metadata.",
     lambda: parse(Video(largest=(2, 4, 4), metadata=True), FRAMES)),
    ("spec.m[1]: expected a (2, 2) float32 tensor, got shape (3,).",
     lambda: parse(Tensor(shape=(2, 2)), [torch.zeros(2, 2), torch.zeros(3)])),
    ("spec.m[0].a: expected a (1..4,) int64 tensor, got shape (5,).",
     lambda: parse(RECORD, {"a": [1] * 5, "b": [1.0]})),
    ("spec.m[0].a: expected a text of 1..2 characters, got None.", lambda: parse(Record(a=Text(2)), {"a": None})),
    ("spec.m[1].b: expected a (2,) float32 tensor, got shape (1,).",
     lambda: parse(RECORD, [{"a": [1], "b": [1.0]}, {"a": [1, 2], "b": [1.0]}])),
    ("spec.m: expected a dict of a and b or a list of them, got int 3.", lambda: parse(RECORD, 3)),
    ("spec.m: expected a text of 1..2 characters or a list of them, got int 3.", lambda: parse(Text(most=2), 3)),
]
"""Requests that are refused."""

MISSING = [
    ("spec.m: expected 1 placeholder(s) [3] in the prompt for 1 item, got 0. Write "
     "one placeholder per item, and nothing else with its id.",
     lambda: put([1], "replace", [3])),
    ("spec.m: expected 2 placeholder(s) [5] * 2 in the prompt for 2 items, got 1, and 1 placeholder id(s) beside. "
     "Write one placeholder per item, and nothing else with its id.",
     lambda: put([5, 5, 5], "in_place", [], count=2)),
    ("spec.m: expected 1 placeholder(s) [0, 1, 2, 3, ... 20 ids] in the prompt for 1 item, got 0. "
     "Write one placeholder per item, and nothing else with its id.",
     lambda: put([1], "replace", range(20))),
    ("spec.m: expected a prompt that starts with [7, 8], got one that starts with [1, 2].",
     lambda: put([1, 2, 3], "after", [7, 8])),
    ("spec.m[1]: expected the placeholder [72] in the prompt, after those of the items before it, got none. Write "
     "one placeholder per item, in order.",
     lambda: place([71], {"m": [[alternative("replace", [n], [5])] for n in (71, 72)]}, "spec"),
     lambda: place([72, 71], {"m": [[alternative("replace", [n], [5])] for n in (71, 72)]}, "spec")),
    ("spec.m[1]: expected the placeholder [5] * 3 in the prompt, after those of the items before it, got none. Write"
     " one placeholder per item, in order.",
     lambda: place([5, 5], {"m": [[alternative("in_place", [], [5] * n)] for n in (2, 3)]}, "spec")),
]
"""Requests that lack a placeholder."""
# fmt: on


def rows(error, before, provoke, table):
    return [(error, before + text, provoke, way) for text, *ways in table for way in ways]


ITEM = "spec.m[0]: expected "
TENSOR = Tensor(shape=(2, 2))
ROWS = [
    *rows(SpecError, "", lambda options: modality(**options), MODALITIES),
    *rows(SpecError, "", lambda call: call(), SPECS),
    *rows(SpecError, "spec.m, ", lambda options: bound(**options), BOUND),
    *rows(SpecError, "spec.m", lambda way: bound(process=lambda items, scope: way[0], fields=way[1]), PROCESSED),
    *rows(InputError, f"{ITEM}a (2, 2) float32 tensor, got ", lambda data: parse(TENSOR, data), TENSORS),
    *rows(InputError, "spec.m: expected ", lambda data: parse(TENSOR, data), CONTAINERS),
    *rows(InputError, ITEM, lambda way: parse(*way), VALUES),
    *rows(InputError, ITEM, lambda data: parse(Image(largest=(4, 4)), data), IMAGES),
    *rows(InputError, ITEM, lambda data: parse(Video(largest=(2, 4, 4)), data), VIDEOS),
    *rows(InputError, ITEM, lambda data: parse(Audio(largest=4), data), SOUNDS),
    *rows(InputError, "", lambda call: call(), REQUESTS),
    *rows(NotFound, "", lambda call: call(), MISSING),
]


@pytest.mark.parametrize(
    ("error", "text", "provoke", "way"), ROWS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_message(error, text, provoke, way):
    with pytest.raises(error) as caught:
        provoke(way)
    assert type(caught.value) is error
    assert str(caught.value) == text


def test_style():
    """Whole sentences, nothing doubled, and what is wrong is named once."""
    for _, text, *_ in ROWS:
        assert text.endswith("."), text
        assert not re.search(r"(?<!\.)\.\.(?!\.|[0-9a-z])", text), text
        assert "  " not in text
        assert not re.search(r"\b(\w+): \1\b", text), text

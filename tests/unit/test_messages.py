"""The sentences of SpecError and InputError that a user meets, each with what provokes it.

A row is a sentence and one or more ways to get it; ``…`` in a sentence stands for words that another row, or the
value in the row itself, has. Branches of one condition are ways or rows of their own, other words in the same place
are not.
"""

import math
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from torch.nn.utils.rnn import pad_sequence

from mmkit import (
    Audio,
    Image,
    InputError,
    ModelSpec,
    Output,
    Record,
    SpecError,
    Tensor,
    Text,
    Video,
    already_expanded,
    any_id,
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
    select,
    tok,
    where,
)
from mmkit.language.expr import Scope, evaluate
from mmkit.language.field import identity
from mmkit.language.vocabulary import Vocabulary
from mmkit.plan.bind import plan_for_options
from mmkit.plan.layouts import TooManyRows
from mmkit.plan.placement import NotFound, PromptForm, place

from .common import CONFIG, Tokenizer
from .common import bind_modality as bound
from .common import bind_plan as plan_of
from .common import expect_refusal as refused
from .common import make_item_layout as alternatives
from .common import make_modality as modality

PIXELS, FRAMES = np.zeros((4, 5, 3), np.uint8), np.zeros((2, 4, 5, 3), np.uint8)
LONGER, WIDER = np.zeros((4, 4, 3)), np.zeros((4, 5, 3))
SPARSE = torch.zeros(3, 4, 5).to_sparse()
PICTURE = PILImage.new("RGB", (5, 4))

TEXT, GENES, RAW = Text(most=cfg.n), Tensor((between(1, 4),), "int64"), dict(layout=None, update=None, tokens=0)
RECORD = Record(a=GENES, b=Tensor((item.a.length,)))
CLICKED = Record(image=Image((9, 9)), x=Tensor((1,), "int64", bound=between(0, item.image.width - 1)))
TENSOR = Tensor(shape=(2, 2))
INDICES, BYTES = Tensor(shape=(2,), dtype="int64"), Tensor(shape=(2,), dtype="uint8")
HALF, MASK = Tensor(shape=(2, 2), dtype="float16"), Tensor(shape=(2,), dtype="bool")

WORDS = Vocabulary(Tokenizer())
SPEC, PLAN = ModelSpec("spec", modality()), plan_of(modality())
NO_VOCABULARY, MILLIONS = SimpleNamespace(n=2), SimpleNamespace(n=2, vocab_size=2_000_000)
NUMBERED = replace(tok["<|image_{}|>", item.index + 1])
GROWING, LONG, WITHOUT = Tensor((between(1, 4),)), Tensor((between(1, 9),)), plan_of(modality(**RAW))
OTHER, NAMESAKE = modality("n", fields={"y": batched()}), modality("n", fields={"m_embeds": batched()})
ALONE, ZEROS, BOTH = modality(**RAW), torch.zeros(2, 2), {"x": batched(), "y": batched()}
TWO = [ZEROS, None]
NUMBERS = {"x": batched(), "n": derived(item.index)}
STATED = dict(shape=(), dtype="int64")
UNTOLD = [batched(shape=()), batched(dtype="int64"), batched(**STATED, hidden=True), flat(1, **STATED)]
COMPANIONS = {"n": batched(**STATED), "k": batched(**STATED)}
PICTURES = bound(item=Image(largest=(9, 9)), process=hf(), embeds=True)


def nested(levels):
    return [nested(levels - 1)] if levels else 1.0


def shaped(*shape, **options):
    return dict(item=Tensor(shape=shape, **options))


def returning(way):
    returned, field = way
    return bound(process=lambda items, scope: returned, fields={"x": field})


def recorded(**parts):
    return dict(item=Record(**parts), process=hf(), cacheable=False)


def without_tokenizer(layout):
    return ModelSpec("spec", modality(layout=layout)).bind(CONFIG)


def ending_at(eos_token_id):
    config = SimpleNamespace(n=2, vocab_size=200, eos_token_id=eos_token_id)
    assert ModelSpec("spec", modality(layout=embed(3))).bind(config).embed_ids == {3}
    assert ModelSpec("spec", modality(layout=embed(2))).bind(config, Tokenizer()).embed_ids == {2}
    frame = Output("frame", any_id(0, 2) * 2, lambda ids, _: ids)
    assert ModelSpec("spec", modality(layout=embed(2)), outputs=[frame]).bind(config).embed_ids == {2}
    return ModelSpec("spec", modality(layout=embed(2))).bind(config)


def parse(kind, data):
    return bound(item=kind, process=hf()).parser.parse_raw_items(data)


def preview(data, prompt=(5,), processor=None, **options):
    return plan_of(modality(**options), processor=processor).preview(list(prompt), data)


spelling = dict(
    item=Record(a=Text(12)), layout=embed(tok["<image>"]), update=replace(tok["<im_end>"]),
    process=lambda items, scope: {"x": torch.zeros(len(items), 2)},
)  # fmt: skip


def strict(items, scope):
    for text in items:
        if {*text} - {*"CNO=()"}:
            raise InputError("m", "a SMILES", repr(text))
    return {"x": torch.zeros(len(items), 2)}


def in_tensors(items, scope):
    return {"x": [torch.tensor(value) for value in items]}


def clipped(data):
    rows = dict(layout=embed(5) * item.length, embeds=embed(5) * item.rows, process=in_tensors)
    return preview({"m": data}, [5] * 4, item=Audio(largest=3), **rows)


def beside(rows, **told):
    """Embeddings with the fields that their layout reads."""
    own = bound(layout=embed(5) * (fields.n + fields.k), fields=COMPANIONS, embeds=True, process=hf())
    own.parser.parse({"m_embeds": rows, **told}, 2)


def put(prompt, *ways):
    """Place an item by each of these ways, a kind and a target."""
    return place(prompt, {"m": [alternatives([5, 5], [way]) for way in ways]}, "spec")


def odd(length):
    """A function of a library that takes no item of two rows."""
    if length == 2:
        raise ValueError("too odd.")
    return length


ODD = [
    dict(layout=embed(5) * later(odd)(item.length)),
    dict(layout=lambda scope: embed(5) * odd(scope.item.length)),
    dict(layout=embed(5) * fields.n, fields={"x": batched(), "n": derived(later(odd)(item.length))}),
]


def put_two(prompt):
    """Place two images, whose target is 1, and a video, whose layout has a 1 in it."""
    image = alternatives([1, 1], [("replace", [1])], embeds=(1,))
    video = alternatives([7, 1, 8], [("replace", [3])], embeds=(1,))
    return place(prompt, {"image": [image] * 2, "video": [video]}, "spec")


def rewritten(value):
    return plan_of(modality(), prompt=value).rewrite("prompt", [1, 2])


def asking(**inputs):
    """As processors of models with a text do."""
    raise ValueError("You have to specify text.")


def picky(items, scope):
    """A process that refuses an item itself."""
    if not items[0].any():
        return {"x": items}
    raise InputError("spec.m[0]", "an item of mine", "another")


# fmt: off
MODALITIES = [
    (", item: expected an item type, got 'tensor'.", dict(item="tensor")),
    (", item: expected an item type, got (1024, 3). Write Tensor((1024, 3)).", dict(item=(1024, 3))),
    (", item: expected an item type, got <class …>. Write Tensor(...).", dict(item=Tensor)),
    (", item: expected an item type, got {'a': …}. Write Record(...).", dict(item={"a": TEXT})),
    (": expected placeholder and tokens together, or layout, got placeholder without tokens. Add tokens=, the number …",
     dict(layout=None, update=None, placeholder="<image>")),
    (": expected placeholder and tokens together, or layout, got tokens without placeholder. Add placeholder=, …",
     dict(layout=None, update=None, tokens=5), dict(layout=None, tokens=0)),
    (": expected …, or layout, got layout beside them. Leave …", dict(placeholder="<image>", tokens=5)),
    (": expected …, or layout, got layout beside one. Leave …", dict(tokens=5), dict(placeholder=5)),
    (": expected placeholder and tokens, or layout and update, got layout alone. Add update=.", dict(update=None)),
    (": expected placeholder and tokens, or layout and update, got update alone. Add layout=.", dict(layout=None)),
    (": expected placeholder and tokens, or layout and update, got neither.", dict(layout=None, update=None)),
    (": expected at least one update, got none.", dict(update=[])),
    (", cacheable: expected True, False or a condition, got 'no'.", dict(cacheable="no")),
    (", update: expected replace(), insert(), already_expanded() or a list of them, got 5.",
     dict(update=5), dict(update=[5])),
    (", positions: expected (t, h, w) or (t, h, w, scale), got (1, 2).", dict(positions=(1, 2))),
    (", positions: expected …, got an item without positions.", dict(RAW, positions=(1, 1, 1))),
    (", positions: expected fields that …, got item.length. Declare …", dict(positions=(1, item.length, 1))),
    (", positions: expected fields that …, got fields.x. Declare …",
     dict(positions=(1, fields.x, 1), fields={"x": batched(hidden=True)})),
    (": expected limit=1 for an item without positions, got 2.", dict(RAW, limit=2)),
    (": expected no embeds for an item without positions, got True.", dict(RAW, embeds=True)),
    (": expected at least one field, got none.", dict(fields={})),
    (", fields: expected a dict of batched(), flat(), … or constant(), got ['x'].", dict(fields=["x"])),
    (", fields['x']: expected batched(), flat(), … or constant(), got 'batched'.", dict(fields={"x": "batched"})),
    (", fields['x']: expected batched(), flat(), … or constant(), got batched without its (). Write batched().",
     dict(fields={"x": batched})),
    (": expected a Tensor item and one field, …, got … and fields ['x', 'y'].", dict(fields=BOTH)),
    (": expected …, or a process, got Audio(…) and fields ['x'].", dict(item=Audio(5), process=identity())),
    (": expected a field for each of ['a'], …, got Record(…) and …", dict(item=Record(a=TEXT), process=identity())),
    (": expected hf() or a function for process, got 5.", dict(process=5)),
    (", process: expected a function of the items and a Scope, got one that takes another number of …. Write (items, …",
     dict(process=lambda items: items), dict(process=lambda items, scope, more: items)),
    (": expected unpad to name fields among ['x'], got ['y'].", dict(process=hf(unpad={"y": 3}))),
    (", fields.z: expected a field among ['x'], got 'z'. Declare it in fields.",
     dict(layout=embed(5) * fields.z), dict(layout=embed(5) * where(item.a, fields.z, 1)),
     dict(fields={"x": flat(fields.z)}), dict(fields={"x": batched(shape=(fields.z,))}),
     dict(update=replace(fields.z)), dict(process=hf(unpad={"x": fields.z})), dict(embeds=embed(5) * fields.z)),
    (", fields['z'][0].a: expected a field among ['x'], got 'z'. …", dict(layout=embed(5) * fields["z"][0].a)),
    (", embeds: expected a layout over item.rows, …, got True.", dict(layout=embed(5) * item.length, embeds=True)),
    (", embeds: expected True, a layout, or flat(item.rows) where layout and targets read fields, got flat(item.rows).",
     dict(embeds=flat(item.rows)), dict(layout=embed(5) * fields.x[0], update=NUMBERED, embeds=flat(item.rows),
                                        fields={"x": batched(shape=(1,), dtype="int64")})),
    (", embeds: expected True, a layout, or …, got batched().", dict(embeds=batched())),
    (", fields['x']: expected a batched field with shape and dtype, …",
     *[dict(layout=embed(5) * fields.x, embeds=True, fields={"x": told}) for told in UNTOLD]),
    (": expected no part or field named m_embeds, …, got one.", dict(fields={"m_embeds": batched()}, embeds=True)),
    (": expected no part or field named m_embeds, …, got one.", dict(item=Record(m_embeds=TEXT))),
    (", fields['attention_mask']: expected a name that nothing else has beside the fields, got 'attention_mask', a key "
     "of the trainer's batch. Call the field m_attention_mask, for example.",
     dict(fields={"attention_mask": batched()})),
    (", fields['labels']: …, got 'labels', …. Rename the output: hf(outputs={'labels': 'm_labels'}).",
     dict(fields={"labels": batched()}, process=hf())),
    (", fields['position_ids']: …, got 'position_ids', an argument of the language model. …",
     dict(fields={"position_ids": batched()})),
    (", fields['positions']: …, got 'positions', an argument of the model's forward. …",
     dict(tokens=0, layout=None, update=None, fields={"positions": batched()})),
    (", fields['mmkit_m_rows']: …, got 'mmkit_m_rows', a name of mmkit's own fields. …",
     dict(fields={"mmkit_m_rows": batched()})),
    (", fields['a-b']: expected a name that is a Python identifier, got 'a-b'.", dict(fields={"a-b": batched()})),
    (", fields['self']: …, got 'self', …", dict(fields={"self": batched()})),
    (": expected cacheable to …, got none. Write …", dict(layout=embed(5) * item.count)),
    (": expected fields that do not read item.index, …, got some that do. Read …", dict(fields=NUMBERS)),
]
"""Options of `modality()`; after `modality 'm'`."""

SPECS = [
    ("modality 'a b': expected a name that is a Python identifier, got 'a b'.", lambda: modality(name="a b")),
    ("modality 'text': expected a name that nothing else has beside the items, got 'text', an argument of the "
     "trainer's processor. Give the modality another name.", lambda: modality("text")),
    ("modality 'answer': …, got 'answer', a key of a sample of the trainer's collator. …", lambda: modality("answer")),
    ("modality 'refusal': …, got 'refusal', a part of vLLM's chat messages. …", lambda: modality("refusal")),
    ("modality 'multimodal': …, got 'multimodal', what vLLM's models embed. …", lambda: modality("multimodal")),
    ("modality 'self': …, got 'self', the first argument of every method. …", lambda: modality("self")),
    ("modality 'lambda': …, got 'lambda', a keyword of Python. …", lambda: modality("lambda")),
    ("modality 'm_embeds': …, got 'm_embeds', a name of precomputed embeddings. …", lambda: modality("m_embeds")),
    ("modality 'inputs': expected a name that nothing else has, with _embeds behind it, got 'inputs_embeds', an "
     "argument of the language model. Give …", lambda: modality("inputs", embeds=True)),
    ("spec 'a b': expected a name that is a Python identifier, got 'a b'.", lambda: ModelSpec("a b", modality())),
    ("spec 'a': expected at least one modality, got none.", lambda: ModelSpec("a")),
    ("spec 'a': expected modalities, each as an argument of its own, got a list. Write …",
     lambda: ModelSpec("a", [OTHER])),
    ("spec 'a': expected modalities, each as an argument of its own, got a str.", lambda: ModelSpec("a", "m")),
    ("between(): expected whole numbers >= 0, in order, got -1..5.", lambda: between(-1, 5)),
    ("between(): expected whole numbers >= 0, in order, got 5..1.", lambda: between(5, 1)),
    ("between(): expected whole numbers >= 0, in order, got 1..2.5.", lambda: between(1, 2.5)),
    ("spec, bind: expected a config, then a tokenizer, got a SimpleNamespace as tokenizer. Write bind(config, …",
     lambda: SPEC.bind(Tokenizer(), CONFIG)),
    ("spec 'a': expected one modality named 'n', got several.", lambda: ModelSpec("a", modality("n"), OTHER)),
    ("spec 'a': expected one field named 'x', got several.", lambda: ModelSpec("a", modality(), modality("n"))),
    ("spec 'a': expected one field named 'm_embeds', …", lambda: ModelSpec("a", modality(embeds=True), NAMESAKE)),
    ("spec 'a': expected nothing beside a modality …, got m, n.", lambda: ModelSpec("a", ALONE, OTHER)),
    ("spec 'a': expected nothing beside …, got m, prompt.", lambda: ModelSpec("a", ALONE, prompt=ending_with(7))),
    ("spec 'a', m: hf(inputs=...): expected arguments among ['audios'], got ['audio'].",
     lambda: ModelSpec("a", modality(item=Audio(largest=3), process=hf(inputs={"audio": "sound"})))),
    ("a, merges: expected a character …, got '\\u2028'.", lambda: ModelSpec("a", OTHER, merges="\u2028").bind(CONFIG)),
    ('insert(): expected at="start" or after=a prefix, got nothing.', insert),
    ("processor of hf(): expected an object that is called like a Hugging Face processor, got <class 'int'>. Give an "
     "instance: int(), or later(int)(...) of what the config says.", lambda: hf(int)),
    ("processor of hf(): expected an object …, got 3.", lambda: hf(3)),
    ("spec.m, process: expected an object that is called like …, for hf(), got 2.",
     lambda: preview({"m": ZEROS}, process=hf(cfg.n))),
    ("insert(): expected …, got at='middle'.", lambda: insert(at="middle")),
    ("insert(): expected …, got at='start', after=5.", lambda: insert(at="start", after=5)),
    ("layout: expected token ids, got '<image>'. Write tok['<image>'] for one token or tok.text('<image>') for text.",
     lambda: "<image>" + embed(5), lambda: embed(5) + "<image>", lambda: each(2, lambda x: "<image>"),
     lambda: modality(layout="<image>")),
    ("replace(): expected token ids, got '<image>'. Write …", lambda: replace("<image>")),
    ("insert(): expected token ids, got '<image>'. Write …", lambda: insert(after="<image>")),
    ("embed(): expected one token id, got '<image>'. Write embed(tok[\"<image>\"]) or …", lambda: embed("<image>")),
    ("embed(): expected one token id, got tok.text('ab'). Write …", lambda: embed(tok.text("ab"))),
    ("embed(): expected one token id, got embed(1) * 2. Write …", lambda: embed(embed(1) * 2)),
    ("cfg.a + cfg.b + embed(5): expected layouts, got ids, which are not added. Write literal(cfg.a, cfg.b) for …",
     lambda: cfg.a + cfg.b + embed(5)),
    ("spec: expected a modality whose when= holds for the config, got none.", lambda: plan_of(modality(when=False))),
    ("dtype of a field: expected a torch dtype or its name, got 'nn'.", lambda: batched(dtype="nn")),
    ("Tensor.dtype: expected one of float16, …, bool, got 'float'.", lambda: Tensor(shape=(), dtype="float")),
    ("Tensor.shape: expected a tuple of sizes, one per dimension, got 3.", lambda: Tensor(shape=3)),
    ("Record: expected at least one part, got none.", lambda: Record()),
    ("Record.a: expected a Tensor, a Text, an Image, a Video or an Audio, got "
     "<class 'mmkit.language.items.tensor.Text'>.", lambda: Record(a=Text)),
    ("Record: expected a part that is not called index, count, rows or _..., got 'count'.", lambda: Record(count=TEXT)),
    ("cfg.zzz has no value: object has no attribute 'zzz'.", lambda: evaluate(cfg.zzz, Scope(cfg=object()))),
    ("cfg.b has no value: dict …. It has: c, d.", lambda: evaluate(cfg.b, Scope({"c": 1, "d": 2}))),
    ("fields.x has no value: the … fields lack 'x'. It has: y.", lambda: evaluate(fields.x, Scope(fields={"y": 1}))),
    ("cfg.sizes[2] has no value: cfg.sizes is [1].", lambda: evaluate(cfg.sizes[2] + 1, Scope(cfg={"sizes": [1]}))),
    ("cfg[9] has no value: cfg is {'" + "a" * 74 + "'....", lambda: evaluate(cfg[9], Scope(cfg={"a" * 74: 1}))),
    ("cfg has no value here: the spec is not bound to a config.", lambda: evaluate(cfg.a, Scope())),
    ("cfg.n + cfg.text has no value: unsupported …, with 2, 'x'.", lambda: evaluate(cfg.n + cfg.text, Scope(CONFIG))),
    ("config: expected a vocab_size in …, got None.", lambda: SPEC.bind(None), lambda: SPEC.bind(NO_VOCABULARY)),
    ("config: expected a vocab_size of at most 1114111, got 2000000.", lambda: SPEC.bind(MILLIONS)),
    ("spec.m, layout: tok['<image>'] has no value: … without a …. Use …",
     lambda: without_tokenizer(embed(tok["<image>"]))),
    ("spec.prompt: expected literal ids, since …, got embed().", lambda: rewritten(ending_with(embed(5)))),
    ("spec.prompt: expected token ids below the vocabulary size 200, got 200. …", lambda: rewritten(ending_with(200))),
    ("spec.m, process: cfg.zzz has no value: …", lambda: bound(process=hf(cfg.zzz)).field_processor.hf_call.part),
    ("spec.m, layout: expected embed() of ids that the largest …, got [6]…", lambda: preview(
        {"m": torch.zeros(5)}, [6], item=LONG, layout=lambda s: embed(5 + s.item.length // 4))),
    ("spec.n, update: expected a target that no other modality has, got 'µ', which is that of m too. Give each …",
     lambda: plan_of(modality(update=replace(181)), modality("n", update=NUMBERED, fields={"y": batched()}))),
    ("spec.m, item: expected the most encoder rows for the largest item, got 1, and 4 for the smallest. State …",
     lambda: bound(item=Tensor(shape=(between(1, 4), 2)), layout=embed(5) * (5 - item.length))),
    ("spec.m, layout: expected a placeholder id that no text has, got 2, the config's eos_token_id, with which an "
     "answer ends. Use …", *[partial(ending_at, end) for end in (2, [1, 2])]),
    ("spec.m, layout: expected 1 embed() position(s) whatever item.index is, as for the first item, got 2. Say by "
     "cacheable=False that an item depends on its position.", lambda: bound(layout=embed(5) * (item.index + 1))),
    ("the largest item that mmkit made is refused: m: expected a SMILES, got 'aa'. State its "
     "alphabet=, or a text as largest=.", lambda: bound(item=Text(2), process=strict)),
    ("spec, process: expected a Hugging Face processor for hf(), got none. Bind the spec with processor=.",
     lambda: preview({"m": ZEROS}, process=hf())),
]
"""Declarations, and expressions by themselves."""

ZZZ = "cfg.zzz has no value: SimpleNamespace has no attribute 'zzz'."
OUTSIDE = ": expected token ids below the vocabulary size 200, got 200. Use a reserved id inside the vocabulary: vLLM …"
BOUND = [
    ("layout: proc has no value here: the model has no Hugging Face processor.", dict(layout=embed(proc.a))),
    ("limit: item has no value here: it describes one raw item and is only known …", dict(limit=item.length)),
    ("limit: fields has no value here: it holds … only known after processing.", dict(limit=fields.x)),
    ("limit: cfg.sise has no value: SimpleNamespace has no attribute 'sise'. It has: size.", dict(limit=cfg.sise)),
    ("layout: expected placeholder ids that no item chooses, got …. Choose …",
     dict(layout=embed(40 + fields.x)), dict(layout=select(tok.text("ab"), embed=fields.x)),
     dict(embeds=embed(item.rows))),
    ("layout: expected a placeholder id that no text has, got 153, the token 'word'. Use …", dict(layout=embed(153))),
    ("layout: expected a placeholder id that no text has, got 151, with which …", dict(layout=embed(151))),
    ("layout: expected a placeholder id that no text has, got 152, which stands for every text that the tokenizer does "
     "not know. Use …", dict(layout=embed(152))),
    ("update: tok.text('\N{SNOWMAN}') has no value: the tokenizer has no token for a part of …",
     dict(update=replace(tok.text("\N{SNOWMAN}")))),
    ("update: tok.text('{}', item.shape) has no value: item.shape is neither a text nor a number but a tuple.",
     dict(update=replace(tok.text("{}", item.shape)))),
    ("fields['n']: item.index has no value here: items are cached by their content. Say …",
     dict(fields={"x": batched(), "n": derived(lambda scope: scope.item.index)})),
    ("layout: item.count has no value here: …", dict(layout=lambda scope: embed(5) * scope.item.count)),
    ("process: expected process to return the same x for an item, …, got different values when other items were …",
     dict(item=Tensor((between(1, 2),)), process=lambda items, scope: {"x": pad_sequence(items, True)}),
     dict(process=lambda items, scope: {"x": [value + len(items) / 100 for value in items]})),
    ("process: expected process to return the same x …, got different values when it was processed again, …",
     dict(process=lambda items, scope: {"x": torch.rand(len(items), 2)})),
    ("process: expected process to leave the items as they are, got another value in one of them. They are the …",
     dict(process=lambda items, scope: {"x": [value.mul_(2) for value in items]})),
    (f"layout: {ZZZ}",
     dict(layout=embed(5) * (item.length + cfg.zzz)), dict(layout=each(item.length, lambda x: embed(cfg.zzz))),
     dict(layout=where(item.length < 3, embed(cfg.zzz), embed(5) * fields.x))),
    (f"update: {ZZZ}", dict(update=replace(cfg.zzz)), dict(update=insert(after=cfg.zzz))),
    (f"fields: {ZZZ}", dict(fields={"x": batched(shape=(cfg.zzz,))}), dict(fields={"x": flat(cfg.zzz)})),
    (f"embeds: {ZZZ}", dict(embeds=embed(cfg.zzz))),
    (f"process: {ZZZ}", dict(process=hf(text=cfg.zzz)), dict(process=hf(unpad={"x": cfg.zzz}))),
    (f"when: {ZZZ}", dict(when=cfg.zzz)),
    (f"item: Tensor.shape: {ZZZ}", shaped(cfg.zzz)),
    ("layout: tok['<imgae>']: expected a token …. Near: '<image>', …. Use tok.text('<imgae>') …",
     dict(layout=embed(tok["<imgae>"]))),
    ("layout: tok['zzz']: expected a token …, got a text that is none. …", dict(layout=embed(tok["zzz"]))),
    ("layout: tok[2]: expected the text of one token, got int. Use an id as it is.", dict(layout=embed(tok[cfg.n]))),
    ("limit: cfg.size // (cfg.n - 2) has no value: … by zero, with 7, 0.", dict(limit=cfg.size // (cfg.n - 2))),
    ("layout: cfg.n * 0.5: expected a token id, …, got 1.0. Use math.floor(), …", dict(layout=embed(cfg.n * 0.5))),
    ("layout: embed(5) * 1000000000: expected at most 4194304 ids, got 1000000000.", dict(layout=embed(5) * 10**9)),
    ("layout: each(…): expected at most 4194304 ids, got 6000000.", dict(layout=each(3, lambda x: embed(5) * 2000000))),
    ("item: Tensor.shape[1] = cfg.n - 4: expected whole numbers >= 0, in order, got -2.", shaped(3, cfg.n - 4)),
    ("item: Tensor.shape[0] = …", *map(shaped, (cfg.n * 1.0, True, between(3, cfg.n), between(cfg.minus, 3)))),
    ("item: Tensor.shape: item has no value here: …", shaped(item.length)),
    ("item: Tensor.bound: expected a number > 0 …", *[shaped(1, bound=number) for number in (0, math.nan, True)]),
    ("item: Tensor.bound: expected a number, got 0..3 of float32. State …", shaped(1, bound=between(0, 3))),
    ("item: Tensor.bound: expected values that uint8 …, got 0..256.", shaped(1, dtype="uint8", bound=between(0, 256))),
    ("item: Tensor.bound: expected whole numbers >= 0, …, got -1..3.",
     shaped(1, dtype="int8", bound=between(cfg.minus, 3))),
    ("item: Tensor.largest: expected a shape within (1..4, 3), got (5, 3).", shaped(between(1, 4), 3, largest=(5, 3))),
    ("item: Record.b: Tensor.shape: item.c has …", recorded(a=TEXT, b=Tensor((item.c.length,)))),
    ("item: Record.a: Text.least, Text.most: expected …, got 1..0.", recorded(a=Text(most=cfg.n - 2))),
    ("item: Text.alphabet: expected a text of at least one character, got ''.", dict(item=Text(2, alphabet=""))),
    ("item: Text.largest: expected at least one text, got none.", dict(item=Text(2, largest=[]))),
    ("item: Text.largest: expected a text of 1..2 characters, got int 2.", dict(item=Text(2, largest=cfg.n))),
    ("item: Text.largest: expected a text of 1..2 characters among 'ab', got 'c' at 1.",
     dict(item=Text(2, alphabet="ab", largest=["ab", "bc"]))),
    ("item: Audio.largest: expected … of at most 50 samples, got 51 …", dict(item=Audio(51, most=50))),
    ("item: Audio.most: expected whole numbers >= 0, in order, got -1.", dict(item=Audio(9, most=cfg.minus))),
    ("item: Image.largest: expected 2 …", *[dict(item=Image(row)) for row in (5, (3, 0), (1.5, 2), [(1, 2), (3,)])]),
    ("item: Audio.largest: expected 1 whole number(s) >= 1, got (-1,).", dict(item=Audio(largest=cfg.minus))),
    ("item: Audio.bound: expected a number > 0 from cfg, got -1.", dict(item=Audio(largest=4, bound=cfg.minus))),
    ("item: Audio.rate: expected a number > 0 from cfg, got -1.", dict(item=Audio(largest=4, rate=-1))),
    ("limit: 1.5: expected the most items, a whole number >= 0, got 1.5. Use math.floor(), …", dict(limit=1.5)),
    ("limit: …: expected the most items, a whole number >= 0, got ….", dict(limit=-1), dict(limit=True)),
    ("layout: expected at least one placeholder per item, got 2 other tokens for an item of shape (2, 2). Round up …",
     dict(layout=literal([1, 2]))),
    ("layout: expected at least one placeholder per item, got none for an item of shape (2,). Round …",
     dict(item=Tensor(shape=(between(2, 4),)), layout=embed(5) * (item.length - 2))),
    (f"layout{OUTSIDE}",
     dict(layout=embed(200)), dict(layout=embed(tok["<far>"])), dict(layout=embed(5) + literal(200)),
     dict(layout=embed(5) + each(fields.x.shape[0], lambda x: literal(200))),
     dict(layout=where(item.length < 3, embed(5), embed(200))), dict(embeds=embed(200) * item.rows)),
    (f"update{OUTSIDE}", dict(update=replace([1, 200])), dict(update=[already_expanded(), replace(200)])),
    ("update: expected a target of at least one token, got none.", dict(update=replace([]))),
    ("process: expected to take well-formed items, got KeyError: 'x'.", dict(process=lambda items, scope: {}["x"])),
    ("layout: expected a value, got StopIteration.", dict(layout=lambda scope: next(iter(())))),
    ("item: expected one largest item, since only the Hugging Face processor tells its rows, got 2 of them. State …",
     dict(item=Tensor(GROWING.shape, largest=[(4,), (1,)]), layout=embed(5) * fields.x[0], process=hf())),
    ("update: expected a value, got AttributeError: … no attribute 'x'.", dict(update=replace(lambda s: s.item.x))),
]
"""Options of a modality that is bound; after `spec.m, `."""

PROCESSED = [
    (", process: expected a dict of tensors, got int.", (3, batched())),
    (", process: expected the fields ['x'], got [], without ['x'].", ({}, batched())),
    (", process: expected the fields ['x'], got ['x'], without ['x'].", ({"x": None}, batched())),
    (": expected process to return declared fields, ['x'], got ['y']. Declare them in fields, or do not return them.",
     ({"x": torch.zeros(1), "y": [2]}, batched())),
    (": expected process to return declared fields, [], got ['x']. Declare …", ({"x": [1]}, derived(1))),
    (", fields['x']: expected a tensor with a dimension 0, got shape ().", ({"x": torch.zeros(())}, batched())),
    (", fields['x']: expected a tensor with a dimension 0, got int.", ({"x": 3}, batched())),
    (", fields['x']: expected a … dimension 1, got shape (4,).", ({"x": torch.zeros(4)}, flat(item.length, dim=1))),
    (", fields['x']: expected a … dimension -2, got shape (4,).", ({"x": torch.zeros(4)}, flat(item.length, dim=-2))),
    (", fields['x']: expected a … dimension 1, got ndarray.", ({"x": np.zeros((3, 4))}, flat(item.length, dim=1))),
    (", fields['x']: <lambda>: expected a size, …, got 0.5. …", ({"x": torch.zeros(4)}, flat(lambda s: 0.5))),
    (", fields['x']: item 0: expected dtype int64, got float32.", ({"x": torch.zeros(1)}, batched(dtype="int64"))),
    (", fields['x']: item 0: expected dtype int64, got list.", ({"x": [[0.0]]}, batched(dtype="int64"))),
    (", fields['x']: item 0: expected shape (1,) per item, got ().", ({"x": [[0]]}, batched(shape=(1,)))),
    (", fields['x']: item 0: expected shape (2,) …", ({"x": torch.zeros(1, 3)}, batched(shape=(item.length,)))),
    (", fields['x']: item has no value here: it describes one raw item …", ({}, constant(item.length))),
    (", fields['x']: value: expected numbers for a int64 tensor, got ….", ({}, derived("a", dtype="int64"))),
]
"""What `process` returns, and how the field x is declared; after `spec.m`."""

TENSORS = [
    ("dict {'a': 1}.", [{"a": 1}]),
    ("dtype bool. Convert it to float32.", np.zeros((2, 2), bool), torch.zeros(2, 2, dtype=torch.bool)),
    ("dtype >f4. Convert it to float32.", np.zeros((2, 2), ">f4")),
    ("shape (2,).", np.zeros(2, np.float32)),
    ("shape (3, 2).", np.zeros((3, 2), np.float32), [[[1.0] * 2, [1.0] * 2, [1.0] * 2]]),
    ("shape (2, 0).", [[], []]),
    ("shape (1, 2, 2). Send one tensor per item.", [torch.zeros(1, 2, 2)]),
    ("a ragged list.", [[1.0, 2.0], [3.0]], [[1.0, 2.0], 1.0], [[[1.0, 2.0], [3.0]]]),
    ("a list that holds None.", [[1.0, 2.0], [1.0, None]], [[1.0, 2.0], None]),
    ("a list that holds bool True.", [[0, 1], [2, True]]),
    ("a list that holds 9223372036854775808.", [[0, 1], [2, 2**63]]),
    ("a list that holds -9223372036854775809.", [[0, 1], [2, -(2**63) - 1]]),
    ("a list that holds a int.", [[10**5000] * 2] * 2),
    ("a list that holds more than 32 levels.", [nested(33)], [nested(900)]),
    ("a torch.sparse_coo tensor on cpu.", torch.zeros(2, 2).to_sparse()),
    ("a torch.strided tensor on meta.", torch.zeros(2, 2, device="meta")),
    ("a masked array. Fill its gaps.", np.ma.masked_array(np.zeros((2, 2)))),
    ("the value 9223372036854775808.", np.full((2, 2), 2**63, np.uint64)),
]
"""Data of Tensor(shape=(2, 2)); after `spec.m[0]: expected a (2, 2) float32 tensor, got `."""

CONTAINERS = [
    ("a (2, 2) float32 tensor or a list of them, got None. Send the item, or leave the modality out.", (TENSOR, None)),
    ("a (2, 2) float32 tensor or a list of them, got a str.", (TENSOR, "x" * 100)),
    ("a dict of a and b or a list of them, got int 3.", (RECORD, 3)),
    ("a text of 1..2 characters or a list of them, got int 3.", (TEXT, 3)),
    ("a video with metadata or a list of them, got None. …", (Video(largest=(4, 4, 4), metadata=True), None)),
]
"""Item types and data; after `spec.m: expected `."""

LENGTHS, PLAIN = Audio(4, most=4, rate=2), Image((4, 4)).for_function()
CHECK = "Check the units."
VALUES = [
    ("a (2, 2) float32 tensor, got shape ().", (TENSOR, 3.0)),
    ("finite values of magnitude <= 65504, got nan at [1, 0].", (TENSOR, [[0, 1], [math.nan, 1]])),
    ("finite values of magnitude <= 65504, got -inf at [1, 1].", (TENSOR, [[0, 1], [1, -math.inf]])),
    (f"finite values of magnitude <= 65504, got -70000 at [1, 1]. {CHECK}", (TENSOR, [[0, 1], [2, -7e4]])),
    (f"finite values of magnitude <= 0.1, got 0.1 at [0]. {CHECK}",
     (Tensor(shape=(2,), bound=0.1), np.full(2, np.nextafter(np.float32(0.1), np.float32(1))))),
    ("finite values … <= 65504, got 70000 at [0]. …", (Tensor((2,), "float16", bound=1e6), [7e4, 0])),
    ("integers that float16 holds exactly, got 2049 at [1, 0]. Send floats to have them rounded.",
     (HALF, np.array([[4096, 0], [2049, 1]], np.uint16)), (HALF, torch.tensor([[4096, 0], [2049, 1]]))),
    ("integers that float32 …, got 9223372036854775807 …", (Tensor((1,), bound=math.inf), np.array([2**63 - 1]))),
    ("int32 values from -9 to 9, got 10 at [1].", (Tensor((2,), "int32", bound=9.0), [0, 10])),
    ("uint8 values from 0 to 255, got 256 at [1].", (BYTES, [1, 256])),
    ("whole numbers that int64 holds, got 1.5 at [1].", (INDICES, [0.0, 1.5]), (INDICES, np.array([0, 1.5], "f2"))),
    ("uint8 values from 0 to 255, got nan at [1].", (BYTES, torch.tensor([0.0, math.nan]))),
    ("whole numbers that int64 holds, got 9.22337e+18 at [1].", (INDICES, [0.0, 2.0**63])),
    ("a (2,) int64 tensor, got a list that holds bool True.", (INDICES, [True, False])),
    ("a (2,) bool tensor, got dtype int64. Convert it to bool.", (MASK, np.zeros(2, int))),
    ("a (2,) bool tensor, got a list that holds int 1.", (MASK, [1, 0])),
    ("at most 48 samples at 16000 Hz, got 48000 of them from 3 at 1 Hz. …", (Audio(4, rate=16000), (np.zeros(3), 1))),
    ("a PIL image or 8-bit RGB pixels, got shape (3, 4, 5) of torch.float32. Send three channels of uint8 values …",
     (PLAIN, torch.zeros(3, 4, 5))),
    ("a PIL image or 8-bit RGB pixels, got shape (1, …) of uint8. …", (PLAIN, PIXELS[None, :, :, 0])),
    ("a text of 1..2 characters, got int 3.", (TEXT, [3])),
    ("a text of 1..2 characters, got 3 of them.", (TEXT, "abc")),
    ("a text of 1..2 characters, got 0 of them.", (TEXT, "")),
    ("a text of 1..2 characters among 'CO', got 'N' at 1.", (Text(2, alphabet="CO"), "CN")),
    ("a text that UTF-8 can encode, got half of a surrogate pair at 1.", (TEXT, "a\ud800")),
    ("a dict of a and b, got one of ['a', 'c'].", (RECORD, {"a": [1], "c": 2})),
    ("a dict of a and b, got int 3. A list or tuple is several items.", (RECORD, [3])),
    ("a (frames, metadata) pair, got frames without metadata.", (Video(largest=(2, 4, 4), metadata=True), FRAMES)),
]
"""Item types and data; after `spec.m[0]: expected `, as are the next three."""

IMAGES = [
    ("an image of at least 1 x 1 pixels, got size (0, 3).", PILImage.new("RGB", (0, 3))),
    ("a PIL image or an array, got str 'cat'.", "cat"),
    ("a PIL image or an array, got list [1, 2].", [[1, 2]]),
    ("an array of shape (height, width, 3) or (3, height, width), got shape (5, 6, 7).", np.zeros((5, 6, 7))),
    ("an array of shape …, got shape (0, 5, 3).", np.zeros((0, 5, 3))),
    ("an array of shape …, got a torch.sparse_coo tensor on cpu.", SPARSE),
    ("finite values …, got NaN or an infinity.", torch.zeros(3, 4, 4) + math.nan, torch.zeros(3, 4, 5) + math.inf),
    ("finite values of magnitude <= 65504, got 100000.", torch.full((3, 4, 4), 1e5)),
    ("real numbers, got dtype complex128.", np.zeros((3, 4, 4), complex)),
]

VIDEOS = [
    ("an array of shape (frames, height, width, 3), got str 'cat'.", "cat"),
    ("an array of shape …, got shape (4, 4, 3).", LONGER),
    ("an array of shape …, got shape (2, 5, 6, 7).", np.zeros((2, 5, 6, 7))),
    ("an array of shape …, got tuple ('x', {'fps': 2.0}).", ("x", {"fps": 2.0})),
    ("an array of shape …, got shape (4, 5, 3).", (FRAMES[0], {"fps": 2.0})),
    ("an array of shape …, got a torch.sparse_coo tensor on cpu.", [SPARSE]),
    ("an array of shape …, got a list.", [PIXELS, "x"]),
    ("frames of one shape and dtype, got float64 (4, 4, 3) and float64 (4, 5, 3).", [LONGER, WIDER]),
    ("frames of one shape and dtype, got uint8 (4, 5, 3) and uint8 (4, 5).", [PICTURE, PICTURE.convert("L")]),
    ("finite values …, got NaN or an infinity.", np.full((2, 4, 5, 3), np.nan), torch.full((2, 3, 4, 5), math.inf)),
    ("real numbers, got dtype object.", np.zeros((2, 4, 5, 3), object)),
]

SOUNDS = [
    ("a 1-D float array or an (array, sampling rate) pair, got shape (3,), dtype int64.", np.zeros(3, int)),
    ("a 1-D float array …, got shape (0,), dtype float64.", np.zeros(0)),
    ("a 1-D float array …, got shape (1, 2, 2), dtype float64.", np.zeros((1, 2, 2))),
    ("a 1-D float array …, got a torch.sparse_coo tensor on cpu.", SPARSE[0, 0]),
    ("a 1-D float array …, got list [[1.0], [1.0, 2.0]].", [[[1.0], [1.0, 2.0]]]),
    ("a sampling rate >= 1 in Hz, got 0.", (np.zeros(3), 0)),
    ("a sampling rate >= 1 in Hz, got inf.", (np.zeros(3), math.inf)),
    ("a sampling rate >= 1 in Hz, got True.", (np.zeros(3), True)),
    ("samples alone, since the spec states no sampling rate, got 8000 Hz. Send the array.", (np.zeros(3), 8000)),
    ("finite values of magnitude <= 65504, got NaN or an infinity.", [1.0, math.nan], np.array([math.inf])),
    ("finite values of magnitude <= 65504, got 1e+300.", np.array([1e300])),
    ("samples of magnitude <= 8, got 32767. Scale them to -1..1.", np.array([3.0, -32767.0])),
]

STEREO = [
    ("expected a 1-D float array …, got shape (9, 2), which has 2 channel(s). Average the channels: x.mean(1).",
     np.zeros((9, 2))),
]

LENGTH = "Send a file that states its length, or the frames alone."
METADATA = [
    (f"fps > 0, got nan. {LENGTH}", {"fps": math.nan}),
    ("fps > 0, got inf. …", {"fps": math.inf}),
    ("fps > 0, got -1.0. …", {"fps": np.float64(-1)}),
    (f"a duration >= 0 in seconds, got -2. {LENGTH}", {"fps": 1, "duration": -2}),
    (f"total_num_frames >= 1, got -3074457345618259. {LENGTH}", {"total_num_frames": -3074457345618259}),
    (f"frames_indices of {len(FRAMES)} frames, got 10 of them.", {"frames_indices": list(range(10))}),
    ("frames_indices …, got int 5.", {"frames_indices": 5}),
    ("frames_indices from 0 to 3, got 4.", {"total_num_frames": 4, "frames_indices": [4] * len(FRAMES)}),
    ("frames_indices from 0 to inf, got -1.", {"frames_indices": [-1] * len(FRAMES)}),
]

REQUESTS = [
    ("spec.m, limit_mm_per_prompt: expected …, got width=3. …",
     lambda: bound(item=LENGTHS).largest_item(sizes={"width": 3})),
    ("spec.prompt: expected a prompt …, got ValueError: 7 is not …", lambda: rewritten(lambda s: s.prompt.index(7))),
    ("spec.prompt: expected the layout …", lambda: plan_of(modality(update=replace(9))).unexpand([9], {"m": ZEROS})),
    ("spec.prompt: expected token ids, got a text. The model has no …", lambda: SPEC.bind(CONFIG).expand("text", {})),
    ("spec.prompt[1]: expected a token id …, got -1. Check the tokenizer.", lambda: PLAN.preview([1, -1], {})),
    ("spec.prompt[2]: expected a token id from 0 to 199, got 200. …", lambda: PLAN.check_ids([1, 2, 200])),
    ("spec.prompt[1]: expected a …, got ….", *[partial(PLAN.check_ids, [0, n]) for n in ("5", None, 2**99)]),
    ("spec.m[1]: expected …, got None. Send the item itself.",
     lambda: PLAN.expand([5, 5], {"m": TWO}), lambda: preview({"m": TWO}, [5, 5])),
    ("spec.m: expected items …, got some that it refuses: You have to …. Name …",
     lambda: preview({"m": ZEROS}, process=hf(), processor=asking)),
    ("spec.m: expected items …, got TypeError: … multiple values for keyword argument 'm'.", lambda: plan_for_options(
        plan_of(modality(process=hf()), processor=asking), {"m": 0}, asking).preview([5, 5], {"m": ZEROS})),
    ("spec.m[0]: expected an item of mine, got another.", lambda: preview({"m": ZEROS + 1}, process=picky)),
    ("spec.m[1].a: expected a text without '<im_end>', which stands for an item, got 'x<im_end>y'.", lambda: preview(
        {"m": [{"a": "x"}, {"a": "x<im_end>y"}]}, [8, 8], **spelling)),
    ("spec.m[0].a: expected a text without '<image>', which …, got '<image>'.", lambda: preview(
        {"m": {"a": "<image>"}}, [8], **spelling)),
    ("spec.multi_modal_data: expected …, got 'x'.", lambda: PLAN.expand([], {"x": 0}), lambda: preview({"x": 0})),
    ("spec.multi_modal_data: …, got 'm_embeds'. Send embeddings …", lambda: preview({"m_embeds": ZEROS}, embeds=True)),
    ("spec.multi_modal_data: …, got 'm_embeds'. Send the raw items …", lambda: preview({"m_embeds": ZEROS[None]})),
    ("spec.m: expected the fields ['m_embeds', 'n', 'k'], got ['m_embeds', 'n'].", lambda: beside([ZEROS], n=[2])),
    ("spec.m.k: expected 2 items, got 1.", lambda: beside([ZEROS] * 2, n=[2, 2], k=[0])),
    ("spec.m: expected 3 embedding row(s) for 2 items, got 2.", lambda: beside(ZEROS, n=[2, 1], k=[0, 0])),
    ("spec.m: expected embeddings of 1 items, got 2.", lambda: beside([ZEROS] * 2, n=[2], k=[0])),
    ("spec.m: expected embeddings of 3 items, got 2.", lambda: beside([ZEROS] * 2, n=[2] * 3, k=[0] * 3)),
    ("spec.m: expected a (2, 2) float32 tensor or a list of them, got dict {}.", lambda: preview({"m": {}})),
    ("spec.m: expected a (2, 2) …, got m_embeds. Send the raw …", lambda: preview({"m": {"m_embeds": ZEROS[None]}})),
    ("spec.m: expected at least one (rows, hidden_size) tensor, got none.",
     lambda: preview({"m": {"m_embeds": torch.zeros(0, 2, 3)}}, embeds=True)),
    ("spec.m: expected at least one (rows, hidden_size) tensor, got a str.",
     lambda: preview({"m": {"m_embeds": "rows"}}, embeds=True)),
    ("spec.multi_modal_data: expected a dict of items by modality, got a list. Write {\"m\": [...]}.",
     lambda: PLAN.expand([5], [ZEROS]), lambda: PLAN.preview([5], [ZEROS])),
    ("spec.m[1]: expected an item that has a layout, got an item of shape (2,): too odd.",
     *[lambda way=way: preview({"m": [torch.zeros(1), torch.zeros(2)]}, [5] * 2, item=GROWING, **way) for way in ODD]),
    ("spec.m[1]: expected at least one placeholder per item, got 1 other token for an item of shape (2,). …",
     lambda: preview({"m": [torch.zeros(1), torch.zeros(2)]}, item=Tensor((between(1, 3),)),
                     layout=literal(6) + embed(5) * (item.length % 2))),
    ("spec.m[0]: expected at least one …, got none for an item of length 1. Send one of at least 2 samples.",
     lambda: preview({"m": np.zeros(1)}, item=Audio(largest=9), layout=embed(5) * (item.length // 2),
                     process=lambda items, scope: {"x": [torch.tensor(x) for x in items]})),
    ("spec.m[0]: expected at least one placeholder per item, got none for an item of shape (2,). …",
     lambda: preview({"m": ZEROS[0]}, item=Tensor((between(1, 3),)), layout=embed(5) * (item.length % 2))),
    ("spec.m[0]: expected 1 embedding row(s), got 2.", lambda: preview({"m": {"m_embeds": ZEROS}}, embeds=True)),
    ("spec.m[2]: expected pixels of three channels, got shape (1, 4, 6), which may be embeddings. …",
     lambda: PICTURES.parser.parse([torch.zeros(3, 4, 6), torch.zeros(4, 6, 3), torch.zeros(1, 4, 6)], 6)),
    ('spec.m[0]: expected a finite floating (rows, 6) tensor, got shape (4, 5) of torch.float32. Send …',
     lambda: PICTURES.parser.parse(torch.zeros(3, 4, 5), 6)),
    ('spec.m: expected one item per placeholder, got 2 placeholders [5] and no item. Send items of "m", …',
     lambda: SPEC.bind(CONFIG).place([1, 5, 5], {})),
    (r"spec.m: expected one item …, got 1 placeholder '\x05' and no item. …", lambda: PLAN.place([5], {})),
    (r"spec.m: expected one item per placeholder, got 2 placeholders '\x05' and no item. …",
     lambda: PLAN.place([1, 5, 5], {}), lambda: PLAN.place([1, 5, 5], {"m": []})),
    ("spec.m, spec.n: expected a prompt that tells their items apart, got the layout '\\x05', which either has. Send …",
     lambda: plan_of(modality(), modality("n", fields={"y": batched()})).preview([5, 5], {"m": ZEROS, "n": ZEROS})),
    ("spec.m: expected one item per request, got none. The model reads …", lambda: WITHOUT.preview([5], {})),
    ("spec.m: expected fewer items, got 2. At most 1 m(s) …", lambda: WITHOUT.preview([5], {"m": [ZEROS] * 2})),
    ("spec.m: expected 1 target [3] in …, got 2, and 1 placeholder [5] beside. Write one target …, or its whole …",
     lambda: put([3, 1, 3, 5], ("replace", [3]))),
    ("spec.m: expected a prompt without placeholders, got 1 placeholder [5]. …", lambda: put([1, 5], ("start", []))),
    ("spec.m: expected one item per target, got the target [2] without its item. Send …",
     lambda: place([1, 2], {}, "spec", {(2,): "m"})),
    ("spec.m: expected one item per target, got the target '<graph>' without its item. …",
     lambda: place([*map(ord, "a<graph>")], {}, "spec", {tuple(map(ord, "<graph>")): "m"}, tok=WORDS)),
    ("spec.image[0]: expected a target outside layouts, got [1] inside [7, 1, 8], a layout of video. Write …",
     lambda: put_two([7, 1, 8, 9, 3, 9, 1]), lambda: put_two([7, 1, 8, 1, 3])),
    ("spec.m[1]: expected a (2, 2) float32 tensor, got shape (3,).", lambda: parse(TENSOR, [ZEROS, torch.zeros(3)])),
    ("spec.m[0].x: expected int64 values from 0 to 3, got 4 at [0].",
     lambda: parse(CLICKED, {"image": PICTURE.resize((4, 9)), "x": [4]})),
    ("spec.m[0]: expected a dict of image and x, got one of ['x'].", lambda: parse(CLICKED, {"x": [0]})),
    ("spec.m[0].image: expected a PIL image or an array, got int 0.", lambda: parse(CLICKED, {"image": 0, "x": [0]})),
    ("spec.m[0].a: expected a (1..4,) int64 tensor, got shape (5,).", lambda: parse(RECORD, {"a": [1] * 5, "b": [1]})),
]
"""Requests that are refused."""

LARGER = [
    ("spec.m[0]: expected at most 3 encoder row(s), …, got 4. …",
     lambda: clipped({"m_embeds": torch.zeros(4, 2)}), lambda: clipped([0.0] * 4)),
]
"""Requests with items that are larger than the largest."""

MISSING = [
    ("spec.m: expected 1 target [3] in the prompt for 1 item, got 0. Write one target per item, and nothing else …",
     lambda: put([1], ("replace", [3]))),
    ("spec.m: expected 1 target [3] in the prompt for 1 item, got 0. …",
     lambda: place([1], {"m": [alternatives([5], [("replace", [3])])]}, "spec", forms=[PromptForm.MIXED])),
    ("spec.m: expected 1 target '<graph>' in the prompt for 1 item, got 0. …",
     lambda: place([1], {"m": [alternatives([5], [("replace", map(ord, "<graph>"))])]}, "spec", tok=WORDS)),
    ("spec.m: expected 2 layouts [5] * 2 in the prompt for 2 items, got 1, and 1 placeholder [5] beside. Write …",
     lambda: put([5, 5, 5], *[("in_place", [])] * 2)),
    ("spec.m: expected 1 target [0, 1, 2, 3, ... 9 ids] in …", lambda: put([1], ("replace", range(9)))),
    ("spec.m: expected 1 target 'abcd'... of 9 tokens in …",
     lambda: place([1], {"m": [alternatives([5], [("replace", map(ord, "abcdefghi"))])]}, "spec", tok=WORDS)),
    ("spec.m: expected a prompt that starts with [7, 8], got one … [1, 2].", lambda: put([1, 2], ("after", [7, 8]))),
    ("spec.m[1]: expected the target [72] in the prompt, after those of …, got none. Write one target …, in order.",
     *[partial(put, prompt, ("replace", [71]), ("replace", [72])) for prompt in ([71], [72, 71])]),
]
"""Requests that lack a placeholder."""
# fmt: on


def rows(error, before, provoke, table):
    return [(error, before + text, provoke, way) for text, *ways in table for way in ways]


ITEM = "spec.m[0]: expected "
ROWS = [
    *rows(SpecError, "modality 'm'", lambda options: modality(**options), MODALITIES),
    *rows(SpecError, "", lambda call: call(), SPECS),
    *rows(SpecError, "spec.m, ", lambda options: bound(**options), BOUND),
    *rows(SpecError, "spec.m", returning, PROCESSED),
    *rows(InputError, f"{ITEM}a (2, 2) float32 tensor, got ", lambda data: parse(TENSOR, data), TENSORS),
    *rows(InputError, "spec.m: expected ", lambda way: parse(*way), CONTAINERS),
    *rows(InputError, ITEM, lambda way: parse(*way), VALUES),
    *rows(InputError, ITEM, lambda data: parse(Image(largest=(4, 4)), data), IMAGES),
    *rows(InputError, ITEM, lambda data: parse(Video(largest=(2, 4, 4)), data), VIDEOS),
    *rows(InputError, ITEM, lambda data: parse(Audio(largest=4), data), SOUNDS),
    *rows(InputError, "spec.m: ", lambda data: parse(Audio(largest=4), data), STEREO),
    *rows(InputError, "spec.m[0], metadata: expected ", lambda data: parse(Video((9, 9, 9)), (FRAMES, data)), METADATA),
    *rows(InputError, "", lambda call: call(), REQUESTS),
    *rows(TooManyRows, "", lambda call: call(), LARGER),
    *rows(NotFound, "", lambda call: call(), MISSING),
]
FORM = re.compile(r"[^.:].*: expected \S.*, got \S.*\.( [A-Z].*\.)?|.+ has no value( here)?: \S.*\.")


@pytest.mark.parametrize(
    ("error", "text", "provoke", "way"), ROWS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_message(error, text, provoke, way):
    """Where, expected, got and a remedy, in whole sentences; nothing is doubled, and what is wrong is named once."""
    said = refused(error, text, provoke, way)
    assert FORM.fullmatch(said), said
    assert not re.search(r"(?<!\.)\.\.(?!\.|[0-9a-z])|  |\b(\w+): \1\b", said), said

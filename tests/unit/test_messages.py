"""The exact text of every message of a declaration, a binding or a request in the layers that need no vLLM.

`test_every_message_is_pinned` fails for a message in these layers that no row of the table produces.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from mmkit import (
    Audio,
    Image,
    InputError,
    MmkitError,
    Modality,
    ModelSpec,
    SpecError,
    Tensor,
    Video,
    after,
    batched,
    between,
    cfg,
    embed,
    end,
    expr,
    fields,
    flat,
    fmt,
    hf,
    identity,
    in_place,
    insert,
    item,
    items,
    layout,
    out,
    plan,
    proc,
    process,
    prompt,
    replace,
    shared,
    spec,
    start,
    tok,
    token,
    updates,
    vocabulary,
    where,
)
from mmkit.expr import Scope, evaluate
from mmkit.layout import Laid
from mmkit.updates import NotFound, Resolved, place

from .messages import check_style, missed, said

MODULES = [expr, fields, items, layout, plan, process, spec, updates, vocabulary]
CONFIG = SimpleNamespace(vocab_size=100, n=2, size=7)


class Tokenizer:
    def get_vocab(self):
        return {"<image>": 9, "<im_end>": 8}

    def encode(self, text, add_special_tokens):
        return list(map(ord, text))


def modality(**options):
    plain = dict(name="m", item=Tensor(shape=(2, cfg.n)), layout=embed(5), update=in_place(), fields={"x": batched()})
    return Modality(**{**plain, **options})


def bind(config=CONFIG, **options):
    return ModelSpec("spec", modality(**options)).bind(config, Tokenizer())


def parse(data, kind=None):
    return bind(**({} if kind is None else {"item": kind, "process": hf()})).modalities["m"].parse(data)


def processed(result, count=1, **options):
    made = bind(process=lambda items, scope: result, **options)
    return made.modalities["m"].process([torch.zeros(2, 2)] * count)


def rewritten(value):
    return ModelSpec("spec", modality(), prompt=value).bind(CONFIG, Tokenizer()).rewrite("prompt", [1, 2])


def put(prompt, kind, target, ids=(5, 5), count=1):
    way = Resolved(kind, tuple(target), Laid(list(ids), b"\x01" * len(ids)))
    return place(prompt, {"m": [[way]] * count}, "spec")


DEEP: list = []
for _ in range(40):
    DEEP = [DEEP]
IMAGES, VIDEOS, SOUNDS = Image(largest=(4, 4)), Video(largest=(2, 4, 4)), Audio(largest=4)
FLOATS = "spec.m[0]: expected a (2, 2) float32 tensor"

# (name, what raises, its type, its text)
TABLE = [
    # -- expressions
    ("root", lambda: evaluate(cfg.a, Scope()), SpecError, "cfg has no value here: the spec is not bound to a config."),
    (
        "root proc",
        lambda: bind(layout=embed(proc.a)),
        SpecError,
        "spec.m, layout: proc has no value here: the model has no Hugging Face processor.",
    ),
    (
        "root item",
        lambda: bind(limit=item.length),
        SpecError,
        "spec.m, limit: item has no value here: it describes one raw item and is only known inside layout, update, "
        "fields and process.",
    ),
    (
        "root out",
        lambda: bind(limit=out.x),
        SpecError,
        "spec.m, limit: out has no value here: it holds the processed fields of one item and is only known after "
        "processing.",
    ),
    (
        "attribute",
        lambda: bind(limit=cfg.sise),
        SpecError,
        "spec.m, limit: cfg.sise has no value: SimpleNamespace has no attribute 'sise'. It has: size.",
    ),
    (
        "attribute, nothing near",
        lambda: evaluate(cfg.zzz, Scope(cfg=object())),
        SpecError,
        "cfg.zzz has no value: object has no attribute 'zzz'.",
    ),
    (
        "attribute of a dict",
        lambda: evaluate(cfg.a.b, Scope(cfg={"a": {"c": 1, "d": 2}})),
        SpecError,
        "cfg.a.b has no value: dict has no attribute 'b'. It has: c, d.",
    ),
    (
        "field",
        lambda: evaluate(out.x, Scope(out={"y": 1})),
        SpecError,
        "out.x has no value: the processed fields lack 'x'. It has: y.",
    ),
    (
        "index",
        lambda: evaluate(cfg.sizes[2], Scope(cfg=SimpleNamespace(sizes=[1]))),
        SpecError,
        "cfg.sizes[2] has no value: cfg.sizes is [1].",
    ),
    (
        "tokenizer",
        lambda: ModelSpec("spec", modality(layout=embed(tok["<image>"]))).bind(CONFIG),
        SpecError,
        "spec.m, layout: tok['<image>'] has no value: the model runs without a tokenizer. Use a token id from cfg "
        "instead.",
    ),
    (
        "truth",
        lambda: bool(cfg.a > 1),
        TypeError,
        "cfg.a > 1 is only known later and has no truth value; use where() or equal(), or a function of a Scope",
    ),
    (
        "iteration",
        lambda: list(cfg.a),
        TypeError,
        "cfg.a is only known later and cannot be iterated; use each() in a layout, or a function of a Scope",
    ),
    ("private", lambda: cfg._a, AttributeError, "_a"),
    (
        "vocabulary",
        lambda: bind(layout=embed(tok["<imgae>"])),
        SpecError,
        "spec.m, layout: tok['<imgae>']: expected a token of the vocabulary, got a text that is none. Near: '<image>', "
        "'<im_end>'. Use tok('<imgae>') for a text that the tokenizer splits.",
    ),
    (
        "vocabulary, an id",
        lambda: bind(layout=embed(tok[cfg.n])),
        SpecError,
        "spec.m, layout: tok[2]: expected the text of one token, got int. Use an id as it is.",
    ),
    (
        "arithmetic",
        lambda: bind(limit=cfg.size // (cfg.n - 2)),
        SpecError,
        "spec.m, limit: cfg.size // (cfg.n - 2) has no value: integer division or modulo by zero, with 7, 0.",
    ),
    (
        "where",
        lambda: where(cfg.n == 3, 1, 2),
        SpecError,
        "where(): expected an expression, got False. Compare with equal(a, b), not with ==.",
    ),
    (
        "vocabulary, nothing near",
        lambda: bind(layout=embed(tok["zzz"])),
        SpecError,
        "spec.m, layout: tok['zzz']: expected a token of the vocabulary, got a text that is none. Use tok('zzz') for a "
        "text that the tokenizer splits.",
    ),
    # -- layouts
    (
        "embed",
        lambda: embed("<image>"),
        SpecError,
        "embed(): expected one token id, got '<image>'. Write embed(tok[\"<image>\"]) or embed(cfg.some_token_id).",
    ),
    (
        "string",
        lambda: embed(5) + "<image>",
        SpecError,
        "layout: expected token ids, got '<image>'. Write tok['<image>'] for one token or tok('<image>') for text.",
    ),
    (
        "id",
        lambda: bind(layout=embed(cfg.n * 0.5)),
        SpecError,
        "spec.m, layout: cfg.n * 0.5: expected a token id, a whole number >= 0, got 1.0.",
    ),
    (
        "count",
        lambda: bind(layout=embed(5) * (cfg.n - 3)),
        SpecError,
        "spec.m, layout: cfg.n - 3: expected a repetition count, a whole number >= 0, got -1.",
    ),
    (
        "elements",
        lambda: layout.each(cfg.n - 3, lambda x: x).lay(Scope(cfg=CONFIG)),
        SpecError,
        "cfg.n - 3: expected the number of elements of each(), or a sequence, a whole number >= 0, got -1.",
    ),
    (
        "vast layout",
        lambda: bind(layout=embed(5) * 10**9),
        SpecError,
        "spec.m, layout: embed(5) * 1000000000: expected at most 4194304 ids, got 1000000000.",
    ),
    # -- item types, declared
    (
        "dtype",
        lambda: Tensor(shape=(), dtype="float"),
        SpecError,
        "Tensor.dtype: expected one of float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64, bool, "
        "got 'float'.",
    ),
    (
        "size",
        lambda: bind(item=Tensor(shape=(3, cfg.n - 4))),
        SpecError,
        "spec.m, item: Tensor.shape[1] = cfg.n - 4: expected whole numbers >= 0, in order, got -2.",
    ),
    (
        "between",
        lambda: bind(item=Tensor(shape=(between(3, cfg.n),))),
        SpecError,
        "spec.m, item: Tensor.shape[0] = 3..cfg.n: expected whole numbers >= 0, in order, got 3..2.",
    ),
    (
        "bound",
        lambda: bind(item=Tensor(shape=(1,), bound=cfg.n - 2)),
        SpecError,
        "spec.m, item: Tensor.bound: expected a number > 0 from cfg, got 0.",
    ),
    (
        "largest",
        lambda: bind(item=Image(largest=(3, 0))),
        SpecError,
        "spec.m, item: Image.largest: expected 2 whole number(s) >= 1, got (3, 0).",
    ),
    (
        "largest shape",
        lambda: bind(item=Tensor(shape=(between(1, 4), 3), largest=(5, 3))),
        SpecError,
        "spec.m, item: Tensor.largest: expected a shape within (1..4, 3), got (5, 3).",
    ),
    # -- items, sent
    (
        "None",
        lambda: parse(None),
        InputError,
        "spec.m: expected a (2, 2) float32 tensor or a list of them, got None. Send the item, or leave the "
        "modality out.",
    ),
    (
        "no items",
        lambda: parse([]),
        InputError,
        "spec.m: expected at least one item, got none. Send the items, or leave the modality out.",
    ),
    (
        "container",
        lambda: parse("actions"),
        InputError,
        "spec.m: expected a (2, 2) float32 tensor or a list of them, got str 'actions'.",
    ),
    (
        "long container",
        lambda: parse("x" * 100),
        InputError,
        "spec.m: expected a (2, 2) float32 tensor or a list of them, got a str.",
    ),
    ("other container", lambda: parse([{"a": 1}]), InputError, f"{FLOATS}, got dict {{'a': 1}}."),
    (
        "array dtype",
        lambda: parse(np.zeros((2, 2), int)),
        InputError,
        f"{FLOATS}, got dtype int64. Convert it to float32.",
    ),
    (
        "odd array dtype",
        lambda: parse(np.full((2, 2), "a")),
        InputError,
        f"{FLOATS}, got dtype <U1. Convert it to float32.",
    ),
    (
        "byte order",
        lambda: parse(np.zeros((2, 2), ">f8")),
        InputError,
        f"{FLOATS}, got dtype >f8. Convert it to float32.",
    ),
    ("shape", lambda: parse(torch.zeros(2, 3)), InputError, f"{FLOATS}, got shape (2, 3). Send one tensor per item."),
    (
        "second item",
        lambda: parse([torch.zeros(2, 2), torch.zeros(3)]),
        InputError,
        "spec.m[1]: expected a (2, 2) float32 tensor, got shape (3,). Send one tensor per item.",
    ),
    ("odd list", lambda: parse([[0, 1], [2, True]]), InputError, f"{FLOATS}, got a list that holds bool True."),
    ("None in a list", lambda: parse([[0, 1], [2, None]]), InputError, f"{FLOATS}, got a list that holds None."),
    (
        "huge integer",
        lambda: parse([[0, 1], [2, 2**63]]),
        InputError,
        f"{FLOATS}, got a list that holds 9223372036854775808.",
    ),
    (
        "deep",
        lambda: Tensor(shape=(2, 2)).canonical(DEEP, "spec.m[0]"),
        InputError,
        f"{FLOATS}, got a list that holds more than 32 levels.",
    ),
    (
        "sparse",
        lambda: parse(torch.zeros(2, 2).to_sparse()),
        InputError,
        f"{FLOATS}, got a torch.sparse_coo tensor on cpu.",
    ),
    (
        "masked",
        lambda: parse(np.ma.masked_array(np.zeros((2, 2)))),
        InputError,
        f"{FLOATS}, got a masked array. Fill its gaps.",
    ),
    (
        "huge integer array",
        lambda: parse(np.full((2, 2), 2**63, np.uint64)),
        InputError,
        f"{FLOATS}, got the value 9223372036854775808.",
    ),
    ("ragged", lambda: parse([[0, 1], [2]]), InputError, f"{FLOATS}, got a ragged list."),
    (
        "NaN",
        lambda: parse([[0, 1], [math.nan, 1]]),
        InputError,
        "spec.m[0]: expected finite values of magnitude <= 65504, got nan at [1, 0].",
    ),
    (
        "too large",
        lambda: parse([[0, 1], [2, -7e4]]),
        InputError,
        "spec.m[0]: expected finite values of magnitude <= 65504, got -70000 at [1, 1]. Check the units.",
    ),
    (
        "integers",
        lambda: parse([1, 300], Tensor(shape=(2,), dtype="uint8")),
        InputError,
        "spec.m[0]: expected values that fit uint8, at most 255, got values from 1 to 300.",
    ),
    (
        "varying",
        lambda: parse([1.0], Tensor(shape=(between(2, 5),))),
        InputError,
        "spec.m[0]: expected a (2..5,) float32 tensor, got shape (1,). Send one tensor per item.",
    ),
    (
        "image size",
        lambda: parse(PILImage.new("RGB", (0, 3)), IMAGES),
        InputError,
        "spec.m[0]: expected an image of at least 1 x 1 pixels, got size (0, 3).",
    ),
    ("image", lambda: parse("cat", IMAGES), InputError, "spec.m[0]: expected a PIL image or an array, got str 'cat'."),
    (
        "no image",
        lambda: parse(None, IMAGES),
        InputError,
        "spec.m: expected an image or a list of them, got None. Send the item, or leave the modality out.",
    ),
    (
        "image shape",
        lambda: parse(np.zeros((5, 5)), IMAGES),
        InputError,
        "spec.m[0]: expected an array of shape (height, width, 3) or (3, height, width), got shape (5, 5).",
    ),
    (
        "image values",
        lambda: parse(torch.full((3, 4, 4), math.nan), IMAGES),
        InputError,
        "spec.m[0]: expected finite values of magnitude <= 65504, got NaN or an infinity.",
    ),
    (
        "image values, large",
        lambda: parse(torch.full((3, 4, 4), 1e5), IMAGES),
        InputError,
        "spec.m[0]: expected finite values of magnitude <= 65504, got 100000.",
    ),
    (
        "image dtype",
        lambda: parse(np.zeros((3, 4, 4), complex), IMAGES),
        InputError,
        "spec.m[0]: expected real numbers, got dtype complex128.",
    ),
    (
        "metadata",
        lambda: parse(np.zeros((2, 4, 4, 3)), Video(largest=(2, 4, 4), metadata=True)),
        InputError,
        "spec.m[0]: expected a (frames, metadata) pair, got frames without metadata.",
    ),
    (
        "no video",
        lambda: parse(None, Video(largest=(2, 4, 4), metadata=True)),
        InputError,
        "spec.m: expected a video with metadata or a list of them, got None. Send the item, or leave the modality out.",
    ),
    (
        "frames",
        lambda: parse([np.zeros((4, 4, 3)), np.zeros((4, 5, 3))], VIDEOS),
        InputError,
        "spec.m[0]: expected frames of one shape and dtype, got float64 (4, 4, 3) and float64 (4, 5, 3).",
    ),
    (
        "video shape",
        lambda: parse(np.zeros((4, 4, 3)), VIDEOS),
        InputError,
        "spec.m[0]: expected an array of shape (frames, height, width, 3), got shape (4, 4, 3).",
    ),
    (
        "video",
        lambda: parse("cat", VIDEOS),
        InputError,
        "spec.m[0]: expected an array of shape (frames, height, width, 3), got str 'cat'.",
    ),
    (
        "audio",
        lambda: parse(np.zeros(3, int), SOUNDS),
        InputError,
        "spec.m[0]: expected a 1-D float array or an (array, sampling rate) pair, got shape (3,), dtype int64.",
    ),
    (
        "ragged audio",
        lambda: parse([[[1.0], [1.0, 2.0]]], SOUNDS),
        InputError,
        "spec.m[0]: expected a 1-D float array or an (array, sampling rate) pair, got list [[1.0], [1.0, 2.0]].",
    ),
    (
        "rate",
        lambda: parse((np.zeros(3), -1), SOUNDS),
        InputError,
        "spec.m[0]: expected a sampling rate > 0 in Hz, got -1.",
    ),
    # -- fields and processing
    (
        "batched",
        lambda: processed({"x": torch.zeros(3)}, 2),
        SpecError,
        "spec.m, fields['x']: expected 1 items along the first dimension, got 3.",
    ),
    (
        "flat",
        lambda: processed({"x": torch.zeros(3)}, 2, fields={"x": flat(item.length)}),
        SpecError,
        "spec.m, fields['x']: expected sizes that add up to 3, the extent of dimension 0, got 2.",
    ),
    (
        "field dtype",
        lambda: processed({"x": torch.zeros(1)}, fields={"x": batched(dtype="int64")}),
        SpecError,
        "spec.m, fields['x']: item 0: expected dtype int64, got torch.float32.",
    ),
    (
        "field shape",
        lambda: processed({"x": torch.zeros(1, 3)}, fields={"x": batched(shape=(cfg.n,))}),
        SpecError,
        "spec.m, fields['x']: item 0: expected shape (2,) per item, got (3,).",
    ),
    (
        "undeclared",
        lambda: processed({"x": [1], "y": [2]}),
        SpecError,
        "spec.m: expected process to return declared fields, ['x'], got ['y']. Declare them in fields, or do "
        "not return "
        "them.",
    ),
    (
        "missing",
        lambda: processed({}),
        SpecError,
        "spec.m, process: expected the fields ['x'], got [], without ['x'].",
    ),
    (
        "derived from the item, shared",
        lambda: processed({}, fields={"x": shared(value=item.length)}),
        SpecError,
        "spec.m, fields['x']: item has no value here: it describes one raw item and is only known inside layout, "
        "update, fields and process.",
    ),
    (
        "derived, no number",
        lambda: processed({}, fields={"x": batched(value=fmt("a"), dtype="int64")}),
        SpecError,
        "spec.m, fields['x']: value: expected numbers for a int64 tensor, got 'a'.",
    ),
    (
        "derived and processed",
        lambda: processed({"x": [1]}, fields={"x": batched(value=1)}),
        SpecError,
        "spec.m: expected process to return declared fields, [], got ['x']. Declare them in fields, or do not return "
        "them.",
    ),
    (
        "cache of what depends on the number of items",
        lambda: modality(layout=embed(5) * item.count),
        SpecError,
        "modality 'm': expected cache to say for which item.count processed items may be kept, got none. Write "
        "cache=False, or a condition on item.count.",
    ),
    (
        "when",
        lambda: bind(when=cfg.vision),
        SpecError,
        "spec.m, when: cfg.vision has no value: SimpleNamespace has no attribute 'vision'.",
    ),
    (
        "placeholders in the prompt of the spec",
        lambda: rewritten(token(prompt) + embed(5)),
        SpecError,
        "spec.prompt: expected literal ids, since placeholders belong to items, got embed().",
    ),
    (
        "prompt beyond the vocabulary",
        lambda: rewritten(token(prompt) + token(100)),
        SpecError,
        "spec.prompt: expected token ids below the vocabulary size 100, got 100. Use a reserved id inside the "
        "vocabulary: vLLM refuses prompts with other ids.",
    ),
    (
        "prompt function",
        lambda: rewritten(lambda s: s.prompt.index(7)),
        InputError,
        "spec.prompt: expected a prompt that the spec can rewrite, got ValueError: 7 is not in list.",
    ),
    (
        "prompt elsewhere",
        lambda: bind(limit=prompt),
        SpecError,
        "spec.m, limit: prompt has no value here: it is the token ids of one request and is only known inside prompt "
        "and decoder_prompt.",
    ),
    (
        "identity, shared",
        lambda: bind(fields={"x": shared()}).modalities["m"].process([torch.zeros(2, 2)]),
        SpecError,
        "spec.m, x: expected a batched or flat field for identity(), got shared.",
    ),
    (
        "dtype of a field",
        lambda: batched(dtype="flaot32"),
        SpecError,
        "dtype of a field: expected the name of a torch dtype, got 'flaot32'.",
    ),
    (
        "no such dimension",
        lambda: processed({"x": torch.zeros(2)}, fields={"x": flat(item.length, dim=1)}),
        SpecError,
        "spec.m, fields['x']: expected a tensor with a dimension 1, got shape (2,).",
    ),
    (
        "no dict",
        lambda: processed(3),
        SpecError,
        "spec.m, process: expected a dict of tensors, got int.",
    ),
    (
        "process raises",
        lambda: bind(process=lambda items, scope: {}["x"]),
        SpecError,
        "spec.m, process: expected to take a well-formed item, got KeyError: 'x'.",
    ),
    (
        "spelling without the processor",
        lambda: bind(layout=embed(5) * out.x.shape[0], process=hf()).spell({"m": torch.zeros(2, 2)}),
        InputError,
        "spec.prompt: expected a prompt, since the placeholders depend on the Hugging Face processor, got none.",
    ),
    (
        "spelling of a cached item",
        lambda: bind().spell({"m": [None]}),
        InputError,
        "spec.m[0]: expected a (2, 2) float32 tensor, got None.",
    ),
    (
        "preview of another modality",
        lambda: bind().preview([5], {"x": [0.0]}),
        InputError,
        "spec.multi_modal_data: expected modalities among ['m'], got 'x'.",
    ),
    (
        "preview of too many",
        lambda: bind(limit=1).preview([5, 5], {"m": torch.zeros(2, 2, 2)}),
        InputError,
        "spec.m: expected at most 1 item(s), got 2. Send fewer items.",
    ),
    (
        "embeddings beside their modality",
        lambda: bind(embeds=True).preview([5], {"m_embeds": torch.zeros(1, 2, 2)}),
        InputError,
        "spec.multi_modal_data: expected modalities among ['m'], got 'm_embeds'. Send embeddings as "
        '{"m": {"m_embeds": ...}}.',
    ),
    (
        "preview without the processor",
        lambda: bind(process=hf()).preview([5], {"m": torch.zeros(2, 2)}),
        SpecError,
        "spec.m: expected a process that runs without vLLM, got hf().",
    ),
    (
        "shape that is no tuple",
        lambda: Tensor(shape=3),
        SpecError,
        "Tensor.shape: expected a tuple of sizes, one per dimension, got 3.",
    ),
    (
        "attribute in a shape",
        lambda: bind(item=Tensor(shape=(cfg.missing,))),
        SpecError,
        "spec.m, item: Tensor.shape[0] = cfg.missing: cfg.missing has no value: SimpleNamespace has no attribute "
        "'missing'.",
    ),
    # -- declarations
    (
        "pydantic",
        lambda: modality(item="tensor"),
        SpecError,
        "modality 'm': item: Input should be an instance of ItemType, got 'tensor'.",
    ),
    (
        "mixture",
        lambda: modality(placeholder="<image>", tokens=5),
        SpecError,
        "modality 'm': expected placeholder and tokens together, or layout and update together, got a mixture.",
    ),
    (
        "layout",
        lambda: modality(layout=None),
        SpecError,
        "modality 'm': expected layout and update, got one of them.",
    ),
    (
        "layout and update",
        lambda: modality(layout=None, update=None),
        SpecError,
        "modality 'm': expected layout and update, got neither.",
    ),
    (
        "name",
        lambda: modality(name="a b"),
        SpecError,
        "modality 'a b': expected a name that is a Python identifier, got 'a b'.",
    ),
    ("no update", lambda: modality(update=[]), SpecError, "modality 'm': expected at least one update, got none."),
    ("no field", lambda: modality(fields={}), SpecError, "modality 'm': expected at least one field, got none."),
    (
        "identity",
        lambda: modality(fields={"x": batched(), "y": batched()}, process=identity()),
        SpecError,
        "modality 'm': expected a Tensor item and one field for identity(), got Tensor(shape=(2, cfg.n), "
        "dtype='float32', finite=True, bound=65504.0, largest=None) and fields ['x', 'y'].",
    ),
    (
        "process",
        lambda: modality(process=5),
        SpecError,
        "modality 'm': expected identity(), hf() or a function for process, got 5.",
    ),
    (
        "unpad",
        lambda: modality(process=hf(unpad={"y": 3})),
        SpecError,
        "modality 'm': expected unpad to name fields among ['x'], got ['y'].",
    ),
    (
        "out",
        lambda: modality(layout=embed(5) * out.y[0]),
        SpecError,
        "modality 'm', out.y[0]: expected a field among ['x'], got 'y'. Declare it in fields.",
    ),
    (
        "embeds",
        lambda: modality(layout=embed(5) * item.length, embeds=True),
        SpecError,
        "modality 'm', embeds: expected a layout over item.length, because the layout depends on "
        "item.length, got True.",
    ),
    (
        "spec name",
        lambda: ModelSpec("a b", modality()),
        SpecError,
        "spec 'a b': expected a name that is a Python identifier, got 'a b'.",
    ),
    ("no modality", lambda: ModelSpec("a"), SpecError, "spec 'a': expected at least one modality, got none."),
    (
        "two modalities",
        lambda: ModelSpec("a", modality(), modality()),
        SpecError,
        "spec 'a': expected one modality named 'm', got several.",
    ),
    (
        "two fields",
        lambda: ModelSpec("a", modality(), modality(name="n")),
        SpecError,
        "spec 'a': expected one field named 'x', got several.",
    ),
    ("unknown modality", lambda: ModelSpec("a", modality())["n"], KeyError, "'n'"),
    (
        "update",
        lambda: modality(update=5),
        SpecError,
        "modality 'm', update: expected replace(), insert(), in_place() or a list of them, got 5.",
    ),
    (
        "fields",
        lambda: modality(fields=["x"]),
        SpecError,
        "modality 'm', fields: expected a dict of batched(), flat() or shared(), got ['x'].",
    ),
    (
        "field of embeddings",
        lambda: modality(fields={"m_embeds": batched()}, embeds=True),
        SpecError,
        "modality 'm': expected no field named m_embeds, which carries precomputed embeddings, got one.",
    ),
    (
        "anchor",
        lambda: insert(tok["<bos>"]),
        SpecError,
        "insert(): expected start(), after(prefix) or end(), got tok['<bos>'].",
    ),
    (
        "a field that is none",
        lambda: modality(fields={"x": "batched"}),
        SpecError,
        "modality 'm', fields['x']: expected batched(), flat() or shared(), got 'batched'.",
    ),
    (
        "modalities in a list",
        lambda: ModelSpec("spec", [modality()]),
        SpecError,
        "spec 'spec': expected modalities, each as an argument of its own, got a list.",
    ),
    # -- plans
    (
        "limit",
        lambda: bind(limit=1.5),
        SpecError,
        "spec.m, limit: expected a whole number >= 0 or None, got 1.5.",
    ),
    (
        "no placeholder",
        lambda: bind(layout=token([1, 2])),
        SpecError,
        "spec.m, layout: expected at least one embed() position per item, got 2 literal ids.",
    ),
    (
        "outside",
        lambda: bind(layout=embed(100)),
        SpecError,
        "spec.m, layout: expected token ids below the vocabulary size 100, got 100. Use a reserved id inside the "
        "vocabulary: vLLM refuses prompts with other ids.",
    ),
    (
        "target outside",
        lambda: bind(update=replace([1, 101])),
        SpecError,
        "spec.m, update: expected token ids below the vocabulary size 100, got 101. Use a reserved id inside the "
        "vocabulary: vLLM refuses prompts with other ids.",
    ),
    (
        "no target",
        lambda: bind(update=replace([])),
        SpecError,
        "spec.m, update: expected a target of at least one token, got none.",
    ),
    (
        "vocabulary size",
        lambda: bind(config=SimpleNamespace(n=2)),
        SpecError,
        "config: expected a vocab_size in the language model's part, got None.",
    ),
    (
        "prompt type",
        lambda: bind().check_ids([1, 2.0]),
        InputError,
        "spec.prompt[1]: expected a token id, got float 2.0. Send integers.",
    ),
    (
        "prompt id",
        lambda: bind().check_ids([1, 2, 100]),
        InputError,
        "spec.prompt[2]: expected a token id from 0 to 99, got 100. Check the tokenizer.",
    ),
    (
        "bare",
        lambda: bind().place([1, 5, 5], {}),
        InputError,
        "spec.m: expected one item per placeholder, got 2 placeholder id(s) 5 and no item. Send "
        'multi_modal_data={"m": [...]}, or leave the placeholders out.',
    ),
    # -- placement
    (
        "not found",
        lambda: put([1], "replace", [7]),
        NotFound,
        "spec.m: expected 1 placeholder(s) [7] in the prompt for 1 item, got 0, and 0 placeholder id(s) in "
        "all. Write one "
        "placeholder per item, and nothing else with its id.",
    ),
    (
        "surplus",
        lambda: put([7, 1, 7, 5], "replace", [7]),
        InputError,
        "spec.m: expected 1 placeholder(s) [7] in the prompt for 1 item, got 2, and 1 placeholder id(s) in "
        "all. Write one "
        "placeholder per item, and nothing else with its id.",
    ),
    (
        "in place",
        lambda: put([5, 5, 5], "in_place", [], count=2),
        NotFound,
        "spec.m: expected 2 placeholder(s) [5] * 2 in the prompt for 2 items, got 1, and 3 placeholder id(s) "
        "in all. Write "
        "one placeholder per item, and nothing else with its id.",
    ),
    (
        "numbered placeholder without its item",
        lambda: place([1, 2], {}, "spec", {(2,): "m"}),
        InputError,
        "spec.m: expected one item per placeholder, got the placeholder [2] without its item. Send the item, or leave "
        "the placeholder out.",
    ),
    (
        "long target",
        lambda: put([1], "replace", range(20)),
        NotFound,
        "spec.m: expected 1 placeholder(s) [0, 1, 2, 3, ... 20 ids] in the prompt for 1 item, got 0, and 0 placeholder "
        "id(s) in all. Write one placeholder per item, and nothing else with its id.",
    ),
    (
        "numbered",
        lambda: place([71], {"m": [[Resolved("replace", (n,), Laid([5], b"\x01"))] for n in (71, 72)]}, "spec"),
        NotFound,
        "spec.m[1]: expected the placeholder [72] in the prompt, after those of the items before it, got none. Write "
        "one placeholder per item, in order.",
    ),
    (
        "stray beside an insert",
        lambda: put([1, 5], "start", []),
        InputError,
        "spec.m: expected a prompt without placeholder ids, got 1 of them. Leave them out: the items' placeholders are "
        "inserted.",
    ),
    (
        "prefix",
        lambda: put([1, 2, 3], "after", [7, 8]),
        NotFound,
        "spec.m: expected a prompt that starts with [7, 8], got one that starts with [1, 2].",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), [pytest.param(*row, id=name) for name, *row in TABLE])
def test_message(call, kind, text):
    assert said(call, kind) == text


def test_names_of_the_table_differ():
    assert len({name for name, *_ in TABLE}) == len(TABLE)


def test_every_message_is_pinned():
    assert not missed(MODULES, TABLE)


@pytest.mark.parametrize(("kind", "text"), [pytest.param(*row, id=name) for name, _, *row in TABLE])
def test_style(kind, text):
    """One sentence, a remedy after it, nothing doubled. Messages of Python's own protocols are free."""
    if issubclass(kind, MmkitError):
        check_style(text)


def test_remedy_for_a_stray_placeholder_beside_an_insert():
    with pytest.raises(InputError) as caught:
        put([1, 5], "start", [])
    assert "Write one placeholder per item" not in str(caught.value)


def test_the_target_that_is_missing_is_named():
    ways = [[Resolved("replace", (target,), Laid([5], b"\x01"))] for target in (71, 72)]
    with pytest.raises(InputError) as caught:
        place([71], {"m": ways}, "spec")
    assert "72" in str(caught.value)


def test_where_is_said_once():
    with pytest.raises(SpecError) as caught:
        bind(limit=-1)
    assert "limit: limit" not in str(caught.value)


def test_anchors_have_no_message_of_their_own():
    """Anchors at the start and end always match; only leftovers can be wrong with them."""
    for anchor in (start(), end(), after(token([]))):
        bound = bind(update=insert(anchor)).modalities["m"]
        ways = bound.ways(bound.scope(torch.zeros(2, 2), 0))
        assert place([1], {"m": [ways]}, "spec")[0] in ([5, 1], [1, 5])

"""Items and messages on the wire, without a server."""

import base64
import functools
import json
import struct
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image as PILImage

from mmkit import Image, InputError, Record, Tensor, Text, batched, between, derived, embed, fields, hf, item, replace
from mmkit.errors import MmkitError
from mmkit.language.items import ItemType
from mmkit.language.items.tensor import DTYPES
from mmkit.serve import protocol
from mmkit.serve.__main__ import check_environment
from mmkit.serve.decoding import decode_json
from mmkit.serve.protocol import Limits, TooLarge
from mmkit.serve.wire import Decoder, Media, describe_modality, encode
from tests.unit.common import bound, refused


def decoded(value, elements=10**6, items=100, kind=ItemType, beside=()):
    """What a server makes of the items of modality ``m``."""
    decoder = Decoder(Limits(elements=elements, items=items))
    return decoder.decode_items(msgspec.Raw(json.dumps(value).encode()), "items.m", kind, ["m_embeds", *beside])


def text(raw):
    return base64.b64encode(raw).decode()


def raw(data, dtype, shape):
    return {"data": text(data), "dtype": dtype, "shape": shape}


NUMBERS = st.sampled_from([n for n in DTYPES if n != "bfloat16"]).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


VIEWS = [
    lambda array: array,
    np.transpose,
    lambda array: array[..., ::2] if array.ndim else array,
    lambda array: array[..., 0] if array.ndim and array.size else array,
]


@given(NUMBERS, st.sampled_from(VIEWS))
def test_an_array_comes_back_bit_by_bit(array, view):
    """Whatever its strides and byte order; a tensor as well, also where numpy lacks its dtype."""
    array = view(array)
    tensor = torch.from_numpy(np.asarray(array))
    for sent in (array, array.astype(array.dtype.newbyteorder(">")), tensor, tensor.bfloat16()):
        kept = sent if isinstance(sent, torch.Tensor) else tensor
        back = decoded(encode({"m": sent})["m"])
        assert (back.shape, back.dtype) == (kept.shape, kept.dtype)
        assert torch.equal(*(torch.empty(one.shape, dtype=one.dtype).copy_(one).flatten().view(torch.uint8)
                             for one in (back, kept)))  # fmt: skip


def test_images_embeddings_and_bytes_come_back():
    """An image as a part of a chat message; embeddings under their name."""
    image = PILImage.new("RGB", (3, 2), (1, 2, 3))
    for part in (decoded(encode({"m": image})["m"]), *decoded(encode({"m": [image]})["m"])):
        assert (type(part), part.kind, part.url[:22]) == (Media, "image", "data:image/png;base64,")
    value = encode({"m": {"m_embeds": [torch.zeros(2, 3)]}})["m"]
    assert decoded(value)["m_embeds"][0].shape == (2, 3)
    assert decoded([raw(struct.pack("<4h", 1, -2, 3, 4), "int16", [2, 2])])[0].tolist() == [[1, -2], [3, 4]]


def test_what_derived_fields_tell_is_described_without_a_processor():
    sizes = {"pixels": batched(), "n": derived(item.width)}
    plan = bound(item=Image(largest=(3, 2)), fields=sizes, process=hf(), layout=embed(5) * fields.n, update=replace(9))
    told = describe_modality(plan, 4)
    assert (told.largest_tokens, told.placeholder) == (3, [9])


def test_embeddings_come_with_what_their_layout_reads():
    """As tensors, lists and arrays, also where a part of an item has the same name."""
    grid = {"grid": batched(shape=(2,), dtype="int64")}
    layout = embed(5) * (fields.grid[1] + 1)
    item = Record(grid=Tensor((2,), "int64"))
    plan = bound(item=item, fields=grid, layout=layout, embeds=True, process=hf())
    rows, grids = torch.rand(7, 3), torch.tensor([[1, 3], [1, 2]])
    for form in (grids, grids.tolist(), list(grids), grids.numpy()):
        sent = encode({"m": {"m_embeds": rows, "grid": form}})["m"]
        taken, *_ = plan.parser.parse(decoded(sent, kind=plan.item, beside=plan.parser.companions), 3)
        assert [(len(own.rows), own["grid"].tolist()) for own in taken] == [(4, [1, 3]), (3, [1, 2])]


FORMS = 'nested lists of numbers, {"data", "dtype", "shape"}, or one of {"image_url"}, {"video_url"}, {"audio_url"}'
KEYS = "data, dtype, shape, type, image_url, video_url, audio_url"
KNOWN = "float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64, bool"
NO_LIST = "items.m: expected a list of items, or one encoded tensor, got"
NO_NUMBER = "expected bool | int | float | array, got"
DEEP = functools.reduce(lambda inner, _: [inner], range(500), [])
WORD = Text(most=3)
CELL = Record(ids=Tensor((between(1, 3),), "int64"), values=Tensor((item.ids.length, 2)), name=WORD)
SHOWN = Record(image=Image(largest=(3, 2)), ids=Tensor((1,), "int64"))
ONE_CELL = {"ids": np.array([1, 2]), "values": torch.ones(2, 2), "name": "ab"}

# fmt: off
ITEMS: list[tuple[Any, str]] = [
    (None, f"{NO_LIST} null."),
    ("x", f'{NO_LIST} "x".'),
    (3, f"{NO_LIST} 3."),
    ([[1, "x"]], f"items.m[0][1]: {NO_NUMBER} str."),
    ([[1, None]], f"items.m[0][1]: {NO_NUMBER} null."),
    ([[1, {}]], f"items.m[0][1]: {NO_NUMBER} object."),
    (DEEP, f"items.m{'[0]' * 33}: expected bool | int | float, got array."),
    ([{"x": 1}], f"items.m[0].x: expected one of {KEYS}, got another one."),
    ([{"data": ""}], f"items.m[0]: expected {FORMS}, got an object with ['data']."),
    ([raw(b"", "complex64", [0])], f"items.m[0].dtype: expected one of {KNOWN}, got 'complex64'."),
    ([raw(b"", [1], [0])], "items.m[0].dtype: expected str, got array."),
    ([raw(b"", "int8", [-1])], "items.m[0].shape: expected a list of sizes, got [-1]."),
    ([raw(b"", "int8", [1.0])], "items.m[0].shape[0]: expected int, got float."),
    ([raw(b"123", "int16", [2])], "items.m[0].data: expected 4 bytes for shape (2,) of int16, got 3."),
    ([raw(b"\x02", "bool", [1])], "items.m[0].data: expected bytes 0 and 1 for bool, got 2."),
    ([{**raw(b"", "int8", [1]), "data": "!"}], "items.m[0].data: expected a valid value, got invalid base64 encoded s"),
    ([{**raw(b"", "int8", [1]), "data": 1}], "items.m[0].data: expected bytes, got int."),
    ([{"image_url": "data:"}], "items.m[0].image_url: expected object, got str."),
]
OF_A_KIND: list[tuple[Any, Any, str]] = [
    (WORD, [1], "items.m[0]: expected str, got int."),
    (CELL, [1], "items.m[0]: expected object, got int."),
    (Image(largest=(3, 2)), ["data:image/png;base64,AAAA"],
     'items.m[0]: expected an object {"image_url": {"url": "data:..."}}, got a text.'),
    (CELL, [{"x": 1}], "items.m[0].x: expected one of ids, values, name, got another one."),
    (CELL, {"x": 1}, "items.m.x: expected one of ids, values, name, got another one."),
    (CELL, [{"ids": {"x": 1}}], f"items.m[0].ids.x: expected one of {KEYS}, got another one."),
    (CELL, [{"ids": [["x"]]}], "items.m[0].ids[0][0]: expected bool | int | float | array, got str."),
    (CELL, {"m_embeds": [], "ids": [1]}, "items.m.ids: expected one of m_embeds, got another one."),
    (None, {"m_embeds": [], "data": ""}, "items.m.data: expected one of m_embeds, got another one."),
    (None, {"m_embeds": [{"image_url": {"url": "data:"}}]},
     "items.m.m_embeds[0]: expected numbers, got a part of kind image."),
]
TOO_LARGE: list[tuple[Any, str]] = [
    ([[1, 2], [3, 4, 5]], "items.m[1]: expected at most 4 numbers in one request, got more."),
    ([raw(b"", "int8", [2**62, 2**62, 0])], "items.m[0]: expected at most 4 numbers in one request, got more."),
    ([1, 1, 1, 1], "items.m: expected at most 3 items in one request, got more."),
]
NOT_IN_JSON = "expected a number, got {}, which JSON does not have. Send finite numbers; a gap in the data needs a mask"
UNKNOWN = (
    "expected one of prompt, items, uuids, sampling_params, model, mm_processor_kwargs, cache_salt, output, stream, "
    "return_token_ids, got another one. If "
)
PUT_IT = "is a parameter of sampling, put it into sampling_params."
BODIES = [
    (b'{"prompt": [1', "body: expected JSON, got invalid JSON: input data was truncated."),
    (b"{not json", "body: expected JSON, got invalid JSON at byte 1: object keys must be strings."),
    (b"[]", "body: expected object, got array."),
    (b'{"prompt": [1], "max_tokens": 1}', f"max_tokens: {UNKNOWN}max_tokens {PUT_IT}"),
    (b'{"prompt": [1], "a\\nb": 1}', rf"a\nb: {UNKNOWN}a\nb {PUT_IT}"),
    (b'{"prompt": [1], "a.b": 1}', "a.b: expected a field that there is, got another one."),
    (b'{"%s": 1}' % (b"x" * 99), f"{'x' * 40}...: {UNKNOWN}"),
    (b'{"prompt": [1.5]}', "prompt[0]: expected int, got float."),
    (b'{"prompt": 3}', "prompt: expected str | array | null, got int."),
    (b'{"prompt": [1], "stream": "1"}', "stream: expected bool, got str."),
    (b'{"prompt": [1], "model": NaN}', f"model: {NOT_IN_JSON.format('NaN')}"),
    (b'{"items": {"m": [[3, {"a\\"]": [0.5, -Infinity', f"items.m[0][1].a\\\"][1]: {NOT_IN_JSON.format('-Infinity')}"),
    (b'{"prompt": [1, Infinity]}', f"prompt[1]: {NOT_IN_JSON.format('Infinity')}"),
    (b'{"prompt": "%s", "model": NaN}' % (b"x" * 2**18), f"byte 262168: {NOT_IN_JSON.format('NaN')}"),
    (b'{"prompt": [1], "cache_salt": ""}', "cache_salt: expected str of length >= 1, got another."),
    (b'{"prompt": "\xff"}', "body: expected JSON, got invalid JSON: 'utf-8' codec can't decode byte 0xff in"),
    (b'{"mm_processor_kwargs": {"a": ' + b"[" * 5000,
     "body: expected JSON nested at most some hundred deep, got deeper."),
]
MESSAGES = [
    (b'{"type": "next", "window": {}}', "window: expected one of prompt, items, uuids, sampling_params, got another"),
    (b'{"type": "start", "window": {"keep": 1, "x": 2}}', "window.x: expected one of keep, got another one."),
    (b'{"type": "next", "x": 1', "x: expected a field that there is, got another one."),
    (b'{"type": "close", "x": 1}', "x: expected a field that there is, got another one."),
]
# fmt: on
REFUSED = [
    *[(InputError, text, partial(decoded, value)) for value, text in ITEMS],
    *[(InputError, text, partial(decoded, value, kind=kind)) for kind, value, text in OF_A_KIND],
    *[(TooLarge, text, partial(decoded, value, elements=4, items=3)) for value, text in TOO_LARGE],
    *[(InputError, text, partial(decode_json, protocol.GenerateRequest, body)) for body, text in BODIES],
    *[(InputError, text, partial(decode_json, protocol.ClientMessage, body)) for body, text in MESSAGES],
]


@pytest.mark.parametrize(("error", "text", "provoke"), REFUSED)
def test_what_is_refused(error, text, provoke):
    with pytest.raises(error) as caught:
        provoke()
    assert str(caught.value).startswith(text)
    assert ("MMKIT_SERVE_" in str(caught.value)) == (error is TooLarge)


def test_records_and_texts_come_back():
    plan = bound(
        item=CELL, layout=embed(5) * item.ids.length, process=lambda items, scope: {"x": [one["ids"] for one in items]}
    )
    kind, told = plan.item, describe_modality(plan, 4)
    for sent in (ONE_CELL, [ONE_CELL], [dict(reversed(ONE_CELL.items()))], {**ONE_CELL, "ids": [1, 2]}, told.example):
        back = decoded(encode({"m": sent})["m"], kind=kind)
        (record,) = plan.parser.parse_raw_items(back)
        assert list(record) == list(told.parts) == ["ids", "values", "name"]
    assert told.parts["values"] == protocol.PartInfo(
        expected="a (item.ids.length, 2) float32 tensor", shape=["item.ids.length", 2], dtype="float32"
    )
    assert (told.parts["ids"].shape, told.parts["name"].shape, told.parts["name"].dtype) == ([[1, 3]], [[1, 3]], "text")
    assert decoded([None, encode({"m": ONE_CELL})["m"]], kind=kind)[0] is None
    (shown,) = decoded(encode({"m": {"image": PILImage.new("RGB", (3, 2)), "ids": [1]}})["m"], kind=SHOWN)
    assert (shown["image"].kind, shown["ids"]) == ("image", [1])
    with pytest.raises(InputError, match=r"^items\.m\[0\]\.ids: expected a .* tensor, got a part of kind image\.$"):
        decoded([{"ids": {"image_url": {"url": "data:"}}}], kind=CELL)
    assert decoded({"m_embeds": [[[1.0]]]}, kind=kind) == {"m_embeds": [[[1.0]]]}
    assert decoded("ab", kind=WORD) == decoded(["ab"], kind=WORD) == ["ab"]
    assert decoded(encode({"m": ["ab", None]})["m"], kind=WORD) == ["ab", None]


@pytest.mark.parametrize("value", [{1, 2}, b"x", np.array(["x"]), np.zeros(1, complex)])
def test_what_the_client_cannot_send(value):
    with pytest.raises(InputError):
        encode({"m": value})


def test_limits_from_the_environment():
    """A server that could not do is refused before it loads. A client takes those of a newer server."""
    assert (
        Limits.from_environment({})
        == Limits()
        == msgspec.convert({**msgspec.to_builtins(Limits()), "newer": 1}, Limits)
    )
    assert Limits.from_environment({"MMKIT_SERVE_ITEMS": "7", "MMKIT_SERVE_IDLE_SECONDS": "1.5"}) == Limits(
        items=7, idle_seconds=1.5
    )
    check_environment({"VLLM_USE_RUST_FRONTEND": "0"})
    sentence = "VLLM_USE_RUST_FRONTEND: expected 0, got '1'. vLLM's front end in Rust runs no spec and …: unset it."
    refused(MmkitError, sentence, check_environment, {"VLLM_USE_RUST_FRONTEND": "1"})
    sentence = "MMKIT_SERVE_IDLE_SECONDS: expected float, got 'soon'."
    refused(MmkitError, sentence, check_environment, {"MMKIT_SERVE_IDLE_SECONDS": "soon"})
    for value in ("x", "0", "-1", "1e400"):
        with pytest.raises(MmkitError, match=r"^MMKIT_SERVE_ITEMS: expected (int|int >= 1|a valid value), got "):
            check_environment({"MMKIT_SERVE_ITEMS": value})

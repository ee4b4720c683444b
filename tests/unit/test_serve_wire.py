"""Items and messages on the wire, without a server."""

import base64
import json
import struct

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image as PILImage

from mmkit import Image, InputError, Record, Tensor, Text, batched, between, derived, embed, fields, hf, item, replace
from mmkit.document.schema import build_item_schema
from mmkit.errors import MmkitError
from mmkit.language.items import ItemType
from mmkit.language.items.tensor import DTYPES
from mmkit.serve import protocol
from mmkit.serve.__main__ import check_environment
from mmkit.serve.client import build_request
from mmkit.serve.description import describe_modality
from mmkit.serve.limits import ServerLimits
from mmkit.wire.decoding import decode_json
from mmkit.wire.items import Decoder, Media, encode, find_media
from mmkit.wire.limits import Limits, TooLarge
from tests.unit.common import bind_modality, expect_refusal

WORD = Text(most=3)
CELL = Record(ids=Tensor((between(1, 3),), "int64"), values=Tensor((item.ids.length, 2)), name=WORD)
ONE_CELL = {"ids": np.array([1, 2]), "values": torch.ones(2, 2), "name": "ab"}
PICTURE = Image(largest=(3, 2))


def decode(value, *, item_type=ItemType, companions=(), limits=Limits()):  # noqa: B008
    """Return what a server makes of the value of modality ``m``.

    Args:
        value: before it becomes JSON.
        item_type: of the modality.
        companions: fields beside the rows of precomputed embeddings.
        limits: of the server.
    """
    raw = msgspec.Raw(json.dumps(value).encode())
    return Decoder(limits).decode_items(raw, "items.m", item_type, ["m_embeds", *companions])


def send(value, *, item_type=ItemType):
    """Return what a server makes of a value that the client encodes."""
    return decode(encode({"m": value})["m"], item_type=item_type)


def array(data, dtype, shape):
    """Return the JSON of a tensor."""
    return {"data": base64.b64encode(data).decode(), "dtype": dtype, "shape": shape}


# -- what comes back ---------------------------------------------------------------------------------------------------

NUMPY_DTYPES = [name for name in DTYPES if name != "bfloat16"]


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    return draw(hnp.arrays(dtype, shape))


def view_bytes(tensor):
    """Return the bytes of a tensor, in which NaN equals itself."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    dense.copy_(tensor)
    return dense.flatten().view(torch.uint8)


def assert_same_bytes(received, expected):
    assert received.shape == expected.shape
    assert received.dtype == expected.dtype
    assert torch.equal(view_bytes(received), view_bytes(expected))


def assert_comes_back(values):
    """Check an array, its other byte order, and tensors of its values."""
    tensor = torch.from_numpy(np.array(values))
    assert_same_bytes(send(values), tensor)
    assert_same_bytes(send(values.astype(values.dtype.newbyteorder(">"))), tensor)
    assert_same_bytes(send(tensor), tensor)
    assert_same_bytes(send(tensor.bfloat16()), tensor.bfloat16())


@given(arrays())
def test_an_array_comes_back_bit_by_bit(values):
    assert_comes_back(values)


@given(arrays())
def test_a_transposed_array_comes_back(values):
    assert_comes_back(np.transpose(values))


@given(arrays().filter(np.ndim))
def test_an_array_with_gaps_comes_back(values):
    assert_comes_back(values[..., ::2])


@given(arrays().filter(np.size).filter(np.ndim))
def test_a_slice_of_an_array_comes_back(values):
    assert_comes_back(np.asarray(values[..., 0]))


@pytest.mark.parametrize("as_list", [False, True])
def test_a_picture_becomes_a_part_of_a_chat_message(as_list):
    picture = PILImage.new("RGB", (3, 2), (1, 2, 3))
    received = send([picture])[0] if as_list else send(picture)
    assert type(received) is Media
    assert received.kind == "image"
    assert received.url.startswith("data:image/png;base64,")


def test_embeddings_come_back_under_their_name():
    received = send({"m_embeds": [torch.zeros(2, 3)]})
    assert received["m_embeds"][0].shape == (2, 3)


def test_bytes_are_little_endian_values():
    data = struct.pack("<4h", 1, -2, 3, 4)
    (received,) = decode([array(data, "int16", [2, 2])])
    assert received.tolist() == [[1, -2], [3, 4]]


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_a_media_part_may_have_its_type(kind):
    part = f"{kind}_url"
    (received,) = decode([{"type": part, part: {"url": "data:"}}])
    assert received == Media(kind, "data:")


@pytest.mark.parametrize("value", [{1, 2}, b"x", np.array(["x"]), np.zeros(1, complex)])
def test_what_the_client_cannot_send(value):
    with pytest.raises(InputError):
        encode({"m": value})


def test_the_client_cannot_send_half_of_a_surrogate_pair():
    sentence = r"expected a text that UTF-8 can encode, got half of a surrogate pair at 1\.$"
    with pytest.raises(InputError, match=r"items\.m\[0\]\.name: " + sentence):
        encode({"m": [{"name": "a\ud800"}]})
    with pytest.raises(InputError, match=r"prompt: " + sentence):
        build_request(protocol.GenerateRequest, "a\ud800", None, {})


# -- embeddings, records, texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [torch.clone, torch.Tensor.tolist, list, torch.Tensor.numpy])
def test_embeddings_come_with_what_their_layout_reads(convert):
    """Also where a part of an item has the name of a field."""
    modality = bind_modality(
        item=Record(grid=Tensor((2,), "int64")),
        fields={"grid": batched(shape=(2,), dtype="int64")},
        layout=embed(5) * (fields.grid[1] + 1),
        embeds=True,
        process=hf(),
    )
    grids = torch.tensor([[1, 3], [1, 2]])
    value = encode({"m": {"m_embeds": torch.rand(7, 3), "grid": convert(grids)}})["m"]
    data = decode(value, item_type=modality.item, companions=modality.parser.companions)
    first, second = modality.parser.parse(data, 3).values
    assert len(first.rows) == 4
    assert first["grid"].tolist() == [1, 3]
    assert len(second.rows) == 3
    assert second["grid"].tolist() == [1, 2]


def bind_cells():
    """Return a bound modality of CELL."""

    def process(items, scope):
        return {"x": [cell["ids"] for cell in items]}

    return bind_modality(item=CELL, layout=embed(5) * item.ids.length, process=process)


@pytest.mark.parametrize(
    "value",
    [
        ONE_CELL,
        [ONE_CELL],
        [dict(reversed(ONE_CELL.items()))],
        {**ONE_CELL, "ids": [1, 2]},
    ],
)
def test_a_record_comes_back_with_its_parts_in_order(value):
    modality = bind_cells()
    received = send(value, item_type=modality.item)
    (record,) = modality.parser.parse_raw_items(received)
    assert list(record) == ["ids", "values", "name"]


def test_the_example_of_a_record_can_be_sent():
    modality = bind_cells()
    info = describe_modality(modality, 4)
    (record,) = modality.parser.parse_raw_items(send(info.example, item_type=modality.item))
    assert list(record) == list(info.parts)


def test_a_record_is_described_part_by_part():
    parts = describe_modality(bind_cells(), 4).parts
    assert list(parts) == ["ids", "values", "name"]
    assert parts["values"] == protocol.PartInfo(
        expected="a (item.ids.length, 2) float32 tensor", shape=["item.ids.length", 2], dtype="float32"
    )
    assert parts["ids"].shape == [[1, 3]]
    assert parts["name"].shape == [[1, 3]]
    assert parts["name"].dtype == "text"


def test_an_item_is_described_as_in_a_document_with_the_values_of_the_model():
    description = describe_modality(bind_cells(), 4).item
    assert description["type"] == "Record"
    assert description["parts"]["ids"] == {
        "type": "Tensor",
        "shape": ["between(1, 3)"],
        "dtype": "int64",
        "largest": "((3,),)",
    }
    assert description["parts"]["values"]["shape"] == ["item.ids.length", 2]
    assert description["parts"]["name"] == {"type": "Text", "most": 3}
    validator = jsonschema.Draft202012Validator(build_item_schema())
    validator.validate(description)
    picture = describe_modality(
        bind_modality(item=PICTURE, fields={"x": batched()}, process=lambda i, s: {"x": [1] * len(i)}), 4
    )
    validator.validate(picture.item)
    assert picture.item["type"] == "Image"


def test_an_item_with_a_function_that_has_no_name_has_no_description():
    item_type = Record(ids=Tensor((2,)), values=Tensor((lambda s: 1,)))
    modality = bind_modality(item=item_type, fields={"ids": batched(), "values": batched()})
    assert describe_modality(modality, 4).item is None


def test_a_record_may_have_a_picture():
    item_type = Record(image=PICTURE, ids=Tensor((1,), "int64"))
    (record,) = send({"image": PILImage.new("RGB", (3, 2)), "ids": [1]}, item_type=item_type)
    assert record["image"].kind == "image"
    assert record["ids"] == [1]


def test_a_media_part_is_no_tensor_of_a_record():
    sentence = r"^items\.m\[0\]\.ids: expected a .* tensor, got a part of kind image\.$"
    with pytest.raises(InputError, match=sentence):
        decode([{"ids": {"image_url": {"url": "data:"}}}], item_type=CELL)


def test_an_item_that_its_uuid_names_is_null():
    received = decode([None, encode({"m": ONE_CELL})["m"]], item_type=CELL)
    assert received[0] is None
    assert send(["ab", None], item_type=WORD) == ["ab", None]


def test_embeddings_of_records_are_lists_of_numbers():
    value = {"m_embeds": [[[1.0]]]}
    assert decode(value, item_type=CELL) == value


def test_a_text_is_one_item():
    assert decode("ab", item_type=WORD) == ["ab"]
    assert decode(["ab"], item_type=WORD) == ["ab"]


def test_a_modality_with_derived_fields_is_described_without_a_processor():
    modality = bind_modality(
        item=PICTURE,
        fields={"pixels": batched(), "n": derived(item.width)},
        process=hf(),
        layout=embed(5) * fields.n,
        update=replace(9),
    )
    info = describe_modality(modality, 4)
    assert info.largest_tokens == 3
    assert info.placeholder == [9]


# -- what is refused ---------------------------------------------------------------------------------------------------

FORMS = 'nested lists of numbers, {"data", "dtype", "shape"}, or one of {"image_url"}, {"video_url"}, {"audio_url"}'
KEYS = "['data', 'dtype', 'shape', 'type', 'image_url', 'video_url', 'audio_url']"
DTYPE_NAMES = "float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64, bool"
NO_LIST = "items.m: expected a list of items, or one encoded tensor, got"
NO_NUMBER = "expected bool | int | float | array, got"


def nest(depth):
    """Return an empty list in so many lists."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, f"{NO_LIST} null."),
        ("x", f'{NO_LIST} "x".'),
        (3, f"{NO_LIST} 3."),
        ([[1, "x"]], f"items.m[0][1]: {NO_NUMBER} str."),
        ([[1, None]], f"items.m[0][1]: {NO_NUMBER} null."),
        ([[1, {}]], f"items.m[0][1]: {NO_NUMBER} object."),
        (nest(500), f"items.m{'[0]' * 33}: expected bool | int | float, got array."),
        ([{"x": 1}], f"items.m[0].x: expected fields among {KEYS}, got 'x'."),
        ([{"data": ""}], f"items.m[0]: expected {FORMS}, got an object with ['data']."),
        ([{"image_url": "data:"}], "items.m[0].image_url: expected object, got str."),
        ({"m_embeds": {"": [1]}}, f"items.m.m_embeds: expected fields among {KEYS}, got ''."),
    ],
)
def test_a_malformed_item_is_refused(value, sentence):
    with pytest.raises(InputError) as caught:
        decode(value)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (array(b"", "complex64", [0]), f"items.m[0].dtype: expected one of {DTYPE_NAMES}, got 'complex64'."),
        (array(b"", [1], [0]), "items.m[0].dtype: expected str, got array."),
        (array(b"", "int8", [-1]), "items.m[0].shape: expected a list of sizes, got [-1]."),
        (array(b"", "int8", [1.0]), "items.m[0].shape[0]: expected int, got float."),
        (array(b"123", "int16", [2]), "items.m[0].data: expected 4 bytes for shape (2,) of int16, got 3."),
        (array(b"\x02", "bool", [1]), "items.m[0].data: expected bytes 0 and 1 for bool, got 2."),
        (
            {"data": "!", "dtype": "int8", "shape": [1]},
            "items.m[0].data: expected a valid value, got invalid base64 encoded s",
        ),
        ({"data": 1, "dtype": "int8", "shape": [1]}, "items.m[0].data: expected bytes, got int."),
    ],
)
def test_a_malformed_tensor_is_refused(value, sentence):
    with pytest.raises(InputError) as caught:
        decode([value])
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("item_type", "value", "sentence"),
    [
        (WORD, [1], "items.m[0]: expected str, got int."),
        (CELL, [1], "items.m[0]: expected object, got int."),
        (
            PICTURE,
            ["data:image/png;base64,AAAA"],
            'items.m[0]: expected an object {"image_url": {"url": "data:..."}}, got a text.',
        ),
        (CELL, [{"x": 1}], "items.m[0].x: expected fields among ['ids', 'values', 'name'], got 'x'."),
        (CELL, {"x": 1}, "items.m.x: expected fields among ['ids', 'values', 'name'], got 'x'."),
        (CELL, [{"ids": {"x": 1}}], f"items.m[0].ids.x: expected fields among {KEYS}, got 'x'."),
        (CELL, [{"ids": [["x"]]}], "items.m[0].ids[0][0]: expected bool | int | float | array, got str."),
        (CELL, {"m_embeds": [], "ids": [1]}, "items.m.ids: expected fields among ['m_embeds'], got 'ids'."),
        (None, {"m_embeds": [], "data": ""}, "items.m.data: expected fields among ['m_embeds'], got 'data'."),
        (
            None,
            {"m_embeds": [{"image_url": {"url": "data:"}}]},
            "items.m.m_embeds[0]: expected numbers, got a part of kind image.",
        ),
    ],
)
def test_an_item_of_another_kind_is_refused(item_type, value, sentence):
    with pytest.raises(InputError) as caught:
        decode(value, item_type=item_type)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([[1, 2], [3, 4, 5]], "items.m[1]: expected at most 4 numbers in one request, got more."),
        ([array(b"", "int8", [2**62, 2**62, 0])], "items.m[0]: expected at most 4 numbers in one request, got more."),
        ([1, 1, 1, 1], "items.m: expected at most 3 items in one request, got more."),
    ],
)
def test_items_beyond_a_limit_are_refused_with_its_variable(value, sentence):
    with pytest.raises(TooLarge) as caught:
        decode(value, limits=Limits(elements=4, items=3))
    assert str(caught.value).startswith(sentence)
    assert "MMKIT_SERVE_" in str(caught.value)


NOT_IN_JSON = "expected a number, got {}, which JSON does not have. Send finite numbers; a gap in the data needs a mask"
OTHER_FIELD = (
    "expected fields among ['prompt', 'items', 'uuids', 'sampling_params', 'model', 'mm_processor_kwargs', "
    "'cache_salt', 'output', 'stream', 'return_token_ids'], got "
)
PUT_IT = "is a parameter of sampling, put it into sampling_params."


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"prompt": [1', "body: expected JSON, got invalid JSON: input data was truncated."),
        (b"{not json", "body: expected JSON, got invalid JSON at byte 1: object keys must be strings."),
        (b'{"prompt": "\xff"}', "body: expected JSON, got invalid JSON: 'utf-8' codec can't decode byte 0xff in"),
        (b'{"prompt": [1], "model": NaN}', f"model: {NOT_IN_JSON.format('NaN')}"),
        (
            b'{"items": {"m": [[3, {"a\\"]": [0.5, -Infinity',
            f'items.m[0][1].a\\"][1]: {NOT_IN_JSON.format("-Infinity")}',
        ),
        (b'{"prompt": [1, Infinity]}', f"prompt[1]: {NOT_IN_JSON.format('Infinity')}"),
        (b'{"prompt": "%s", "model": NaN}' % (b"x" * 2**18), f"byte 262168: {NOT_IN_JSON.format('NaN')}"),
        (
            b'{"mm_processor_kwargs": {"a": ' + b"[" * 5000,
            "body: expected JSON nested at most some hundred deep, got deeper.",
        ),
    ],
)
def test_malformed_json_is_refused(body, sentence):
    with pytest.raises(InputError) as caught:
        decode_json(protocol.GenerateRequest, body)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"[]", "body: expected object, got array."),
        (b'{"prompt": [1], "max_tokens": 1}', f"max_tokens: {OTHER_FIELD}'max_tokens'. If max_tokens {PUT_IT}"),
        (b'{"prompt": [1], "a\\nb": 1}', rf"a\nb: {OTHER_FIELD}'a\nb'. If a\nb {PUT_IT}"),
        (b'{"prompt": [1], "a.b": 1}', "a.b: expected a field that there is, got 'a.b'."),
        (b'{"%s": 1}' % (b"x" * 99), f"{'x' * 40}...: {OTHER_FIELD}"),
        (b'{"prompt": [1.5]}', "prompt[0]: expected int, got float."),
        (b'{"prompt": 3}', "prompt: expected str | array | null, got int."),
        (b'{"prompt": [1], "stream": "1"}', "stream: expected bool, got str."),
        (b'{"prompt": [1], "cache_salt": ""}', "cache_salt: expected str of length >= 1, got another."),
    ],
)
def test_a_body_with_another_field_or_type_is_refused(body, sentence):
    with pytest.raises(InputError) as caught:
        decode_json(protocol.GenerateRequest, body)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            b'{"type": "next", "window": {}}',
            "window: expected fields among ['prompt', 'items', 'uuids', 'sampling_params'], got 'window'.",
        ),
        (b'{"type": "start", "window": {"keep": 1, "x": 2}}', "window.x: expected fields among ['keep'], got 'x'."),
        (b'{"type": "next", "x": 1', "x: expected a field that there is, got 'x'."),
        (b'{"type": "close", "x": 1}', "x: expected a field that there is, got 'x'."),
    ],
)
def test_a_message_of_a_session_with_another_field_is_refused(body, sentence):
    with pytest.raises(InputError) as caught:
        decode_json(protocol.ClientMessage, body)
    assert str(caught.value).startswith(sentence)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_limits_have_defaults():
    assert ServerLimits.from_environment({}) == ServerLimits()


def test_limits_come_from_the_environment():
    environment = {"MMKIT_SERVE_ITEMS": "7", "MMKIT_SERVE_IDLE_SECONDS": "1.5"}
    assert ServerLimits.from_environment(environment) == ServerLimits(items=7, idle_seconds=1.5)


def test_a_client_takes_the_limits_of_a_newer_server():
    newer = msgspec.to_builtins(ServerLimits()) | {"newer": 1}
    assert msgspec.convert(newer, ServerLimits) == ServerLimits()


def test_a_server_with_a_rust_front_end_is_refused_before_it_loads():
    check_environment({"VLLM_USE_RUST_FRONTEND": "0"})
    sentence = "VLLM_USE_RUST_FRONTEND: expected 0, got '1'. vLLM's front end in Rust runs no spec and …: unset it."
    expect_refusal(MmkitError, sentence, check_environment, {"VLLM_USE_RUST_FRONTEND": "1"})


def test_a_limit_that_is_no_number_is_refused_before_the_server_loads():
    sentence = "MMKIT_SERVE_IDLE_SECONDS: expected float, got 'soon'."
    expect_refusal(MmkitError, sentence, check_environment, {"MMKIT_SERVE_IDLE_SECONDS": "soon"})


@pytest.mark.parametrize("value", ["x", "0", "-1", "1e400"])
def test_a_limit_out_of_range_is_refused_before_the_server_loads(value):
    with pytest.raises(MmkitError, match=r"^MMKIT_SERVE_ITEMS: expected (int|int >= 1|a finite number), got "):
        check_environment({"MMKIT_SERVE_ITEMS": value})


# -- media -------------------------------------------------------------------------------------------------------------


def test_media_are_found_in_order_at_any_depth():
    media = [Media("image", f"http://x/{number}") for number in range(4)]
    data = {"scan": [media[0], {"views": [media[1], media[2]], "depth": [[0.5]]}, None], "photo": media[3]}
    parts = [part for name in data for part in find_media(data, name, f"items.{name}")]
    assert [part.media for part in parts] == media
    assert [part.where for part in parts] == [
        "items.scan[0]",
        "items.scan[1].views[0]",
        "items.scan[1].views[1]",
        "items.photo",
    ]
    for number, part in enumerate(parts):
        part.holder[part.key] = number
    assert data == {"scan": [0, {"views": [1, 2], "depth": [[0.5]]}, None], "photo": 3}

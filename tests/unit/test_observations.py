"""Observations of robots on the wire: what openpi's packer writes is read back, and all else is refused."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mmkit import InputError
from mmkit.serve.observations import decode_observation, encode_answer
from mmkit.wire.limits import Limits, TooLarge

from .common import expect_refusal

LIMITS = Limits(elements=10**6, body_bytes=10**7)


def is_ignored(key: str) -> bool:
    return key.startswith("ignored")


def decode(message: bytes) -> dict[str, Any]:
    return decode_observation(message, LIMITS, is_ignored)


def pack(**values: Any) -> bytes:
    return encode_answer(values)


def pack_array(data: Any = b"12345678", dtype: Any = "<f4", shape: Any = (2,), **others: Any) -> bytes:
    """Return an observation with one array, as openpi's packer writes it."""
    fields = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}
    fields.update({name.encode(): value for name, value in others.items()})
    return msgspec.msgpack.encode({"a": fields})


# -- what clients send -------------------------------------------------------------------------------------------------

DTYPES = ["?", "u1", "i1", "<f2", "<f4", "<f8", "<i2", "<i4", "<i8"]
ARRAYS = hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
LISTS = st.recursive(st.lists(NUMBERS, max_size=4), lambda inner: st.lists(inner, max_size=3), max_leaves=6)
KEYS = st.text("abc_", min_size=1, max_size=5)
LEAVES = ARRAYS | NUMBERS | st.text(max_size=20)
OBSERVATIONS = st.dictionaries(KEYS, LEAVES | st.dictionaries(KEYS, LEAVES, max_size=3), max_size=5)


def flatten(observation: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by key, as `openpi.transforms.flatten_dict` makes them."""
    flat: dict[str, Any] = {}
    for name, value in observation.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value
    return flat


def assert_same(a: Any, b: Any) -> None:
    if isinstance(b, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
    else:
        assert a == b
        assert type(a) is type(b)


@given(OBSERVATIONS)
def test_an_observation_comes_as_it_was_sent(observation: dict[str, Any]) -> None:
    decoded = decode(encode_answer(observation))
    expected = flatten(observation)
    assert decoded.keys() == expected.keys()
    for key, value in expected.items():
        assert_same(decoded[key], value)


@given(LISTS)
def test_lists_of_numbers_are_lists(numbers: list[Any]) -> None:
    assert decode(pack(a=numbers)) == {"a": numbers}


def test_the_keys_of_an_array_may_be_texts() -> None:
    message = msgspec.msgpack.encode({"a": {"__ndarray__": True, "data": b"12345678", "dtype": "<f4", "shape": [2]}})
    assert_same(decode(message)["a"], np.frombuffer(b"12345678", "<f4"))


def test_a_number_of_numpy_is_a_number() -> None:
    assert decode(pack(a={b"__npgeneric__": True, b"data": 0.5, b"dtype": "<f8"})) == {"a": 0.5}


def test_what_nobody_reads_is_not_looked_at() -> None:
    malformed = {b"__ndarray__": True, b"data": b"A" * 8, b"dtype": "|O", b"shape": (1,)}
    assert decode(pack(a=1, ignored=malformed, ignored_too=None)) == {"a": 1}
    assert decode(pack(a=1, ignored={"deep": malformed})) == {"a": 1}


def test_answers_are_little_endian_and_in_the_order_of_c() -> None:
    actions = np.arange(6, dtype=">f8").reshape(3, 2).T
    (array,) = msgspec.msgpack.decode(encode_answer([actions]))
    assert array[b"dtype"] == "<f8"
    assert array[b"shape"] == [2, 3]
    assert array[b"data"] == np.array([[0, 2, 4], [1, 3, 5]], "<f8").tobytes()


# -- what they must not send -------------------------------------------------------------------------------------------

DTYPE = "a: expected a dtype among <f2, <f4, <f8, <i2, <i4, <i8, <u2, <u4, <u8, |b1, |i1, |u1, got "
SHAPE = "a: expected a shape of at most 8 sizes >= 0, got "
NOT_A_MAP = "message: expected a map of MessagePack, got another value."
TOO_DEEP = "expected at most 64 keys, 4 maps deep, got more."
TRUNCATED = "message: expected MessagePack, got other bytes: input data was truncated."

VALUES = "expected a text, an array of numpy, a number, or lists of numbers at most 4 deep"
MALFORMED = {
    "nothing": (b"", NOT_A_MAP),
    "no MessagePack": (b"\xc1", NOT_A_MAP),
    "a list": (b"\x91\x01", NOT_A_MAP),
    "a map without its entry": (b"\x81", TRUNCATED),
    "a map of 2**32 - 1 entries": (b"\xdf\xff\xff\xff\xff", f"message: {TOO_DEEP}"),
    "a message that is cut": (pack_array()[:-4], TRUNCATED),
    "a message and more": (pack(a=1) + b"\0", "message: expected MessagePack, got other bytes: trailing characters …"),
    "a number as key": (msgspec.msgpack.encode({5: 1}), "message: expected str, got int."),
    "a key twice": (b"\x82\xa1a\x01\xa1a\x02", "message: expected each key once, got one several times."),
    "a key of an array twice": (
        b"\x81\xa1a\x85" + pack_array()[3 + 1 :] + msgspec.msgpack.encode(b"data") + msgspec.msgpack.encode(bytes(8)),
        "a: expected each key once, got one several times.",
    ),
    "bytes and a text as keys": (b"\x82\xc4\x01a\x01\xa1b\x01", "message: expected bytes, got str."),
    "65 keys": (pack(**{f"k{number}": 1 for number in range(65)}), f"message: {TOO_DEEP}"),
    "65 keys in two maps": (pack(a={f"k{number}": 1 for number in range(64)}), f"a: {TOO_DEEP}"),
    "five maps deep": (pack(a={"a": {"a": {"a": {"a": 1}}}}), f"a/a/a/a: {TOO_DEEP}"),
    "a million maps deep": (b"\x81\xa1a" * 10**6, "message: expected MessagePack, got other bytes: …"),
    "no value": (pack(a=None), f"a: {VALUES}, got None."),
    "bytes": (pack(a=b"x"), f"a: {VALUES}, got bytes."),
    "an extension": (
        pack(a=msgspec.msgpack.Ext(5, b"x")),
        f"a: {VALUES}, got ext.",
    ),
    "a list of texts": (
        pack(a=["x"]),
        f"a: {VALUES}, got str.",
    ),
    "lists too deep": (pack(a=[[[[[[1]]]]]]), f"a: {VALUES}, got array."),
    "four million empty lists": (
        b"\x81\xa1a\xdd" + (2**22).to_bytes(4, "big") + b"\x90" * 2**22,
        "a: expected at most 65536 bytes of numbers in lists, got more. Send an array of numpy.",
    ),
    "a list in many pieces": (
        pack(a=[1.5] * 5000, b=[1.5] * 5000),
        "b: expected at most 65536 bytes of numbers in lists, got more. Send an array of numpy.",
    ),
    "a text without an end": (pack(a="x" * 2**14), "a: expected a text of at most 16384 bytes, got more."),
    "no UTF-8": (b"\x81\xa1a\xa2\xff\xff", "a: expected MessagePack, got other bytes: 'utf-8' codec …"),
    "objects of Python": (pack_array(dtype="|O"), f"{DTYPE}'|O'."),
    "big-endian": (pack_array(dtype=">f4"), f"{DTYPE}'>f4'."),
    "texts": (pack_array(dtype="<U2", shape=(1,)), f"{DTYPE}'<U2'."),
    "a dtype of many fields": (pack_array(dtype="f8," * 10**5), f"{DTYPE}a longer one."),
    "a number as dtype": (pack_array(dtype=5), "a, dtype: expected str, got int."),
    "sizes below zero": (pack_array(shape=(-1, -2)), f"{SHAPE}[-1, -2]."),
    "nine sizes": (pack_array(shape=(1,) * 9), f"{SHAPE}[1, 1, 1, 1, 1, 1, 1, 1, 1]."),
    "a hundred sizes": (pack_array(shape=(1,) * 100), f"{SHAPE}a longer one."),
    "other bytes than the shape has": (
        pack_array(shape=(3,)),
        "a: expected 12 bytes for shape (3,) of float32, got 8.",
    ),
    "a text as shape": (pack_array(shape="2"), "a, shape: expected array, got str."),
    "a text as data": (pack_array(data="12345678"), "a, data: expected bytes, got str."),
    "bools of other bytes": (pack_array(dtype="|b1", shape=(8,)), "a: expected the bytes 0 and 1 for bool, got 56."),
    "an array with another key": (
        pack_array(order="F"),
        "a: expected an array with __ndarray__, data, dtype, shape, got other keys.",
    ),
    "a key of many characters": (
        pack(**{"x\n" * 99: None}),
        f"x\\nx\\n…...: {VALUES}, got None.",
    ),
}


@pytest.mark.parametrize(("message", "sentence"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_is_refused(message: bytes, sentence: str) -> None:
    expect_refusal(InputError, sentence, decode, message)


TOO_LARGE = {
    "a size of 0 that hides another": (
        pack_array(shape=(2**40, 0)),
        "a: expected at most 1000000 numbers in one observation, got more. Send less at once, or raise …",
    ),
    "too many bytes": (b"\x81\xa1a\xc6" + bytes(10**7), "message: expected at most 10000000 bytes, got more. Send …"),
}


@pytest.mark.parametrize(("message", "sentence"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_message_beyond_a_limit_is_refused(message: bytes, sentence: str) -> None:
    expect_refusal(TooLarge, sentence, decode, message)


GOOD = pack(a=np.arange(3), b={"c": [1, 2.5], "d": "text"}, e=True)


@given(st.binary(max_size=40), st.integers(0, len(GOOD)), st.integers(0, 20))
def test_any_bytes_are_an_observation_or_refused(noise: bytes, start: int, length: int) -> None:
    """The noise takes the place of some bytes of a good message."""
    for message in (noise, b"\x81\xa1a" + noise, GOOD[:start] + noise + GOOD[start + length :]):
        try:
            values = decode(message)
        except InputError:
            continue
        for value in values.values():
            assert isinstance(value, str | int | float | list | np.ndarray)

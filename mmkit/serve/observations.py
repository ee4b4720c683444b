"""Observations and answers on the wire of openpi's clients: MessagePack with numpy arrays.

An array is a map with the keys ``__ndarray__``, ``data``, ``dtype`` and ``shape``, as openpi's own
packer writes it. openpi's reader gives any dtype of the wire to numpy, so that one message can end
its process. Here a message is read from the outside in, by decoders of msgspec for the expected
types: a map becomes one entry for each of its keys, counted before, whose values stay bytes until
they are read as what they should be; an array is a view of the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Raw

from ..errors import InputError
from ..wire.decoding import parse_mistake, quote
from ..wire.limits import Limits

MAX_KEYS = 64
"""Keys of an observation, including the keys of the maps in it."""

MAX_DEPTH = 4
"""Maps within maps."""

MAX_TEXT_BYTES = 2**14
"""Bytes of a text."""

MAX_LIST_BYTES = 2**16
"""Bytes of numbers in lists, each of which becomes an object of Python. More are an array."""

MAX_DIMENSIONS = 8
"""Dimensions of an array."""

MESSAGE = "message"
"""Names a whole message in errors."""

_ARRAY_KEYS = ["__ndarray__", "data", "dtype", "shape"]
_SCALAR_MARK = "__npgeneric__"

_DTYPES = {"|b1": np.dtype(bool), "|u1": np.dtype(np.uint8), "|i1": np.dtype(np.int8)}
for _name in ("f2", "f4", "f8", "i2", "i4", "i8", "u2", "u4", "u8"):
    _DTYPES[f"<{_name}"] = np.dtype(f"<{_name}")

# msgspec has no type of lists within lists of any depth that holds numbers only
_NUMBERS: Any = int | float
for _ in range(MAX_DEPTH):
    _NUMBERS = int | float | bool | list[_NUMBERS]

_decode_text = msgspec.msgpack.Decoder(str).decode
_decode_numbers = msgspec.msgpack.Decoder(_NUMBERS).decode
_decode_shape = msgspec.msgpack.Decoder(list[int]).decode
_decode_bytes = msgspec.msgpack.Decoder(memoryview).decode
_decode_map = msgspec.msgpack.Decoder(dict[str, Raw]).decode
_decode_map_of_bytes = msgspec.msgpack.Decoder(dict[bytes, Raw]).decode


class _Format(NamedTuple):
    """The first bytes of a value that MessagePack writes in several ways."""

    first: int
    last: int
    longer: tuple[int, ...]

    def includes(self, raw: memoryview) -> bool:
        """Tell whether bytes begin with such a value."""
        return self.first <= raw[0] <= self.last or raw[0] in self.longer


_VALUES = f"a text, an array of numpy, a number, or lists of numbers at most {MAX_DEPTH} deep"
"""What may stand under a key, for errors."""

_MAP = _Format(0x80, 0x8F, (0xDE, 0xDF))
_TEXT = _Format(0xA0, 0xBF, (0xD9, 0xDA, 0xDB))
_BYTES = _Format(0xC4, 0xC6, ())


def decode_observation(
    message: bytes, limits: Limits, is_ignored: Callable[[str], bool]
) -> dict[str, Any]:
    """Return the values of an observation by key: texts, arrays, numbers and lists of numbers.

    Arrays are views of the message. The value under ``image`` in a map under ``observation`` has
    the key ``observation/image``.

    Args:
        message: MessagePack.
        limits: the server's limits.
        is_ignored: tells whether nobody reads what is under a key, which is then left out.

    Raises:
        InputError: names the key of the first value that is malformed.
        TooLarge: the message is beyond a limit.
    """
    if len(message) > limits.body_bytes:
        raise limits.make_error(MESSAGE, "body_bytes", "bytes")
    raw = memoryview(message)
    if not raw or not _MAP.includes(raw):
        raise InputError(MESSAGE, "a map of MessagePack", "another value")
    reader = _ObservationReader(limits, is_ignored)
    reader.parse_map(raw, "", 1)
    return reader.values


class _ObservationReader:
    """Reads one message.

    Args:
        limits: the server's limits.
        is_ignored: tells whether nobody reads what is under a key.

    Attributes:
        values: what was read, by key.
    """

    def __init__(self, limits: Limits, is_ignored: Callable[[str], bool]) -> None:
        self.values: dict[str, Any] = {}
        self._limits = limits
        self._is_ignored = is_ignored
        self._num_keys = 0
        self._num_elements = 0
        self._num_list_bytes = 0

    def parse_map(self, raw: memoryview, key: str, depth: int) -> None:
        """Read a map: an array, a number of numpy, or one of values by key.

        Args:
            raw: its bytes.
            key: its own key; empty for the message.
            depth: how many maps it is in, itself included.
        """
        where = _show(key)
        start, num_entries = _parse_map_header(raw)
        expected = f"at most {MAX_KEYS} keys, {MAX_DEPTH} maps deep"
        if num_entries > MAX_KEYS or depth > MAX_DEPTH + 1:  # an array is a map, too
            raise InputError(where, expected, "more")
        # openpi's packer writes the keys of an array as bytes, and others write texts
        if num_entries and len(raw) > start and _BYTES.includes(raw[start:]):
            decoded = _decode(_decode_map_of_bytes, raw, where)
            entries = {name.decode(errors="replace"): value for name, value in decoded.items()}
        else:
            entries = _decode(_decode_map, raw, where)
        if len(entries) < num_entries:
            raise InputError(where, "each key once", "one several times")
        if "__ndarray__" in entries:
            self._add(key, self._parse_array(entries, where))
        elif _SCALAR_MARK in entries and "data" in entries:
            self._add(key, self._parse_numbers(memoryview(entries["data"]), where))
        else:
            self._num_keys += num_entries
            if self._num_keys > MAX_KEYS or depth > MAX_DEPTH:
                raise InputError(where, expected, "more")
            for name, value in entries.items():
                inner_key = f"{key}/{name}" if key else name
                if not self._is_ignored(inner_key):
                    self._parse_value(memoryview(value), inner_key, depth)

    def _parse_value(self, raw: memoryview, key: str, depth: int) -> None:
        """Read the value of a key."""
        if _MAP.includes(raw):
            self.parse_map(raw, key, depth + 1)
        elif _TEXT.includes(raw):
            if len(raw) > MAX_TEXT_BYTES:
                raise InputError(_show(key), f"a text of at most {MAX_TEXT_BYTES} bytes", "more")
            self._add(key, _decode(_decode_text, raw, _show(key)))
        else:
            self._add(key, self._parse_numbers(raw, _show(key)))

    def _add(self, key: str, value: Any) -> None:
        """Add the value of a key, which may have come in another form, as a map in a map."""
        where = _show(key)
        if not key:
            raise InputError(where, "a map with keys", "a value without one")
        if key in self.values:
            raise InputError(where, "one value", "several")
        self.values[key] = value

    def _parse_numbers(self, raw: memoryview, where: str) -> Any:
        """Return a number, or lists of numbers."""
        self._num_list_bytes += len(raw)
        if self._num_list_bytes > MAX_LIST_BYTES:
            expected = f"at most {MAX_LIST_BYTES} bytes of numbers in lists"
            raise InputError(where, expected, "more", "Send an array of numpy.")
        return _decode(_decode_numbers, raw, where, expected=_VALUES)

    def _parse_array(self, entries: dict[str, Raw], where: str) -> np.ndarray[Any, Any]:
        """Return an array, which is a view of the message."""
        if sorted(entries) != _ARRAY_KEYS:
            expected = f"an array with {', '.join(_ARRAY_KEYS)}"
            raise InputError(where, expected, "other keys")
        dtype = _parse_dtype(memoryview(entries["dtype"]), where)
        shape = self._parse_shape(memoryview(entries["shape"]), where)
        data = _decode(_decode_bytes, memoryview(entries["data"]), f"{where}, data")
        num_bytes = math.prod(shape) * dtype.itemsize
        if len(data) != num_bytes:
            expected = f"{num_bytes} bytes for shape {shape} of {dtype.name}"
            raise InputError(where, expected, str(len(data)))
        values = np.frombuffer(data, np.uint8)
        if dtype.kind == "b" and values.size and values.max() > 1:
            raise InputError(where, "the bytes 0 and 1 for bool", str(values.max()))
        return values.view(dtype).reshape(shape)

    def _parse_shape(self, raw: memoryview, where: str) -> tuple[int, ...]:
        """Return the shape of an array, whose elements count towards the limit."""
        expected = f"a shape of at most {MAX_DIMENSIONS} sizes >= 0"
        if len(raw) > 9 * MAX_DIMENSIONS + 1:  # a number has at most nine bytes
            raise InputError(where, expected, "a longer one")
        shape = _decode(_decode_shape, raw, f"{where}, shape")
        if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0:
            raise InputError(where, expected, str(shape))
        # a size of 0 hides others that no array can have
        self._num_elements += math.prod(max(size, 1) for size in shape)
        if self._num_elements > self._limits.elements:
            raise self._limits.make_error(where, "elements", "numbers in one observation")
        return tuple(shape)


def _parse_dtype(raw: memoryview, where: str) -> np.dtype[Any]:
    """Return a dtype of the table; numpy would also make those that read memory as pointers."""
    expected = f"a dtype among {', '.join(sorted(_DTYPES))}"
    if len(raw) > MAX_TEXT_BYTES:
        raise InputError(where, expected, "a longer one")
    name = _decode(_decode_text, raw, f"{where}, dtype")
    if name not in _DTYPES:
        raise InputError(where, expected, quote(name))
    return _DTYPES[name]


def _parse_map_header(raw: memoryview) -> tuple[int, int]:
    """Return where the entries of a map begin, and how many it says that it has."""
    if raw[0] == 0xDE:
        return 3, int.from_bytes(raw[1:3], "big")
    if raw[0] == 0xDF:
        return 5, int.from_bytes(raw[1:5], "big")
    return 1, raw[0] & 0x0F


def _decode(
    decode: Callable[[Any], Any], raw: memoryview, where: str, *, expected: str | None = None
) -> Any:
    """Return what a decoder of msgspec makes of a value.

    Args:
        decode: of one type.
        raw: the bytes of the value.
        where: the key of the value.
        expected: what an error names in place of the decoder's type.

    Raises:
        InputError: the value is malformed, or of another type.
    """
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        mistake = parse_mistake(error)
        raise InputError(where, expected or mistake.expected, mistake.got) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = str(error).removeprefix("MessagePack data is malformed: ").rstrip(".")
        got = f"other bytes: {problem[:1].lower()}{problem[1:]}"
        raise InputError(where, "MessagePack", got) from None


def _show(key: str) -> str:
    """Return a key as errors name it; ``message`` for all of an observation."""
    if not key:
        return MESSAGE
    return quote(key)[1:-1]


def encode_answer(values: Any) -> bytes:
    """Return a message in MessagePack, with arrays as openpi's clients read them."""
    return msgspec.msgpack.encode(values, enc_hook=_encode_array)


def _encode_array(value: Any) -> Any:
    """Return an array as openpi's packer writes it."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__} has no form on the wire")
    array = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return {
        b"__ndarray__": True,
        b"data": array.tobytes(),
        b"dtype": array.dtype.str,
        b"shape": array.shape,
    }

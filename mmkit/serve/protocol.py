"""The protocol: what clients and servers say, as structs that msgspec reads and writes.

msgspec stops at the first mistake, and builds no value beyond the expected ones, so a refusal costs
little more than what was sent. Items, uuids and sampling parameters stay bytes until their names
are checked. Numbers are not cast: an integer field refuses 1.5 and "1".
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, Struct, field

from ..errors import InputError, MmkitError

T = TypeVar("T")

# -- limits ----------------------------------------------------------------------------------------

Least = Annotated[int, Meta(ge=1)]


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a server; the variable of `body_bytes` is MMKIT_SERVE_BODY_BYTES, and so on.

    Attributes:
        body_bytes: bytes of a request body or a session message.
        listed: values written out in the JSON of a request or a session message, prompt ids
            included. Each costs tens of bytes of memory, so this limit is lower than `elements`. A
            text is one value, base64 too.
        elements: numbers in the items of one request.
        items: items of one request, all modalities together; a spec's own limits hold too.
        pixels: pixels of the images and video frames of one request, before they are decoded.
        constraint: bytes in JSON of what a text must be (structured outputs, a response format,
            tools that must be called). The engine compiles it, which others wait for.
        sessions: open sessions of one API server. A session holds its tokens and items while it
            waits for its client.
        idle_seconds: seconds for which the server waits for a session's next message, or for its
            client to read one.
    """

    body_bytes: Least = 64 * 2**20
    listed: Least = 2**20
    elements: Least = 2**24
    items: Least = 4096
    pixels: Least = 2**25
    constraint: Least = 2**14
    sessions: Least = 256
    idle_seconds: Annotated[float, Meta(ge=1, le=1e9)] = 300.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Limits:
        """The limits that environment variables set.

        Raises:
            MmkitError: a value that is no number, or out of range.
        """
        names = {name: f"MMKIT_SERVE_{name.upper()}" for name in cls.__struct_fields__}
        given = {name: text for name in names if (text := environment.get(names[name], "").strip())}
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            name, expected, _ = _mistake(error)
            raise MmkitError(names[name], expected, repr(given[name])) from None

    def make_error(self, where: str, name: str, unit: str) -> TooLarge:
        """The refusal of what goes beyond one of them."""
        remedy = f"Send less at once, or raise MMKIT_SERVE_{name.upper()} on the server."
        return TooLarge(where, f"at most {getattr(self, name)} {unit}", "more", remedy)


class TooLarge(InputError):
    """A request beyond a limit of the server."""


# -- requests --------------------------------------------------------------------------------------

# a token id; one that the model lacks is refused with the size of its vocabulary
Id = Annotated[int, Meta(extra_json_schema={"minimum": 0})]


def _object(description: str) -> Meta:
    """The description of an object that stays bytes."""
    return Meta(description=description, extra_json_schema={"type": ["object", "null"]})


Items = Annotated[Raw, _object("Per modality one item or a list of items; or one encoded batch.")]
Uuids = Annotated[Raw, _object("Per modality and item a name for the cache, or null.")]
Sampling = Annotated[Raw, _object("Fields of vLLM's SamplingParams.")]
_SAMPLING = "sampling_params"
NULL = Raw(b"null")
"""The value of a field of bytes that a request leaves out."""


class Prompted(Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt with items; without a prompt, the server writes the placeholders of the items."""

    prompt: str | list[Id] | None = None
    items: Items = field(default_factory=NULL.copy)
    uuids: Uuids = field(default_factory=NULL.copy)
    sampling_params: Sampling = field(default_factory=NULL.copy)


class Generating(Prompted, kw_only=True, forbid_unknown_fields=True):
    """A request for tokens.

    Attributes:
        output: an output of the spec: the answer is one of it, which decides how many tokens are
            sampled, and which ids at each position.
    """

    model: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    output: str | None = None
    stream: bool = False


class GenerateRequest(Generating, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/mm/generate``. `return_token_ids` asks for the ids of the whole prompt and
    the ranges of its items, as at vLLM's tokens-in route."""

    return_token_ids: bool = False


class Window(Struct, forbid_unknown_fields=True):
    """How a session continues when the next message would not fit: the oldest items are dropped,
    with the tokens up to their end, so that at most `keep` items remain, those of the message among
    them."""

    keep: Annotated[int, Meta(ge=1, le=2**31 - 1)]


class StartMessage(Generating, kw_only=True, forbid_unknown_fields=True, tag="start"):
    """First message of a client in ``WS /v1/mm/session``. Its sampling parameters hold for each
    chunk. Without a `window`, the server refuses messages that do not fit."""

    window: Window | None = None


class NextMessage(Prompted, kw_only=True, forbid_unknown_fields=True, tag="next"):
    """The message after a chunk: more prompt with its items, or items alone. It may set another
    `max_tokens`."""


class CloseMessage(Struct, forbid_unknown_fields=True, tag="close"):
    """The end of a session."""


ClientMessage = StartMessage | NextMessage | CloseMessage
"""A message of a client in a session."""


# -- responses -------------------------------------------------------------------------------------


class _Out(Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """A message of a server. A client of an older version ignores fields that it does not know."""


class PromptTokensDetails(_Out, frozen=True, omit_defaults=False):
    """The origin of prompt tokens."""

    cached_tokens: int = 0


class Usage(_Out, frozen=True):
    """Token counts; in a session those of one chunk."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Produced(_Out, frozen=True):
    """An output: a tensor in the form of an item, base64 of little-endian values, ``dtype`` and
    ``shape``."""

    name: str
    tensor: dict[str, Any]


class Choice(_Out, frozen=True):
    """New tokens: one of the `n` answers, the new part of it in a stream, or those of a session.

    Attributes:
        produced: the output on the wire, where its name is ``output``; a stream sends it with the
            last tokens.
    """

    index: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    produced: Produced | None = field(default=None, name="output")

    @cached_property
    def output(self) -> np.ndarray[Any, Any] | None:
        """The output as an array, if the request asks for one."""
        if self.produced is None:
            return None
        tensor = self.produced.tensor
        values = np.frombuffer(base64.b64decode(tensor["data"]), tensor["dtype"])
        return values.reshape(tensor["shape"])


class Range(_Out, frozen=True):
    """The placeholders of one item in the ids of a prompt."""

    offset: int
    length: int


class Generation(_Out, frozen=True):
    """Answer of ``POST /v1/mm/generate``; in a stream, one event, of which the last has the usage.

    Attributes:
        prompt_token_ids: the whole prompt, with the placeholders of all items, if the request asks
            for it; in a stream in the first event.
        mm_placeholders: the ranges of the items in it, by modality.
    """

    id: str
    object: Literal["mm.generation", "mm.generation.chunk"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: dict[str, list[Range]] | None = None


class ErrorInfo(_Out, frozen=True, omit_defaults=False):
    """One error, in OpenAI's form. `param` is the path of what is wrong in the request, as
    ``items.actions[3]``."""

    message: str
    type: str
    code: int
    param: str | None = None


class ErrorBody(_Out, frozen=True):
    """Body of every refusal."""

    error: ErrorInfo


Sizes = list[int | str | list[int | str]] | None
"""Sizes, [least, most] where one varies; an expression for one that follows from other parts."""


class PartInfo(_Out, frozen=True):
    """One part of a record; see `ModalityInfo`."""

    expected: str
    shape: Sizes
    dtype: str | None
    alphabet: str | None = None


class ModalityInfo(PartInfo, frozen=True, kw_only=True):
    """The items that a model accepts for one modality.

    Attributes:
        expected: a short description of an item.
        shape: sizes of a tensor item, or of a text in characters, [least, most] where a size
            varies; None for media and records.
        dtype: canonical dtype of the item, or ``"text"``; None for media and records.
        alphabet: the characters that a text may have; None for any, and for other items.
        parts: the parts of a record, by name; None for other items.
        limit: the most items in one request.
        largest_tokens: encoder rows of the largest item; None where the Hugging Face processor
            decides.
        placeholder: the ids of one item in the caller's prompt; None where they depend on the item.
        embeds: name under which callers may send precomputed embeddings, or None.
        example: a smallest item in JSON, ready to send.
    """

    name: str
    limit: int | None
    largest_tokens: int | None
    placeholder: list[int] | None
    embeds: str | None
    example: Any
    parts: dict[str, PartInfo] | None = None


class OutputInfo(_Out, frozen=True):
    """One output of a model.

    Attributes:
        tokens: number of ids.
        shape: shape of the array.
        dtype: dtype of the array.
    """

    name: str
    tokens: int
    shape: list[int]
    dtype: str


class Modalities(_Out, frozen=True):
    """Answer of ``GET /v1/mm/modalities``."""

    model: str
    spec: str
    vocab_size: int
    max_model_len: int
    text: bool
    modalities: list[ModalityInfo]
    limits: Limits
    outputs: list[OutputInfo] = []


class ReadyMessage(_Out, frozen=True, tag="ready"):
    """First message of a server in a session."""

    session: str
    model: str
    remaining: int


class TokensMessage(Choice, frozen=True, kw_only=True, tag="tokens"):
    """New tokens of the current chunk, if the session streams."""

    remaining: int


class Dropped(_Out, frozen=True):
    """The tokens, and the items by modality, that a session's window dropped."""

    tokens: int
    items: dict[str, int]


class ChunkMessage(Choice, frozen=True, kw_only=True, tag="chunk"):
    """A complete chunk. `remaining` tokens fit into the session after it, before its window slides.

    Attributes:
        slid: the part that the window dropped before this chunk. The model has then read the rest
            again, and `usage` counts those tokens, too.
    """

    usage: Usage
    slid: Dropped | None = None
    remaining: int


class ErrorMessage(_Out, frozen=True, tag="error"):
    """A refusal. The session goes on as it was before the refused message, unless it is `fatal`."""

    error: ErrorInfo
    fatal: bool
    remaining: int


class ClosedMessage(_Out, frozen=True, tag="closed"):
    """Last message of a server in a session."""

    reason: str
    remaining: int


ServerMessage = ReadyMessage | TokensMessage | ChunkMessage | ErrorMessage | ClosedMessage
"""A message of a server in a session."""


# -- JSON ------------------------------------------------------------------------------------------

_SHOWN = 40
"""Characters of a bad value, or of a bad name, that an error shows."""
_ENDS = 500
"""Characters at either end of what msgspec says, which are looked at."""


decoder = cache(msgspec.json.Decoder)
"""The decoder of JSON of one type."""


def decode_json(kind: Any, raw: Any, where: str = "", names: Sequence[str] = ()) -> Any:
    """The value of a type that JSON holds.

    Args:
        kind: the type.
        raw: bytes, a text or `Raw`.
        where: names the value in errors; empty for the body.
        names: of the fields that there are, for the error about another one; by default those of
            the type, or of a message's kind.

    Raises:
        InputError: names the path of the first thing that is wrong.
    """
    try:
        return decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        path, expected, got = _mistake(error)
        path = path.removeprefix("[...]")  # some value, of which msgspec does not know the name
        root = where if path[:1] == "[" or not path else f"{where}."
        place = (root + path).lstrip(".") or "body"
        if got == _UNKNOWN:
            names = names or _fields(kind, path, raw)
            expected = f"one of {', '.join(names)}" if names else expected
            raise InputError(place, expected, got, _place_of(path, names)) from None
        raise InputError(place, expected, got) from None
    except RecursionError:
        expected = "JSON nested at most some hundred deep"
        raise InputError(where or "body", expected, "deeper") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(raw, where, str(error)) from None


_NO_NUMBER = re.compile(rb"-?(NaN|Infinity)")
_SIGNS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]')
_SEARCHED = 2**18
"""Bytes of malformed JSON in which a place is looked for."""


def _malformed(raw: Any, where: str, said: str) -> InputError:
    """Return the refusal of malformed JSON.

    Args:
        raw: bytes, a text or `Raw`.
        where: names it in errors; empty for the body.
        said: what msgspec says.
    """
    problem = said.removeprefix("JSON is malformed: ")
    problem, _, place = problem.removesuffix(")").partition(" (byte ")
    problem = problem[:1].lower() + problem[1:]
    if not place:
        return InputError(where or "body", "JSON", f"invalid JSON: {problem}")
    byte = int(place)
    text = raw.encode() if isinstance(raw, str) else bytes(raw)
    start = byte - 1 if text[byte - 1 : byte] == b"-" else byte
    number = _NO_NUMBER.match(text, start)
    if number is None:
        return InputError(where or "body", "JSON", f"invalid JSON at byte {byte}: {problem}")
    path = _path_at(text, start) if start <= _SEARCHED else f"byte {start}"
    root = where if path[:1] == "[" or not path else f"{where}."
    remedy = "Send finite numbers; a gap in the data needs a mask, or a number that stands for it."
    got = f"{number[0].decode()}, which JSON does not have"
    return InputError((root + path).lstrip(".") or "body", "a number", got, remedy)


def _path_at(text: bytes, end: int) -> str:
    """Return the path of the value that begins at a byte of JSON, as ``items.series[0][3]``."""
    path: list[int | str] = []
    word = ""
    for match in _SIGNS.finditer(text, 0, end):
        sign = match[0]
        if sign == b"[":
            path.append(0)
        elif sign == b"{":
            path.append("")
        elif sign in (b"]", b"}"):
            path.pop()
        elif sign == b":":
            path[-1] = word
        elif sign == b"," and path and isinstance(path[-1], int):
            path[-1] += 1
        elif sign[:1] == b'"':
            word = sign[1:-1].decode(errors="replace")
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(steps).removeprefix(".")


_INLINE = 2**16


async def run_in_thread_if_large(size: int, function: Callable[..., T], *args: Any) -> T:
    """The result of a function of so many bytes: many would hold up the other requests."""
    if size <= _INLINE:
        return function(*args)
    return await asyncio.to_thread(function, *args)


_UNKNOWN = "another one"


def _fields(kind: Any, path: str, raw: Any) -> Sequence[str]:
    """The fields of the object in which an error has found an unknown one, if that is a struct.

    Args:
        kind: the type of the JSON.
        path: of the unknown field.
        raw: the JSON, whose end may be malformed.
    """
    if kind == ClientMessage:
        kind = _message_kind(raw)
    *objects, _ = path.removesuffix("...").split(".")  # of a name that is cut
    for name in objects:
        kind = get_type_hints(kind).get(name) if _is_struct(kind) else None
        kind = next(filter(_is_struct, get_args(kind)), kind)
    return kind.__struct_encode_fields__ if _is_struct(kind) else ()


def _message_kind(raw: Any) -> Any:
    """The kind of a client's message; None where it is unknown."""
    try:
        tag = msgspec.json.decode(raw)["type"]
    except msgspec.MsgspecError:
        return None
    return next(kind for kind in get_args(ClientMessage) if kind.__struct_config__.tag == tag)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _place_of(name: str, fields: Sequence[str]) -> str:
    """What to do with a field that an object of these fields lacks."""
    if _SAMPLING not in fields:
        return ""
    return f"If {name} is a parameter of sampling, put it into {_SAMPLING}."


def _mistake(error: msgspec.ValidationError) -> tuple[str, str, str]:
    """Where a mistake is that msgspec has found, what it expected, and what it got."""
    told = str(error)
    told = told[:_ENDS] + told[max(_ENDS, len(told) - _ENDS) :]  # it may quote all that was sent
    text, _, place = told.replace("`key` in ", "").partition(" - at `$")
    path = place.rstrip("`").removeprefix(".")
    problem, _, name = text.removesuffix("`").partition(" field `")
    if name:
        path = f"{path}.{quote(name)[1:-1]}".lstrip(".")
        unknown = problem.endswith("unknown")
        return path, *(("a field that there is", _UNKNOWN) if unknown else ("a value", "none"))
    if not text.startswith("Expected "):
        return path, "a valid value", text[:1].lower() + text[1:]
    expected, _, got = text.removeprefix("Expected ").replace("`", "").partition(", got ")
    return path, expected, got or "another"


def decode_fields(
    raw: Any, kinds: Mapping[str, Any], where: str, *, nullable: bool = True
) -> dict[str, Any]:
    """The fields that an object has, in the order of `kinds`.

    Args:
        raw: its JSON; null is an object without fields.
        kinds: the types of the fields that it may have, by name.
        where: the object in errors.
        nullable: whether null is taken.

    Raises:
        InputError: no such object, or another field.
    """
    of = _struct(tuple(kinds.items()))
    value = decode_json(of | None if nullable else of, raw, where, tuple(kinds))
    pairs = zip(kinds, msgspec.structs.astuple(value) if value else (), strict=False)
    return {name: one for name, one in pairs if one is not UNSET}


@cache
def _struct(kinds: tuple[tuple[str, Any], ...]) -> Any:
    fields = [
        (f"field_{i}", kind, field(name=name, default=UNSET))
        for i, (name, kind) in enumerate(kinds)
    ]
    return msgspec.defstruct("Named", fields, forbid_unknown_fields=True)


def starts_with(raw: Raw, sign: bytes) -> bool:
    """Whether the JSON of a value begins so, as that of an object, a list or a text does."""
    return bytes(memoryview(raw)[:1]) == sign


def quote(value: str) -> str:
    """A text in the form that errors show."""
    return repr(value) if len(value) <= _SHOWN else f"'{repr(value[:_SHOWN])[1:-1]}...'"


def build_schema(model: Any) -> Any:
    """The JSON schema of a message, in one piece: a reference would be one into another
    document."""
    (told,), parts = msgspec.json.schema_components([model])

    def resolved(part: dict[str, Any]) -> Any:
        return whole(parts[part["$ref"].rpartition("/")[2]]) if "$ref" in part else part

    def whole(part: Any) -> Any:
        return json.loads(msgspec.json.encode(part), object_hook=resolved)

    return whole(told)

"""What goes over the wire: requests, responses and session messages, shared by the server and the
client.

Items are JSON in one of the forms of `mmkit.serve.wire`. Numbers are taken as they are: an integer
field refuses 1.5 and "1" rather than casting them.

Requests are decoded by msgspec, which stops at the first thing that is wrong, and makes nothing of
what it was not asked for: a refusal costs no more than what was sent. Items and uuids stay bytes
until their names are checked.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct
from pydantic import BaseModel, ConfigDict

from ..errors import InputError

M = TypeVar("M", bound=Struct)

MEDIA = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
"""The media parts of chat messages, and what they are."""

FORMS = (
    'nested lists of numbers, {"data", "dtype", "shape"}, {"safetensors"}, or one of '
    + ", ".join(f'{{"{name}"}}' for name in MEDIA)
)

DEEPEST = 32
"""Lists of numbers are nested so deep at most."""

_INT32 = 2**31 - 1
_SHOWN = 40
"""Characters of a bad value, or of a bad name, that an error shows."""

Count = Annotated[int, Meta(ge=0, le=_INT32)]
Positive = Annotated[int, Meta(ge=1, le=_INT32)]
Salt = Annotated[str, Meta(min_length=1)]
Items = Annotated[
    Raw,
    Meta(
        description="Per modality a list of items, or one encoded batch. An item is nested lists "
        "of numbers, "
        '{"data": base64 of little-endian values, "dtype", "shape"}, {"safetensors": base64 of a '
        "file with one "
        'tensor}, or a media part of a chat message, as {"image_url": {"url": '
        '"data:image/png;base64,..."}}.',
        extra_json_schema={"type": "object", "additionalProperties": {"type": ["array", "object"]}},
    ),
]
Id = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
"""A token id; one that the model lacks is refused with the size of its vocabulary."""
Prompt = Annotated[str | list[Id], Meta(description="A text, or token ids.", examples=[[1, 2, 3]])]
Uuids = Annotated[
    Raw,
    Meta(
        description="Per modality and item a name, under which the server caches the processed "
        "item.",
        extra_json_schema={
            "type": ["object", "null"],
            "additionalProperties": {
                "type": ["array", "null"],
                "items": {"type": ["string", "null"]},
            },
        },
    ),
]
Options = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})]


def nothing() -> Raw:
    """What a field of bytes is where a request leaves it out."""
    return Raw(b"null")


def no_items() -> Raw:
    """The items of a request without any."""
    return Raw(b"{}")


class UnknownField(InputError):
    """An object with a field that it may not have.

    Attributes:
        object: the path of the object; empty for the body.
        name: the field's, shortened.
    """

    def __init__(self, path: str, name: str) -> None:
        where = f"{path}.{name}" if path else name
        super().__init__(
            where, "no field of that name", "one", "The server's /docs list the fields."
        )
        self.object, self.name = path, name


class _Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a client sends."""


class _Out(BaseModel):
    """What a server sends; a client of an older version reads past fields that it does not know."""

    model_config = ConfigDict(frozen=True)


# -- requests --------------------------------------------------------------------------------------


class Sampling(_Body, kw_only=True):
    """How tokens are chosen, as in vLLM's `SamplingParams`; None takes the model's generation
    config, then vLLM's default."""

    max_tokens: Positive | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Count | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logprobs: (
        Annotated[Count, Meta(description="How many of the likeliest ids to tell per token.")]
        | None
    ) = None
    stop_token_ids: Annotated[list[Id], Meta(max_length=1024)] | None = None
    allowed_token_ids: list[Id] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class GenerateRequest(Sampling, kw_only=True):
    """Body of ``POST /v1/mm/generate``."""

    prompt: Prompt
    items: Items = msgspec.field(default_factory=no_items)
    uuids: Uuids = msgspec.field(default_factory=nothing)
    model: str | None = None
    mm_processor_kwargs: Options = msgspec.field(default_factory=nothing)
    cache_salt: Salt | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stop: Annotated[list[str], Meta(max_length=64)] | None = None
    stream: bool = False


class StartMessage(Sampling, kw_only=True):
    """First message of a client in ``WS /v1/mm/session``. `max_tokens` is that of each chunk."""

    type: Literal["start"]
    max_tokens: Positive
    prompt: Prompt | None = None
    items: Items = msgspec.field(default_factory=no_items)
    uuids: Uuids = msgspec.field(default_factory=nothing)
    model: str | None = None
    mm_processor_kwargs: Options = msgspec.field(default_factory=nothing)
    cache_salt: Salt | None = None
    stream: bool = False


class NextMessage(_Body, kw_only=True):
    """What comes after the last chunk: more prompt with its items, or items alone, whose
    placeholders the server then writes."""

    type: Literal["next"]
    prompt: Prompt | None = None
    items: Items = msgspec.field(default_factory=no_items)
    uuids: Uuids = msgspec.field(default_factory=nothing)
    max_tokens: Positive | None = None


class CloseMessage(_Body, kw_only=True):
    """The end of a session."""

    type: Literal["close"]


MESSAGES: dict[str, type[_Body]] = {
    "start": StartMessage,
    "next": NextMessage,
    "close": CloseMessage,
}


# -- responses -------------------------------------------------------------------------------------


class PromptTokensDetails(_Out):
    """Where prompt tokens came from."""

    cached_tokens: int = 0


class Usage(_Out):
    """Token counts; those of a session are of one chunk."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Choice(_Out):
    """One of the `n` answers; in a stream, what is new of it."""

    index: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None


class Generation(_Out):
    """Answer of ``POST /v1/mm/generate``; in a stream, one event, of which the last has the
    usage."""

    id: str
    object: Literal["mm.generation", "mm.generation.chunk"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ErrorInfo(_Out):
    """One error, in OpenAI's form. `param` is the path of what is wrong in the request, as
    ``items.actions[3]``."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorBody(_Out):
    """Body of every refusal."""

    error: ErrorInfo


class ModalityInfo(_Out):
    """What a model accepts of one modality.

    Attributes:
        expected: an item in a few words.
        shape: sizes of a tensor item, [least, most] where one varies; None for media.
        dtype: its canonical dtype; None for media.
        limit: the most items in one request.
        largest_tokens: encoder rows of the largest item; None where the Hugging Face processor
            decides.
        placeholder: ids that the prompt has for one item; None where they depend on it.
        in_place: the caller writes the whole placeholders, rather than a target that they replace.
        embeds: name under which precomputed embeddings may be sent, or None.
        example: a smallest item in JSON, ready to send.
    """

    name: str
    expected: str
    shape: list[int | list[int]] | None
    dtype: str | None
    limit: int | None
    largest_tokens: int | None
    placeholder: list[int] | None
    in_place: bool
    embeds: str | None
    example: Any


class ServerLimits(_Out):
    """The limits of a server; bytes, numbers, seconds."""

    body_bytes: int
    elements: int
    items: int
    sessions: int
    idle_seconds: float
    listed: int | None = None
    pixels: int | None = None


class Modalities(_Out):
    """Answer of ``GET /v1/mm/modalities``."""

    model: str
    spec: str
    vocab_size: int
    max_model_len: int
    text: bool
    modalities: list[ModalityInfo]
    limits: ServerLimits


class ReadyMessage(_Out):
    """First message of a server in a session."""

    type: Literal["ready"] = "ready"
    session: str
    model: str
    remaining: int


class TokensMessage(_Out):
    """New tokens of the current chunk, if the session streams."""

    type: Literal["tokens"] = "tokens"
    index: int
    token_ids: list[int]
    text: str | None = None
    remaining: int


class ChunkMessage(_Out):
    """A whole chunk. `remaining` tokens fit into the session after it."""

    type: Literal["chunk"] = "chunk"
    index: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    usage: Usage
    remaining: int


class ErrorMessage(_Out):
    """A refusal. The session goes on as it was before the refused message, unless it is `fatal`."""

    type: Literal["error"] = "error"
    error: ErrorInfo
    fatal: bool
    remaining: int


class ClosedMessage(_Out):
    """Last message of a server in a session."""

    type: Literal["closed"] = "closed"
    reason: str
    remaining: int


# -- parsing ---------------------------------------------------------------------------------------


def parse(model: type[M], raw: bytes | bytearray | str) -> M:
    """A message from its JSON.

    Raises:
        InputError: names the path of the first thing that is wrong.
    """
    message: M = decoded(decoder(model), raw, lambda field: _written(model, raw, field))
    return message


def schema(model: type[Struct]) -> dict[str, Any]:
    """The JSON schema of a message."""
    described: dict[str, Any] = msgspec.json.schema_components([model])[1][model.__name__]
    return described


@cache
def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """What decodes JSON of one type."""
    return msgspec.json.Decoder(kind)


def decoded(of: msgspec.json.Decoder[Any], raw: Any, written: Any = None, where: str = "") -> Any:
    """JSON as what a decoder makes of it.

    Args:
        of: the decoder.
        raw: bytes, a text or `Raw`.
        written: tells how a field of the outermost object was written, where errors should show
            that.
        where: names the value in errors; the body if it is empty.

    Raises:
        InputError: names the path of the first thing that is wrong.
    """
    try:
        return of.decode(raw)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), where, written) from None
    except RecursionError:
        raise InputError(
            where or "body", "JSON nested at most some hundred deep", "deeper"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        told = str(error).removeprefix("JSON is malformed: ")
        got = "one that ends too soon" if told == "Input data was truncated" else told
        raise InputError(where or "body", "JSON", got) from None


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "bytes": "base64 text",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
"""What msgspec calls the types of JSON, in words."""

_UNIONS = {
    "`bool | int | float | object | array | null`": FORMS,
    "`bool | int | float | array`": FORMS,
    "`bool | int | float`": f"lists nested at most {DEEPEST} deep",
}
"""What it calls the types of items."""


def _refusal(told: str, root: str, written: Any) -> InputError:
    """One sentence for what msgspec found."""
    text, at, place = told.rpartition(" - at `$")
    if not at:
        text, place = told, ""
    here = (root + place.rstrip("`")).lstrip(".")
    named = re.match(r"Object (missing required|contains unknown) field `(.*)`", text, re.DOTALL)
    if named:
        name = named[2] if len(named[2]) <= _SHOWN else f"{named[2][:_SHOWN]}..."
        name = name if name.isprintable() else repr(name)[1:-1]  # one line, whatever it holds
        if named[1].startswith("contains"):
            return UnknownField(here, name)
        return InputError(f"{here}.{name}" if here else name, "a value", "none")
    if text.startswith("Invalid base64"):
        return InputError(here, "base64 text", "another one")
    expected, _, got = text.removeprefix("Expected ").partition(", got ")
    kind = "a number with a point" if got == "`float`" else _in_words(got)
    shown = written(here) if written is not None and re.fullmatch(r"\.\w+`", place) else ""
    return InputError(here or "body", _in_words(expected), shown or kind or "another one")


def _in_words(text: str) -> str:
    """msgspec's types in words: `str | array | null` is a text, a list or null."""
    if text in _UNIONS:
        return _UNIONS[text]
    *before, last = re.sub(r"`([^`]*)`(.*)", r"\1\2", text).split(" | ")
    words = [_WORDS.get(name, name) for name in before]
    kind, _, rest = last.partition(" ")
    last = f"{_WORDS.get(kind, kind)} {rest}".rstrip()
    return f"{', '.join(words)} or {last}" if words else last


@cache
def _as_written(model: type[Struct]) -> Any:
    fields = [(name, Raw, msgspec.field(default=UNSET)) for name in model.__struct_fields__]
    return msgspec.json.Decoder(msgspec.defstruct(model.__name__, fields))


def _written(model: type[Struct], raw: Any, field: str) -> str:
    """How a number or a text was written; empty for anything else."""
    try:
        value = getattr(_as_written(model).decode(raw), field)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # more is wrong, further on
        return ""
    start = bytes(memoryview(value)[: _SHOWN + 1]).decode(errors="replace")
    if start.startswith(("[", "{")):
        return ""
    return start if len(start) <= _SHOWN else f"{start[:_SHOWN]}..."


def shown(value: str) -> str:
    """A text as errors show it."""
    return repr(value) if len(value) <= _SHOWN else f"a text like {value[:_SHOWN]!r}..."

"""The protocol: the messages of clients and servers, as structs that msgspec decodes and encodes.

Items, uuids and sampling parameters stay bytes until their names are checked. Numbers are not cast:
an integer field refuses 1.5 and "1".
"""

from __future__ import annotations

import base64
import json
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct, field

from .limits import ServerLimits

# -- requests --------------------------------------------------------------------------------------

# a token id; one that the model lacks is refused with the size of its vocabulary
Id = Annotated[int, Meta(extra_json_schema={"minimum": 0})]


def _describe(description: str) -> Meta:
    """Return the schema of an object that stays bytes."""
    return Meta(description=description, extra_json_schema={"type": ["object", "null"]})


Items = Annotated[Raw, _describe("Per modality one item or a list of items; or one encoded batch.")]
Uuids = Annotated[Raw, _describe("Per modality and item a name for the cache, or null.")]
Sampling = Annotated[Raw, _describe("Fields of vLLM's SamplingParams.")]
NULL = Raw(b"null")
"""The value of a field of bytes that a request leaves out."""


class PromptFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt with items; without a prompt, the server writes the targets of the items."""

    prompt: str | list[Id] | None = None
    items: Items = field(default_factory=NULL.copy)
    uuids: Uuids = field(default_factory=NULL.copy)
    sampling_params: Sampling = field(default_factory=NULL.copy)


class GenerationFields(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """A request for tokens.

    Attributes:
        output: an output of the spec: the answer is one of it, which decides how many tokens are
            sampled, and which ids at each position; or a text with such outputs in it.
    """

    model: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    output: str | None = None
    stream: bool = False


class GenerateRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/mm/generate``.

    Attributes:
        return_token_ids: whether the answer has the ids of the whole prompt and the ranges of its
            items, as at vLLM's tokens-in route.
    """

    return_token_ids: bool = False


class Window(Struct, forbid_unknown_fields=True):
    """How a session continues when the next message would not fit.

    The oldest items are dropped, with the tokens up to their end.

    Attributes:
        keep: the most items that remain, including the items of the message.
    """

    keep: Annotated[int, Meta(ge=1, le=2**31 - 1)]


class StartMessage(GenerationFields, kw_only=True, forbid_unknown_fields=True, tag="start"):
    """First message of a client in ``WS /v1/mm/session``.

    Its sampling parameters hold for each chunk. Without a `window`, the server refuses messages
    that do not fit.
    """

    window: Window | None = None


class NextMessage(PromptFields, kw_only=True, forbid_unknown_fields=True, tag="next"):
    """The message after a chunk: more prompt with its items, or only items.

    Of the sampling parameters it may set `max_tokens`.
    """


class CloseMessage(Struct, forbid_unknown_fields=True, tag="close"):
    """The end of a session."""


ClientMessage = StartMessage | NextMessage | CloseMessage
"""A message of a client in a session."""


# -- responses -------------------------------------------------------------------------------------


class _ServerStruct(Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """A message of a server.

    A client of an older version ignores the fields that it does not have.
    """


class PromptTokensDetails(_ServerStruct, frozen=True, omit_defaults=False):
    """The origin of prompt tokens."""

    cached_tokens: int = 0


class Usage(_ServerStruct, frozen=True):
    """Token counts; in a session, of one chunk."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Produced(_ServerStruct, frozen=True):
    """An output of the spec.

    Attributes:
        tensor: in the form of an item: base64 of little-endian values, ``dtype`` and ``shape``.
    """

    name: str
    tensor: dict[str, Any]


class AnswerPart(_ServerStruct, frozen=True):
    """A text, or an output of the spec, in an answer that has both.

    Attributes:
        type: which of the two.
        start: the position of its first id in the answer; negative for an output that
            began in the prompt.
        length: the number of its ids; an output's marks count.
        text: a text, if the server has a tokenizer.
        produced: a whole output on the wire, where its name is ``output``. None for an output that
            has begun only: a stream sends it again, and an answer was cut off.
    """

    type: Literal["text", "output"]
    start: int
    length: int
    text: str | None = None
    produced: Produced | None = field(default=None, name="output")

    @cached_property
    def output(self) -> np.ndarray[Any, Any] | None:
        """The output as an array; None for a text, and for an output that is not whole."""
        return _decode_output(self.produced)


class Choice(_ServerStruct, frozen=True):
    """New tokens of one of the `n` answers; in a stream, those since the last event.

    Attributes:
        produced: the output on the wire, where its name is ``output``, if it is the whole answer; a
            stream sends it with the last tokens.
        parts: the parts of an answer with outputs in a text. A stream sends the outputs alone: with
            the tokens in which one begins, and again when it is whole.
    """

    index: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    produced: Produced | None = field(default=None, name="output")
    parts: list[AnswerPart] | None = None

    @cached_property
    def output(self) -> np.ndarray[Any, Any] | None:
        """The output as an array, if the request asks for an output that is the whole answer."""
        return _decode_output(self.produced)


def _decode_output(produced: Produced | None) -> np.ndarray[Any, Any] | None:
    """Return an output on the wire as an array."""
    if produced is None:
        return None
    tensor = produced.tensor
    values = np.frombuffer(base64.b64decode(tensor["data"]), tensor["dtype"])
    return values.reshape(tensor["shape"])


class Range(_ServerStruct, frozen=True):
    """The placeholders of one item in the ids of a prompt."""

    offset: int
    length: int


class Generation(_ServerStruct, frozen=True):
    """Answer of ``POST /v1/mm/generate``; in a stream, one event.

    Attributes:
        usage: in a stream in the last event.
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


class ErrorInfo(_ServerStruct, frozen=True, omit_defaults=False):
    """One error, in OpenAI's form.

    Attributes:
        param: the path of what is wrong in the request, as ``items.actions[3]``.
    """

    message: str
    type: str
    code: int
    param: str | None = None


class ErrorBody(_ServerStruct, frozen=True):
    """Body of each refusal."""

    error: ErrorInfo


Sizes = list[int | str | list[int | str]] | None
"""Sizes, [least, most] for a size that varies, an expression if it follows from other parts."""


class PartInfo(_ServerStruct, frozen=True):
    """One part of a record; see `ModalityInfo`.

    Attributes:
        optional: whether an item may leave out the part.
    """

    expected: str
    shape: Sizes
    dtype: str | None
    alphabet: str | None = None
    parts: dict[str, Any] | None = None
    element: dict[str, Any] | None = None
    optional: bool = False


class ModalityInfo(PartInfo, frozen=True, kw_only=True):
    """The items that a model accepts for one modality.

    Attributes:
        expected: a short description of an item.
        shape: sizes of a tensor item, of a text in characters, or of a list in elements, [least,
            most] where a size varies; None for media and records.
        dtype: canonical dtype of the item, ``"text"`` or ``"list"``; None for media and records.
        alphabet: the characters that a text may have; None for any, and for other items.
        parts: the parts of a record, by name; None for other items.
        element: the elements of a list, described like a part; None for other items.
        limit: the most items in one request.
        largest_tokens: encoder rows of the largest item; None where the Hugging Face processor
            decides.
        placeholder: the ids of one item in the caller's prompt; None where they depend on the item.
        embeds: name under which callers may send precomputed embeddings, or None.
        example: a smallest item in JSON, ready to send.
        item: the item type as a document of the spec has it, with the values of this model; None
            where a function without a name decides.
    """

    name: str
    limit: int | None
    largest_tokens: int | None
    placeholder: list[int] | None
    embeds: str | None
    example: Any
    parts: dict[str, PartInfo] | None = None
    item: dict[str, Any] | None = None


class OutputInfo(_ServerStruct, frozen=True):
    """One output of a model.

    Attributes:
        tokens: number of ids, marks included; the most of an output of several units.
        shape: shape of the array of one unit.
        dtype: dtype of the array.
        after: the id behind which it stands in a text; None where it is the whole answer.
        until: the id that ends an output of several units.
        most: the most units.
    """

    name: str
    tokens: int
    shape: list[int]
    dtype: str
    after: int | None = None
    until: int | None = None
    most: int | None = None


class Modalities(_ServerStruct, frozen=True):
    """Answer of ``GET /v1/mm/modalities``."""

    model: str
    spec: str
    vocab_size: int
    max_model_len: int
    text: bool
    modalities: list[ModalityInfo]
    limits: ServerLimits
    outputs: list[OutputInfo] = []


class ReadyMessage(_ServerStruct, frozen=True, tag="ready"):
    """First message of a server in a session."""

    session: str
    model: str
    remaining: int


class TokensMessage(Choice, frozen=True, kw_only=True, tag="tokens"):
    """New tokens of the current chunk, if the session streams."""

    remaining: int


class Dropped(_ServerStruct, frozen=True):
    """What a session's window dropped: the number of tokens, and of items by modality."""

    tokens: int
    items: dict[str, int]


class ChunkMessage(Choice, frozen=True, kw_only=True, tag="chunk"):
    """A complete chunk.

    Attributes:
        remaining: number of tokens that fit into the session after it, before its window slides.
        slid: the part that the window dropped before this chunk. The model has then read all that
            remains again, and `usage` counts those tokens, too.
    """

    usage: Usage
    slid: Dropped | None = None
    remaining: int


class ErrorMessage(_ServerStruct, frozen=True, tag="error"):
    """A refusal.

    Attributes:
        fatal: whether the session is over. If not, it goes on as it was before the refused message.
    """

    error: ErrorInfo
    fatal: bool
    remaining: int


class ClosedMessage(_ServerStruct, frozen=True, tag="closed"):
    """Last message of a server in a session."""

    reason: str
    remaining: int


ServerMessage = ReadyMessage | TokensMessage | ChunkMessage | ErrorMessage | ClosedMessage
"""A message of a server in a session."""


# -- schemas ---------------------------------------------------------------------------------------


def build_schema(model: Any) -> Any:
    """Return the JSON schema of a struct in one piece, with the definition of each part inline.

    A reference would be one into another document.
    """
    (root,), definitions = msgspec.json.schema_components([model])

    def resolve(part: dict[str, Any]) -> Any:
        if "$ref" not in part:
            return part
        name = part["$ref"].rpartition("/")[2]
        return inline_definitions(definitions[name])

    def inline_definitions(part: Any) -> Any:
        return json.loads(msgspec.json.encode(part), object_hook=resolve)

    return inline_definitions(root)

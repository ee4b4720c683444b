"""The protocol: requests, responses and session messages, shared by the server and the client.

Items are JSON in one of the forms of `mmkit.serve.wire`. Numbers are not cast: an integer field
refuses 1.5 and "1". Items and uuids stay bytes until their names are checked.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from pydantic import BaseModel, ConfigDict, Field

_INT32 = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=_INT32)]
Positive = Annotated[int, Meta(ge=1, le=_INT32)]
Salt = Annotated[str, Meta(min_length=1)]
Items = Annotated[
    Raw,
    Meta(
        description="Per modality a list of items, one record or text, or one encoded batch. An "
        'item is nested lists of numbers, {"data": base64 of little-endian values, "dtype", '
        '"shape"}, {"safetensors": base64 of a file with one tensor}, a media part of a chat '
        'message, as {"image_url": {"url": "data:image/png;base64,..."}}, a text, or an object of '
        "the parts of a record, each in one of these forms.",
        extra_json_schema={
            "type": "object",
            "additionalProperties": {"type": ["array", "object", "string"]},
        },
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
Messages = Annotated[
    Raw,
    Meta(
        description="In place of prompt and items: messages as in OpenAI's chat, which the model's "
        'chat template makes a prompt of. An item is a content part: {"type": "cloud", "cloud": '
        'ITEM, "uuid": name or null}, in one of the forms of items.',
        extra_json_schema={"type": ["array", "null"], "items": {"type": "object"}},
    ),
]
Options = Annotated[Raw, Meta(extra_json_schema={"type": ["object", "null"]})]


def nothing() -> Raw:
    """The value of a field of bytes that a request leaves out."""
    return Raw(b"null")


def no_items() -> Raw:
    """The items of a request without items."""
    return Raw(b"{}")


class _Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """A message of a client."""


class _Out(BaseModel):
    """A message of a server. A client of an older version ignores fields that it does not know."""

    model_config = ConfigDict(frozen=True, serialize_by_alias=True, validate_by_name=True)


# -- requests --------------------------------------------------------------------------------------


class Prompted(_Body, kw_only=True):
    """A prompt with items."""

    prompt: Prompt | None = None
    items: Items = msgspec.field(default_factory=no_items)
    uuids: Uuids = msgspec.field(default_factory=nothing)


class Said(Prompted, kw_only=True):
    """A prompt with items, or messages with the options of the chat template, as in vLLM's chat."""

    messages: Messages = msgspec.field(default_factory=nothing)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Options = msgspec.field(default_factory=nothing)


class Sampling(Said, kw_only=True):
    """The prompt, and the choice of tokens after it, as in vLLM's `SamplingParams`; None takes the
    model's generation config, then vLLM's default."""

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
    logit_bias: dict[Id, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    output: (
        Annotated[
            str,
            Meta(
                description="An output of the spec: the answer is one of it, which decides how "
                "many tokens are sampled, and which ids at each position."
            ),
        ]
        | None
    ) = None
    output_format: (
        Annotated[
            Literal["tensor", "png"],
            Meta(description='Its form in the answer: "tensor" by default, "png" of an image.'),
        ]
        | None
    ) = None


class StructuredOutputs(_Body, kw_only=True):
    """The form of an answer's text, as in vLLM's `StructuredOutputsParams`: one of these. The
    options of `StructuredOutputsParams` are left out: no backend of vLLM reads them from a
    request."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class _Format(_Body, tag_field="type"):
    """The form of an answer in OpenAI's `response_format`."""


class TextFormat(_Format, tag="text"):
    """Any text."""


class JsonObjectFormat(_Format, tag="json_object"):
    """An object in JSON."""


class JsonSchema(_Body, kw_only=True):
    """A JSON schema with its name."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Format, tag="json_schema"):
    """JSON that a schema allows."""

    json_schema: JsonSchema


class GenerateRequest(Sampling, kw_only=True):
    """Body of ``POST /v1/mm/generate``."""

    model: str | None = None
    mm_processor_kwargs: Options = msgspec.field(default_factory=nothing)
    cache_salt: Salt | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stop: Annotated[list[str], Meta(max_length=64)] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    stream: bool = False


class PoolingRequest(Prompted, kw_only=True):
    """Body of ``POST /v1/mm/pooling``. Without a prompt, the server writes the placeholders of the
    items. `task` is one of vLLM's pooling tasks; by default the model's."""

    model: str | None = None
    mm_processor_kwargs: Options = msgspec.field(default_factory=nothing)
    cache_salt: Salt | None = None
    task: str | None = None


class Window(_Body, kw_only=True):
    """How a session continues when the next message would not fit: the window drops the oldest
    items, with the tokens that belong to them.

    Attributes:
        keep: the most items that remain, those of the new message included.
        items: the most items at once, where that is less than the model's limit.
        cut: where the window may begin: right after an item's placeholders, or at the beginning of
            a message of the client's.
        prefix: number of first tokens that always stay, with their items; `keep` does not count
            these items.
    """

    keep: Positive
    items: Positive | None = None
    cut: Literal["item", "turn"] = "item"
    prefix: Count = 0


class StartMessage(Sampling, kw_only=True):
    """First message of a client in ``WS /v1/mm/session``. `max_tokens` holds for each chunk; an
    `output` decides it. Without a `window`, the server refuses messages that do not fit."""

    type: Literal["start"]
    window: Window | None = None
    model: str | None = None
    mm_processor_kwargs: Options = msgspec.field(default_factory=nothing)
    cache_salt: Salt | None = None
    stream: bool = False


class NextMessage(Said, kw_only=True):
    """The message after a chunk: more prompt with its items, items alone, whose placeholders the
    server then writes, or more messages."""

    type: Literal["next"]
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
    """The origin of prompt tokens."""

    cached_tokens: int = 0


class Usage(_Out):
    """Token counts; in a session those of one chunk."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Produced(_Out):
    """An output in the form that the request asks for: a tensor in the form of an item, base64 of
    little-endian values, ``dtype`` and ``shape``; or base64 of a PNG file."""

    name: str
    tensor: dict[str, Any] | None = None
    png: str | None = None

    def array(self) -> np.ndarray[Any, Any]:
        """The output as an array; a PNG as uint8 (height, width, 3), which needs Pillow."""
        if self.tensor is not None:
            return _array(self.tensor)
        from PIL import Image

        return np.asarray(Image.open(io.BytesIO(base64.b64decode(self.png or ""))))


class _Answering(_Out):
    """An answer that may have an output.

    Attributes:
        produced: the output on the wire, where its name is ``output``; a stream sends it with the
            last tokens.
    """

    produced: Produced | None = Field(None, alias="output")

    @cached_property
    def output(self) -> np.ndarray[Any, Any] | None:
        """The output as an array, if the request asks for one."""
        return None if self.produced is None else self.produced.array()


class Choice(_Answering):
    """One of the `n` answers; in a stream, the new part of it."""

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


class Pooling(_Out):
    """Answer of ``POST /v1/mm/pooling``.

    Attributes:
        data: what the pooler returns for the request, a float32 tensor in the form of an item:
            base64 of little-endian values, ``dtype`` and ``shape``.
    """

    id: str
    object: Literal["mm.pooling"] = "mm.pooling"
    created: int
    model: str
    data: dict[str, Any]
    usage: Usage

    def array(self) -> np.ndarray[Any, Any]:
        """`data` as an array."""
        return _array(self.data)


def _array(tensor: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    values = np.frombuffer(base64.b64decode(tensor["data"]), tensor["dtype"])
    return values.reshape(tensor["shape"])


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


Sizes = list[int | str | list[int | str]] | None
"""Sizes, [least, most] where one varies; an expression for one that follows from other parts."""


class PartInfo(_Out):
    """One part of a record, or one field beside an embedding; see `ModalityInfo`."""

    expected: str
    shape: Sizes
    dtype: str | None


class ModalityInfo(_Out):
    """The items that a model accepts for one modality.

    Attributes:
        expected: a short description of an item.
        shape: sizes of a tensor item, or of a text in characters, [least, most] where a size
            varies; None for media and records.
        dtype: canonical dtype of the item, or ``"text"``; None for media and records.
        parts: the parts of a record, by name; None for other items.
        limit: the most items in one request.
        largest_tokens: encoder rows of the largest item; None where the Hugging Face processor
            decides.
        placeholder: the ids of one item in the caller's prompt; None where they depend on the item.
        in_place: whether the caller writes the whole placeholders, rather than a target that they
            replace.
        embeds: name under which callers may send precomputed embeddings, or None.
        embeds_with: the fields beside the embeddings, by name.
        example: a smallest item in JSON, ready to send.
    """

    name: str
    expected: str
    shape: Sizes
    dtype: str | None
    parts: dict[str, PartInfo] | None = None
    limit: int | None
    largest_tokens: int | None
    placeholder: list[int] | None
    in_place: bool
    embeds: str | None
    embeds_with: dict[str, PartInfo] = {}
    example: Any


class OutputInfo(_Out):
    """One output of a model.

    Attributes:
        tokens: number of ids.
        shape: shape of the array.
        dtype: dtype of the array.
        png: whether the array is an image, uint8 (height, width, 3), which `output_format` may ask
            for as a PNG.
    """

    name: str
    tokens: int
    shape: list[int]
    dtype: str
    png: bool


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
    outputs: list[OutputInfo] = []
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


class Slid(_Out):
    """The tokens, and the items by modality, that a session's window dropped."""

    tokens: int
    items: dict[str, int]


class ChunkMessage(_Answering):
    """A complete chunk. `remaining` tokens fit into the session after it, before its window slides.

    Attributes:
        slid: the part that the window dropped before this chunk. The model has then read the rest
            again, and `usage` counts those tokens, too.
    """

    type: Literal["chunk"] = "chunk"
    index: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    usage: Usage
    slid: Slid | None = None
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

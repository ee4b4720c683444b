"""What goes over the wire: requests, responses and session messages, shared by the server and the client.

Items are JSON in one of the forms of `mmkit.serve.wire`. Numbers are taken as they are: an integer field refuses 1.5
and "1" rather than casting them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import InputError

M = TypeVar("M", bound=BaseModel)

_INT32 = 2**31 - 1
_SHOWN = 40
"""Characters of a bad value that an error shows."""

Count = Annotated[int, Field(strict=True, ge=0, le=_INT32)]
Positive = Annotated[int, Field(strict=True, ge=1, le=_INT32)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Items = Annotated[
    dict[str, Any],
    Field(
        description="Per modality a list of items, or one encoded batch. An item is nested lists of numbers, "
        '{"data": base64 of little-endian values, "dtype", "shape"}, {"safetensors": base64 of a file with one '
        'tensor}, or a media part of a chat message, as {"image_url": {"url": "data:image/png;base64,..."}}.'
    ),
]
Prompt = Annotated[str | list[Any], Field(description="A text, or token ids.")]
Uuids = Annotated[
    dict[str, list[str | None]] | None,
    Field(description="Per modality and item a name, under which the server caches the processed item."),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Out(BaseModel):
    """What a server sends; a client of an older version reads past fields that it does not know."""

    model_config = ConfigDict(frozen=True)


# -- requests ----------------------------------------------------------------------------------------------------------


class Sampling(_Body):
    """How tokens are chosen, as in vLLM's `SamplingParams`; None takes the model's generation config, then vLLM's
    default."""

    max_tokens: Positive | None = None
    min_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    logprobs: Annotated[Count, Field(description="How many of the likeliest ids to tell per token.")] | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=1024)] | None = None
    allowed_token_ids: list[Count] | None = None
    ignore_eos: Annotated[bool, Field(strict=True)] | None = None
    skip_special_tokens: Annotated[bool, Field(strict=True)] | None = None


class GenerateRequest(Sampling):
    """Body of ``POST /v1/mm/generate``."""

    prompt: Prompt
    items: Items = {}
    uuids: Uuids = None
    model: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    n: Annotated[Positive, Field(le=128)] = 1
    stop: Annotated[list[str], Field(max_length=64)] | None = None
    stream: Annotated[bool, Field(strict=True)] = False


class StartMessage(Sampling):
    """First message of a client in ``WS /v1/mm/session``. `max_tokens` is that of each chunk."""

    type: Literal["start"]
    max_tokens: Positive
    prompt: Prompt | None = None
    items: Items = {}
    uuids: Uuids = None
    model: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    stream: Annotated[bool, Field(strict=True)] = False


class NextMessage(_Body):
    """What comes after the last chunk: more prompt with its items, or items alone, whose placeholders the server then
    writes."""

    type: Literal["next"]
    prompt: Prompt | None = None
    items: Items = {}
    uuids: Uuids = None
    max_tokens: Positive | None = None


class CloseMessage(_Body):
    """The end of a session."""

    type: Literal["close"]


MESSAGES: dict[str, type[_Body]] = {"start": StartMessage, "next": NextMessage, "close": CloseMessage}


# -- responses ---------------------------------------------------------------------------------------------------------


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
    """Answer of ``POST /v1/mm/generate``; in a stream, one event, of which the last has the usage."""

    id: str
    object: Literal["mm.generation", "mm.generation.chunk"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ErrorInfo(_Out):
    """One error, in OpenAI's form. `param` is the path of what is wrong in the request, as ``items.actions[3]``."""

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
        largest_tokens: encoder rows of the largest item; None where the Hugging Face processor decides.
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


# -- parsing -----------------------------------------------------------------------------------------------------------


def parse(model: type[M], raw: bytes | str) -> M:
    """A message from its JSON.

    Raises:
        InputError: names the path of the first thing that is wrong.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise refusal(error) from None
    except RecursionError:
        raise InputError("body", "JSON nested at most 200 deep", "deeper") from None


def refusal(error: ValidationError) -> InputError:
    """One sentence for what pydantic found."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = path(first["loc"]) or "body"
    expected = first["msg"].removeprefix("Input should be ")
    if expected.startswith(("greater", "less")):
        expected = f"a number {expected}"
    if first["type"] == "missing":
        return InputError(where, "a value", "none")
    if first["type"] == "extra_forbidden":
        return InputError(where, "no field of that name", "one", "The server's /docs list the fields.")
    if first["type"] == "json_invalid":
        return InputError(where, "JSON", first["msg"].partition(": ")[2])
    return InputError(where, expected, shown(first["input"]))


def path(location: tuple[int | str, ...]) -> str:
    """``("items", "actions", 3)`` to ``items.actions[3]``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in ("str", "list[any]", "constrained-str"):  # the branches of a union
            text += f".{part}" if text else part
    return text


def shown(value: Any) -> str:
    """A value as errors show it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"a {type(value).__name__} like {text[:_SHOWN]}..."

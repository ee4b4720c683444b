"""The types of the client's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from .protocol import TokensMessage


class _Array(Protocol):
    """Ids in an array or a tensor, (tokens,)."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | _Array | None
"""A text, or token ids; None for neither."""
Items = Mapping[str, Any] | None
"""Per modality a list of items or a batch, as in vLLM's ``multi_modal_data``."""
Messages = Sequence[Mapping[str, Any]] | None
Uuids = Mapping[str, Sequence[str | None]] | None
"""Per modality and item a name under which the server caches the processed item."""
OnTokens = Callable[[TokensMessage], object]


class _Choosing(TypedDict, total=False):
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logprobs: int | None
    stop_token_ids: list[int] | None
    allowed_token_ids: list[int] | None
    logit_bias: Mapping[int, float] | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    output: str | None
    output_format: Literal["tensor", "png"] | None


class SamplingOptions(_Choosing, total=False):
    """The fields of `protocol.Sampling`; None, or leaving a field out, takes the server's
    default."""

    max_tokens: int | None


class _Processing(TypedDict, total=False):
    uuids: Uuids
    mm_processor_kwargs: Mapping[str, Any] | None
    cache_salt: str | None


class _Chatting(TypedDict, total=False):
    messages: Messages
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


class GenerateOptions(SamplingOptions, _Processing, _Chatting, total=False):
    """Options of a request besides its prompt and items.

    Attributes:
        messages: in place of prompt and items, messages as in OpenAI's chat, with items as content
            parts, ``{"type": "cloud", "cloud": item}``; the server's chat template makes the
            prompt.
        add_generation_prompt: whether the prompt ends with the beginning of an answer; True by
            default.
        continue_final_message: whether the answer continues the last message.
        chat_template_kwargs: further variables of the template.
        uuids: per modality and item a name under which the server caches the processed item.
        mm_processor_kwargs: options of the processor, for this request.
        cache_salt: requests share the prefix cache and the names of items with requests of the same
            salt only.
        n: number of answers.
        stop: texts that end an answer.
        structured_outputs: the form of the text: one of `protocol.StructuredOutputs`, for example
            ``{"choice": ["yes", "no"]}``.
        response_format: the same in OpenAI's form: ``{"type": "json_object"}``.
    """

    n: int
    stop: Sequence[str] | None
    structured_outputs: Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None


class PoolingOptions(_Processing, total=False):
    """Options of a pooling request besides its prompt and items.

    Attributes:
        uuids, mm_processor_kwargs, cache_salt: as in `GenerateOptions`.
        task: one of vLLM's pooling tasks; by default the model's.
    """

    task: str | None


class SessionOptions(_Choosing, _Processing, _Chatting, total=False):
    """Options of the start of a session besides its prompt and items; they hold for all chunks.

    Attributes:
        max_tokens: the most tokens of each chunk; required without an `output`, which decides it.
        messages, add_generation_prompt, continue_final_message, chat_template_kwargs: as in
            `GenerateOptions`; for the start alone.
        uuids, mm_processor_kwargs, cache_salt: as in `GenerateOptions`; the uuids name the items of
            the start.
        window: how the session continues when it is full, the fields of `protocol.Window`:
            ``{"keep": 13}``. By default the server refuses messages that do not fit.
        stream: whether the server sends tokens as they come.
        on_tokens: a plain function, called with the new tokens of a chunk before the chunk is
            complete; implies ``stream=True``.
    """

    max_tokens: int
    window: Mapping[str, Any] | None
    stream: bool
    on_tokens: OnTokens | None


class NextOptions(_Chatting, total=False):
    """Options of one step of a session besides its prompt and items.

    Attributes:
        messages, add_generation_prompt, continue_final_message, chat_template_kwargs: as in
            `GenerateOptions`; the messages are those after the last answer.
        uuids: as in `GenerateOptions`.
        max_tokens: in place of the session's.
    """

    uuids: Uuids
    max_tokens: int | None

"""The guard: the last check of every request, whatever its route: the offline API, chat,
completions, tokens in.

vLLM compares token ids with the tokenizer, and skips this for a model without one. Its token-in
endpoint accepts processed fields unchecked. One id of 2**31, or one field that the model does not
expect, ends the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any

from ..errors import InputError, VllmApiError
from ..plan import Plan
from . import elsewhere, rendered
from .hashes import TenantNames
from .items import Rendered
from .moved import find
from .processor import CommonProcessor

InputProcessor: Any
VLLMValidationError: Any
try:
    InputProcessor = find("v1.engine.input_processor:InputProcessor")
    VLLMValidationError = find("exceptions:VLLMValidationError")
except VllmApiError:  # before 0.16; there are no routes of ours then
    InputProcessor, VLLMValidationError = None, InputError

Renderer: Any = None
with suppress(VllmApiError):  # before it there was none
    Renderer = find("renderers.base:BaseRenderer")

_STEPS = [name for name in ("_process_tokens", "_process_tokens_async") if hasattr(Renderer, name)]
"""The methods of vLLM that make a request for the engine from a tokenized prompt."""

_PARTS = ("encoder_prompt", "decoder_prompt")
_MARK = f"{__name__} installed"
"""Of this copy of mmkit: another in the process guards its own models, and only those."""


_BASES: tuple[Any, ...] = (
    (InputError,) if VLLMValidationError is InputError else (InputError, VLLMValidationError)
)


class Refused(*_BASES):  # type: ignore[misc]
    """A request refused after rendering. vLLM's server answers 500 to any other kind of error from
    there."""

    def __init__(self, error: InputError) -> None:
        Exception.__init__(self, str(error))
        self.where, self.parameter, self.value = error.where, error.where or None, None

    def __str__(self) -> str:
        return str(self.args[0])


def install() -> None:
    """Put the guard before vLLM's input processor. Can be called again."""
    if InputProcessor is None or hasattr(InputProcessor.process_inputs, _MARK):
        return
    theirs = InputProcessor.process_inputs

    @wraps(theirs)
    def process_inputs(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        processor = getattr(getattr(self, "renderer", None), "mm_processor", None)
        if isinstance(processor, CommonProcessor) and isinstance(prompt, Mapping):
            try:
                _check_allowed(processor, args[0] if args else kwargs.get("params"))
                prompt = admitted(processor, prompt)
            except InputError as error:
                raise Refused(error) from None
        return theirs(self, request_id, prompt, *args, **kwargs)

    setattr(process_inputs, _MARK, True)
    InputProcessor.process_inputs = process_inputs
    _scope_names()


def admitted(processor: CommonProcessor, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request in the form that the engine may receive.

    Raises:
        InputError: the engine must not receive the request.
    """
    parts = [prompt[name] for name in _PARTS if isinstance(prompt.get(name), Mapping)]
    for part in parts:
        _check(processor, part)
        _check_mark(processor, part)
    _check_encoder(processor, parts)
    _check(processor, prompt)
    return _own(processor, prompt)


def _scope_names() -> None:
    """Make the uuids of every prompt those of its tenant: chat tokenizes with parameters of its
    own."""
    for name in _STEPS:
        setattr(Renderer, name, _scoped(elsewhere.with_processes(getattr(Renderer, name))))
    if Renderer is not None:
        Renderer.default_chat_tok_params = property(_begun_once(Renderer.default_chat_tok_params))
        Renderer._process_mm_uuids = _kept(Renderer._process_mm_uuids)


def _begun_once(theirs: Any) -> Any:
    """A chat template begins the text; before 0.29 the tokenizer of `LLM.chat` does it again."""

    def default_chat_tok_params(self: Any) -> Any:
        params = theirs.__get__(self, type(self))
        ours = isinstance(self.mm_processor, CommonProcessor)
        return params.with_kwargs(add_special_tokens=False) if ours else params

    return default_chat_tok_params


def _kept(theirs: Any) -> Any:
    """Uuids that a caller gives; before 0.29 others replace them where nothing is cached."""

    @wraps(theirs)
    def process(self: Any, data: Any, items: Any, uuids: Any, request_id: str) -> Any:
        processed = theirs(self, data, items, uuids, request_id)
        if not isinstance(self.mm_processor, CommonProcessor):
            return processed
        given = {
            name: [new if own is None else own for own, new in zip(of_caller, new, strict=True)]
            for name, new in processed.items()
            if (of_caller := uuids.get(name)) and len(of_caller) == len(new)
        }
        return {**processed, **given}

    return process


def _scoped(theirs: Any) -> Any:
    is_async = inspect.iscoroutinefunction(theirs)

    @wraps(theirs)
    def process(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        processor = getattr(self, "mm_processor", None)
        if isinstance(processor, CommonProcessor):
            if is_rendered(prompt):  # vLLM would keep its ids alone
                return _ready({**prompt}) if is_async else {**prompt}
            if isinstance(prompt.get("multi_modal_uuids"), Mapping):
                processor.share_names(getattr(self, "config", None))
                prompt = {
                    **prompt,
                    "multi_modal_uuids": TenantNames(prompt, processor.plan.spec.name),
                }
        return theirs(self, prompt, *args, **kwargs)

    return process


async def _ready(value: Any) -> Any:
    return value


def is_rendered(prompt: Mapping[str, Any]) -> bool:
    """Whether a caller's prompt is a result of vLLM's renderer, with processed items."""
    return prompt.get("type") == "multimodal" and "mm_kwargs" in prompt


def check_may_pass(plan: Plan) -> None:
    """Refuse a rendered request where vLLM would render it again, without its items.

    Raises:
        InputError: it would.
    """
    if not _STEPS:
        raise InputError(
            f"{plan.spec.name}.mm_kwargs", "raw items", "processed fields", rendered.REMEDY
        )


def _check_allowed(processor: CommonProcessor, params: Any) -> None:
    """Refuse a request that may sample placeholder ids only, which are never sampled."""
    allowed = getattr(params, "allowed_token_ids", None)
    if allowed and processor.plan.embed_ids.issuperset(allowed):
        where = f"{processor.plan.spec.name}.allowed_token_ids"
        expected = "an id that is not a placeholder"
        raise InputError(where, expected, repr(list(allowed)), "Placeholder ids are never sampled.")


def _check(processor: CommonProcessor, prompt: Mapping[str, Any]) -> None:
    """Refuse ids that the model lacks, and placeholders without data."""
    plan, kind, ids = processor.plan, prompt.get("type"), prompt.get("prompt_token_ids")
    if ids is not None:
        plan.check_ids(ids)
    # placeholders of an encoder-decoder model stand in the encoder's prompt, apart from their items
    if kind == "token" and ids is not None and plan.spec.decoder_prompt is None:
        plan.check_bare(ids)


def _check_encoder(processor: CommonProcessor, parts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a request to an encoder-decoder model without an item: vLLM then runs no encoder, the
    decoder reads memory that nobody has written, and later answers of others are wrong, too."""
    if parts and all(part.get("type") == "token" for part in parts):
        where = f"{processor.plan.spec.name}.multi_modal_data"
        raise InputError(where, "at least one item", "none", "The encoder reads nothing else.")


def _is_foreign(prompt: Mapping[str, Any]) -> bool:
    """Whether a request brings processed fields that no processor of this process has made."""
    return prompt.get("type") == "multimodal" and not isinstance(prompt.get("mm_kwargs"), Rendered)


def takes_rendered(plan: Plan) -> bool:
    """Whether processed fields from elsewhere are compared, in place of being refused."""
    return rendered.TAKEN and plan.spec.decoder_prompt is None


def _own(processor: CommonProcessor, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request with processed fields as our processor would have made it."""
    if not _is_foreign(prompt):
        return prompt
    if not takes_rendered(processor.plan) or prompt.get("prompt_token_ids") is None:
        _check_mark(processor, prompt)
    return rendered.checked(processor, prompt)


def _check_mark(processor: CommonProcessor, prompt: Mapping[str, Any]) -> None:
    if _is_foreign(prompt):
        raise InputError(
            f"{processor.plan.spec.name}.mm_kwargs",
            "raw items",
            "processed fields",
            rendered.REMEDY,
        )

"""What every request passes last, whatever route it came by: the offline API, chat, completions, tokens in.

vLLM compares token ids with the tokenizer and skips that where there is none, and its token-in endpoint takes processed
fields as they are. One id of 2**31, or one field that the model does not expect, ends the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from ..errors import InputError, VllmApiError
from .moved import find
from .processor import CommonProcessor

InputProcessor: Any
VLLMValidationError: Any
try:
    InputProcessor = find("v1.engine.input_processor:InputProcessor")
    VLLMValidationError = find("exceptions:VLLMValidationError")
except VllmApiError:  # before 0.16; there are no routes of ours then
    InputProcessor, VLLMValidationError = None, InputError

_PARTS = ("encoder_prompt", "decoder_prompt")
_MARK = "mmkit_processed"


_BASES: tuple[Any, ...] = (InputError,) if VLLMValidationError is InputError else (InputError, VLLMValidationError)


class Refused(*_BASES):  # type: ignore[misc]
    """A request refused after rendering. vLLM's server answers 500 to any other kind of error from there."""

    def __init__(self, error: InputError) -> None:
        Exception.__init__(self, str(error))
        self.where, self.parameter, self.value = error.where, error.where or None, None

    def __str__(self) -> str:
        return str(self.args[0])


def mark(made: Any) -> Any:
    """Say that a rendered request comes from a processor of ours."""
    setattr(made["mm_kwargs"], _MARK, True)
    return made


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
                for part in (prompt, *(prompt[name] for name in _PARTS if isinstance(prompt.get(name), Mapping))):
                    _check(processor, part)
            except InputError as error:
                raise Refused(error) from None
        return theirs(self, request_id, prompt, *args, **kwargs)

    setattr(process_inputs, _MARK, True)
    InputProcessor.process_inputs = process_inputs


def _check(processor: CommonProcessor, prompt: Mapping[str, Any]) -> None:
    """Refuse ids that the model lacks, placeholders without data, and fields that no processor of ours made."""
    plan, kind, ids = processor.plan, prompt.get("type"), prompt.get("prompt_token_ids")
    if kind in ("token", "multimodal") and ids is not None:
        plan.check_ids(ids)
    if kind == "token" and ids is not None:
        plan.check_bare(ids)
    if kind == "multimodal" and not hasattr(prompt["mm_kwargs"], _MARK):
        remedy = "Send the items to /v1/mm/generate."
        raise InputError(f"{plan.spec.name}.features", "raw items", "processed fields", remedy)

"""Admission: the last check of every request, whatever its route: the offline API, chat,
completions, tokens in.

vLLM compares token ids with the tokenizer, and skips this for a model without one. Its token-in
endpoint accepts processed fields unchecked. One id of 2**31, or one field that the model does not
expect, ends the engine.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import wraps
from hashlib import blake2b
from typing import Any

from ..bound.placeholders import rows_field
from ..errors import InputError, VllmApiError
from ..plan import Plan
from .compat import find
from .items import Rendered, is_rendered
from .processor import CommonProcessor

TRUST = "trust_processed_fields"
"""The key of vLLM's ``additional_config`` by which a server takes processed fields of other
hosts."""

VLLMValidationError: Any
try:
    VLLMValidationError = find("exceptions:VLLMValidationError")
except VllmApiError:  # before 0.16; there are no routes of ours then
    VLLMValidationError = InputError

_PARTS = ("encoder_prompt", "decoder_prompt")
_BASES: tuple[Any, ...] = tuple(dict.fromkeys((InputError, VLLMValidationError)))


class Refused(*_BASES):  # type: ignore[misc]
    """A request refused after rendering. vLLM's server answers 500 to any other kind of error from
    there."""

    def __init__(self, error: InputError) -> None:
        Exception.__init__(self, str(error))
        self.where, self.parameter, self.value = error.where, error.where or None, None

    def __str__(self) -> str:
        return str(self.args[0])


def with_admission(theirs: Any) -> Any:
    """vLLM's step before its engine, after a check of the request."""

    @wraps(theirs)
    def process_inputs(self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        processor = getattr(getattr(self, "renderer", None), "mm_processor", None)
        if isinstance(processor, CommonProcessor) and isinstance(prompt, Mapping):
            try:
                _check_allowed(processor.plan, args[0] if args else kwargs.get("params"))
                admit(processor.plan, prompt, trusts=_trusts(getattr(self, "vllm_config", None)))
            except InputError as error:
                raise Refused(error) from None
        return theirs(self, request_id, prompt, *args, **kwargs)

    return process_inputs


def _trusts(vllm_config: Any) -> bool:
    config = getattr(vllm_config, "additional_config", None)
    return isinstance(config, Mapping) and config.get(TRUST) is True


def admit(plan: Plan, prompt: Mapping[str, Any], *, trusts: bool) -> None:
    """Refuse a rendered request that the engine must not receive.

    Args:
        plan: that of the model.
        prompt: vLLM's input for its engine.
        trusts: whether processed fields of other hosts are taken.

    Raises:
        InputError: it must not.
    """
    parts = [prompt[name] for name in _PARTS if isinstance(prompt.get(name), Mapping)]
    for part in (*parts, prompt):
        if (ids := part.get("prompt_token_ids")) is not None:
            plan.check_ids(ids)
            # placeholders of an encoder-decoder model stand in the encoder's prompt, apart from
            # their items
            if part.get("type") == "token" and plan.spec.decoder_prompt is None:
                plan.check_bare(ids)
        # an object of this class comes from a processor of this copy of mmkit
        if part.get("type") == "multimodal" and not isinstance(part.get("mm_kwargs"), Rendered):
            _check_foreign(plan, part, trusts and ids is not None and not parts)
    if parts and all(part.get("type") == "token" for part in parts):
        # vLLM then runs no encoder, the decoder reads memory that nobody has written, and later
        # answers of others are wrong, too
        where = f"{plan.spec.name}.multi_modal_data"
        raise InputError(where, "at least one item", "none", "The encoder reads nothing else.")


def _check_foreign(plan: Plan, prompt: Mapping[str, Any], trusts: bool) -> None:
    """Refuse processed fields that no processor of this process has made, and where they are
    trusted only those that are not the model's: their values and hashes are not looked at."""
    where = f"{plan.spec.name}.mm_kwargs"
    if not trusts:
        remedy = f"Send the items themselves, or start the server with {TRUST}."
        raise InputError(where, "raw items", "processed fields", remedy)
    sent, places = prompt["mm_kwargs"], prompt.get("mm_placeholders") or {}
    plan.check_names([*sent, *places])
    for name in {*sent, *places}:
        modality, items, ranges = plan.modalities[name], sent.get(name, ()), places.get(name, ())
        known = {*modality.fields_and_embeds, rows_field(name)}
        named = {key for item in items if item is not None for key in item}
        inside = all(at.offset + at.length <= len(prompt["prompt_token_ids"]) for at in ranges)
        if len(items) != len(ranges) or not named <= known or not inside:
            expected = f"fields among {sorted(known)}, and a range in the prompt for each item"
            raise InputError(f"{where}.{name}", expected, f"{sorted(named)} and {list(ranges)}")


def _check_allowed(plan: Plan, params: Any) -> None:
    """Refuse a request that may sample placeholder ids only, which are never sampled."""
    allowed = getattr(params, "allowed_token_ids", None)
    if allowed and plan.embed_ids.issuperset(allowed):
        where = f"{plan.spec.name}.allowed_token_ids"
        expected = "an id that is not a placeholder"
        raise InputError(where, expected, repr(list(allowed)), "Placeholder ids are never sampled.")


# -- before a request is rendered ------------------------------------------------------------------


def with_tenants(theirs: Any) -> Any:
    """vLLM's step from a tokenized prompt to the engine's input, with uuids that hold within one
    `cache_salt`, so that no tenant reaches the items of another one."""

    @wraps(theirs)
    def process(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(self, "mm_processor", None), CommonProcessor):
            if is_rendered(prompt):  # vLLM would keep its ids alone
                return _ready({**prompt}) if inspect.iscoroutinefunction(theirs) else {**prompt}
            prompt = of_tenant(prompt)
        return theirs(self, prompt, *args, **kwargs)

    return process


async def _ready(value: Any) -> Any:
    return value


def of_tenant(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """A prompt whose uuids are those of its `cache_salt` alone."""
    sent = prompt.get("multi_modal_uuids")
    if not isinstance(sent, Mapping):
        return prompt
    salt = prompt.get("cache_salt")
    listed = {name: [own] if isinstance(own, str) else own or () for name, own in sent.items()}
    uuids = {name: [_salted(salt, uuid) for uuid in own] for name, own in listed.items()}
    return {**prompt, "multi_modal_uuids": uuids}


def _salted(salt: str | None, uuid: Any) -> Any:
    if not isinstance(uuid, str):  # none, or one that the processor refuses
        return uuid
    return blake2b(json.dumps([salt, uuid]).encode(), digest_size=24).hexdigest()


def begun_once(theirs: Any) -> Any:
    """vLLM's options of the tokenizer for a text that a chat template has begun."""

    def default_chat_tok_params(self: Any) -> Any:
        params = theirs.__get__(self, type(self))
        ours = isinstance(self.mm_processor, CommonProcessor)
        return params.with_kwargs(add_special_tokens=False) if ours else params

    return property(default_chat_tok_params)


def keeping_uuids(theirs: Any) -> Any:
    """vLLM's uuids of a request's items, where those of the caller stay."""

    @wraps(theirs)
    def process(self: Any, data: Any, items: Any, uuids: Any, request_id: str) -> Any:
        made: Mapping[str, Sequence[str | None]] = theirs(self, data, items, uuids, request_id)
        if not isinstance(self.mm_processor, CommonProcessor):
            return made
        given = {name: uuids.get(name) or [None] * len(new) for name, new in made.items()}
        return {
            name: [own or other for own, other in zip(given[name], new, strict=True)]
            for name, new in made.items()
        }

    return process

"""Everything of vLLM that mmkit replaces, where vLLM has no hook: CONTRIBUTING.md has the table.

It is replaced when a process makes its first processor of a spec, so in no process that serves
none, and only where the release needs it. What replaces a part hands on all that is not a spec's.

First of all admission, the last check of every request, whatever its route: the offline API, chat,
completions, tokens in. vLLM compares token ids with the tokenizer, and skips this for a model
without one. Its token-in endpoint accepts processed fields unchecked. One id of 2**31, or one field
that the model does not expect, ends the engine. Embeddings in place of a prompt's tokens
(``--enable-prompt-embeds``) reach the KV cache as they are, past the encoder and its checks: one
NaN makes later answers to others wrong.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ..errors import InputError
from ..plan.encoder_rows import rows_field
from ..plan.plan import Plan
from ..plan.soundness import check_rows
from . import chat, media
from .compat import PROMPTS_ARE_IDS, find
from .exchange import adopt_features, wrap_add_request
from .incoming import REQUEST, Incoming, TooManyPixels
from .items import Rendered, is_rendered
from .pipeline import has_pipeline

TRUST = "trust_processed_fields"
"""The key of vLLM's ``additional_config`` by which a server takes processed fields of other
hosts."""

PROMPT_EMBEDS = "prompt_embeds"
"""The name under which vLLM carries embeddings of parts of a message, as if of a modality."""

# before 0.16 vLLM has none; there are no routes of ours then
_BASES: tuple[Any, ...] = (InputError, find("exceptions:VLLMValidationError", default=object))


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
        processor: Any = getattr(getattr(self, "renderer", None), "mm_processor", None)
        if has_pipeline(processor) and isinstance(prompt, Mapping):
            params = args[0] if args else kwargs.get("params")
            config = getattr(getattr(self, "vllm_config", None), "additional_config", None)
            trusts = isinstance(config, Mapping) and config.get(TRUST) is True
            admit(processor.plan, prompt, params, trusts=trusts)
        request = theirs(self, request_id, prompt, *args, **kwargs)
        if has_pipeline(processor) and request.mm_features:
            cache = getattr(self.renderer, "mm_processor_cache", None)
            request.mm_features = adopt_features(request.mm_features, cache)
        return request

    return process_inputs


def admit(plan: Plan, prompt: Mapping[str, Any], params: Any = None, *, trusts: bool) -> None:
    """Refuse a rendered request that the engine must not receive.

    Args:
        plan: that of the model.
        prompt: vLLM's input for its engine.
        params: vLLM's parameters of the request.
        trusts: whether processed fields of other hosts are taken.

    Raises:
        Refused: it must not.
    """
    try:
        _check(plan, prompt, params, trusts)
    except InputError as error:
        raise Refused(error) from None


def _check(plan: Plan, prompt: Mapping[str, Any], params: Any, trusts: bool) -> None:
    allowed = getattr(params, "allowed_token_ids", None)
    if allowed and plan.embed_ids.issuperset(allowed):
        where, expected = f"{plan.spec.name}.allowed_token_ids", "an id that is not a placeholder"
        raise InputError(where, expected, repr(list(allowed)), "Placeholder ids are never sampled.")
    names = ("encoder_prompt", "decoder_prompt")
    parts = [prompt[name] for name in names if isinstance(prompt.get(name), Mapping)]
    for part in (*parts, prompt):
        _check_prompt_embeds(plan, part)
        ids = _ids_that_are_read(part)
        if ids is not None:
            plan.check_ids(ids)
            # placeholders of an encoder-decoder model stand in the encoder's prompt, apart from
            # their items
            is_bare = part.get("type") != "multimodal" and not part.get("multi_modal_data")
            if is_bare and plan.spec.decoder_prompt is None:
                plan.check_bare(ids)
        # an object of this class comes from a processor of this copy of mmkit
        if part.get("type") == "multimodal" and not isinstance(part.get("mm_kwargs"), Rendered):
            _check_foreign(plan, part, trusts and ids is not None and not parts)
    if parts and all(part.get("type") == "token" for part in parts):
        # vLLM then runs no encoder, the decoder reads memory that nobody has written, and later
        # answers of others are wrong, too
        where = f"{plan.spec.name}.multi_modal_data"
        raise InputError(where, "at least one item", "none", "The encoder reads nothing else.")


def _ids_that_are_read(prompt: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the token ids of a prompt that the model embeds; None where there are none.

    A prompt may have embeddings for some positions and ids for the others. What stands in place of
    an id at the former is vLLM's own, and may lie outside the vocabulary.
    """
    ids: Sequence[Any] | None = prompt.get("prompt_token_ids")
    # the name before rendering, and after it
    mask = prompt.get("is_token_ids", prompt.get("prompt_is_token_ids"))
    if ids is None or mask is None:
        return ids
    return [token for token, is_read in zip(ids, mask, strict=False) if is_read]


def _check_prompt_embeds(plan: Plan, prompt: Mapping[str, Any]) -> None:
    """Refuse embeddings in place of a prompt's tokens that the language model cannot carry."""
    for rows in _prompt_embeds(prompt):
        where = f"{plan.spec.name}.prompt_embeds"
        if plan.spec.is_raw:
            remedy = "The model reads nothing of a prompt."
            raise InputError(where, "one item per request", "embeddings of a prompt", remedy)
        if isinstance(rows, torch.Tensor) and rows.ndim == 3 and len(rows) == 1:
            rows = rows[0]  # vLLM takes a batch of one
        check_rows(rows, where, width=plan.hidden_size, dtype=plan.dtype)


def _prompt_embeds(prompt: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the embeddings of a prompt: as a whole, or as parts of a message beside items."""
    if prompt.get("prompt_embeds") is not None:
        yield prompt["prompt_embeds"]
    if prompt.get("type") == "multimodal":
        # vLLM puts these into its cache of encoder outputs, as if an encoder had made them
        for item in (prompt.get("mm_kwargs") or {}).get(PROMPT_EMBEDS, ()):
            if item is not None:
                yield item["embedding"].data


def _check_foreign(plan: Plan, prompt: Mapping[str, Any], trusts: bool) -> None:
    """Refuse processed fields that no processor of this process has made, and where they are
    trusted those that are not the model's, have another form than those of all other requests, or
    hold a float that is not finite. Other values, and hashes, are not looked at."""
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
        fields = [_fields_of(item) for item in items]
        for i, of_item in enumerate(fields):
            _check_finite_fields(of_item, f"{where}.{name}[{i}]")
        modality.check_forms(fields)


def _fields_of(item: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values of an item's fields, by name; none of an item that the engine has."""
    return {key: getattr(element, "data", element) for key, element in (item or {}).items()}


def _check_finite_fields(fields: Mapping[str, Any], where: str) -> None:
    """Refuse an item of which a processed field holds a float that is not finite."""
    for key, values in fields.items():
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            continue
        if not torch.isfinite(values).all():
            raise InputError(f"{where}.{key}", "finite values", "NaN or an infinity")


# -- before a request is rendered ------------------------------------------------------------------


def _is_ours(renderer: Any) -> bool:
    return has_pipeline(getattr(renderer, "mm_processor", None))


def with_guard(theirs: Any) -> Any:
    """vLLM's step from a tokenized prompt to the engine's input. What no processor sees, a prompt
    without items, is checked and rewritten here; uuids hold within one `cache_salt`, so that no
    tenant reaches the items of another one."""

    async def as_it_is(prompt: Mapping[str, Any]) -> Any:
        return {**prompt}

    @wraps(theirs)
    def process(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(self):
            return theirs(self, prompt, *args, **kwargs)
        if is_rendered(prompt):  # vLLM would keep its ids alone
            return as_it_is(prompt) if inspect.iscoroutinefunction(theirs) else {**prompt}
        if not prompt.get("multi_modal_data"):
            prompt = {**prompt, "prompt_token_ids": _of_bare(self.mm_processor.plan, prompt)}
        return theirs(self, of_tenant(prompt), *args, **kwargs)

    return process


def _of_bare(plan: Plan, prompt: Mapping[str, Any]) -> list[int]:
    """The ids of a prompt without items."""
    ids: list[int] = prompt["prompt_token_ids"]
    admit(plan, {"prompt_token_ids": ids}, trusts=False)
    # those of an encoder-decoder model may be the decoder's
    return plan.rewrite("prompt", ids) if plan.spec.decoder_prompt is None else ids


def of_tenant(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """A prompt whose uuids are those of its `cache_salt` alone."""
    sent, salt = prompt.get("multi_modal_uuids"), prompt.get("cache_salt")
    if not isinstance(sent, Mapping):
        return prompt

    def salted(uuid: Any) -> Any:
        if not isinstance(uuid, str):  # none, or one that the processor refuses
            return uuid
        return blake2b(json.dumps([salt, uuid]).encode(), digest_size=24).hexdigest()

    listed = {name: [own] if isinstance(own, str) else own or () for name, own in sent.items()}
    uuids = {name: [*map(salted, own)] for name, own in listed.items()}
    return {**prompt, "multi_modal_uuids": uuids}


def begun_once(theirs: Any) -> Any:
    """vLLM's options of the tokenizer for a text that a chat template has begun."""

    def default_chat_tok_params(self: Any) -> Any:
        params = theirs.__get__(self, type(self))
        return params.with_kwargs(add_special_tokens=False) if _is_ours(self) else params

    return property(default_chat_tok_params)


def of_request(theirs: Any) -> Any:
    """Wrap vLLM's function that renders the conversations of a request, so that an error names the
    part of the messages that it is about, and no route begins a text twice."""
    signature = inspect.signature(theirs)

    @contextmanager
    def located(renderer: Any, request: Incoming) -> Iterator[None]:
        number = request.next_conversation()
        try:
            yield
        except TooManyPixels:
            raise
        except InputError as error:
            place = request.locate(error, renderer.mm_processor.plan.spec.name, number)
            if place is None:
                raise
            raise Refused(place) from error

    @wraps(theirs)
    async def render_chat_async(self: Any, *args: Any, **options: Any) -> Any:
        request = REQUEST.get()
        if request is None or not _is_ours(self):
            return await theirs(self, *args, **options)
        call = signature.bind(self, *args, **options)
        tok_params = call.arguments.get("tok_params")
        if request.begins_twice and tok_params is not None:
            call.arguments["tok_params"] = tok_params.with_kwargs(add_special_tokens=False)
        with located(self, request):
            return await theirs(*call.args, **call.kwargs)

    @wraps(theirs)
    def render_chat(self: Any, *args: Any, **options: Any) -> Any:
        request = REQUEST.get()
        if request is None or not _is_ours(self):
            return theirs(self, *args, **options)
        with located(self, request):
            return theirs(self, *args, **options)

    return render_chat_async if inspect.iscoroutinefunction(theirs) else render_chat


# -- the table -------------------------------------------------------------------------------------


class Patch(NamedTuple):
    """One replacement.

    Attributes:
        by: a function from vLLM's part to that in its place.
        places: ``module:name`` of the part, from the newest release to the oldest; the first that
            there is counts.
        until_ids: whether only releases need it in which the prompt of a request may be a text,
            those before 0.29.
    """

    by: Callable[[Any], Any]
    places: tuple[str, ...]
    until_ids: bool = False


_RENDERER = "renderers.base:BaseRenderer"
_PART = "parse_chat_message_content_part"
_PARTS = (f"{chat.MODULES[0]}:{_PART}", *(f"{module}:_{_PART}" for module in chat.MODULES))
_CONNECTOR = "multimodal.media:MediaConnector"
_TRACKERS = ("renderers.chat_utils.item_tracker", *chat.MODULES)

_CLIENT = "v1.engine.core_client"

PATCHES = (
    Patch(with_admission, ("v1.engine.input_processor:InputProcessor.process_inputs",)),
    Patch(wrap_add_request, (f"{_CLIENT}:InprocClient.add_request",)),
    Patch(wrap_add_request, (f"{_CLIENT}:SyncMPClient.add_request",)),
    Patch(wrap_add_request, (f"{_CLIENT}:AsyncMPClient.add_request_async",)),
    Patch(wrap_add_request, (f"{_CLIENT}:DPAsyncMPClient.add_request_async",)),
    Patch(with_guard, (f"{_RENDERER}._process_tokens",)),
    Patch(with_guard, (f"{_RENDERER}._process_tokens_async",)),
    Patch(chat.reading, _PARTS),
    Patch(chat.gathering, tuple(f"{module}:_resolve_items" for module in _TRACKERS)),
    Patch(begun_once, (f"{_RENDERER}.default_chat_tok_params",), until_ids=True),
    Patch(of_request, (f"{_RENDERER}.render_chat",)),
    Patch(of_request, (f"{_RENDERER}.render_chat_async",)),
    Patch(media.weighing, (f"{_CONNECTOR}.load_from_url",)),
    Patch(media.weighing, (f"{_CONNECTOR}.load_from_url_async",)),
)


def needed() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """What this vLLM needs: the module or class, the name of the part, and what replaces it."""
    for by, places, until_ids in PATCHES:
        known = (place for place in places if find(place, default=None) is not None)
        if (place := next(known, None)) and not (until_ids and PROMPTS_ARE_IDS):
            module, _, path = place.partition(":")
            owner, _, name = path.rpartition(".")
            yield find(f"{module}:{owner}") if owner else import_module(f"vllm.{module}"), name, by


@cache
def install() -> None:
    """Replace it, once."""
    for owner, name, by in needed():
        setattr(owner, name, by(vars(owner)[name]))

"""What a processor of a spec replaces in vLLM, where vLLM has no hook.

CONTRIBUTING.md has the table, and what a server and the plugin replace beside it.

It is replaced when a process makes its first processor of a spec, so in no process that serves
none, and only where the release needs it. Each function ``wrap_...`` gets a part of vLLM and
returns what stands in its place, which passes on all that is not a spec's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from typing import Any, NamedTuple

from ..errors import InputError
from ..plan.hashes import salt_uuid
from ..plan.plan import Plan
from . import chat, media
from .admission import TRUST, admit
from .compat import PROMPTS_ARE_IDS, find
from .errors import Refused, TooManyPixels
from .exchange import adopt_features, wrap_add_request
from .items import has_processed_items
from .pipeline import has_pipeline
from .server_request import SERVER_REQUEST, ServerRequest, report_faults


def _serves_spec(renderer: Any) -> bool:
    """Return whether the processor of a renderer of vLLM is one of a spec."""
    return has_pipeline(getattr(renderer, "mm_processor", None))


# -- before a request is rendered ------------------------------------------------------------------


def wrap_process_tokens(process_tokens: Any) -> Any:
    """Wrap vLLM's step from a tokenized prompt to the engine's input.

    A prompt without items, which no processor sees, is rewritten here (``prompt=`` of the spec).
    `admit` checks it before, since only ids of the vocabulary can be rewritten. Uuids hold within
    one `cache_salt`, so that no tenant reaches the items of another one.
    """

    @wraps(process_tokens)
    def check_and_process(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if not _serves_spec(self):
            return process_tokens(self, prompt, *args, **kwargs)
        if has_processed_items(prompt):
            # the caller has rendered it before: vLLM would keep its ids and lose its items
            return dict(prompt)
        with report_faults():
            checked_prompt = _check_prompt(self.mm_processor.plan, prompt)
            return process_tokens(self, checked_prompt, *args, **kwargs)

    @wraps(process_tokens)
    async def check_and_process_async(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if not _serves_spec(self):
            return await process_tokens(self, prompt, *args, **kwargs)
        if has_processed_items(prompt):
            return dict(prompt)
        with report_faults():
            checked_prompt = _check_prompt(self.mm_processor.plan, prompt)
            return await process_tokens(self, checked_prompt, *args, **kwargs)

    if inspect.iscoroutinefunction(process_tokens):
        return check_and_process_async
    return check_and_process


def _check_prompt(plan: Plan, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a prompt with salted uuids; the ids of a prompt without items are rewritten."""
    if not prompt.get("multi_modal_data"):
        ids = _rewrite_prompt_without_items(plan, prompt)
        prompt = {**prompt, "prompt_token_ids": ids}
    return salt_uuids(prompt)


def _rewrite_prompt_without_items(plan: Plan, prompt: Mapping[str, Any]) -> list[int]:
    """Return the checked ids of a prompt without items."""
    ids: list[int] = prompt["prompt_token_ids"]
    admit(plan, {"prompt_token_ids": ids}, trusts=False)
    if plan.spec.decoder_prompt is not None:
        return ids  # an encoder-decoder model's ids may be the decoder's
    return plan.rewrite("prompt", ids)


def salt_uuids(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a prompt whose uuids are valid within its `cache_salt` only."""
    uuids_by_modality = prompt.get("multi_modal_uuids")
    if not isinstance(uuids_by_modality, Mapping):
        return prompt
    salt = prompt.get("cache_salt")
    salted: dict[str, list[Any]] = {}
    for name, uuids in uuids_by_modality.items():
        if isinstance(uuids, str):
            uuids = [uuids]
        salted[name] = [salt_uuid(uuid, salt) for uuid in uuids or ()]
    return {**prompt, "multi_modal_uuids": salted}


def wrap_default_chat_tok_params(default_chat_tok_params: Any) -> Any:
    """Wrap vLLM's options of the tokenizer for a text that a chat template has written.

    The template writes the special tokens with which the tokenizer surrounds texts (BOS), and the
    tokenizer would add them a second time.
    """

    def leave_out_special_tokens(self: Any) -> Any:
        # vLLM's is a property: this reads it
        params = default_chat_tok_params.__get__(self, type(self))
        if not _serves_spec(self):
            return params
        return params.with_kwargs(add_special_tokens=False)

    return property(leave_out_special_tokens)


# -- while the conversations of a request are rendered ---------------------------------------------


def wrap_render_chat(render_chat: Any) -> Any:
    """Make the errors of vLLM's function that renders conversations name the part of the messages.

    Args:
        render_chat: vLLM's function, which renders the conversations of a request.
    """

    @wraps(render_chat)
    def render_and_locate(self: Any, *args: Any, **options: Any) -> Any:
        server_request = SERVER_REQUEST.get()
        if server_request is None or not _serves_spec(self):
            return render_chat(self, *args, **options)
        with _locate_errors(self, server_request):
            return render_chat(self, *args, **options)

    return render_and_locate


def wrap_render_chat_async(render_chat: Any) -> Any:
    """Wrap vLLM's asynchronous function as `wrap_render_chat` does.

    Besides, no route has the tokenizer add the special tokens that a chat template has written.
    """
    signature = inspect.signature(render_chat)

    @wraps(render_chat)
    async def render_and_locate(self: Any, *args: Any, **options: Any) -> Any:
        server_request = SERVER_REQUEST.get()
        if server_request is None or not _serves_spec(self):
            return await render_chat(self, *args, **options)
        call = signature.bind(self, *args, **options)
        tok_params = call.arguments.get("tok_params")
        if server_request.adds_special_tokens_twice and tok_params is not None:
            call.arguments["tok_params"] = tok_params.with_kwargs(add_special_tokens=False)
        with _locate_errors(self, server_request):
            return await render_chat(*call.args, **call.kwargs)

    return render_and_locate


@contextmanager
def _locate_errors(renderer: Any, server_request: ServerRequest) -> Iterator[None]:
    """Give the errors of one conversation the path in the body of what they are about."""
    conversation = server_request.next_conversation()
    try:
        yield
    except TooManyPixels:
        raise
    except InputError as error:
        spec_name = renderer.mm_processor.plan.spec.name
        located_error = server_request.locate(error, spec_name, conversation)
        if located_error is None:
            raise
        raise Refused(located_error) from error


# -- before the engine -----------------------------------------------------------------------------


def wrap_process_inputs(process_inputs: Any) -> Any:
    """Make vLLM's last step before the engine check a request.

    Besides, all items of the request take part in the exchange with the cache.
    """

    @wraps(process_inputs)
    def admit_and_process(
        self: Any, request_id: str, prompt: Any, *args: Any, **kwargs: Any
    ) -> Any:
        renderer: Any = getattr(self, "renderer", None)
        if not _serves_spec(renderer):
            return process_inputs(self, request_id, prompt, *args, **kwargs)
        if isinstance(prompt, Mapping):
            params = args[0] if args else kwargs.get("params")
            config = getattr(self, "vllm_config", None)
            additional = getattr(config, "additional_config", None)
            trusts = isinstance(additional, Mapping) and additional.get(TRUST) is True
            admit(renderer.mm_processor.plan, prompt, params, config, trusts=trusts)
        engine_request = process_inputs(self, request_id, prompt, *args, **kwargs)
        if engine_request.mm_features:
            cache = getattr(renderer, "mm_processor_cache", None)
            engine_request.mm_features = adopt_features(engine_request.mm_features, cache)
        return engine_request

    return admit_and_process


# -- the table -------------------------------------------------------------------------------------


class Patch(NamedTuple):
    """One replacement.

    Attributes:
        wrap: a function from vLLM's part to the one in its place.
        paths: ``module:name`` of the part, from the newest release to the oldest; the first that
            exists counts.
        until_ids: whether only releases need it in which the prompt of a request may be a text,
            those before 0.29.
    """

    wrap: Callable[[Any], Any]
    paths: tuple[str, ...]
    until_ids: bool = False


_RENDERER = "renderers.base:BaseRenderer"
_CONNECTORS = ("multimodal.media:MediaConnector", "multimodal.utils:MediaConnector")
_CLIENT = "v1.engine.core_client"

_READ_PART = (
    "renderers.chat_utils.chat_message:parse_chat_message_content_part",
    "renderers.chat_utils.chat_message:_parse_chat_message_content_part",
    "renderers.chat_utils:_parse_chat_message_content_part",
    "entrypoints.chat_utils:_parse_chat_message_content_part",
)
_GATHER_ITEMS = (
    "renderers.chat_utils.item_tracker:_resolve_items",
    "renderers.chat_utils.chat_message:_resolve_items",
    "renderers.chat_utils:_resolve_items",
    "entrypoints.chat_utils:_resolve_items",
)

PATCHES = (
    Patch(wrap_process_inputs, ("v1.engine.input_processor:InputProcessor.process_inputs",)),
    Patch(wrap_add_request, (f"{_CLIENT}:InprocClient.add_request",)),
    Patch(wrap_add_request, (f"{_CLIENT}:SyncMPClient.add_request",)),
    Patch(wrap_add_request, (f"{_CLIENT}:AsyncMPClient.add_request_async",)),
    Patch(wrap_add_request, (f"{_CLIENT}:DPAsyncMPClient.add_request_async",)),
    Patch(wrap_process_tokens, (f"{_RENDERER}._process_tokens",)),
    Patch(wrap_process_tokens, (f"{_RENDERER}._process_tokens_async",)),
    Patch(chat.wrap_read_part, _READ_PART),
    Patch(chat.wrap_gather_items, _GATHER_ITEMS),
    Patch(wrap_default_chat_tok_params, (f"{_RENDERER}.default_chat_tok_params",), until_ids=True),
    Patch(wrap_render_chat, (f"{_RENDERER}.render_chat",)),
    Patch(wrap_render_chat_async, (f"{_RENDERER}.render_chat_async",)),
    Patch(media.wrap_load, tuple(f"{path}.load_from_url" for path in _CONNECTORS)),
    Patch(media.wrap_load, tuple(f"{path}.load_from_url_async" for path in _CONNECTORS)),
)


class PatchedPart(NamedTuple):
    """A part of the installed vLLM that is to be replaced.

    Attributes:
        owner: the module or class that has it.
        name: its name there.
        wrap: see `Patch`.
    """

    owner: Any
    name: str
    wrap: Callable[[Any], Any]


def find_parts_to_patch() -> list[PatchedPart]:
    """Return what the installed vLLM needs."""
    parts: list[PatchedPart] = []
    for patch in PATCHES:
        if patch.until_ids and PROMPTS_ARE_IDS:
            continue
        for path in patch.paths:
            if find(path, default=None) is not None:
                parts.append(_find_part(path, patch.wrap))
                break
    return parts


def _find_part(path: str, wrap: Callable[[Any], Any]) -> PatchedPart:
    module, _, attributes = path.partition(":")
    class_name, _, name = attributes.rpartition(".")
    if class_name:
        return PatchedPart(find(f"{module}:{class_name}"), name, wrap)
    return PatchedPart(import_module(f"vllm.{module}"), name, wrap)


@cache
def install() -> None:
    """Install all patches that the installed vLLM needs; further calls do nothing."""
    for part in find_parts_to_patch():
        setattr(part.owner, part.name, part.wrap(vars(part.owner)[part.name]))

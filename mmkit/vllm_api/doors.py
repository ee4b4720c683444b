"""vLLM's doors without an engine: what `LLM.generate`, `LLM.chat` and the chat of its server make
of a request, up to where it would be handed to the engine.

The code is vLLM's own. Two things stand in for parts of it: an engine that keeps what reaches it,
and a model class whose processor is the one under test.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor import model_loader
from vllm.sampling_params import SamplingParams

from ..errors import VllmApiError
from ..model.chat import placeholder_text
from ..spec import Declaration
from ..updates import Insert
from . import chat, guard, harness, kit
from .moved import find
from .replaced import replaced

_renderer: Any = None
_OnlineRenderer: Any = None
_ChatRequest: Any = None
with suppress(VllmApiError):
    find("renderers.base:BaseRenderer")  # before 0.17 the engine renders
    _renderer = find("renderers.registry:renderer_from_config")
with suppress(VllmApiError):
    _OnlineRenderer = find("renderers.online_renderer:OnlineRenderer")  # from 0.25
    _ChatRequest = find("entrypoints.openai.chat_completion.protocol:ChatCompletionRequest")

KNOWN = _renderer is not None
"""Whether this vLLM has doors that need no engine."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that writes the contents of messages."""


@dataclass(frozen=True)
class Read:
    """The result of reading the messages of a chat.

    Attributes:
        text: what the chat template gave.
        options: the `mm_processor_kwargs` that what reads the parts got; None where it takes none.
    """

    text: str
    options: Mapping[str, Any] | None


class Doors:
    """The doors of one processor. vLLM's processor cache is off, its prefix cache on.

    Args:
        processor: the one under test.
        spec: its declaration, for a generated one.

    Attributes:
        llm: vLLM's `LLM`, whose engine keeps what reaches it.
        online: what renders for vLLM's server; None where this vLLM has nothing of the kind.
        last: how the last messages were read; None where they were refused before.
    """

    def __init__(self, processor: Any, spec: Declaration | None) -> None:
        from vllm.entrypoints.llm import LLM

        self._spec = spec
        if spec is not None:  # as where its model class is registered
            guard.install()
            chat.install(spec)
        self._model = _model_class(processor, spec)
        # the sender of a cache keeps no fields of what the engine has
        config = configured(processor, mm_processor_cache_gb=0)
        self._engine = _Engine(VllmConfig(model_config=config))
        # off for some models and platforms, as latent attention on CPUs: hashes are made up then
        self._engine.vllm_config.cache_config.enable_prefix_caching = True
        with self.in_place():
            self._engine.renderer = renderer = _renderer(self._engine.vllm_config)
        self.last: Read | None = None
        for name in ("render_messages", "render_messages_async"):
            setattr(renderer, name, self._watched(getattr(renderer, name)))
        self.llm: Any = LLM.__new__(LLM)
        vars(self.llm).update(
            llm_engine=self._engine,
            model_config=config,
            renderer=renderer,
            request_counter=itertools.count(),
            runner_type="generate",
            chat_template=None,
        )
        self.online = _online(config, renderer)

    def in_place(self) -> AbstractContextManager[None]:
        """vLLM finds the model class."""
        return replaced(
            model_loader,
            get_model_cls=lambda config: self._model,
            get_model_architecture=lambda config: (self._model, self._model.__name__),
        )

    def _watched(self, render: Callable[..., Any]) -> Callable[..., Any]:
        """A renderer's method that tells how it read messages."""

        def note(params: Any, prompt: Mapping[str, Any]) -> None:
            takes = hasattr(params, "mm_processor_kwargs")
            options = params.mm_processor_kwargs or {} if takes else None
            self.last = Read(str(prompt["prompt"]), options)

        @wraps(render)
        def at_once(messages: Any, params: Any) -> Any:
            conversation, prompt = render(messages, params)
            note(params, prompt)
            return conversation, prompt

        @wraps(render)
        async def later(messages: Any, params: Any) -> Any:
            conversation, prompt = await render(messages, params)
            note(params, prompt)
            return conversation, prompt

        return later if asyncio.iscoroutinefunction(render) else at_once

    @property
    def serves(self) -> bool:
        """Whether this vLLM's server renders in one place."""
        return self.online is not None

    def generate(
        self,
        prompt: str | Sequence[int],
        data: Mapping[str, Any],
        kwargs: Mapping[str, Any],
        uuids: Mapping[str, Any] | None = None,
    ) -> harness.Outcome:
        """The request that `LLM.generate` passes to the engine."""
        text = isinstance(prompt, str)
        sent: dict[str, Any] = {"prompt" if text else "prompt_token_ids": prompt}
        sent |= {"multi_modal_data": dict(data), "mm_processor_kwargs": deepcopy(dict(kwargs))}
        if uuids is not None:
            sent["multi_modal_uuids"] = uuids
        with self.in_place():
            self.llm.generate([sent], SamplingParams(), use_tqdm=False)
        return self._engine.outcome()

    def chat(
        self, message: Sequence[Any], template: str, kwargs: Mapping[str, Any]
    ) -> harness.Outcome:
        """The request that `LLM.chat` passes to the engine for one message of these parts."""
        self.last = None
        with self.in_place():
            self.llm.chat(
                [{"role": "user", "content": list(message)}],
                SamplingParams(),
                use_tqdm=False,
                chat_template=template,
                chat_template_content_format="string",
                mm_processor_kwargs=deepcopy(dict(kwargs)) or None,
            )
        return self._engine.outcome()

    def chat_completions(
        self, message: Sequence[Any], template: str, kwargs: Mapping[str, Any]
    ) -> harness.Outcome:
        """The request that the server's chat completions pass to the engine, which is also the
        answer of its render route."""
        self.last = None
        request = _ChatRequest(model="", messages=[], mm_processor_kwargs=deepcopy(dict(kwargs)))
        # items themselves, which JSON has no form for
        request.messages = [{"role": "user", "content": list(message)}]
        request.chat_template, request.chat_template_content_format = template, "string"
        with self.in_place(), ThreadPoolExecutor(1) as thread:
            # the caller may have an event loop of its own
            rendered = thread.submit(asyncio.run, self.online.render_chat(request)).result()
        if not isinstance(rendered, tuple):
            raise harness.NotTaken(str(rendered))
        (prompt,) = rendered[1]
        return _outcome(prompt)

    @contextmanager
    def without_caches(self) -> Iterator[None]:
        """The prefix cache is off, too."""
        cache = self._engine.vllm_config.cache_config
        before, cache.enable_prefix_caching = cache.enable_prefix_caching, False
        try:
            yield
        finally:
            cache.enable_prefix_caching = before

    def part(self, name: str, value: Any) -> dict[str, Any] | None:
        """An item as a part of a message, as it is; None where chat has none for it."""
        if self.llm.model_config.is_encoder_decoder:
            return None
        if self._spec is not None:
            return {"type": name, name: value} if _is_chattable(self._spec, name) else None
        is_pil = type(value).__module__.startswith("PIL.")
        return {"type": "image_pil", "image_pil": value} if name == "image" and is_pil else None


def _is_chattable(spec: Declaration, name: str) -> bool:
    """Whether chat has parts of a modality: what stands for its items is a text, or nothing."""
    inserted = all(isinstance(update, Insert) for update in spec[name].update)
    return inserted or placeholder_text(spec, name, 0) is not None


class _Engine:
    """Takes what comes to the engine."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.renderer: Any = None
        self._arrived: Any = None

    def add_request(self, request_id: str, prompt: Any, *_params: Any, **_options: Any) -> str:
        self._arrived = prompt
        return request_id

    def has_unfinished_requests(self) -> bool:
        return False

    def outcome(self) -> harness.Outcome:
        """Of what came last."""
        return _outcome(self._arrived)


def _outcome(prompt: Any) -> harness.Outcome:
    if prompt["type"] == "enc_dec":
        ids = prompt["encoder_prompt"]["prompt_token_ids"]
        prompt = {**prompt["decoder_prompt"], "encoder_prompt_token_ids": ids}
    return harness.outcome(prompt)


def _model_class(processor: Any, spec: Declaration | None) -> type:
    """A model class whose processor is this one."""
    factory = SimpleNamespace(
        info=lambda ctx: processor.info, build_processor=lambda ctx, **options: processor
    )
    if spec is None:
        theirs = model_loader.get_model_cls(processor.info.ctx.model_config)
        placeholder: Any = theirs.get_placeholder_str
    else:

        def placeholder(modality: str, i: int) -> str | None:
            return placeholder_text(spec, modality.removesuffix("_embeds"), i - 1)

    members = {"get_placeholder_str": staticmethod(placeholder), "mm_spec": spec}
    return type("Named", (harness.StandIn,), {"_processor_factory": factory, **members})


def _online(config: Any, renderer: Any) -> Any:
    """The server's renderer; None where this vLLM has none."""
    if _OnlineRenderer is None:
        return None
    known = inspect.signature(_OnlineRenderer).parameters
    trust = {name: True for name in known if name.startswith("trust_request_")}
    return _OnlineRenderer(
        config,
        renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="string",
        **trust,
    )


def configured(processor: Any, **options: Any) -> Any:
    """The ModelConfig of a processor, with other options of items: a copy."""
    config = copy(processor.info.ctx.model_config)
    vars(config).pop("_supports_multimodal_inputs_cache", None)
    config.multimodal_config = copy(config.get_multimodal_config())
    vars(config.multimodal_config).update(options)
    return config


def with_server_kwargs(processor: Any, kwargs: Mapping[str, Any]) -> Any:
    """Another processor of these classes, for a server that has such `mm_processor_kwargs`."""
    config = configured(processor, mm_processor_kwargs=deepcopy(dict(kwargs)))
    info, dummy_inputs = type(processor.info), type(processor.dummy_inputs)
    return kit.built(info, dummy_inputs, type(processor), config)

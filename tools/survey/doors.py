"""vLLM's doors without an engine: what `LLM.generate` and `LLM.chat` would hand to the engine.

The code is vLLM's own. Two things stand in for parts of it: an engine that keeps what reaches it,
and a model class whose processor is the one under test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.config import VllmConfig
from vllm.entrypoints.llm import LLM
from vllm.model_executor import model_loader
from vllm.sampling_params import SamplingParams

from mmkit.errors import VllmApiError
from mmkit.generate import Classes
from mmkit.testing.vllm_path import Outcome, collect_outcome
from mmkit.vllm_api.checkpoint_processors import StandIn, make_processor
from mmkit.vllm_api.compat import find

renderer_from_config: Any = None
with suppress(VllmApiError):
    find("renderers.base:BaseRenderer")  # before 0.17 the engine renders
    renderer_from_config = find("renderers.registry:renderer_from_config")

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that writes the contents of messages."""


class Doors:
    """The doors of one processor. vLLM's processor cache is off, its prefix cache on.

    Attributes:
        llm: a `vllm.LLM` with an engine that only keeps the last prompt.
        model_class: the class that vLLM takes for the model's.
        last_chat: the text of the last messages by the chat template, and the `mm_processor_kwargs`
            that their parts were read with (None where none are taken); None where the messages
            were refused.
    """

    last_chat: tuple[str, Mapping[str, Any] | None] | None = None

    def __init__(self, processor: Any) -> None:
        # the sender of a cache keeps no fields of what the engine has
        config = copy_config(processor, mm_processor_cache_gb=0)
        self.model_class = _make_model_class(processor)
        self._engine = _Engine(VllmConfig(model_config=config))
        # off for some models and platforms, as latent attention on CPUs: hashes are made up then
        self._engine.vllm_config.cache_config.enable_prefix_caching = True
        with self.use_model_class():
            renderer = renderer_from_config(self._engine.vllm_config)
        self._engine.renderer = renderer
        renderer.render_messages = self._record_chats(renderer.render_messages)
        self.llm: Any = LLM.__new__(LLM)
        vars(self.llm).update(
            llm_engine=self._engine,
            model_config=config,
            renderer=renderer,
            request_counter=itertools.count(),
            runner_type="generate",
            chat_template=None,
        )

    def use_model_class(self) -> Any:
        """Return a block in which vLLM finds the model class."""

        def get_model_cls(config: Any) -> type:
            return self.model_class

        def get_model_architecture(config: Any) -> tuple[type, str]:
            return self.model_class, self.model_class.__name__

        return mock.patch.multiple(
            model_loader,
            get_model_cls=get_model_cls,
            get_model_architecture=get_model_architecture,
        )

    def _record_chats(self, render: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a renderer's method, so that it sets `last_chat`."""

        @wraps(render)
        def render_and_record(messages: Any, params: Any) -> Any:
            conversation, prompt = render(messages, params)
            options = None
            if hasattr(params, "mm_processor_kwargs"):
                options = params.mm_processor_kwargs or {}
            self.last_chat = str(prompt["prompt"]), options
            return conversation, prompt

        return render_and_record

    def generate(
        self,
        prompt: Sequence[int],
        data: Mapping[str, Any],
        kwargs: Mapping[str, Any],
        uuids: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Return the request that `LLM.generate` passes to the engine."""
        request: dict[str, Any] = {
            "prompt_token_ids": prompt,
            "multi_modal_data": dict(data),
            "mm_processor_kwargs": deepcopy(dict(kwargs)),
        }
        if uuids is not None:
            request["multi_modal_uuids"] = uuids
        with self.use_model_class():
            self.llm.generate([request], SamplingParams(), use_tqdm=False)
        return self._engine.outcome()

    def chat(self, message: Sequence[Any], template: str, kwargs: Mapping[str, Any]) -> Outcome:
        """Return the request that `LLM.chat` passes to the engine for one message of parts."""
        self.last_chat = None
        with self.use_model_class():
            self.llm.chat(
                [{"role": "user", "content": list(message)}],
                SamplingParams(),
                use_tqdm=False,
                chat_template=template,
                chat_template_content_format="string",
                mm_processor_kwargs=deepcopy(dict(kwargs)) or None,
            )
        return self._engine.outcome()

    @property
    def last_prompt(self) -> Any:
        """The last prompt that reached the engine, as vLLM's renderer made it."""
        return self._engine.last_prompt

    def without_caches(self) -> Any:
        """Return a block in which the prefix cache is off, too."""
        cache = self._engine.vllm_config.cache_config
        return mock.patch.object(cache, "enable_prefix_caching", False)


class _Engine:
    """Takes what comes to the engine."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.renderer: Any = None
        self.last_prompt: Any = None

    def add_request(self, request_id: str, prompt: Any, *_params: Any, **_options: Any) -> str:
        self.last_prompt = prompt
        return request_id

    def has_unfinished_requests(self) -> bool:
        return False

    def outcome(self) -> Outcome:
        """Return the outcome of the last request."""
        prompt = self.last_prompt
        if prompt["type"] == "enc_dec":
            ids = prompt["encoder_prompt"]["prompt_token_ids"]
            prompt = {**prompt["decoder_prompt"], "encoder_prompt_token_ids": ids}
        return collect_outcome(prompt)


def _make_model_class(processor: Any) -> type:
    """Return a model class whose processor is this one."""

    def get_info(ctx: Any) -> Any:
        return processor.info

    def build_processor(ctx: Any, **options: Any) -> Any:
        return processor

    model_class = model_loader.get_model_cls(processor.info.ctx.model_config)
    members = {
        "_processor_factory": SimpleNamespace(info=get_info, build_processor=build_processor),
        "get_placeholder_str": staticmethod(model_class.get_placeholder_str),
    }
    return type("Named", (StandIn,), members)


def copy_config(processor: Any, **options: Any) -> Any:
    """Return a copy of the ModelConfig of a processor, with other options of items."""
    config = copy(processor.info.ctx.model_config)
    vars(config).pop("_supports_multimodal_inputs_cache", None)
    config.multimodal_config = copy(config.get_multimodal_config())
    vars(config.multimodal_config).update(options)
    return config


def with_server_kwargs(processor: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a processor of these classes for a server that has such `mm_processor_kwargs`."""
    config = copy_config(processor, mm_processor_kwargs=deepcopy(dict(kwargs)))
    classes = Classes(type(processor.info), type(processor.dummy_inputs), type(processor))
    return make_processor(classes, config)

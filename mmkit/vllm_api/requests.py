"""The common part of vLLM 0.17 and later: a request comes as one `ProcessorInputs`, and the info
makes the parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from typing_extensions import override
from vllm.multimodal.processing import ProcessorInputs, TimingContext
from vllm.renderers import TokenizeParams

from ..plan import Plan
from . import common
from .guard import check_may_pass, is_rendered, mark
from .hashes import TenantNames
from .processor import CommonProcessor, ParsingInfo


@dataclass(frozen=True)
class GuardedTokenizeParams(TokenizeParams):
    """vLLM's tokenization parameters, which every prompt of the offline API passes, with or without
    items: they refuse token ids that the model lacks and placeholders without data before the
    engine sees them. They see the uuids of items beside the `cache_salt`, too, which no processor
    does."""

    plan: Plan | None = field(default=None, compare=False, repr=False)

    @classmethod
    def guard(cls, params: TokenizeParams, plan: Plan | None) -> GuardedTokenizeParams:
        """These parameters, guarded by a plan."""
        return cls(**{f.name: getattr(params, f.name) for f in fields(TokenizeParams)}, plan=plan)

    @override
    def with_kwargs(self, **tokenization_kwargs: Any) -> GuardedTokenizeParams:
        return self.guard(super().with_kwargs(**tokenization_kwargs), self.plan)

    @override
    def apply_post_tokenization(self, tokenizer: Any, prompt: Any) -> Any:
        if self.plan is not None and is_rendered(prompt):
            check_may_pass(self.plan)
            # the guard looks at it; to truncate it is the affair of the renderer, which knows its
            # items
            return prompt
        ids = prompt.get("prompt_token_ids")
        # a prompt with items is checked by the processor
        if ids is not None and self.plan is not None and not prompt.get("multi_modal_data"):
            self.plan.check_ids(ids)
            if self.plan.spec.decoder_prompt is None:  # else this may be the decoder's
                self.plan.check_bare(ids)
                prompt["prompt_token_ids"] = self.plan.rewrite("prompt", ids)
        if self.plan is not None and isinstance(prompt.get("multi_modal_uuids"), Mapping):
            prompt = {**prompt}  # the caller's own may be used again
            prompt["multi_modal_uuids"] = TenantNames(prompt, self.plan.spec.name)
        return super().apply_post_tokenization(tokenizer, prompt)


class ProcessingInfo(ParsingInfo):
    """vLLM's questions about the modalities of a spec; generated classes set `spec`."""

    @override
    def get_default_tok_params(self) -> TokenizeParams:
        params = super().get_default_tok_params()
        if self.spec.tokenization_kwargs:
            params = params.with_kwargs(**self.spec.tokenization_kwargs)
        return GuardedTokenizeParams.guard(params, self.plan)

    def merged_kwargs(self, kwargs: Mapping[str, object]) -> dict[str, Any]:
        merged: dict[str, Any] = self.ctx.get_merged_mm_kwargs(kwargs)
        return merged


_NOT_HASHED = frozenset(
    {"prompt", "mm_data_items", "mm_uuid_items", "tokenization_kwargs", "cache", "processor"}
)
"""Fields of a request that vLLM's hashes of its items do not depend on."""


@dataclass
class HashedInputs(ProcessorInputs):
    """A request whose hashes the processor sees: see `CommonProcessor.hashed`."""

    processor: CommonProcessor = field(kw_only=True, repr=False, compare=False)

    @override
    def get_mm_hashes(self, *args: Any, **kwargs: Any) -> Any:
        def by_vllm(forms: Any) -> Any:
            formed = replace(self, mm_data_items=forms, mm_uuid_items=None)  # type: ignore[call-arg]
            return ProcessorInputs.get_mm_hashes(formed, *args, **kwargs)

        stated = vars(self).items()
        options = {name: value for name, value in stated if value and name not in _NOT_HASHED}
        return self.processor.hashed(
            self.mm_data_items, self.mm_uuid_items or {}, by_vllm, options=options
        )


class RequestProcessor(CommonProcessor):
    """Processes requests that come as `ProcessorInputs`."""

    @override
    def apply(self, inputs: ProcessorInputs, timing_ctx: Any) -> Any:
        items = inputs.mm_data_items
        uuids = inputs.mm_uuid_items or {}
        run = partial(super().apply, inputs, timing_ctx)
        return mark(self.guarded(inputs.prompt, items, uuids, run))

    @override
    def _cached_apply_hf_processor(self, inputs: ProcessorInputs, timing_ctx: Any) -> Any:
        hashed = HashedInputs(**vars(inputs), processor=self)
        if self.may_cache(inputs.mm_data_items):
            try:
                return super()._cached_apply_hf_processor(hashed, timing_ctx)
            except _TooLarge:
                # as the request does with the engine's half, which has the same size
                self.cache_of(inputs).clear_cache()
        return self._apply_hf_processor(hashed, timing_ctx)

    @override
    def _merge_mm_kwargs(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._merge_mm_kwargs(*args, **kwargs)
        except (
            AssertionError
        ) as error:  # of an item that another one of the same request has evicted
            raise _TooLarge from error


class _TooLarge(Exception):
    """The items of a request do not fit into the cache together."""


HOOKS = (ProcessingInfo, RequestProcessor, *common.HOOKS, HashedInputs, GuardedTokenizeParams)
"""Classes whose methods vLLM calls."""


# -- for mmkit.testing -----------------------------------------------------------------------------


def parsed(processor: Any, data: Mapping[str, Any]) -> Any:
    """A caller's data as vLLM's items, checked."""
    return processor.info.parse_mm_data(data)


def encoded(processor: Any, text: str) -> list[int]:
    """The ids of a text, without placement."""
    return list(
        processor.info.get_tokenizer().encode(
            text, **processor.info.default_tok_params.get_encode_kwargs()
        )
    )


def tokenized(processor: Any, prompt: str, data: Mapping[str, Any]) -> list[int]:
    """The ids of a text as vLLM's renderer makes them, before any processor sees it."""
    params, tokenizer = processor.info.default_tok_params, processor.info.get_tokenizer()
    text = params.apply_pre_tokenization(tokenizer, {"prompt": prompt, "multi_modal_data": data})
    ids = encoded(processor, text["prompt"])
    return list(
        params.apply_post_tokenization(tokenizer, {**text, "prompt_token_ids": ids})[
            "prompt_token_ids"
        ]
    )


def applied(processor: Any, inputs: Any) -> Any:
    """The outcome of one request."""
    return processor.apply(inputs, TimingContext(enabled=False))

"""What vLLM asks about the modalities of a spec before a request: limits, tokens, the largest
items."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.processing import BaseProcessingInfo

from ..bound.calls import LazyProcessor
from ..errors import SpecError
from ..plan import Plan
from .compat import BaseDummyInputsBuilder, ProcessorInputs
from .items import Parser, embeds_size

if TYPE_CHECKING:
    from ..spec import Declaration
    from .processor import CommonProcessor


INFO_PARSES = hasattr(BaseProcessingInfo, "get_data_parser")
BUILDER_MAKES_DUMMIES = hasattr(BaseDummyInputsBuilder, "get_dummy_processor_inputs")

_COUNTS_EMBEDS = hasattr(PlaceholderRange, "embeds_cumsum")
"""Whether embed positions count; before 0.13 the length of a layout does."""

GUARDS: tuple[type, ...] = ()
if hasattr(BaseProcessingInfo, "get_default_tok_params"):  # from 0.17
    from .tok_params import GuardedTokenizeParams

    GUARDS = (GuardedTokenizeParams,)


class ProcessingInfo(BaseProcessingInfo):
    """vLLM's questions about the modalities of a spec; generated classes set `spec`."""

    spec: ClassVar[Declaration]
    _last: ClassVar[tuple[Any, Plan | None]] = None, None
    """The arguments of the last binding, and its plan, which keeps them alive."""

    @cached_property
    def plan(self) -> Plan:
        """The spec, bound to this model's config and tokenizer: bound once, although vLLM makes a
        new info for each chat request."""
        config, kwargs = self.get_hf_config(), self.merged_kwargs({})
        tokenizer = self.ctx.tokenizer
        if type(tokenizer) is object:  # what vLLM 0.11 has for none
            tokenizer = None
        model_config = self.ctx.model_config
        most, dtype = model_config.max_model_len, model_config.dtype
        bound_to = (*map(id, (self.spec, model_config, config, tokenizer)), kwargs, most, dtype)
        last, plan = self._last
        if plan is None or last != bound_to:
            processor = LazyProcessor(self.get_hf_processor)
            plan = Plan(self.spec, config, tokenizer, processor, kwargs, most, dtype)
            type(self)._last = bound_to, plan
        return plan

    @override
    def get_hf_processor(self, **kwargs: object) -> Any:
        ctx = self.ctx
        if (saved := Path(ctx.model_config.model, "hf_processor")).is_dir():
            # by the processor of `mmkit.training`, whose own files nothing here reads
            config = copy(ctx.model_config)
            config.model = str(saved)
            ctx = replace(ctx, model_config=config)
        try:
            processor = ctx.get_hf_processor(**kwargs)
            return getattr(processor, "hf_processor", processor)
        except TypeError as error:  # of vLLM, where it loaded a tokenizer or a part
            if kwargs:
                raise
            expected = "a checkpoint with a Hugging Face processor"
            remedy = "Load the part that it has in hf(processor=...)."
            raise SpecError("proc", expected, str(error).rstrip("."), remedy) from error

    def merged_kwargs(self, kwargs: Mapping[str, object]) -> dict[str, Any]:
        """The `mm_processor_kwargs` of a request, merged with the server's."""
        # before 0.17 there is no such method
        merge = getattr(self.ctx, "get_merged_mm_kwargs", None)
        merged: dict[str, Any] = (merge or self.ctx.get_mm_config().merge_mm_processor_kwargs)(
            kwargs
        )
        return merged

    if INFO_PARSES:

        @override
        def get_data_parser(self) -> Parser:
            return self.new_parser()

        @override
        def validate_num_items(self, modality: str, num_items: int) -> None:
            self.plan.check_names([modality])
            intake = self.plan.modalities[modality].intake
            intake.check_count(num_items, self.allowed_mm_limits[modality])

    if GUARDS:

        @override
        def get_default_tok_params(self) -> Any:
            params = super().get_default_tok_params()
            if self.spec.tokenization_kwargs:
                params = params.with_kwargs(**self.spec.tokenization_kwargs)
            return GuardedTokenizeParams.guard(params, self.plan)

    def new_parser(self) -> Parser:
        """A parser of callers' data."""
        config = self.ctx.model_config
        takes_embeds = config.get_multimodal_config().enable_mm_embeds
        return Parser(self.plan, embeds_size(config) if takes_embeds else None)

    @override
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {name: modality.limit for name, modality in self.plan.modalities.items()}

    @override
    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        modalities = [m for name, m in self.plan.modalities.items() if mm_counts.get(name)]
        if not _COUNTS_EMBEDS or any(m.needs_hf for m in modalities):
            return None  # vLLM then processes the dummy inputs and counts their tokens
        return {m.name: m.largest()[1] for m in modalities}


class DummyInputs(BaseDummyInputsBuilder[ProcessingInfo]):
    """The worst-case request of a spec; generated classes set `spec`."""

    spec: ClassVar[Declaration]
    processor: CommonProcessor

    @override
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        # dummy prompts are built as token ids, so that models without a tokenizer have them too
        return ""

    @override
    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
    ) -> Any:
        sizes = {name: dummy_sizes(options) for name, options in (mm_options or {}).items()}
        counts = {name: count for name, count in mm_counts.items() if count}
        return {
            name: [self.processor.largest(name, sizes.get(name))] * count
            for name, count in counts.items()
        }

    if BUILDER_MAKES_DUMMIES:

        @override
        def get_dummy_processor_inputs(
            self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
        ) -> ProcessorInputs:
            return ProcessorInputs(*self.processor.worst(seq_len, mm_counts, mm_options))


def dummy_sizes(options: Any) -> dict[str, int]:
    """The sizes that vLLM's `limit_mm_per_prompt` states for the dummy items of one modality."""
    stated = {} if options is None else vars(options)
    return {name: size for name, size in stated.items() if name != "count" and size is not None}

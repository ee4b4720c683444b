"""What vLLM asks about modalities before a request: limits, tokens, the largest items."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override
from vllm.multimodal.processing import BaseProcessingInfo

from ..errors import SpecError, report_as_spec_error
from ..language.spec import Declaration
from ..plan.bind import bind
from ..plan.hf_calls import LazyProcessor
from ..plan.plan import Plan
from . import compat
from .items import Parser, RequestItems, get_embeds_size


class _Binding(NamedTuple):
    """A plan, and what its spec was bound to.

    Attributes:
        bound_to: the arguments of the plan, objects by their ids.
        plan: keeps these objects alive, so that no other objects get their ids.
    """

    bound_to: tuple[Any, ...]
    plan: Plan


class ProcessingInfo(BaseProcessingInfo):
    """Answers vLLM's questions about the modalities of a spec; generated classes set `spec`."""

    spec: ClassVar[Declaration]
    _last_binding: ClassVar[_Binding | None] = None

    @cached_property
    def plan(self) -> Plan:
        """The spec, bound to this model's config and tokenizer.

        It is bound once, although vLLM makes a new info for each chat request.
        """
        config = self.get_hf_config()
        kwargs = self.merge_kwargs({})
        tokenizer = self.ctx.tokenizer
        if type(tokenizer) is object:  # what vLLM 0.11 has for none
            tokenizer = None
        model_config = self.ctx.model_config
        max_len = model_config.max_model_len
        dtype = model_config.dtype
        identities = (id(self.spec), id(model_config), id(config), id(tokenizer))
        bound_to = (identities, kwargs, max_len, dtype)
        binding = self._last_binding
        if binding is None or binding.bound_to != bound_to:
            processor = LazyProcessor(self.get_hf_processor)
            plan = bind(self.spec, config, tokenizer, processor, kwargs, max_len, dtype)
            # in one assignment: other threads may bind, too
            binding = type(self)._last_binding = _Binding(bound_to, plan)
        return binding.plan

    @override
    def get_hf_processor(self, **kwargs: object) -> Any:
        ctx = self.ctx
        saved = Path(ctx.model_config.model, "hf_processor")
        if saved.is_dir():
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

    def merge_kwargs(self, kwargs: Mapping[str, object]) -> dict[str, Any]:
        """Return the `mm_processor_kwargs` of a request, merged with the server's.

        Not as `ctx.get_merged_mm_kwargs` does from 0.31: it drops an option without a scope for all
        modalities where the scope of one has it too, so that `videos_kwargs` would change images.
        """
        merged: dict[str, Any] = self.ctx.get_mm_config().merge_mm_processor_kwargs(kwargs)
        return merged

    if compat.INFO_PARSES:

        @override
        def get_data_parser(self) -> Parser:
            return self.new_parser()

        @override
        def validate_num_items(self, modality: str, num_items: int) -> None:
            self.plan.check_names([modality])
            parser = self.plan.modalities[modality].parser
            parser.check_count(num_items, self.allowed_mm_limits[modality])

    if hasattr(BaseProcessingInfo, "get_default_tok_params"):  # from 0.17

        @override
        def get_default_tok_params(self) -> Any:
            params = super().get_default_tok_params()
            return params.with_kwargs(**self.spec.tokenization_kwargs)

    def new_parser(self) -> Parser:
        """Return a parser of callers' data."""
        config = self.ctx.model_config
        hidden_size = None
        if config.get_multimodal_config().enable_mm_embeds:
            hidden_size = get_embeds_size(config)
        return Parser(self.plan, hidden_size)

    @override
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {name: modality.limit for name, modality in self.plan.modalities.items()}

    @override
    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        if not compat.COUNTS_EMBEDS:
            return None  # vLLM then processes the dummy inputs and counts their tokens
        modalities = []
        for name, modality in self.plan.modalities.items():
            # nothing of an item that becomes ids only enters the encoder, and vLLM takes a modality
            # that is left out for one without tokens of its own
            if mm_counts.get(name) and not modality.is_ids_only:
                modalities.append(modality)
        if any(modality.needs_hf for modality in modalities):
            return None
        return {modality.name: modality.most_rows for modality in modalities}


class DummyInputs(compat.BaseDummyInputsBuilder[ProcessingInfo]):
    """The worst-case request of a spec; generated classes set `spec`."""

    spec: ClassVar[Declaration]

    @override
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        # dummy prompts are built as token ids, so that models without a tokenizer have them too
        return ""

    @override
    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
    ) -> Any:
        data: dict[str, list[Any]] = {}
        with report_as_spec_error():
            for name, count in mm_counts.items():
                if count:
                    modality = self.info.plan.modalities[name]
                    largest_item = modality.largest_item(_read_sizes(mm_options, name))
                    data[name] = [largest_item] * count
        return data

    def worst(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
    ) -> tuple[list[int], RequestItems]:
        """Return the request with the most tokens: its prompt, and its items."""
        data = self.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        items = self.info.new_parser().parse_mm_data(data)
        items.largest = frozenset(name for name in items if not _read_sizes(mm_options, name))
        with report_as_spec_error():
            return self.info.plan.shortest_prompt(items.make_items({})), items

    if compat.BUILDER_MAKES_DUMMIES:

        @override
        def get_dummy_processor_inputs(
            self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
        ) -> Any:
            return compat.ProcessorInputs(*self.worst(seq_len, mm_counts, mm_options))


def _read_sizes(options: Any, name: str) -> dict[str, int]:
    """Return the sizes that vLLM's `limit_mm_per_prompt` has for the dummy items of a modality."""
    if not options or options.get(name) is None:
        return {}
    sizes: dict[str, int] = {}
    for key, size in vars(options[name]).items():
        if key != "count" and size is not None:
            sizes[key] = size
    return sizes

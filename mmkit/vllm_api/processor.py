"""The processor classes of a spec, as the installed vLLM calls them.

A processor unpacks vLLM's arguments, and hands the request to its `RequestPipeline`. `override`
marks the methods that vLLM calls; see `mmkit.vllm_api.hooks`. The arguments are what has changed
most since 0.11:

======================= ========== =============================================================
flag of `compat`        holds      the processor then
======================= ========== =============================================================
`TAKES_PARTS`           up to 0.16 takes the parts of a request one by one; from 0.17 on one
                                   `ProcessorInputs`
not `INFO_PARSES`       up to 0.15 parses the data itself
`PROMPTS_ARE_IDS`       from 0.29  sees token ids only; before, a prompt may be a text
`HOLDS_CACHE`           up to 0.30 has the cache; from 0.31 on it comes with the request
`BUILDER_MAKES_DUMMIES` up to 0.30 leaves the dummy inputs to the builder; from 0.31 makes them
======================= ========== =============================================================

Features of vLLM decide, no version number.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from typing_extensions import override
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseMultiModalProcessor, EncDecMultiModalProcessor

from ..language.spec import Declaration
from ..plan.plan import Plan
from . import compat, patches
from .hashes import make_hasher
from .hooks import REQUEST_FIELDS, refuse_dead
from .info import DummyInputs, ProcessingInfo
from .items import Parser, make_vllm_fields
from .pipeline import ProcessorRequest, RequestPipeline, StageTimer, measure_nothing

_APPLY_SIGNATURE = inspect.signature(BaseMultiModalProcessor.apply)


def _find_factor_names() -> list[str]:
    """Return the options of a request on which the hashes of its items depend.

    `mm_processor_kwargs` is not among them; options that mmkit does not know are.
    """
    names = [option.name for option in fields(compat.ProcessorInputs)]
    not_factors = REQUEST_FIELDS - {"media_io_kwargs"}
    return [name for name in names if name not in not_factors]


_FACTOR_NAMES = _find_factor_names()


class Processor(BaseMultiModalProcessor[ProcessingInfo]):
    """Processes the requests of a spec; generated classes set `spec`.

    Attributes:
        plan: the spec, bound to this model's config and tokenizer.
        pipeline: the steps of a request.
    """

    spec: ClassVar[Declaration]
    sends_row_counts: ClassVar[bool] = False
    """Whether the model receives the number of encoder rows of each item, to compare its own.

    `mmkit.model.registration` sets it, where the model has the mixin; see
    `BoundModality.needs_row_count` for the modalities that it concerns."""
    requires_tokenizer = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_dead(cls, Processor)

    def __init__(self, info: ProcessingInfo, dummy_inputs: DummyInputs, **options: Any) -> None:
        super().__init__(info, dummy_inputs, **options)
        self.plan: Plan = info.plan
        self.pipeline = RequestPipeline(
            info, make_hasher(info), sends_row_counts=self.sends_row_counts
        )
        patches.install()

    def render(
        self, request: ProcessorRequest, timer: StageTimer = measure_nothing
    ) -> dict[str, Any]:
        """Return a request in vLLM's form for its engine; see `RequestPipeline.run`."""
        return self.pipeline.run(request, timer)

    if compat.TAKES_PARTS:

        @override
        def apply(self, *args: Any, **kwargs: Any) -> Any:
            arguments = _APPLY_SIGNATURE.bind(self, *args, **kwargs).arguments
            items = arguments[compat.ITEMS]
            if not isinstance(items, MultiModalDataItems):
                items = self._to_mm_items(items)  # before 0.16 they come as the caller's data
            uuids: dict[str, Any] = {}
            for name, uuids_of_modality in (arguments.get("mm_uuids") or {}).items():
                if isinstance(uuids_of_modality, str):
                    uuids_of_modality = [uuids_of_modality]
                uuids[name] = uuids_of_modality
            request = ProcessorRequest(
                arguments["prompt"],
                items.make_items(uuids),
                options=arguments["hf_processor_mm_kwargs"],
                cache=self.cache,
                tokenization=arguments.get("tokenization_kwargs") or {},
                offloaded=items.offloaded,
            )
            return self.render(request)

    else:

        @override
        def apply(self, inputs: Any, timing_ctx: Any) -> Any:
            factors: dict[str, Any] = {}
            for name in _FACTOR_NAMES:
                value = getattr(inputs, name)
                if value:
                    factors[name] = value
            request = ProcessorRequest(
                inputs.prompt,
                inputs.mm_data_items.make_items(inputs.mm_uuid_items or {}),
                options=inputs.hf_processor_mm_kwargs,
                cache=self.cache if compat.HOLDS_CACHE else inputs.cache,
                factors=factors,
                tokenization=getattr(inputs, "tokenization_kwargs", {}),
                offloaded=inputs.mm_data_items.offloaded,
            )
            timer = timing_ctx.record if timing_ctx.enabled else measure_nothing
            return self.render(request, timer)

    if not compat.BUILDER_MAKES_DUMMIES:

        @override
        def get_dummy_inputs(
            self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any
        ) -> Any:
            return compat.ProcessorInputs(*self.dummy_inputs.worst(seq_len, mm_counts, mm_options))

    if not compat.INFO_PARSES:

        @override
        def _get_data_parser(self) -> Parser:
            parser: Parser = self.info.new_parser()
            return parser

        @override
        def validate_num_items(self, modality: str, num_items: int) -> None:
            parser = self.plan.modalities[modality].parser
            parser.check_count(num_items, self.allowed_mm_limits[modality])

    @override
    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        # vLLM's chat batches the embeddings of a message by these
        configs: dict[str, MultiModalFieldConfig] = {}
        for name, modality in self.plan.modalities.items():
            vllm_fields = make_vllm_fields(modality, sends_row_counts=self.sends_row_counts)
            for key, vllm_field in vllm_fields.items():
                configs[key] = MultiModalFieldConfig(field=vllm_field, modality=name)
        return configs

    @override
    def _get_prompt_updates(self, *_: Any, **__: Any) -> Any:
        """Refuse: this is abstract in vLLM, and only vLLM's own `apply` calls it."""
        raise NotImplementedError


class EncDecProcessor(EncDecMultiModalProcessor, Processor):
    """Processes the requests of a spec with a `decoder_prompt`.

    The items go into the encoder's prompt.
    """

    @override
    def create_encoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        return prompt

    @override
    def create_decoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        ids = self.info.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        return self.plan.rewrite("decoder_prompt", ids)


HOOKS = (Parser, ProcessingInfo, DummyInputs, EncDecProcessor)
"""The classes whose methods vLLM calls."""

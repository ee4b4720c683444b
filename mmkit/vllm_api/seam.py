"""The classes of a spec as the installed vLLM calls them.

What a processor gets and gives has hardly changed since 0.11, but for its arguments:

=============== ==================================================================================
vLLM            the processor
=============== ==================================================================================
0.11.2 to 0.16  takes the parts of a request one by one; before 0.16 it parses the data itself
0.17 to 0.28    takes a request as one `ProcessorInputs`; its prompt may be a text
0.29, 0.30      sees token ids only
0.31 to 0.33    makes the dummy inputs itself; the cache comes with the request
=============== ==================================================================================

Features of vLLM decide, no version number.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

from typing_extensions import override
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseMultiModalProcessor, EncDecMultiModalProcessor

from . import compat, patches
from .hooks import REQUEST_FIELDS
from .info import DummyInputs, ProcessingInfo
from .items import Parser
from .processor import CommonProcessor, Request

_APPLY = inspect.signature(BaseMultiModalProcessor.apply)

_OTHERS = REQUEST_FIELDS - {"media_io_kwargs"}
_FACTORS = tuple(own.name for own in fields(compat.ProcessorInputs) if own.name not in _OTHERS)
"""The options of a request, beside `mm_processor_kwargs`, on which the hashes of its items depend:
also those that mmkit does not know."""


class Processor(CommonProcessor):
    """Processes the requests of a spec; generated classes set `spec`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        patches.install()

    if compat.TAKES_PARTS:

        @override
        def apply(self, *args: Any, **kwargs: Any) -> Any:
            sent = _APPLY.bind(self, *args, **kwargs).arguments
            items, uuids = sent[compat.ITEMS], (sent.get("mm_uuids") or {}).items()
            request = Request(
                sent["prompt"],
                # before 0.16 they come as the caller's data
                items if isinstance(items, MultiModalDataItems) else self._to_mm_items(items),
                {name: [own] if isinstance(own, str) else own for name, own in uuids},
                sent["hf_processor_mm_kwargs"],
                self.cache,
                tokenization=sent.get("tokenization_kwargs") or {},
            )
            return self.rendered(request)

    else:

        @override
        def apply(self, inputs: Any, timing_ctx: Any) -> Any:
            request = Request(
                inputs.prompt,
                inputs.mm_data_items,
                inputs.mm_uuid_items or {},
                inputs.hf_processor_mm_kwargs,
                self.cache if compat.HOLDS_CACHE else inputs.cache,
                {name: value for name in _FACTORS if (value := getattr(inputs, name))},
                getattr(inputs, "tokenization_kwargs", {}),
            )
            return self.rendered(request, timing_ctx.record if timing_ctx.enabled else nullcontext)

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


class EncDecProcessor(EncDecMultiModalProcessor, Processor):
    """Processes the requests of a spec with a `decoder_prompt`: items go into the encoder's
    prompt."""

    @override
    def create_encoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        return prompt

    @override
    def create_decoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        ids = self.info.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        return self.plan.rewrite("decoder_prompt", ids)


HOOKS = (Parser, ProcessingInfo, DummyInputs, EncDecProcessor)
"""Classes whose methods vLLM calls."""

"""vLLM 0.31 to 0.33: the processor sees token ids only, builds its own dummy inputs, and gets its cache with each
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from transformers.feature_extraction_utils import BatchFeature
from vllm.multimodal.processing import EncDecMultiModalProcessor, ProcessorInputs
from vllm.renderers import TokenizeParams

from ..plan import Plan
from .processor import CommonInfo, CommonProcessor


@dataclass(frozen=True)
class GuardedTokenizeParams(TokenizeParams):
    """vLLM's tokenization parameters, which every prompt of the offline API passes, with or without items: they refuse
    token ids that the model lacks and placeholders without data before the engine sees them."""

    plan: Plan | None = field(default=None, compare=False, repr=False)

    @classmethod
    def guard(cls, params: TokenizeParams, plan: Plan | None) -> GuardedTokenizeParams:
        """The same parameters, guarded by a plan."""
        return cls(**{f.name: getattr(params, f.name) for f in fields(TokenizeParams)}, plan=plan)

    def with_kwargs(self, **tokenization_kwargs: Any) -> GuardedTokenizeParams:
        return self.guard(super().with_kwargs(**tokenization_kwargs), self.plan)

    def apply_post_tokenization(self, tokenizer: Any, prompt: Any) -> Any:
        ids = prompt.get("prompt_token_ids")
        # a prompt with items is checked by the processor
        if ids is not None and self.plan is not None and not prompt.get("multi_modal_data"):
            self.plan.check_ids(ids)
            self.plan.check_bare(ids)
            if self.plan.spec.decoder_prompt is None:  # else this may be the decoder's
                prompt["prompt_token_ids"] = self.plan.rewrite("prompt", ids)
        return super().apply_post_tokenization(tokenizer, prompt)


class ProcessingInfo(CommonInfo):
    """What vLLM asks about the modalities of a spec; generated classes set `spec`."""

    def get_default_tok_params(self) -> TokenizeParams:
        return GuardedTokenizeParams.guard(super().get_default_tok_params(), self.plan)


class Processor(CommonProcessor):
    """Processes the requests of a spec; generated classes set `spec`."""

    def get_dummy_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> ProcessorInputs:
        data = self.dummy_inputs.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        items = self.info.parse_mm_data(data, validate=False)
        return ProcessorInputs(prompt=self._dummy_prompt(items), mm_data_items=items)

    def apply(self, inputs: ProcessorInputs, timing_ctx: Any) -> Any:
        self.plan.check_ids(inputs.prompt)
        self._check_uuids(inputs.mm_data_items, inputs.mm_uuid_items or {})
        try:
            return super().apply(inputs, timing_ctx)
        except Exception:
            # vLLM may have cached the items, but the engine, which shares the cache, will never see them
            if inputs.cache is not None:
                for hashes in self._get_mm_hashes(inputs).values():
                    for item_hash in hashes:
                        inputs.cache.invalidate(item_hash)
            raise

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> BatchFeature:
        return BatchFeature(self._processed(mm_items, hf_kwargs))

    def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
        return self.plan.rewrite("prompt", prompt)

    # -- caches ------------------------------------------------------------------------------------------------------

    def _may_cache(self, inputs: ProcessorInputs, name: str) -> bool:
        return self.plan.modalities[name].may_cache(len(inputs.mm_data_items[name]))

    def _cached_apply_hf_processor(self, inputs: ProcessorInputs, timing_ctx: Any) -> Any:
        if all(self._may_cache(inputs, name) for name in inputs.mm_data_items):
            return super()._cached_apply_hf_processor(inputs, timing_ctx)
        return self._apply_hf_processor(inputs, timing_ctx)

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> Any:
        # the engine caches encoder outputs by hash: what depends on the number of items is not the same item
        return {
            name: hashes if self._may_cache(inputs, name) else [f"{item_hash}-of-{len(hashes)}" for item_hash in hashes]
            for name, hashes in super()._get_mm_hashes(inputs).items()
        }

    def _get_cache_missing_items(self, cache: Any, mm_data_items: Any, mm_hashes: Any) -> Any:
        # vLLM parses the missing items again; they are canonical already
        cached = {name: cache.is_cached(hashes) for name, hashes in mm_hashes.items()}
        missing = type(mm_data_items)()
        for name, flags in cached.items():
            if not all(flags):
                missing[name] = part = copy(mm_data_items[name])
                part.mmkit_total = len(flags)
                indices = [i for i, flag in enumerate(flags) if not flag]
                part.data = [part.data[i] for i in indices]
                if isinstance(getattr(part, "metadata", None), list):
                    part.metadata = [part.metadata[i] for i in indices]
        return cached, missing


class EncDecProcessor(Processor, EncDecMultiModalProcessor[ProcessingInfo]):
    """Processes the requests of a spec with a `decoder_prompt`: items go into the encoder's prompt."""

    def create_encoder_prompt(self, prompt: list[int], mm_items: Any) -> list[int]:
        return prompt

    def create_decoder_prompt(self, prompt: Any, mm_items: Any) -> Any:
        return self.plan.rewrite("decoder_prompt", prompt)

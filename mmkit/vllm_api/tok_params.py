"""Tokenization parameters of vLLM 0.17 and later, which look at every prompt of the offline API."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from typing_extensions import override
from vllm.renderers import TokenizeParams

from ..errors import InputError
from ..plan import Plan
from .compat import RENDERS
from .items import is_rendered


@dataclass(frozen=True)
class GuardedTokenizeParams(TokenizeParams):
    """vLLM's tokenization parameters, which every prompt of the offline API passes, with or without
    items: they refuse token ids that the model lacks and placeholders without data before the
    engine sees them."""

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
            if not RENDERS:  # vLLM would render it again, without its items
                where = f"{self.plan.spec.name}.mm_kwargs"
                raise InputError(where, "raw items", "processed fields")
            # it is looked at before the engine; to truncate it is the affair of the renderer, which
            # knows its items
            return prompt
        ids = prompt.get("prompt_token_ids")
        # a prompt with items is checked by the processor
        if ids is not None and self.plan is not None and not prompt.get("multi_modal_data"):
            self.plan.check_ids(ids)
            if self.plan.spec.decoder_prompt is None:  # else this may be the decoder's
                self.plan.check_bare(ids)
                prompt["prompt_token_ids"] = self.plan.rewrite("prompt", ids)
        return super().apply_post_tokenization(tokenizer, prompt)

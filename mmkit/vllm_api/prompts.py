"""The common part of vLLM up to 0.28: the prompt passes the processor with the items, and may be a
text. Up to 0.30 the processor holds its cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from .processor import CommonProcessor


class PromptProcessor(CommonProcessor):
    """Processes the prompt together with the items, without any influence of one on the other."""

    @override
    def _apply_hf_processor_main(
        self,
        prompt: Any,
        mm_items: Any,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        *,
        enable_hf_prompt_update: bool,
    ) -> Any:
        ids = self.prompt_ids(prompt, **tokenization_kwargs)
        return ids, self.features(mm_items, hf_processor_mm_kwargs), False


# -- for mmkit.testing -----------------------------------------------------------------------------


@contextmanager
def holding(processor: Any, cache: Any) -> Iterator[None]:
    """A processor with another cache."""
    before, processor.cache = processor.cache, cache
    try:
        yield
    finally:
        processor.cache = before


def process(processor: Any, items: Any, kwargs: Any) -> Any:
    """The processed fields of parsed items."""
    return processor._apply_hf_processor_main([], items, kwargs, {}, enable_hf_prompt_update=False)[
        1
    ]


def spelled(processor: Any, sequence: Any) -> list[int]:
    """The ids of a target, or of what it becomes."""
    if isinstance(sequence, str):
        sequence = processor.info.get_tokenizer().encode(sequence, add_special_tokens=False)
    return list(sequence)


def embedded(processor: Any, content: Any) -> Any:
    """Which ids of what a target becomes receive encoder rows; None for all."""
    return (
        None
        if content.is_embed is None
        else content.is_embed(processor.info.ctx.tokenizer, content.full)
    )

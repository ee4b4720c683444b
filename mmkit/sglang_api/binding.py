"""A spec, bound to the checkpoint that SGLang serves, in the processes that need the plan."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.tokenizer_manager import get_processor_wrapper
from sglang.srt.runtime_context import get_model, get_serving
from transformers import AutoProcessor

from ..errors import SpecError
from ..language.spec import Declaration
from ..plan.bind import bind
from ..plan.hf_calls import LazyProcessor
from ..plan.plan import Plan


def bind_spec(spec: Declaration, config: Any, dtype: torch.dtype, processor: Any = None) -> Plan:
    """Bind a spec to the checkpoint that SGLang serves.

    Args:
        spec: the declaration.
        config: the Hugging Face config of the model.
        dtype: of the language model.
        processor: the Hugging Face processor, or the tokenizer of a checkpoint without one; None
            loads it.

    Raises:
        SpecError: as for `ModelSpec.bind`.
    """
    if processor is None:
        processor = get_processor_wrapper()
    tokenizer = getattr(processor, "tokenizer", processor)

    def load(**options: Any) -> Any:
        if processor is tokenizer:
            expected = "a checkpoint with a Hugging Face processor"
            remedy = "Load the part that it has in hf(processor=...)."
            raise SpecError("proc", expected, "only a tokenizer", remedy)
        if not options:
            return processor
        model = get_model()
        return AutoProcessor.from_pretrained(
            get_serving().tokenizer_path,
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
            **options,
        )

    return bind(spec, config, tokenizer, LazyProcessor(load), dtype=dtype)

"""Encoder-decoder models, in every generation."""

from __future__ import annotations

from typing import Any

from typing_extensions import override
from vllm.multimodal.processing import EncDecMultiModalProcessor

from . import generation


class EncDecProcessor(generation.Processor, EncDecMultiModalProcessor):
    """Processes the requests of a spec with a `decoder_prompt`: items go into the encoder's prompt."""

    @override
    def create_encoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        return prompt

    @override
    def create_decoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        ids = self.info.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        return self.plan.rewrite("decoder_prompt", ids)

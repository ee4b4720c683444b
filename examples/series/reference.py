"""The model in plain transformers: what is trained, and the yardstick for vLLM."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM

from mmkit.training import MultiModalMixin

from .configuration import WavesConfig
from .encoder import PatchEncoder
from .spec import WAVES


class WavesForCausalLM(MultiModalMixin, LlamaForCausalLM):
    """A Llama whose `<patch>` positions take the encoder's rows."""

    mm_spec = WAVES
    config_class = WavesConfig

    def __init__(self, config: WavesConfig) -> None:
        super().__init__(config)
        self.encoder = PatchEncoder(config)
        self.post_init()

    def embed_series(self, series: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        """Encode items, as the model for vLLM does."""
        return [self.encoder(item) for item in series]

    def answer(self, processor: Any, prompt: str, series: Sequence[Any], max_tokens: int) -> list[int]:
        """Return greedy ids after a prompt with one `<series>` per item."""
        inputs = processor(prompt, series=series)
        ids = self.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        return ids[0, inputs["input_ids"].shape[1] :].tolist()

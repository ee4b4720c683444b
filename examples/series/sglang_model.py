"""The model for SGLang: the same spec and the same encoder as for vLLM, and a Llama of SGLang's."""

from typing import Any

import torch
from sglang.srt.models.llama import LlamaForCausalLM
from transformers import AutoConfig

from mmkit.sglang_api import MultiModalModel, register

from .configuration import WavesConfig
from .encoder import PatchEncoder
from .spec import WAVES

AutoConfig.register("waves", WavesConfig, exist_ok=True)


@register(WAVES)
class WavesForCausalLM(MultiModalModel, LlamaForCausalLM):
    """Weights have the names of the reference: a Llama's, and `encoder.*`."""

    def __init__(
        self,
        config: WavesConfig,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__(config, quant_config, prefix)
        self.encoder = PatchEncoder(config)

    def embed_series(
        self,
        series: torch.Tensor | list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Encode items (steps, channels) to rows, one for each position."""
        return [self.encoder(item) for item in series]

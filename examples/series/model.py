"""The model for vLLM: the encoder, and a Llama that reads its rows."""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM

from mmkit import MultiModalModel

from .encoder import PatchEncoder
from .spec import WAVES


@WAVES.register
class WavesForCausalLM(MultiModalModel, LlamaForCausalLM):
    """Weights have the names of the reference: a Llama's, and `encoder.*`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.encoder = PatchEncoder(vllm_config.model_config.hf_config)

    def embed_series(self, series: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        """Encode items (steps, channels) to rows (positions, hidden_size), as many as the layout has positions."""
        return [self.encoder(item) for item in series]

"""The model of `notes` for vLLM: the encoder and the weights of examples/series."""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM

from examples.series.encoder import PatchEncoder
from mmkit import MultiModalModel

from .notes import NOTES, encode_record


@NOTES.register
class NotesForCausalLM(MultiModalModel, LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.encoder = PatchEncoder(vllm_config.model_config.hf_config)

    def embed_notes(self, values: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        return [encode_record(self.encoder, record) for record in values]

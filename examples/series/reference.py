"""The model in plain transformers: what is trained, and the yardstick for vLLM."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM

from .configuration import WavesConfig
from .encoder import PatchEncoder


class WavesForCausalLM(LlamaForCausalLM):
    """A Llama whose `<patch>` positions take the encoder's rows."""

    config_class = WavesConfig

    def __init__(self, config: WavesConfig) -> None:
        super().__init__(config)
        self.encoder = PatchEncoder(config)
        self.post_init()

    def embed(self, input_ids: torch.Tensor, series: Sequence[torch.Tensor], patch_id: int) -> torch.Tensor:
        """Embeddings (batch, length, hidden_size) of expanded prompts.

        Args:
            input_ids: int64 (batch, length), with `patch_id` at every position of a series.
            series: standardised series, in the order of their positions.
            patch_id: the placeholder.
        """
        rows = torch.cat([self.encoder(one) for one in series])
        return self.get_input_embeddings()(input_ids).masked_scatter((input_ids == patch_id)[..., None], rows)

    @torch.inference_mode()
    def answer(self, plan: Any, prompt: list[int], items: Sequence[Any], max_tokens: int) -> list[int]:
        """Greedy ids after a prompt with one placeholder per series, which the spec expands: see `ModelSpec.bind`."""
        seen = plan.preview(prompt, {"series": list(items)})
        (patch_id,) = plan.embed_ids
        series = [fields["series"] for fields in seen.fields["series"]]
        inputs = self.embed(torch.tensor([seen.prompt_token_ids]), series, patch_id)
        ids, cache = [], None
        for _ in range(max_tokens):
            outputs = self(inputs_embeds=inputs, past_key_values=cache, use_cache=True)
            outputs.logits[..., patch_id] = -torch.inf  # as vLLM, which never samples a placeholder
            ids.append(int(outputs.logits[0, -1].argmax()))
            inputs, cache = self.get_input_embeddings()(torch.tensor([ids[-1:]])), outputs.past_key_values
        return ids

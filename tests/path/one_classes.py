"""Models of transformers that vLLM runs as they are, and some that it cannot run."""

from typing import Any

import torch
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel

from examples.series.configuration import WavesConfig
from examples.series.encoder import PatchEncoder
from examples.series.reference import WavesForCausalLM
from examples.series.spec import WAVES
from mmkit import Modality, ModelSpec, Tensor, batched
from mmkit.training import MultiModalMixin


class RightForCausalLM(WavesForCausalLM):
    """It runs."""


class ConvertedForCausalLM(WavesForCausalLM):
    """Transformers converts a weight of its checkpoints."""


class ComputedForCausalLM(WavesForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder.register_buffer("norm", self.encoder.up.weight.norm(), persistent=False)


class ReadForCausalLM(WavesForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = self.encoder.up.weight.norm().item()


class WithDecoderForCausalLM(WavesForCausalLM):
    """Its decoder is `model`."""

    vllm_towers = ("encoder.up", "model")


class WithTowerForCausalLM(WavesForCausalLM):
    vllm_towers = ("encoder.up",)


class SquaredForCausalLM(WavesForCausalLM):
    """The head, and then a square."""

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        outputs = super().forward(input_ids, **inputs)
        return (outputs[0].square(), *outputs[1:])


class CachelessForCausalLM(WavesForCausalLM):
    """Other logits in vLLM, which asks for a tuple."""

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        outputs = super().forward(input_ids, **inputs)
        if inputs.get("return_dict") is False:
            return (outputs[0] * 0.5, *outputs[1:])
        return outputs


class IdsForCausalLM(WavesForCausalLM):
    """A `forward` of ids alone."""

    def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(input_ids)


class UncountedForCausalLM(WavesForCausalLM):
    """A `forward` that takes positions and does not pass them on."""

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        inputs.pop("position_ids", None)
        return super().forward(input_ids, **inputs)


class RecountedForCausalLM(WavesForCausalLM):
    """A `forward` that counts positions itself, as if its tokens were one whole prompt.

    In vLLM they are those of all requests of a batch, and in later steps one of each.
    """

    def forward(self, input_ids: Any = None, **inputs: Any) -> Any:
        tokens = inputs["inputs_embeds"] if input_ids is None else input_ids
        inputs["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return super().forward(input_ids, **inputs)


class LlmForCausalLM(PreTrainedModel):
    """Its language model has a name under which transformers does not look for it."""

    config_class = WavesConfig
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder = PatchEncoder(config)
        self.llm = LlamaForCausalLM(config)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.llm.get_input_embeddings()

    def embed_series(self, series: Any) -> Any:
        return [self.encoder(steps) for steps in series]

    def forward(self, **inputs: Any) -> Any:
        return self.llm(**inputs)


class OtherNameForCausalLM(MultiModalMixin, LlmForCausalLM):
    mm_spec = WAVES


class DecodingForCausalLM(OtherNameForCausalLM):
    """It has something else by a name under which transformers looks for a language model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.decoder = torch.nn.Linear(config.hidden_size, 1)


class HeadlessForCausalLM(OtherNameForCausalLM):
    """Its language model is a decoder, under such a name."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.llm = LlamaModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class WithoutSpecForCausalLM(PreTrainedModel):
    pass


class WithoutEncoderForCausalLM(WavesForCausalLM):
    embed_series = None  # type: ignore[assignment]


class RawForCausalLM(WavesForCausalLM):
    mm_spec = ModelSpec("raw", Modality("image", item=Tensor((2,)), tokens=0, fields={"pixels": batched()}))

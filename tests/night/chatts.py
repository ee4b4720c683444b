"""A small ChatTS: the model for vLLM, a checkpoint with random weights, and the same model in plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config
from transformers import Qwen2ForCausalLM as PlainQwen2
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from examples.gallery.chatts import CHATTS
from mmkit import ModelSpec, MultiModalModel, batched, between, cfg
from mmkit.vllm_api import harness

PATCH, LONGEST = 4, 40
SPECIAL = ["<unk>", "<eos>", "<ts>", "<ts/>"]
PATCH_ID = SPECIAL.index("<ts>")


class Patches(nn.Sequential):
    """Rows of patches, the last value repeated to fill the last patch."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__(nn.Linear(size, width), nn.GELU(), nn.Linear(width, width))
        self.size = size

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Values (length,) to rows (patches, width)."""
        filling = values[-1:].expand(-len(values) % self.size)
        return super().forward(torch.cat([values, filling]).reshape(-1, self.size))


@CHATTS.register
class ChatTSForCausalLM(MultiModalModel, Qwen2ForCausalLM):
    """Its weights: a Qwen2's, and those of `ts_encoder.*`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.ts_encoder = Patches(config.ts["patch_size"], config.hidden_size)

    def embed_timeseries(self, timeseries: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        """Items (2 * length, 1), values and mask in turns, to rows (patches, hidden_size)."""
        dtype = self.ts_encoder[0].weight.dtype
        return [self.ts_encoder(series[::2, 0].to(dtype)) for series in timeseries]


SENT_FIELDS = {
    "timeseries": batched(shape=(between(2, 2 * cfg.ts["max_sequence_length"]), 1), dtype="float32"),
    "statistics": batched(shape=(2,), dtype="float64"),
}
SENT = ModelSpec("sent", CHATTS["timeseries"].model_copy(update={"fields": SENT_FIELDS}))
"""As `CHATTS`, with all fields that the layout reads sent to the model, so that another host may send them."""


@SENT.register
class SentChatTSForCausalLM(ChatTSForCausalLM):
    def embed_timeseries(self, timeseries: Any, statistics: Any) -> list[torch.Tensor]:
        return super().embed_timeseries(timeseries)


def send(folder: Path, prompts: Sequence[str], items: Sequence[Sequence[np.ndarray]]) -> list[str]:
    """Requests as a host without an engine renders them for another one."""
    config = harness.model_config(folder, hf_overrides={"architectures": [SentChatTSForCausalLM.__name__]})
    processor = harness.registered(config)
    requests = [(harness.encoded(processor, p), {"timeseries": own}) for p, own in zip(prompts, items, strict=True)]
    return [harness.sent(processor, ids, data).decode() for ids, data in requests]


class Reference:
    """The model without vLLM and without the spec, in float32."""

    def __init__(self, folder: Path) -> None:
        """Draw the weights, and write a checkpoint of them."""
        tokens = [*SPECIAL, *map(chr, range(32, 127))]
        characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        names = {"unk_token": "<unk>", "eos_token": "<eos>", "additional_special_tokens": SPECIAL[2:]}
        PreTrainedTokenizerFast(tokenizer_object=characters, **names).save_pretrained(folder)
        config = Qwen2Config(
            architectures=["ChatTSForCausalLM"],
            vocab_size=len(tokens),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=1,
            dtype="float32",
            ts_token_start_index=PATCH_ID,
            ts={"max_sequence_length": LONGEST, "patch_size": PATCH},
        )
        torch.manual_seed(0)
        self.model, self.patches = PlainQwen2(config).eval(), Patches(PATCH, config.hidden_size)
        parts = {"": self.model, "ts_encoder.": self.patches}
        for part in parts.values():
            for weight in part.parameters():
                if weight.ndim > 1:  # larger than transformers' own start: each series must count
                    nn.init.normal_(weight, std=1.5 * weight[0].numel() ** -0.5)
        weights = {prefix + name: w for prefix, part in parts.items() for name, w in part.state_dict().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def _embed(self, text: str) -> torch.Tensor:
        return self.model.get_input_embeddings()(torch.tensor(self.tokenizer.encode(text), dtype=torch.long))

    @torch.inference_mode()
    def answer(self, prompt: str, items: Sequence[np.ndarray], max_tokens: int) -> list[int]:
        """The greedy answer to a prompt with ``<ts><ts/>`` for each series."""
        before, *texts = prompt.split("<ts><ts/>")
        embeds = [self._embed(before)]
        for series, text in zip(items, texts, strict=True):
            centred = series - series.mean()
            scale = max(np.abs(centred).max() / 3.0, 1.0)
            values = torch.from_numpy(centred / scale).float()
            told = f"[Offset: {-series.mean():.4f}|Scaled by: {scale:.4f}]"
            embeds += [self._embed(told), self.patches(values), self._embed(text)]
        length = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
        options: dict[str, Any] = {"do_sample": False, "suppress_tokens": [PATCH_ID], **length}
        return self.model.generate(inputs_embeds=torch.cat(embeds)[None], **options)[0].tolist()

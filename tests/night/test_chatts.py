"""A small ChatTS in an engine, with several series of several lengths in each of several requests, and the same model
in plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config
from transformers import Qwen2ForCausalLM as PlainQwen2
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from examples.gallery.chatts import CHATTS
from mmkit import MultiModalModel
from tests.engine.processes import engines_in_this_process

PATCH, LONGEST, TOKENS = 4, 40, 12
SPECIAL = ["<unk>", "<eos>", "<ts>", "<ts/>"]
PATCH_ID = SPECIAL.index("<ts>")
RANDOM = np.random.default_rng(0)
LENGTHS = [(), (1,), (40,), (7, 23), (4, 4, 4), (40, 1, 13, 8)]
ITEMS = [[RANDOM.normal(size=n).cumsum() * 10.0 ** RANDOM.integers(-2, 5) for n in lengths] for lengths in LENGTHS]
ITEMS.append([ITEMS[2][0][::-1].copy()])  # the text of another one, and other patches
PROMPTS = ["look: " + "and <ts><ts/>, ".join([""] * (len(items) + 1)) + "what now?" for items in ITEMS]


class Patches(nn.Sequential):
    """Rows of patches, the last value repeated to fill the last patch."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(PATCH, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Values (length,) to rows (patches, width)."""
        filling = values[-1:].expand(-len(values) % PATCH)
        return super().forward(torch.cat([values, filling]).reshape(-1, PATCH))


@CHATTS.register
class ChatTSForCausalLM(MultiModalModel, Qwen2ForCausalLM):
    """Its weights: a Qwen2's, and those of `ts_encoder.*`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.ts_encoder = Patches(vllm_config.model_config.hf_config.hidden_size)

    def embed_timeseries(self, timeseries: Any) -> list[torch.Tensor]:
        """Items (2 * length, 1), values and mask in turns, to rows (patches, hidden_size)."""
        return [self.ts_encoder(series[::2, 0]) for series in timeseries]


class Reference:
    """The model without vLLM and without the spec, in float32."""

    def __init__(self, folder: Path) -> None:
        """Draw the weights, and write a checkpoint of them."""
        tokens = [*SPECIAL, *map(chr, range(32, 127))]
        characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        names = {"unk_token": "<unk>", "eos_token": "<eos>", "additional_special_tokens": SPECIAL[2:]}
        PreTrainedTokenizerFast(tokenizer_object=characters, **names).save_pretrained(folder)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        ts = {"ts_token_start_index": PATCH_ID, "ts": {"max_sequence_length": LONGEST, "patch_size": PATCH}}
        names = {"architectures": ["ChatTSForCausalLM"], "vocab_size": len(tokens), "eos_token_id": 1}
        config = Qwen2Config(**names, **sizes, num_key_value_heads=1, dtype="float32", **ts)
        torch.manual_seed(0)
        self.model, self.patches = PlainQwen2(config).eval(), Patches(config.hidden_size)
        parts = {"": self.model, "ts_encoder.": self.patches}
        for weight in (weight for part in parts.values() for weight in part.parameters()):
            if weight.ndim > 1:  # larger than transformers' own start: each series must count
                nn.init.normal_(weight, std=1.5 * weight[0].numel() ** -0.5)
        weights = {prefix + name: w for prefix, part in parts.items() for name, w in part.state_dict().items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def _embed(self, text: str) -> torch.Tensor:
        return self.model.get_input_embeddings()(torch.tensor(self.tokenizer.encode(text), dtype=torch.long))

    @torch.inference_mode()
    def answer(self, prompt: str, items: Sequence[np.ndarray]) -> list[int]:
        """The greedy answer to a prompt with ``<ts><ts/>`` for each series."""
        before, *texts = prompt.split("<ts><ts/>")
        embeds = [self._embed(before)]
        for series, text in zip(items, texts, strict=True):
            centred = series - series.mean()
            scale = max(np.abs(centred).max() / 3.0, 1.0)
            values = torch.from_numpy(centred / scale).float()
            told = f"[Offset: {-series.mean():.4f}|Scaled by: {scale:.4f}]"
            embeds += [self._embed(told), self.patches(values), self._embed(text)]
        options: dict[str, Any] = {"do_sample": False, "suppress_tokens": [PATCH_ID]}
        options |= {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        return self.model.generate(inputs_embeds=torch.cat(embeds)[None], **options)[0].tolist()


def test_same_ids_as_in_transformers(tmp_path: Path) -> None:
    from vllm import LLM, SamplingParams

    reference = Reference(tmp_path)
    expected = [reference.answer(prompt, items) for prompt, items in zip(PROMPTS, ITEMS, strict=True)]
    assert len(set(map(tuple, expected))) == len(expected)
    pairs = zip(PROMPTS, ITEMS, strict=True)
    requests: list[Any] = [{"prompt": prompt, "multi_modal_data": {"timeseries": items}} for prompt, items in pairs]
    with pytest.MonkeyPatch.context() as patch, engines_in_this_process() as engines:
        patch.setenv("MMKIT_MODULES", __name__)  # for the processes of this test alone
        llm = LLM(str(tmp_path), dtype="float32", enforce_eager=True, max_model_len=512)
        engines.callback(llm.llm_engine.engine_core.shutdown)
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        results = llm.generate(requests, sampling, use_tqdm=False)
        assert [list(result.outputs[0].token_ids) for result in results] == expected

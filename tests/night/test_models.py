"""Specs of the gallery in engines, by the ids of the models without them: ChatTS and Whisper as in transformers,
Qwen2-VL as by vLLM's own class, whose M-RoPE positions follow from the grids that the spec states."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config
from transformers import Qwen2ForCausalLM as PlainQwen2
from transformers import Qwen2VLForConditionalGeneration as PlainQwen2VL
from transformers import WhisperForConditionalGeneration as PlainWhisper
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration

from examples.gallery.chatts import CHATTS
from examples.gallery.qwen2_vl import QWEN2_VL
from examples.gallery.whisper import WHISPER
from examples.llava_like.offline import answer, engine
from mmkit import MultiModalModel
from tests.oracles import SYSTEMS

pytestmark = pytest.mark.timeout(600)

TOKENS = 12


def sharpened(*parts: nn.Module, seed: int = 0) -> None:
    """Random weights, larger than transformers' own start: each item and each position must count."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in [named for part in parts for named in part.named_parameters()]:
            if weight.ndim > 1 and "embed_positions" not in name:
                weight.normal_(std=1.5 * weight[0].numel() ** -0.5)


def stored(folder: Path, name: str, plain: Any, seed: int = 0, **changes: Any) -> Any:
    """The config and tokenizer of a system, with a model of random weights."""
    shutil.copytree(SYSTEMS[name].checkpoint, folder, dirs_exist_ok=True)
    model = plain(AutoConfig.from_pretrained(folder, **changes)).eval()
    sharpened(model, seed=seed)
    model.save_pretrained(folder)
    return model


def started(engines: ExitStack, folder: Path, model: type, **options: Any) -> Any:
    options |= {"hf_overrides": {"architectures": [model.__name__]}, "enforce_eager": True, "seed": 0}
    llm = engines.enter_context(engine(folder, **options))
    assert type(llm.llm_engine.model_executor.driver_worker.worker.get_model()) is model
    return llm


def different(ids: list[list[int]]) -> bool:
    return len({*map(tuple, ids)}) == len(ids)


# -- ChatTS ------------------------------------------------------------------------------------------------------------

PATCH, LONGEST = 4, 40
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


class ChatTS:
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
        config = Qwen2Config(**sizes, num_key_value_heads=1, vocab_size=len(tokens), eos_token_id=1, **ts)
        self.model, self.patches = PlainQwen2(config).eval(), Patches(config.hidden_size)
        self.model.generation_config.eos_token_id = None  # as the engine, which ignores it
        sharpened(self.model, self.patches)
        parts = {"": self.model, "ts_encoder.": self.patches}
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
        options: dict[str, Any] = {"do_sample": False, "suppress_tokens": [PATCH_ID], "max_new_tokens": TOKENS}
        return self.model.generate(inputs_embeds=torch.cat(embeds)[None], **options)[0].tolist()


def test_chatts_as_in_transformers(engines: ExitStack, tmp_path: Path) -> None:
    """Several series of several lengths in each of several requests."""
    reference = ChatTS(tmp_path)
    pairs = [*zip(PROMPTS, ITEMS, strict=True)]
    expected = [reference.answer(*pair) for pair in pairs]
    assert different(expected)
    requests = [{"prompt": prompt, "multi_modal_data": {"timeseries": items}} for prompt, items in pairs]
    llm = started(engines, tmp_path, ChatTSForCausalLM, max_model_len=512)
    assert answer(llm, requests, TOKENS) == expected


# -- Whisper, an encoder-decoder model ---------------------------------------------------------------------------------

START = "<|startoftranscript|>"
TASK = f"{START}<|en|><|transcribe|><|notimestamps|>"
TEXTS = [START, TASK, f"<pad>before{TASK}"]  # <pad> has the id of the encoder's positions
AUDIO = [np.random.RandomState(n).randn(n).astype(np.float32) for n in (1, 400, 16000, 32000)]


@WHISPER.register
class GeneratedWhisper(WhisperForConditionalGeneration):
    """vLLM's own class keeps its own processor."""


def test_whisper_as_in_transformers(engines: ExitStack, tmp_path: Path) -> None:
    """Whether the prompt is the decoder's, or either has its own."""
    model = stored(tmp_path, "whisper", PlainWhisper, d_model=64)
    processor = AutoProcessor.from_pretrained(tmp_path)
    plain, apart, expected = [], [], []
    for text, audio in [(text, audio) for text in TEXTS for audio in AUDIO]:
        plain.append({"prompt": text, "multi_modal_data": {"audio": audio}})
        of_encoder = {"prompt": "", "multi_modal_data": {"audio": audio}}
        apart.append({"encoder_prompt": of_encoder, "decoder_prompt": text})
        features = processor.feature_extractor(audio, sampling_rate=16000, return_tensors="pt").input_features
        # vLLM puts the start in front of a decoder's prompt that begins otherwise
        whole = text if text.startswith(START) else START + text
        prompt = ids = torch.tensor([processor.tokenizer.encode(whole, add_special_tokens=False)])
        for _ in range(TOKENS):
            with torch.inference_mode():
                logits = model(input_features=features, decoder_input_ids=ids).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        expected.append(ids[0, prompt.shape[1] :].tolist())
    assert len({*map(tuple, expected)}) > len(TEXTS) + len(AUDIO)
    llm = started(engines, tmp_path, GeneratedWhisper, max_num_seqs=8, block_size=128, enable_mm_embeds=False)
    assert [answer(llm, plain, TOKENS), answer(llm, apart, TOKENS)] == [expected, expected]


# -- Qwen2-VL ----------------------------------------------------------------------------------------------------------

IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))


@QWEN2_VL.register
class WithTheSpec(Qwen2VLForConditionalGeneration):
    """vLLM's model, of which the spec makes the inputs."""


@QWEN2_VL.register
class WithTheMixin(MultiModalModel, Qwen2VLForConditionalGeneration):
    """vLLM's tower and language model, and all that the spec says."""

    def embed_image(self, **fields: Any) -> Any:
        return self._process_image_input({"type": "pixel_values", **fields})

    def embed_video(self, **fields: Any) -> Any:
        return self._process_video_input({"type": "pixel_values_videos", **fields})


def noise(seed: int, *shape: int) -> Any:
    return np.random.RandomState(seed).randint(0, 256, (*shape, 3), dtype=np.uint8)


IMAGES = [Image.fromarray(noise(seed, *size)) for seed, size in enumerate([(60, 100), (200, 40), (57, 57)])]
VIDEOS = [noise(8, 5, 90, 50), noise(9, 6, 56, 84)]
REQUESTS: list[Any] = [
    {"prompt": "what is it?"},
    {"prompt": f"a {IMAGE} and {IMAGE}{IMAGE} differ", "multi_modal_data": {"image": IMAGES}},
    {"prompt": f"see {VIDEO} now", "multi_modal_data": {"video": VIDEOS[:1]}},
    {"prompt": f"{IMAGE} as in {VIDEO}{IMAGE}{VIDEO}", "multi_modal_data": {"image": IMAGES[1:], "video": VIDEOS}},
]


def test_qwen2_vl_as_by_vllms_own_class(engines: ExitStack, tmp_path: Path) -> None:
    stored(tmp_path, "qwen2_vl", PlainQwen2VL, seed=1)  # of which vLLM's class samples no placeholder
    theirs, *ours = (
        answer(started(engines, tmp_path, model, max_model_len=1024), REQUESTS)
        for model in (Qwen2VLForConditionalGeneration, WithTheSpec, WithTheMixin)
    )
    assert different(theirs)
    assert ours == [theirs, theirs]

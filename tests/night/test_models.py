"""Specs of the gallery in engines, by the ids of the models without them: Whisper as in transformers, Qwen2-VL as by
vLLM's own class, whose M-RoPE positions follow from the grids that the spec states."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoConfig, AutoProcessor
from transformers import Qwen2VLForConditionalGeneration as PlainQwen2VL
from transformers import WhisperForConditionalGeneration as PlainWhisper
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration

from examples.gallery.qwen2_vl import QWEN2_VL
from examples.gallery.whisper import WHISPER
from examples.llava_like.offline import answer, engine
from mmkit import MultiModalModel
from tests.oracles import SYSTEMS

pytestmark = pytest.mark.timeout(600)

TOKENS = 12


def sharpened(model: nn.Module, seed: int) -> None:
    """Random weights, larger than transformers' own start: each item and each position must count."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed_positions" not in name:
                weight.normal_(std=1.5 * weight[0].numel() ** -0.5)


def stored(folder: Path, name: str, plain: Any, seed: int = 0, **changes: Any) -> Any:
    """The config and tokenizer of a system, with a model of random weights."""
    shutil.copytree(SYSTEMS[name].checkpoint, folder, dirs_exist_ok=True)
    model = plain(AutoConfig.from_pretrained(folder, **changes)).eval()
    sharpened(model, seed)
    model.save_pretrained(folder)
    return model


def started(engines: ExitStack, folder: Path, model: type, **options: Any) -> Any:
    options |= {"hf_overrides": {"architectures": [model.__name__]}, "enforce_eager": True, "seed": 0}
    llm = engines.enter_context(engine(folder, **options))
    assert type(llm.llm_engine.model_executor.driver_worker.worker.get_model()) is model
    return llm


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
    assert len({*map(tuple, theirs)}) == len(theirs)
    assert ours == [theirs, theirs]

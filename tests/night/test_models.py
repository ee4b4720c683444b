"""Specs of the gallery in engines: the ids are those of the models without a spec.

Whisper is compared with transformers, and Qwen2-VL with vLLM's own class, whose M-RoPE positions follow from the grids
that the spec states.
"""

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

NUM_TOKENS = 12
"""Tokens of each answer."""


def enlarge_weights(model: nn.Module, seed: int) -> None:
    """Draw random weights that are larger than those of transformers, so that each item and position counts."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed_positions" not in name:
                weight.normal_(std=1.5 * weight[0].numel() ** -0.5)


def write_model(folder: Path, name: str, model_class: Any, seed: int = 0, **changes: Any) -> Any:
    """Write the config and tokenizer of a system with random weights, and return the model of transformers."""
    shutil.copytree(SYSTEMS[name].checkpoint, folder, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(folder, **changes)
    model = model_class(config).eval()
    enlarge_weights(model, seed)
    model.save_pretrained(folder)
    return model


def start_engine(engines: ExitStack, folder: Path, model_class: type, **options: Any) -> Any:
    options |= {"hf_overrides": {"architectures": [model_class.__name__]}, "enforce_eager": True, "seed": 0}
    llm = engines.enter_context(engine(folder, **options))
    assert type(llm.llm_engine.model_executor.driver_worker.worker.get_model()) is model_class
    return llm


# -- Whisper, an encoder-decoder model ---------------------------------------------------------------------------------

START = "<|startoftranscript|>"
TASK = f"{START}<|en|><|transcribe|><|notimestamps|>"
# <pad> has the id of the encoder's positions
TEXTS = [START, TASK, f"<pad>before{TASK}"]


def make_audio(num_samples: int) -> np.ndarray:
    return np.random.RandomState(num_samples).randn(num_samples).astype(np.float32)


AUDIOS = [make_audio(1), make_audio(400), make_audio(16_000), make_audio(32_000)]


@WHISPER.register
class GeneratedWhisper(WhisperForConditionalGeneration):
    """vLLM's own class keeps its own processor."""


def transcribe(model: PlainWhisper, processor: Any, text: str, audio: np.ndarray) -> list[int]:
    """Return the ids that transformers' model generates after a prompt of the decoder."""
    features = processor.feature_extractor(audio, sampling_rate=16000, return_tensors="pt").input_features
    # vLLM puts the start in front of a decoder's prompt that begins with another token
    if not text.startswith(START):
        text = START + text
    prompt = processor.tokenizer.encode(text, add_special_tokens=False)

    ids = torch.tensor([prompt])
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(input_features=features, decoder_input_ids=ids).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def count_different(answers: list[list[int]]) -> int:
    return len({tuple(ids) for ids in answers})


def test_whisper_gives_the_ids_of_transformers(engines: ExitStack, tmp_path: Path) -> None:
    """The prompt is the decoder's, or the encoder and the decoder have a prompt each."""
    model = write_model(tmp_path, "whisper", PlainWhisper, d_model=64)
    processor = AutoProcessor.from_pretrained(tmp_path)
    requests_of_one_prompt: list[Any] = []
    requests_of_two_prompts: list[Any] = []
    expected = []
    for text in TEXTS:
        for audio in AUDIOS:
            encoder_prompt = {"prompt": "", "multi_modal_data": {"audio": audio}}
            requests_of_one_prompt.append({"prompt": text, "multi_modal_data": {"audio": audio}})
            requests_of_two_prompts.append({"encoder_prompt": encoder_prompt, "decoder_prompt": text})
            expected.append(transcribe(model, processor, text, audio))
    assert count_different(expected) > len(TEXTS) + len(AUDIOS)

    llm = start_engine(engines, tmp_path, GeneratedWhisper, max_num_seqs=8, block_size=128, enable_mm_embeds=False)

    assert answer(llm, requests_of_one_prompt, NUM_TOKENS) == expected
    assert answer(llm, requests_of_two_prompts, NUM_TOKENS) == expected


# -- Qwen2-VL ----------------------------------------------------------------------------------------------------------

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@QWEN2_VL.register
class WithTheSpec(Qwen2VLForConditionalGeneration):
    """vLLM's model, with inputs that the spec makes."""


@QWEN2_VL.register
class WithTheMixin(MultiModalModel, Qwen2VLForConditionalGeneration):
    """vLLM's tower and language model, with the methods that the spec generates."""

    def embed_image(self, **fields: Any) -> Any:
        return self._process_image_input({"type": "pixel_values", **fields})

    def embed_video(self, **fields: Any) -> Any:
        return self._process_video_input({"type": "pixel_values_videos", **fields})


def make_image(seed: int, height: int, width: int) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_video(seed: int, num_frames: int, height: int, width: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


IMAGES = [make_image(0, 60, 100), make_image(1, 200, 40), make_image(2, 57, 57)]
VIDEOS = [make_video(8, 5, 90, 50), make_video(9, 6, 56, 84)]
REQUESTS: list[Any] = [
    {"prompt": "what is it?"},
    {"prompt": f"a {IMAGE} and {IMAGE}{IMAGE} differ", "multi_modal_data": {"image": IMAGES}},
    {"prompt": f"see {VIDEO} now", "multi_modal_data": {"video": VIDEOS[:1]}},
    {"prompt": f"{IMAGE} as in {VIDEO}{IMAGE}{VIDEO}", "multi_modal_data": {"image": IMAGES[1:], "video": VIDEOS}},
]


def test_qwen2_vl_gives_the_ids_of_vllms_own_class(engines: ExitStack, tmp_path: Path) -> None:
    # with this seed, vLLM's class, which does not mask placeholders, samples none
    write_model(tmp_path, "qwen2_vl", PlainQwen2VL, seed=1)

    def answer_by(model_class: type) -> list[list[int]]:
        llm = start_engine(engines, tmp_path, model_class, max_model_len=1024)
        return answer(llm, REQUESTS)

    expected = answer_by(Qwen2VLForConditionalGeneration)
    assert count_different(expected) == len(REQUESTS)
    assert answer_by(WithTheSpec) == expected
    assert answer_by(WithTheMixin) == expected

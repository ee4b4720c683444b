"""Qwen2-VL in the engine: vLLM's own class, the gallery's spec on it, and the spec with the mixin, whose M-RoPE
positions follow from the grids that the spec states."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration

from examples.gallery.qwen2_vl import QWEN2_VL
from examples.llava_like.offline import answer, engine
from mmkit import MultiModalModel
from tests.engine.processes import engines_in_this_process
from tests.oracles import SYSTEMS

IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))


class WithTheSpec(Qwen2VLForConditionalGeneration):
    """vLLM's model, of which the spec makes the inputs."""


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


def make_checkpoint(folder: Path) -> Path:
    """The stored config and tokenizer, with random weights."""
    from transformers import AutoConfig
    from transformers import Qwen2VLForConditionalGeneration as Reference

    shutil.copytree(SYSTEMS["qwen2_vl"].checkpoint, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    model = Reference(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for weight in model.parameters():  # larger than transformers' own start: each position must count
            weight.normal_(std=1.5 * weight[0].numel() ** -0.5) if weight.ndim > 1 else weight.add_(0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen2_vl"))
    with engines_in_this_process() as stack, pytest.MonkeyPatch.context() as environment:
        environment.setenv("MMKIT_MODULES", "")
        for model in (WithTheSpec, WithTheMixin):
            QWEN2_VL.register(model)
        classes = (Qwen2VLForConditionalGeneration, WithTheSpec, WithTheMixin)
        yield {model.__name__: started(stack, folder, model) for model in classes}


def started(stack: ExitStack, folder: Path, model: type) -> Any:
    options = {"hf_overrides": {"architectures": [model.__name__]}, "max_model_len": 1024, "enforce_eager": True}
    llm = stack.enter_context(engine(folder, seed=0, **options))
    assert type(model_of(llm)) is model
    return llm


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def test_greedy_ids_are_those_of_vllms_own_class(engines: dict[str, Any]) -> None:
    theirs, *ours = (answer(llm, REQUESTS) for llm in engines.values())
    assert ours == [theirs, theirs]
    assert len({str(ids) for ids in theirs}) == len(REQUESTS)

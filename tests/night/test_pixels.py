"""The pixels of examples/pixels.py are those of the fast processors of transformers, bit for bit.

A model that normalises bytes answers as it does to floats: vLLM's own Qwen2-VL and InternVL, 60 pictures each. The
LLaVA-like model is in test_containment.py.
"""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.config import MultiModalConfig

from benchmarks import pixel_models
from benchmarks.pixels import FIELDS, MODEL_CONFIGS, find_prompt
from examples.pixels import Pixels
from mmkit.testing.options import BYTES_OPTIONS
from tests.oracles import SYSTEMS
from tests.profiles import scaled

SQUARE = {"height": 40, "width": 40}
PROCESSORS = [
    transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
    transformers.CLIPImageProcessor(size={"shortest_edge": 30}, resample=2, do_center_crop=False),
    transformers.CLIPImageProcessor(size={"shortest_edge": 60}, crop_size=SQUARE),
    transformers.CLIPImageProcessor(size={"shortest_edge": 30}, crop_size=SQUARE),
    transformers.SiglipImageProcessor(size=SQUARE),
    transformers.BlipImageProcessor(size=SQUARE),
    transformers.ViTImageProcessor(size=SQUARE, do_resize=False),
]
SIDES = st.integers(2, 200)


@settings(max_examples=scaled(200))
@given(st.sampled_from(PROCESSORS), SIDES, SIDES, st.integers(0, 9))
def test_bytes_are_those_of_transformers(processor: object, width: int, height: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    image = Image.fromarray(pixels)
    expected = processor([image], return_tensors="pt", **BYTES_OPTIONS)["pixel_values"][0]
    assert torch.equal(Pixels(processor)([image])["pixel_values"][0], expected)


def test_what_differs_is_refused() -> None:
    lanczos = transformers.CLIPImageProcessor(resample=1)
    with pytest.raises(ValueError, match="only resizes"):
        Pixels(lanczos)
    with pytest.raises(ValueError, match="a shortest edge, or a height"):
        Pixels(transformers.ViTImageProcessor(size={"shortest_edge": 30, "longest_edge": 60}))
    floats = np.zeros((4, 4, 3), np.float32)
    with pytest.raises(ValueError, match="a float32 image"):
        Pixels(PROCESSORS[0])([floats])


# -- bytes and floats in an engine -------------------------------------------------------------------------------------

NUM_PICTURES = 60
ROUNDING = 1e-3
"""How much more probable one id may be than another one, as a difference of logarithms, where rounding chooses."""

ENGINES: dict[str, dict[torch.dtype, tuple[type, dict[str, Any]]]] = {
    "qwen2_vl": {
        torch.float32: (pixel_models.Qwen2VLOfSpec, {"mm_device_do_normalize": False}),
        torch.uint8: (pixel_models.Qwen2VLOfSpec, {"mm_device_do_normalize": True}),
    },
    "internvl2": {
        torch.float32: (pixel_models.InternVLOfFloats, {}),
        torch.uint8: (pixel_models.InternVLOfBytes, {}),
    },
}
"""By system and dtype of the pixels, a model class and options of its engine."""


@pytest.fixture
def random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw weights so large that pictures decide the answers, and no two alike.

    vLLM's own dummy weights are below 0.001, come all from one seed, and replace the mean of the pixels, too.
    """

    def draw_weights(loader: Any, model: torch.nn.Module, model_config: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                values *= 2 / parameter[0].numel() ** 0.5
            parameter.data.copy_(values)

    monkeypatch.setattr("vllm.model_executor.model_loader.dummy_loader.DummyModelLoader.load_weights", draw_weights)


def draw_pictures() -> list[Image.Image]:
    """Return pictures of many sizes, with shapes as large as a patch."""
    random = np.random.default_rng(0)
    pictures = []
    for _ in range(NUM_PICTURES):
        width, height = random.integers(28, 400, 2).tolist()
        shapes = random.integers(0, 256, (max(2, height // 16), max(2, width // 16), 3), dtype=np.uint8)
        pictures.append(Image.fromarray(shapes).resize((width, height), Image.Resampling.BICUBIC))
    return pictures


def answer_pictures(name: str, dtype: torch.dtype, engines: ExitStack) -> list[Any]:
    """Return the completions of a system's engine whose pixels have a dtype."""
    model_class, options = ENGINES[name][dtype]
    llm = LLM(
        SYSTEMS[name].checkpoint,
        dtype="float32",
        load_format="dummy",
        enforce_eager=True,
        seed=0,
        max_model_len=2048,
        block_size=32,
        trust_remote_code=True,
        hf_overrides={"architectures": [model_class.__name__], **MODEL_CONFIGS.get(name, {})},
        limit_mm_per_prompt={"image": 1, "video": 0},
        **options,
    )
    engines.callback(llm.llm_engine.engine_core.shutdown)
    prompt = find_prompt(SYSTEMS[name])
    requests = []
    for picture in draw_pictures():
        requests.append({"prompt_token_ids": list(prompt), "multi_modal_data": {"image": picture}})
    (rendered,) = llm.llm_engine.renderer.render_cmpl([requests[0]], skip_mm_cache=True)
    (item,) = rendered["mm_kwargs"]["image"]
    assert item[FIELDS[name]].data.dtype == dtype
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=2)
    return [result.outputs[0] for result in llm.generate(requests, sampling, use_tqdm=False)]


def find_margin(completion: Any, other: Any) -> float:
    """Return how sure a completion is of its first id that another one lacks; 0 where the ids are equal."""
    for position, (left, right) in enumerate(zip(completion.token_ids, other.token_ids, strict=True)):
        if left != right:
            first, second = sorted(entry.logprob for entry in completion.logprobs[position].values())[-2:]
            return abs(first - second)
    return 0.0


@pytest.mark.skipif(not hasattr(MultiModalConfig, "mm_device_do_normalize"), reason="this vLLM normalises no bytes")
@pytest.mark.parametrize("name", ENGINES)
def test_bytes_have_the_answers_of_floats(name: str, engines: ExitStack, random_weights: None) -> None:
    """Of normalising, only the last bit may differ; so an id may where two are equally probable."""
    by_floats = answer_pictures(name, torch.float32, engines)
    by_bytes = answer_pictures(name, torch.uint8, engines)
    assert len({tuple(completion.token_ids) for completion in by_floats}) > NUM_PICTURES // 2
    margins = [find_margin(left, right) for left, right in zip(by_floats, by_bytes, strict=True)]
    print(f"{name}: {margins.count(0.0)} of {NUM_PICTURES} answers equal, largest margin {max(margins):.1e}")
    assert max(margins) < ROUNDING

"""The stored outputs of vLLM's hand-written processors, and how a spec's processor is compared with them.

``tests/data/oracles/<system>/`` holds, per system, a checkpoint folder without weights, `cases.jsonl` and
`origin.json`, which tells the vLLM and the class that produced them and the quirks seen. Where the class is wrong, a
case says how, as `wrong`, and has what is right: its text and its ids are one request, rows are as many as its
model makes. Padding to the largest item of a request is left out. MMKIT_ORACLES names another folder of this form.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmkit import ModelSpec
from mmkit.testing import ImageSample, vllm_path
from mmkit.testing.differences import find_difference
from mmkit.testing.processors import StandIn, load_model_config

FOLDER = Path(os.environ.get("MMKIT_ORACLES", Path(__file__).parent / "data" / "oracles"))
TOLERANCE = 2e-2
"""Of means and deviations: image backends differ slightly."""


@dataclass(frozen=True)
class System:
    """One system: its folder, its spec, the architecture that its config names; whether its model normalises pixels on
    the device. Where no outputs are stored, tools/survey makes the checkpoint."""

    name: str
    spec: str
    architecture: str
    normalises: bool = False

    def load_spec(self) -> ModelSpec:
        module, variable = self.spec.split(":")
        spec: ModelSpec = getattr(importlib.import_module(f"examples.{module}"), variable)
        return spec

    @property
    def checkpoint(self) -> str:
        from tools.survey import zoo

        stored = FOLDER / self.name / "checkpoint"
        return str(stored if stored.exists() else zoo.checkpoint(self.name))

    def cases(self) -> list[dict[str, Any]]:
        path = FOLDER / self.name / "cases.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line, object_hook=_rough) for line in lines]


SYSTEMS = {
    system.name: system
    for system in (
        System("llava", "llava_like.spec:LLAVA_LIKE", "LlavaForConditionalGeneration"),
        System("fuyu", "gallery.fuyu:FUYU", "FuyuForCausalLM"),
        System("blip2", "gallery.blip2:BLIP2", "Blip2ForConditionalGeneration"),
        System("florence2", "gallery.florence2:FLORENCE2", "Florence2ForConditionalGeneration"),
        System("molmo", "gallery.molmo:MOLMO", "MolmoForCausalLM"),
        System("chameleon", "gallery.chameleon:CHAMELEON", "ChameleonForConditionalGeneration"),
        System("deepseek_vl2", "gallery.deepseek_vl2:DEEPSEEK_VL2", "DeepseekVLV2ForCausalLM"),
        System("gemma3", "gallery.gemma3:GEMMA3", "Gemma3ForConditionalGeneration"),
        System("idefics3", "gallery.idefics3:IDEFICS3", "Idefics3ForConditionalGeneration"),
        System("internvl2", "gallery.internvl:INTERNVL", "InternVLChatModel"),
        System("qwen_vl", "gallery.qwen_vl:QWEN_VL", "QwenVLForConditionalGeneration"),
        System("qwen2_audio", "gallery.qwen2_audio:QWEN2_AUDIO", "Qwen2AudioForConditionalGeneration"),
        System("minicpmv", "gallery.minicpmv:MINICPMV", "MiniCPMV"),
        System("qwen3_vl", "gallery.qwen3_vl:QWEN3_VL", "Qwen3VLForConditionalGeneration", True),
        System("pixtral_hf", "gallery.pixtral:PIXTRAL_HF", "LlavaForConditionalGeneration"),
        System("qwen2_vl", "gallery.qwen2_vl:QWEN2_VL", "Qwen2VLForConditionalGeneration", normalises=True),
        System("llava_next", "gallery.llava_next:LLAVA_NEXT", "LlavaNextForConditionalGeneration"),
        System("ultravox", "gallery.ultravox:ULTRAVOX", "UltravoxModel"),
        System("whisper", "gallery.whisper:WHISPER", "WhisperForConditionalGeneration"),
        System("phi3v", "gallery.phi3v:PHI3V", "Phi3VForCausalLM"),
        System("paligemma", "gallery.paligemma:PALIGEMMA", "PaliGemmaForConditionalGeneration"),
        System("llava_onevision", "gallery.llava_onevision:LLAVA_ONEVISION", "LlavaOnevisionForConditionalGeneration"),
    )
}


@functools.cache
def processor(name: str, checkpoint: str | None = None, **options: Any) -> Any:
    """The generated processor of a system, in vLLM, on its stored checkpoint or another."""
    system = SYSTEMS[name]
    # a name of its own: vLLM keeps the class that it found for a checkpoint and an architecture, and the live class is
    # the second oracle
    architecture = f"Generated{system.architecture}"
    flags = {"__module__": __name__, "supports_mm_device_do_normalize": system.normalises}
    model = type(architecture, (StandIn,), flags)
    globals()[architecture] = model
    ModelRegistry.register_model(architecture, model)
    spec = system.load_spec()
    MULTIMODAL_REGISTRY.register_processor(
        spec.classes.processor, info=spec.classes.info, dummy_inputs=spec.classes.dummy_inputs
    )(model)
    folder, overrides = checkpoint or system.checkpoint, {"architectures": [architecture]}
    config = load_model_config(folder, hf_overrides=overrides, trust_remote_code=True, **options)
    instance = MULTIMODAL_REGISTRY.create_processor(config)
    assert type(instance) is spec.classes.processor
    return instance


@functools.cache
def hand_written(name: str, checkpoint: str | None = None, **options: Any) -> Any:
    """vLLM's own processor of a system's architecture, on its stored checkpoint or another."""
    folder = checkpoint or SYSTEMS[name].checkpoint
    instance = MULTIMODAL_REGISTRY.create_processor(load_model_config(folder, trust_remote_code=True, **options))
    assert type(instance).__module__.startswith("vllm.")
    return instance


def items_of(case: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The items of a case: deterministic noise."""
    return {name: [NOISE[name](**item) for item in items] for name, items in case["items"].items()}


def _image(seed: int, width: int, height: int) -> Any:
    return ImageSample(seed, width, height).value()


def _video(seed: int, frames: int, width: int, height: int) -> Any:
    return np.random.RandomState(seed).randint(0, 256, (frames, height, width, 3), dtype=np.uint8)


def _audio(seed: int, samples: int, rate: int) -> Any:
    return np.random.RandomState(seed).randn(samples).astype(np.float32), rate


NOISE: Mapping[str, Callable[..., Any]] = {"image": _image, "video": _video, "audio": _audio}


def replay(name: str, case: Mapping[str, Any]) -> Any:
    """What the generated processor makes of a case."""
    kwargs = case.get("mm_processor_kwargs", {})
    return vllm_path.render(processor(name), case["prompt_token_ids"], items_of(case), kwargs, None)


# -- comparison --------------------------------------------------------------------------------------------------------


class Rough(float):
    """A mean or a deviation."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) <= TOLERANCE * max(1, abs(other))

    __hash__ = None  # type: ignore[assignment]


def _rough(stored: dict[str, Any]) -> dict[str, Any]:
    return {key: Rough(value) if key in ("mean", "std") else value for key, value in stored.items()}


def compare_results(stored: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """The first difference of a stored result and one of vLLM."""
    return find_difference(stored, told(got), "stored and got")


def told(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result of vLLM as results are stored: prompts and masks as runs, the range of an item as its start and mask, of
    tensors what `_value` tells.
    """
    prompts = ("prompt_token_ids", "encoder_prompt_token_ids")
    ranges = {
        name: [[at.offset, _runs([True] * at.length if at.is_embed is None else at.is_embed.tolist())] for at in places]
        for name, places in result["mm_placeholders"].items()
    }
    fields = {
        name: [{field: _element(element) for field, element in item.items()} for item in items]
        for name, items in result["mm_kwargs"].items()
    }
    return {key: _runs(result[key]) for key in prompts if key in result} | {"placeholders": ranges, "fields": fields}


def _runs(values: Iterable[Any]) -> list[list[Any]]:
    return [[value, len([*own])] for value, own in itertools.groupby(values)]


def _element(element: Any) -> dict[str, Any]:
    kind = type(element.field).__name__.removeprefix("MultiModal").removesuffix("Field")
    return {"field": kind.lower(), **_value(element.data)}


def _value(value: Any) -> dict[str, Any]:
    """All values of a few integers; of other tensors what tells of them, as image backends differ slightly."""
    if isinstance(value, (list, tuple)):
        return {"list": [_value(part) for part in value]}
    if not isinstance(value, torch.Tensor):
        return {"py": value}
    facts: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if not value.is_floating_point():
        if value.numel() <= 32:
            return facts | {"values": value.tolist()}
        flat = value.flatten().tolist()
        facts |= {"ends": [*flat[:8], *flat[-4:]], "nonneg": sum(number >= 0 for number in flat)}
    if value.numel():
        wide = value.double()
        facts |= {"mean": Rough(wide.mean()), "std": Rough(wide.std(correction=0))}
    return facts

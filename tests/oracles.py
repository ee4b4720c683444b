"""The stored outputs of vLLM's hand-written processors, and how a spec's processor is compared with them.

``tests/data/oracles/<system>/`` holds, per system, a checkpoint folder without weights, `cases.jsonl` and
`origin.json`, which tells the vLLM and the class that produced them and the quirks seen. Where the class is wrong, a
case says how, as `wrong`, and has what is right: its text and its ids are one request, rows are as many as its
model makes. Padding to the largest item of a request is left out. MMKIT_ORACLES names another folder of this form.
"""

from __future__ import annotations

import functools
import importlib
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
from mmkit.vllm_api.checkpoint_processors import StandIn, load_model_config

FOLDER = Path(os.environ.get("MMKIT_ORACLES", Path(__file__).parent / "data" / "oracles"))
TOLERANCE = 2e-2
"""Of means and deviations: image backends differ slightly."""


@dataclass(frozen=True)
class System:
    """One system: a spec of the gallery, and the hand-written class of vLLM that it is compared with.

    Attributes:
        name: its folder in tests/data/oracles.
        spec: a module of examples and the variable of the spec.
        architecture: the model class that its config names.
        normalises: its model normalises pixels on the device.
    """

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
        """The stored checkpoint; where no outputs are stored, tools/survey makes it."""
        from tools.survey import zoo

        stored = FOLDER / self.name / "checkpoint"
        if stored.exists():
            return str(stored)
        return str(zoo.checkpoint(self.name))

    def cases(self) -> list[dict[str, Any]]:
        """Return the stored cases; none where no outputs are stored."""
        path = FOLDER / self.name / "cases.jsonl"
        if not path.exists():
            return []
        return [json.loads(line, object_hook=_make_rough) for line in path.read_text().splitlines()]


_SYSTEMS = [
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
]
SYSTEMS = {system.name: system for system in _SYSTEMS}


@functools.cache
def processor(name: str, checkpoint: str | None = None, **options: Any) -> Any:
    """Return the generated processor of a system, in vLLM.

    Args:
        name: the system.
        checkpoint: a folder in place of its stored checkpoint.
        options: options of vLLM's ModelConfig.
    """
    system = SYSTEMS[name]
    spec = system.load_spec()
    # The architecture has another name than the model class of vLLM: vLLM keeps the class that it found for a
    # checkpoint and an architecture, and its own class is compared as well.
    architecture = f"Generated{system.architecture}"
    model = type(
        architecture, (StandIn,), {"__module__": __name__, "supports_mm_device_do_normalize": system.normalises}
    )
    globals()[architecture] = model  # vLLM imports the class by its module and name
    ModelRegistry.register_model(architecture, model)
    register = MULTIMODAL_REGISTRY.register_processor(
        spec.classes.processor, info=spec.classes.info, dummy_inputs=spec.classes.dummy_inputs
    )
    register(model)
    overrides = {"architectures": [architecture]}
    folder = checkpoint or system.checkpoint
    config = load_model_config(folder, hf_overrides=overrides, trust_remote_code=True, **options)
    instance = MULTIMODAL_REGISTRY.create_processor(config)
    assert type(instance) is spec.classes.processor
    return instance


@functools.cache
def hand_written(name: str, checkpoint: str | None = None, **options: Any) -> Any:
    """Return vLLM's own processor of a system's architecture; the arguments are those of `processor`."""
    folder = checkpoint or SYSTEMS[name].checkpoint
    config = load_model_config(folder, trust_remote_code=True, **options)
    instance = MULTIMODAL_REGISTRY.create_processor(config)
    assert type(instance).__module__.startswith("vllm.")
    return instance


# -- cases -------------------------------------------------------------------------------------------------------------


def replay(name: str, case: Mapping[str, Any]) -> Any:
    """Return what the generated processor makes of a case, in vLLM's form."""
    kwargs = case.get("mm_processor_kwargs", {})
    return vllm_path.render(processor(name), case["prompt_token_ids"], items_of(case), kwargs, None)


def items_of(case: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the items of a case: deterministic noise."""
    items = {}
    for name, arguments in case["items"].items():
        items[name] = [NOISE[name](**of_item) for of_item in arguments]
    return items


def make_image(seed: int, width: int, height: int) -> Any:
    return ImageSample(seed, width, height).value()


def make_video(seed: int, frames: int, width: int, height: int) -> Any:
    return np.random.RandomState(seed).randint(0, 256, (frames, height, width, 3), dtype=np.uint8)


def make_audio(seed: int, samples: int, rate: int) -> Any:
    return np.random.RandomState(seed).randn(samples).astype(np.float32), rate


NOISE: Mapping[str, Callable[..., Any]] = {"image": make_image, "video": make_video, "audio": make_audio}


# -- comparison --------------------------------------------------------------------------------------------------------


def compare_results(stored: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Return the first difference of a stored result and one of vLLM."""
    return find_difference(stored, summarize_result(result), "stored and got")


class Rough(float):
    """A mean or a deviation, which is equal to numbers near it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) <= TOLERANCE * max(1, abs(other))

    __hash__ = None  # type: ignore[assignment]


def _make_rough(stored: dict[str, Any]) -> dict[str, Any]:
    """Make means and deviations of a stored result rough."""
    result = dict(stored)
    for key in ("mean", "std"):
        if key in result:
            result[key] = Rough(result[key])
    return result


def summarize_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result of vLLM in the form in which results are stored.

    Prompts and masks are runs, the range of an item is its start and its mask, and of a tensor there is what
    `_summarize_value` tells.
    """
    summary: dict[str, Any] = {}
    for key in ("prompt_token_ids", "encoder_prompt_token_ids"):
        if key in result:
            summary[key] = _find_runs(result[key])
    summary["placeholders"] = {}
    for name, positions in result["mm_placeholders"].items():
        summary["placeholders"][name] = [_summarize_position(position) for position in positions]
    summary["fields"] = {}
    for name, items in result["mm_kwargs"].items():
        summary["fields"][name] = [_summarize_item(of_item) for of_item in items]
    return summary


def _find_runs(values: Iterable[Any]) -> list[list[Any]]:
    """Return each value with the number of times that it comes in a row."""
    runs: list[list[Any]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
    return runs


def _summarize_position(position: Any) -> list[Any]:
    mask = [True] * position.length
    if position.is_embed is not None:
        mask = position.is_embed.tolist()
    return [position.offset, _find_runs(mask)]


def _summarize_item(item: Any) -> dict[str, Any]:
    summary = {}
    for name, element in item.items():
        kind = type(element.field).__name__.removeprefix("MultiModal").removesuffix("Field")
        summary[name] = {"field": kind.lower(), **_summarize_value(element.data)}
    return summary


MAX_LISTED_INTEGERS = 32


def _summarize_value(value: Any) -> dict[str, Any]:
    """Return all values of a few integers, and of other tensors their form, their ends and their statistics.

    Image backends differ slightly, so that floating-point values cannot be compared one by one.
    """
    if isinstance(value, (list, tuple)):
        return {"list": [_summarize_value(part) for part in value]}
    if not isinstance(value, torch.Tensor):
        return {"py": value}
    summary: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if not value.is_floating_point():
        if value.numel() <= MAX_LISTED_INTEGERS:
            summary["values"] = value.tolist()
            return summary
        flat = value.flatten()
        summary["ends"] = flat[:8].tolist() + flat[-4:].tolist()
        summary["nonneg"] = int((flat >= 0).sum())
    if value.numel():
        wide = value.double()
        summary["mean"] = Rough(wide.mean())
        summary["std"] = Rough(wide.std(correction=0))
    return summary

"""The stored outputs of vLLM's hand-written processors, and how a spec's processor is compared with them.

``tests/data/oracles/<system>/`` holds, per system, a checkpoint folder without weights, `cases.jsonl` and
`origin.json`, which tells the vLLM and the class that produced them and the quirks seen. MMKIT_ORACLES names another
folder of the same form.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmkit import ModelSpec
from mmkit.testing import ImageSample
from mmkit.vllm_api import kit
from mmkit.vllm_api.harness import StandIn, model_config

FOLDER = Path(os.environ.get("MMKIT_ORACLES", Path(__file__).parent / "data" / "oracles"))
ROUGH = ("mean", "std")
TOLERANCE = 2e-2
"""Of these two: image backends differ slightly."""

Encode = Callable[[Any, str, Mapping[str, Any]], list[int]]


def encoded(tokenizer: Any, prompt: str, options: Mapping[str, Any]) -> list[int]:
    """A text prompt as vLLM's renderer tokenizes it."""
    return list(tokenizer.encode(prompt, **options))


def always_special(tokenizer: Any, prompt: str, options: Mapping[str, Any]) -> list[int]:
    """As vLLM 0.28 tokenized text with items: its processors passed the text on without the options."""
    return list(tokenizer.encode(prompt))


def never_special(tokenizer: Any, prompt: str, options: Mapping[str, Any]) -> list[int]:
    """As the spec of Ultravox states; its processor always tokenized so."""
    return list(tokenizer.encode(prompt, add_special_tokens=False))


def in_a_role(tokenizer: Any, prompt: str, options: Mapping[str, Any]) -> list[int]:
    """As Molmo's processor tokenized text; since vLLM 0.29 its chat template writes the roles."""
    return list(tokenizer.encode(f"User: {prompt} Assistant:"))


@dataclass(frozen=True)
class System:
    """One system: its folder, its spec, the architecture that its config names, how text was tokenized, and the texts
    that stand for an item, where the hand-written class takes more of them than there are items; its model normalises
    pixels on the device; the fields of which the hand-written class pads an item to the largest of its batch; what
    makes the checkpoint where nothing is stored.
    """

    name: str
    spec: str
    architecture: str
    encode: Encode = encoded
    markers: tuple[str, ...] = ()
    normalises: bool = False
    padded: tuple[str, ...] = ()
    prepared: Callable[[], tempfile.TemporaryDirectory[str]] | None = None

    def load_spec(self) -> ModelSpec:
        module, variable = self.spec.split(":")
        spec: ModelSpec = getattr(importlib.import_module(f"examples.{module}"), variable)
        return spec

    @property
    def checkpoint(self) -> str:
        if self.prepared is not None:
            return self.prepared().name
        return str(FOLDER / self.name / "checkpoint")

    def cases(self) -> list[dict[str, Any]]:
        if self.prepared is not None:
            return []
        return [json.loads(line) for line in (FOLDER / self.name / "cases.jsonl").read_text().splitlines()]


@functools.cache
def qwen3_vl() -> tempfile.TemporaryDirectory[str]:
    """A small Qwen3-VL of the stored Qwen2-VL: of videos it has no stored outputs with metadata."""
    folder = tempfile.TemporaryDirectory(prefix="mmkit-test-")  # removed when the interpreter exits
    shutil.copytree(FOLDER / "qwen2_vl" / "checkpoint", folder.name, dirs_exist_ok=True)
    changes: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "text_config": {
                "model_type": "qwen3_vl_text",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "vocab_size": 640,
                "max_position_embeddings": 8192,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            },
            "vision_config": {
                "model_type": "qwen3_vl_vision",
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
        },
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
    }
    for name, changed in changes.items():
        path = Path(folder.name) / name
        stored = {**json.loads(path.read_text()), **changed}
        for part in ("image_processor", "video_processor"):
            stored.get(part, {})["patch_size"] = 16
        stored.get("video_processor", {})["video_processor_type"] = "Qwen3VLVideoProcessor"
        path.write_text(json.dumps(stored))
    return folder


@functools.cache
def whisper() -> tempfile.TemporaryDirectory[str]:
    """A small Whisper, of which there are no stored outputs."""
    from tools.survey import zoo

    folder = tempfile.TemporaryDirectory(prefix="mmkit-test-")  # removed when the interpreter exits
    config, processor = zoo.whisper()
    config.architectures = ["WhisperForConditionalGeneration"]
    for part in (config, processor):
        part.save_pretrained(folder.name)
    return folder


SYSTEMS = {
    system.name: system
    for system in (
        System("llava", "llava_like.spec:LLAVA_LIKE", "LlavaForConditionalGeneration"),
        System("fuyu", "gallery.fuyu:FUYU", "FuyuForCausalLM"),
        System("blip2", "gallery.blip2:BLIP2", "Blip2ForConditionalGeneration"),
        System("florence2", "gallery.florence2:FLORENCE2", "Florence2ForConditionalGeneration", always_special),
        System("molmo", "gallery.molmo:MOLMO", "MolmoForCausalLM", in_a_role),
        System("chameleon", "gallery.chameleon:CHAMELEON", "ChameleonForConditionalGeneration"),
        System("deepseek_vl2", "gallery.deepseek_vl2:DEEPSEEK_VL2", "DeepseekVLV2ForCausalLM", always_special),
        System("gemma3", "gallery.gemma3:GEMMA3", "Gemma3ForConditionalGeneration", markers=("<start_of_image>",)),
        System("idefics3", "gallery.idefics3:IDEFICS3", "Idefics3ForConditionalGeneration", markers=("<image>",)),
        System("internvl2", "gallery.internvl:INTERNVL", "InternVLChatModel", always_special),
        System("qwen_vl", "gallery.qwen_vl:QWEN_VL", "QwenVLForConditionalGeneration"),
        System(
            "qwen2_audio",
            "gallery.qwen2_audio:QWEN2_AUDIO",
            "Qwen2AudioForConditionalGeneration",
            markers=("<|AUDIO|>",),
        ),
        System(
            "minicpmv",
            "gallery.minicpmv:MINICPMV",
            "MiniCPMV",
            markers=("(<image>./</image>)", "(<video>./</video>)"),
        ),
        System(
            "qwen3_vl",
            "gallery.qwen3_vl:QWEN3_VL",
            "Qwen3VLForConditionalGeneration",
            normalises=True,
            prepared=qwen3_vl,
        ),
        System("pixtral_hf", "gallery.pixtral:PIXTRAL_HF", "LlavaForConditionalGeneration", markers=("[IMG]",)),
        System(
            "qwen2_vl",
            "gallery.qwen2_vl:QWEN2_VL",
            "Qwen2VLForConditionalGeneration",
            markers=("<|image_pad|>", "<|video_pad|>"),
            normalises=True,
        ),
        System(
            "llava_next",
            "gallery.llava_next:LLAVA_NEXT",
            "LlavaNextForConditionalGeneration",
            markers=("<image>",),
            padded=("pixel_values",),
        ),
        System("ultravox", "gallery.ultravox:ULTRAVOX", "UltravoxModel", never_special, markers=("<|audio|>",)),
        System("whisper", "gallery.whisper:WHISPER", "WhisperForConditionalGeneration", prepared=whisper),
        System("phi3v", "gallery.phi3v:PHI3V", "Phi3VForCausalLM", markers=("<|image_",)),
        System("paligemma", "gallery.paligemma:PALIGEMMA", "PaliGemmaForConditionalGeneration"),
        System(
            "llava_onevision",
            "gallery.llava_onevision:LLAVA_ONEVISION",
            "LlavaOnevisionForConditionalGeneration",
            markers=("<image>", "<video>"),
            padded=("pixel_values",),
        ),
    )
}


class MadeUpForCausalLM(StandIn):
    """What vLLM's registry asks of a multimodal model, and nothing else: it stands in for the model class."""


@functools.cache
def processor(name: str, checkpoint: str | None = None, **options: Any) -> Any:
    """The generated processor of a system, in vLLM, on its stored checkpoint or another."""
    system = SYSTEMS[name]
    # a name of its own: vLLM keeps the class that it found for a checkpoint and an architecture, and the live class is
    # the second oracle
    architecture = f"Generated{system.architecture}"
    flags = {"__module__": __name__, "supports_mm_device_do_normalize": system.normalises}
    model = type(architecture, (MadeUpForCausalLM,), flags)
    globals()[architecture] = model
    ModelRegistry.register_model(architecture, model)
    spec = system.load_spec()
    MULTIMODAL_REGISTRY.register_processor(
        spec.classes.processor, info=spec.classes.info, dummy_inputs=spec.classes.dummy_inputs
    )(model)
    folder, overrides = checkpoint or system.checkpoint, {"architectures": [architecture]}
    config = model_config(folder, hf_overrides=overrides, trust_remote_code=True, **options)
    instance = MULTIMODAL_REGISTRY.create_processor(config)
    assert type(instance) is spec.classes.processor
    return instance


@functools.cache
def hand_written(name: str, checkpoint: str | None = None, **options: Any) -> Any:
    """vLLM's own processor of a system's architecture, on its stored checkpoint or another."""
    folder = checkpoint or SYSTEMS[name].checkpoint
    instance = MULTIMODAL_REGISTRY.create_processor(model_config(folder, trust_remote_code=True, **options))
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
    instance, system = processor(name), SYSTEMS[name]
    prompt = (
        ids(case)
        if "prompt" not in case
        else system.encode(instance.info.ctx.tokenizer, case["prompt"], case["tokenize"])
    )
    return kit.render(instance, prompt, items_of(case), case.get("mm_processor_kwargs", {}), None)


@functools.cache
def _spawned() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


@contextmanager
def one_spawned_process() -> Iterator[None]:
    """The law L12 asks the same other process about every subject: each would import vLLM first, for 10 s."""
    with mock.patch("mmkit.testing.laws.system.ProcessPoolExecutor", return_value=nullcontext(_spawned())):
        yield


# -- comparison --------------------------------------------------------------------------------------------------------

PROMPTS = ("prompt_token_ids", "encoder_prompt_token_ids")


def ids(stored: Mapping[str, Any], key: str = "prompt_token_ids") -> list[int]:
    if f"{key}_rle" in stored:
        return [token for token, count in stored[f"{key}_rle"] for _ in range(count)]
    return list(stored[key])


def differences(stored: Mapping[str, Any], got: Mapping[str, Any], padded: Sequence[str] = ()) -> list[str]:
    """How a result differs from what is stored of one: ids, ranges, masks, and every field.

    Of `padded` fields the stored one may have zeros after what the result has. Results of this process are compared by
    `mmkit.testing.laws.differences`.
    """
    expected, parts = _parts_stored(stored), _parts(got)
    if alone := sorted(expected.keys() ^ parts.keys()):
        return [f"{', '.join(alone)}: of one of the two alone"]
    return [
        f"{place}: {text}"
        for place, value in expected.items()
        for text in _unlike(value, parts[place], place.rpartition(".")[2] in padded)
    ]


def _parts_stored(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored of a result, by place: ids, ranges and facts of fields."""
    parts: dict[str, Any] = {key: ids(stored, key) for key in PROMPTS if key in stored or f"{key}_rle" in stored}
    for name, places in stored["placeholders"].items():
        for i, place in enumerate(places):
            mask = place["is_embed"] or [(True, place["length"])]
            flags = [bool(flag) for flag, count in mask for _ in range(count)]
            parts[f"{name}[{i}] at"] = place["offset"], place["length"], flags
    return parts | _fields(stored["fields"])


def _parts(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result of vLLM, by place."""
    parts: dict[str, Any] = {key: list(result[key]) for key in PROMPTS if key in result}
    for name, places in result["mm_placeholders"].items():
        for i, place in enumerate(places):
            flags = [True] * place.length if place.is_embed is None else place.is_embed.tolist()
            parts[f"{name}[{i}] at"] = place.offset, place.length, flags
    return parts | _fields(result["mm_kwargs"])


def _fields(of_modalities: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}[{i}].{field}": element
        for name, items in of_modalities.items()
        for i, fields in enumerate(items)
        for field, element in fields.items()
    }


def _unlike(stored: Any, got: Any, is_padded: bool) -> list[str]:
    if not isinstance(stored, Mapping):
        return [] if stored == got else [f"{got}, not {stored}"]
    return _unlike_stored(stored, _facts(_as_large(stored["shape"], got) if is_padded else got))


def _as_large(shape: Sequence[int], element: Any) -> Any:
    """An element with zeros up to a shape."""
    if len(shape) != element.data.ndim or any(w < g for w, g in zip(shape, element.data.shape, strict=True)):
        return element
    large = element.data.new_zeros(tuple(shape))
    large[tuple(slice(size) for size in element.data.shape)] = element.data
    return replace(element, data=large)


def _unlike_stored(stored: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    lists = stored.get("list", []), facts.get("list", [])
    if ("py" in stored) != ("py" in facts) or len(lists[0]) != len(lists[1]):
        return [f"{facts}, not {stored}"]
    inside = [text for pair in zip(*lists, strict=True) for text in _unlike_stored(*pair)]
    return inside + [
        f"{name} {facts[name]}, not {value}"
        for name, value in stored.items()
        if name in facts
        and name != "list"
        and facts[name] != value
        and not (name in ROUGH and _near(facts[name], value))
    ]


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(1, abs(other))


def _facts(element: Any) -> dict[str, Any]:
    """What is stored of an element, but for the values of floating tensors: image backends differ slightly."""
    kind, value = type(element.field).__name__, element.data
    facts: dict[str, Any] = {"field": kind.removeprefix("MultiModal").removesuffix("Field").lower()}
    return facts | _facts_of_value(value)


def _facts_of_value(value: Any) -> dict[str, Any]:
    if isinstance(value, (list, tuple)):
        return {"list": [_facts_of_value(part) for part in value], "len": len(value)}
    if not isinstance(value, torch.Tensor):
        return {"py": value}
    facts: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if value.numel():
        wide = value.double()
        facts |= {"mean": float(wide.mean()), "std": float(wide.std(correction=0))}
    if not value.is_floating_point():
        flat = value.flatten().tolist()
        facts |= {"values": value.tolist(), "first8": flat[:8], "last4": flat[-4:], "nonneg": sum(v >= 0 for v in flat)}
    return facts

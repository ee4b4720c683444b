"""The stored outputs of vLLM's hand-written processors, and how a spec's processor is compared with them.

``tests/data/oracles/<system>/`` holds, per system, a checkpoint folder without weights, `cases.jsonl` and
`origin.json`, which tells the vLLM and the class that produced them and the quirks seen. MMKIT_ORACLES names another
folder of the same form.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm import ModelRegistry
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmkit import ModelSpec
from mmkit.testing.harness import StandIn

FOLDER = Path(os.environ.get("MMKIT_ORACLES", Path(__file__).parent / "data" / "oracles"))
TOLERANCE = 2e-2
"""Of mean and standard deviation, as the oracles' README states it: image backends differ slightly."""

Encode = Callable[[Any, str, Mapping[str, Any]], list[int]]


def encoded(tokenizer: Any, prompt: str, options: Mapping[str, Any]) -> list[int]:
    """A text prompt as vLLM's renderer tokenizes it."""
    return list(tokenizer.encode(prompt, **options))


def always_special(tokenizer: Any, prompt: str, options: Mapping[str, Any]) -> list[int]:
    """As vLLM 0.28 tokenized text with items: its processors passed the text on without the options."""
    return list(tokenizer.encode(prompt))


def in_a_role(tokenizer: Any, prompt: str, options: Mapping[str, Any]) -> list[int]:
    """As Molmo's processor tokenized text; since vLLM 0.29 its chat template writes the roles."""
    return list(tokenizer.encode(f"User: {prompt} Assistant:"))


@dataclass(frozen=True)
class System:
    """One system: its folder, its spec, the architecture that its config names, how text was tokenized."""

    name: str
    spec: str
    architecture: str
    encode: Encode = encoded

    def load_spec(self) -> ModelSpec:
        module, variable = self.spec.split(":")
        spec: ModelSpec = getattr(importlib.import_module(f"examples.{module}"), variable)
        return spec

    @property
    def checkpoint(self) -> str:
        return str(FOLDER / self.name / "checkpoint")

    def cases(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (FOLDER / self.name / "cases.jsonl").read_text().splitlines()]


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
        System("internvl2", "gallery.internvl:INTERNVL", "InternVLChatModel", always_special),
        System("qwen_vl", "gallery.qwen_vl:QWEN_VL", "QwenVLForConditionalGeneration"),
    )
}


class MadeUpForCausalLM(StandIn):
    """What vLLM's registry asks of a multimodal model, and nothing else: it stands in for the model class."""


def model_config(checkpoint: str, **options: Any) -> ModelConfig:
    return ModelConfig(
        model=checkpoint,
        tokenizer=checkpoint,
        dtype="float32",
        seed=0,
        mm_processor_cache_gb=0.1,
        trust_remote_code=True,
        **options,
    )


@functools.cache
def processor(name: str, checkpoint: str | None = None, **options: Any) -> Any:
    """The generated processor of a system, in vLLM, on its stored checkpoint or another."""
    system = SYSTEMS[name]
    # a name of its own: vLLM keeps the class that it found for a checkpoint and an architecture, and the live class is
    # the second oracle
    architecture = f"Generated{system.architecture}"
    model = type(architecture, (MadeUpForCausalLM,), {"__module__": __name__})
    globals()[architecture] = model
    ModelRegistry.register_model(architecture, model)
    spec = system.load_spec()
    MULTIMODAL_REGISTRY.register_processor(
        spec.classes.processor, info=spec.classes.info, dummy_inputs=spec.classes.dummy_inputs
    )(model)
    config = model_config(checkpoint or system.checkpoint, hf_overrides={"architectures": [architecture]}, **options)
    made = MULTIMODAL_REGISTRY.create_processor(config)
    assert type(made) is spec.classes.processor
    return made


@functools.cache
def hand_written(name: str, checkpoint: str | None = None, **options: Any) -> Any:
    """vLLM's own processor of a system's architecture, on its stored checkpoint or another."""
    made = MULTIMODAL_REGISTRY.create_processor(model_config(checkpoint or SYSTEMS[name].checkpoint, **options))
    assert type(made).__module__.startswith("vllm.")
    return made


def items_of(case: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The items of a case: deterministic noise."""
    return {name: [_noise(name, item) for item in items] for name, items in case["items"].items()}


def _noise(kind: str, item: Mapping[str, Any]) -> Any:
    random = np.random.RandomState(item["seed"])
    if kind == "audio":
        return random.randn(item["samples"]).astype(np.float32), item["rate"]
    shape = (item["height"], item["width"], 3)
    if kind == "image":
        return Image.fromarray(random.randint(0, 256, shape, dtype=np.uint8), "RGB")
    frames = random.randint(0, 256, (item["frames"], *shape), dtype=np.uint8)
    return (frames, dict(item["metadata"])) if item.get("metadata") else frames


def apply(made: Any, prompt: Any, data: Mapping[str, Any], kwargs: Mapping[str, Any], cache: Any = None) -> Any:
    """What a processor makes of a request, as vLLM's renderer calls it."""
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    inputs = ProcessorInputs(prompt, made.info.parse_mm_data(data), hf_processor_mm_kwargs=kwargs, cache=cache)
    return made.apply(inputs, TimingContext(enabled=False))


def replay(name: str, case: Mapping[str, Any]) -> Any:
    """What the generated processor makes of a case."""
    made, system = processor(name), SYSTEMS[name]
    prompt = (
        ids(case) if "prompt" not in case else system.encode(made.info.ctx.tokenizer, case["prompt"], case["tokenize"])
    )
    return apply(made, prompt, items_of(case), case.get("mm_processor_kwargs", {}))


def ids(stored: Mapping[str, Any], key: str = "prompt_token_ids") -> list[int]:
    if f"{key}_rle" in stored:
        return [token for token, count in stored[f"{key}_rle"] for _ in range(count)]
    return list(stored[key])


def differences(expected: Mapping[str, Any], got: Any) -> list[str]:
    """How a result differs from a stored one: ids, placeholders and masks, and every recorded fact of the fields."""
    found = []
    for key in ("prompt_token_ids", "encoder_prompt_token_ids"):
        if (key in expected or f"{key}_rle" in expected) and ids(expected, key) != list(got[key]):
            found.append(f"{key}: {list(got[key])}, not {ids(expected, key)}")
    ranges = {name: [_range(r) for r in stored] for name, stored in expected["placeholders"].items()}
    made = {
        name: [(r.offset, r.length, r.is_embed.tolist() if r.is_embed is not None else [True] * r.length) for r in rs]
        for name, rs in got["mm_placeholders"].items()
    }
    if ranges != made:
        found.append(f"placeholders: {made}, not {ranges}")
    for name in sorted({*expected["fields"], *got["mm_kwargs"]}):
        stored, items = expected["fields"].get(name, []), got["mm_kwargs"].get(name, [])
        if len(stored) != len(items):
            found.append(f"{name}: {len(items)} items, not {len(stored)}")
            continue
        for i, (wanted, item) in enumerate(zip(stored, items, strict=True)):
            if sorted(wanted) != sorted(item):
                found.append(f"{name}[{i}]: fields {sorted(item)}, not {sorted(wanted)}")
                continue
            for field, facts in wanted.items():
                found += [f"{name}[{i}].{field}: {text}" for text in _field(facts, item[field])]
    return found


def _range(stored: Mapping[str, Any]) -> tuple[int, int, list[bool]]:
    mask = stored["is_embed"]
    whole = [True] * stored["length"] if mask is None else [bool(flag) for flag, count in mask for _ in range(count)]
    return stored["offset"], stored["length"], whole


def _field(facts: Mapping[str, Any], element: Any) -> list[str]:
    found = []
    kind = type(element.field).__name__.removeprefix("MultiModal").removesuffix("Field").lower()
    if kind != facts["field"]:
        found.append(f"{kind}, not {facts['field']}")
    value = element.data
    if "py" in facts:
        return found if value == facts["py"] and not isinstance(value, torch.Tensor) else [*found, f"{value!r}"]
    if list(value.shape) != facts["shape"] or str(value.dtype).removeprefix("torch.") != facts["dtype"]:
        return [*found, f"{value.dtype} {list(value.shape)}, not {facts['dtype']} {facts['shape']}"]
    if "values" in facts and not facts["dtype"].startswith("float") and value.tolist() != facts["values"]:
        found.append(f"{value.tolist()}, not {facts['values']}")
    if "mean" in facts and value.numel():
        wide = value.double()
        for name, made in (("mean", wide.mean()), ("std", wide.std(correction=0))):
            if abs(float(made) - facts[name]) > TOLERANCE * max(1, abs(facts[name])):
                found.append(f"{name} {float(made)}, not {facts[name]}")
    return found

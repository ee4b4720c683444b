"""A spec of one plain modality, and the processor of a spec, for tests that change one thing."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mmkit import Modality, ModelSpec
from mmkit.testing import processors, vllm_path
from tests.path.planted.base import ID, checkpoint, frames

ONES = torch.ones(2, 3)


def plain(*others: Modality, prompt: Any = None, **changes: Any) -> ModelSpec:
    """(2, 3) tensors, two `<pad>` each, in place of `<frame>`; with changes, and beside other modalities."""
    return ModelSpec("plain", frames(**{"embeds": False, **changes}), *others, prompt=prompt)


def processor(spec: ModelSpec, **options: Any) -> Any:
    """The processor that vLLM makes of a spec's classes, in a server with these options."""
    return processors.make_processor(
        spec.classes, processors.load_config_for_spec(checkpoint(), **options) if options else _config()
    )


@functools.cache
def _config() -> Any:
    return processors.load_config_for_spec(checkpoint())


def ids(words: str) -> list[int]:
    return [ID[word] for word in words.split()]


def run(instance: Any, words: str, data: Any, **options: Any) -> vllm_path.Outcome:
    """One request, as vLLM's renderer hands it to a processor."""
    return vllm_path.run(instance, ids(words), data, **options)

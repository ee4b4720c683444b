"""A spec of one plain modality, and the processor of a spec, for tests that change one thing."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mmkit import Modality, ModelSpec
from mmkit.testing import vllm_path
from mmkit.vllm_api import checkpoint_processors
from tests.path.planted.base import ID, checkpoint, frames

ONES = torch.ones(2, 3)


def plain(*others: Modality, prompt: Any = None, **changes: Any) -> ModelSpec:
    """Return a spec of (2, 3) tensors, two `<pad>` each, in place of `<frame>`.

    Args:
        others: further modalities.
        prompt: the spec's `prompt`.
        changes: of the declaration of the tensors.
    """
    changes.setdefault("embeds", False)
    return ModelSpec("plain", frames(**changes), *others, prompt=prompt)


def processor(spec: ModelSpec, **options: Any) -> Any:
    """Return the processor that vLLM makes of a spec's classes, in a server with these options."""
    if options:
        config = checkpoint_processors.load_config_for_spec(checkpoint(), **options)
    else:
        config = _load_config()
    return checkpoint_processors.make_processor(spec.classes, config)


@functools.cache
def _load_config() -> Any:
    return checkpoint_processors.load_config_for_spec(checkpoint())


def ids(words: str) -> list[int]:
    """Return the ids of words."""
    return [ID[word] for word in words.split()]


def run(instance: Any, words: str, data: Any, **options: Any) -> vllm_path.Outcome:
    """Run a request through a processor, as vLLM's renderer does."""
    return vllm_path.run(instance, ids(words), data, **options)

"""Strategies for the options of requests (`mm_processor_kwargs`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ..language.items import SCOPES
from .vllm_path import Data

NO_OPTIONS: Data = {}

BYTES_OPTIONS: Data = {"do_rescale": False, "do_normalize": False}
"""Options that together make bytes in place of floats."""

SCOPES_OF_VLLM = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
"""The key of `mm_processor_kwargs` that holds the options of one modality, by modality."""


class ScopedOptions(dict[str, Any]):
    """Options for the items of one modality only; those that have a scope already keep it."""

    def __init__(self, options: Data, scope: str) -> None:
        flat = {}
        scoped = {}
        for name, value in options.items():
            if name in SCOPES:
                scoped[name] = value
            else:
                flat[name] = value
        if flat:
            in_scope = scoped.get(scope) or {}
            scoped[scope] = {**in_scope, **flat}
        super().__init__(scoped)


def hf_options(processor: Any) -> SearchStrategy[Data]:
    """Return a strategy for no option, or one of those that the Hugging Face processor names.

    The values are `_UNUSUAL_VALUES`, and halves of the processor's own sizes. Shrinks towards no
    option.

    Args:
        processor: vLLM's processor object.
    """
    options: dict[str, Any] = {}
    names: set[str] = set()
    try:
        for part in _find_parts(processor.info.get_hf_processor()):
            names.update(_find_option_names(part))
            options.update(_choose_options(part))
    except Exception:  # each processing info raises its own error if there is no such processor
        return st.just(NO_OPTIONS)
    choices = [NO_OPTIONS]
    for name in sorted(options):
        choices.append({name: options[name]})
    if names.issuperset(BYTES_OPTIONS):
        choices.append(BYTES_OPTIONS)
    return st.sampled_from(choices)


# Values of options by which callers change what an item becomes. Few processors have them as the
# default. Options with which a processor was trained (its patches, its mean) are not among them.
_UNUSUAL_VALUES: dict[str, Any] = {
    "crop_to_patches": False,
    "do_image_splitting": False,
    "do_normalize": False,
    "dynamic_image_size": False,
    "use_thumbnail": False,
    "max_crops": 2,
    "max_dynamic_patch": 2,
    "max_patches": 2,
    "max_slice_nums": 2,
    "num_crops": 2,
    "do_pan_and_scan": True,
    "max_image_tokens": 8,
}

# Options of which half of the processor's own value is drawn; of a mapping, half of each value.
_HALVED_OPTIONS = ("size", "min_pixels", "max_pixels", "max_image_size")


_PART_NAMES = ("image_processor", "video_processor", "feature_extractor")


def _find_parts(hf_processor: Any) -> list[Any]:
    """Return a Hugging Face processor and its parts that process items."""
    parts = [hf_processor]
    for name in _PART_NAMES:
        part = getattr(hf_processor, name, None)
        if part is not None:
            parts.append(part)
    return parts


def _find_option_names(part: Any) -> set[str]:
    """Return the names of the options of a processor, or of a part of one."""
    method = getattr(part, "preprocess", part.__call__)
    names = set(inspect.signature(method).parameters)
    valid_kwargs = getattr(part, "valid_kwargs", None)
    for base in getattr(valid_kwargs, "__mro__", ()):
        names.update(getattr(base, "__annotations__", {}))
    return names


def _choose_options(part: Any) -> dict[str, Any]:
    """Return the options of a part that change what an item becomes, with values to draw."""
    candidates = dict(_UNUSUAL_VALUES)
    for name in _HALVED_OPTIONS:
        half = _halve(getattr(part, name, None))
        if half:
            candidates[name] = half
    names = _find_option_names(part)
    return {name: value for name, value in candidates.items() if name in names}


def _halve(value: Any) -> Any:
    """Return half of a number, or of each number of sizes by name; None for anything else."""
    if isinstance(value, int):
        return value // 2
    try:
        sizes: Mapping[str, Any] = dict(value)  # transformers has its own class for sizes
    except TypeError:
        return None
    halves = {}
    for key, size in sizes.items():
        if size is not None:
            halves[key] = _halve(size)
    if not all(halves.values()):
        return None
    return halves

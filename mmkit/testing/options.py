"""Options of a request (`mm_processor_kwargs`) that nobody has stated: those that the Hugging Face
processor of a model names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

_PARTS = ("image_processor", "video_processor", "feature_extractor")

_OTHERWISE: dict[str, Any] = {
    "crop_to_patches": False,
    "do_image_splitting": False,
    "do_normalize": False,
    "do_pan_and_scan": True,
    "dynamic_image_size": False,
    "max_crops": 2,
    "max_dynamic_patch": 2,
    "max_image_tokens": 8,
    "max_patches": 2,
    "max_slice_nums": 2,
    "num_crops": 2,
    "use_thumbnail": False,
}
"""Options by which callers change what an item becomes, and a value that few have as the default.
What a processor was trained with (its patches, its mean) is none of them."""

_HALVED = ("size", "min_pixels", "max_pixels", "max_image_size")
"""Options with a half of their own value; of a mapping, a half of each."""


def options_of(hf_processor: Any) -> list[dict[str, Any]]:
    """Options that a Hugging Face processor, or a part of it, names, one at a time."""
    parts = [hf_processor, *(getattr(hf_processor, name, None) for name in _PARTS)]
    options = {name: value for part in parts if part is not None for name, value in _options(part)}
    return [{name: options[name]} for name in sorted(options)]


def _options(part: Any) -> Iterator[tuple[str, Any]]:
    named = {*inspect.signature(getattr(part, "preprocess", part.__call__)).parameters}
    for of_class in getattr(getattr(part, "valid_kwargs", None), "__mro__", ()):
        named |= {*getattr(of_class, "__annotations__", {})}
    for name in named & _OTHERWISE.keys():
        yield name, _OTHERWISE[name]
    for name in named.intersection(_HALVED):
        half = _half(getattr(part, name, None))
        if half:
            yield name, half


def _half(value: Any) -> Any:
    """Half of a number, or of each number of sizes by name; None of anything else."""
    if isinstance(value, int):
        return value // 2
    try:
        sizes = dict(value)  # transformers has a class of its own for these
    except TypeError:
        return None
    halves = {key: _half(size) for key, size in sizes.items() if size is not None}
    return halves if all(halves.values()) else None

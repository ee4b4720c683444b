"""Ids, fields and positions of a request by a model's own Hugging Face classes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from transformers import PretrainedConfig

from ..vllm_api.harness import NotTaken, Outcome

_KEYWORDS = {"image": "images", "video": "videos", "audio": "audio"}
"""The names of items in processors of transformers."""

_FIELDS = {
    "audio_seqlens": ("audio_feature_lengths",),
    "second_per_grids": ("second_per_grid_ts", "video_second_per_grid"),
}
"""The names of fields under which `get_rope_index` takes them, where they differ."""

_TYPES = {"image": 1, "video": 2, "audio": 3}
"""Of tokens, in transformers; those of a text have 0."""


def processed(
    processor: Any, text: str, data: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Ids and fields of a text with items by the model's own Hugging Face processor, with options
    of the request; None where it does not take them.

    Raises:
        Exception: of any kind, where the model has no such processor.
    """
    hf_processor = processor.info.get_hf_processor(**kwargs)
    named: dict[str, Any] = {_KEYWORDS.get(name, name): values for name, values in data.items()}
    if any(isinstance(video, tuple) for video in named.get("videos", ())):
        videos, metadata = zip(*named["videos"], strict=True)
        # what vLLM alone asks its own loaders
        known = [{k: v for k, v in one.items() if k != "do_sample_frames"} for one in metadata]
        sampled = {"video_metadata": known, "do_sample_frames": False}
        named |= {"videos": list(videos), **sampled}
    try:
        result = dict(hf_processor(text=text, **{**kwargs, **named}))
    except Exception:  # each refuses in a way of its own
        return None
    ids = result["input_ids"]
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    is_batch = bool(ids) and isinstance(ids[0], list | tuple)
    return {**result, "input_ids": list(ids[0]) if is_batch else list(ids)}


def other_field(result: Mapping[str, Any], outcome: Outcome) -> str:
    """The first field that reaches the model with other values than the Hugging Face processor
    gives it; empty for none.

    Those of one name and of one modality are compared that have as many values, in rows of one
    length, and are both floating or both not: some are left for vLLM's model to normalise. Floating
    values may differ in rounding, and to the dtype that vLLM brings them to.
    """
    for name in result:
        own = [items for items in outcome.fields.values() if any(name in item for item in items)]
        if len(own) != 1:
            continue
        ours = _tensors([item[name] for item in own[0] if name in item])
        theirs = _tensors(result[name])
        if {part.shape[-1:] for part in ours} != {part.shape[-1:] for part in theirs} or not ours:
            continue
        here, there = (torch.cat([part.flatten() for part in parts]) for parts in (ours, theirs))
        is_same_kind = here.is_floating_point() == there.is_floating_point()
        if is_same_kind and len(here) == len(there) and not _near(here, there.to(here.dtype)):
            return str(name)
    return ""


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, scalars among them; none for what holds no numbers."""
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    try:
        return [torch.as_tensor(value)]
    except (TypeError, ValueError, RuntimeError):
        return []


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.nan_to_num(), other.nan_to_num()
    near = 64 * torch.finfo(one.dtype).eps * float(one.abs().amax()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=near)


def position_model(config: Any) -> Any:
    """The Hugging Face model, without weights, that gives tokens positions of several dimensions;
    None where transformers has none.

    Args:
        config: of the whole model; its parts are looked through, too.

    Raises:
        NotTaken: transformers makes no model of the config.
    """
    package = type(config).__module__
    if not package.startswith("transformers.models."):
        return None
    try:
        classes = vars(import_module(package.replace(".configuration_", ".modeling_")))
    except ImportError:
        return None
    parts = [part for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    for part in (config, *parts):
        for cls in list(classes.values()):
            # not one that the models of several parts inherit it from
            is_model = isinstance(cls, type) and "forward" in vars(cls)
            if is_model and hasattr(cls, "get_rope_index") and cls.config_class is type(part):
                try:
                    with torch.device("meta"):
                        return cls(part)
                except Exception as error:
                    raise NotTaken(f"{cls.__name__}: {error}") from error
    return None


def positions(
    model: Any, processor: Any, outcome: Outcome, kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, int]:
    """The positions of a processed request by a Hugging Face model.

    Args:
        model: of `position_model`.
        processor: vLLM's, whose Hugging Face processor says what kind each token is.
        outcome: ids and fields of the request.
        kwargs: its `mm_processor_kwargs`, of which some models read positions, too.

    Returns:
        Integers (dimensions, tokens), and how far the position after the prompt is from its length.

    Raises:
        Exception: of any kind, where the model does not take them.
    """
    taken = inspect.signature(model.get_rope_index).parameters
    ids = torch.tensor([outcome.ids])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in taken:
        given["mm_token_type_ids"] = torch.tensor(_types(processor, outcome))
    for name in taken:
        for field in (name, *_FIELDS.get(name, ())):
            values = _joined(outcome, field)
            if values is not None:
                given[name] = values
    given |= {name: value for name, value in kwargs.items() if name in taken}
    found, delta = model.get_rope_index(**given)
    return found[:, 0], int(delta)


def _types(processor: Any, outcome: Outcome) -> list[list[int]]:
    """The kind of each token."""
    of_ids = getattr(processor.info.get_hf_processor(), "create_mm_token_type_ids", None)
    if of_ids is not None:
        return list(of_ids([outcome.ids]))
    types = [0] * len(outcome.ids)
    for name, ranges in outcome.ranges.items():
        for start, _, mask in ranges:
            for i, embeds in enumerate(mask, start):
                types[i] = _TYPES.get(name, 0) * embeds
    return [types]


def _joined(outcome: Outcome, field: str) -> torch.Tensor | None:
    """A field of all items, (items, ...); None where none has it."""
    own = [item[field] for items in outcome.fields.values() for item in items if field in item]
    if not own:
        return None
    rows = torch.stack([torch.as_tensor(value) for value in own]).flatten(1)
    return rows[:, 0] if rows.shape[1:] == (1,) else rows

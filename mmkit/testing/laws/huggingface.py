"""Laws about the model's own Hugging Face classes: ids, fields and positions are theirs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from hypothesis import reject
from hypothesis import strategies as st
from transformers import PretrainedConfig

from ...language.items import SCOPES
from ...training.batch import MEDIA
from ...vllm_api.normalization import BytesNorm, normalize_bytes, read_normalization
from ..differences import near
from ..law import Case, NotApplicable, law
from ..options import BYTES_OPTIONS
from ..strategies import Request
from ..subject import Subject
from ..vllm_model import Rope, find_rope
from ..vllm_path import Data, Outcome, run, sort_by_position

# -- ids and fields --------------------------------------------------------------------------------


@law(cost=2)
def reference(case: Case) -> None:
    """A text with items has the ids and the fields of the model's own Hugging Face processor.

    The ids are compared where that processor writes placeholders, and fields of one name and size.
    Pixels that come as bytes are compared after the model has normalised them.
    """
    processor = case.subject.processor
    tokenizer = processor.info.ctx.tokenizer
    if tokenizer is None:
        raise NotApplicable("the model has no tokenizer")
    request = case.draw_request(least=1)
    text = tokenizer.decode(request.prompt)
    outcome = case.attempt(run, processor, text, request.data(), request.kwargs)
    if not outcome:  # decoding may change what the ids mean
        reject()
    options = request.kwargs
    if _has_bytes(outcome):
        options = _drop_bytes_options(options)
    result = _run_hf_processor(processor, text, _list_plain_items(request), options)
    if _find_placeholders(outcome).isdisjoint(result["input_ids"]):
        raise NotApplicable("the Hugging Face processor writes no placeholders")
    where = f"the Hugging Face processor and vLLM, of {text!r}"
    case.check_equal(result["input_ids"], outcome.ids, where, "ids")
    field = _find_different_field(processor.info, result, outcome)
    if field:
        case.fail(f"{where}: the field {field!r} has other values")


def _list_plain_items(request: Request) -> dict[str, list[Any]]:
    """Return the items of a request in their first container.

    The drawn container may be an array of three rows, which transformers takes for one of three
    channels.
    """
    items = {}
    for name, samples in request.items.items():
        if samples:
            items[name] = [sample.list_forms()[0] for sample in samples]
    return items


def _find_placeholders(outcome: Outcome) -> set[int]:
    """Return the ids at the positions that receive encoder rows."""
    placeholders = set()
    for of_modality in outcome.ranges.values():
        for offset, _, mask in of_modality:
            for index, receives_row in enumerate(mask):
                if receives_row:
                    placeholders.add(outcome.ids[offset + index])
    return placeholders


# the names of items in processors of transformers
_KEYWORDS = {"image": "images", "video": "videos", "audio": "audio"}


def _run_hf_processor(processor: Any, text: str, data: Data, kwargs: Data) -> dict[str, Any]:
    """Process a text with items by the model's own Hugging Face processor.

    Where the processor does not take them, the request is rejected, and another one is drawn.

    Args:
        processor: vLLM's processor object.
        text: the prompt.
        data: the items.
        kwargs: options of the request.

    Returns:
        The fields, and the ids as a list under ``input_ids``.

    Raises:
        NotApplicable: the model has no such processor.
    """
    try:
        hf_processor = processor.info.get_hf_processor(**kwargs)
    except Exception as error:  # each processing info raises its own error
        raise NotApplicable("the model has no Hugging Face processor") from error
    if hf_processor is None:  # the saved processor of `mmkit.training` holds none
        raise NotApplicable("the model has no Hugging Face processor")
    arguments: dict[str, Any] = dict(kwargs)
    for name, values in data.items():
        arguments[_KEYWORDS.get(name, name)] = values
    if any(isinstance(video, tuple) for video in arguments.get("videos", ())):
        arguments.update(_split_metadata(arguments["videos"]))
    try:
        result = dict(hf_processor(text=text, **arguments))
    except Exception:
        reject()
    if "input_ids" not in result:
        raise NotApplicable("the Hugging Face processor gives no ids beside items")
    result["input_ids"] = torch.as_tensor(result["input_ids"]).flatten().tolist()
    return result


def _split_metadata(videos: Sequence[tuple[Any, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return videos with metadata as the arguments of a processor of transformers."""
    frames = []
    metadata = []
    for video_frames, video_metadata in videos:
        facts = dict(video_metadata)
        facts.pop("do_sample_frames", None)  # only vLLM's loaders read it
        frames.append(video_frames)
        metadata.append(facts)
    return {"videos": frames, "video_metadata": metadata, "do_sample_frames": False}


def _has_bytes(outcome: Outcome) -> bool:
    """Return whether a field holds bytes, which the model rescales and normalises."""
    for items in outcome.fields.values():
        for item in items:
            for value in item.values():
                if any(tensor.dtype == torch.uint8 for tensor in _find_tensors(value)):
                    return True
    return False


def _drop_bytes_options(options: Data) -> dict[str, Any]:
    """Return options of a request, or of a scope, without those that make bytes.

    The Hugging Face processor then makes what the model makes of the bytes.
    """
    others: dict[str, Any] = {}
    for name, value in options.items():
        if name in BYTES_OPTIONS:
            continue
        if name in SCOPES:
            value = _drop_bytes_options(value or {})
        others[name] = value
    return others


def _find_different_field(info: Any, result: Mapping[str, Any], outcome: Outcome) -> str:
    """Return the first field that has other values than the Hugging Face processor gives it.

    Fields of one name and of one modality are compared that have as many values, in rows of one
    length, and are both floating-point or both not. Bytes in place of floats are normalised before.
    Floating-point values may differ in rounding, and are compared in the dtype that vLLM brings
    them to.

    Args:
        info: vLLM's processing info.
        result: of the Hugging Face processor.
        outcome: of vLLM.

    Returns:
        The name of the field; empty for none.
    """
    norm: BytesNorm | None = None
    for name in result:
        with_field = _find_modalities_with_field(outcome, name)
        if len(with_field) != 1:
            continue
        ours = []
        for item in with_field[0]:
            if name in item:
                ours += _find_tensors(item[name])
        theirs = _find_tensors(result[name])
        if not ours or _list_row_shapes(ours) != _list_row_shapes(theirs):
            continue
        there = _flatten(theirs)
        if there.is_floating_point() and all(tensor.dtype == torch.uint8 for tensor in ours):
            if norm is None:  # few models have bytes, and making it loads their processor
                norm = read_normalization(info).make_torch_module()
            ours = _normalize_all(norm, ours)
        here = _flatten(ours)
        is_same_kind = here.is_floating_point() == there.is_floating_point()
        if is_same_kind and len(here) == len(there) and not near(here, there.to(here.dtype)):
            return str(name)
    return ""


def _normalize_all(norm: BytesNorm, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the pixels that a model makes of bytes, in float32."""
    normalized = []
    for tensor in tensors:
        normalized.append(normalize_bytes(norm, tensor, torch.float32, "the model"))
    return normalized


def _find_modalities_with_field(outcome: Outcome, name: str) -> list[list[dict[str, Any]]]:
    """Return the fields of the items of those modalities that have a field of a name."""
    with_field = []
    for items in outcome.fields.values():
        if any(name in item for item in items):
            with_field.append(items)
    return with_field


def _find_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, scalars among them; none for what holds no numbers."""
    if isinstance(value, list | tuple):
        tensors = []
        for part in value:
            tensors += _find_tensors(part)
        return tensors
    try:
        return [torch.as_tensor(value)]
    except (TypeError, ValueError, RuntimeError):
        return []


def _list_row_shapes(tensors: Sequence[torch.Tensor]) -> set[torch.Size]:
    return {tensor.shape[-1:] for tensor in tensors}


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


# -- positions -------------------------------------------------------------------------------------


@law()
def positions(case: Case) -> None:
    """Positions of several dimensions are those of the model's own Hugging Face class.

    Generated tokens go on from them as there. What follows a prefix changes none of its positions.
    """
    ropes = find_ropes(case.subject)
    request = _draw_chat_prompt(case, ropes.config, case.draw_request(least=1))
    case.request = request
    outcome = case.attempt(case.subject.run, request)
    if not outcome:  # what other laws are about
        reject()
    ids = outcome.ids
    ours, delta = ropes.rope(ids, sort_by_position(outcome.features))
    if ours.ndim != 2 or ours.shape[1] != len(ids):
        case.fail(f"{len(ids)} tokens have positions of shape {tuple(ours.shape)}")
    _check_prefixes(case, ropes.rope, outcome, ours)
    if ropes.hf_model is None:
        return
    try:
        theirs, their_delta = _compute_hf_positions(ropes.hf_model, outcome, request.kwargs)
    except Exception:  # each class refuses with its own errors
        reject()
    name = type(ropes.hf_model).__name__
    _check_positions(case, ours, theirs, f"in {name}")
    if delta != their_delta:
        here = len(ids) + delta
        there = len(ids) + their_delta
        case.fail(f"the token after the prompt is at {here}, and in {name} at {there}")


def _check_prefixes(case: Case, rope: Rope, outcome: Outcome, positions: torch.Tensor) -> None:
    """Check that each prefix that ends at an edge of an item has the same positions alone."""
    items = sort_by_position(outcome.features)
    edges = set()
    for item in items:
        edges.add(_get_start(item))
        edges.add(_get_end(item))
    for length in sorted(edges - {0}):
        if any(_get_start(item) < length < _get_end(item) for item in items):
            continue
        before = [item for item in items if _get_end(item) <= length]
        alone, _ = rope(outcome.ids[:length], before)
        _check_positions(case, positions[:, :length], alone, f"of the first {length} alone")


def _get_start(item: Any) -> int:
    return int(item.mm_position.offset)


def _get_end(item: Any) -> int:
    return int(item.mm_position.offset + item.mm_position.length)


def _check_positions(case: Case, ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    """Check that two computations give the same positions (dimensions, tokens)."""
    if ours.shape != theirs.shape:
        case.fail(f"positions are {tuple(ours.shape)} and {where} {tuple(theirs.shape)}")
    different = (ours != theirs).any(dim=0).nonzero().flatten().tolist()
    if different:
        token = different[0]
        here = ours[:, token].tolist()
        there = theirs[:, token].tolist()
        case.fail(f"token {token} is at {here}, and {where} at {there}")


_MAX_WORDS = 2  # before each item and at the end of a prompt as in a chat


def _draw_chat_prompt(case: Case, config: Any, request: Request) -> Request:
    """Draw another prompt for the items of a request, as in a chat.

    Each item stands between the tokens that stand around it in a chat, by which transformers finds
    it, and a few words stand between the items.
    """
    updates = case.subject.find_request_updates(request)
    first = next(iter(updates.values()))[0]
    words = case.subject.ordinary_ids[1 : 1 + _MAX_WORDS]
    prompt = list(first.prefix)
    for name, index in request.order:
        target = updates[name][index].target
        tokens = _find_tokens_around(config, name)
        # without tokens around them, items need a word between them
        least = 1 if tokens is None else 0
        prompt += words[: case.draw(st.integers(least, _MAX_WORDS))]
        if tokens is None or tokens.start in target:
            prompt += target
        else:
            prompt += [tokens.start] + target + [tokens.end]
    prompt += words[: case.draw(st.integers(0, _MAX_WORDS))]
    return replace(request, prompt=prompt)


class _TokensAround(NamedTuple):
    """The ids before and after an item in a chat."""

    start: int
    end: int


def _find_tokens_around(config: Any, name: str) -> _TokensAround | None:
    """Return the ids around an item of a modality by a config of transformers; None for none."""
    for kind in (name, "vision"):
        start = getattr(config, f"{kind}_start_token_id", None)
        end = getattr(config, f"{kind}_end_token_id", None)
        if start is not None and end is not None:
            return _TokensAround(start, end)
    return None


# -- the position functions of both sides ----------------------------------------------------------


class Ropes(NamedTuple):
    """What computes positions of several dimensions.

    Attributes:
        hf_model: the Hugging Face model; None where transformers has none.
        config: what the model class takes for its config.
        rope: vLLM's function.
    """

    hf_model: Any
    config: Any
    rope: Rope


@lru_cache(maxsize=1)
def find_ropes(subject: Subject) -> Ropes:
    """Return what computes positions for a subject.

    Raises:
        NotApplicable: tokens have positions of one dimension, or one of the two cannot be made.
    """
    config = subject.processor.info.ctx.model_config.hf_config
    hf_model = _make_position_model(config)
    if hf_model is not None:
        config = hf_model.config
    return Ropes(hf_model, config, find_rope(subject, config))


def _make_position_model(config: Any) -> Any:
    """Return the Hugging Face model, without weights, that gives positions of several dimensions.

    Args:
        config: of the whole model. The configs of its parts are looked through, too.

    Returns:
        None where transformers has no such model.

    Raises:
        NotApplicable: transformers makes no model of the config.
    """
    package = type(config).__module__
    if not package.startswith("transformers.models."):
        return None
    try:
        module = import_module(package.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
    for part in _list_configs(config):
        for model_class in _find_position_classes(module):
            if model_class.config_class is type(part):
                try:
                    with torch.device("meta"):
                        return model_class(part)
                except Exception as error:
                    raise NotApplicable(f"{model_class.__name__}: {error}") from error
    return None


def _list_configs(config: Any) -> list[Any]:
    """Return a config and the configs of its parts."""
    configs = [config]
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            configs.append(value)
    return configs


def _find_position_classes(module: Any) -> Iterator[Any]:
    """Yield the model classes of a module that give positions."""
    for value in vars(module).values():
        # Only classes with their own `forward`: those of several parts may inherit the positions
        # from a common base, which runs nothing itself.
        is_model = isinstance(value, type) and "forward" in vars(value)
        if is_model and hasattr(value, "get_rope_index"):
            yield value


# the names of fields under which `get_rope_index` takes them, where they differ
_FIELD_NAMES = {
    "audio_seqlens": ("audio_feature_lengths",),
    "second_per_grids": ("second_per_grid_ts", "video_second_per_grid"),
}


def _compute_hf_positions(model: Any, outcome: Outcome, kwargs: Data) -> tuple[torch.Tensor, int]:
    """Return the positions of a processed request by a Hugging Face model.

    Args:
        model: of `_make_position_model`.
        outcome: ids and fields of the request.
        kwargs: its `mm_processor_kwargs`, from which some models take values for positions, too.

    Returns:
        Integers (dimensions, tokens), and how far the position after the prompt is from its length.

    Raises:
        Exception: of any kind, where the model does not take them.
    """
    ids = torch.tensor([outcome.ids])
    types = torch.zeros_like(ids)
    for name, of_modality in outcome.ranges.items():
        for offset, length, mask in of_modality:
            types[0, offset : offset + length] = MEDIA.get(name, 0) * torch.tensor(mask)
    arguments = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types,
    }
    parameters = inspect.signature(model.get_rope_index).parameters
    for name in parameters:
        for field in (name, *_FIELD_NAMES.get(name, ())):
            values = _stack_field(outcome, field)
            if values is not None:
                arguments[name] = values
    arguments.update(kwargs)
    accepted = {name: value for name, value in arguments.items() if name in parameters}
    result, delta = model.get_rope_index(**accepted)
    return result[:, 0], int(delta)


def _stack_field(outcome: Outcome, field: str) -> torch.Tensor | None:
    """Return a field of all items, (items, ...); None where no item has it."""
    values = []
    for items in outcome.fields.values():
        for item in items:
            if field in item:
                values.append(torch.as_tensor(item[field]))
    if not values:
        return None
    rows = torch.stack(values).flatten(1)
    if rows.shape[1:] == (1,):
        return rows[:, 0]
    return rows

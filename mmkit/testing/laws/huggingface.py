"""Laws about the model's own Hugging Face classes: ids, fields and positions are theirs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from itertools import compress, product
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from transformers import PretrainedConfig

from ...training.batch import MEDIA
from ..differences import near
from ..law import Case, NotApplicable, law
from ..strategies import Request
from ..subject import Subject
from ..vllm_model import Rope, rope
from ..vllm_path import Data, Outcome, run, sort_by_position


@law(cost=2)
def reference(case: Case) -> None:
    """A text with items has the ids that the model's own Hugging Face processor gives it, where
    that writes placeholders, and fields of one name and size have the same values."""
    processor = case.subject.processor
    tokenizer = processor.info.ctx.tokenizer
    if tokenizer is None:
        raise NotApplicable("the model has no tokenizer")
    request = case.draw_request(least=1)
    text = tokenizer.decode(request.prompt)
    # transformers takes an array of three rows for one of three channels
    plain = {name: [one.same()[0] for one in some] for name, some in request.items.items() if some}
    result = _processed(processor, text, plain, request.kwargs)
    outcome = case.attempt(run, processor, text, request.data(), request.kwargs)
    if not outcome:  # decoding may change what the ids mean
        reject()
    places = [at for ranges in outcome.ranges.values() for at in ranges]
    rows = {token for start, _, mask in places for token in compress(outcome.ids[start:], mask)}
    if rows.isdisjoint(result["input_ids"]):
        raise NotApplicable("the Hugging Face processor writes no placeholders")
    where = f"the Hugging Face processor and vLLM, of {text!r}"
    case.same(result["input_ids"], outcome.ids, where, "ids")
    if field := _other_field(result, outcome):
        case.fail(f"{where}: the field {field!r} has other values")


@law()
def positions(case: Case) -> None:
    """Where tokens have positions of several dimensions, they are those of the model's own Hugging
    Face class, and generated tokens go on as there; what follows changes none of a prefix."""
    model, config, positions = rope_of(case.subject)
    request = case.request = _as_in_chat(case, config, case.draw_request(least=1))
    outcome = case.attempt(case.subject.run, request)
    if not outcome:  # what other laws are about
        reject()
    ids, items = outcome.ids, sort_by_position(outcome.features)
    ours, delta = positions(ids, items)
    if ours.ndim != 2 or ours.shape[1] != len(ids):
        case.fail(f"{len(ids)} tokens have positions of shape {tuple(ours.shape)}")
    places = [item.mm_position for item in items]
    ends = [(place.offset, place.offset + place.length) for place in places]
    for cut in sorted({cut for own in ends for cut in own if cut}):
        if not any(start < cut < end for start, end in ends):
            before = [item for item, (_, end) in zip(items, ends, strict=True) if end <= cut]
            alone, _ = positions(ids[:cut], before)
            _compare(case, ours[:, :cut], alone, f"of the first {cut} alone")
    if model is None:
        return
    try:
        theirs, their_delta = _positions_of(model, outcome, request.kwargs)
    except Exception:  # each refuses in a way of its own
        reject()
    name = type(model).__name__
    _compare(case, ours, theirs, f"in {name}")
    if delta != their_delta:
        here, there = len(ids) + delta, len(ids) + their_delta
        case.fail(f"the token after the prompt is at {here}, and in {name} at {there}")


def _as_in_chat(case: Case, config: Any, request: Request) -> Request:
    """The items of a request between the tokens that stand around them in a chat, by which
    transformers finds them, and with a little text between."""
    pieces = case.subject.find_request_updates(request)
    prompt = [*next(iter(pieces.values()))[0].prefix]
    text = case.subject.ordinary_ids[1:3]
    for name, i in request.order:
        start, end = _around(config, name)
        written = pieces[name][i].target
        prompt += text[: case.draw(st.integers(0 if start else 1, 2))]
        prompt += written if {*start} & {*written} else [*start, *written, *end]
    prompt += text[: case.draw(st.integers(0, 2))]
    return replace(request, prompt=prompt)


def _around(config: Any, name: str) -> tuple[list[int], list[int]]:
    """The ids before and after an item, by a config of transformers."""
    for kind in (name, "vision"):
        start, end = (getattr(config, f"{kind}_{at}_token_id", None) for at in ("start", "end"))
        if start is not None and end is not None:
            return [start], [end]
    return [], []


def _compare(case: Case, ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
    if ours.shape != theirs.shape:
        case.fail(f"positions are {tuple(ours.shape)} and {where} {tuple(theirs.shape)}")
    for token in (ours != theirs).any(dim=0).nonzero().flatten().tolist()[:1]:
        here, there = ours[:, token].tolist(), theirs[:, token].tolist()
        case.fail(f"token {token} is at {here}, and {where} at {there}")


# -- Hugging Face's classes ------------------------------------------------------------------------

# the names of items in processors of transformers
_KEYWORDS = {"image": "images", "video": "videos", "audio": "audio"}

# the names of fields under which `get_rope_index` takes them, where they differ
_FIELDS = {
    "audio_seqlens": ("audio_feature_lengths",),
    "second_per_grids": ("second_per_grid_ts", "video_second_per_grid"),
}


def _processed(processor: Any, text: str, data: Data, kwargs: Data) -> dict[str, Any]:
    """Ids and fields of a text with items by the model's own Hugging Face processor, with options
    of the request. Where it does not take them, another request is drawn.

    Raises:
        NotApplicable: the model has no such processor.
    """
    try:
        hf_processor = processor.info.get_hf_processor(**kwargs)
    except Exception as error:  # each processing info says it in a way of its own
        raise NotApplicable("the model has no Hugging Face processor") from error
    named: dict[str, Any] = {_KEYWORDS.get(name, name): values for name, values in data.items()}
    if any(isinstance(video, tuple) for video in named.get("videos", ())):
        videos, metadata = zip(*named["videos"], strict=True)
        # what vLLM alone asks its own loaders
        known = [{k: v for k, v in one.items() if k != "do_sample_frames"} for one in metadata]
        named |= {"videos": [*videos], "video_metadata": known, "do_sample_frames": False}
    try:
        result = dict(hf_processor(text=text, **{**kwargs, **named}))
    except Exception:
        reject()
    if "input_ids" not in result:
        raise NotApplicable("the Hugging Face processor gives no ids beside items")
    return {**result, "input_ids": torch.as_tensor(result["input_ids"]).flatten().tolist()}


def _other_field(result: Mapping[str, Any], outcome: Outcome) -> str:
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
        if is_same_kind and len(here) == len(there) and not near(here, there.to(here.dtype)):
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


@lru_cache(maxsize=1)
def rope_of(subject: Subject) -> tuple[Any, Any, Rope]:
    """The Hugging Face model that computes positions of several dimensions, None where transformers
    has none; what the model class takes for its config; and vLLM's function for them.

    Raises:
        NotApplicable: tokens have positions of one dimension, or one of the two cannot be made.
    """
    config = subject.processor.info.ctx.model_config.hf_config
    model = _position_model(config)
    config = config if model is None else model.config
    return model, config, rope(subject, config)


def _position_model(config: Any) -> Any:
    """The Hugging Face model, without weights, that gives tokens positions of several dimensions;
    None where transformers has none.

    Args:
        config: of the whole model; its parts are looked through, too.

    Raises:
        NotApplicable: transformers makes no model of the config.
    """
    package = type(config).__module__
    if not package.startswith("transformers.models."):
        return None
    try:
        classes = vars(import_module(package.replace(".configuration_", ".modeling_")))
    except ImportError:
        return None
    parts = [part for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    for part, cls in product([config, *parts], [*classes.values()]):
        # not one that the models of several parts inherit it from
        is_model = isinstance(cls, type) and "forward" in vars(cls)
        if is_model and hasattr(cls, "get_rope_index") and cls.config_class is type(part):
            try:
                with torch.device("meta"):
                    return cls(part)
            except Exception as error:
                raise NotApplicable(f"{cls.__name__}: {error}") from error
    return None


def _positions_of(model: Any, outcome: Outcome, kwargs: Data) -> tuple[torch.Tensor, int]:
    """The positions of a processed request by a Hugging Face model.

    Args:
        model: of `_position_model`.
        outcome: ids and fields of the request.
        kwargs: its `mm_processor_kwargs`, of which some models read positions, too.

    Returns:
        Integers (dimensions, tokens), and how far the position after the prompt is from its length.

    Raises:
        Exception: of any kind, where the model does not take them.
    """
    taken = inspect.signature(model.get_rope_index).parameters
    ids = torch.tensor([outcome.ids])
    types = torch.zeros_like(ids)
    for name, ranges in outcome.ranges.items():
        for start, length, mask in ranges:
            types[0, start : start + length] = MEDIA.get(name, 0) * torch.tensor(mask)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
    for name in taken:
        for field in (name, *_FIELDS.get(name, ())):
            if (values := _joined(outcome, field)) is not None:
                given[name] = values
    sent = {name: value for name, value in {**given, **kwargs}.items() if name in taken}
    found, delta = model.get_rope_index(**sent)
    return found[:, 0], int(delta)


def _joined(outcome: Outcome, field: str) -> torch.Tensor | None:
    """A field of all items, (items, ...); None where none has it."""
    own = [item[field] for items in outcome.fields.values() for item in items if field in item]
    if not own:
        return None
    rows = torch.stack([torch.as_tensor(value) for value in own]).flatten(1)
    return rows[:, 0] if rows.shape[1:] == (1,) else rows

"""Bugs that the law of mmkit/testing/laws/caching.py catches: a cached item is not what would be processed."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.multimodal.parse import ProcessorBatchItems

from mmkit.plan.item import group_by_modality
from mmkit.plan.placement import ItemLayout
from mmkit.testing import Subject

from .base import BY_NUMBER
from .bug import planted, with_frames, with_parser, with_step
from .requests import are_small

CACHED = "without a cache and with one in (one process|two processes): "


@planted("cache", r"in one process: fields\['(series|frames)'\]|in two processes: MultiModalCacheMissError: ")
def items_swapped_after_a_hit() -> Subject:
    def prepare_exchange(correct, reader, request, *arguments):
        is_hit = any(part.engine_fields is None for part in request.items)
        correct(reader, request, *arguments)
        if not is_hit:
            return
        for group in group_by_modality(request.items).values():
            swapped = [part.engine_fields for part in reversed(group)]
            for part, engine_fields in zip(group, swapped, strict=True):
                part.engine_fields = engine_fields

    return with_step("prepare_exchange", prepare_exchange)


@planted("cache", f"(?s){CACHED}(fields|ids).*kwargs=")
def kwargs_missing_in_the_cache_key() -> Subject:
    def hash_items(correct, plan, hasher, request):
        correct(plan, hasher, replace(request, options={}))

    return with_step("hash_items", hash_items)


@planted(
    "cache",
    r"with a cache in one process: (InputError|NotFound): mixed\.series|with one in one process: (ids|ranges)",
)
def target_of_another_position() -> Subject:
    def place_items(correct, plan, request):
        items = []
        for part in request.items:
            # a layout that gives the same targets at every position
            layout = ItemLayout(part.layout.tokens, part.layout.updates)
            items.append(replace(part, layout=layout))
        return correct(plan, replace(request, items=items))

    return with_step("place_items", place_items, BY_NUMBER)


@planted("cache", CACHED + "(fields|ids)")
def receiver_gets_other_data() -> Subject:
    def fill_in_cached_items(correct, plan, reader, id_layouts, request, engine_items):
        missing = correct(plan, reader, id_layouts, request, engine_items)
        groups = group_by_modality(request.items)
        for name, of_modality in group_by_modality(missing).items():
            first_values = [part.value for part in groups[name]]
            for part, value in zip(of_modality, first_values, strict=False):
                part.value = value
        return missing

    return with_step("fill_in_cached_items", fill_in_cached_items)


BUFFER = torch.zeros(8, 2, 3)


@planted("cache", CACHED + r"fields\['frames'\]\[\d\]\['frames'\]: values differ")
def buffer_written_again() -> Subject:
    def process(items, scope):
        if are_small(items):
            return {"frames": torch.stack(list(items))}
        for index, value in enumerate(items):
            BUFFER[index] = value
        return {"frames": BUFFER[: len(items)]}

    return with_frames(process=process)


@planted("cache", CACHED + r"fields\['(series|frames)'\]\[\d\]\[.*\]: values differ")
def memory_of_the_caller() -> Subject:
    def parse_modality(correct, modality, data):
        items = correct(modality, data)
        if isinstance(data, list) and all(isinstance(value, torch.Tensor) for value in data):
            return ProcessorBatchItems(data, modality.name)
        return items

    return with_parser(parse_modality)

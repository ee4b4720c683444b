"""Bugs that the laws of mmkit/testing/laws/items.py catch: wrong sizes, hashes and embeddings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from vllm.multimodal.parse import ProcessorBatchItems

from mmkit import Tensor, between, embed, item, tok
from mmkit.testing import Subject

from .base import LISTED, llava
from .bug import (
    override_step,
    planted,
    with_dummy_inputs,
    with_frames,
    with_info,
    with_parser,
    with_series,
    with_step,
)

# -- worst_case --------------------------------------------------------------------------------------------------------


def with_stated_rows(surplus: int) -> Subject:
    """Return a subject that states more rows for each item than the largest one has."""

    def get_mm_max_tokens_per_item(correct, seq_len, mm_counts):
        most = correct(seq_len, mm_counts)
        return {name: rows + surplus for name, rows in most.items()}

    return with_info("get_mm_max_tokens_per_item", get_mm_max_tokens_per_item)


@planted("worst_case", r"(3 rows are stated for series, and the dummy item has 4|1 rows .* for frames, and .* has 2)")
def stated_maximum_too_small() -> Subject:
    return with_stated_rows(-1)


@planted("worst_case", r"(5 rows are stated for series, and the dummy item has 4|3 rows .* for frames, and .* has 2)")
def stated_maximum_too_large() -> Subject:
    return with_stated_rows(1)


@planted("worst_case", r"is refused: .* at most 3 encoder row\(s\), as the stated largest item has, got 4")
def largest_of_fewer_rows() -> Subject:
    return with_series(item=Tensor(shape=(between(1, 4), 2), bound=8.0, largest=(3, 2)))


@planted("worst_case", r"KeyError: '(series|frames)'")
def dummy_of_several_modalities() -> Subject:
    def get_dummy_mm_data(correct, seq_len, mm_counts, *arguments, **options):
        both = {"series": mm_counts["series"], "frames": mm_counts["frames"]}
        return correct(seq_len, both, *arguments, **options)

    return with_dummy_inputs("get_dummy_mm_data", get_dummy_mm_data)


# -- identity ----------------------------------------------------------------------------------------------------------


@planted("identity", r"TensorSample\(seed=1, .*\) has the same hash")
def hash_of_the_shape() -> Subject:
    def hash_items(correct, plan, hasher, request):
        options = sorted(request.options.items())
        for part in request.items:
            part.hash = f"{part.modality} {tuple(part.value.shape)} {options}"

    return with_step("hash_items", hash_items)


@planted("identity", r"RecordSample\(seed=.*\) has the same hash")
def hash_of_the_number_of_elements() -> Subject:
    def hash_items(correct, plan, hasher, request):
        options = sorted(request.options.items())
        for part in request.items:
            part.hash = f"{len(part.value['strokes'])} {part.value['mark'] is None} {options}"

    return with_step("hash_items", hash_items, LISTED)


@planted("identity", r"'mark': AbsentSample\(seed=0\)\}\) has the same hash")
def hash_of_an_absent_part() -> Subject:
    def hash_items(correct, plan, hasher, request):
        options = sorted(request.options.items())
        for part in request.items:
            strokes = [stroke.tolist() for stroke in part.value["strokes"]]
            # a mark without numbers is another item: its layout has one token more
            mark = [] if part.value["mark"] is None else part.value["mark"].tolist()
            part.hash = f"{strokes} {mark} {options}"

    return with_step("hash_items", hash_items, LISTED)


def parse_any_container(correct, modality, data):
    """Make tensors of items without a check, and hash them in the container in which they came."""
    if isinstance(data, Mapping):  # embeddings
        return correct(modality, data)
    values = []
    for value in data:
        if not isinstance(value, torch.Tensor):
            value = torch.as_tensor(np.asarray(value))
        values.append(value)
    return ProcessorBatchItems(values, modality.name)


@planted("identity", r"the same content as (ndarray|list) (has another hash|is refused)")
def hash_of_the_container() -> Subject:
    return with_parser(parse_any_container)


@planted("identity", r"a file decoded on white and on black \(rgba_background_color\): one hash")
def hash_of_the_file() -> Subject:
    def hash_items(correct, plan, hasher, request):
        correct(plan, hasher, request)
        for part in request.items:
            file = getattr(part.content, "original_bytes", None)
            if file:
                part.hash = hashlib.sha256(file).hexdigest()

    def change_processor(processor):
        return override_step(processor, "hash_items", hash_items)

    return llava(change_processor)


# -- embeds ------------------------------------------------------------------------------------------------------------


@planted("embeds", r"the raw item and its embeddings: ranges\['frames'\]")
def embeddings_with_another_range() -> Subject:
    return with_frames(embeds=embed(tok["<pad>"]) * item.rows + tok["<close>"])


@planted("embeds", r"embeddings of frames pass the parser, then KeyError: 'frames'")
def embeddings_that_raise() -> Subject:
    def convert_fields(correct, plan, items, **options):
        correct(plan, items, **options)
        for part in items:
            if part.modality == "frames":
                assert len(part.engine_fields["frames"].data) > 0

    return with_step("convert_fields", convert_fields)


@planted("embeds", r"the spec takes embeddings of frames, and the parser refuses them: mixed\.frames")
def embeddings_refused() -> Subject:
    def parse_modality(correct, modality, data):
        if isinstance(data, dict):
            data = data[modality.parser.embeds_field]
        return correct(modality, data)

    return with_parser(parse_modality)

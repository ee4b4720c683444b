"""Bugs that the laws of mmkit/testing/laws/models.py catch: wrong rows, crashes, and wrong outputs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from examples.series.configuration import WavesConfig
from examples.series.spec import WAVES
from mmkit import embed, fields, item, serve_transformers, tok
from mmkit.testing import Subject, of_spec
from mmkit.vllm_api import pipeline
from tests.engine.one_class import copy_checkpoint

from .base import BLACK, ID, MIXED, ByHand, Derived, make_mixed, pixels, strokes, with_model
from .bug import override, planted, with_frames, with_model_method, with_series

# -- counts ------------------------------------------------------------------------------------------------------------


@planted("counts", r"frames\[0\] has 2 encoder rows and 3 embed positions")
def layout_longer_than_the_rows() -> Subject:
    return with_frames(ByHand, layout=embed(tok["<pad>"]) * 3)


@planted("counts", r"mixed\.frames, embed_frames, item 0: expected 3 encoder rows, got 2")
def layout_longer_than_the_rows_of_a_mixin() -> Subject:
    return with_frames(Derived, layout=embed(tok["<pad>"]) * (item.length + 1), embeds=embed(tok["<pad>"]) * item.rows)


@planted("counts", r"series\[0\] has 1 encoder rows and 2 embed positions")
def literal_in_the_mask() -> Subject:
    return with_series(ByHand, layout=embed(tok["<open>"]) + embed(tok["<row>"]) * fields.length + tok["<close>"])


@planted("counts", r"0 encoder outputs for 1 items of (frames|series)")
def one_output_fewer_than_items() -> Subject:
    def embed_multimodal(correct, **arguments):
        return correct(**arguments)[:-1]

    return with_model_method("embed_multimodal", embed_multimodal)


@planted("counts", r"\[0\] has rows of shape \(7,\), and the model takes \(8,\)")
def rows_of_another_width() -> Subject:
    def embed_multimodal(correct, **arguments):
        return [rows[:, 1:] for rows in correct(**arguments)]

    return with_model_method("embed_multimodal", embed_multimodal)


# -- safety ------------------------------------------------------------------------------------------------------------


@planted("safety", r"placeholder ids \[4, 5\] can be sampled")
def placeholders_sampled() -> Subject:
    def mask_placeholders(correct, logits):
        return logits

    return with_model_method("mask_placeholders", mask_placeholders)


@planted("safety", r"placeholder ids \[5\] can be sampled")
def placeholders_of_one_modality_sampled() -> Subject:
    def mask_placeholders(correct, logits):
        return logits.index_fill(-1, torch.tensor(ID["<pad>"]), -torch.inf)

    return with_model_method("mask_placeholders", mask_placeholders)


@planted("safety", r"ids \[4, 5, -1, 32, 2147483647\] in a prompt: IndexError")
def crash_outside_the_vocabulary() -> Subject:
    def clamp_ids(correct, input_ids):
        return input_ids

    return with_model_method("clamp_ids", clamp_ids)


@planted("safety", r"ids \[4, 5, -1, 32, 2147483647\] are embedded as NaN")
def bare_placeholders_as_nan() -> Subject:
    def embed_input_ids(correct, input_ids, *arguments, **options):
        embeds = correct(input_ids, *arguments, **options)
        is_placeholder = (input_ids == ID["<pad>"])[:, None]
        return embeds.masked_fill(is_placeholder, torch.nan)

    return with_model_method("embed_input_ids", embed_input_ids)


# -- containment -------------------------------------------------------------------------------------------------------


@planted("containment", r"in torch.float32, beside an item of (nan|-?inf), the language model gets NaN")
def rows_that_are_not_finite() -> Subject:
    def replace_unsound(correct, rows):
        return rows

    return with_model_method("replace_unsound", replace_unsound)


@planted("containment", r"the language model gets [\d.e+]+ and can take (16384|9.0072e\+15)")
def rows_too_large_for_the_dtype() -> Subject:
    def replace_unsound(correct, rows):
        return [of_item.nan_to_num() for of_item in rows]

    return with_model_method("replace_unsound", replace_unsound)


@planted("containment", r"(series|frames)\[0\] has other rows than alone")
def one_bad_item_spoils_the_batch() -> Subject:
    def replace_unsound(correct, rows):
        if torch.cat(rows).isfinite().all():
            return rows
        return [torch.zeros_like(of_item) for of_item in rows]

    return with_model_method("replace_unsound", replace_unsound)


@planted("containment", r"(series|frames)\[0\] has other rows than alone")
def normalised_over_a_batch_of_requests() -> Subject:
    def replace_unsound(correct, rows):
        norm = torch.cat(rows).norm()
        return correct([of_item / norm for of_item in rows])

    return with_model_method("replace_unsound", replace_unsound)


# -- strangers ---------------------------------------------------------------------------------------------------------


@planted(
    "strangers", r"items of series of two requests in one batch: RuntimeError: stack expects each tensor to be equal"
)
def items_of_one_length() -> Subject:
    def embed_multimodal(correct, **arguments):
        return list(torch.stack(list(correct(**arguments))))

    return with_model_method("embed_multimodal", embed_multimodal)


@planted("strangers", r"items of (series|frames) of two requests in one batch: number \d has other rows than alone")
def statistics_of_the_batch() -> Subject:
    def replace_unsound(correct, rows):
        mean = torch.cat(rows).mean()
        return correct([of_item - mean for of_item in rows])

    return with_model_method("replace_unsound", replace_unsound)


@planted("strangers", r"items of (series|frames) of two requests in one batch: number \d has other rows than alone")
def rows_in_another_order() -> Subject:
    def get_first_value(of_item):
        return float(of_item[0, 0])

    def replace_unsound(correct, rows):
        return correct(sorted(rows, key=get_first_value))

    return with_model_method("replace_unsound", replace_unsound)


class OneLength(ByHand):
    """Embeddings of series are stacked, as if all of a batch had one length."""

    def embed_multimodal(self, **fields: Any) -> Any:
        embeds = fields.pop("series_embeds", None)
        if embeds is None:
            return super().embed_multimodal(**fields)
        return list(torch.stack(list(embeds)))


@planted("strangers", r"items of series of two requests in one batch: RuntimeError: stack expects each")
def embeddings_of_one_length() -> Subject:
    return with_series(OneLength, embeds=tok["<open>"] + embed(tok["<row>"]) * item.rows + tok["<close>"])


@planted(
    "strangers", r"items of frames of two requests in one batch: TypeError: torch.cat\(\): input types can't be cast"
)
def integers_by_an_option() -> Subject:
    process_correctly = pipeline.process_items

    def process_items(plan, items, *arguments):
        process_correctly(plan, items, *arguments)
        for part in items:
            if part.modality == "frames" and not part.is_embedding:
                part.fields = {"frames": part.fields["frames"].int()}

    def render(correct, request, *timer):
        if not request.options:
            return correct(request, *timer)
        with patch.object(pipeline, "process_items", process_items):
            return correct(request, *timer)

    return with_model(ByHand, processor=override(MIXED.classes.processor, "render", render))


# -- outputs -----------------------------------------------------------------------------------------------------------


def with_pixels(**functions: Any) -> Subject:
    """Return `MIXED` with another function of its output."""
    return make_mixed(MIXED.model_copy(update={"outputs": [pixels(**functions)]}))


@planted("outputs", r"before and after encode and decode: array: values differ")
def columns_taken_for_rows() -> Subject:
    def encode(array, scope):
        return array.T.reshape(-1) + BLACK

    return with_pixels(encode=encode)


SHADES = np.linspace(0, 255, 7).astype(np.uint8)


@planted("outputs", r"mixed\.outputs\.pixels, decode: expected .* IndexError: index 7 is out of bounds")
def more_ids_than_shades() -> Subject:
    def decode(ids, scope):
        return SHADES[ids.reshape(2, 3) - BLACK]

    def encode(array, scope):
        return np.searchsorted(SHADES, array.reshape(-1)) + BLACK

    return with_pixels(decode=decode, encode=encode)


@planted("outputs", r"before and after other ids are decoded: array: values differ")
def picture_kept_in_one_place() -> Subject:
    picture = np.zeros((2, 3), np.int64)

    def decode(ids, scope):
        picture[:] = ids.reshape(2, 3) - BLACK
        return picture

    return with_pixels(decode=decode)


@planted("outputs", r"int64 \(\d, 3\), and of the smallest ids int64 \(0, 3\)")
def black_rows_cut_off() -> Subject:
    def decode(ids, scope):
        rows = ids.reshape(2, 3) - BLACK
        return rows[rows.any(axis=1)]

    def encode(array, scope):
        return np.full(6, BLACK)

    return with_pixels(decode=decode, encode=encode)


@planted("outputs", r"mixed\.outputs\.strokes, decode: expected .* ValueError: cannot reshape array of size \d")
def one_point_expected() -> Subject:
    def decode(ids, scope):
        return ids.reshape(2) - BLACK

    return make_mixed(MIXED.model_copy(update={"outputs": [strokes(decode=decode)]}))


@planted("outputs", r"strokes behind the ids \[6, .*\]: sampling and the declaration differ about the ids \[7\]")
def stroke_ends_within_a_point() -> Subject:
    subject = make_mixed(MIXED.model_copy(update={"outputs": [strokes()]}))
    assert subject.plan is not None
    output = subject.plan.outputs["strokes"]
    for position, place in enumerate(output.positions):
        if position > 0:
            output.positions[position] = place._replace(end=output.until)
    return subject


@planted("outputs", r"strokes behind the ids \[6, .*\]: sampling and the declaration differ about the ids \[.*\]")
def first_mark_found_in_place_of_the_last() -> Subject:
    subject = make_mixed(MIXED.model_copy(update={"outputs": [strokes()]}))
    assert subject.plan is not None
    output = subject.plan.outputs["strokes"]

    def find_position(ids):
        if output.after not in ids:
            return None
        return min(len(ids) - 1 - ids.index(output.after), len(output.positions) - 1)

    output.find_position = find_position  # type: ignore[method-assign]
    return subject


# -- logprobs ----------------------------------------------------------------------------------------------------------


IN_BOTH = r"the token \d+ has the log probability -\d+\.\d+ in vLLM and -\d+\.\d+ in transformers"


def serve_class(name: str) -> Subject:
    """Return a class of tests/path/one_classes.py on weights of the series example."""
    serve_transformers(f"tests.path.one_classes:{name}", WavesConfig)
    folder = Path(tempfile.mkdtemp(prefix="mmkit-planted-"))
    return of_spec(WAVES, copy_checkpoint(folder, name))


@planted("logprobs", f"at step 1 of the answer, {IN_BOTH}")
def another_scale_of_logits_in_vllm() -> Subject:
    return serve_class("CachelessForCausalLM")


@planted("logprobs", f"at step [123] of the answer, {IN_BOTH}")
def positions_counted_from_the_start_of_the_batch() -> Subject:
    return serve_class("RecountedForCausalLM")

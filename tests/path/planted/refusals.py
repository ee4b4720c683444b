"""Bugs that the law of mmkit/testing/laws/refusals.py catches: mistakes of callers that are accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mmkit import InputError, ModelSpec
from mmkit.testing import Subject
from mmkit.vllm_api.items import EmbedItems

from .base import ID, LISTED, NOTED, PAGE, frames_with_laid_out_notes, frames_with_notes, make_mixed, series
from .bug import planted, with_info, with_parser, with_processor
from .items import parse_any_container

# -- counts ------------------------------------------------------------------------------------------------------------


@planted("refusal", r"one item of frames too many: accepted")
def surplus_items_accepted() -> Subject:
    def apply(correct, inputs, timing):
        items = inputs.mm_data_items.get("frames")
        if items is not None and not isinstance(items, EmbedItems):
            count = inputs.prompt.count(ID["<frame>"])
            items.data = items.data[:count]
        return correct(inputs, timing)

    return with_processor("apply", apply)


@planted("refusal", r"one item of frames too few: accepted")
def missing_items_accepted() -> Subject:
    def apply(correct, inputs, timing):
        count = len(inputs.mm_data_items.get("frames", ()))
        if count > 0:
            while inputs.prompt.count(ID["<frame>"]) > count:
                inputs.prompt.remove(ID["<frame>"])
        return correct(inputs, timing)

    return with_processor("apply", apply)


@planted("refusal", r"an unknown modality: accepted")
def unknown_modality_ignored() -> Subject:
    def parse_mm_data(correct, mm_data, **options):
        declared = {name: data for name, data in mm_data.items() if name in ("series", "frames")}
        return correct(declared, **options)

    return with_info("parse_mm_data", parse_mm_data)


@planted("refusal", r"too many elements in strokes of frames: accepted")
def longer_lists_cut_off() -> Subject:
    def parse_modality(correct, modality, data):
        cut = []
        for value in data:
            if isinstance(value, dict) and isinstance(value.get("strokes"), list):
                value = {**value, "strokes": value["strokes"][:3]}
            cut.append(value)
        return correct(modality, cut)

    return with_parser(parse_modality, LISTED)


# -- values ------------------------------------------------------------------------------------------------------------


def with_mended_tensors(mend: Callable[[torch.Tensor], torch.Tensor]) -> Subject:
    """Return a subject that parses items again, where they are refused, with other tensors in their place."""

    def parse_modality(correct, modality, data):
        try:
            return correct(modality, data)
        except InputError:
            mended = []
            for value in data:
                if isinstance(value, torch.Tensor):
                    value = mend(value)
                mended.append(value)
            return correct(modality, mended)

    return with_parser(parse_modality)


@planted("refusal", r"NaN in an item of (series|frames): accepted")
def nan_accepted() -> Subject:
    return with_mended_tensors(torch.nan_to_num)


@planted("refusal", r"a value beyond the bound in an item of (series|frames): accepted")
def bound_ignored() -> Subject:
    def clamp(value):
        return value.clamp(-8, 8)

    return with_mended_tensors(clamp)


@planted("refusal", r"a value beyond the bound in click of frames: accepted")
def index_beyond_its_part() -> Subject:
    def parse_modality(correct, modality, data):
        try:
            return correct(modality, data)
        except InputError as error:
            if ".click: expected int64 values from" not in str(error):
                raise
            clamped = []
            for value in data:
                clamped.append({**value, "click": value["click"].clamp(0, 0)})
            return correct(modality, clamped)

    return with_parser(parse_modality, PAGE)


# -- messages ----------------------------------------------------------------------------------------------------------


@planted("refusal", r": the message names no modality: request: expected well-formed items")
def message_without_modality() -> Subject:
    def parse_mm_data(correct, mm_data, **options):
        try:
            return correct(mm_data, **options)
        except InputError:
            raise InputError("request", "well-formed items", "others") from None

    return with_info("parse_mm_data", parse_mm_data)


@planted(
    "refusal",
    r"as an item of (series|frames): refused with (TypeError|RuntimeError|ValueError|AttributeError): ",
)
def refused_by_a_crash() -> Subject:
    return with_parser(parse_any_container)


# -- texts -------------------------------------------------------------------------------------------------------------


@planted("refusal", r"'</?\w+>' in note of frames: the layout has 1 of this token, and 0 with another text")
def special_token_of_a_text() -> Subject:
    def encode(scope, text):
        return scope.tok.tokenizer.encode(text, add_special_tokens=False)

    return make_mixed(ModelSpec("mixed", series(), frames_with_notes(encode)))


@planted("refusal", r"'</?\w+>' in note of frames: the layout has 1 of this token, and 0 with another text")
def special_token_in_a_text_of_a_layout() -> Subject:
    """Encode the text in a layout by the tokenizer itself."""

    def encode(scope):
        return scope.tok.tokenizer.encode(scope.item.note.text, add_special_tokens=False)

    return make_mixed(ModelSpec("mixed", series(), frames_with_laid_out_notes(encode)))


@planted("refusal", r"'<(pad|row|frame|series)>' in note of frames: accepted")
def placeholder_of_a_text() -> Subject:
    def parse_modality(correct, modality, data):
        parser = replace(modality.parser, placeholder_texts=())
        return correct(replace(modality, parser=parser), data)

    return with_parser(parse_modality, NOTED)

"""Bugs that the laws of mmkit/testing/laws/requests.py catch: wrong ids, ranges and fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmkit import InputError, ModelSpec, batched, derived, embed, item, tok
from mmkit.language.layout import ItemTokens
from mmkit.plan.item import group_by_modality
from mmkit.plan.placement import Placement
from mmkit.testing import Subject

from .base import BEATS, BY_NUMBER, HEART, ID, MEDIA, NUMBERED, TOKENS, frames, heart, make_mixed, media, series
from .bug import override, planted, with_frames, with_info, with_processor, with_series, with_step

# -- ranges ------------------------------------------------------------------------------------------------------------

OUTSIDE = r"outside the ranges the prompt is \[.*\], the caller's \[.*\]"


@planted(
    "ranges",
    r"(series|frames)\[0\] ends at (\d+), past \d+ ids|the ids at (series|frames)\[0\] are \[.*\], its layout",
)
def range_off_by_one() -> Subject:
    def place_items(correct, plan, request):
        ids, placements = correct(plan, request)
        return ids, [replace(placement, start=placement.start + 1) for placement in placements]

    return with_step("place_items", place_items)


@planted(
    "ranges",
    r"\[\d\] (at \d+ begins inside the range before it, which ends at \d+|are \[.*\], its layout is \[)",
)
def overlapping_ranges() -> Subject:
    def place_items(correct, plan, request):
        ids, placements = correct(plan, request)
        first_starts: dict[str, int] = {}
        for placement in placements:
            first_starts.setdefault(placement.modality, placement.start)
        return ids, [replace(placement, start=first_starts[placement.modality]) for placement in placements]

    return with_step("place_items", place_items)


@planted("ranges", OUTSIDE)
def end_of_the_prompt_dropped() -> Subject:
    def place_items(correct, plan, request):
        ids, placements = correct(plan, request)
        end = max(placement.end for placement in placements)
        return ids[:end], placements

    return with_step("place_items", place_items)


def with_prompt(change: Callable[[list[int]], list[int]], **options: Any) -> Subject:
    """Return a subject whose items are placed in another prompt, a function of the caller's."""

    def place_items(correct, plan, request):
        return correct(plan, replace(request, prompt=change(request.prompt)))

    return with_step("place_items", place_items, **options)


@planted("ranges", OUTSIDE)
def prompt_in_lower_case() -> Subject:
    def lower(prompt):
        lowered = []
        for token in prompt:
            if token < len(TOKENS):
                token = ID.get(TOKENS[token].lower(), token)
            lowered.append(token)
        return lowered

    return with_prompt(lower)


@planted("ranges", r"the ids at (series|frames)\[0\] are \[0, .*\], its layout is \[[^0].*\]")
def ids_that_are_not_the_layout() -> Subject:
    def place_items(correct, plan, request):
        ids, placements = correct(plan, request)
        changed = list(ids)
        for placement in placements:
            changed[placement.start] = ID["<unk>"]
        return changed, placements

    return with_step("place_items", place_items)


@planted("ranges", r"placeholders of \[\('series', \d\), .*\] get the items \[\('series', 0\), ")
def numbers_ignored() -> Subject:
    numbered_ids = [ID[word] for word in NUMBERED]

    def renumber(prompt):
        in_order = iter(numbered_ids)
        renumbered = []
        for token in prompt:
            if token in numbered_ids:
                token = next(in_order)
            renumbered.append(token)
        return renumbered

    return with_prompt(renumber, spec=BY_NUMBER)


@planted("ranges", r"the mask of series\[0\] is not that of its layout")
def mask_lost() -> Subject:
    def place_items(correct, plan, request):
        ids, placements = correct(plan, request)
        changed = []
        for placement in placements:
            all_embed = bytes([1]) * len(placement.tokens)
            changed.append(replace(placement, tokens=ItemTokens(placement.tokens.ids, all_embed)))
        return ids, changed

    return with_step("place_items", place_items)


# -- text --------------------------------------------------------------------------------------------------------------


def with_words_before(words: list[str]) -> Subject:
    """Return a subject whose processor itself encodes a text, with some words before it."""

    def call(correct, prompt, *arguments, **options):
        if isinstance(prompt, str):
            prompt = [ID.get(word, ID["<unk>"]) for word in words + prompt.split()]
        return correct(prompt, *arguments, **options)

    return with_processor("__call__", call)


@planted("text", r"the ids of a text and, by the processor, the text '.*': ids: \d+ and \d+ long")
def text_without_special_tokens() -> Subject:
    return with_words_before([])


@planted("text", r"the ids of a text and, by the renderer, the text '.*': ids: \[.*\] and \[.*\]")
def text_in_lower_case() -> Subject:
    def get_default_tok_params(correct):
        return replace(correct(), do_lower_case=True)

    return with_info("get_default_tok_params", get_default_tok_params)


@planted("text", r"the ids of a text and, by the processor, the text '.*': ids: \d+ and \d+ long")
def text_begun_twice() -> Subject:
    return with_words_before(["<s>", "<s>"])


@planted("text", r"outside its items the prompt has \[1, 13.*\], and the ids of the text are \[1, .*\]")
def a_token_more_than_the_text() -> Subject:
    def insert_second_token(prompt):
        return prompt[:1] + [ID["a"]] + prompt[1:]

    return with_prompt(insert_second_token)


# -- independence ------------------------------------------------------------------------------------------------------


def are_small(items: Any) -> bool:
    """Return whether all values are as small as those with which binding rehearses a spec.

    A mistake with these values would be found when the spec is bound.
    """
    return all(float(value.abs().max()) <= 2 for value in items)


@planted(
    "independence",
    r"series\[\d\] alone and in this request: \['values'\]: torch.float32 \(\d, 2\) and torch.float32 \(\d, 2\)",
)
def padded_to_the_batch() -> Subject:
    def process(items, scope):
        lengths = [len(value) for value in items]
        if are_small(items):
            return {"values": list(items), "length": torch.tensor(lengths)}
        values = nn.utils.rnn.pad_sequence(list(items), batch_first=True)
        return {"values": values, "length": torch.tensor([len(value) for value in items])}

    return with_series(process=process, fields={"values": batched(), "length": batched()})


@planted("independence", r"frames\[\d\] alone and in this request: \['frames'\]: values differ")
def normalised_over_the_batch() -> Subject:
    def process(items, scope):
        values = torch.stack(list(items))
        return {"frames": values / values.abs().max().clamp(min=2)}

    return with_frames(process=process)


@planted("independence", r"frames\[\d\] alone and in this request: \['frames'\]: values differ")
def fast_path_for_several() -> Subject:
    def process(items, scope):
        values = torch.stack(items)
        if len(items) == 1:
            return {"frames": values / 3}
        return {"frames": values.half().div(3).float()}

    return with_frames(process=process)


@planted("independence", r"frames\[\d\] alone and in this request: \['position'\]: values differ")
def field_of_the_index() -> Subject:
    def process(items, scope):
        return {"frames": torch.stack(items)}

    return with_frames(
        process=process,
        fields={"frames": batched(), "position": derived(item.index, dtype="int64")},
        cacheable=item.count <= 9,
    )


@planted(
    "independence",
    r"(image|video)\[\d\] (alone and in this request: .* values differ|has \d embed positions alone and \d)",
)
def options_of_another_modality() -> Subject:
    def render(correct, request, *timer):
        if len(group_by_modality(request.items)) > 1:
            merged = dict(request.options)
            for value in request.options.values():
                if isinstance(value, dict):
                    merged.update(value)
            request = replace(request, options=merged)
        return correct(request, *timer)

    return media(processor=override(MEDIA.classes.processor, "render", render))


def with_other_splits(split: Callable[[torch.Tensor, list[int]], Any]) -> Subject:
    """Return a subject that splits the rows of all series otherwise.

    Args:
        split: a function of the rows and of the number of each item.
    """

    def process_items(correct, plan, items, *arguments):
        correct(plan, items, *arguments)
        of_series = [part.fields for part in items if part.modality == "series" and "values" in part.fields]
        if not of_series:
            return
        rows = torch.cat([fields["values"] for fields in of_series])
        sizes = [len(fields["values"]) for fields in of_series]
        for fields, values in zip(of_series, split(rows, sizes), strict=True):
            fields["values"] = values

    return with_step("process_items", process_items)


@planted("independence", r"series\[\d\] alone and in this request: \['values'\]: .*\(\d, 2\) and .*\(\d, 2\)")
def flat_sizes_in_the_wrong_order() -> Subject:
    def split(rows, sizes):
        return rows.split(sizes[::-1])

    return with_other_splits(split)


@planted("independence", r"series\[\d\] alone and in this request: \['values'\]: .*")
def split_along_another_dimension() -> Subject:
    def split(rows, sizes):
        if len(sizes) == 2:
            return rows.chunk(2, dim=1)
        return rows.split(sizes)

    return with_other_splits(split)


# -- round_trip --------------------------------------------------------------------------------------------------------


@planted("round_trip", r"series\[0\] has \['length', 'values'\], declared are \['length', 'values', 'version'\]")
def field_left_out() -> Subject:
    def make_kwargs_item(correct, modality, fields, *arguments):
        without_version = {name: value for name, value in fields.items() if name != "version"}
        return correct(modality, without_version, *arguments)

    return with_step("make_kwargs_item", make_kwargs_item)


# -- idempotence -------------------------------------------------------------------------------------------------------


@planted("idempotence", r"\d+ ids became \d+")
def double_expansion() -> Subject:
    """Replace each target, also one that an expanded layout begins with."""

    def place_items(correct, plan, request):
        ids: list[int] = []
        placements: list[Placement] = []
        for token in request.prompt:
            index = len(placements)
            if token != ID["<frame>"] or index == len(request.items):
                ids.append(token)
                continue
            tokens = request.items[index].layout.tokens
            placements.append(Placement("frames", index, len(ids), tokens))
            ids += tokens.ids
        if len(placements) != len(request.items):
            raise InputError("double.frames", "<frame> for each item", f"{len(placements)} of them")
        return ids, placements

    spec = ModelSpec("double", frames(layout=tok["<frame>"] + embed(tok["<pad>"]) * 2))
    return with_step("place_items", place_items, spec)


@planted("idempotence", r"\d+ ids became \d+")
def turn_ended_again() -> Subject:
    def end_turn(scope):
        return list(scope.prompt) + [ID["</s>"]]

    return make_mixed(ModelSpec("mixed", series(), frames(), prompt=end_turn))


# -- ids_only ----------------------------------------------------------------------------------------------------------


@planted("ids_only", r"beats reaches the engine")
def ids_with_an_entry_of_their_own() -> Subject:
    def select_engine_items(correct, plan, items):
        return list(items)

    return with_step("select_engine_items", select_engine_items, HEART)


@planted("ids_only", r"the expanded prompt with .*its items and without: .*ids")
def a_prompt_that_counts_items_of_ids() -> Subject:
    def end_with_count(scope):
        ids = list(scope.prompt)
        while ids and ids[-1] == ID["A"]:
            ids.pop()
        return ids + [ID["A"]] * scope.counts.get("beats", 0)

    return heart(ModelSpec("heart", BEATS, prompt=end_with_count))


@planted("idempotence", r"refused with InputError: mixed\.frames")
def expanded_prompt_refused() -> Subject:
    def place_items(correct, plan, request):
        if ID["<pad>"] in request.prompt:
            raise InputError("mixed.frames", "<frame>", "<pad>")
        return correct(plan, request)

    return with_step("place_items", place_items)

"""Placing: the search for the place of each item in a prompt.

mmkit places items in their order, or refuses the request. It recognises a layout that already
stands in the prompt and leaves it as it is, so an expanded prompt is not expanded again.

`place` tries the forms that a prompt may have (`PromptForm`), each by a `_Search` in four steps:

1. `_find_items` finds the span that stands for each item, from left to right.
2. `_check_left_over` refuses what stands for an item where none is placed.
3. `_check_targets_inside_layouts` refuses a target inside a layout of another modality.
4. `_write_layouts` writes the layouts over the spans.

A step that fails raises its error of `mmkit.plan.placing_errors`. After a `WrongForm`, the next
form is tried.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..language.layout import make_id_string
from ..language.vocabulary import Vocabulary
from . import placing_errors
from .placement import (
    NO_TARGETS,
    ItemLayout,
    LayoutsByModality,
    PlacedPrompt,
    Placement,
    PromptForm,
    ReservedTargets,
)
from .placing_errors import PlacingTask, WrongForm
from .spans import Span, Spans


def place(
    prompt: list[int],
    layouts: LayoutsByModality,
    where: str,
    reserved: ReservedTargets = NO_TARGETS,
    forms: Sequence[PromptForm] = tuple(PromptForm),
    tok: Vocabulary | None = None,
) -> PlacedPrompt:
    """Bring the layouts of all items into a prompt, by the first form that the prompt has.

    The items of a modality are placed in order. Where targets of several modalities match at the
    same position, the modality that comes first in `layouts` goes first, as in vLLM. For one form,
    the prompt is searched once for all items that share their ids.

    The ids of an item that becomes ids only may stand elsewhere, too: where an earlier message had
    the same item, or where a text has them. So they do not tell the form of a prompt; see
    `_find_forms_of_ids`.

    Args:
        prompt: token ids; not changed.
        layouts: per modality and item, the layout.
        where: names the spec in errors.
        reserved: targets of which none may be left over, also where no item has them.
        forms: the forms to try. If all fail, the error is the one for the last form other than
            MIXED, unless there is no other.
        tok: the vocabulary, in whose words errors name tokens; None names their ids.

    Raises:
        NotFound: nothing in the prompt stands for an item.
        InsideOtherItem: what stands for an item is a part of what stands for another one.
        LeftOver: a target or a placeholder id is left over, also one of `reserved`.
        InputError: items of two modalities may have the same layout at one place; or a target
            stands inside a layout of another modality.
    """
    prompt_string = make_id_string(prompt)
    task = PlacingTask(prompt, prompt_string, layouts, where, reserved, tok)
    choice = _choose_forms(prompt_string, layouts, forms)
    refusal: WrongForm | None = None
    for form in choice.forms:
        try:
            return _Search(task, form, choice.forms_of_ids).run()
        except WrongForm as error:
            # a caller who wrote an unexpanded prompt would not understand why it is not mixed
            if refusal is None or form is not PromptForm.MIXED:
                refusal = error
    assert refusal is not None
    raise refusal


def may_be_expanded(prompt: list[int], layouts: LayoutsByModality) -> bool:
    """Return whether a prompt may have the form EXPANDED. If not, `place` refuses that form.

    It takes far less time than the error of `place`.
    """
    return _has_first_layouts(make_id_string(prompt), layouts)


# -- the form of a prompt --------------------------------------------------------------------------


class _FormChoice(NamedTuple):
    """The forms in which a prompt is searched.

    Say ``action`` becomes ids only, and the prompt has a target for each action. Then the form of
    actions is UNEXPANDED whatever that of the images is, which is found by trying:
    ``forms=(EXPANDED, UNEXPANDED, MIXED), forms_of_ids={"action": UNEXPANDED}``.

    Attributes:
        forms: to be tried in order, for the modalities that `forms_of_ids` does not name.
        forms_of_ids: the form of each modality whose items become ids only.
    """

    forms: Sequence[PromptForm]
    forms_of_ids: Mapping[str, PromptForm]


def _choose_forms(
    prompt_string: str, layouts: LayoutsByModality, forms: Sequence[PromptForm]
) -> _FormChoice:
    """Return the forms that a prompt may have, with those that need no trial left out.

    A prompt without the first layout of a modality is not EXPANDED. Where all modalities have a
    form of their own, one search is enough.
    """
    if len(forms) == 1:
        return _FormChoice(forms, {})
    forms_of_ids = _find_forms_of_ids(prompt_string, layouts)
    if len(forms_of_ids) == len(layouts):
        # each modality is searched in its form of `forms_of_ids`, so that it does not matter which
        # of these forms is tried; a second search would find the same
        return _FormChoice(forms[:1], forms_of_ids)
    if forms[0] is PromptForm.EXPANDED and not _has_first_layouts(
        prompt_string, layouts, forms_of_ids
    ):
        return _FormChoice(forms[1:], forms_of_ids)  # nearly always
    return _FormChoice(forms, forms_of_ids)


def _has_first_layouts(
    prompt_string: str, layouts: LayoutsByModality, ignored: Collection[str] = ()
) -> bool:
    """Return whether the layout of the first item of each modality stands in the prompt.

    Args:
        prompt_string: the prompt.
        layouts: per modality and item, the layout.
        ignored: the modalities of which it may be missing.
    """
    for modality, item_layouts in layouts.items():
        if modality in ignored:
            continue
        if item_layouts and item_layouts[0].tokens.id_string not in prompt_string:
            return False
    return True


def _find_forms_of_ids(prompt_string: str, layouts: LayoutsByModality) -> dict[str, PromptForm]:
    """Return the form in which a prompt has each modality whose items become ids only.

    The targets tell it, since no layout has the target of its item, and none may be left over:
    without any, all items are laid out; with one for each item, none is.
    """
    forms: dict[str, PromptForm] = {}
    for modality, item_layouts in layouts.items():
        if not item_layouts or not item_layouts[0].is_ids_only:
            continue
        count = _count_targets(prompt_string, item_layouts)
        if count == 0:
            forms[modality] = PromptForm.EXPANDED
        elif count >= len(item_layouts):
            forms[modality] = PromptForm.UNEXPANDED
        else:
            forms[modality] = PromptForm.MIXED
    return forms


def _count_targets(prompt_string: str, item_layouts: Sequence[ItemLayout]) -> int:
    """Return how many targets of some items stand in a prompt, without overlaps."""
    target_strings: set[str] = set()
    for layout in set(item_layouts):
        target_strings.update(layout.target_strings)
    if len(target_strings) < 2:
        return sum(prompt_string.count(target_string) for target_string in target_strings)
    longest_first = sorted(target_strings, key=len, reverse=True)
    pattern = "|".join([re.escape(target_string) for target_string in longest_first])
    return len(re.findall(pattern, prompt_string))


# -- the search for one form -----------------------------------------------------------------------


@dataclass(slots=True)
class _Match:
    """An item, and the span of the prompt that stands for it."""

    modality: str
    index: int
    span: Span

    @property
    def name(self) -> str:
        """The item in errors, for example ``image[0]``."""
        return f"{self.modality}[{self.index}]"


_PLACED_ITEM = chr(sys.maxunicode)
"""Stands for a placed item between the remaining parts of a prompt.

Without it, a string could match across two parts. It is the only character that is no id.
"""


class _Search:
    """The search for all items in a prompt of one form.

    Ids are searched as strings; see `mmkit.language.layout.make_id_string`.
    """

    def __init__(
        self, task: PlacingTask, form: PromptForm, forms_of_ids: Mapping[str, PromptForm]
    ) -> None:
        self._task = task
        self._prompt = task.prompt
        self._prompt_string = task.id_string
        self._layouts = task.layouts
        self._form = form
        self._forms_of_ids = forms_of_ids
        # Where each string is found next; the length of the prompt for nowhere. The items of a
        # modality mostly share their strings, and each item asks for the next match of every
        # modality: without this, a string that comes late in the prompt is searched again for each
        # item before it.
        self._next_match: dict[str, int] = {}

    def run(self) -> PlacedPrompt:
        """Place all items.

        Raises:
            WrongForm: the prompt has another form.
            InputError: the prompt is refused whatever its form.
        """
        matches = self._find_items()
        self._check_left_over(matches)
        self._check_targets_inside_layouts(matches)
        return self._write_layouts(matches)

    # -- 1: find the items -------------------------------------------------------------------------

    def _find_items(self) -> list[_Match]:
        """Return what stands for each item, from left to right."""
        if len(self._layouts) == 1:  # nearly always
            (modality,) = self._layouts
            return self._find_items_of(modality)
        return self._find_items_of_all()

    def _find_items_of(self, modality: str) -> list[_Match]:
        """Return what stands for each item of the only modality of a task."""
        matches: list[_Match] = []
        for index in range(len(self._layouts[modality])):
            span = self._find_span(modality, index, matches)
            matches.append(_Match(modality, index, span))
        return matches

    def _find_items_of_all(self) -> list[_Match]:
        """Return what stands for each item of several modalities.

        Of each modality, the next item has a span behind the items that are found already. The
        leftmost of these spans is the next match.
        """
        matches: list[_Match] = []
        next_index: dict[str, int] = {}
        for modality, item_layouts in self._layouts.items():
            if item_layouts:
                next_index[modality] = 0
        while next_index:
            next_spans: dict[str, Span] = {}
            for modality, index in next_index.items():
                next_spans[modality] = self._find_span(modality, index, matches)
            modality = _find_leftmost(next_spans)
            self._check_unambiguous(modality, next_spans, next_index)
            matches.append(_Match(modality, next_index[modality], next_spans[modality]))
            next_index[modality] += 1
            if next_index[modality] == len(self._layouts[modality]):
                del next_index[modality]
        return matches

    def _find_span(self, modality: str, index: int, matches: Sequence[_Match]) -> Span:
        """Return the first span behind the matches that stands for an item.

        Raises:
            NotFound: there is none.
            InsideOtherItem: there is none, but one inside a match.
        """
        cursor = matches[-1].span.stop if matches else 0
        layout = self._layouts[modality][index]
        form = self._forms_of_ids.get(modality, self._form)
        if form is PromptForm.UNEXPANDED and layout.is_inserted:
            anchor = find_anchor(layout, self._prompt)
            if anchor is not None:
                if anchor.start < cursor:
                    # the end of the last match, where the search goes on, is behind the anchor
                    raise self._make_inside_other(modality, index, matches[-1])
                return anchor
        strings = layout.strings_in(form)
        span = self._find_next_match(strings, cursor)
        if span is None:
            owner = self._find_owner(modality, strings, matches)
            if owner is not None:
                raise self._make_inside_other(modality, index, owner)
            raise placing_errors.make_not_found(self._task, modality, index)
        return span

    def _find_next_match(self, strings: Sequence[str], cursor: int) -> Span | None:
        """Return the nearest match of any of the strings at or after the cursor; None for no match.

        Where two strings match at one position, the first string wins.
        """
        nowhere = len(self._prompt_string)
        nearest = nowhere
        nearest_string = ""
        for string in strings:
            start = self._next_match.get(string, -1)
            if start < cursor:
                start = self._prompt_string.find(string, cursor)
                if start < 0:
                    start = nowhere
                self._next_match[string] = start
            if start < nearest:
                nearest = start
                nearest_string = string
        if nearest == nowhere:
            return None
        return Span(nearest, nearest + len(nearest_string))

    def _find_owner(
        self, modality: str, strings: Sequence[str], matches: Sequence[_Match]
    ) -> _Match | None:
        """Return a match of another modality that has a position of one of the strings."""
        owners: dict[Span, _Match] = {}
        for match in matches:
            if match.modality != modality:
                owners[match.span] = match
        spans = Spans(owners)
        for string in strings:
            span = find_overlapped(self._prompt_string, string, spans)
            if span is not None:
                return owners[span]
        return None

    def _make_inside_other(self, modality: str, index: int, owner: _Match) -> WrongForm:
        ids = self._prompt[owner.span.start : owner.span.stop]
        return placing_errors.make_inside_other(self._task, modality, index, owner.name, ids)

    def _check_unambiguous(
        self, modality: str, next_spans: Mapping[str, Span], next_index: Mapping[str, int]
    ) -> None:
        """Refuse a layout in the prompt that two items have.

        Args:
            modality: the one whose item is to be placed.
            next_spans: the spans of the next items, by modality.
            next_index: the numbers of these items.
        """
        first = next_spans[modality]
        if len(next_spans) == 1 or first.is_anchor:
            return
        candidates: list[str] = []
        for name, span in next_spans.items():
            if span.start != first.start:
                continue
            if self._is_layout(span, self._layouts[name][next_index[name]]):
                candidates.append(name)
        if modality in candidates and len(candidates) > 1:
            layout = self._layouts[candidates[0]][next_index[candidates[0]]]
            raise placing_errors.make_ambiguous(self._task, candidates[:2], layout.tokens.ids)

    def _is_layout(self, span: Span, layout: ItemLayout) -> bool:
        """Return whether the layout of an item stands at a span."""
        return (
            not span.is_anchor
            and self._prompt_string[span.start : span.stop] == layout.tokens.id_string
        )

    # -- 2: what is left over ----------------------------------------------------------------------

    def _check_left_over(self, matches: Sequence[_Match]) -> None:
        """Refuse what stands for an item where no item is placed.

        Raises:
            LeftOver: a target or a placeholder of a modality with items, or a reserved target.
        """
        remaining = self._remaining_string(matches)
        if not self._may_have_left_over(remaining):  # nearly always
            return
        for modality, item_layouts in self._layouts.items():
            left_over = _find_left_over(remaining, item_layouts)
            if left_over is not None:
                raise placing_errors.make_left_over(self._task, modality, _as_ids(left_over))
        for target_string, target in self._task.reserved.strings.items():
            if target_string in remaining:
                raise placing_errors.make_left_over_target(self._task, target)

    def _remaining_string(self, matches: Sequence[_Match]) -> str:
        """Return the prompt with one character in place of each match."""
        parts: list[str] = []
        cursor = 0
        for match in matches:
            parts.append(self._prompt_string[cursor : match.span.start])
            cursor = match.span.stop
        parts.append(self._prompt_string[cursor:])
        return _PLACED_ITEM.join(parts)

    def _may_have_left_over(self, remaining: str) -> bool:
        """Return whether the first character of any leftover remains, a search in C for each."""
        first_characters = set(self._task.reserved.first_characters)
        for item_layouts in self._layouts.values():
            for layout in set(item_layouts):  # most items of a modality share one
                first_characters |= layout.first_leftover_characters
        return _contains_any(remaining, first_characters)

    # -- 3: targets inside layouts -----------------------------------------------------------------

    def _check_targets_inside_layouts(self, matches: Sequence[_Match]) -> None:
        """Refuse a target inside a layout of another modality whose other ids would stay as text.

        Say the layout of a video is the ids ``7 1 8``, its target is 2, and 1 is the target of an
        image. In the prompt ``7 1 8 2``, the search takes the 1 for the image and the 2 for the
        video; 7 and 8 would stay as text. The caller has written the video twice, or the image in
        no place of its own.

        Raises:
            InputError: names the item of the target.
        """
        if len(self._layouts) < 2:
            return
        matched_before: list[int] | None = None
        for modality, item_layouts in self._layouts.items():
            targets = self._find_targets_of_others(modality, matches)
            target_strings = {self._string_of(target) for target in targets}
            # in the order of the items: the first at fault is named; most of them share a layout
            layouts = dict.fromkeys(item_layouts)
            layout_strings = dict.fromkeys(layout.tokens.id_string for layout in layouts)
            for layout_string in layout_strings:
                if not _contains_any(layout_string, target_strings):  # nearly always
                    continue
                if matched_before is None:
                    matched_before = self._count_matched_positions(matches)
                self._check_targets_inside(modality, layout_string, targets, matched_before)

    def _find_targets_of_others(self, modality: str, matches: Sequence[_Match]) -> list[_Match]:
        """Return the matches of other modalities that are targets."""
        targets: list[_Match] = []
        for match in matches:
            if match.modality != modality and self._is_target(match):
                targets.append(match)
        return targets

    def _check_targets_inside(
        self,
        modality: str,
        layout_string: str,
        targets: Sequence[_Match],
        matched_before: Sequence[int],
    ) -> None:
        """Refuse a target inside one layout, wherever that layout stands in the prompt.

        Args:
            modality: the modality of the layout.
            layout_string: the layout.
            targets: the matches of other modalities that are targets, in prompt order.
            matched_before: see `_count_matched_positions`.
        """
        target_starts = [target.span.start for target in targets]
        start = self._prompt_string.find(layout_string)
        while start >= 0:
            stop = start + len(layout_string)
            is_all_matched = matched_before[stop] - matched_before[start] == len(layout_string)
            # Targets do not overlap: if the first that begins here ends behind the layout, no other
            # one lies inside.
            position = bisect_left(target_starts, start)
            if position < len(targets) and not is_all_matched:
                target = targets[position]
                if target.span.stop <= stop:
                    raise placing_errors.make_target_inside_layout(
                        self._task,
                        target.name,
                        _as_ids(self._string_of(target)),
                        modality,
                        _as_ids(layout_string),
                    )
            start = self._prompt_string.find(layout_string, start + 1)

    def _count_matched_positions(self, matches: Sequence[_Match]) -> list[int]:
        """Return how many positions before each position stand for items, and before the end."""
        is_matched = bytearray(len(self._prompt_string))
        for match in matches:
            length = match.span.stop - match.span.start
            is_matched[match.span.start : match.span.stop] = b"\1" * length
        return list(accumulate(is_matched, initial=0))

    def _is_target(self, match: _Match) -> bool:
        """Return whether a target stands for the item, and no layout."""
        layout = self._layouts[match.modality][match.index]
        return not match.span.is_anchor and self._string_of(match) in layout.target_strings

    def _string_of(self, match: _Match) -> str:
        return self._prompt_string[match.span.start : match.span.stop]

    # -- 4: write the layouts ----------------------------------------------------------------------

    def _write_layouts(self, matches: Sequence[_Match]) -> PlacedPrompt:
        """Return the prompt with layouts in place of the matches."""
        ids: list[int] = []
        placements: list[Placement] = []
        cursor = 0
        for match in matches:
            ids += self._prompt[cursor : match.span.start]
            tokens = self._layouts[match.modality][match.index].tokens
            placements.append(Placement(match.modality, match.index, len(ids), tokens))
            ids += tokens.ids
            cursor = match.span.stop
        ids += self._prompt[cursor:]
        return PlacedPrompt(ids, placements)


def find_overlapped(prompt: str, string: str, spans: Spans) -> Span | None:
    """Return the first span that an occurrence of a string overlaps; None where there is none.

    Args:
        prompt: ids as a string.
        string: what is searched; its occurrences may overlap one another.
        spans: of the prompt.
    """
    start = prompt.find(string)
    while start >= 0:
        span = spans.find_overlapped(Span(start, start + len(string)))
        if span is not None:
            return span
        start = prompt.find(string, start + 1)
    return None


def find_anchor(layout: ItemLayout, prompt: Sequence[int]) -> Span | None:
    """Return where the first update that inserts the layout does so; None where none does."""
    for update, target in layout.updates:
        offset = update.find_anchor(prompt, target)
        if offset is not None:
            return Span(offset, offset)
    return None


def _find_leftmost(spans: Mapping[str, Span]) -> str:
    """Return the modality whose span comes first in the prompt, the first modality of equals."""
    leftmost, *others = spans
    for modality in others:
        if spans[modality].precedes(spans[leftmost]):
            leftmost = modality
    return leftmost


def _find_left_over(remaining: str, item_layouts: Sequence[ItemLayout]) -> str | None:
    """Return the first target or placeholder of items in a string; None where there is none."""
    strings: set[str] = set()
    for layout in set(item_layouts):  # most items of a modality share one
        strings |= layout.leftover_strings
    left_over = [string for string in strings if string in remaining]
    if not left_over:
        return None
    return min(left_over, key=remaining.index)


def _contains_any(string: str, parts: Collection[str]) -> bool:
    """Return whether any of the parts stands in a string."""
    for part in parts:
        if part in string:
            return True
    return False


def _as_ids(string: str) -> list[int]:
    """Return ids that were written as a string by `make_id_string`."""
    return [ord(character) for character in string]

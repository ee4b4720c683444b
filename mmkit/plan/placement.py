"""Placement: the layouts of a request's items in its prompt.

mmkit places items in their order, or refuses the request. It recognises a layout that already
stands in the prompt and leaves it as it is, so an expanded prompt is not expanded again.

`place` is the entry point. For each `PromptForm` a `_Search` finds what stands for each item, from
left to right, and checks that nothing else in the prompt stands for one. `_ErrorMaker` makes the
errors.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from ..errors import InputError
from ..language.layout import Insert, ItemTokens, Replace, Target, Update, as_text
from ..language.vocabulary import Vocabulary

EMPTY: Mapping[Any, Any] = MappingProxyType({})

MAX_IDS_SHOWN = 8
"""The most ids that a message shows in full."""


class PromptForm(Enum):
    """How far the caller has expanded a prompt. `place` tries the forms in this order.

    =========== ====================================================================
    form        what the prompt holds
    =========== ====================================================================
    EXPANDED    the layout of every item
    UNEXPANDED  the target of every item, or the place where its layout is inserted
    MIXED       the layouts of some items, and the targets of the others
    =========== ====================================================================
    """

    EXPANDED = "expanded"
    UNEXPANDED = "unexpanded"
    MIXED = "mixed"


class ResolvedUpdate(NamedTuple):
    """One alternative of `update`, for one item.

    Attributes:
        update: the declaration.
        target: the ids of its target; the prefix for `insert(after=...)`.
    """

    update: Update
    target: Target


@dataclass(frozen=True, eq=False)
class ItemLayout:
    """The layout of one item, and how it may get into a prompt.

    Items of one geometry share this object, so that what a search for them needs is computed once.

    Attributes:
        tokens: the ids of the layout, and which of them receive encoder rows.
        updates: in order of preference.
    """

    tokens: ItemTokens
    updates: Sequence[ResolvedUpdate]

    def for_index(self, index: int) -> ItemLayout:
        """Return the layout that this item has at another position of its modality."""
        return self

    @cached_property
    def caller_ids(self) -> list[Target]:
        """The ids that a caller writes for the item, by each update; none for an `insert`."""
        ids_by_update: list[Target] = []
        for update, target in self.updates:
            ids_by_update.append(tuple(update.list_caller_ids(target, self.tokens)))
        return ids_by_update

    @property
    def is_ids_only(self) -> bool:
        """Whether the item becomes ids of the vocabulary only, and leaves nothing else in a prompt.

        An item with positions has an embed() position otherwise.
        """
        return bool(self.tokens.ids) and not self.tokens.num_embeds

    @property
    def unexpanded_ids(self) -> Target:
        """The ids that stand for the item in an unexpanded prompt, by the first update."""
        return self.caller_ids[0] or tuple(self.tokens.ids)

    @cached_property
    def target_texts(self) -> list[str]:
        """The targets that the layout replaces, as texts; see `mmkit.language.layout.as_text`."""
        texts: list[str] = []
        for update, target in self.updates:
            if isinstance(update, Replace):
                texts.append(as_text(target))
        return texts

    @cached_property
    def leftover_texts(self) -> frozenset[str]:
        """The texts that must not remain once all items are placed: targets and placeholders."""
        placeholders = [chr(token) for token in self.tokens.embed_ids]
        return frozenset(self.target_texts + placeholders)

    @cached_property
    def first_leftover_characters(self) -> frozenset[str]:
        """The first character of each leftover text."""
        return frozenset(text[0] for text in self.leftover_texts)

    def texts_in(self, form: PromptForm) -> list[str]:
        """Return the texts that stand for the item in a prompt, the preferred one first."""
        if form is PromptForm.EXPANDED:
            return self._layout_texts
        if form is PromptForm.UNEXPANDED:
            return self._caller_texts
        return self._layout_and_target_texts

    @cached_property
    def _layout_texts(self) -> list[str]:
        return [self.tokens.text] if self.tokens.ids else []

    @cached_property
    def _caller_texts(self) -> list[str]:
        texts: list[str] = []
        for ids in self.caller_ids:
            if ids:
                texts.append(as_text(ids))
        return texts

    @cached_property
    def _layout_and_target_texts(self) -> list[str]:
        return self._layout_texts + self.target_texts


LayoutsByModality: TypeAlias = Mapping[str, Sequence[ItemLayout]]
"""The layout of each item, by modality."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of an item's layout in a prompt.

    Attributes:
        modality: name of the item's modality.
        index: the item's position among those of its modality.
        start: offset of the layout's first token in the new prompt.
        tokens: the layout as it stands in the prompt.
    """

    modality: str
    index: int
    start: int
    tokens: ItemTokens = field(repr=False)

    @property
    def end(self) -> int:
        """Offset after the layout's last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, eq=False)
class ReservedTargets:
    """The targets of a spec that stand for items and for nothing else: none may be left over.

    A spec may have many, such as ``<|image_1|>`` to ``<|image_64|>``, so that what a search for
    them needs is computed once.

    Attributes:
        modality_of: the modality of each target.
    """

    modality_of: Mapping[Target, str]

    @cached_property
    def texts(self) -> dict[str, Target]:
        """The targets by their texts; see `mmkit.language.layout.as_text`."""
        return {as_text(target): target for target in self.modality_of}

    @cached_property
    def first_characters(self) -> frozenset[str]:
        """The first character of each text."""
        return frozenset(text[0] for text in self.texts)


NO_TARGETS = ReservedTargets({})


class PlacedPrompt(NamedTuple):
    """A prompt with the layouts of its items in it.

    Attributes:
        token_ids: the prompt.
        placements: the place of each item's layout, in prompt order.
    """

    token_ids: list[int]
    placements: list[Placement]


class NotFound(InputError):
    """An item's target is not in the prompt."""


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
        forms: the forms to try. The error is that of the last form other than MIXED, unless there
            is no other.
        tok: the vocabulary, in whose words errors name tokens; None names their ids.

    Raises:
        NotFound: an item's target is not in the prompt.
        InputError: a target or a placeholder id is left over, also one of `reserved`; a layout may
            be that of an item of either of two modalities; or a target stands inside a layout of
            another modality.
    """
    text = as_text(prompt)
    errors = _ErrorMaker(prompt, text, layouts, where, reserved, tok)
    forms_of_ids: dict[str, PromptForm] = {}
    if len(forms) > 1:
        forms_of_ids = _find_forms_of_ids(text, layouts)
        others = {name: layouts[name] for name in layouts if name not in forms_of_ids}
        if not others:
            forms = forms[:1]  # each modality has its form
        elif forms[0] is PromptForm.EXPANDED and not _has_first_layouts(text, others):
            forms = forms[1:]  # nearly always
    reason: _DoesNotFit | None = None
    for form in forms:
        search = _Search(prompt, text, layouts, reserved, form, forms_of_ids, errors)
        try:
            return search.run()
        except _DoesNotFit as does_not_fit:
            # a caller who wrote an unexpanded prompt would not understand why it is not mixed
            if reason is None or form is not PromptForm.MIXED:
                reason = does_not_fit
    assert reason is not None
    raise errors.explain(reason)


def may_be_expanded(prompt: list[int], layouts: LayoutsByModality) -> bool:
    """Return whether a prompt may have the form EXPANDED. If not, `place` refuses that form.

    It takes far less time than the error of `place`.
    """
    return _has_first_layouts(as_text(prompt), layouts)


def describe_ids(ids: Sequence[int], tok: Vocabulary | None = None) -> str:
    """Return ids for a message, as their text where there is a vocabulary that has one for them."""
    ids = list(ids)
    if len(ids) > 1 and len(set(ids)) == 1:
        return f"{describe_ids(ids[:1], tok)} * {len(ids)}"
    is_short = len(ids) <= MAX_IDS_SHOWN
    first_ids = ids if is_short else ids[:4]
    text = ""
    if tok is not None:
        text = tok.decode_target(first_ids).strip(" ")
    has_text = bool(text.strip())
    if is_short:
        return repr(text) if has_text else str(ids)
    if has_text:
        return f"{text!r}... of {len(ids)} tokens"
    numbers = ", ".join([str(token) for token in first_ids])
    return f"[{numbers}, ... {len(ids)} ids]"


# -- the search ------------------------------------------------------------------------------------


def _has_first_layouts(text: str, layouts: LayoutsByModality) -> bool:
    """Return whether the layout of the first item of each modality stands in the prompt."""
    for item_layouts in layouts.values():
        if item_layouts and item_layouts[0].tokens.text not in text:
            return False
    return True


def _find_forms_of_ids(text: str, layouts: LayoutsByModality) -> dict[str, PromptForm]:
    """Return the form in which a prompt has each modality whose items become ids only.

    The targets tell it, since no layout has the target of its item, and none may be left over:
    without any, all items are laid out; with one for each item, none is.
    """
    forms: dict[str, PromptForm] = {}
    for modality, item_layouts in layouts.items():
        if not item_layouts or not item_layouts[0].is_ids_only:
            continue
        count = _count_targets(text, item_layouts)
        if count == 0:
            forms[modality] = PromptForm.EXPANDED
        elif count >= len(item_layouts):
            forms[modality] = PromptForm.UNEXPANDED
        else:
            forms[modality] = PromptForm.MIXED
    return forms


def _count_targets(text: str, item_layouts: Sequence[ItemLayout]) -> int:
    """Return how many targets of some items stand in a prompt, without overlaps."""
    target_texts: set[str] = set()
    for layout in set(item_layouts):
        target_texts.update(layout.target_texts)
    if len(target_texts) < 2:
        return sum(text.count(target_text) for target_text in target_texts)
    longest_first = sorted(target_texts, key=len, reverse=True)
    pattern = "|".join([re.escape(target_text) for target_text in longest_first])
    return len(re.findall(pattern, text))


class _DoesNotFit(Exception):
    """The prompt does not have the form that was tried; the subclasses say why."""


class _ItemNotFound(_DoesNotFit):
    """Nothing in the prompt stands for an item."""

    def __init__(self, modality: str, index: int) -> None:
        self.modality = modality
        self.index = index


class _TokensLeftOver(_DoesNotFit):
    """A target or a placeholder of a modality remains once all items are placed."""

    def __init__(self, modality: str) -> None:
        self.modality = modality


class _TargetWithoutItem(_DoesNotFit):
    """A reserved target remains once all items are placed."""

    def __init__(self, target: Target) -> None:
        self.target = target


class Span(NamedTuple):
    """The positions of a prompt that stand for an item, from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def is_anchor(self) -> bool:
        """Whether no position stands for the item: its layout is inserted at `start`."""
        return self.start == self.stop

    def precedes(self, other: Span) -> bool:
        """Return whether this span comes first; at one position, an anchor precedes ids."""
        if self.start == other.start:
            return self.is_anchor and not other.is_anchor
        return self.start < other.start


@dataclass(slots=True)
class _Match:
    """What stands for an item in a prompt."""

    modality: str
    index: int
    span: Span


_PLACED_ITEM = chr(sys.maxunicode)
"""Stands for a placed item between the remaining parts of a prompt.

Without it, a text could match across two parts. It is the only character that is no id.
"""


class _Search:
    """The search for all items in a prompt of one form.

    Ids are searched as text; see `mmkit.language.layout.as_text`.
    """

    def __init__(
        self,
        prompt: list[int],
        text: str,
        layouts: LayoutsByModality,
        reserved: ReservedTargets,
        form: PromptForm,
        forms_of_ids: Mapping[str, PromptForm],
        errors: _ErrorMaker,
    ) -> None:
        self._prompt = prompt
        self._text = text
        self._layouts = layouts
        self._reserved = reserved
        self._form = form
        self._forms_of_ids = forms_of_ids
        self._errors = errors
        # Where each text is found next, `len(text)` for nowhere. The items of a modality mostly
        # share their texts, and each item asks for the next match of every modality: without this,
        # a text that comes late in the prompt is searched again for each item before it.
        self._next_match: dict[str, int] = {}

    def run(self) -> PlacedPrompt:
        """Place all items.

        Raises:
            _DoesNotFit: the prompt has another form.
            InputError: the prompt is refused whatever its form.
        """
        matches = self._find_items()
        self._check_leftovers(matches)
        self._check_targets_inside_layouts(matches)
        return self._write_layouts(matches)

    def _find_items(self) -> list[_Match]:
        """Return what stands for each item, from left to right."""
        matches: list[_Match] = []
        next_index: dict[str, int] = {}
        for modality, item_layouts in self._layouts.items():
            if item_layouts:
                next_index[modality] = 0
        cursor = 0
        while next_index:
            spans: dict[str, Span] = {}
            for modality, index in next_index.items():
                spans[modality] = self._find_item(modality, index, cursor)
            modality = self._choose_modality(spans, next_index)
            index = next_index[modality]
            matches.append(_Match(modality, index, spans[modality]))
            cursor = spans[modality].stop
            next_index[modality] += 1
            if next_index[modality] == len(self._layouts[modality]):
                del next_index[modality]
        return matches

    def _find_item(self, modality: str, index: int, cursor: int) -> Span:
        """Return the first span at or after the cursor that stands for an item.

        Raises:
            _ItemNotFound: there is none.
        """
        layout = self._layouts[modality][index]
        form = self._forms_of_ids.get(modality, self._form)
        span: Span | None = None
        if form is PromptForm.UNEXPANDED:
            span = find_anchor(layout, self._prompt)
        if span is None:
            span = self._find_next_match(layout.texts_in(form), cursor)
        # an anchor before the cursor is inside a target that another layout replaces
        if span is None or span.start < cursor:
            raise _ItemNotFound(modality, index)
        return span

    def _find_next_match(self, texts: Sequence[str], cursor: int) -> Span | None:
        """Return the nearest match of any of the texts at or after the cursor; None for no match.

        Where two texts match at one position, the match is that of the first text.
        """
        nowhere = len(self._text)
        nearest = nowhere
        nearest_text = ""
        for text in texts:
            start = self._next_match.get(text, -1)
            if start < cursor:
                start = self._text.find(text, cursor)
                if start < 0:
                    start = nowhere
                self._next_match[text] = start
            if start < nearest:
                nearest = start
                nearest_text = text
        if nearest == nowhere:
            return None
        return Span(nearest, nearest + len(nearest_text))

    def _choose_modality(self, spans: Mapping[str, Span], next_index: Mapping[str, int]) -> str:
        """Return the modality whose item comes next in the prompt, the first of equals.

        Raises:
            InputError: the item may also be one of another modality.
        """
        modalities = list(spans)
        first = modalities[0]
        if len(modalities) == 1:
            return first
        for modality in modalities[1:]:
            if spans[modality].precedes(spans[first]):
                first = modality
        if not spans[first].is_anchor:
            self._check_unambiguous(first, spans, next_index)
        return first

    def _check_unambiguous(
        self, first: str, spans: Mapping[str, Span], next_index: Mapping[str, int]
    ) -> None:
        """Refuse a layout that stands in the prompt and is that of two items."""
        candidates: list[str] = []
        for modality, span in spans.items():
            if span.start != spans[first].start:
                continue
            layout = self._layouts[modality][next_index[modality]]
            if not span.is_anchor and self._text[span.start : span.stop] == layout.tokens.text:
                candidates.append(modality)
        if first in candidates and len(candidates) > 1:
            layout = self._layouts[candidates[0]][next_index[candidates[0]]]
            raise self._errors.make_for_ambiguous_layout(candidates[:2], layout)

    def _check_leftovers(self, matches: Sequence[_Match]) -> None:
        """Refuse what stands for an item where no item is placed.

        Raises:
            _TokensLeftOver: it is a target or a placeholder of a modality with items.
            _TargetWithoutItem: it is a reserved target.
        """
        remaining = self._remaining_text(matches)
        if not self._may_have_leftovers(remaining):  # nearly always
            return
        for modality, item_layouts in self._layouts.items():
            for layout in set(item_layouts):
                if _contains_any(remaining, layout.leftover_texts):
                    raise _TokensLeftOver(modality)
        for target_text, target in self._reserved.texts.items():
            if target_text in remaining:
                raise _TargetWithoutItem(target)

    def _remaining_text(self, matches: Sequence[_Match]) -> str:
        """Return the prompt with one character in place of each match."""
        parts: list[str] = []
        cursor = 0
        for match in matches:
            parts.append(self._text[cursor : match.span.start])
            cursor = match.span.stop
        parts.append(self._text[cursor:])
        return _PLACED_ITEM.join(parts)

    def _may_have_leftovers(self, remaining: str) -> bool:
        """Return whether the first character of any leftover remains, a search in C for each."""
        first_characters = set(self._reserved.first_characters)
        for item_layouts in self._layouts.values():
            for layout in set(item_layouts):  # most items of a modality share one
                first_characters |= layout.first_leftover_characters
        return _contains_any(remaining, first_characters)

    def _check_targets_inside_layouts(self, matches: Sequence[_Match]) -> None:
        """Refuse a target inside a layout of another modality whose other ids would stay as text.

        The caller has written the item of that layout twice, or the item of the target in no place
        of its own.

        Raises:
            InputError: names the item of the target.
        """
        if len(self._layouts) < 2:
            return
        num_matched: list[int] | None = None
        for modality, item_layouts in self._layouts.items():
            targets = self._find_targets_of_others(modality, matches)
            target_texts = {self._text_of(target) for target in targets}
            layout_texts = {layout.tokens.text for layout in set(item_layouts)}
            for layout_text in layout_texts:
                if not _contains_any(layout_text, target_texts):  # nearly always
                    continue
                if num_matched is None:
                    num_matched = self._count_matched_positions(matches)
                self._check_targets_inside(modality, layout_text, targets, num_matched)

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
        layout_text: str,
        targets: Sequence[_Match],
        num_matched: Sequence[int],
    ) -> None:
        """Refuse a target inside one layout, wherever that layout stands in the prompt.

        Args:
            modality: the modality of the layout.
            layout_text: the layout.
            targets: the matches of other modalities that are targets, in prompt order.
            num_matched: see `_count_matched_positions`.
        """
        target_starts = [target.span.start for target in targets]
        start = self._text.find(layout_text)
        while start >= 0:
            stop = start + len(layout_text)
            is_all_matched = num_matched[stop] - num_matched[start] == len(layout_text)
            position = bisect_left(target_starts, start)
            if position < len(targets) and not is_all_matched:
                target = targets[position]
                if target.span.stop <= stop:
                    raise self._errors.make_for_target_inside(target, modality, layout_text)
            start = self._text.find(layout_text, start + 1)

    def _count_matched_positions(self, matches: Sequence[_Match]) -> list[int]:
        """Return how many positions before each position stand for items, and before the end."""
        is_matched = bytearray(len(self._text))
        for match in matches:
            length = match.span.stop - match.span.start
            is_matched[match.span.start : match.span.stop] = b"\1" * length
        return list(accumulate(is_matched, initial=0))

    def _is_target(self, match: _Match) -> bool:
        """Return whether a target stands for the item, and no layout."""
        layout = self._layouts[match.modality][match.index]
        return not match.span.is_anchor and self._text_of(match) in layout.target_texts

    def _text_of(self, match: _Match) -> str:
        return self._text[match.span.start : match.span.stop]

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


def find_anchor(layout: ItemLayout, prompt: Sequence[int]) -> Span | None:
    """Return where the first update that inserts the layout does so; None where none does."""
    for update, target in layout.updates:
        offset = update.find_anchor(prompt, target)
        if offset is not None:
            return Span(offset, offset)
    return None


def _contains_any(text: str, parts: Collection[str]) -> bool:
    """Return whether any of the parts stands in a text."""
    return any(part in text for part in parts)


# -- the errors ------------------------------------------------------------------------------------


class _ErrorMaker:
    """Makes the errors in which a prompt is refused."""

    def __init__(
        self,
        prompt: list[int],
        text: str,
        layouts: LayoutsByModality,
        where: str,
        reserved: ReservedTargets,
        tok: Vocabulary | None,
    ) -> None:
        self._prompt = prompt
        self._text = text
        self._layouts = layouts
        self._where = where
        self._reserved = reserved
        self._tok = tok

    def explain(self, reason: _DoesNotFit) -> InputError:
        """Return the error for a prompt that has none of the forms."""
        if isinstance(reason, _TargetWithoutItem):
            return self._make_for_target_without_item(reason.target)
        if isinstance(reason, _ItemNotFound):
            return self._make_for_missing_item(reason.modality, reason.index)
        assert isinstance(reason, _TokensLeftOver)
        return self._make_for_wrong_count(reason.modality, InputError)

    def make_for_ambiguous_layout(
        self, modalities: Sequence[str], layout: ItemLayout
    ) -> InputError:
        """Return the error for a layout that items of several modalities have."""
        where = ", ".join([f"{self._where}.{modality}" for modality in modalities])
        got = f"the layout {self._describe(layout.tokens.ids)}, which either has"
        remedy = "Send the prompt before it is expanded, or no item of the other."
        return InputError(where, "a prompt that tells their items apart", got, remedy)

    def make_for_target_inside(self, match: _Match, modality: str, layout_text: str) -> InputError:
        """Return the error for a target inside a layout of another modality."""
        where = f"{self._where}.{match.modality}[{match.index}]"
        target = self._describe(self._prompt[match.span.start : match.span.stop])
        layout = self._describe([ord(character) for character in layout_text])
        got = f"{target} inside {layout}, a layout of {modality}"
        remedy = "Write one target per item, or send the prompt in which every layout stands."
        return InputError(where, "a target outside layouts", got, remedy)

    def _make_for_target_without_item(self, target: Target) -> InputError:
        where = f"{self._where}.{self._reserved.modality_of[target]}"
        got = f"the target {self._describe(target)} without its item"
        remedy = "Send the item, or leave the target out."
        return InputError(where, "one item per target", got, remedy)

    def _make_for_missing_item(self, modality: str, index: int) -> InputError:
        layouts = self._layouts[modality]
        where = f"{self._where}.{modality}"
        update, target = layouts[index].updates[0]
        if isinstance(update, Insert):  # only a prefix may be missing
            expected = f"a prompt that starts with {self._describe(target)}"
            got = f"one that starts with {self._describe(self._prompt[: len(target)])}"
            return NotFound(where, expected, got)
        # item-numbered targets, or layouts of several lengths that the caller writes
        distinct_ids = {layout.unexpanded_ids for layout in layouts}
        if len(distinct_ids) > 1:
            word = _name_of_caller_ids(update)
            ids = self._describe(layouts[index].unexpanded_ids)
            expected = f"the {word} {ids} in the prompt, after those of the items before it"
            remedy = f"Write one {word} per item, in order."
            return NotFound(f"{where}[{index}]", expected, "none", remedy)
        return self._make_for_wrong_count(modality, NotFound)

    def _make_for_wrong_count(self, modality: str, error: type[InputError]) -> InputError:
        """Return the error for more or fewer targets or placeholders than the items have."""
        layouts = self._layouts[modality]
        where = f"{self._where}.{modality}"
        tokens = layouts[0].tokens
        update = layouts[0].updates[0].update
        num_placeholders = _count_among(self._prompt, tokens.embed_ids)
        if isinstance(update, Insert):
            got = self._count_placeholders(num_placeholders, tokens.embed_ids)
            remedy = "Leave them out: mmkit inserts the layouts of the items."
            return error(where, "a prompt without placeholders", got, remedy)
        ids = layouts[0].unexpanded_ids
        word = _name_of_caller_ids(update)
        count = self._text.count(as_text(ids))
        stray = num_placeholders - count * _count_among(ids, tokens.embed_ids)
        num_expected = _count_word(len(layouts), word)
        num_items = _count_word(len(layouts), "item")
        expected = f"{num_expected} {self._describe(ids)} in the prompt for {num_items}"
        got = str(count)
        remedy = f"Write one {word} per item, and nothing else with its tokens."
        if stray:
            got = f"{count}, and {self._count_placeholders(stray, tokens.embed_ids)} beside"
            if word == "target":
                layout = self._describe(tokens.ids)
                remedy = f"Write one target per item, or its whole layout, {layout}."
        return error(where, expected, got, remedy)

    def _count_placeholders(self, count: int, embed_ids: Collection[int]) -> str:
        """Return a number of placeholders in words, with the first that stands in the prompt."""
        words = _count_word(count, "placeholder")
        for token in self._prompt:
            if token in embed_ids:
                return f"{words} {self._describe([token])}"
        return words

    def _describe(self, ids: Sequence[int]) -> str:
        return describe_ids(ids, self._tok)


def _count_among(ids: Sequence[int], among: Collection[int]) -> int:
    """Return how many ids are in a collection."""
    count = 0
    for token in ids:
        if token in among:
            count += 1
    return count


def _name_of_caller_ids(update: Update) -> str:
    """Return the word for what a caller writes for an item."""
    return "target" if isinstance(update, Replace) else "layout"


def _count_word(count: int, word: str) -> str:
    plural = "" if count == 1 else "s"
    return f"{count} {word}{plural}"

"""The errors of placing: why a prompt is refused, in a sentence.

The search of `mmkit.plan.placing` raises each of them where it fails.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..errors import InputError
from ..language.layout import Insert, Replace, Target, Update, make_id_string
from ..language.vocabulary import Vocabulary, describe_ids
from .placement import ItemLayout, LayoutsByModality, ReservedTargets


class WrongForm(InputError):
    """The prompt does not have the form in which it was searched; it may have another one."""


class NotFound(WrongForm):
    """Nothing in the prompt stands for an item."""


class InsideOtherItem(WrongForm):
    """What stands for an item in the prompt is a part of what stands for another one."""


class LeftOver(WrongForm):
    """A target or a placeholder stands in the prompt where no item is placed."""


@dataclass(eq=False, slots=True)
class PlacingTask:
    """What the search has to place, and where.

    Attributes:
        prompt: token ids.
        id_string: these ids as a string; see `mmkit.language.layout.make_id_string`.
        layouts: per modality and item, the layout.
        where: names the spec in errors.
        reserved: targets of which none may be left over, also where no item has them.
        tok: the vocabulary, in whose words errors name tokens; None names their ids.
    """

    prompt: list[int]
    id_string: str
    layouts: LayoutsByModality
    where: str
    reserved: ReservedTargets
    tok: Vocabulary | None

    def describe(self, ids: Sequence[int]) -> str:
        """Return ids for a message."""
        return describe_ids(ids, self.tok)


def make_not_found(task: PlacingTask, modality: str, index: int) -> NotFound:
    """Return the error for an item for which nothing stands in the prompt."""
    layouts = task.layouts[modality]
    where = f"{task.where}.{modality}"
    update, target = layouts[index].updates[0]
    if isinstance(update, Insert):  # only a prefix may be missing
        expected = f"a prompt that starts with {task.describe(target)}"
        got = f"one that starts with {task.describe(task.prompt[: len(target)])}"
        return NotFound(where, expected, got)
    # item-numbered targets, or layouts of several lengths that the caller writes
    distinct_ids = {layout.unexpanded_ids for layout in layouts}
    if len(distinct_ids) > 1:
        word = _name_of_caller_ids(update)
        ids = task.describe(layouts[index].unexpanded_ids)
        expected = f"the {word} {ids} in the prompt, after those of the items before it"
        remedy = f"Write one {word} per item, in order."
        return NotFound(f"{where}[{index}]", expected, "none", remedy)
    sentence = _count_caller_ids(task, modality, [])
    return NotFound(where, sentence.expected, sentence.got, sentence.remedy)


def make_inside_other(
    task: PlacingTask, modality: str, index: int, owner: str, owner_ids: Sequence[int]
) -> InsideOtherItem:
    """Return the error for an item for which only a part of another item stands in the prompt.

    Args:
        task: what is placed.
        modality: the modality of the item.
        index: its number in the modality.
        owner: the other item, for example ``image[0]``.
        owner_ids: the ids of the prompt that stand for the other item.
    """
    where = f"{task.where}.{modality}[{index}]"
    layout = task.layouts[modality][index]
    update, target = layout.updates[0]
    got = f"none but in {task.describe(owner_ids)}, which stands for {owner}"
    if isinstance(update, Insert):
        expected = f"the end of the prefix {task.describe(target)} outside other items"
        remedy = "Write the target of the other item behind it."
        return InsideOtherItem(where, expected, got, remedy)
    word = _name_of_caller_ids(update)
    ids = task.describe(layout.unexpanded_ids)
    expected = f"the {word} {ids} outside other items"
    return InsideOtherItem(where, expected, got, f"Write one {word} for each item.")


def make_left_over(task: PlacingTask, modality: str, left_over: Sequence[int]) -> LeftOver:
    """Return the error for a target or a placeholder of a modality that is left over.

    Args:
        task: what is placed.
        modality: the modality; the request has items of it.
        left_over: the ids that are left over.
    """
    where = f"{task.where}.{modality}"
    layout = task.layouts[modality][0]
    if not isinstance(layout.updates[0].update, Insert):
        sentence = _count_caller_ids(task, modality, left_over)
        return LeftOver(where, sentence.expected, sentence.got, sentence.remedy)
    remedy = "Leave them out: mmkit inserts the layouts of the items."
    embed_ids = layout.tokens.embed_ids
    if not embed_ids.issuperset(left_over):  # the target of another alternative of `update`
        got = f"the target {task.describe(left_over)}"
        return LeftOver(where, "a prompt without targets", got, remedy)
    num_placeholders = _count_among(task.prompt, embed_ids)
    got = _count_placeholders(task, num_placeholders, embed_ids)
    return LeftOver(where, "a prompt without placeholders", got, remedy)


def make_left_over_target(task: PlacingTask, target: Target) -> LeftOver:
    """Return the error for a reserved target that is left over, and no item of the request has."""
    where = f"{task.where}.{task.reserved.modality_of[target]}"
    got = f"the target {task.describe(target)} without its item"
    remedy = "Send the item, or leave the target out."
    return LeftOver(where, "one item per target", got, remedy)


def make_ambiguous(task: PlacingTask, modalities: Sequence[str], ids: Sequence[int]) -> InputError:
    """Return the error for ids that are the layout of items of several modalities."""
    where = ", ".join([f"{task.where}.{modality}" for modality in modalities])
    got = f"the layout {task.describe(ids)}, which either has"
    remedy = "Send the prompt before it is expanded, or no item of the other."
    return InputError(where, "a prompt that tells their items apart", got, remedy)


def make_target_inside_layout(
    task: PlacingTask, item: str, target: Sequence[int], modality: str, layout: Sequence[int]
) -> InputError:
    """Return the error for a target inside a layout of another modality.

    Args:
        task: what is placed.
        item: the item of the target, for example ``image[0]``.
        target: the ids of the target.
        modality: the modality of the layout.
        layout: the ids of the layout.
    """
    target_in_words = task.describe(target)
    layout_in_words = task.describe(layout)
    got = f"{target_in_words} inside {layout_in_words}, a layout of {modality}"
    remedy = "Write one target per item, or send the prompt in which every layout stands."
    return InputError(f"{task.where}.{item}", "a target outside layouts", got, remedy)


# -- numbers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sentence:
    """The parts of a message but for its place."""

    expected: str
    got: str
    remedy: str


def _count_caller_ids(task: PlacingTask, modality: str, left_over: Sequence[int]) -> _Sentence:
    """Compare how often a caller wrote an item of a modality with the number of its items.

    Args:
        task: what is placed.
        modality: one whose layouts are not inserted.
        left_over: the ids that are left over, if there are any.
    """
    layouts = _list_layouts_of(task.layouts[modality], left_over)
    tokens = layouts[0].tokens
    ids = layouts[0].unexpanded_ids
    word = _name_of_caller_ids(layouts[0].updates[0].update)
    count = task.id_string.count(make_id_string(ids))
    num_expected = _count_word(len(layouts), word)
    num_items = _count_word(len(layouts), "item")
    expected = f"{num_expected} {task.describe(ids)} in the prompt for {num_items}"
    got = str(count)
    remedy = f"Write one {word} per item, and nothing else with its tokens."
    num_placeholders = _count_among(task.prompt, tokens.embed_ids)
    num_stray = num_placeholders - count * _count_among(ids, tokens.embed_ids)
    if num_stray:
        got = f"{count}, and {_count_placeholders(task, num_stray, tokens.embed_ids)} beside"
        if word == "target":
            layout = task.describe(tokens.ids)
            remedy = f"Write one target per item, or its whole layout, {layout}."
    elif count == len(layouts) and left_over:  # the target of another item, or alternative
        got = f"{count}, and {task.describe(left_over)} beside"
    return _Sentence(expected, got, remedy)


def _list_layouts_of(layouts: Sequence[ItemLayout], left_over: Sequence[int]) -> list[ItemLayout]:
    """Return the layouts for which a caller writes the ids that are left over.

    Mostly all layouts have the same ids. If none has those that are left over, these are the
    layouts with the ids of the first item.
    """
    ids = layouts[0].unexpanded_ids
    for layout in layouts:
        if layout.unexpanded_ids == tuple(left_over):
            ids = layout.unexpanded_ids
    return [layout for layout in layouts if layout.unexpanded_ids == ids]


def _count_placeholders(task: PlacingTask, count: int, embed_ids: Collection[int]) -> str:
    """Return a number of placeholders in words, with the first that stands in the prompt."""
    words = _count_word(count, "placeholder")
    for token in task.prompt:
        if token in embed_ids:
            return f"{words} {task.describe([token])}"
    return words


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

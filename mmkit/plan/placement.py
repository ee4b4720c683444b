"""What items become in a prompt, and where that stands: layouts, placements and placed prompts.

`mmkit.plan.placing` finds the place of each item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple, TypeAlias

from ..language.layout import Insert, ItemTokens, Replace, Target, Update, make_id_string


class PromptForm(Enum):
    """How far the caller has expanded a prompt. `place` tries the forms in this order.

    =========== ====================================================================
    form        what the prompt holds
    =========== ====================================================================
    EXPANDED    the layout of every item
    UNEXPANDED  the target of every item, or the place where its layout is inserted
    MIXED       the layouts of some items, and the targets of the others
    =========== ====================================================================

    Say the target of an image is ``<image>``, and the layout of each of two images ``( p p )``:

    =========== ====================================================================
    form        a prompt of it
    =========== ====================================================================
    EXPANDED    ``( p p ) and ( p p )``
    UNEXPANDED  ``<image> and <image>``
    MIXED       ``( p p ) and <image>``
    =========== ====================================================================

    A prompt that has none of these forms is refused. `place` raises `WrongForm` for a form that the
    prompt does not have, and goes on to the next one; the error of one of the forms is the refusal.
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
    def is_inserted(self) -> bool:
        """Whether an update may insert the layout where nothing stands for the item."""
        for update, _ in self.updates:
            if isinstance(update, Insert):
                return True
        return False

    @cached_property
    def target_strings(self) -> list[str]:
        """The targets that the layout replaces, as strings; see `make_id_string`."""
        strings: list[str] = []
        for update, target in self.updates:
            if isinstance(update, Replace):
                strings.append(make_id_string(target))
        return strings

    @cached_property
    def leftover_strings(self) -> frozenset[str]:
        """The strings that must not remain once all items are placed: targets and placeholders."""
        placeholders = [chr(token) for token in self.tokens.embed_ids]
        return frozenset(self.target_strings + placeholders)

    @cached_property
    def first_leftover_characters(self) -> frozenset[str]:
        """The first character of each leftover string."""
        return frozenset(string[0] for string in self.leftover_strings)

    def strings_in(self, form: PromptForm) -> list[str]:
        """Return the strings that stand for the item in a prompt.

        The leftmost match counts; of two at one position, the match of the first string.
        """
        if form is PromptForm.EXPANDED:
            return self._layout_strings
        if form is PromptForm.UNEXPANDED:
            return self._caller_strings
        return self._layout_and_target_strings

    @cached_property
    def _layout_strings(self) -> list[str]:
        return [self.tokens.id_string] if self.tokens.ids else []

    @cached_property
    def _caller_strings(self) -> list[str]:
        strings: list[str] = []
        for ids in self.caller_ids:
            if ids:
                strings.append(make_id_string(ids))
        return strings

    @cached_property
    def _layout_and_target_strings(self) -> list[str]:
        return self._layout_strings + self.target_strings


LayoutsByModality: TypeAlias = Mapping[str, Sequence[ItemLayout]]
"""The layout of each item, by modality."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of an item's layout in a prompt.

    Attributes:
        modality: name of the item's modality.
        index: the item's position among the items of its modality.
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
    def strings(self) -> dict[str, Target]:
        """The targets by their strings; see `mmkit.language.layout.make_id_string`."""
        return {make_id_string(target): target for target in self.modality_of}

    @cached_property
    def first_characters(self) -> frozenset[str]:
        """The first character of each string."""
        return frozenset(string[0] for string in self.strings)


NO_TARGETS = ReservedTargets({})


class PlacedPrompt(NamedTuple):
    """A prompt with the layouts of its items in it.

    Attributes:
        token_ids: the prompt.
        placements: the place of each item's layout, in prompt order.
    """

    token_ids: list[int]
    placements: list[Placement]

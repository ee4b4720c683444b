"""The placeholder ids of a plan, against which prompts and samples are guarded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import InputError, SpecError
from ..language.layout import ItemTokens
from ..language.vocabulary import Vocabulary, describe_ids


class IdRecorder:
    """Collects the ids of the layouts of one modality while its spec is bound.

    The guard of the plan is made of them, and then takes the place of the recorder.

    Attributes:
        embed_ids: the placeholder ids.
        literal_ids: the ids that receive no encoder row.
    """

    is_complete = False

    def __init__(self) -> None:
        self.embed_ids: set[int] = set()
        self.literal_ids: set[int] = set()

    def check_tokens(self, tokens: ItemTokens, where: str) -> None:
        """Record the ids of a layout."""
        self.embed_ids.update(tokens.embed_ids)
        self.literal_ids.update(tokens.literal_ids)

    def find_placeholders(self, ids: Collection[int]) -> list[int]:
        """Return none: the placeholders of other modalities are not known yet."""
        return []


@dataclass(frozen=True)
class PlaceholderGuard:
    """The ids that stand for items and for nothing else. It is made once, when a spec is bound.

    Attributes:
        model: names the spec in errors.
        owners: the modalities of each placeholder id.
        vocabulary: in whose words errors name tokens; None for a model without a tokenizer.
        is_for_options: whether it guards a plan for the options of a request.
    """

    is_complete = True

    model: str
    owners: Mapping[int, Sequence[str]]
    vocabulary: Vocabulary | None
    is_for_options: bool = False

    @property
    def ids(self) -> frozenset[int]:
        """All placeholder ids."""
        return frozenset(self.owners)

    def for_options(self) -> PlaceholderGuard:
        """Return this guard for a plan for the options of a request, which may add no ids."""
        return replace(self, is_for_options=True)

    def check_tokens(self, tokens: ItemTokens, where: str) -> None:
        """Refuse a layout with placeholder ids that prompts are not guarded against.

        Args:
            tokens: the evaluated layout.
            where: names the modality.

        Raises:
            SpecError: names these ids.
        """
        unguarded_ids = tokens.embed_ids - self.owners.keys()
        if not unguarded_ids:
            return
        expected = "embed() of ids that the largest or the smallest item has, too"
        remedy = "State the layout as an expression: no prompt is guarded against other ids."
        if self.is_for_options:
            expected = "embed() of ids that items have without these options, too"
            remedy = "No prompt is guarded against other ids."
        raise SpecError(f"{where}, layout", expected, repr(sorted(unguarded_ids)), remedy)

    def find_placeholders(self, ids: Collection[int]) -> list[int]:
        """Return the placeholder ids among ids, in ascending order."""
        return sorted(self.owners.keys() & set(ids))

    def check_literals(self, ids: Collection[int], where: str, modality: str = "") -> None:
        """Refuse placeholder ids where no item of their modality stands.

        In a prompt without items of that modality, they would be placeholders without an item.

        Args:
            ids: ids that a part of the spec writes, and that receive no encoder row.
            where: names the part.
            modality: the modality of the part, whose own placeholders it may write.

        Raises:
            SpecError: names the first.
        """
        for token in self.find_placeholders(ids):
            names = self.owners[token]
            if modality in names:
                continue
            expected = "ids that are no placeholder"
            if modality:
                expected += " of another modality"
            got = f"{spell_token(token, self.vocabulary)}, the placeholder of {names[0]}"
            remedy = f"Use another token: without items of {names[0]}, such a prompt is refused."
            raise SpecError(where, expected, got, remedy)

    def check_bare(self, prompt: Sequence[int], present: Collection[str]) -> None:
        """Refuse placeholder ids of modalities that have no items in the request.

        Args:
            prompt: token ids.
            present: the modalities with at least one item.

        Raises:
            InputError: names the modality and how many placeholder ids there are.
        """
        bare_ids = self._find_ids_without(frozenset(present))
        if bare_ids.isdisjoint(prompt):
            return
        token = min(bare_ids.intersection(prompt))
        name = self.owners[token][0]
        count = list(prompt).count(token)
        word = "placeholder" if count == 1 else "placeholders"
        got = f"{count} {word} {describe_ids([token], self.vocabulary)} and no item"
        remedy = f'Send items of "{name}", or leave the placeholders out.'
        raise InputError(f"{self.model}.{name}", "one item per placeholder", got, remedy)

    def _find_ids_without(self, present: frozenset[str]) -> frozenset[int]:
        """Return the placeholder ids of no modality among these.

        They are found once for each set of modalities that requests have.
        """
        ids = self._ids_without.get(present)
        if ids is None:
            absent_ids = set()
            for token, names in self.owners.items():
                if present.isdisjoint(names):
                    absent_ids.add(token)
            ids = self._ids_without[present] = frozenset(absent_ids)
        return ids

    @cached_property
    def _ids_without(self) -> dict[frozenset[str], frozenset[int]]:
        return {}


def spell_token(token: int, vocabulary: Vocabulary | None) -> str:
    """Return a token for messages, as text where there is a tokenizer."""
    if vocabulary is None:
        return str(token)
    return repr(vocabulary.decode([token]))

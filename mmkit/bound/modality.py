"""One modality of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..errors import InputError, SpecError
from ..expr import Scope, truth
from ..items import ItemType
from ..layout import Placeholder
from ..placement import Alternatives
from ..spec import Modality
from ..updates import AlreadyExpanded, Replace, Target
from .binding import Binding
from .intake import Intake, Taken
from .memo import Memo
from .placeholders import Placeholders
from .positions import Positions
from .processing import Processing

_COUNTS = 4096
"""The numbers of items for which `may_cache` is remembered."""

_STEPS = 1024
"""The steps in which the sizes of the largest item are fitted to the context."""

_ADAPTED = 64
"""The most values that an adapter may cache per modality."""


class Layouts(NamedTuple):
    """The layouts and targets of an item, for every index among those of its modality.

    Attributes:
        placeholders: those of its modality.
        alternatives: those of the item at the index of `scope`.
        scope: that to evaluate them again at another index; None where the index does not matter:
            a scope keeps processed tensors alive.
        embeds: whether the item is precomputed embeddings.
    """

    placeholders: Placeholders
    alternatives: Alternatives
    scope: Scope | None
    embeds: bool

    @classmethod
    def of(cls, placeholders: Placeholders, scope: Scope, *, embeds: bool) -> Layouts:
        """Those of the item of a scope."""
        alternatives = placeholders.alternatives(scope, embeds=embeds)
        return cls(
            placeholders, alternatives, scope if placeholders.depends_on_index else None, embeds
        )

    @property
    def placeholder(self) -> Placeholder:
        """The layout, which all alternatives share."""
        return self.alternatives[0].placeholder

    def at(self, index: int) -> Alternatives:
        """The alternatives of the item at an index."""
        if self.scope is None or self.scope.item.index == index:
            return self.alternatives
        item = SimpleNamespace(**{**vars(self.scope.item), "index": index})
        return self.placeholders.alternatives(replace(self.scope, item=item), embeds=self.embeds)


class BoundModality:
    """A modality, bound to one config and tokenizer.

    Attributes:
        spec: the declaration.
        where: names the modality in errors, for example ``robot.actions``.
        item: the item type, bound.
        intake: turns a caller's data into canonical items.
        processing: turns canonical items into processed fields.
        placeholders: the layouts and targets of items.
        positions: its M-RoPE positions; None where the spec has none.
        fields: the bound fields that the model receives for raw items.
        fields_and_embeds: these, and the field of precomputed embeddings, where the spec takes any.
        limit: the most items in one request, or None.
        needs_hf: whether the layout or the targets need, or may need, the output of the Hugging
            Face processor.
        adapted: a cache for values that an adapter derives from the modality.
        process: a function from an item that the spec itself states to its processed fields, by
            whatever `process` of the spec is.

    Args:
        max_model_len: the longest context, into which the largest item has to fit; None for any.
    """

    def __init__(
        self,
        spec: Modality,
        where: str,
        scope: Scope,
        process: Callable[[Any], Mapping[str, Any]],
        max_model_len: int | None = None,
    ) -> None:
        binding = Binding(spec, where, scope)
        self.spec, self.name, self.where, self.item = spec, spec.name, where, binding.item
        self.limit = binding.limit
        self.placeholders = Placeholders(spec, binding)
        self.intake = Intake(spec, binding, partial(self.placeholders.rows, embeds=True))
        self.processing = Processing(spec, binding)
        self.positions = None if spec.positions is None else Positions(binding)
        own = self.positions.leaves() if self.positions else frozenset()
        # items of one geometry have one grid
        self._checks_once = self.placeholders.tells(own)
        self.fields = self.processing.sent
        self.fields_and_embeds = dict(self.fields)
        if self.intake.takes_embeds:
            self.fields_and_embeds[self.intake.embeds_field] = self.intake.embeds_as
        self.scope = binding.scope
        read, known = self.placeholders.fields, self.processing.from_facts
        self._needs_fields = read is None or not read <= known
        self.needs_hf = self.processing.hf is not None and self._needs_fields
        self.process = process
        # the cheapest function for the fields that the layout of an item reads
        self._fields_read = process if self._needs_fields else self.processing.of_facts
        self._max_model_len = max_model_len
        if self.needs_hf and (candidates := len(binding.item.candidates(0.0))) > 1:
            expected = "one largest item, since only the Hugging Face processor tells its rows"
            remedy = "State a layout over the facts of item, or the one with the most rows."
            got = f"{candidates} of them"
            raise SpecError(f"{where}, item", expected, got, remedy)
        self.adapted = Memo(_ADAPTED)
        self._may_cache = lru_cache(_COUNTS)(partial(_may_cache, spec, binding))
        self._largest: dict[Any, tuple[Any, int]] = {}

    def may_cache(self, count: int) -> bool:
        """Whether vLLM may cache the processed items of a request with `count` of them."""
        return self._may_cache(count)

    def check_positions(self, fields: Mapping[str, Any], known: Alternatives) -> None:
        """Compare the declared positions of an item with its layout; see `Positions.check`.

        Args:
            fields: its processed fields.
            known: its alternatives, which share the layout.
        """
        if self.positions is None or (known.positions_checked and self._checks_once):
            return
        self.positions.check(fields, known[0].placeholder)
        known.positions_checked = True

    def layouts(
        self,
        taken: Taken,
        fields: Sequence[Mapping[str, Any]],
        *,
        are_largest: bool = False,
        may_be_larger: bool = False,
    ) -> Iterator[Layouts]:
        """The layouts of some items.

        Args:
            taken: the items.
            fields: their processed fields, as far as layouts read them.
            are_largest: whether each of them is the largest item of the spec.
            may_be_larger: whether they may have more encoder rows than that.

        Raises:
            InputError: see `Placeholders.check_rows`.
        """
        fixed, most = self._fixed(taken.embeds), None
        if fixed is None and not are_largest and not may_be_larger:
            most = self.most_rows()
        for index, (value, own) in enumerate(zip(taken.values, fields, strict=True)):
            layouts = fixed
            if layouts is None:
                scope = self.scope(value, index, own, taken.total)
                layouts = Layouts.of(self.placeholders, scope, embeds=taken.embeds)
            rows = layouts.placeholder.num_embeds
            if are_largest and not self.placeholders.by_company:
                self._largest.setdefault((), (value, rows))
            sent = len(value.rows) if taken.embeds else None
            self.placeholders.check_rows(index, rows, sent=sent, most=most)
            yield layouts

    def _fixed(self, embeds: bool) -> Layouts | None:
        """The layouts of all items; None where they vary."""
        if self.placeholders.varies(embeds):
            return None
        return self.adapted.get(
            embeds,
            lambda: Layouts.of(self.placeholders, self.scope(SimpleNamespace(), 0), embeds=embeds),
        )

    def written(
        self, taken: Taken, fields: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]]
    ) -> Iterator[tuple[Target, Sequence[int]]]:
        """The target of each item, and the ids that a caller writes for it, by the first update.

        Args:
            taken: all items of the modality.
            fields: a function that returns their processed fields, by modality; called where
                layouts or targets need them.
        """
        update = self.placeholders.updates[0]
        roots = {leaf.root for leaf in update.leaves()}
        if isinstance(update, AlreadyExpanded) or not roots.isdisjoint(("fields", "function")):
            for one in self.layouts(taken, fields()[self.name], may_be_larger=True):
                yield one.alternatives[0].target, one.alternatives[0].written
            return
        for index, value in enumerate(taken.values):
            target = update.resolve(self.scope(value, index, None, taken.total))
            yield target, target if isinstance(update, Replace) else ()

    def fields_of(self, values: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
        """The processed fields of items as far as their layouts read them, where these need no
        Hugging Face processor."""
        if self._needs_fields:
            return self.processing.run(values)
        known = self.processing.of_facts
        return [known(value, i, len(values)) for i, value in enumerate(values)]

    def largest(self, sizes: Mapping[str, int] | None = None) -> tuple[Any, int]:
        """The item with the most encoder rows, and the number of these rows. An item whose layout
        is longer than the context is made smaller, unless only the Hugging Face processor knows
        its rows.

        Args:
            sizes: its largest sizes, under the names of vLLM's `limit_mm_per_prompt`; None for
                those of the spec.

        Raises:
            InputError: sizes that items of this type do not have.
        """
        key = tuple((sizes or {}).items())
        if key in self._largest:
            return self._largest[key]
        item = self.item.within(sizes, self.where) if sizes else self.item
        value, placeholder = self._largest_of(item.candidates())
        most = self._max_model_len
        if most is not None and len(placeholder) > most and not self.needs_hf:
            value, placeholder = self._largest_within(most, item)
        self._largest[key] = value, placeholder.num_embeds
        return self._largest[key]

    def largest_item(self, sizes: Mapping[str, int] | None = None) -> Any:
        """The item with the most encoder rows, as for `largest`; a single candidate is not
        processed."""
        if self.needs_hf:
            item = self.item.within(sizes, self.where) if sizes else self.item
            return item.candidates()[0]
        return self.largest(sizes)[0]

    def _largest_of(self, candidates: Sequence[Any]) -> tuple[Any, Placeholder]:
        placed = [
            (value, self._placeholder(value, self._fields_read(value))) for value in candidates
        ]
        return max(placed, key=lambda one: one[1].num_embeds)  # the first of equals

    def _largest_within(self, most: int, item: ItemType) -> tuple[Any, Placeholder]:
        """The largest item whose layout fits into a context: of smaller sizes in equal parts."""
        fitting, too_large = 0, _STEPS
        while too_large - fitting > 1:
            step = (fitting + too_large) // 2
            _, placeholder = self._largest_of(item.candidates(step / _STEPS))
            if len(placeholder) > most:
                too_large = step
            else:
                fitting = step
        return self._largest_of(item.candidates(fitting / _STEPS))

    def most_rows(self) -> int | None:
        """Encoder rows of the largest item; None where they depend on the other items of the
        request."""
        return None if self.placeholders.by_company else self.largest()[1]

    def rehearse(self) -> list[Placeholder]:
        """The placeholders of the largest and the smallest item, where they need no Hugging Face
        processor.

        Raises:
            SpecError: a mistake that would otherwise fail the first request.
        """
        if self.needs_hf:
            return []
        # a function of the spec is tried out even where the layout does not need it
        run = self.process if self.processing.hf is None else self.processing.of_facts
        candidates, small = self.item.candidates(), self.item.smallest()
        self.processing.rehearse([*candidates[:1], *small[:1]])
        largest = [self._placeholder(value, run(value)) for value in candidates]
        smallest = [self._placeholder(value, run(value)) for value in small]
        most = max(one.num_embeds for one in largest)
        for rows in [one.num_embeds for one in smallest]:
            if rows > most and not self.placeholders.by_company:
                expected = "the most encoder rows for the largest item"
                remedy = "State `largest=`, the shape of the item with the most."
                got = f"{most}, and {rows} for the smallest"
                raise SpecError(f"{self.where}, item", expected, got, remedy)
        return largest + smallest

    def _placeholder(self, value: Any, fields: Mapping[str, Any] | None) -> Placeholder:
        """The evaluated layout of a raw item that is the only one, and that the spec chose."""
        try:
            return self.placeholders.preferred(self.scope(value, 0, fields))
        except InputError as error:
            raise SpecError(str(error)) from error


def _may_cache(spec: Modality, binding: Binding, count: int) -> bool:
    with binding.at("cacheable"):
        return truth(spec.cacheable, binding.static.of(SimpleNamespace(count=count), None))

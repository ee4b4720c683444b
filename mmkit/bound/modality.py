"""One modality of a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

from ..errors import SpecError
from ..expr import Scope, evaluate, truth
from ..layout import Placeholder
from ..placement import Alternative
from ..spec import Modality
from .binding import Binding
from .intake import Intake
from .memo import Memo
from .placeholders import Placeholders
from .processing import Processing

logger = logging.getLogger(__name__)

_COUNTS = 4096
"""Numbers of items for which it is cached whether they may be cached."""

_ADAPTED = 64
"""Forms of one modality that an adapter may cache."""


class BoundModality:
    """A modality, bound to one config and tokenizer.

    Attributes:
        spec: the declaration.
        where: names the modality in errors, as ``robot.actions``.
        item: the item type, bound.
        intake: what a caller sends, as canonical items.
        processing: canonical items to processed fields.
        placeholders: what an item becomes in the prompt.
        fields: the fields that the model receives, bound.
        limit: the most items in one request, or None.
        needs_hf: the layout or the targets need, or may need, the output of the Hugging Face
            processor.
        adapted: what an adapter derives from the modality, for as long as this lives.
    """

    def __init__(self, spec: Modality, where: str, scope: Scope) -> None:
        binding = Binding(spec, where, scope)
        self.spec, self.name, self.where, self.item = spec, spec.name, where, binding.item
        with (at := binding.at("limit")):
            limit: int | None = evaluate(spec.limit, binding.static)
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
        ):
            raise SpecError(at.where, "a whole number >= 0 or None", repr(limit))
        self.limit = limit
        self.placeholders = Placeholders(spec, binding, limit)
        self.intake = Intake(spec, binding, partial(self.placeholders.rows, embeds=True))
        self.processing = Processing(spec, binding)
        self.fields = self.processing.sent
        self.scope = binding.scope
        self.needs_hf = self.processing.hf is not None and self.placeholders.reads_fields
        self.adapted = Memo(_ADAPTED)
        self._may_cache = lru_cache(_COUNTS)(partial(_may_cache, spec, binding))
        self._largest: dict[Any, tuple[Any, int]] = {}

    def may_cache(self, count: int) -> bool:
        """Whether items of a request with `count` of them may be kept in vLLM's processor cache."""
        return self._may_cache(count)

    def alternatives(
        self, values: Sequence[Any], fields: Sequence[Mapping[str, Any] | None], embeds: bool
    ) -> Iterator[list[Alternative]]:
        """The alternatives of each item of a request, without vLLM.

        Raises:
            InputError: see `Placeholders.check_rows`.
        """
        for i, (value, own) in enumerate(zip(values, fields, strict=True)):
            sent = len(value.rows) if embeds else None
            facts = SimpleNamespace(index=i, rows=sent) if embeds else value
            scope = self.scope(facts, i, own, len(values))
            known = self.placeholders.alternatives(scope, embeds=embeds)
            rows = known[0].placeholder.num_embeds
            self.placeholders.check_rows(i, rows, sent=sent, most=self.most_rows())
            yield known

    def largest(
        self,
        process: Callable[[Any], Mapping[str, Any]] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> tuple[Any, int]:
        """The item with the most encoder rows, and how many they are.

        Args:
            process: a canonical item to its processed fields; wanted where `needs_hf` holds.
            sizes: its sizes at most, as vLLM's `limit_mm_per_prompt` names them; None for those of
                the spec.

        Raises:
            InputError: sizes that items of this type do not have.
        """
        key = tuple((sizes or {}).items())
        if key in self._largest:
            return self._largest[key]
        candidates = (self.item.within(sizes, self.where) if sizes else self.item).candidates()
        if self.needs_hf and len(candidates) > 1:
            costs = "%s: the Hugging Face processor takes %d items to tell the largest of them."
            remedy = "State that one alone, or a layout over the facts of item."
            logger.warning(f"{costs} {remedy}", self.where, len(candidates))
        run = (process or self._process_one) if self.placeholders.reads_fields else _no_fields
        rows = [self._placeholder(value, run(value)).num_embeds for value in candidates]
        self._largest[key] = candidates[rows.index(max(rows))], max(rows)
        return self._largest[key]

    def most_rows(self, process: Callable[[Any], Mapping[str, Any]] | None = None) -> int | None:
        """Encoder rows of the largest item.

        None where they depend on the other items of the request, or where only the Hugging Face
        processor can tell and no `process` calls it.
        """
        if self.placeholders.by_company or (self.needs_hf and process is None):
            return None
        return self.largest(process)[1]

    def rehearse(self) -> list[Placeholder]:
        """The placeholders of the largest and the smallest item, as far as they need no Hugging
        Face processor.

        Raises:
            SpecError: what would fail at the first request.
        """
        if self.needs_hf:
            return []
        run = self._process_one if self.processing.hf is None else _no_fields
        largest = [self._placeholder(value, run(value)) for value in self.item.candidates()]
        smallest = [self._placeholder(value, run(value)) for value in self.item.smallest()]
        most = max(one.num_embeds for one in largest)
        for rows in [one.num_embeds for one in smallest]:
            if rows > most and not self.placeholders.by_company:
                expected = "the most encoder rows for the largest item"
                remedy = "State `largest=`, the shape of the item with the most."
                got = f"{most}, and {rows} for the smallest"
                raise SpecError(f"{self.where}, item", expected, got, remedy)
        return largest + smallest

    def _process_one(self, value: Any) -> Mapping[str, Any]:
        return self.processing.run([value]).parts[0]

    def _placeholder(self, value: Any, fields: Mapping[str, Any] | None) -> Placeholder:
        """The evaluated layout of a raw item that is the only one."""
        return self.placeholders.preferred(self.scope(value, 0, fields))


def _may_cache(spec: Modality, binding: Binding, count: int) -> bool:
    with binding.at("cacheable"):
        return truth(spec.cacheable, binding.static.of(SimpleNamespace(count=count), None))


def _no_fields(value: Any) -> None:
    """The processed fields of an item whose layout reads none."""

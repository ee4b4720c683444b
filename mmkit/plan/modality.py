"""One modality of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import (
    ErrorCollector,
    InputError,
    MmkitError,
    SpecError,
    locate_errors,
    report_as_spec_error,
)
from ..language.expr import Fields, Scope, evaluate, holds
from ..language.field import HF, Batched, Constant, Field, Identity
from ..language.items import ItemType, options_of, unscoped
from ..language.items.tensor import Tensor
from ..language.layout import (
    AlreadyExpanded,
    Insert,
    ItemTokens,
    Layout,
    Replace,
    Target,
    Update,
    to_whole,
)
from ..language.modality import Modality
from ..language.node import fold
from .forms import Form, form_of, has_form
from .hf_calls import LazyProcessor
from .layouts import EmbeddingLayoutEvaluator, LayoutEvaluator, TooManyRows
from .parsing import Embedding, ItemParser, Taken
from .placement import ItemLayout
from .processing import FieldProcessor, Processed
from .rehearsal import rehearse

_STEPS = 1024
"""The steps in which all sizes of the largest item are made smaller together."""


@dataclass(frozen=True, eq=False)
class Numbered(ItemLayout):
    """The alternatives of an item whose layout or targets depend on its position. They keep its
    scope, and with it processed tensors, alive.

    Attributes:
        here: those at its own position, which items of one geometry share.
        scope: that of the item.
        evaluate: the alternatives in another scope.
    """

    here: ItemLayout
    scope: Scope
    evaluate: Callable[[Scope], ItemLayout]

    def for_index(self, index: int) -> ItemLayout:
        if self.scope.item.index == index:
            return self.here
        item = SimpleNamespace(**{**vars(self.scope.item), "index": index})
        return self.evaluate(replace(self.scope, item=item))


class _Facts(SimpleNamespace):
    """The facts of an item that do not change while it is cached."""

    def __getattr__(self, name: str) -> Any:
        if name in ("index", "count"):
            problem = "has no value here: items are cached by their content."
            raise SpecError(f"item.{name} {problem} Say by cacheable= when items may be kept.")
        raise AttributeError(f"an item has no attribute {name!r}")


class Learned:
    """What a modality learns from the items of its spec after it is bound.

    The plans for the options of requests are not rehearsed: their modalities have the `Learned` of
    the server's plan itself, so that nothing of it can be forgotten.

    Attributes:
        guarded: the placeholder ids of the plan, to which no item and no option adds any; None as
            long as they are not known.
        placeholder_texts: the tokens that stand for items in a prompt, as texts, which no text in
            an item may spell; empty as long as they are not known.
        shares_memory: see `FieldProcessor`.
    """

    def __init__(self, modality: BoundModality) -> None:
        self._modality = modality
        self.guarded: frozenset[int] | None = None
        self.placeholder_texts: Sequence[str] = ()
        self.shares_memory = False

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        """The form of each field of raw items, which all requests have in common."""
        modality = self._modality
        processed = {name for name in modality.checked if not modality.fields[name].is_derived}
        forms: dict[str, Form] = {}
        for value in (*reversed(modality.item.small()), *modality.item.candidates()):
            # the processor may take no small item; that it takes the largest, vLLM's start shows
            with suppress(MmkitError):
                of_item = modality.forms_of(modality.process(value))
                forms = {**of_item, **forms}
                # a small item may leave a list empty; larger ones take time
                if forms.keys() >= processed:
                    break
        return forms


class BoundModality:
    """A modality, bound to one config and tokenizer: everything evaluated that depends on these
    alone.

    Attributes:
        spec: the declaration.
        model: names the spec in errors.
        where: names the modality in errors, for example ``robot.actions``.
        static: the scope without an item.
        options: those `mm_processor_kwargs` of its plan that concern its items; see `options_of`.
        dtype: that of the floats of Hugging Face processors; None leaves them as they are.
        item: the item type.
        updates: the alternatives of `update`.
        fields: the fields that the model receives for raw items.
        fields_and_embeds: these, and the field of precomputed embeddings, where the spec takes any.
        grid: the sizes of its grid of M-RoPE positions; empty where the spec has none.
        limit: the most items in one request, or None.
        parser: turns a caller's data into canonical items.
        field_processor: turns canonical items into processed fields.
        layout_evaluator: the layouts and targets of items.
        embedding_layout_evaluator: those of precomputed embeddings.
        embed_ids: the placeholder ids that are known without an item, or that items had so far.
        checked: the fields of which all items must have one form.
        learned: what its items taught.
        sends_rows: whether each item comes to the model with the number of its encoder rows: where
            items differ in it, where options of the request change it, and where no field tells how
            many items there are.
        literal_ids: the ids of layouts that receive no encoder row, as far as they are known
            without an item, or the rehearsed items have them.
        needs_fields: whether the layout or the targets read, or may read, what `process` returns.
        needs_hf: whether the layout or the targets need, or may need, the output of the Hugging
            Face processor.
        adapted: what an adapter has derived from the modality.

    Args:
        vocab_size: number of ids of the language model.
        max_model_len: the longest context, into which the largest item has to fit; None for any.
        base: the same modality of the server's plan, for the plan of a request's options.

    Raises:
        SpecError: a part that cannot be bound; `others` has the errors of the other parts.
    """

    def __init__(
        self,
        spec: Modality,
        model: str,
        scope: Scope,
        dtype: torch.dtype | None,
        vocab_size: int,
        max_model_len: int | None,
        base: BoundModality | None = None,
    ) -> None:
        self.spec, self.name, self.model = spec, spec.name, model
        self.where = f"{model}.{spec.name}"
        self.is_of_request = base is not None
        self.learned: Learned = Learned(self) if base is None else base.learned
        self.dtype, self._max_model_len = dtype, max_model_len
        self.options = options_of(spec.item, scope.kwargs)
        processor = scope.proc
        if isinstance(processor, LazyProcessor):
            processor = processor.configured_for(spec.item)
        self.static: Scope = replace(
            scope, kwargs=unscoped(spec.item, scope.kwargs), proc=processor
        )
        refusals = ErrorCollector()

        def bound(part: str, declared: Any) -> Any:
            with refusals.collect(), self.at(part):
                return fold(declared, self.static)

        item: ItemType = bound("item", spec.item)
        layout: Layout = bound("layout", spec.layout)
        # an empty layout stands at offset 0, as vLLM's own
        updates = spec.update if spec.has_positions else [Insert(at="start")]
        self.updates: list[Update] = [bound("update", update) for update in updates]
        fields: dict[str, Field] = {
            name: bound("fields", field) for name, field in spec.fields.items()
        }
        hf: HF | None = bound("process", spec.process if isinstance(spec.process, HF) else None)
        own = spec.embeds_layout is spec.layout
        of_embeds: Layout = layout if own else bound("embeds", spec.embeds_layout)
        companions: dict[str, Tensor] = bound("embeds", spec.companions())
        self.grid: Sequence[Any] = bound("positions", spec.positions or ())
        with refusals.collect(), self.at("limit"):
            limit = evaluate(spec.limit, self.static)
            self.limit = None if limit is None else to_whole(limit, spec.limit, "the most items")
        refusals.raise_first()
        self.item: ItemType = item if hf else item.for_function()
        self.embed_ids: set[int] = set()
        self.literal_ids: set[int] = set()
        self.layout_evaluator = LayoutEvaluator(self, layout, vocab_size)
        self.embedding_layout_evaluator = self.layout_evaluator
        if spec.embeds:
            self.embedding_layout_evaluator = EmbeddingLayoutEvaluator(self, of_embeds, vocab_size)
        self.parser = ItemParser(self, companions)
        self.field_processor = FieldProcessor(self, fields, hf)
        self.fields = {name: field for name, field in fields.items() if not field.hidden}
        # items without a process are checked when they are read, and constants make no batch
        is_processed = not isinstance(spec.process, Identity)
        self.checked = [
            name
            for name, field in self.fields.items()
            if not isinstance(field, Constant) and (is_processed or field.is_derived)
        ]
        self.fields_and_embeds = dict(self.fields)
        if self.parser.takes_embeds:
            self.fields_and_embeds[self.parser.embeds_field] = self.parser.embeds_as
        tells_items = any(isinstance(field, Batched) for field in self.fields.values())
        fixed_rows = self.layout_evaluator.fixed_rows
        # a fixed number is known to the model from the server's plan, unless options change it
        is_known = fixed_rows is not None and (
            base is None or base.layout_evaluator.fixed_rows == fixed_rows
        )
        self.sends_rows = not (is_known and tells_items)
        read = self.layout_evaluator.fields
        self.needs_fields = read is None or not read <= self.field_processor.from_facts
        self.needs_hf = hf is not None and self.needs_fields
        if self.needs_hf and (candidates := len(item.candidates(0.0))) > 1:
            expected = "one largest item, since only the Hugging Face processor tells its rows"
            remedy = "State a layout over the facts of item, or the one with the most rows."
            raise SpecError(f"{self.where}, item", expected, f"{candidates} of them", remedy)
        # functions may read what changes while an item is cached; of expressions, the spec knows it
        has_functions = any(dependency.root == "function" for dependency in spec.dependencies())
        self._hides = spec.cacheable is True and has_functions
        self.adapted: dict[Any, Any] = {}

    def at(self, part: str) -> locate_errors:
        """A context in which errors name a part of the modality."""
        return locate_errors(f"{self.where}, {part}")

    @property
    def guarded(self) -> frozenset[int] | None:
        """See `Learned`."""
        return self.learned.guarded

    @property
    def is_never_kept(self) -> bool:
        """Whether vLLM may keep nothing of an item, whatever request it is in."""
        return self.spec.cacheable is False

    def may_cache(self, count: int) -> bool:
        """Whether vLLM may cache each of the processed items of a request with `count` of them
        alone."""
        if isinstance(self.spec.cacheable, bool):
            return self.spec.cacheable
        with self.at("cacheable"):
            return holds(
                self.spec.cacheable, self.static.for_item(SimpleNamespace(count=count), None)
            )

    def scope(
        self,
        value: Any,
        index: int,
        fields: Mapping[str, Any] | None = None,
        count: int = 1,
        *,
        of_fields: bool = False,
    ) -> Scope:
        """The scope of one item.

        Args:
            value: the canonical item, its precomputed embeddings, or its facts.
            index: its position among the items of the modality.
            fields: its processed fields.
            count: number of items of the modality in the request.
            of_fields: whether for processed fields, which come back for an item of that content
                at any index.
        """
        if isinstance(value, SimpleNamespace):
            facts = value
        elif isinstance(value, Embedding):
            facts = SimpleNamespace(index=index, rows=len(value.rows))
        else:
            facts = self.item.facts(value, index)
        if self._hides:
            facts = _Facts(**vars(facts))
            if of_fields:
                del facts.index
        else:
            facts.count = count
        if fields is not None and not isinstance(fields, Fields):
            fields = Fields(fields)
        return self.static.for_item(facts, fields)

    def layouts(
        self, taken: Taken, fields: Processed | None = None, *, may_be_larger: bool = False
    ) -> Iterator[ItemLayout]:
        """The layouts of some items, and the ways in which they may get into a prompt.

        Args:
            taken: the items.
            fields: their processed fields, as far as layouts read them; None where they are to be
                computed.
            may_be_larger: whether they may have more encoder rows than the largest item.

        Raises:
            InputError: precomputed embeddings of other rows than their layout has.
            TooManyRows: an item has more encoder rows than the spec's largest item, for which vLLM
                reserves memory and plans its schedule.
        """
        placeholders, most = self.layout_evaluator, None
        if taken.embeds:
            placeholders = self.embedding_layout_evaluator
        may_be_larger |= taken.are_largest or placeholders.by_company
        if placeholders.varies and not may_be_larger:
            most = self.most_rows
        fields = self.read(taken) if fields is None else fields
        for index, (value, own) in enumerate(zip(taken.values, fields, strict=True)):
            if (alternatives := placeholders.shared) is None:
                scope = self.scope(value, index, own, taken.total)
                alternatives = placeholders.alternatives(scope)
                if placeholders.depends_on_index:
                    parts = alternatives.tokens, alternatives.updates
                    evaluate = placeholders.alternatives
                    alternatives = Numbered(*parts, alternatives, scope, evaluate)
                elif not placeholders.varies:
                    placeholders.shared = alternatives
            rows = alternatives.tokens.num_embeds
            if taken.are_largest and self.needs_hf and not placeholders.by_company:
                # the Hugging Face processor is not called for it again
                vars(self).setdefault("_stated_largest", (value, alternatives.tokens))
            if taken.embeds and rows != len(value.rows):
                expected = f"{rows} embedding row(s)"
                raise InputError(f"{self.where}[{index}]", expected, str(len(value.rows)))
            if most is not None and rows > most:
                self._refuse_rows(rows, f"{self.where}[{index}]")
            yield alternatives

    def _refuse_rows(self, rows: int, where: str) -> None:
        """Refuse an item that has more encoder rows than the largest item, or than the context has
        positions.

        Raises:
            TooManyRows: the former.
            InputError: the latter.
        """
        if rows > self.stated_rows:
            expected = f"at most {self.stated_rows} encoder row(s), as the stated largest item has"
            remedy = "Send a smaller item, or state a larger `largest=` in the spec."
            raise TooManyRows(where, expected, str(rows), remedy)
        expected = f"at most {self._max_model_len} encoder row(s), as the context has positions"
        raise InputError(where, expected, str(rows), "Send a smaller item.")

    def written(self, taken: Taken) -> list[tuple[Target, Target]]:
        """The target of each item, and the ids that a caller writes for it, by the first update.
        Items are processed where layouts or targets need it."""
        update = self.updates[0]
        roots = {dependency.root for dependency in update.dependencies()}
        if isinstance(update, AlreadyExpanded) or not roots.isdisjoint(("fields", "function")):
            layouts = self.layouts(taken, may_be_larger=True)
            return [(own.updates[0].target, own.caller_ids[0]) for own in layouts]
        is_replaced = isinstance(update, Replace)
        total = taken.total
        scopes = [self.scope(value, i, None, total) for i, value in enumerate(taken.values)]
        return [
            (target, target if is_replaced else ()) for target in map(update.resolve_target, scopes)
        ]

    def process(self, value: Any) -> dict[str, Any]:
        """The processed fields of an item that the spec itself states.

        Raises:
            SpecError: the item is refused, or the outputs contradict the declared fields.
        """
        with report_as_spec_error(remedy=self.item.remedy):
            return self.field_processor.run(Taken.whole([value]))[0]

    def forms_of(self, fields: Mapping[str, Any]) -> dict[str, Form]:
        """Return the forms of the fields of an item, as far as it tells them."""
        forms: dict[str, Form] = {}
        for name in self.checked:
            if (form := form_of(fields[name], self.fields[name])) is not None:
                forms[name] = form
        return forms

    def check_forms(self, processed: Processed) -> None:
        """Refuse processed raw items whose fields have another form than those of other requests.

        Args:
            processed: the fields of each item; those that an item lacks are not looked at.

        Raises:
            InputError: names the first.
        """
        for index, fields in enumerate(processed):
            for name, expected in self.learned.forms.items():
                part = fields.get(name)
                if has_form(part, expected):
                    continue
                form = form_of(part, self.fields[name])
                if form not in (None, expected):
                    where = f"{self.where}[{index}], fields[{name!r}]"
                    remedy = "The items of all requests share a batch: send one of another dtype."
                    if self.options:
                        options = " and ".join(sorted(self.options))
                        remedy = (
                            f"Leave out those of mm_processor_kwargs that change it: {options}."
                        )
                    raise InputError(where, f"{expected}, as all items have", str(form), remedy)

    def read(self, taken: Taken) -> Processed:
        """The processed fields of some items as far as their layouts read them.

        Errors as for `FieldProcessor.run`.
        """
        if taken.embeds:
            return taken.values
        processing = self.field_processor
        return processing.run(taken) if self.needs_fields else processing.of_facts(taken)

    @cached_property
    def _stated_largest(self) -> tuple[Any, ItemTokens]:
        """The item with the most encoder rows that the spec states, and its layout, which may be
        longer than the context."""
        return self._of_most_rows(self.item.candidates())

    @property
    def stated_rows(self) -> int:
        """The number of encoder rows of the largest item that the spec states."""
        return self._stated_largest[1].num_embeds

    @property
    def most_rows(self) -> int:
        """The most encoder rows of an item of any request: those of the stated largest item, as far
        as the context has positions for them."""
        if self._max_model_len is None:
            return self.stated_rows
        return min(self.stated_rows, self._max_model_len)

    @property
    def is_fitted(self) -> bool:
        """Whether the largest item is longer than the context, so that `largest` is another one."""
        length = len(self._stated_largest[1])
        return self._max_model_len is not None and length > self._max_model_len

    @cached_property
    def largest(self) -> tuple[Any, int]:
        """The item with the most encoder rows among those that fit the context, and the number of
        these rows, which may be fewer than `most_rows`."""
        value, placeholder = self._fitted(self.item, self._stated_largest)
        return value, placeholder.num_embeds

    def largest_item(self, sizes: Mapping[str, int] | None = None) -> Any:
        """The item with the most encoder rows; a single candidate is not processed.

        Args:
            sizes: its largest sizes, under the names of vLLM's `limit_mm_per_prompt`; None for
                those of the spec.

        Raises:
            InputError: sizes that items of this type do not have.
        """
        item = self.item.within(sizes, self.where) if sizes else self.item
        if self.needs_hf:
            return item.candidates()[0]
        if not sizes:
            return self.largest[0]
        return self._fitted(item, self._of_most_rows(item.candidates()))[0]

    def _of_most_rows(self, items: Sequence[Any]) -> tuple[Any, ItemTokens]:
        """Return the item with the most encoder rows, the first of equals, and its layout."""
        placed = [(value, self.placeholder_of(value)) for value in items]
        return max(placed, key=lambda pair: pair[1].num_embeds)

    def _fitted(self, item: ItemType, largest: tuple[Any, ItemTokens]) -> tuple[Any, ItemTokens]:
        """Return an item with as many encoder rows as fit the context, and its layout.

        The largest item itself, if it fits, or if only the Hugging Face processor knows its rows.
        Otherwise the best of several: all its sizes are made smaller together, or one after the
        other, beginning with each of them. What is best depends on the layout: where one size makes
        encoder rows and another one literals, the rows stay if the other one is made smaller.
        """
        value, placeholder = largest
        context = self._max_model_len
        if context is None or len(placeholder) <= context or self.needs_hf:
            return largest
        sizes = item.sizes(value)
        fitted = [self._smaller(item, sizes, first) for first in range(len(sizes))]
        if len(sizes) != 1:
            steps = range(1, _STEPS)
            fitted.append(self._longest(steps, lambda step: item.candidates(step / _STEPS)))
        fitting = [pair for pair in fitted if pair is not None]
        if not fitting:
            return self._of_most_rows(item.candidates(0.0))
        return max(fitting, key=lambda pair: pair[1].num_embeds)

    def _smaller(
        self, item: ItemType, sizes: Sequence[int], first: int
    ) -> tuple[Any, ItemTokens] | None:
        """Return the largest item that fits the context, with the first size made smaller, and as
        long as it does not fit, the next one too; None if none fits."""
        most = [math.inf] * len(sizes)
        for axis in (*range(first, len(sizes)), *range(first)):

            def candidates(size: int, axis: int = axis) -> list[Any]:
                return item.candidates(most=[*most[:axis], size, *most[axis + 1 :]])

            fitting = self._longest(range(1, sizes[axis] + 1), candidates)
            if fitting is not None:
                return fitting
            most[axis] = 1
        return None

    def _longest(
        self, steps: range, candidates: Callable[[int], list[Any]]
    ) -> tuple[Any, ItemTokens] | None:
        """Return the candidate of the last step that fits the context, and its layout; None if none
        fits. Candidates grow from step to step. One that is refused is taken for too small."""
        assert self._max_model_len is not None
        fitting: tuple[Any, ItemTokens] | None = None
        begin, end = steps.start, steps.stop
        while begin < end:
            step = (begin + end) // 2
            try:
                pair = self._of_most_rows(candidates(step))
            except SpecError:
                begin = step + 1
                continue
            if len(pair[1]) > self._max_model_len:
                end = step
            else:
                fitting, begin = pair, step + 1
        return fitting

    def rehearse(self) -> None:
        """Try out some items, where they need no Hugging Face processor; see
        `mmkit.plan.rehearsal`.

        Raises:
            SpecError: a mistake that would otherwise fail the first request, or make an answer
                wrong.
        """
        if self.needs_hf:
            return
        rehearse(self)
        if self.field_processor.hf_call is None:
            self._check_forms_of_spec()
        # also where the largest item is made to fit the context, a mistake shows now
        for value in (self.largest[0], *self.item.smallest()):
            self._check_rows_at_second_position(value)

    def _check_forms_of_spec(self) -> None:
        """Refuse a function of the spec whose fields have another form for the largest item than
        for a small one, or a form that vLLM cannot batch.

        Raises:
            SpecError: names the field.
        """
        with report_as_spec_error():
            for value in self.item.candidates()[:1]:
                self.check_forms([self.process(value)])
        for name, form in self.learned.forms.items():
            if not form.layouts <= {torch.strided}:
                where = f"{self.where}, fields[{name!r}]"
                raise SpecError(where, "dense tensors, which vLLM can batch", str(form))

    def _check_rows_at_second_position(self, value: Any) -> None:
        """Refuse a layout whose number of encoder rows depends on the position of an item that is
        cached. The encoder makes the rows of a cached item once, for all of its positions, and vLLM
        ends where some are missing.

        Raises:
            SpecError: names both numbers.
        """
        if not self.layout_evaluator.reads_index or self.limit in (0, 1) or not self.may_cache(2):
            return
        first, second = (self.placeholder_of(value, index).num_embeds for index in (0, 1))
        if first != second:
            expected = f"{first} embed() position(s) whatever item.index is, as for the first item"
            remedy = "Say by cacheable=False that an item depends on its position."
            raise SpecError(f"{self.where}, layout", expected, str(second), remedy)

    def placeholder_of(self, value: Any, index: int = 0) -> ItemTokens:
        """Return the evaluated layout of a raw item that mmkit made, as if it were the only one.

        Args:
            value: the canonical item.
            index: its position for its layout.

        Raises:
            SpecError: the spec refuses the item, or its layout has no encoder row.
        """
        with report_as_spec_error(remedy=self.item.remedy):
            (fields,) = self.read(Taken.whole([value]))
        return self.placeholder_in(self.scope(value, index, fields))

    def placeholder_in(self, scope: Scope) -> ItemTokens:
        """Return the evaluated layout of a raw item in its scope. Errors as for
        `placeholder_of`."""
        try:
            return self.layout_evaluator.alternatives(scope).tokens
        except InputError as error:
            raise SpecError(str(error)) from error

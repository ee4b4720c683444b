"""One modality of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..errors import (
    ErrorCollector,
    InputError,
    SpecError,
    locate_errors,
    report_as_spec_error,
)
from ..language.expr import Scope, as_condition, evaluate
from ..language.field import HF, Batching, Field, Identity
from ..language.items import ItemType, flatten_options, select_options
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
from .forms import FieldForms
from .guard import IdRecorder, PlaceholderGuard
from .hf_calls import HFCall, LazyProcessor
from .item import Item, make_batch
from .largest import LaidOutItem, LargestItem, LargestItemFinder
from .layouts import LayoutEvaluator, NoEncoderRows, TooManyRows, make_evaluator
from .memo import Once
from .parsing import ItemBatch, ItemParser
from .placement import ItemLayout
from .processing import FieldProcessor, FieldsOfFacts, ProcessedFields
from .scopes import ItemScopes


class CallerIds(NamedTuple):
    """What a caller writes for an item, by the first update.

    Attributes:
        target: the ids of its target.
        ids: the ids that the caller writes: none where mmkit inserts the layout.
    """

    target: Target
    ids: Target


@dataclass(frozen=True, eq=False)
class BoundModality:
    """A modality, bound to one config and tokenizer.

    Everything that depends only on these is evaluated. `bind_modality` makes it.

    Attributes:
        spec: the declaration.
        name: the name of the modality.
        where: names the modality in errors, for example ``robot.actions``.
        static: the scope without an item.
        options: those `mm_processor_kwargs` of its plan that concern its items; see
            `select_options`.
        item: the item type.
        limit: the most items in one request, or None.
        updates: the alternatives of `update`.
        grid: the sizes of its grid of M-RoPE positions; empty where the spec has none.
        fields: the fields that the model receives for raw items.
        fields_and_embeds: these, and the field of precomputed embeddings, where the spec takes any.
        scopes: makes the scopes of items.
        parser: turns a caller's data into canonical items.
        field_processor: turns canonical items into processed fields.
        layout_evaluator: evaluates the layouts and targets of raw items.
        embedding_layout_evaluator: evaluates the layouts of precomputed embeddings.
        forms: the forms of fields that all items have in common.
        needs_row_count: whether each item comes to the model with the number of its encoder rows:
            where items differ in it, where options of the request change it, and where no field
            tells how many items there are.
        is_ids_only: whether items become ids of the vocabulary, and nothing of them reaches the
            model; see `Modality`.
        max_model_len: the longest context, into which the largest item has to fit; None for any.
        stated_largest_cell: the item with the most encoder rows that the spec states. Where only
            the Hugging Face processor knows its rows, the first dummy request tells them.
        largest_cell: the largest item that fits the context.
        least_length_cell: the least number of samples of audio that has an encoder row.
        adapter_memo: what `vllm_api` or `sglang_api` derives from the modality, computed once.
    """

    spec: Modality
    name: str
    where: str
    static: Scope
    options: Mapping[str, Any]
    item: ItemType
    limit: int | None
    updates: Sequence[Update]
    grid: Sequence[Any]
    fields: Mapping[str, Field]
    fields_and_embeds: Mapping[str, Field]
    scopes: ItemScopes
    parser: ItemParser
    field_processor: FieldProcessor
    layout_evaluator: LayoutEvaluator
    embedding_layout_evaluator: LayoutEvaluator
    forms: FieldForms
    needs_row_count: bool
    is_ids_only: bool
    max_model_len: int | None
    stated_largest_cell: Once[LaidOutItem] = field(default_factory=Once)
    largest_cell: Once[LargestItem] = field(default_factory=Once)
    least_length_cell: Once[int] = field(default_factory=Once)
    adapter_memo: dict[Any, Any] = field(default_factory=dict)

    # -- items of requests -------------------------------------------------------------------------

    @property
    def is_never_kept(self) -> bool:
        """Whether vLLM may keep nothing of an item, whatever request it is in."""
        return self.spec.cacheable is False

    def are_independent(self, count: int) -> bool:
        """Whether what becomes of an item does not depend on the others, in a request with `count`.

        If it does (`cacheable=`), they are processed together, and the hash of each covers all.
        """
        if isinstance(self.spec.cacheable, bool):
            return self.spec.cacheable
        scope = self.static.for_item(SimpleNamespace(count=count), None)
        with locate_errors(f"{self.where}, cacheable"):
            return bool(evaluate(self._cacheable, scope))

    @cached_property
    def _cacheable(self) -> Any:
        """The condition of `are_independent`, compiled once: each request asks it twice."""
        return as_condition(self.spec.cacheable)

    def make_zeros(self, batch: ItemBatch) -> ProcessedFields | None:
        """Return the fields of the largest items, of zeros; see `FieldProcessor.make_zeros`.

        None where the layouts need the output of the Hugging Face processor.
        """
        if self.needs_hf:
            return None
        return self.field_processor.make_zeros(batch)

    def check_forms(self, processed: ProcessedFields, indices: Sequence[int] = ()) -> None:
        """Refuse processed raw items whose fields have another form than those of other requests.

        Args:
            processed: the fields of each item; those that an item lacks are not looked at.
            indices: the position of each item in the request; by default they are all items.

        Raises:
            InputError: names the first.
        """
        remedy = "The items of all requests share a batch: send one of another dtype."
        if self.options:
            options = " and ".join(sorted(self.options))
            remedy = f"Leave out those of mm_processor_kwargs that change it: {options}."
        self.forms.check(processed, indices or range(len(processed)), remedy)

    def read_fields(self, batch: ItemBatch) -> ProcessedFields:
        """Return the processed fields of items as far as their layouts read them.

        Errors as for `FieldProcessor.run`.
        """
        if batch.are_embeddings:
            return batch.values
        if self.needs_fields:
            return self.field_processor.run(batch)
        return self.field_processor.derive_from_facts(batch)

    def process_for_layouts(self, items: Sequence[Item]) -> None:
        """Fill in the processed fields of items as far as their layouts read them.

        Errors as for `FieldProcessor.run`.
        """
        fields = self.read_fields(make_batch(items))
        for item, fields_of_item in zip(items, fields, strict=True):
            # this may be a part of the fields: the caller lays out the items and drops them
            item.fields = fields_of_item

    def lay_out(self, item: Item, *, may_be_larger: bool = False) -> ItemLayout:
        """Return the layout of an item.

        Args:
            item: the item, with its processed fields as far as layouts read them.
            may_be_larger: whether it may have more encoder rows than the largest item.

        Raises:
            InputError: precomputed embeddings of other rows than their layout has.
            TooManyRows: an item has more encoder rows than the spec's largest item, for which vLLM
                reserves memory and plans its schedule.
        """
        evaluator = self.layout_evaluator
        if item.is_embedding:
            evaluator = self.embedding_layout_evaluator
        try:
            layout = evaluator.lay_out(item.value, item.index, item.count, item.fields)
        except NoEncoderRows as error:
            remedy = "Send a larger one."
            is_outlined = isinstance(item.fields, FieldsOfFacts)
            may_process = not (is_outlined and self.needs_hf)
            if self.item.vllm_modality == "audio" and not item.is_embedding and may_process:
                least_length = self.least_length_cell.get(self._find_least_length)
                remedy = f"Send one of at least {least_length} samples."
            raise InputError(error.where, error.expected, error.got, remedy) from error
        if item.is_embedding:
            self._check_embedding_rows(item, layout.tokens.num_embeds)
        if evaluator.depends_on_other_items:
            return layout
        if item.is_largest:
            if self.needs_hf:
                # the Hugging Face processor is not called for it again
                self.stated_largest_cell.remember(LaidOutItem(item.value, layout.tokens))
        elif evaluator.varies and not may_be_larger:
            self._check_row_count(layout.tokens.num_embeds, item.index)
        return layout

    def list_caller_ids(self, items: Sequence[Item]) -> list[CallerIds]:
        """Return what a caller writes for each item.

        Items are processed where layouts or targets need it.
        """
        update = self.updates[0]
        roots = {dependency.root for dependency in update.dependencies()}
        caller_ids = []
        if isinstance(update, AlreadyExpanded) or "fields" in roots or "function" in roots:
            self.process_for_layouts(items)
            for item in items:
                layout = self.lay_out(item, may_be_larger=True)
                caller_ids.append(CallerIds(layout.updates[0].target, layout.caller_ids[0]))
            return caller_ids
        for item in items:
            scope = self.scopes.make(item.value, item.index, None, item.count)
            target = update.resolve_target(scope)
            ids = target if isinstance(update, Replace) else ()
            caller_ids.append(CallerIds(target, ids))
        return caller_ids

    def _find_least_length(self) -> int:
        """Return the least number of samples of audio that has an encoder row, by bisection."""
        too_short = 0
        enough: int = self.item.largest[0][0]
        while enough - too_short > 1:
            length = (too_short + enough) // 2
            value = self.item.blank(length)
            try:
                (fields,) = self.read_fields(ItemBatch.whole([value]))
                self.layout_evaluator.lay_out(value, 0, 1, fields)
            except (InputError, SpecError):
                too_short = length
            else:
                enough = length
        return enough

    def _check_embedding_rows(self, item: Item, expected_count: int) -> None:
        count = len(item.value.rows)
        if count != expected_count:
            where = f"{self.where}[{item.index}]"
            raise InputError(where, f"{expected_count} embedding row(s)", str(count))

    def _check_row_count(self, rows: int, index: int) -> None:
        """Refuse an item that has more encoder rows than the largest item that fits the context.

        Raises:
            TooManyRows: it has more than the largest item of the spec.
            InputError: it has more than the context has positions.
        """
        if rows <= self.most_rows:
            return
        where = f"{self.where}[{index}]"
        if rows > self.stated_rows:
            expected = f"at most {self.stated_rows} encoder row(s), as the stated largest item has"
            remedy = "Send a smaller item, or state a larger `largest=` in the spec."
            raise TooManyRows(where, expected, str(rows), remedy)
        expected = f"at most {self.max_model_len} encoder row(s), as the context has positions"
        raise InputError(where, expected, str(rows), "Send a smaller item.")

    # -- the largest item --------------------------------------------------------------------------

    @property
    def needs_fields(self) -> bool:
        """Whether the layout or the targets read, or may read, what `process` returns."""
        names = self.layout_evaluator.fields
        return names is None or not names <= self.field_processor.from_facts

    @property
    def needs_hf(self) -> bool:
        """Whether the layout or the targets may need the output of the Hugging Face processor."""
        return self.field_processor.hf_call is not None and self.needs_fields

    @property
    def stated_largest(self) -> LaidOutItem:
        """The item with the most encoder rows that the spec states, and its layout.

        The layout may be longer than the context.
        """
        return self.stated_largest_cell.get(self._find_stated_largest)

    @property
    def stated_rows(self) -> int:
        """The number of encoder rows of the largest item that the spec states."""
        return self.stated_largest.tokens.num_embeds

    @property
    def most_rows(self) -> int:
        """The most encoder rows of an item of any request.

        The stated largest item has as many, unless the context has fewer positions.
        """
        if self.max_model_len is None:
            return self.stated_rows
        return min(self.stated_rows, self.max_model_len)

    @property
    def is_fitted(self) -> bool:
        """Whether the largest item is longer than the context, so that `largest` is another one."""
        if self.max_model_len is None:
            return False
        return len(self.stated_largest.tokens) > self.max_model_len

    @property
    def largest(self) -> LargestItem:
        """The item with the most encoder rows among those that fit the context.

        Its rows may be fewer than `most_rows`.
        """
        return self.largest_cell.get(self._find_largest)

    def largest_item(self, sizes: Mapping[str, int] | None = None) -> Any:
        """Return the item with the most encoder rows; a single candidate is not processed.

        Args:
            sizes: its largest sizes, under the names of vLLM's `limit_mm_per_prompt`; None for
                those of the spec.

        Raises:
            InputError: sizes that items of this type do not have.
        """
        item_type = self.item.within(sizes, self.where) if sizes else self.item
        if self.needs_hf:
            return item_type.candidates()[0]
        if not sizes:
            return self.largest.value
        finder = self._finder
        return finder.fit(item_type, finder.find(item_type.candidates())).value

    def lay_out_spec_item(self, value: Any, index: int = 0) -> ItemTokens:
        """Return the evaluated layout of a raw item that mmkit made, as if it were the only one.

        Args:
            value: the canonical item.
            index: its position for its layout.

        Raises:
            SpecError: the spec refuses the item, or its layout has no encoder row.
        """
        with report_as_spec_error(remedy=self.item.remedy):
            (fields,) = self.read_fields(ItemBatch.whole([value]))
        scope = self.scopes.make(value, index, fields)
        try:
            return self.layout_evaluator.evaluate(scope).tokens
        except InputError as error:
            raise SpecError(str(error)) from error

    @property
    def _finder(self) -> LargestItemFinder:
        return LargestItemFinder(self.lay_out_spec_item, self.max_model_len)

    def _find_stated_largest(self) -> LaidOutItem:
        return self._finder.find(self.item.candidates())

    def _find_largest(self) -> LargestItem:
        largest = self.stated_largest
        if not self.needs_hf:  # else only the Hugging Face processor knows the rows of others
            largest = self._finder.fit(self.item, largest)
        return LargestItem(largest.value, largest.tokens.num_embeds)


# -- binding ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """What a spec is bound to.

    Attributes:
        model: the name of the spec, for errors.
        scope: the config, the tokenizer, the Hugging Face processor and the options.
        dtype: the dtype of the language model; None leaves floats of Hugging Face processors as
            they are.
        vocab_size: number of ids of the language model.
        max_model_len: the longest context, into which the largest item has to fit; None for any.
    """

    model: str
    scope: Scope
    dtype: torch.dtype | None
    vocab_size: int
    max_model_len: int | None


def bind_modality(
    spec: Modality,
    environment: Environment,
    guard: IdRecorder | PlaceholderGuard,
    base: BoundModality | None = None,
) -> BoundModality:
    """Bind a modality to a config and a tokenizer.

    Args:
        spec: the declaration.
        environment: what it is bound to.
        guard: records the placeholder ids of layouts; for the options of a request, the guard of
            the server's plan.
        base: for the options of a request, the modality of the server's plan.

    Raises:
        SpecError: a part that cannot be bound; `others` has the errors of the other parts.
    """
    scope = environment.scope
    where = f"{environment.model}.{spec.name}"
    options = select_options(spec.item, scope.kwargs)
    processor = scope.proc
    if isinstance(processor, LazyProcessor):
        processor = processor.select_for(spec.item)
    static = replace(scope, kwargs=flatten_options(spec.item, scope.kwargs), proc=processor)
    parts = _bind_parts(spec, where, static)

    item_type = parts.item_type if parts.hf is not None else parts.item_type.for_function()
    # Functions in expressions may read what changes while an item is cached; of other expressions,
    # the spec knows what they read. `process` does not count: its scope has no place of an item.
    has_functions = any(dependency.root == "function" for dependency in spec.dependencies())
    scopes = ItemScopes(static, item_type, spec.cacheable is True and has_functions)
    is_ids_only = spec.is_ids_only

    def make_layout_evaluator(layout: Layout, *, is_of_embeddings: bool = False) -> LayoutEvaluator:
        return make_evaluator(
            where,
            layout,
            parts.updates,
            parts.grid,
            scopes,
            guard,
            vocab_size=environment.vocab_size,
            limit=parts.limit,
            is_ids_only=is_ids_only,
            requires_rows=spec.has_positions and not is_ids_only,
            is_of_embeddings=is_of_embeddings,
        )

    evaluator = make_layout_evaluator(parts.layout)
    embedding_evaluator = evaluator
    if spec.embeds:
        embedding_evaluator = make_layout_evaluator(parts.embeds_layout, is_of_embeddings=True)
    parser = ItemParser(
        name=spec.name,
        where=where,
        item_type=item_type,
        embeds=spec.embeds,
        companions=parts.companions,
        count_rows=embedding_evaluator.count_rows,
        dtype=environment.dtype,
    )
    hf_call = None
    if parts.hf is not None:
        hf_call = HFCall(
            hf=parts.hf,
            name=spec.name,
            model=environment.model,
            where=where,
            item_type=item_type,
            part_names=spec.arguments,
            static=static,
            modality_options=options,
            dtype=environment.dtype,
        )
    field_processor = FieldProcessor(where, spec.process, parts.fields, hf_call, scopes)
    fields = {name: parts.fields[name] for name in spec.received_fields}
    fields_and_embeds = dict(fields)
    if parser.takes_embeds:
        fields_and_embeds[parser.embeds_field] = parser.embeds_as
    if base is None:
        forms = FieldForms(where, item_type, _fields_of_one_form(spec, fields), field_processor)
    else:
        forms = base.forms
    modality = BoundModality(
        spec=spec,
        name=spec.name,
        where=where,
        static=static,
        options=options,
        item=item_type,
        limit=parts.limit,
        updates=parts.updates,
        grid=parts.grid,
        fields=fields,
        fields_and_embeds=fields_and_embeds,
        scopes=scopes,
        parser=parser,
        field_processor=field_processor,
        layout_evaluator=evaluator,
        embedding_layout_evaluator=embedding_evaluator,
        forms=forms,
        needs_row_count=_needs_row_count(fields, evaluator.fixed_rows, base),
        is_ids_only=is_ids_only,
        max_model_len=environment.max_model_len,
    )
    if modality.needs_hf:
        _check_single_candidate(parts.item_type, where)
    return modality


def complete_modality(
    modality: BoundModality,
    guard: PlaceholderGuard,
    placeholder_texts: Sequence[str],
    *,
    copies_outputs: bool,
) -> BoundModality:
    """Return a bound modality that takes the items of requests.

    Args:
        modality: the modality, after its rehearsal.
        guard: the guard of the plan, which takes the place of the recorder of ids.
        placeholder_texts: the tokens that no text in an item may spell.
        copies_outputs: whether what the function of the spec returns is copied.
    """
    evaluator = replace(modality.layout_evaluator, guard=guard)
    embedding_evaluator = evaluator
    if modality.embedding_layout_evaluator is not modality.layout_evaluator:
        embedding_evaluator = replace(modality.embedding_layout_evaluator, guard=guard)
    field_processor = modality.field_processor.for_requests()
    if copies_outputs:
        field_processor = field_processor.copying_outputs()
    parser = replace(
        modality.parser,
        count_rows=embedding_evaluator.count_rows,
        placeholder_texts=placeholder_texts,
    )
    return replace(
        modality,
        parser=parser,
        field_processor=field_processor,
        layout_evaluator=evaluator,
        embedding_layout_evaluator=embedding_evaluator,
    )


def copy_outputs(modality: BoundModality) -> BoundModality:
    """Return the modality with a copy made of what the function of the spec returns."""
    field_processor = modality.field_processor.copying_outputs()
    forms = FieldForms(modality.where, modality.item, modality.forms.fields, field_processor)
    return replace(modality, field_processor=field_processor, forms=forms)


class _BoundParts(NamedTuple):
    """The parts of a modality whose expressions over config and tokenizer are evaluated."""

    item_type: ItemType
    layout: Layout
    updates: list[Update]
    fields: dict[str, Field]
    hf: HF | None
    embeds_layout: Layout
    companions: dict[str, Tensor]
    grid: Sequence[Any]
    limit: int | None


def _bind_parts(spec: Modality, where: str, static: Scope) -> _BoundParts:
    """Bind the parts of a modality.

    Raises:
        SpecError: the first part that cannot be bound; `others` has the errors of the others.
    """
    errors = ErrorCollector()

    def bind(part: str, declared: Any) -> Any:
        with errors.collect(), locate_errors(f"{where}, {part}"):
            return fold(declared, static)

    item_type: ItemType = bind("item", spec.item)
    layout: Layout = bind("layout", spec.layout)
    # an empty layout stands at offset 0, as vLLM's own
    declared_updates = spec.update if spec.has_positions else [Insert(at="start")]
    updates: list[Update] = [bind("update", update) for update in declared_updates]
    fields: dict[str, Field] = {}
    for name, declared in spec.fields.items():
        fields[name] = bind("fields", declared)
    hf: HF | None = None
    if isinstance(spec.process, HF):
        hf = bind("process", spec.process)
    embeds_layout: Layout = layout
    if spec.embeds_layout is not spec.layout:
        embeds_layout = bind("embeds", spec.embeds_layout)
    companions: dict[str, Tensor] = bind("embeds", spec.companions())
    grid: Sequence[Any] = bind("positions", spec.positions or ())
    limit: int | None = None
    with errors.collect(), locate_errors(f"{where}, limit"):
        limit = evaluate(spec.limit, static)
        if limit is not None:
            limit = to_whole(limit, spec.limit, "the most items")
    errors.raise_first()
    return _BoundParts(
        item_type, layout, updates, fields, hf, embeds_layout, companions, grid, limit
    )


def _fields_of_one_form(spec: Modality, fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return the fields of which all items must have one form.

    Items without a process are checked when they are read, and constants make no batch.
    """
    is_processed = not isinstance(spec.process, Identity)
    chosen: dict[str, Field] = {}
    for name, declared in fields.items():
        if declared.batching is Batching.SHARED:
            continue
        if is_processed or declared.is_derived:
            chosen[name] = declared
    return chosen


def _needs_row_count(
    fields: Mapping[str, Field], fixed_rows: int | None, base: BoundModality | None
) -> bool:
    """Whether each item comes to the model with the number of its encoder rows."""
    if fixed_rows is None:
        return True
    # a fixed number is known to the model from the server's plan, unless options change it
    if base is not None and base.layout_evaluator.fixed_rows != fixed_rows:
        return True
    # a field of one part per item tells how many items there are
    return all(declared.batching is not Batching.STACKED for declared in fields.values())


def _check_single_candidate(item_type: ItemType, where: str) -> None:
    """Refuse several largest items where only the Hugging Face processor can tell them apart.

    Raises:
        SpecError: names their number.
    """
    count = len(item_type.candidates(0.0))
    if count > 1:
        expected = "one largest item, since only the Hugging Face processor tells its rows"
        remedy = "State a layout over the facts of item, or the one with the most rows."
        raise SpecError(f"{where}, item", expected, f"{count} of them", remedy)

"""One modality of a plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import At, InputError, MmkitError, Refusals, SpecError, of_spec
from ..expr import Fields, Scope, evaluate, truth
from ..field import HF, Field, Identity, Shared
from ..items import ItemType, options_of, unscoped
from ..items.tensor import Tensor
from ..layout import AlreadyExpanded, Insert, Layout, Placeholder, Replace, Target, Update, whole
from ..node import fold
from ..placement import Alternatives
from ..spec import Modality
from .calls import LazyProcessor
from .forms import Form, form_of, has_form
from .intake import Embedding, Intake, Taken
from .placeholders import Placeholders, PlaceholdersOfEmbeddings, TooManyRows
from .processing import Processed, Processing

_STEPS = 1024
"""The steps in which the sizes of the largest item are fitted to the context."""


@dataclass(frozen=True, eq=False)
class Numbered(Alternatives):
    """The alternatives of an item whose layout or targets depend on its position. They keep its
    scope, and with it processed tensors, alive.

    Attributes:
        here: those at its own position, which items of one geometry share.
        scope: that of the item.
        evaluate: the alternatives in another scope.
    """

    here: Alternatives
    scope: Scope
    evaluate: Callable[[Scope], Alternatives]

    def at(self, index: int) -> Alternatives:
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
        shares_memory: see `Processing`.
    """

    def __init__(self, modality: BoundModality) -> None:
        self._modality = modality
        self.guarded: frozenset[int] | None = None
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
        intake: turns a caller's data into canonical items.
        processing: turns canonical items into processed fields.
        placeholders: the layouts and targets of items.
        placeholders_of_embeddings: those of precomputed embeddings.
        embed_ids: the placeholder ids that are known without an item, or that items had so far.
        checked: the fields of which all items must have one form.
        learned: what its items taught.
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
        refusals = Refusals()

        def bound(part: str, declared: Any) -> Any:
            with refusals.collected(), self.at(part):
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
        with refusals.collected(), self.at("limit"):
            limit = evaluate(spec.limit, self.static)
            self.limit = None if limit is None else whole(limit, spec.limit, "the most items")
        refusals.refuse()
        self.item: ItemType = item if hf else item.for_function()
        self.embed_ids: set[int] = set()
        self.placeholders = Placeholders(self, layout, vocab_size)
        self.placeholders_of_embeddings = self.placeholders
        if spec.embeds:
            self.placeholders_of_embeddings = PlaceholdersOfEmbeddings(self, of_embeds, vocab_size)
        self.intake = Intake(self, companions)
        self.processing = Processing(self, fields, hf)
        self.fields = {name: field for name, field in fields.items() if not field.hidden}
        # items without a process are checked when they are read, and constants make no batch
        is_processed = not isinstance(spec.process, Identity)
        self.checked = [
            name
            for name, field in self.fields.items()
            if not isinstance(field, Shared) and (is_processed or field.is_derived)
        ]
        self.fields_and_embeds = dict(self.fields)
        if self.intake.takes_embeds:
            self.fields_and_embeds[self.intake.embeds_field] = self.intake.embeds_as
        read = self.placeholders.fields
        self._needs_fields = read is None or not read <= self.processing.from_facts
        self.needs_hf = hf is not None and self._needs_fields
        if self.needs_hf and (candidates := len(item.candidates(0.0))) > 1:
            expected = "one largest item, since only the Hugging Face processor tells its rows"
            remedy = "State a layout over the facts of item, or the one with the most rows."
            raise SpecError(f"{self.where}, item", expected, f"{candidates} of them", remedy)
        # functions may read what changes while an item is cached; of expressions, the spec knows it
        has_functions = any(leaf.root == "function" for leaf in spec.leaves())
        self._hides = spec.cacheable is True and has_functions
        self.adapted: dict[Any, Any] = {}

    def at(self, part: str) -> At:
        """A context in which errors name a part of the modality."""
        return At(f"{self.where}, {part}")

    @property
    def guarded(self) -> frozenset[int] | None:
        """See `Learned`."""
        return self.learned.guarded

    def may_cache(self, count: int) -> bool:
        """Whether vLLM may cache the processed items of a request with `count` of them."""
        if self.spec.cacheable is True:
            return True
        with self.at("cacheable"):
            return truth(self.spec.cacheable, self.static.of(SimpleNamespace(count=count), None))

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
        return self.static.of(facts, fields)

    def layouts(
        self, taken: Taken, fields: Processed | None = None, *, may_be_larger: bool = False
    ) -> Iterator[Alternatives]:
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
        placeholders, most = self.placeholders, None
        if taken.embeds:
            placeholders = self.placeholders_of_embeddings
        may_be_larger |= taken.are_largest or placeholders.by_company
        if placeholders.varies and not may_be_larger:
            most = self.largest[1]
        fields = self.read(taken) if fields is None else fields
        for index, (value, own) in enumerate(zip(taken.values, fields, strict=True)):
            if (alternatives := placeholders.shared) is None:
                scope = self.scope(value, index, own, taken.total)
                alternatives = placeholders.alternatives(scope)
                if placeholders.depends_on_index:
                    parts = alternatives.placeholder, alternatives.ways
                    evaluate = placeholders.alternatives
                    alternatives = Numbered(*parts, alternatives, scope, evaluate)
                elif not placeholders.varies:
                    placeholders.shared = alternatives
            rows = alternatives.placeholder.num_embeds
            if taken.are_largest and not placeholders.by_company:
                vars(self).setdefault("largest", (value, rows))  # processed once
            if taken.embeds and rows != len(value.rows):
                expected = f"{rows} embedding row(s)"
                raise InputError(f"{self.where}[{index}]", expected, str(len(value.rows)))
            if most is not None and rows > most:
                expected = f"at most {most} encoder row(s), as the stated largest item has"
                remedy = "Send a smaller item, or state a larger `largest=` in the spec."
                raise TooManyRows(f"{self.where}[{index}]", expected, str(rows), remedy)
            yield alternatives

    def written(self, taken: Taken) -> list[tuple[Target, Target]]:
        """The target of each item, and the ids that a caller writes for it, by the first update.
        Items are processed where layouts or targets need it."""
        update = self.updates[0]
        roots = {leaf.root for leaf in update.leaves()}
        if isinstance(update, AlreadyExpanded) or not roots.isdisjoint(("fields", "function")):
            layouts = self.layouts(taken, may_be_larger=True)
            return [(own.ways[0].target, own.written[0]) for own in layouts]
        is_replaced = isinstance(update, Replace)
        total = taken.total
        scopes = [self.scope(value, i, None, total) for i, value in enumerate(taken.values)]
        return [(target, target if is_replaced else ()) for target in map(update.resolve, scopes)]

    def process(self, value: Any) -> dict[str, Any]:
        """The processed fields of an item that the spec itself states.

        Raises:
            SpecError: the item is refused, or the outputs contradict the declared fields.
        """
        with of_spec():
            return self.processing.run(Taken.whole([value]))[0]

    def forms_of(self, fields: Mapping[str, Any]) -> dict[str, Form]:
        """Return the forms of the fields of an item, as far as it tells them."""
        forms: dict[str, Form] = {}
        for name in self.checked:
            if (form := form_of(fields[name], self.fields[name])) is not None:
                forms[name] = form
        return forms

    def check_forms(self, processed: Processed) -> None:
        """Refuse processed raw items whose fields have another form than those of other requests.

        Raises:
            InputError: names the first.
        """
        for index, fields in enumerate(processed):
            for name, expected in self.learned.forms.items():
                if has_form(fields[name], expected):
                    continue
                form = form_of(fields[name], self.fields[name])
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

        Errors as for `Processing.run`.
        """
        if taken.embeds:
            return taken.values
        processing = self.processing
        return processing.run(taken) if self._needs_fields else processing.of_facts(taken)

    @cached_property
    def largest(self) -> tuple[Any, int]:
        """The item with the most encoder rows, and the number of these rows."""
        value, placeholder = self._largest_of(self.item)
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
        return self._largest_of(item)[0] if sizes else self.largest[0]

    def _largest_of(self, item: ItemType) -> tuple[Any, Placeholder]:
        """The item with the most encoder rows, and its layout. One that is longer than the context
        is made smaller, unless only the Hugging Face processor knows its rows."""

        def at_most(step: int) -> tuple[Any, Placeholder]:
            candidates = item.candidates(step / _STEPS)
            placed = [(value, self._placeholder(value)) for value in candidates]
            return max(placed, key=lambda one: one[1].num_embeds)  # the first of equals

        largest, most = at_most(_STEPS), self._max_model_len
        if most is None or len(largest[1]) <= most or self.needs_hf:
            return largest
        # of smaller sizes in equal parts
        return at_most(bisect_right(range(1, _STEPS), most, key=lambda step: len(at_most(step)[1])))

    def rehearse(self) -> None:
        """Try out the largest and the smallest item, where they need no Hugging Face processor.

        Raises:
            SpecError: a mistake that would otherwise fail the first request.
        """
        if self.needs_hf:
            return
        small = self.item.smallest()
        if self.processing.call is None:
            self.processing.rehearse([*self.item.candidates()[:1], *small[:1]])
            with of_spec():
                for value in self.item.candidates()[:1]:
                    self.check_forms([self.process(value)])
            for name, form in self.learned.forms.items():
                if not form.layouts <= {torch.strided}:
                    where = f"{self.where}, fields[{name!r}]"
                    raise SpecError(where, "dense tensors, which vLLM can batch", str(form))
        _, most = self.largest
        for least in [self._placeholder(value).num_embeds for value in small]:
            if least > most and not self.placeholders.by_company:
                expected = "the most encoder rows for the largest item"
                remedy = "State `largest=`, the shape of the item with the most."
                got = f"{most}, and {least} for the smallest"
                raise SpecError(f"{self.where}, item", expected, got, remedy)

    def _placeholder(self, value: Any) -> Placeholder:
        """The evaluated layout of a raw item that is the only one, and that the spec chose."""
        with of_spec():
            (fields,) = self.read(Taken.whole([value]))
        try:
            return self.placeholders.alternatives(self.scope(value, 0, fields)).placeholder
        except InputError as error:
            raise SpecError(str(error)) from error

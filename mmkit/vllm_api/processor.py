"""The processor of a spec: one straight pipeline in place of vLLM's.

`CommonProcessor.rendered` does a request: its items are hashed, and looked up in vLLM's cache; what
the cache lacks is processed; the layouts of all items are placed in the prompt. The cache moves
last, or when the request is sent: see `mmkit.vllm_api.exchange`.
Nothing of it calls a hook of vLLM's processor. `mmkit.vllm_api.seam` makes a `Request` of the
arguments that vLLM has for it. `override` marks the methods that vLLM calls; see
`mmkit.vllm_api.hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from typing_extensions import override
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem
from vllm.multimodal.processing import BaseMultiModalProcessor

from ..errors import InputError
from ..language.items import options_of
from ..language.spec import Declaration
from ..plan.hf_calls import LazyProcessor
from ..plan.modality import BoundModality
from ..plan.parsing import Taken
from ..plan.placement import ItemLayout, Placement
from ..plan.plan import Plan
from ..plan.processing import Processed
from .compat import SKIPS_LARGE, hasher_algorithm
from .exchange import (
    CachedItem,
    CacheReader,
    ProcessedItem,
    UnsentItem,
    capacity_of,
    fields_in,
    has_two_halves,
    size_of,
)
from .hashes import Hashes, unique_hashes
from .hooks import refuse_dead
from .info import DummyInputs, ProcessingInfo
from .items import RequestItems, engine_input, kwargs_item, vllm_fields

Timed: TypeAlias = Callable[[str], AbstractContextManager[Any]]
"""A context that takes the time of a stage, under vLLM's name of it."""


@dataclass
class Request:
    """One request, whatever the arguments in which vLLM sends it.

    Attributes:
        prompt: token ids; a text as well up to vLLM 0.28.
        items: all items.
        uuids: the names of items, by modality; None for an item without.
        kwargs: its `mm_processor_kwargs`.
        cache: vLLM's processor cache, or None.
        factors: other options on which the hashes of its items depend.
        tokenization: options of the tokenizer, for a text.
    """

    prompt: list[int] | str
    items: RequestItems
    uuids: Mapping[str, Sequence[str | None]]
    kwargs: Mapping[str, Any]
    cache: Any
    factors: Mapping[str, Any] = field(default_factory=dict)
    tokenization: Mapping[str, Any] = field(default_factory=dict)


class CommonProcessor(BaseMultiModalProcessor[ProcessingInfo]):
    """Processes the requests of a spec; generated classes set `spec`.

    Attributes:
        plan: the spec, bound to this model's config and tokenizer.
    """

    spec: ClassVar[Declaration]
    sends_rows: ClassVar[bool] = False
    """Whether the model compares the rows of its encoder with the layouts."""
    requires_tokenizer = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_dead(cls, CommonProcessor)

    def __init__(self, info: ProcessingInfo, dummy_inputs: DummyInputs, **options: Any) -> None:
        super().__init__(info, dummy_inputs, **options)
        self.plan: Plan = info.plan
        self._hashes = Hashes(hasher_algorithm(info.ctx.get_mm_config()), info.model_id)
        self._reader = CacheReader()
        self._tried: set[str] = set()

    # -- one request -------------------------------------------------------------------------------

    def rendered(self, request: Request, timed: Timed = nullcontext) -> dict[str, Any]:
        """A request in vLLM's form for its engine.

        Raises:
            InputError: the request cannot be served.
            SpecError: a mistake of the spec.
        """
        if not isinstance(request.prompt, str):
            self.plan.check_ids(request.prompt)
        self._check_uuids(request)
        counts = {name: len(own) for name, own in request.items.data.items()}
        with timed("get_mm_hashes"):
            hashes = self._hashed(request)
        with timed("get_cache_missing_items"):
            found = self._found(request, hashes)
        with timed("apply_hf_processor"):
            items = self._completed(request, counts, hashes, found)
        layouts = {
            name: [item.cached.layouts for item in of_modality]
            for name, of_modality in items.items()
        }
        with timed("apply_prompt_updates"):
            ids, placements = self._placed(request, counts, layouts)
        with timed("merge_mm_kwargs"):
            fields = self._exchanged(request, items)
        return engine_input(ids, fields, hashes, placements)

    def _hashed(self, request: Request) -> dict[str, list[str]]:
        """The hashes of the items of a request."""
        known = request.items.hashes
        for name, items in request.items.data.items():
            if name in known:
                continue
            modality = self.plan.modalities[name]
            if modality.is_never_kept:
                known[name] = unique_hashes(len(items))
                continue
            options = self._options_of(name, request)
            hashes = self._hashes.of(name, items, request.uuids.get(name), options)
            if not modality.may_cache(len(items)):
                hashes = self._hashes.of_all(hashes)
            known[name] = hashes
        return known

    def _found(
        self, request: Request, hashes: Mapping[str, list[str]]
    ) -> dict[str, list[ProcessedItem | None]]:
        """The items that the cache has, or another request on its way to the engine; None for those
        that are to be processed."""
        cache = request.cache
        found = {name: self._reader.find(cache, own) for name, own in hashes.items() if own}
        for name, items in found.items():
            if None in items and not self.plan.modalities[name].may_cache(len(items)):
                # each depends on all of them
                found[name] = [None] * len(items)
        return found

    def _options_of(self, name: str, request: Request) -> Mapping[str, Any]:
        """The options of a request with which items of a modality are processed."""
        if not request.kwargs:
            return request.factors
        own = options_of(self.plan.modalities[name].item, request.kwargs)
        return {**request.factors, "mm_processor_kwargs": own}

    def _completed(
        self,
        request: Request,
        counts: Mapping[str, int],
        hashes: Mapping[str, Sequence[str]],
        found: Mapping[str, Sequence[ProcessedItem | None]],
    ) -> dict[str, list[ProcessedItem]]:
        """All items of a request: those that were not found are processed.

        Raises:
            InputError: vLLM's cache can never hold an item, before 0.29.
        """
        items: dict[str, list[Any]] = {
            name: list(of_modality) for name, of_modality in found.items()
        }

        def process(missing: Mapping[str, Sequence[int]]) -> None:
            for name, processed in self._processed(request, counts, missing).items():
                for index, (fields, layouts) in processed.items():
                    size = 0 if request.cache is None else size_of(fields)
                    cached = CachedItem(layouts, size)
                    items[name][index] = ProcessedItem(hashes[name][index], fields, cached)

        process({name: _positions(own, lambda item: item is None) for name, own in items.items()})
        if request.cache is None:
            return items
        every = [item for of_modality in items.values() for item in of_modality]
        capacity = capacity_of(request.cache)
        if not SKIPS_LARGE and any(item.cached.size > capacity for item in every):
            remedy = "Raise --mm-processor-cache-gb, or set it to 0."
            raise InputError(self.plan.spec.name, "items that fit into vLLM's cache", "one", remedy)
        if sum(item.cached.size for item in every) > capacity:
            # there is no room for all: those that the cache has must be at hand when others evict
            # them
            process(
                {
                    name: _positions(own, lambda item: item.fields is None)
                    for name, own in items.items()
                }
            )
        return items

    def _processed(
        self, request: Request, counts: Mapping[str, int], missing: Mapping[str, Sequence[int]]
    ) -> dict[str, dict[int, tuple[MultiModalKwargsItem, ItemLayout]]]:
        """The fields and the layouts of some items of a request, by modality and index."""
        processed: dict[str, dict[int, tuple[MultiModalKwargsItem, ItemLayout]]]
        processed = {name: {} for name, count in counts.items() if count}
        some = {name: request.items.taken(name, own) for name, own in missing.items() if own}
        if not some:
            return processed
        plan = self._configured(request.kwargs)
        for name, parts in self._parts(plan, request, some, missing).items():
            modality = plan.modalities[name]
            # options of the request may make more rows of an item than those of the server do
            may_be_larger = bool(request.kwargs)
            with plan.blamed():
                layouts = [*modality.layouts(some[name], parts, may_be_larger=may_be_larger)]
            for i, fields, own in zip(missing[name], parts, layouts, strict=True):
                rows = None if some[name].embeds else own.tokens.num_embeds
                processed[name][i] = self.item(modality, fields, rows), own
        return processed

    def _configured(self, kwargs: Mapping[str, object]) -> Plan:
        """The plan for the `mm_processor_kwargs` of one request."""
        if not kwargs:
            return self.plan
        processor = LazyProcessor(self.info.get_hf_processor, kwargs)
        return self.plan.configured(self.info.merged_kwargs(kwargs), processor)

    def _parts(
        self,
        plan: Plan,
        request: Request,
        some: Mapping[str, Taken],
        missing: Mapping[str, Sequence[int]],
    ) -> Mapping[str, Processed]:
        """The processed fields of some items, by modality."""
        try:
            if request.items.offloaded is None:
                return plan.process(some)
            indices = {name: tuple(missing[name]) for name in some}
            return request.items.offloaded.processed(indices, some)
        except InputError:
            # a refusal of the spec's own largest item is a mistake of the spec, and raises here
            for name in some.keys() - self._tried:
                modality = self.plan.modalities[name]
                if modality.field_processor.hf_call is not None:
                    modality.process(modality.item.candidates()[0])
                    self._tried.add(name)
            raise

    def item(
        self, modality: BoundModality, fields: Mapping[str, Any], rows: int | None
    ) -> MultiModalKwargsItem:
        """vLLM's form of the fields of an item, raw with the number of its encoder rows."""
        return kwargs_item(modality, fields, rows if self.sends_rows else None)

    def _placed(
        self,
        request: Request,
        counts: Mapping[str, int],
        layouts: Mapping[str, Sequence[ItemLayout]],
    ) -> tuple[list[int], list[Placement]]:
        """The prompt with the layouts of all items in it, and where they stand."""
        ids = request.prompt
        if isinstance(ids, str):
            ids = self.plan.encode(ids, **request.tokenization)
        items = {
            name: [own.for_index(i) for i, own in enumerate(of_modality)]
            for name, of_modality in layouts.items()
        }
        return self.plan.place(self.plan.rewrite("prompt", ids, counts), items)

    def _exchanged(
        self, request: Request, items: Mapping[str, Sequence[ProcessedItem]]
    ) -> dict[str, list[Any]]:
        """The fields of all items of a request, after new items went into a cache of this process;
        a cache of two halves moves when the request is sent."""
        cache = request.cache
        for of_modality in items.values():
            self._reader.remember(cache, of_modality)
        if has_two_halves(cache):
            unsent: dict[str, list[Any]] = {name: [] for name in items}
            for name, of_modality in items.items():
                for index, item in enumerate(of_modality):
                    process_again = self._processing_again(request, name, index, item)
                    unsent[name].append(UnsentItem(item, name, cache, process_again))
            return unsent
        if cache is None:
            return {name: [item.fields for item in own] for name, own in items.items()}
        return fields_in(cache, items)

    def _processing_again(
        self, request: Request, name: str, index: int, item: ProcessedItem
    ) -> Callable[[], MultiModalKwargsItem] | None:
        """What processes an item again that only the cache has; None for one whose fields are at
        hand."""
        if item.fields is not None:
            return None
        items = RequestItems(request.items.data)  # not offloaded: this cannot wait
        count = len(items.data[name])
        is_alone = self.plan.modalities[name].may_cache(count)
        indices = [index] if is_alone else range(count)

        def process_again() -> MultiModalKwargsItem:
            again = self._processed(replace(request, items=items), {name: count}, {name: indices})
            fields, _ = again[name][index]
            return fields

        return process_again

    def _check_uuids(self, request: Request) -> None:
        for name in request.items.data:
            for i, uuid in enumerate(request.uuids.get(name) or ()):
                if not isinstance(uuid, str | None):
                    where = f"{self.plan.modalities[name].where}[{i}]"
                    got = f"{type(uuid).__name__} {uuid!r}"
                    raise InputError(where, "a string in multi_modal_uuids", got)

    # -- what vLLM wants beside `apply` ------------------------------------------------------------

    @override
    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        # vLLM's chat batches the embeddings of a message by these
        return {
            key: MultiModalFieldConfig(field=form, modality=name)
            for name, modality in self.plan.modalities.items()
            for key, form in vllm_fields(modality, self.sends_rows).items()
        }

    @override
    def _get_prompt_updates(self, *_: Any, **__: Any) -> Any:
        """Abstract in vLLM, whose own `apply` alone calls it."""
        raise NotImplementedError


def _positions(
    items: Sequence[ProcessedItem | None], is_wanted: Callable[[Any], bool]
) -> list[int]:
    return [i for i, item in enumerate(items) if is_wanted(item)]

"""The processor of a spec: one straight pipeline in place of vLLM's.

`CommonProcessor.rendered` does a request: its items are hashed, and looked up in vLLM's cache; what
the cache lacks is processed, and goes there; the layouts of all items are placed in the prompt.
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

from ..bound.calls import LazyProcessor
from ..bound.intake import Taken
from ..bound.modality import BoundModality
from ..bound.processing import Processed
from ..errors import InputError
from ..items import options_of
from ..placement import Alternatives, Placement
from ..plan import Plan
from ..spec import Declaration
from .compat import RELEASES, TOUCHES, SenderCache, hasher_algorithm
from .hashes import Hashes
from .hooks import refuse_dead
from .info import DummyInputs, ProcessingInfo
from .items import RequestItems, engine_input, kwargs_item, vllm_fields

Entry: TypeAlias = tuple[MultiModalKwargsItem | None, Alternatives]
"""What vLLM's cache has of an item: its fields, None where the engine has them, and its layouts."""

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
        uncached = {n for n in counts if not self.plan.modalities[n].may_cache(counts[n])}
        cache: Any = None if uncached else request.cache
        with timed("get_mm_hashes"):
            hashes = self._hashed(request, uncached)
        with timed("get_cache_missing_items"):
            missing = {name: _missing(cache, of_items) for name, of_items in hashes.items()}
        with timed("apply_hf_processor"):
            new = self._processed(request, counts, missing)
        try:
            with timed("merge_mm_kwargs"):
                entries = self._exchanged(cache, hashes, new)
            if entries is None:
                return self.rendered(replace(request, cache=None), timed)
            with timed("apply_prompt_updates"):
                ids, placements = self._placed(request, counts, entries)
        except Exception:
            # The engine, which has the other half of the cache, never sees the items of a refused
            # request, and would later evict others than this half. An empty half asks only for
            # items that the engine can have.
            if isinstance(cache, SenderCache):
                cache.clear_cache()
            raise
        items = {name: [item for item, _ in own] for name, own in entries.items()}
        return engine_input(ids, items, hashes, placements)

    def _hashed(self, request: Request, uncached: set[str]) -> dict[str, list[str]]:
        """The hashes of the items of a request."""
        known = request.items.hashes
        for name, items in request.items.data.items():
            if name not in known:
                options = self._options_of(name, request)
                own = self._hashes.of(name, items, request.uuids.get(name), options)
                # the engine caches encoder outputs by hash: an item that depends on the number of
                # items has another hash for each number
                number = f"-of-{len(own)}" if name in uncached else ""
                known[name] = [f"{item_hash}{number}" for item_hash in own] if number else own
        return known

    def _options_of(self, name: str, request: Request) -> Mapping[str, Any]:
        """The options of a request with which items of a modality are processed."""
        if not request.kwargs:
            return request.factors
        own = options_of(self.plan.modalities[name].item, request.kwargs)
        return {**request.factors, "mm_processor_kwargs": own}

    def _processed(
        self, request: Request, counts: Mapping[str, int], missing: Mapping[str, Sequence[int]]
    ) -> dict[str, list[Entry | None]]:
        """The entries of all items of a request: processed where missing, None for the others."""
        entries: dict[str, list[Entry | None]] = {
            name: [None] * count for name, count in counts.items() if count
        }
        some = {name: request.items.taken(name, own) for name, own in missing.items() if own}
        if not some:
            return entries
        plan = self._configured(request.kwargs)
        for name, parts in self._parts(plan, request, some, missing).items():
            modality = plan.modalities[name]
            # options of the request may make more rows of an item than those of the server do
            may_be_larger = bool(request.kwargs)
            with plan.blamed():
                layouts = [*modality.layouts(some[name], parts, may_be_larger=may_be_larger)]
            for i, fields, own in zip(missing[name], parts, layouts, strict=True):
                rows = None if some[name].embeds else own.placeholder.num_embeds
                entries[name][i] = self.item(modality, fields, rows), own
        return entries

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
                if modality.processing.call is not None:
                    modality.process(modality.item.candidates()[0])
                    self._tried.add(name)
            raise

    def item(
        self, modality: BoundModality, fields: Mapping[str, Any], rows: int | None
    ) -> MultiModalKwargsItem:
        """vLLM's form of the fields of an item, raw with the number of its encoder rows."""
        return kwargs_item(modality, fields, rows if self.sends_rows else None)

    def _exchanged(
        self,
        cache: Any,
        hashes: Mapping[str, Sequence[str]],
        entries: Mapping[str, Sequence[Entry | None]],
    ) -> Mapping[str, Sequence[Any]] | None:
        """The entries of a request after the new ones went into the cache, with those that were
        there. All are touched first: none may evict another one of the request. None where one
        did: there is no room for both, here or in the engine, whose half has the same size."""
        if cache is None:
            return entries
        for of_items in hashes.values() if TOUCHES else ():
            for item_hash in of_items:
                cache.touch_sender_cache_item(item_hash)
        try:
            return {
                name: [*map(cache.get_and_update_item, own, hashes[name])]
                for name, own in entries.items()
            }
        except AssertionError:
            cache.clear_cache()
            return None
        finally:
            if RELEASES:
                cache.release_sender_touches()

    def _placed(
        self, request: Request, counts: Mapping[str, int], entries: Mapping[str, Sequence[Entry]]
    ) -> tuple[list[int], list[Placement]]:
        """The prompt with the layouts of all items in it, and where they stand."""
        ids = request.prompt
        if isinstance(ids, str):
            ids = self.plan.encode(ids, **request.tokenization)
        items = {
            name: [layouts.at(i) for i, (_, layouts) in enumerate(own)]
            for name, own in entries.items()
        }
        return self.plan.place(self.plan.rewrite("prompt", ids, counts), items)

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


def _missing(cache: Any, hashes: list[str]) -> Sequence[int]:
    """The positions of the items that the cache lacks."""
    if cache is None:
        return range(len(hashes))
    return [i for i, is_cached in enumerate(cache.is_cached(hashes)) if not is_cached]

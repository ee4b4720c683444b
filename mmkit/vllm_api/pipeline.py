"""Steps 2 to 8 of a request, in place of those of vLLM's `BaseMultiModalProcessor.apply`.

vLLM's own steps process a text and its items together, and let surplus placeholders pass. The steps
here call none of vLLM's hooks. `RequestPipeline.run` lists them; each is a function of this module
that takes items and fills in one attribute of each `Item`. The numbers are those of
docs/how-it-works.md, which has the steps before and after these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from vllm.multimodal.inputs import MultiModalKwargsItem

from ..errors import InputError
from ..language.items import select_options
from ..plan.bind import plan_for_options
from ..plan.hf_calls import LazyProcessor
from ..plan.item import Item, group_by_modality
from ..plan.layouts import MAX_CACHED_IDS, MAX_KEY_VALUES, IndexedLayout
from ..plan.memo import Memo
from ..plan.outline import check_uuid
from ..plan.placement import ItemLayout, PlacedPrompt
from ..plan.plan import Plan
from .compat import SKIPS_LARGE
from .exchange import (
    CacheReader,
    UnsentItem,
    find_capacity,
    has_two_halves,
    make_entry,
    update_local_cache,
)
from .hashes import VllmItemHasher
from .info import ProcessingInfo
from .items import Offloaded, make_engine_input, make_kwargs_item

StageTimer: TypeAlias = Callable[[str], AbstractContextManager[Any]]
"""Returns a context that measures one stage, under the name that vLLM has for it."""


_NO_CONTEXT = nullcontext()


def measure_nothing(stage: str) -> AbstractContextManager[Any]:
    """Measure no stage: the timer where vLLM keeps no statistics."""
    return _NO_CONTEXT


@dataclass
class ProcessorRequest:
    """One request, in one form for all releases of vLLM.

    Attributes:
        prompt: token ids; a text as well up to vLLM 0.28.
        items: all items, modality by modality, within a modality in the caller's order.
        options: its `mm_processor_kwargs`.
        cache: vLLM's processor cache, or None.
        factors: other options on which the hashes of its items depend.
        tokenization: options of the tokenizer, for a text.
        offloaded: its data, where its items are processed in other processes; None where they are
            processed in this one.
    """

    prompt: list[int] | str
    items: list[Item]
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: Any = None
    factors: Mapping[str, Any] = field(default_factory=dict)
    tokenization: Mapping[str, Any] = field(default_factory=dict)
    offloaded: Offloaded | None = None

    @cached_property
    def items_by_modality(self) -> Mapping[str, Sequence[Item]]:
        """The items, by modality."""
        return group_by_modality(self.items)


class RequestPipeline:
    """Turns requests into vLLM's input for its engine.

    Attributes:
        plan: the spec, bound to the config and the tokenizer of a model.

    Args:
        info: has the plan, and loads the Hugging Face processor for the options of a request.
        hasher: makes the hashes of items.
        sends_row_counts: whether the model receives the number of encoder rows of each item.
    """

    def __init__(
        self, info: ProcessingInfo, hasher: VllmItemHasher, *, sends_row_counts: bool
    ) -> None:
        self.plan: Plan = info.plan
        self._info = info
        self._hasher = hasher
        self._send_row_counts = sends_row_counts
        self._reader = CacheReader()
        self._id_layouts = make_id_layout_cache()
        # the modalities whose largest item was processed after another item was refused: the spec
        # is sound there, and it need not be tried again
        self._tried_modalities: set[str] = set()

    def run(self, request: ProcessorRequest, timer: StageTimer = measure_nothing) -> dict[str, Any]:
        """Turn a request into vLLM's input for its engine.

        Before, vLLM has called `Parser` (step 1), and `Processor.apply` has made the items.

        2. `check_ids_and_uuids` refuses ids outside the vocabulary, and malformed uuids.
        3. `hash_items` fills in the key by which caches know an item.
        4. `fill_in_cached_items` fills in the layouts of items that a cache has. An item
           that becomes ids only sends no fields to the engine, so that vLLM's caches never see it:
           the pipeline caches its layout itself.
        5. `process_items` fills in the fields of the other items,
        6. `lay_out_items` their layouts, and `convert_fields` vLLM's form of their fields.
           `process_and_lay_out` makes these two steps, with the plan for the request's options.
        7. `place_items` writes the layouts of all items into the prompt.
        8. `prepare_exchange` puts the new items into a cache of this process. A cache of which the
           engine has a half changes in step 10, when the request is sent. In both cases a request
           that an earlier step refuses does not move the cache.

        The request goes on to `mmkit.vllm_api.admission.admit` (step 9).

        Raises:
            InputError: the request cannot be served.
            SpecError: a mistake of the spec.
        """
        check_ids_and_uuids(self.plan, request)
        # all but those that become ids only, which no cache of vLLM and no engine has
        engine_items = select_engine_items(self.plan, request.items)
        with timer("get_mm_hashes"):
            hash_items(self.plan, self._hasher, request)
        with timer("get_cache_missing_items"):
            items_to_process = fill_in_cached_items(
                self.plan, self._reader, self._id_layouts, request, engine_items
            )
        with timer("apply_hf_processor"):
            self.process_and_lay_out(request, items_to_process)
            if request.cache is not None:
                self._process_cached_items_if_cache_is_small(request, engine_items)
        with timer("apply_prompt_updates"):
            ids, placements = place_items(self.plan, request)
        with timer("merge_mm_kwargs"):
            prepare_exchange(self._reader, request, engine_items, self._make_reprocessors)
        return make_engine_input(ids, engine_items, placements)

    def process_and_lay_out(self, request: ProcessorRequest, items: Sequence[Item]) -> None:
        """Fill in the fields and the layouts of some items of a request.

        Errors as for `run`.
        """
        if not items:
            return
        plan = self.plan_for_options(request.options)
        try:
            process_items(plan, items, request.offloaded)
        except InputError:
            self._raise_if_spec_is_broken(items)
            raise
        # options of the request may make more rows of an item than the server's options do
        lay_out_items(plan, items, may_be_larger=bool(request.options))
        engine_items = select_engine_items(plan, items)
        convert_fields(plan, engine_items, sends_row_counts=self._send_row_counts)
        if request.cache is None:
            return
        for item in engine_items:
            item.cache_entry = make_entry(item)
        remember_id_layouts(plan, self._id_layouts, items)

    def plan_for_options(self, options: Mapping[str, object]) -> Plan:
        """Return the plan for the `mm_processor_kwargs` of one request."""
        if not options:
            return self.plan
        processor = LazyProcessor(self._info.get_hf_processor, options)
        return plan_for_options(self.plan, self._info.merge_kwargs(options), processor)

    def _raise_if_spec_is_broken(self, items: Sequence[Item]) -> None:
        """Process the largest item of each modality, after items were refused.

        Raises:
            SpecError: it is refused, too, although the spec itself declares it.
        """
        for name in group_by_modality(items):
            if name in self._tried_modalities:
                continue
            modality = self.plan.modalities[name]
            if modality.field_processor.hf_call is not None:
                modality.field_processor.process_spec_item(modality.item.candidates()[0])
                self._tried_modalities.add(name)

    def _process_cached_items_if_cache_is_small(
        self, request: ProcessorRequest, engine_items: Sequence[Item]
    ) -> None:
        """Process the items that only the cache has, if it is too small for the request.

        Other items of the request may evict them, so their fields must be at hand.

        Raises:
            InputError: the cache can never hold an item, before 0.29.
        """
        capacity = find_capacity(request.cache)
        sizes = [item.cache_entry.size for item in engine_items]
        if not SKIPS_LARGE and sizes and max(sizes) > capacity:
            remedy = "Raise --mm-processor-cache-gb, or set it to 0."
            raise InputError(self.plan.spec.name, "items that fit into vLLM's cache", "one", remedy)
        if sum(sizes) > capacity:
            cached_items = [item for item in engine_items if item.engine_fields is None]
            self.process_and_lay_out(request, cached_items)

    def _make_reprocessors(
        self, request: ProcessorRequest, items: Sequence[Item]
    ) -> list[Callable[[], MultiModalKwargsItem]]:
        """Return, for each item that only the cache has, a function that processes it again.

        Args:
            request: their request.
            items: modality by modality.
        """
        functions: list[Callable[[], MultiModalKwargsItem]] = []
        for name, items_of_modality in group_by_modality(items).items():
            if self.plan.modalities[name].are_independent(items_of_modality[0].count):
                for item in items_of_modality:
                    copies = [item.copy_unprocessed()]
                    functions.append(self._make_reprocessor(request, copies, 0))
                continue
            # Each depends on all items of the modality, so that its index is its position among the
            # copies. They share these: there would be 10^8 for a request of 10,000 items otherwise.
            copies = _copy_items_of_modality(request.items, name)
            for item in items_of_modality:
                functions.append(self._make_reprocessor(request, copies, item.index))
        return functions

    def _make_reprocessor(
        self, request: ProcessorRequest, copies: list[Item], position: int
    ) -> Callable[[], MultiModalKwargsItem]:
        """Return a function that processes copies of items, and returns the fields of one of them.

        Copies: nothing else that this request has made stays in memory until it is sent.
        """
        # not offloaded: this cannot wait
        request = replace(request, items=copies, cache=None, offloaded=None)

        def process_again() -> MultiModalKwargsItem:
            if copies[position].engine_fields is None:  # another of the copies may have been lost
                self.process_and_lay_out(request, copies)
            fields: MultiModalKwargsItem = copies[position].engine_fields
            return fields

        return process_again


def _copy_items_of_modality(items: Sequence[Item], modality: str) -> list[Item]:
    return [item.copy_unprocessed() for item in items if item.modality == modality]


def has_pipeline(processor: object) -> bool:
    """Return whether a processor of vLLM is one of a spec."""
    return isinstance(getattr(processor, "pipeline", None), RequestPipeline)


def select_engine_items(plan: Plan, items: Sequence[Item]) -> list[Item]:
    """Return the items whose fields go to the engine: all but those that become ids only."""
    return [item for item in items if not plan.modalities[item.modality].is_ids_only]


# -- 2: check --------------------------------------------------------------------------------------


def check_ids_and_uuids(plan: Plan, request: ProcessorRequest) -> None:
    """Refuse ids outside the vocabulary, and uuids that are no strings.

    Raises:
        InputError: names the first of them.
    """
    if not isinstance(request.prompt, str):
        plan.check_ids(request.prompt)
    for item in request.items:
        check_uuid(item, plan.modalities[item.modality])


# -- 3: hash ---------------------------------------------------------------------------------------


def hash_items(plan: Plan, hasher: VllmItemHasher, request: ProcessorRequest) -> None:
    """Fill in the hash of each item.

    A request whose items are processed in other processes takes the steps twice, and is hashed
    once.
    """
    if request.offloaded is not None and request.offloaded.hashes is not None:
        for item, item_hash in zip(request.items, request.offloaded.hashes, strict=True):
            item.hash = item_hash
        return
    for name, items in request.items_by_modality.items():
        options = _options_of_modality(plan, request, name)
        hashes = hasher.hash_items(plan.modalities[name], items, options)
        for item, key in zip(items, hashes, strict=True):
            assert key is not None  # vLLM hashes anything
            item.hash = key
    if request.offloaded is not None:
        request.offloaded.hashes = [item.hash for item in request.items]


def _options_of_modality(plan: Plan, request: ProcessorRequest, name: str) -> Mapping[str, Any]:
    """Return the options of a request with which the items of a modality are processed."""
    if not request.options:
        return request.factors
    options = select_options(plan.modalities[name].item, request.options)
    return {**request.factors, "mm_processor_kwargs": options}


# -- 4: look up ------------------------------------------------------------------------------------


def make_id_layout_cache() -> Memo:
    """Return a cache for the layouts of items that become ids only, by the hashes of the items.

    It is apart from vLLM's cache, whose half in the engine would never see these items.
    """
    return Memo(MAX_CACHED_IDS, _size_in_cache)


def _size_in_cache(layout: ItemLayout) -> int:
    return len(layout.tokens) + MAX_KEY_VALUES


def fill_in_cached_items(
    plan: Plan,
    reader: CacheReader,
    id_layouts: Memo,
    request: ProcessorRequest,
    engine_items: Sequence[Item],
) -> list[Item]:
    """Fill in the layouts of the items that a cache has, and return the items to process.

    These are the items without a layout, and those that depend on one of them; without a cache, all
    items. Another request on its way to the engine may have an item, too.

    Args:
        plan: the server's plan.
        reader: looks into the cache for the items of the engine.
        id_layouts: the layouts of items that become ids only, by their hashes.
        request: the request, with hashed items.
        engine_items: its items whose fields go to the engine.
    """
    if request.cache is None:
        return request.items
    reader.fill_in_from_cache(request.cache, engine_items)
    items_to_process: list[Item] = []
    for name, items in request.items_by_modality.items():
        modality = plan.modalities[name]
        if modality.is_ids_only:
            for item in items:
                item.layout = id_layouts.find(item.hash)
        missing_here: Sequence[Item] = [item for item in items if item.layout is None]
        if missing_here and not modality.are_independent(len(items)):
            missing_here = items  # each depends on all of them
        items_to_process += missing_here
    return items_to_process


# -- 5: process ------------------------------------------------------------------------------------


def process_items(plan: Plan, items: Sequence[Item], offloaded: Offloaded | None = None) -> None:
    """Fill in the processed fields of items.

    Raises:
        ItemsPending: other processes have to process them first.
    """
    if offloaded is not None:
        offloaded.fill_in_fields(items)
        return
    plan.fill_in_fields(items)


# -- 6: lay out ------------------------------------------------------------------------------------


def lay_out_items(plan: Plan, items: Sequence[Item], *, may_be_larger: bool = False) -> None:
    """Fill in the layouts of processed items.

    A function of its own, so that tests/path/planted may put a wrong step in its place.

    Args:
        plan: the plan for the options of the request.
        items: the items.
        may_be_larger: whether they may have more encoder rows than the largest item of the spec.
    """
    plan.fill_in_layouts(items, may_be_larger=may_be_larger)


def convert_fields(plan: Plan, items: Sequence[Item], *, sends_row_counts: bool) -> None:
    """Fill in vLLM's form of the fields of items.

    Args:
        plan: the plan for the options of the request.
        items: items with fields and layouts.
        sends_row_counts: whether the model receives the number of encoder rows of each item.
    """
    for item in items:
        row_count = None
        if sends_row_counts and not item.is_embedding:
            row_count = item.layout.tokens.num_embeds
        modality = plan.modalities[item.modality]
        item.engine_fields = make_kwargs_item(modality, item.fields, row_count)


def remember_id_layouts(plan: Plan, id_layouts: Memo, items: Sequence[Item]) -> None:
    """Cache the layouts of items that become ids only.

    Left out are layouts that depend on the index of their item, since they keep the tensors of the
    item in memory, and those of items that depend on the other items of their request.
    """
    for item in items:
        modality = plan.modalities[item.modality]
        if not modality.is_ids_only or isinstance(item.layout, IndexedLayout):
            continue
        if modality.are_independent(item.count):
            id_layouts.keep(item.hash, item.layout)


# -- 7: place --------------------------------------------------------------------------------------


def place_items(plan: Plan, request: ProcessorRequest) -> PlacedPrompt:
    """Return the prompt with the layouts of all items in it, and where they stand."""
    ids = request.prompt
    if isinstance(ids, str):
        ids = plan.encode(ids, **request.tokenization)
    return plan.rewrite_and_place(ids, request.items)


# -- 8: prepare the exchange -----------------------------------------------------------------------


def prepare_exchange(
    reader: CacheReader,
    request: ProcessorRequest,
    engine_items: Sequence[Item],
    make_reprocessors: Callable[
        [ProcessorRequest, Sequence[Item]], list[Callable[[], MultiModalKwargsItem]]
    ],
) -> None:
    """Put new items into the cache, and fill in the fields of items that the cache has.

    A cache of which the engine has a half changes when the request is sent: see
    `mmkit.vllm_api.exchange`. Until then, an `UnsentItem` stands for the fields of each item.

    Args:
        reader: finds the items for other requests from now on.
        request: a complete request, which no later step refuses.
        engine_items: its items whose fields go to the engine.
        make_reprocessors: returns, for each item that only the cache has, a function that processes
            it again, since the cache may drop it until then.
    """
    cache = request.cache
    if cache is None or not engine_items:
        return
    reader.remember_entries(cache, engine_items)
    if not has_two_halves(cache):
        update_local_cache(cache, engine_items)
        return
    cached_items = [item for item in engine_items if item.engine_fields is None]
    reprocessors = make_reprocessors(request, cached_items)
    reprocessor_of = dict(zip(cached_items, reprocessors, strict=True))
    for item in engine_items:
        item.engine_fields = UnsentItem(
            item.modality,
            item.hash,
            item.engine_fields,
            item.cache_entry,
            cache,
            reprocessor_of.get(item),
        )
    reader.remember_unsent(engine_items)

"""The base of the processor classes in every generation of vLLM's processor API.

A generation's module translates vLLM's calls into calls of a few methods here:

- `CommonInfo.new_parser`: the parser;
- `CommonProcessor.worst`: the prompt and the items of the dummy request;
- `CommonProcessor.guarded`, `may_cache`, `hashed`: around one request, its use of the cache, and
  its hashes;
- `CommonProcessor.features`, `prompt_ids`: the processed items, and the prompt for placement.

In return it provides `merged_kwargs` and the `cache_of` a request. `override` marks the methods
that vLLM calls; see `mmkit.vllm_api.hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.feature_extraction_utils import BatchFeature
from typing_extensions import override
from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo

from ..bound.calls import Calls, LazyProcessor
from ..bound.memo import Memo, options_key
from ..bound.placeholders import rows_field
from ..bound.processing import Processed
from ..errors import InputError, SpecError
from ..plan import CONFIGURED, Plan
from ..training.processor import own_processor
from ..training.saving import announce
from ..updates import Insert
from .common import (
    Details,
    EmbedItems,
    Parser,
    ResolvedUpdate,
    details,
    embeds_size,
    field_configs,
    fixed_details,
    indices_of,
    some_of,
    taken,
    total,
)
from .elsewhere import Elsewhere
from .hashes import ByVllm, Hashes, check_name
from .moved import (
    BaseDummyInputsBuilder,
    PlaceholderFeaturesInfo,
    SenderCache,
    hasher_algorithm,
)
from .names import shared_file

if TYPE_CHECKING:
    from ..spec import Declaration

_PROCESSED = "mmkit_processed"
"""Key in the BatchFeature for the sizes of flat fields: vLLM asks for field configs without
items."""

_counts: ContextVar[Mapping[str, int] | None] = ContextVar("items by modality", default=None)
"""The numbers of items of the current request: vLLM passes the prompt on without them."""

_changed: ContextVar[list[Any]] = ContextVar("caches that a request has changed")


class CommonInfo(BaseProcessingInfo):
    """vLLM's questions about the modalities of a spec; generated classes set `spec`."""

    spec: ClassVar[Declaration]
    _last: ClassVar[tuple[Any, Plan | None]] = None, None
    """The arguments of the last binding, and its plan, which keeps them alive."""

    @cached_property
    def plan(self) -> Plan:
        """The spec, bound to this model's config and tokenizer: bound once, although vLLM makes a
        new info for each chat request."""
        announce(self.spec)  # the checkpoint may have been saved with its processor
        config, kwargs = self.get_hf_config(), self.merged_kwargs({})
        tokenizer = self.ctx.tokenizer
        if type(tokenizer) is object:  # what vLLM 0.11 has for none
            tokenizer = None
        most = self.ctx.model_config.max_model_len
        bound_to = (*map(id, (self.spec, self.ctx.model_config, config, tokenizer)), kwargs, most)
        last, plan = self._last
        if plan is None or last != bound_to:
            processor = LazyProcessor(self.get_hf_processor)
            plan = Plan(self.spec, config, tokenizer, processor, kwargs, most)
            type(self)._last = bound_to, plan
        return plan

    @override
    def get_hf_processor(self, **kwargs: object) -> Any:
        try:
            return own_processor(super().get_hf_processor(**kwargs))
        except TypeError as error:  # of vLLM, where it loaded a tokenizer or a part
            if kwargs:
                raise
            expected = "a checkpoint with a Hugging Face processor"
            remedy = "Load the part that it has in hf(processor=...)."
            raise SpecError("proc", expected, str(error).rstrip("."), remedy) from error

    def merged_kwargs(self, kwargs: Mapping[str, object]) -> dict[str, Any]:
        """The `mm_processor_kwargs` of a request, merged with the server's."""
        merged: dict[str, Any] = self.ctx.get_mm_config().merge_mm_processor_kwargs(kwargs)
        return merged

    def new_parser(self) -> Parser:
        """A parser of callers' data."""
        config = self.ctx.model_config
        return Parser(
            self.plan,
            embeds_size(config) if config.get_multimodal_config().enable_mm_embeds else None,
        )

    @override
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {name: modality.limit for name, modality in self.plan.modalities.items()}

    @override
    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        modalities = [m for name, m in self.plan.modalities.items() if mm_counts.get(name)]
        if any(m.needs_hf for m in modalities):
            return None  # vLLM then processes the dummy inputs and counts their tokens
        return {m.name: m.largest()[1] for m in modalities}


class ParsingInfo(CommonInfo):
    """An info that vLLM asks for the parser; before 0.16 it asks the processor."""

    @override
    def get_data_parser(self) -> Parser:
        return self.new_parser()

    @override
    def validate_num_items(self, modality: str, num_items: int) -> None:
        self.plan.check_names([modality])
        self.plan.modalities[modality].intake.check_count(
            num_items, self.allowed_mm_limits[modality]
        )


class DummyInputs(BaseDummyInputsBuilder[CommonInfo]):
    """The worst-case request of a spec; generated classes set `spec`."""

    spec: ClassVar[Declaration]
    processor: CommonProcessor

    @override
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        # dummy prompts are built as token ids, so that models without a tokenizer have them too
        return ""

    @override
    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
    ) -> Any:
        sizes = {name: dummy_sizes(options) for name, options in (mm_options or {}).items()}
        counts = {name: count for name, count in mm_counts.items() if count}
        return {
            name: [self.processor.largest(name, sizes.get(name))] * count
            for name, count in counts.items()
        }


def dummy_sizes(options: Any) -> dict[str, int]:
    """The sizes that vLLM's `limit_mm_per_prompt` states for the dummy items of one modality."""
    stated = {} if options is None else vars(options)
    return {name: size for name, size in stated.items() if name != "count" and size is not None}


class CommonProcessor(BaseMultiModalProcessor[CommonInfo]):
    """Processes the requests of a spec; generated classes set `spec`."""

    spec: ClassVar[Declaration]
    sends_rows: ClassVar[bool] = False
    """Whether the model compares the rows of its encoder with the layouts."""
    requires_tokenizer = False

    def __init__(self, info: CommonInfo, dummy_inputs: DummyInputs, **options: Any) -> None:
        super().__init__(info, dummy_inputs, **options)
        dummy_inputs.processor = self
        self._hashes = Hashes(hasher_algorithm(info.ctx.get_mm_config()))
        self._plans = Memo(CONFIGURED)
        self._samples: dict[str, Mapping[str, Any]] = {}

    @cached_property
    def plan(self) -> Plan:
        """The spec, bound to this model's config and tokenizer."""
        plan: Plan = self.info.plan
        return plan

    def share_names(self, config: Any) -> None:
        """Share the names of items with the other API servers of vLLM's config."""
        if (path := shared_file(config, "names")) is not None:
            self._hashes.share(path)

    # -- dummy inputs ------------------------------------------------------------------------------

    def largest(self, name: str, sizes: Mapping[str, int] | None = None) -> Any:
        """The item of a modality with the most encoder rows, of at most `sizes`; see
        `BoundModality.largest_item`."""
        with self._of_the_spec():
            process = partial(self._process_one, name)
            return self.plan.modalities[name].largest_item(process, sizes)

    def _process_one(self, name: str, value: Any) -> Mapping[str, Any]:
        """The processed fields of an item that the spec itself states."""
        with self._of_the_spec():
            return self._process(self.data_parser.parse_mm_data({name: [value]}), {})[name].parts[0]

    @contextmanager
    def _of_the_spec(self) -> Iterator[None]:
        """A context in which the refusal of an item is a mistake of the spec, which stated it."""
        try:
            yield
        except InputError as error:
            raise SpecError(f"the largest item: {error}") from error

    def worst(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any = None
    ) -> tuple[list[int], Any]:
        """The request with the most tokens: its prompt, and its items."""
        mm_items = self.data_parser.parse_mm_data(
            self.dummy_inputs.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        )
        prompt: list[int] = []
        for name, items in mm_items.items():
            modality, process = self.plan.modalities[name], partial(self._process_one, name)
            items.mmkit_largest = not dummy_sizes((mm_options or {}).get(name))
            for index, value in enumerate(items.get_all()):
                update, target, written = modality.written(value, index, process)
                prompt += written
                if isinstance(update, Insert) and not index:  # a prefix, if there is one
                    prompt = [*target, *prompt]
        return prompt, mm_items

    # -- one request -------------------------------------------------------------------------------

    def guarded(
        self,
        prompt: Any,
        mm_items: Any,
        mm_uuids: Mapping[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """Run a request with mmkit's own checks. Remember the names of its items; if it fails,
        empty the caches that it changed."""
        if not isinstance(prompt, str):
            self.plan.check_ids(prompt)
        self._check_uuids(mm_items, mm_uuids)
        changed: list[Any] = []
        tokens = _counts.set({name: len(items) for name, items in mm_items.items()})
        token = _changed.set(changed)
        try:
            outcome = run()
        except Exception:
            # The engine, which has the other half of the cache, never sees the items of a refused
            # request, and would later evict others than this half. An empty half asks only for
            # items that the engine can have.
            for cache in changed:
                cache.clear_cache()
            raise
        finally:
            _counts.reset(tokens)
            _changed.reset(token)
        self._hashes.keep(getattr(mm_items, "mmkit_names", {}))
        return outcome

    @override
    def _merge_mm_kwargs(self, cache: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(cache, SenderCache):
            _changed.get().append(cache)
        return super()._merge_mm_kwargs(cache, *args, **kwargs)

    def cache_of(self, inputs: Any) -> Any:
        """The processor cache that a request uses, where requests are objects."""
        raise NotImplementedError

    def may_cache(self, mm_items: Any) -> bool:
        """Whether vLLM may cache the processed items of a request."""
        return all(
            self.plan.modalities[name].may_cache(len(items)) for name, items in mm_items.items()
        )

    def hashed(
        self,
        mm_items: Any,
        uuids: Mapping[str, Any],
        by_vllm: ByVllm,
        *,
        options: Mapping[str, Any],
    ) -> dict[str, list[str]]:
        """The hashes of the items of a request; see `Hashes.of`."""
        hashes, mm_items.mmkit_names = self._hashes.of(mm_items, uuids, by_vllm, options=options)
        for name, own in hashes.items():
            if not self.plan.modalities[name].may_cache(len(own)):
                # the engine caches encoder outputs by hash: an item that depends on the number of
                # items has another hash for each number
                hashes[name] = [f"{item_hash}-of-{len(own)}" for item_hash in own]
        return hashes

    def prompt_ids(self, prompt: Any, **options: Any) -> list[int]:
        """The ids for placement of a prompt, which may still be a text."""
        if isinstance(prompt, str):
            prompt = self.plan.encode(prompt, **options)
        return self.plan.rewrite("prompt", prompt, _counts.get())

    @override
    def _get_cache_missing_items(self, cache: Any, mm_data_items: Any, mm_hashes: Any) -> Any:
        cached = {name: cache.is_cached(hashes) for name, hashes in mm_hashes.items()}
        missing = type(mm_data_items)()
        for name, flags in cached.items():
            if not all(flags):
                indices = [i for i, flag in enumerate(flags) if not flag]
                missing[name] = some_of(mm_data_items[name], indices)
                missing[name].mmkit_total = len(flags)
                missing[name].mmkit_indices = indices
        missing.mmkit_elsewhere = getattr(mm_data_items, "mmkit_elsewhere", None)
        return cached, missing

    # -- processing --------------------------------------------------------------------------------

    def _configured(self, kwargs: Mapping[str, object]) -> Plan:
        """The plan for the `mm_processor_kwargs` of one request."""
        if not kwargs:
            return self.plan
        own = dict(kwargs)
        processor = LazyProcessor(lambda: self.info.get_hf_processor(**own))
        return self._plans.get(
            options_key(own), lambda: self.plan.configured(self.info.merged_kwargs(own), processor)
        )

    def _process(self, mm_items: Any, kwargs: Mapping[str, object]) -> dict[str, Processed]:
        plan = self._configured(kwargs)
        items = {name: taken(own) for name, own in mm_items.items()}
        calls = Calls(partial(self._hf_processor, kwargs), self.call_hf, kwargs)
        return calls.process(plan.modalities, items)

    @cached_property
    def _plain_hf_processor(self) -> Any:
        """The model's Hugging Face processor, for requests without options of their own."""
        return self.info.get_hf_processor()

    def _hf_processor(self, kwargs: Mapping[str, object]) -> Any:
        return self.info.get_hf_processor(**kwargs) if kwargs else self._plain_hf_processor

    def call_hf(
        self, processor: Any, inputs: Mapping[str, Any], kwargs: Mapping[str, object]
    ) -> Any:
        """The outputs of a Hugging Face processor, floats in the model's dtype."""
        try:
            return self.info.ctx.call_hf_processor(processor, inputs, kwargs)
        except ValueError as error:  # vLLM's message shows all the data and not the reason
            raise error.__cause__ or error from None

    def features(self, mm_items: Any, kwargs: Mapping[str, object]) -> BatchFeature:
        """The processed fields of the items, in the form of a Hugging Face processor's result."""
        elsewhere: Elsewhere | None = getattr(mm_items, "mmkit_elsewhere", None)
        try:
            if elsewhere is None:
                processed = self._process(mm_items, kwargs)
            else:
                indices = {name: indices_of(own) for name, own in mm_items.items()}
                items = {name: taken(own) for name, own in mm_items.items()}
                processed = elsewhere.processed(indices, items)
        except InputError:
            # a refusal of the spec's own largest item is a mistake of the spec, and raises here
            for name in mm_items:
                if self.plan.modalities[name].processing.hf is not None:
                    self.sample(name)
            raise
        features = BatchFeature()
        for name, done in processed.items():
            own = mm_items[name]
            own.mmkit_parts = done.parts
            own.mmkit_details = self._details(name, own, kwargs)
            features.data.update(done.data)
            if self.sends_rows and not isinstance(own, EmbedItems):
                rows = [first.alternative.placeholder.num_embeds for first, *_ in own.mmkit_details]
                features.data[rows_field(name)] = torch.tensor(rows)
        features.data[_PROCESSED] = processed
        return features

    @override
    def _get_mm_fields_config(
        self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, Any]:
        processed, none = hf_inputs.get(_PROCESSED, {}), Processed({}, {}, [])
        configs: dict[str, Any] = {}
        for name, modality in self.plan.modalities.items():
            done = processed.get(name, none)
            configs.update(field_configs(modality, done, with_rows=self.sends_rows))
        return configs

    # -- fields from elsewhere ---------------------------------------------------------------------

    @property
    def takes_embeds(self) -> bool:
        """Whether the engine was started for precomputed embeddings."""
        return bool(self.info.ctx.get_mm_config().enable_mm_embeds)

    def sample(self, name: str) -> Mapping[str, Any]:
        """The processed fields of one item of a modality that the spec states; processed once."""
        if (fields := self._samples.get(name)) is None:
            value = self.plan.modalities[name].item.candidates()[0]
            fields = self._samples[name] = self._process_one(name, value)
        return fields

    def hash_of_fields(self, name: str, fields: Mapping[str, Any]) -> str:
        """The hash of an item that is known by its processed fields alone."""
        return self._hashes.of_fields(name, fields)

    # -- prompt updates ----------------------------------------------------------------------------

    @override
    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        updates = []
        for name, items in mm_items.items():
            if contents := getattr(items, "mmkit_details", ()):  # none of no items
                updates += [
                    ResolvedUpdate(name, [c[n] for c in contents]) for n in range(len(contents[0]))
                ]
        return updates

    def _details(self, name: str, items: Any, kwargs: Mapping[str, object]) -> list[list[Details]]:
        """The alternatives of each item of a modality, after processing."""
        modality, embeds = self._configured(kwargs).modalities[name], isinstance(items, EmbedItems)
        placeholders, contents, most = modality.placeholders, [], None
        fixed = None if placeholders.varies(embeds) else fixed_details(modality, embeds)
        is_largest = getattr(items, "mmkit_largest", False)
        # options of the request may make more rows of an item than those of the server do
        if fixed is None and len(items) and not kwargs and not is_largest:
            most = modality.most_rows(partial(self._process_one, name))
        for index, value in enumerate(items.get_all()):
            fields = items.mmkit_parts[index]  # with hidden ones, which vLLM does not have
            if (alternatives := fixed) is None:
                scope = modality.scope(value, index, fields, total(items))
                alternatives = details(modality, scope, embeds)
            placeholder = alternatives[0].alternative.placeholder
            if is_largest:
                modality.note_largest(value, placeholder.num_embeds)
            sent = len(value.rows) if embeds else None
            placeholders.check_rows(index, placeholder.num_embeds, sent=sent, most=most)
            if modality.positions is not None:
                modality.positions.check(fields, placeholder)
            contents.append(alternatives)
        return contents

    @override
    def _recompute_cached_prompt_update(self, cached_update: Any, new_item_idx: int) -> Any:
        content = cached_update.content.moved(new_item_idx)
        if content is cached_update.content and cached_update.item_idx == new_item_idx:
            return cached_update
        return replace(cached_update, item_idx=new_item_idx, target=content.target, content=content)

    @override
    def _apply_prompt_updates(
        self, token_ids: list[int], mm_prompt_updates: Any
    ) -> tuple[list[int], dict[str, Any]]:
        items = {}
        for name, of_modality in mm_prompt_updates.items():
            items[name] = [
                [update.content.alternative for update in updates] for updates in of_modality
            ]
            for i, (first, *_) in enumerate(of_modality):
                if first.modality != name:
                    where = f"{self.plan.modalities[name].where}[{i}]"
                    got = f"one of {first.modality}"
                    raise InputError(
                        where, f"the uuid of one of {name}", got, "Use each uuid for one item."
                    )
        ids, placements = self.plan.place(token_ids, items)
        infos: dict[str, list[Any]] = {}
        for at in placements:
            info = PlaceholderFeaturesInfo(
                at.modality, at.index, at.start, at.placeholder.ids, at.placeholder.is_embed
            )
            infos.setdefault(at.modality, []).append(info)
        return ids, infos

    def _check_uuids(self, mm_items: Any, mm_uuids: Mapping[str, Any]) -> None:
        for name, items in mm_items.items():
            modality, values = self.plan.modalities[name], items.get_all()
            uuids = mm_uuids.get(name)
            if not uuids and not any(value is None for value in values):
                continue
            uuids = uuids or [None] * len(values)
            for i, (value, uuid) in enumerate(zip(values, uuids, strict=True)):
                if value is not None and uuid is None:
                    continue
                if uuid is not None and not isinstance(uuid, str):
                    got = f"{type(uuid).__name__} {uuid!r}"
                    raise InputError(f"{modality.where}[{i}]", "a string in multi_modal_uuids", got)
                check_name(uuid, f"{modality.where}[{i}]")
                if value is None and uuid is None:
                    remedy = "Send the item, or the uuid of a cached one in multi_modal_uuids."
                    raise InputError(
                        f"{modality.where}[{i}]", modality.item.expected, "None", remedy
                    )

"""mmkit's items, fields and layouts as vLLM's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

from typing_extensions import override
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import (
    AudioProcessorItems,
    EmbeddingItems,
    ImageProcessorItems,
    ModalityDataItems,
    MultiModalDataParser,
    ProcessorBatchItems,
)
from vllm.multimodal.processing import PromptIndexTargets, PromptReplacement, PromptUpdateDetails

from ..bound.calls import Taken
from ..bound.modality import BoundModality
from ..bound.placeholders import rows_field
from ..bound.processing import Processed
from ..expr import Scope
from ..field import Batched, Flat
from ..items import Embedding
from ..placement import Alternative
from ..plan import Plan
from ..updates import Insert
from .elsewhere import Elsewhere
from .moved import KEEPS_ON_CPU, ResolvedPromptUpdate, UpdateMode


class EmbedItems(EmbeddingItems):
    """Precomputed embeddings, on the processor path: passthrough data would switch vLLM's processor
    cache off."""

    def __init__(self, embeddings: Sequence[Embedding], modality: str) -> None:
        super().__init__([own.rows for own in embeddings], modality)  # vLLM looks at these
        self.data: Any = list(embeddings)

    @override
    def get_processor_data(self) -> Mapping[str, object]:
        return {f"{self.modality}_embeds": [own.rows for own in self.get_all()]}

    @override
    def get_item_for_hash(self, index: int) -> object:
        embedding = self.get(index)
        return dict(embedding) if len(embedding) > 1 else embedding.rows

    @override
    def get_passthrough_data(self) -> Mapping[str, object]:
        return {}


_CANONICAL = {"image": ImageProcessorItems, "audio": AudioProcessorItems}


class Parser(MultiModalDataParser):
    """Turns callers' data into canonical items."""

    def __init__(self, plan: Plan, hidden_size: int | None) -> None:
        # not target_sr: canonical audio has its rate
        super().__init__(
            video_needs_metadata=any(m.item.metadata for m in plan.modalities.values())
        )
        self.plan, self.hidden_size = plan, hidden_size
        self._parsers = {
            name: partial(self._parse, modality) for name, modality in plan.modalities.items()
        }

    @override
    def _get_subparsers(self) -> Mapping[str, Any]:
        return self._parsers

    @override
    def parse_mm_data(self, mm_data: Any) -> Any:
        if not isinstance(mm_data, Elsewhere):
            self.plan.check_names(mm_data)
            return super().parse_mm_data(mm_data)
        if mm_data.parsed is None:
            mm_data.parsed = self.parse_mm_data(dict(mm_data))
            mm_data.parsed.mmkit_elsewhere = mm_data
        return mm_data.parsed

    def _parse(self, modality: BoundModality, data: Any) -> Any:
        items, embeds = modality.intake.take(data, self.hidden_size)
        if embeds and items:
            return EmbedItems(items, modality.name)
        # canonical already: vLLM would copy each image, and resample audio
        if modality.item.media in _CANONICAL and items:
            return _CANONICAL[modality.item.media](items)
        if modality.item.media:
            return super()._get_subparsers()[modality.item.media](items)
        return ProcessorBatchItems(items, modality.name)


def embeds_size(model_config: Any) -> int:
    """Width of the language model's rows."""
    # 0.11 has no projections
    size = getattr(model_config, "get_inputs_embeds_size", model_config.get_hidden_size)
    return int(size())


def field_configs(
    modality: BoundModality, processed: Processed, *, with_rows: bool
) -> Mapping[str, MultiModalFieldConfig]:
    """vLLM's configuration for splitting the processed fields of one modality, `with_rows` also
    the numbers of its encoder rows, where items differ in them."""
    known = partial(_field_configs, modality, processed, with_rows)
    # as any other request's
    if all(isinstance(declared, Batched) for declared in modality.fields_and_embeds.values()):
        return modality.adapted.get(("fields", with_rows), known)
    return known()


def _field_configs(
    modality: BoundModality, processed: Processed, with_rows: bool
) -> dict[str, MultiModalFieldConfig]:
    name, configs = modality.name, {}
    on_cpu = {"keep_on_cpu": True} if KEEPS_ON_CPU else {}
    for key, declared in modality.fields_and_embeds.items():
        options = on_cpu if declared.keep_on_cpu else {}
        if isinstance(declared, Batched):
            configs[key] = MultiModalFieldConfig.batched(name, **options)
        elif isinstance(declared, Flat):
            slices = item_slices(processed.sizes.get(key, ()), declared.dim)
            configs[key] = MultiModalFieldConfig.flat(name, slices, dim=declared.dim, **options)
        else:
            configs[key] = MultiModalFieldConfig.shared(name, len(processed.parts), **options)
    if with_rows and modality.placeholders.has_own_rows:
        configs[rows_field(name)] = MultiModalFieldConfig.batched(name, **on_cpu)
    return configs


def item_slices(sizes: Sequence[int], dim: int) -> list[Any]:
    """Where the items of a flat field lie, of these extents along a dimension."""
    slices = [slice(first, last) for first, last in pairwise([0, *accumulate(sizes)])]
    if dim == 0:
        return slices  # vLLM takes lists by nothing else
    before = (slice(None),) * dim if dim > 0 else (...,)
    return [(*before, one, *(slice(None),) * (-dim - 1)) for one in slices]


def taken(items: ModalityDataItems[Any, Any]) -> Taken:
    """The items of a modality, ready for processing."""
    return Taken(items.get_all(), isinstance(items, EmbedItems), total(items))


def indices_of(items: ModalityDataItems[Any, Any]) -> tuple[int, ...]:
    """Where the items of a modality stand among those of the request, where some are cached."""
    return tuple(getattr(items, "mmkit_indices", range(len(items))))


def total(items: ModalityDataItems[Any, Any]) -> int:
    """Number of items of the modality in the request: of those that are not cached, more than they
    are."""
    return int(getattr(items, "mmkit_total", len(items)))


def some_of(items: Any, indices: Sequence[int]) -> Any:
    """The items at some positions among a modality's items. They are canonical already, and vLLM
    would parse them again."""
    part = copy(items)
    part.data = [items.data[i] for i in indices]
    if isinstance(getattr(items, "metadata", None), list) and items.metadata:
        part.metadata = [items.metadata[i] for i in indices]
    return part


def target_of(alternative: Alternative) -> Any:
    """vLLM's form of a target."""
    if isinstance(alternative.update, Insert):
        if alternative.update.at == "after":
            return PromptIndexTargets.prefix(list(alternative.target))
        return (
            PromptIndexTargets.start()
            if alternative.update.at == "start"
            else PromptIndexTargets.end()
        )
    return list(alternative.written)


class Details(PromptUpdateDetails):
    """One alternative of one item, with the values to evaluate it again at another index."""

    def __init__(
        self,
        alternative: Alternative,
        number: int,
        modality: BoundModality,
        scope: Scope | None,
        embeds: bool,
    ) -> None:
        mask = alternative.placeholder.is_embed
        super().__init__(
            full=alternative.placeholder.ids, is_embed=None if mask is None else lambda *_: mask
        )
        self.alternative, self.number, self.target = alternative, number, target_of(alternative)
        self.mode = (
            UpdateMode.INSERT if isinstance(alternative.update, Insert) else UpdateMode.REPLACE
        )
        self.modality, self.scope, self.embeds = modality, scope, embeds

    def moved(self, index: int) -> Details:
        """This alternative of the item at another position among the request's items."""
        if self.scope is None or self.scope.item.index == index:
            return self
        scope = replace(
            self.scope, item=SimpleNamespace(**{**vars(self.scope.item), "index": index})
        )
        return details(self.modality, scope, self.embeds)[self.number]


def details(modality: BoundModality, scope: Scope, embeds: bool) -> list[Details]:
    """vLLM's form of the alternatives of one item."""
    alternatives = modality.placeholders.alternatives(scope, embeds=embeds)
    # it keeps the processed tensors alive
    needed = scope if modality.placeholders.depends_on_index else None
    return [
        Details(one, number, modality, needed, embeds) for number, one in enumerate(alternatives)
    ]


def fixed_details(modality: BoundModality, embeds: bool) -> list[Details]:
    """vLLM's form of the alternatives of any item of a modality whose items do not differ in
    them."""
    return modality.adapted.get(
        embeds, lambda: details(modality, modality.scope(SimpleNamespace(), 0), embeds)
    )


class ResolvedUpdate(PromptReplacement):
    """One alternative of all items of a modality, as vLLM's prompt update, with nothing left to
    resolve."""

    def __init__(self, modality: str, contents: Sequence[Details]) -> None:
        super().__init__(modality, [], [])
        self.contents = contents

    @override
    def resolve(self, item_idx: int) -> ResolvedPromptUpdate:
        content = self.contents[item_idx]
        return ResolvedPromptUpdate(self.modality, item_idx, content.mode, content.target, content)


HOOKS = (Parser, EmbedItems, ResolvedUpdate)
"""Classes whose methods vLLM calls."""

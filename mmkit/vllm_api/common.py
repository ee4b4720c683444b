"""How mmkit's items, fields and layouts look as vLLM's objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

from transformers.feature_extraction_utils import BatchFeature
from typing_extensions import override
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import (
    AudioProcessorItems,
    EmbeddingItems,
    ModalityDataItems,
    MultiModalDataParser,
    ProcessorBatchItems,
)
from vllm.multimodal.processing import PromptIndexTargets, PromptReplacement, PromptUpdateDetails

from ..bound.modality import BoundModality
from ..bound.processing import Processed
from ..errors import InputError, SpecError
from ..expr import Scope
from ..field import Batched, Flat
from ..items import SCOPES, Embedding, ItemType, unscoped
from ..placement import Alternative
from ..plan import Plan
from ..updates import Insert
from .moved import KEEPS_ON_CPU, ResolvedPromptUpdate, UpdateMode


class OwnItems(ProcessorBatchItems[Any]):
    """Canonical items of one modality that vLLM has no class for.

    Args:
        parts: the parts of an item; none where it is a whole.
    """

    def __init__(self, items: Sequence[Any], modality: str, parts: Iterable[str]) -> None:
        super().__init__(items, modality)
        self.parts = tuple(parts)

    @override
    def get_processor_data(self) -> Mapping[str, object]:
        values = self.get_all()
        if self.parts:
            return {name: [value[name] for value in values] for name in self.parts}
        return {self.modality: values}


class LazyProcessor:
    """The model's Hugging Face processor, loaded when an expression or function uses it: many
    models have none."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)


class Part:
    """A part of a Hugging Face processor, or a processor like one, which takes its options without
    scopes.

    Args:
        processor: the part.
        kinds: the item types that it processes.
    """

    def __init__(self, processor: Callable[..., Any], kinds: Sequence[ItemType]) -> None:
        self._processor, self._kinds = processor, kinds
        parameters = inspect.signature(processor).parameters.values()
        self._named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        self._takes_any = len(self._named) < len(parameters)
        # vLLM passes on what a signature names
        named = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.name in self._named]
        scopes = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in SCOPES]
        others = [p for p in parameters if p.kind is p.VAR_KEYWORD]
        self.__signature__ = inspect.Signature([*named, *scopes, *others])

    def takes(self, name: str) -> bool:
        """Whether the processor has an argument of that name."""
        return self._takes_any or name in self._named

    def __call__(self, **kwargs: Any) -> Any:
        options = unscoped(kwargs, self._kinds)
        taken = {name: value for name, value in options.items() if self.takes(name)}
        outputs = self._processor(**taken)
        # vLLM logs a warning for any other mapping
        return outputs if isinstance(outputs, BatchFeature) else BatchFeature(dict(outputs))


def part_of(modalities: Sequence[BoundModality]) -> Part:
    """What the items of some modalities, which share it, are processed by; its signature is read
    once."""
    key = tuple(modality.name for modality in modalities)
    return modalities[0].adapted.get(key, lambda: _part(modalities))


def _part(modalities: Sequence[BoundModality]) -> Part:
    part = Part(modalities[0].processing.hf_processor, [m.item for m in modalities])
    for modality in modalities:
        assert modality.processing.hf is not None
        for name in modality.processing.hf.kwargs:
            if not part.takes(name):
                expected = "hf(kwargs=...) to name arguments of the processor"
                raise SpecError(f"{modality.where}, process", expected, repr(name))
    return part


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


class Parser(MultiModalDataParser):
    """Turns what callers send into canonical items."""

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
        self.plan.check_names(mm_data)
        return super().parse_mm_data(mm_data)

    def _parse(self, modality: BoundModality, data: Any) -> Any:
        items, embeds = modality.intake.take(data, self.hidden_size)
        if embeds and items:
            return EmbedItems(items, modality.name)
        if modality.item.media == "audio" and items:
            # resampled already; vLLM 0.11 knows no None in place of a cached one
            return AudioProcessorItems(items)
        if modality.item.media:
            return super()._get_subparsers()[modality.item.media](items)
        return OwnItems(items, modality.name, modality.item.part_names)


def embeds_size(model_config: Any) -> int:
    """Width of the rows that the language model takes."""
    # 0.11 has no projections
    size = getattr(model_config, "get_inputs_embeds_size", model_config.get_hidden_size)
    return int(size())


def field_configs(
    modality: BoundModality, processed: Processed
) -> Mapping[str, MultiModalFieldConfig]:
    """How vLLM splits the processed fields of one modality."""
    # as any other request's
    if all(isinstance(declared, Batched) for declared in modality.fields.values()):
        return modality.adapted.get("fields", lambda: _field_configs(modality, processed))
    return _field_configs(modality, processed)


def _field_configs(
    modality: BoundModality, processed: Processed
) -> dict[str, MultiModalFieldConfig]:
    name, configs = modality.name, {}
    for key, declared in modality.fields.items():
        options = {"keep_on_cpu": True} if declared.keep_on_cpu and KEEPS_ON_CPU else {}
        if isinstance(declared, Batched):
            configs[key] = MultiModalFieldConfig.batched(name, **options)
        elif isinstance(declared, Flat):
            slices = item_slices(processed.sizes.get(key, ()), declared.dim)
            configs[key] = MultiModalFieldConfig.flat(name, slices, dim=declared.dim, **options)
        else:
            configs[key] = MultiModalFieldConfig.shared(name, len(processed.parts), **options)
    if modality.intake.takes_embeds:
        configs[modality.intake.embeds_field] = MultiModalFieldConfig.batched(name)
    return configs


def item_slices(sizes: Sequence[int], dim: int) -> list[Any]:
    """Where the items of a flat field lie, of these extents along a dimension."""
    slices = [slice(first, last) for first, last in pairwise([0, *accumulate(sizes)])]
    if dim == 0:
        return slices  # vLLM takes lists by nothing else
    before = (slice(None),) * dim if dim > 0 else (...,)
    return [(*before, one, *(slice(None),) * (-dim - 1)) for one in slices]


def total(items: ModalityDataItems[Any, Any]) -> int:
    """Number of items of the modality in the request: of those that are not cached, more than they
    are."""
    return int(getattr(items, "mmkit_total", len(items)))


def each_of(items: ModalityDataItems[Any, Any]) -> Iterator[ModalityDataItems[Any, Any]]:
    """The items of a modality, each on its own."""
    for i in range(len(items)):
        yield some_of(items, [i])


def some_of(items: Any, indices: Sequence[int]) -> Any:
    """Those at some positions among the items of a modality, which are canonical already: vLLM
    would parse them again."""
    part = copy(items)
    part.data = [items.data[i] for i in indices]
    if isinstance(getattr(items, "metadata", None), list) and items.metadata:
        part.metadata = [items.metadata[i] for i in indices]
    return part


def hf_inputs(
    group: Mapping[str, ModalityDataItems[Any, Any]], plan: Plan, kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """The arguments of one call of a Hugging Face processor: the items of some modalities, their
    text if it wants one, and what the spec fixes.

    Raises:
        InputError: `mm_processor_kwargs` state what the spec fixes.
    """
    inputs: dict[str, Any] = {}
    texts = []
    for name, items in group.items():
        processing = plan.modalities[name].processing
        assert processing.hf is not None
        if stated := set(processing.hf.kwargs).intersection(kwargs):
            where = f"{plan.modalities[name].where}, mm_processor_kwargs"
            expected = f"no {min(stated)}, which the spec fixes"
            raise InputError(where, expected, repr(kwargs[min(stated)]))
        inputs.update(processing.hf.kwargs)
        renames = {"audios": "audio", **processing.hf.inputs}
        inputs.update(
            {renames.get(key, key): value for key, value in items.get_processor_data().items()}
        )
        if processing.hf_text is not None:
            texts.append(processing.hf_text * len(items))
    return {"text": "".join(texts), **inputs} if texts else inputs


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
    """One alternative of one item, with what is needed to evaluate it again at another index."""

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
        """The same alternative of the same item at another position among the request's items."""
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


HOOKS = (Parser, OwnItems, EmbedItems, ResolvedUpdate)
"""Classes whose methods vLLM calls."""

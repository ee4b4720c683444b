"""vLLM's processing path as plain Python, for the command and the laws.

It has processors, requests, caches, and a model without an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig
from vllm import ModelRegistry
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import DictEmbeddingItems, EmbeddingItems

from ..bound.placeholders import rows_field
from ..errors import MmkitError
from ..model.mixin import MultiModalModel
from ..model.positions import get_mrope_input_positions
from ..updates import Insert
from . import guard, kit
from .items import Layouts, kwargs_item
from .kit import LEAST_CACHE_GIB as LEAST_CACHE_GIB
from .kit import Miss as Miss
from .kit import decoded as decoded
from .kit import encoded as encoded
from .kit import loaded_model as loaded_model
from .kit import parsed as parsed
from .processor import CommonProcessor, Request


class NotTaken(ValueError):
    """The code under test does not take what was asked of it; the sentence is the kit's."""


@dataclass(frozen=True)
class Outcome:
    """The result of a processor for a request.

    Attributes:
        ids: the prompt with the placeholders in it.
        ranges: per modality and item, offset, length, and for each position whether it receives an
            encoder row.
        fields: per modality and item, the tensors (or other values) that reach the model, by field.
        hashes: per modality and item.
        items: per modality, vLLM's own form of the fields.
    """

    ids: list[int]
    ranges: dict[str, list[tuple[int, int, tuple[bool, ...]]]]
    fields: dict[str, list[dict[str, Any]]]
    hashes: dict[str, list[str]]
    items: dict[str, list[Any]] = field(repr=False)

    def mask(self, name: str, index: int) -> tuple[bool, ...]:
        """Which positions of an item receive encoder rows; none where it has no range."""
        ranges = self.ranges.get(name, [])
        return ranges[index][2] if index < len(ranges) else ()

    def values(self, name: str, index: int) -> dict[str, Any]:
        """The fields of an item; none where nothing of it reaches the model."""
        items = self.fields.get(name, [])
        return items[index] if index < len(items) else {}


@dataclass(frozen=True)
class Piece:
    """The ids of one item in a prompt.

    Attributes:
        written: what a caller writes for it; nothing where it is inserted at an anchor.
        ids: what it becomes.
        mask: which of these ids receive encoder rows.
        inserted: `ids` go after what is written instead of in its place.
        prefix: ids with which a prompt must start.
        targets: what the alternatives would have a caller write.
    """

    written: list[int]
    ids: list[int]
    mask: tuple[bool, ...]
    inserted: bool
    prefix: list[int]
    targets: list[list[int]]


class StandIn(nn.Module, SupportsMultiModal):
    """A model class that runs nothing, where vLLM wants one and there is none."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(
        self, input_ids: Any, multimodal_embeddings: Any = None, *, is_multimodal: Any = None
    ) -> Any:
        raise NotImplementedError

    def embed_multimodal(self, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward(
        self,
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> Any:
        raise NotImplementedError

    def compute_logits(self, hidden_states: Any) -> Any:
        raise NotImplementedError


def stand_in(*architectures: str, model: type = StandIn) -> None:
    """Let vLLM accept checkpoints of architectures that it does not know, and take what it reads
    from the class of such a model from this one."""
    for architecture in set(architectures) - set(ModelRegistry.get_supported_archs()):
        ModelRegistry.register_model(architecture, model)


def architectures_of(folder: str | Path) -> list[str]:
    """The model classes that the config of a checkpoint names."""
    known, _ = PretrainedConfig.get_config_dict(str(folder))
    return list(known.get("architectures") or [])


def of_class(model: Any, config: ModelConfig) -> Any:
    """The processor of the classes that are registered for a model class."""
    factories = model._processor_factory
    return generated(factories.info, factories.dummy_inputs, factories.processor, config)


def kinds(outcome: Outcome) -> dict[str, list[dict[str, str]]]:
    """The kinds of batching of an outcome's fields: per modality, item and field."""
    return {
        name: [{key: _kind(element.field) for key, element in item.items()} for item in items]
        for name, items in outcome.items.items()
    }


def _kind(field: Any) -> str:
    options = [f"dim={field.dim}"] if getattr(field, "dim", 0) else []
    options += ["keep_on_cpu"] if getattr(field, "keep_on_cpu", False) else []
    return " ".join([type(field).__name__, *options])


def load_plugins() -> None:
    """Load vLLM's plugins, as each of its processes does."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def model_config(folder: str | Path, **options: Any) -> ModelConfig:
    """The config of a checkpoint folder, in float32; without a tokenizer if the folder has none.
    Plugins are loaded first: config classes are theirs. What code the folder brings is run with
    `trust_remote_code=True` alone.

    Raises:
        MmkitError: the model class cannot be imported.
    """
    load_plugins()
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    tokenizer = any((Path(folder) / name).exists() for name in names)
    defaults = {"dtype": "float32", "seed": 0, "mm_processor_cache_gb": 1}
    settings = {**defaults, "skip_tokenizer_init": not tokenizer, **options}
    try:
        return ModelConfig(model=str(folder), tokenizer=str(folder), **settings)
    except ValueError as error:
        if "failed to be inspected" in str(error):
            _import_models(architectures_of(folder))
        raise


def _import_models(architectures: Sequence[str]) -> None:
    """Find the exception of which vLLM says only that it is in the logs: its inspection imports the
    model in another process."""
    for name in architectures:
        if name not in ModelRegistry.models:
            continue
        try:
            ModelRegistry.models[name].load_model_cls()
        except Exception as error:
            got = f"{type(error).__name__}: {error}".rstrip(".")
            raise MmkitError(name, "a model class that can be imported", got) from error


def config_for_spec(folder: str | Path, **options: Any) -> ModelConfig:
    """`model_config`, of a model that vLLM need not know."""
    stand_in(*architectures_of(folder))
    return model_config(folder, **options)


def registered(config: ModelConfig) -> Any:
    """The processor that vLLM makes for a checkpoint, whoever wrote it."""
    return MULTIMODAL_REGISTRY.create_processor(config)


def generated(info: type, dummy_inputs: type, processor: type, config: ModelConfig) -> Any:
    """A processor of these classes, whether vLLM knows the model or not."""
    return kit.built(info, dummy_inputs, processor, config)


def run(
    processor: Any,
    prompt: str | Sequence[int],
    data: Mapping[str, Any],
    kwargs: Mapping[str, Any] | None = None,
    caches: Caches | None = None,
    *,
    direct: bool = False,
    uuids: Mapping[str, Sequence[str | None]] | None = None,
) -> Outcome:
    """One request, as vLLM's renderer hands it to a processor; `direct`: as one calls the processor
    by hand."""
    options = deepcopy(dict(kwargs or {}))  # processors of transformers take out nested ones
    if direct:
        result = kit.call(processor, prompt, data, options)
    else:
        sender = caches and caches.sender
        result = kit.render(processor, prompt, data, options, sender, uuids)
    return outcome(result, caches)


def in_flight(processor: Any, requests: Sequence[Any], caches: Caches) -> list[tuple[int, Any]]:
    """The results of requests that wait together for vLLM's renderer, as in its servers: their
    numbers, in the order in which they return, each with the argument of `outcome` or the error.

    Before 0.19 vLLM renders one after the other.
    """
    returned: list[tuple[int, Any]] = []

    async def all_of(process: Any) -> None:
        async def one(number: int, request: Any) -> None:
            sent = list(request.prompt), request.data(), dict(request.kwargs)
            try:
                if process is None:
                    result = kit.render(processor, *sent, caches.sender)
                else:
                    result = await process(*sent)
            except Exception as error:
                result = error
            returned.append((number, result))

        await asyncio.gather(*[one(*numbered) for numbered in enumerate(requests)])

    with kit.rendering(processor, caches.sender) as process:
        asyncio.run(all_of(process))
    return returned


def again(processor: Any) -> Any:
    """A new processor of the same classes."""
    info = processor.info
    config = info.ctx.model_config
    return kit.built(type(info), type(processor.dummy_inputs), type(processor), config)


def takes_rendered(plan: Any) -> bool:
    """Whether the guard takes processed fields from another host, and vLLM has a form for them."""
    return kit.encode_item is not None and guard.takes_rendered(plan)


def sent(
    processor: Any,
    prompt: Sequence[int],
    data: Mapping[str, Any],
    kwargs: Mapping[str, Any] | None = None,
) -> bytes:
    """A request, rendered here for another host: the body of vLLM's `/inference/v1/generate`, as
    far as it is the processor's."""
    return kit.written(kit.render(processor, prompt, data, kwargs or {}, None))


def received(body: bytes) -> dict[str, Any]:
    """The result of `sent` as vLLM reads it, and as `LLM.generate` takes it for a prompt."""
    return kit.read(body)


def admitted(processor: Any, request: Mapping[str, Any]) -> Outcome:
    """The rendered request after the guard before the engine.

    Raises:
        InputError: it refuses the request.
    """
    return outcome(guard.admitted(processor, request))


def outcome(result: Any, caches: Caches | None = None) -> Outcome:
    """The outcome in vLLM's form of a rendered request."""
    ranges = {name: [*map(_range, places)] for name, places in result["mm_placeholders"].items()}
    hashes = {name: list(of_items) for name, of_items in result["mm_hashes"].items()}
    items = {name: list(of_items) for name, of_items in result["mm_kwargs"].items()}
    if caches is not None:
        items = caches.receive(items, result)
    fields = {name: [_fields(name, item) for item in of_items] for name, of_items in items.items()}
    ids = list(result.get("encoder_prompt_token_ids", result["prompt_token_ids"]))
    return Outcome(ids, ranges, fields, hashes, items)


def _range(place: Any) -> tuple[int, int, tuple[bool, ...]]:
    return place.offset, place.length, _flags(place.is_embed, place.length)


def _flags(mask: Any, length: int) -> tuple[bool, ...]:
    """An embed mask of vLLM, which has None where all positions receive rows."""
    return (True,) * length if mask is None else tuple(map(bool, mask))


def _fields(modality: str, item: Any) -> dict[str, Any]:
    """The values of an item; tensors and arrays are copied: a processor may reuse their memory."""
    values = {name: element.data for name, element in item.items()}
    values.pop(rows_field(modality), None)
    return {name: _copied(value) for name, value in values.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value


class Caches:
    """vLLM's processor cache of some capacity: in one process, or as the pair of API server and
    engine."""

    def __init__(self, processor: Any, capacity_gib: float, *, pair: bool) -> None:
        config = processor.info.ctx.model_config
        multimodal = config.get_multimodal_config()
        before, multimodal.mm_processor_cache_gb = multimodal.mm_processor_cache_gb, capacity_gib
        try:
            self.sender: Any = (kit.SenderCache if pair else kit.OnlyCache)(config)
            self.receiver = kit.ReceiverCache(config) if pair else None
        finally:
            multimodal.mm_processor_cache_gb = before

    def forget(self, hashes: Sequence[str]) -> None:
        """The step of vLLM before it sends a request again whose items the engine lacks."""
        for item_hash in hashes:
            self.sender.invalidate(item_hash)

    def receive(self, items: dict[str, list[Any]], result: Any) -> dict[str, list[Any]]:
        """The items as the engine has them."""
        if self.receiver is None:
            return items
        hashes, places = result["mm_hashes"], result["mm_placeholders"]
        features = {
            (name, i): kit.feature(item, name, hashes[name][i], places[name][i])
            for name, of_items in items.items()
            for i, item in enumerate(of_items)
        }
        order = sorted(features, key=lambda key: features[key].mm_position.offset)
        received = self.receiver.get_and_update_features([features[key] for key in order])
        data = {key: feature.data for key, feature in zip(order, received, strict=True)}
        return {name: [data[name, i] for i in range(len(items[name]))] for name in items}


def size_gib(outcome: Outcome) -> float:
    """The size of a request's items in vLLM's caches."""
    items = [item for of_modality in outcome.items.values() for item in of_modality]
    size: int = sum(map(kit.item_size, items))
    return size / 2**30


def pieces(
    processor: Any, name: str, values: list[Any], kwargs: Mapping[str, Any] | None = None
) -> list[Piece]:
    """The ids of one modality's items in a prompt, by the first alternative of the processor's own
    updates. Without an update, an item has no ids."""
    if isinstance(processor, CommonProcessor):
        return [_own_piece(layouts) for layouts in _layouts(processor, name, values, kwargs or {})]
    _, kwargs_items, items = _processed(processor, {name: values}, kwargs or {})
    updates = processor._get_mm_prompt_updates(items, kwargs or {}, kwargs_items)
    if name not in updates:
        return [Piece([], [], (), True, [], []) for _ in values]
    return [_piece(processor, alternatives) for alternatives in updates[name]]


def _processed(
    processor: Any, data: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    items = parsed(processor, data)
    raw = kit.process(processor, items, deepcopy(dict(kwargs)))
    config = processor._get_mm_fields_config(raw, kwargs)
    return (raw, config), kit.MultiModalKwargsItems.from_hf_inputs(raw, config), items


def _piece(processor: Any, alternatives: Sequence[Any]) -> Piece:
    update = alternatives[0]
    anchored = [a.target for a in alternatives if not isinstance(a.target, kit.PromptIndex)]
    targets = [kit.spelled(processor, target) for target in anchored]
    full = kit.spelled(processor, update.content.full)
    mask = _flags(kit.embedded(processor, update.content), len(full))
    inserted = update.mode.name == "INSERT"
    if not isinstance(update.target, kit.PromptIndex):
        return Piece(targets[0], full, mask, inserted, [], targets)
    closure = getattr(update.target.get_match_index, "__closure__", None) or ()
    prefixes = [cell.cell_contents for cell in closure if isinstance(cell.cell_contents, list)]
    return Piece([], full, mask, inserted, list(prefixes[0]) if prefixes else [], targets)


def _layouts(
    processor: CommonProcessor, name: str, values: list[Any], kwargs: Mapping[str, Any]
) -> list[Layouts]:
    """The layouts of items of a modality, as a generated processor has them."""
    request = Request([], parsed(processor, {name: values}), {}, kwargs, None)
    taken = request.items.taken()
    missing = {key: range(own.total) for key, own in taken.items()}
    entries = processor._processed(request, taken, missing)
    return [entry[1] for entry in entries.get(name, []) if entry is not None]


def _own_piece(layouts: Layouts) -> Piece:
    first = layouts.alternatives[0]
    inserted = isinstance(first.update, Insert)
    targets = [list(one.written) for one in layouts.alternatives if one.written]
    ids, mask = list(first.placeholder.ids), tuple(map(bool, first.placeholder.mask))
    prefix = list(first.target) if inserted else []
    return Piece(list(first.written), ids, mask, inserted, prefix, targets)


def round_trip(
    processor: Any, data: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Per declared field: the processed value, and what batching its items again makes of it."""
    if isinstance(processor, CommonProcessor):
        return _batched(processor, data, kwargs)
    (raw, config), by_modality, _ = _processed(processor, data, kwargs)
    joined: dict[str, Any] = {}
    for items in by_modality.values():
        for key, element in items[0].items():
            joined[key] = element.field.reduce_data([item[key] for item in items])
    # theirs are fields of no items
    absent = set(processor.info.get_supported_mm_limits()) - set(data)
    present = [key for key in config if key in raw and config[key].modality not in absent]
    return {key: (raw[key], joined.get(key)) for key in present}


def _batched(
    processor: CommonProcessor, data: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Per field: the parts of all items as mmkit batches them, and as vLLM does."""
    both: dict[str, tuple[Any, Any]] = {}
    for name, parts in processor._process(parsed(processor, data).taken(), kwargs).items():
        modality = processor.plan.modalities[name]
        items = [kwargs_item(modality, part) for part in parts]
        for key, element in items[0].items():
            own = [part[key] for part in parts]
            ours = modality.fields_and_embeds[key].batch(own)
            theirs = element.field.reduce_data([item[key] for item in items])
            if isinstance(ours, torch.Tensor) and isinstance(theirs, list):
                ours = [row for part in own for row in part]  # vLLM 0.11 pads nothing
            both[key] = ours, theirs
    return both


def embeddings(
    processor: Any, name: str, rows: Sequence[torch.Tensor], fields: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """Rows of items in every form that the processor's parser takes for embeddings, or the error
    with which it takes none.

    It may declare a mapping, with more about each item; one that declares nothing takes a list, or
    a mapping all the same.
    """
    parser = processor.data_parser
    declared = getattr(parser, "embedding_fields", {}).get(name)
    forms: list[Any] = [list(rows), {f"{name}_embeds": list(rows)}]
    if declared:
        forms = [_as_declared(declared, rows, fields)]
    taken: list[Any] = []
    refusal: Exception | None = None
    for form in forms:
        try:
            items = parser.parse_mm_data({name: form})[name]
        except Exception as error:
            refusal = refusal or error
        else:
            # not a mapping taken for a list of its keys
            if isinstance(items, EmbeddingItems | DictEmbeddingItems):
                taken.append(form)
    if not taken:
        raise refusal or NotTaken(f"the parser takes embeddings of {name} for something else")
    return taken


def _as_declared(
    declared: Mapping[str, str], rows: Sequence[torch.Tensor], fields: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What sizes the placeholders (a grid, a number of tokens) is taken from the fields of the
    items, or counted."""
    counts = torch.tensor([len(of_item) for of_item in rows])
    has_grid = any("grid" in key for key in declared)
    values = torch.cat(list(rows)) if has_grid else list(rows)
    sent: dict[str, Any] = {}
    for key, role in declared.items():
        sizes = [_row(item[key]) for item in fields if key in item]
        if not sizes or len(sizes) != len(rows):
            sent[key] = values if role == "values" else counts
        elif len({size.shape for size in sizes}) == 1:
            sent[key] = torch.stack(sizes)
        else:
            sent[key] = sizes
    return sent


def _row(value: Any) -> torch.Tensor:
    """A value of one item, without a dimension for the one item."""
    tensor = torch.as_tensor(value)
    return tensor[0] if tensor.ndim > 1 and len(tensor) == 1 else tensor


def parts(
    processor: Any, data: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Per modality and item, the fields as a generated processor splits them, before vLLM does.
    Hidden ones are left out."""
    processed = processor._process(parsed(processor, data).taken(), kwargs)
    sent = {
        name: modality.fields_and_embeds for name, modality in processor.plan.modalities.items()
    }
    return {
        name: [{key: part[key] for key in part if key in sent[name]} for part in parts]
        for name, parts in processed.items()
    }


def most_rows(processor: Any, name: str) -> tuple[int, int]:
    """(stated, reached): the most encoder rows of an item, as stated for scheduling, and those of
    the dummy item."""
    seq_len = processor.info.ctx.model_config.max_model_len
    dummy = kit.dummy(processor, {name: 1})
    reached = sum(
        place.length if place.is_embed is None else int(place.is_embed.sum())
        for place in dummy["mm_placeholders"].get(name, ())
    )
    stated = (processor.info.get_mm_max_tokens_per_item(seq_len, {name: 1}) or {}).get(name)
    return reached if stated is None else stated, reached


def rows(model: Any, outcome_items: Mapping[str, Sequence[Any]]) -> dict[str, list[torch.Tensor]]:
    """Encoder rows of items (vLLM's kwargs items), by modality, in their order."""
    encoded: dict[str, list[torch.Tensor]] = {name: [] for name in outcome_items}
    with torch.inference_mode():
        for name, items in outcome_items.items():
            for kwargs in kit.batches(items):
                encoded[name] += model.embed_multimodal(**kwargs)
    return encoded


def filled(item: Any, value: float) -> Any:
    """An item (vLLM's kwargs item) with a value in place of all of its floating ones."""

    def fill(data: Any) -> Any:
        if isinstance(data, list):
            return [fill(part) for part in data]
        if isinstance(data, torch.Tensor) and data.is_floating_point():
            return torch.full_like(data, value)
        return data

    return type(item)({key: replace(e, data=fill(e.data)) for key, e in item.items()})


def embedded(model: Any, modality: Any, item: Any, embeds: torch.Tensor) -> list[torch.Tensor]:
    """The rows of one precomputed embedding, (rows, hidden_size), in place of an item of vLLM's
    kwargs."""
    intake = modality.intake
    sent = {key: item[key].data[None] for key in intake.companions}
    sent[intake.embeds_field] = intake.embeds_as.batch([embeds])
    with torch.inference_mode():
        return list(model.embed_multimodal(**sent))


def merged(model: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The input of the language model at the positions of these rows."""
    ids = torch.zeros(sum(map(len, rows)), dtype=torch.long)
    everywhere = torch.ones_like(ids).bool()
    with torch.inference_mode():
        return model.embed_input_ids(ids, list(rows), is_multimodal=everywhere)  # type: ignore[no-any-return]


def declares_positions(plan: Any) -> bool:
    """Whether the spec of a plan says what positions the tokens of its items have; without a plan
    no."""
    return plan is not None and any(m.positions is not None for m in plan.modalities.values())


def has_rope(processor: Any, plan: Any) -> bool:
    """Whether tokens have positions of several dimensions, by the config or by the spec."""
    config = processor.info.ctx.model_config
    by_config = config.uses_mrope or getattr(config, "uses_xdrope_dim", 0)
    return bool(by_config or declares_positions(plan))


class Rope:
    """Computes positions of several dimensions for the tokens of a request.

    Positions that a spec declares are those of mmkit's model classes, whatever vLLM has for the
    checkpoint.

    Args:
        processor: vLLM's.
        plan: of a generated one, else None.
        config: what the model class takes for its config.

    Raises:
        NotTaken: the model class has no method for them.
    """

    def __init__(self, processor: Any, plan: Any, config: Any) -> None:
        self.config = config
        model_config = processor.info.ctx.model_config
        self._class: Any = get_model_cls(model_config)
        if declares_positions(plan) and not issubclass(self._class, MultiModalModel):
            mixin: Any = SimpleNamespace(mm_plan=plan)
            self._method: Any = partial(get_mrope_input_positions, mixin)
            return
        model = self._class.__new__(self._class)
        nn.Module.__init__(model)
        model.config, model.model_config, model.mm_plan = config, model_config, plan
        names = ("get_mrope_input_positions", "get_xdrope_input_positions")
        methods = [getattr(model, name) for name in names if hasattr(model, name)]
        if not methods:
            raise NotTaken(f"{self._class.__name__} gives no positions of several dimensions")
        self._method = methods[0]

    def positions(self, ids: list[int], items: Sequence[Any]) -> tuple[torch.Tensor, int]:
        """Of ids and of items as `placed` makes them, integers (dimensions, tokens), and how far
        the position after the prompt is from its length.

        Raises:
            NotTaken: they depend on more than the config.
        """
        try:
            found = self._method(ids, items)
        except AttributeError as error:
            if str(error).startswith(f"'{self._class.__name__}' object has no attribute"):
                raise NotTaken(f"the positions want a loaded model: {error}") from error
            raise
        # XD-RoPE goes on from the largest
        return found if isinstance(found, tuple) else (found, int(found.max()) + 1 - len(ids))


def placed(outcome: Outcome) -> list[Any]:
    """The items of a request as vLLM's model has them, in the order of the prompt."""
    items = [
        kit.feature(item, name, outcome.hashes[name][i], kit.place(*outcome.ranges[name][i]))
        for name, of_items in outcome.items.items()
        for i, item in enumerate(of_items)
    ]
    return sorted(items, key=lambda item: item.mm_position.offset)


def hidden_size(processor: Any) -> int:
    """Width of an embedding row."""
    return kit.embeds_size(processor.info.ctx.model_config)

"""Refusal of missing and unexpected weights, by their names.

vLLM counts a fused weight as loaded when one of its parts has come, asks for no weight of its own
linear layers, and ignores some unknown names. This module therefore watches the values that are
written: every value of a parameter must be written, and something from every weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import MmkitError
from ..vllm_api import is_of_another_stage, load_by_name

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]

_HEADS = {"score", "classifier", "pooler"}
"""Modules that vLLM adds to a model that it converts; their weights may come from elsewhere than
the checkpoint."""

_COMPUTED = ("rotary_emb.", "rotary_pos_emb.")
"""Tables in old checkpoints, which vLLM computes."""

_WRITES = (torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_)

_REMEDY = (
    "Map a name that the model has no use for to None in `hf_to_vllm_mapper`, in front of an entry "
    "with a shorter prefix, which would rename the weight first."
)

_NAMED = 20
"""The most names in a message."""


def load_strictly(
    model: Any, weights: Weights, load: Callable[[Weights], set[str]] | None = None
) -> set[str]:
    """Load weights, and refuse missing and unexpected ones.

    While vLLM loads the model, all of its weights must come. Later, for example in an update during
    training, some may. A quantised model may lack whole parameters, which vLLM fills itself. A
    model that is quantised while it loads is not checked.

    Args:
        model: a model of vLLM with the mixin.
        weights: names and tensors of the checkpoint.
        load: the function that loads them; None for vLLM's `AutoWeightsLoader` with the model's
            `hf_to_vllm_mapper`.

    Returns:
        The names of the parameters that were loaded.

    Raises:
        MmkitError: names the missing weights, as the model does, and those from which nothing was
            loaded, as the checkpoint does. A weight that the mapper maps to None is neither.
    """
    if load is None:
        load = _load_mapped(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        return load(weights)
    with Watch(model) as watch:
        loaded = load(watch.each(weights))
    missing, surplus = watch.missing() if model.training else [], watch.surplus()
    if missing or surplus:
        raise MmkitError(
            f"{model.mm_spec.name}.load_weights",
            "the weights of the model",
            f"{_listed(missing)} missing and {_listed(surplus)} unexpected",
            _REMEDY if surplus else "",
        )
    return loaded


def _load_mapped(model: Any) -> Callable[[Weights], set[str]]:
    load, mapper = load_by_name(model), getattr(model, "hf_to_vllm_mapper", None)
    return load if mapper is None else lambda weights: load(mapper.apply(weights))


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown or "none"


class Watch(TorchDispatchMode):
    """Records which values of a model's parameters are written, and from which weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._quantised = model.mm_engine.quant_config is not None
        self._places = {name: _place(tensor) for name, tensor in _tensors(model)}
        self._written: dict[int, dict[Any, int]] = {place: {} for place in self._places.values()}
        self._writes = 0
        self._came: set[str] = set()
        self._unread: dict[int, tuple[str, torch.Tensor]] = {}

    def each(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, one by one. A weight that a loader keeps counts as read when it is written
        later."""
        for name, weight in weights:
            names = self._names_of(name)
            self._came.update(names)
            before = self._writes
            yield name, weight
            if self._writes == before and self._places.keys().isdisjoint(names):
                self._unread[_place(weight)] = name, weight  # held, so that its place stays its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _WRITES:
            target = args[0]
            regions = self._written.get(_place(target))
            if regions is not None:
                region = target.storage_offset(), *target.shape, *target.stride()
                regions[region] = target.numel()
                self._writes += 1
                for source in args[1:2]:
                    if isinstance(source, torch.Tensor):
                        self._unread.pop(_place(source), None)
        return func(*args, **(kwargs or {}))

    def missing(self) -> list[str]:
        """The parameters with a value that was not written, by their names in a checkpoint."""
        names: list[str] = []
        for name, parameter in self._model.named_parameters():
            place = self._places.get(name)
            if place != _place(parameter):  # replaced as a whole
                continue
            written = sum(self._written[place].values())
            if written >= parameter.numel() or (self._quantised and not written):
                continue
            is_pooling = getattr(self._model, "is_pooling_model", False)
            if is_pooling and not _HEADS.isdisjoint(name.split(".")):
                logger.warning(
                    "%s.load_weights: %s is not in the checkpoint. Its values are arbitrary unless "
                    "vLLM makes it of other weights, or an adapter brings it.",
                    self._model.mm_spec.name,
                    name,
                )
                continue
            names += self._absent_parts(name)
        return names

    def surplus(self) -> list[str]:
        """The weights of this pipeline stage from which nothing was written."""
        return [
            name
            for name, _ in self._unread.values()
            if not any(is_of_another_stage(one, self._model) for one in self._names_of(name))
            and self._mapped(name)
            and not any(table in name for table in _COMPUTED)
            and not (self._quantised and name.endswith(".bias"))  # zeros, in some formats
        ]

    def _names_of(self, name: str) -> list[str]:
        """A weight's name in the checkpoint and in the model."""
        return [name, *self._mapped(name)]

    def _mapped(self, name: str) -> list[str]:
        """The model's name of a weight; none where the mapper drops the weight."""
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        return [name] if mapper is None else mapper.apply_list([name])

    def _absent_parts(self, name: str) -> list[str]:
        """The missing parts of a fused weight; any other weight is its own part."""
        for fused, parts in getattr(self._model, "packed_modules_mapping", {}).items():
            if f".{fused}." in f".{name}":
                whole = [f".{name}".replace(f".{fused}.", f".{part}.")[1:] for part in parts]
                return [part for part in whole if part not in self._came] or [name]
        return [name]


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

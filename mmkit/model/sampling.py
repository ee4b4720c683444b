"""Placeholder ids are never sampled, and what vLLM reports of them is the model's.

vLLM computes the log probabilities that it reports, of the answer and of the prompt, from the
model's logits. So these stay as they are, and a logits processor, which works on what is sampled
from, takes the placeholder ids out. vLLM loads it by the entry point ``vllm.logits_processors`` of
mmkit in every engine, also of models without a spec, so this module imports nothing of
`mmkit.vllm_api`. Where vLLM has made none for a model (with speculative decoding, without the entry
point), the model masks its logits itself; see `MultiModalModel.compute_logits`.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch
from typing_extensions import override
from vllm.v1.sample.logits_processor import LogitsProcessor

_interfaces: list[Any] = [LogitsProcessor]
# of vLLM's second model runner, from 0.31; it takes no other
with suppress(ImportError, AttributeError):
    _interfaces.append(
        import_module("vllm.v1.worker.gpu.sample.logits_processor.interface").LogitsProcessor
    )

_models: WeakSet[Any] = WeakSet()
_masks: WeakSet[PlaceholderMask] = WeakSet()


class PlaceholderMask(*_interfaces):  # type: ignore[misc]
    """Gives placeholder ids minus infinity where the next token is sampled. Does nothing for a
    model without a spec."""

    def __init__(self, vllm_config: Any, *_: Any) -> None:
        self._config = vllm_config
        self._model: Any = None
        _masks.add(self)

    def is_for(self, model: Any) -> bool:
        """Whether vLLM has made this one for a model."""
        return model.mm_engine is self._config

    @override
    def is_argmax_invariant(self) -> bool:
        return False

    @override
    def update_state(self, batch_update: Any) -> None:
        """All requests are treated alike."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Whether the logits of a request are changed: the question of vLLM's second model
        runner."""
        return self._served() is not None

    @override
    def apply(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        if (model := self._served()) is not None:
            mask(logits, model.reserved_ids(logits.device))
        return logits

    def _served(self) -> Any:
        if self._model is None:
            self._model = next(filter(self.is_for, _models), None)
        return self._model


def mask(logits: torch.Tensor, ids: torch.Tensor) -> None:
    """Give ids minus infinity, in place."""
    logits.index_fill_(-1, ids, float("-inf"))


def serve(model: Any) -> None:
    """Make a model known to the processor that vLLM makes for it, before or after."""
    _models.add(model)


def is_masked(model: Any) -> bool:
    """Whether vLLM masks what is sampled from a model."""
    return any(known.is_for(model) for known in _masks)

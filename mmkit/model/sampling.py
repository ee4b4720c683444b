"""Sampling: never a placeholder id, and for an output only ids that may stand at their position.

vLLM computes the reported log probabilities, of the answer and of the prompt, from the model's
logits. These logits stay as they are; a logits processor, which sees the logits that are sampled
from, masks the placeholder ids. vLLM loads it in every engine by mmkit's entry point
``vllm.logits_processors``, also for models without a spec, so this module imports nothing of
`mmkit.vllm_api`. Where vLLM makes no logits processor for a model (with speculative decoding,
without the entry point), the model masks its logits itself; see `MultiModalModel.compute_logits`.
`sampling_params` marks a request for an output of the spec.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any
from weakref import WeakSet

import torch
from typing_extensions import override
from vllm import SamplingParams
from vllm.sampling_params import SamplingType
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from ..errors import InputError
from ..language.spec import EXTRA_ARG
from ..plan.output import BoundOutput
from ..plan.plan import Plan

__all__ = ["sampling_params"]

_interfaces: list[Any] = [LogitsProcessor]
# of vLLM's second model runner, from 0.31; it takes no other
with suppress(ImportError, AttributeError):
    _interfaces.append(
        import_module("vllm.v1.worker.gpu.sample.logits_processor.interface").LogitsProcessor
    )

MODELS: WeakSet[Any] = WeakSet()
"""The models of this process; vLLM makes the logits processor of one before or after it."""

_masks: WeakSet[PlaceholderMask] = WeakSet()


class PlaceholderMask(*_interfaces):  # type: ignore[misc]
    """Logits processor that gives minus infinity to placeholder ids and, in a request for an
    output, to all ids that may not stand at the next position. Does nothing for a model without a
    spec."""

    def __init__(self, vllm_config: Any, *more: Any) -> None:
        self._config = vllm_config
        self._model: Any = None
        self._requests = more[0]  # of the second model runner: what it knows of its requests
        self._sampled: dict[int, tuple[int, list[int]]] = {}
        _masks.add(self)

    def is_for(self, model: Any) -> bool:
        """Whether vLLM made this processor for a model."""
        return model.mm_engine is self._config

    @override
    def is_argmax_invariant(self) -> bool:
        return False

    @override
    def update_state(self, batch_update: Any) -> None:
        """Keep, for each request, its output and its growing list of sampled ids."""

        def sampled(params: Any, _: Any, ids: list[int]) -> tuple[int, list[int]] | None:
            number = self._number(params)
            return (number, ids) if number else None

        process_dict_updates(self._sampled, batch_update, sampled)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Whether the logits of a request are changed; vLLM's second model runner asks this."""
        self._sampled[req_idx] = self._number(sampling_params), []
        return self._served() is not None

    @override
    def apply(self, logits: torch.Tensor, *context: Any) -> torch.Tensor:
        if (model := self._served()) is None:
            return logits
        model.allowed_ids.mask(logits)
        if not any(number for number, _ in self._sampled.values()):
            return logits
        if context:  # of the second model runner, where a request may have several rows
            (rows,) = context
            slots = rows.expanded_idx_mapping
            known = [self._sampled.get(slot, (0, []))[0] for slot in range(max(self._sampled) + 1)]
            numbers = torch.tensor(known, device=logits.device)[slots]
            positions = rows.pos + 1 - self._requests.prompt_len.gpu[slots]
        else:
            nothing: tuple[int, list[int]] = (0, [])
            states = [self._sampled.get(row, nothing) for row in range(len(logits))]
            columns = [[number, len(ids)] for number, ids in states]
            numbers, positions = torch.tensor(columns, device=logits.device).unbind(1)
        model.allowed_ids.confine(logits, numbers, positions)
        return logits

    def _number(self, params: Any) -> int:
        """The number of the output that a request asks for; 0 for no output or an unknown one."""
        name = (params.extra_args or {}).get(EXTRA_ARG)
        if name is None or (model := self._served()) is None:
            return 0
        return int(model.allowed_ids.number(name))

    def _served(self) -> Any:
        if self._model is None:
            self._model = next(filter(self.is_for, MODELS), None)
        return self._model


class AllowedIds:
    """The ids of a model that may be sampled: never a placeholder, and at each position of an
    output some of them. Tables on the device of the logits."""

    def __init__(self, plan: Plan) -> None:
        outputs, self._names = plan.outputs, list(plan.outputs)
        self._reserved = torch.tensor(sorted(plan.embed_ids), dtype=torch.int64)
        longest = max((output.num_tokens for output in outputs.values()), default=0)
        # row 0, and the positions after an output, allow all ids
        self._table = torch.zeros(len(outputs) + 1, longest + 1, 2, dtype=torch.int64)
        self._table[..., 1] = torch.iinfo(torch.int64).max
        for row, output in zip(self._table[1:], outputs.values(), strict=True):
            row[: output.num_tokens] = torch.tensor([[i.start, i.stop] for i in output.allowed])

    def mask(self, logits: torch.Tensor) -> None:
        """Give the placeholder ids minus infinity, in place."""
        self._reserved = self._reserved.to(logits.device)
        logits.index_fill_(-1, self._reserved, float("-inf"))

    def number(self, name: Any) -> int:
        """The number of an output, from 1; 0 for none of that name."""
        return self._names.index(name) + 1 if name in self._names else 0

    def confine(self, logits: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor) -> None:
        """Give minus infinity, in place, to the ids that may not stand at a position.

        Args:
            logits: floating (rows, vocabulary size).
            numbers: of the output of each row, integers (rows,).
            positions: in that output, integers (rows,).
        """
        self._table = self._table.to(logits.device)
        last = self._table.shape[1] - 1
        start, stop = self._table[numbers, positions.clamp(0, last)].unbind(-1)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        outside = (ids < start[:, None]) | (ids >= stop[:, None])
        logits.masked_fill_(outside, float("-inf"))


def is_masked(model: Any) -> bool:
    """Whether vLLM made a logits processor of mmkit's for a model."""
    return any(known.is_for(model) for known in _masks)


_FOREIGN = (
    "min_tokens",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)
"""Options that contradict an output."""


def sampling_params(output: BoundOutput, engine: Any, **options: Any) -> Any:
    """vLLM's `SamplingParams` for one output: as many ids as the output has, each one that may
    stand at its position.

    Args:
        output: an output of the model's plan, for example ``plan.outputs["frame"]``.
        engine: a `vllm.LLM`, or an engine client of vLLM.
        options: more of `SamplingParams`, for example `temperature`, `seed`, `n` or `logprobs`.
            vLLM makes no text of the ids unless `detokenize` is True.

    Raises:
        InputError: an option that contradicts the output; an output whose positions allow
            different ids, and an engine that cannot confine positions one by one, for example with
            speculative decoding; or a temperature, and an engine that samples drafts wrongly.
    """
    fixed = {"max_tokens": output.num_tokens, "ignore_eos": True}
    for name, value in fixed.items():
        if options.get(name, value) not in (None, value):
            expected = f"{value} or none beside output {output.name!r}"
            raise InputError(name, expected, repr(options[name]), "It follows from the output.")
    for name in _FOREIGN:
        if options.get(name):
            raise InputError(name, f"none beside output {output.name!r}", "some")
    extra = {**(options.get("extra_args") or {}), EXTRA_ARG: output.name}
    chosen = {"detokenize": False, **options, **fixed, "extra_args": extra}
    config = getattr(engine, "llm_engine", engine).vllm_config
    if not _confines(config) and not output.allows_all:
        if output.common is None or _is_second_runner(config):
            expected = "an engine that confines each position"
            got = "one that makes no logits processor of mmkit's, as with speculative decoding"
            remedy = "Start it without speculative_config, and with mmkit installed."
            raise InputError(output.where, expected, got, remedy)
        chosen["allowed_token_ids"] = list(output.common)
    params = SamplingParams(**chosen)
    if params.sampling_type != SamplingType.GREEDY and samples_drafts_wrongly(config):
        expected = "temperature=0 beside speculative_config on a CPU"
        remedy = "This vLLM samples drafts there at arbitrary temperatures, masked ids included."
        raise InputError(output.where, expected, str(params.temperature), remedy)
    return params


def samples_drafts_wrongly(config: Any) -> bool:
    """Whether an engine with this configuration samples the ids of drafts at other temperatures
    than the requests', and among them ids that are masked."""
    on_cpu = config.device_config.device_type == "cpu"
    return on_cpu and config.speculative_config is not None and _cpu_loses_temperatures()


@cache
def _cpu_loses_temperatures() -> bool:
    """Whether vLLM's CPU stand-in for the kernel that gives every draft the temperature of its
    request writes into a copy of the result, which it drops. The temperatures are then whatever was
    in the memory. False where this vLLM has no such function, or it cannot be called."""
    result = torch.full((2,), -1.0)
    try:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        kernels = import_module("vllm.utils.cpu_triton_utils")
        kernels._expand_kernel_impl(result, torch.tensor([0.5]), torch.tensor([2]), 0, 1)
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return False
    return result.tolist() != [0.5, 0.5]


def _is_second_runner(config: Any) -> bool:
    return bool(getattr(config, "use_v2_model_runner", False))


def _confines(config: Any) -> bool:
    """Whether an engine makes a `PlaceholderMask`. vLLM's first model runner makes none with
    speculative decoding; the second one makes it from 0.31 on."""
    own = f"{__name__}:{PlaceholderMask.__name__}"
    installed = {point.value for point in entry_points(group="vllm.logits_processors")}
    named = getattr(config.model_config, "logits_processors", None) or ()
    if own not in installed.union(map(str, named)) and PlaceholderMask not in named:
        return False
    if _is_second_runner(config):
        return len(_interfaces) > 1
    return config.speculative_config is None

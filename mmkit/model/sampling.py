"""Which ids may be sampled: no placeholder, and for an output only ids that may stand there.

vLLM computes the reported log probabilities, of the answer and of the prompt, from the model's
logits. These logits stay as they are; a logits processor, which sees the logits that are sampled
from, masks the placeholder ids. vLLM loads it in every engine by mmkit's entry point
``vllm.logits_processors``, also for models without a spec, so this module imports nothing of
`mmkit.vllm_api`. Where vLLM makes no logits processor for a model (with speculative decoding,
without the entry point), the model masks its logits itself; see `MultiModalModel.compute_logits`.
`sampling_params` marks a request for an output of the spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple
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

_CONTRADICTING_OPTIONS = (
    "min_tokens",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)
"""The options of `SamplingParams` that contradict an output."""


def sampling_params(output: BoundOutput, engine: Any, **options: Any) -> Any:
    """Return vLLM's `SamplingParams` for one output of the spec.

    They ask for as many ids as the output has, each one that may stand at its position.

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
    for name in _CONTRADICTING_OPTIONS:
        if options.get(name):
            raise InputError(name, f"none beside output {output.name!r}", "some")
    arguments = {"detokenize": False, **options, **fixed}
    arguments["extra_args"] = {**(options.get("extra_args") or {}), EXTRA_ARG: output.name}
    config = getattr(engine, "llm_engine", engine).vllm_config
    if not _masks_each_position(config) and not output.allows_all:
        if output.common is None or _has_second_runner(config):
            expected = "an engine that confines each position"
            got = "one that makes no logits processor of mmkit's, as with speculative decoding"
            remedy = "Start it without speculative_config, and with mmkit installed."
            raise InputError(output.where, expected, got, remedy)
        arguments["allowed_token_ids"] = list(output.common)
    params = SamplingParams(**arguments)
    if params.sampling_type != SamplingType.GREEDY and samples_drafts_wrongly(config):
        expected = "temperature=0 beside speculative_config on a CPU"
        remedy = "This vLLM samples drafts there at arbitrary temperatures, masked ids included."
        raise InputError(output.where, expected, str(params.temperature), remedy)
    return params


def samples_drafts_wrongly(config: Any) -> bool:
    """Return whether an engine samples the ids of drafts at other temperatures than the requests'.

    Ids that are masked are then among them.

    Args:
        config: vLLM's configuration of the engine.
    """
    on_cpu = config.device_config.device_type == "cpu"
    return on_cpu and config.speculative_config is not None and _cpu_loses_temperatures()


@cache
def _cpu_loses_temperatures() -> bool:
    """Return whether vLLM's CPU stand-in for a kernel loses the temperatures of drafts.

    The kernel gives every draft the temperature of its request. The stand-in writes into a copy of
    the result, which it drops: the temperatures are then whatever was in the memory. False where
    this vLLM has no such function, or it cannot be called.
    """
    result = torch.full((2,), -1.0)
    try:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        kernels = import_module("vllm.utils.cpu_triton_utils")
        kernels._expand_kernel_impl(result, torch.tensor([0.5]), torch.tensor([2]), 0, 1)
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return False
    return result.tolist() != [0.5, 0.5]


def _has_second_runner(config: Any) -> bool:
    """Return whether an engine runs vLLM's second model runner."""
    return bool(getattr(config, "use_v2_model_runner", False))


def _masks_each_position(config: Any) -> bool:
    """Return whether an engine makes a `PlaceholderMask`.

    vLLM's first model runner makes none with speculative decoding; the second one makes it from
    0.31 on.
    """
    processors: list[Any] = [point.value for point in entry_points(group="vllm.logits_processors")]
    processors += getattr(config.model_config, "logits_processors", None) or ()
    name = f"{__name__}:{PlaceholderMask.__name__}"
    if name not in processors and PlaceholderMask not in processors:
        return False
    if _has_second_runner(config):
        return len(_interfaces) > 1
    return config.speculative_config is None


class AllowedIds:
    """The ids of a model that may be sampled.

    They are never placeholders, and at each position of an output some of the others. Tables are on
    the device of the logits.
    """

    def __init__(self, plan: Plan) -> None:
        outputs = plan.outputs.values()
        self._names = list(plan.outputs)
        self._placeholder_ids = torch.tensor(sorted(plan.embed_ids), dtype=torch.int64)
        longest = max((output.num_tokens for output in outputs), default=0)
        # By output and position, the first id that is allowed, and the id after the last one. Row 0
        # is of requests for no output. It allows all ids, and so do positions after an output.
        self._table = torch.zeros(len(outputs) + 1, longest + 1, 2, dtype=torch.int64)
        self._table[..., 1] = torch.iinfo(torch.int64).max
        for row, output in zip(self._table[1:], outputs, strict=True):
            ranges = [[ids.start, ids.stop] for ids in output.allowed]
            row[: output.num_tokens] = torch.tensor(ranges)

    def get_output_number(self, name: Any) -> int:
        """Return the number of an output, from 1; 0 for none of that name."""
        if name not in self._names:
            return 0
        return self._names.index(name) + 1

    def mask_placeholders(self, logits: torch.Tensor) -> None:
        """Give the placeholder ids minus infinity, in place."""
        self._placeholder_ids = self._placeholder_ids.to(logits.device)
        logits.index_fill_(-1, self._placeholder_ids, float("-inf"))

    def mask_outputs(
        self, logits: torch.Tensor, outputs: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Give minus infinity, in place, to the ids that may not stand at a position.

        Args:
            logits: floating (rows, vocabulary size).
            outputs: the number of the output of each row, integers (rows,).
            positions: in that output, integers (rows,).
        """
        self._table = self._table.to(logits.device)
        last = self._table.shape[1] - 1
        start, stop = self._table[outputs, positions.clamp(0, last)].unbind(-1)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        is_outside = (ids < start[:, None]) | (ids >= stop[:, None])
        logits.masked_fill_(is_outside, float("-inf"))


# -- the logits processor --------------------------------------------------------------------------

MODELS: WeakSet[Any] = WeakSet()
"""The models of this process; vLLM makes the logits processor of a model before or after it."""

_masks: WeakSet[PlaceholderMask] = WeakSet()

_interfaces: list[Any] = [LogitsProcessor]
# vLLM's second model runner has an interface of its own from 0.31 on, and takes no other
with suppress(ImportError, AttributeError):
    _interfaces.append(
        import_module("vllm.v1.worker.gpu.sample.logits_processor.interface").LogitsProcessor
    )


def has_logits_processor(model: Any) -> bool:
    """Return whether vLLM made a `PlaceholderMask` for a model."""
    return any(mask.is_for(model) for mask in _masks)


class _SampledRequest(NamedTuple):
    """A request for which ids are sampled.

    Attributes:
        output: the number of the output that it asks for; 0 for none.
        ids: the ids that were sampled, a list to which vLLM adds.
    """

    output: int
    ids: Sequence[int]


_NO_OUTPUT = _SampledRequest(0, ())


class PlaceholderMask(*_interfaces):  # type: ignore[misc]
    """Logits processor that gives minus infinity to the ids that may not be sampled.

    These are placeholder ids and, in a request for an output, all ids that may not stand at the
    next position. It does nothing for a model without a spec.
    """

    def __init__(self, vllm_config: Any, *more: Any) -> None:
        self._config = vllm_config
        self._model: Any = None
        # of the second model runner: the state of all its requests
        self._states = more[0]
        # by row of the logits, or, in the second model runner, by slot
        self._sampled: dict[int, _SampledRequest] = {}
        _masks.add(self)

    def is_for(self, model: Any) -> bool:
        """Return whether vLLM made this processor for a model."""
        return model.mm_engine is self._config

    @override
    def is_argmax_invariant(self) -> bool:
        """Return False: the likeliest id may be masked."""
        return False

    @override
    def update_state(self, batch_update: Any) -> None:
        """Store, for each request for an output, its growing list of sampled ids."""

        def make_state(params: Any, _: Any, ids: list[int]) -> _SampledRequest | None:
            output = self._get_output_number(params)
            return _SampledRequest(output, ids) if output else None

        process_dict_updates(self._sampled, batch_update, make_state)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Store a request of vLLM's second model runner.

        Returns:
            Whether its logits are changed.
        """
        self._sampled[req_idx] = _SampledRequest(self._get_output_number(sampling_params), ())
        return self._find_model() is not None

    @override
    def apply(self, logits: torch.Tensor, *context: Any) -> torch.Tensor:
        """Mask logits in place.

        Args:
            logits: floating (rows, vocabulary size).
            context: of the second model runner, where a request may have several rows.
        """
        model = self._find_model()
        if model is None:
            return logits
        model.allowed_ids.mask_placeholders(logits)
        if all(request.output == 0 for request in self._sampled.values()):
            return logits
        if context:
            outputs, positions = self._locate_slots(context[0], logits.device)
        else:
            outputs, positions = self._locate_rows(len(logits), logits.device)
        model.allowed_ids.mask_outputs(logits, outputs, positions)
        return logits

    def _locate_rows(
        self, num_rows: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of each row and the position in it, integers (rows,)."""
        columns = []
        for row in range(num_rows):
            request = self._sampled.get(row, _NO_OUTPUT)
            columns.append([request.output, len(request.ids)])
        # one tensor, so that one copy goes to the device
        outputs, positions = torch.tensor(columns, device=device).unbind(1)
        return outputs, positions

    def _locate_slots(
        self, context: Any, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of each row and the position in it, integers (rows,)."""
        output_of_slot = []
        for slot in range(max(self._sampled) + 1):
            output_of_slot.append(self._sampled.get(slot, _NO_OUTPUT).output)
        slots = context.expanded_idx_mapping
        outputs = torch.tensor(output_of_slot, device=device)[slots]
        positions = context.pos + 1 - self._states.prompt_len.gpu[slots]
        return outputs, positions

    def _get_output_number(self, params: Any) -> int:
        """Return the number of the output that a request asks for; 0 for no or an unknown one."""
        name = (params.extra_args or {}).get(EXTRA_ARG)
        if name is None:
            return 0
        model = self._find_model()
        if model is None:
            return 0
        return int(model.allowed_ids.get_output_number(name))

    def _find_model(self) -> Any:
        """Return the model for which vLLM made this processor; None for one without a spec."""
        if self._model is None:
            for model in MODELS:
                if self.is_for(model):
                    self._model = model
                    break
        return self._model

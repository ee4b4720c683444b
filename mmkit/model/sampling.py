"""Which ids may be sampled: no placeholder, and for an output only ids that may stand there.

vLLM computes the reported log probabilities, of the answer and of the prompt, from the model's
logits. These logits stay as they are; a logits processor, which sees the logits that are sampled
from, masks the placeholder ids. vLLM loads it in every engine by mmkit's entry point
``vllm.logits_processors``, also for models without a spec, so importing this module imports nothing
of `mmkit.vllm_api`. Where vLLM makes no logits processor for a model (with speculative decoding,
without the entry point), the model masks its logits itself; see `MultiModalModel.compute_logits`.
`sampling_params` marks a request for an output of the spec.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
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
from ..plan.allowed_ids import AllowedIds
from ..plan.output import BoundOutput

__all__ = ["sampling_params"]

logger = logging.getLogger(__name__)


def sampling_params(output: BoundOutput, engine: Any, **options: Any) -> Any:
    """Return vLLM's `SamplingParams` for one output of the spec.

    They ask for as many ids as the output has, each an id that may stand at its position. For an
    output in a text, an output with `after`, they ask for a text in which each id of an output may
    stand at its position.

    Args:
        output: an output of the model's plan, for example ``plan.outputs["frame"]``.
        engine: a `vllm.LLM`, or an engine client of vLLM.
        options: more of `SamplingParams`, for example `temperature`, `seed`, `n` or `logprobs`.
            vLLM makes no text of the ids of an output alone unless `detokenize` is True. A text
            with outputs ends where the model ends it, unless `max_tokens` is stated.

    Raises:
        InputError: an option that contradicts the output; an output whose positions allow
            different ids, and an engine that cannot confine positions one by one, for example with
            speculative decoding; or a temperature, and an engine that samples drafts wrongly.
    """
    # not at the top: vLLM imports this module in engines of models without a spec, too
    from ..vllm_api.confinement import check_engine, check_options, find_ids_to_allow

    check_options(output, options)
    arguments: dict[str, Any]
    if output.after is None:
        arguments = {"detokenize": False, **options}
        arguments.update(max_tokens=output.num_tokens, ignore_eos=True)
    else:
        arguments = {"max_tokens": None, **options}
    arguments["extra_args"] = {**(options.get("extra_args") or {}), EXTRA_ARG: output.name}
    config = getattr(engine, "llm_engine", engine).vllm_config
    check_engine(output, config)
    ids_to_allow = find_ids_to_allow(output, config)
    if ids_to_allow is not None:
        arguments["allowed_token_ids"] = ids_to_allow
    params = SamplingParams(**arguments)
    check_temperature(output, params, config)
    return params


def check_temperature(output: BoundOutput, params: Any, config: Any) -> None:
    """Refuse a temperature where vLLM samples drafts wrongly.

    Raises:
        InputError: it does.
    """
    if params.sampling_type == SamplingType.GREEDY or not samples_drafts_wrongly(config):
        return
    expected = "temperature=0 beside speculative_config on a CPU"
    remedy = "This vLLM samples drafts there at arbitrary temperatures, masked ids included."
    raise InputError(output.where, expected, str(params.temperature), remedy)


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
        prompt: the ids of the prompt; none of a prompt that is embeddings.
    """

    output: int
    ids: Sequence[int]
    prompt: Sequence[int]


_NO_OUTPUT = _SampledRequest(0, (), ())


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

        def make_state(params: Any, prompt: Any, ids: list[int]) -> _SampledRequest | None:
            output = self._get_output_number(params)
            return _SampledRequest(output, ids, prompt or ()) if output else None

        process_dict_updates(self._sampled, batch_update, make_state)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Store a request of vLLM's second model runner.

        Returns:
            Whether its logits are changed.
        """
        number = self._get_output_number(sampling_params)
        self._sampled[req_idx] = _SampledRequest(number, (), ())
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
            outputs, positions = self._locate_slots(model.allowed_ids, context[0], logits.device)
        else:
            outputs, positions = self._locate_rows(model.allowed_ids, len(logits), logits.device)
        model.allowed_ids.mask_outputs(logits, outputs, positions)
        return logits

    def _locate_rows(
        self, allowed_ids: AllowedIds, num_rows: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of each row and the position in it, integers (rows,)."""
        columns = []
        for row in range(num_rows):
            request = self._sampled.get(row, _NO_OUTPUT)
            position = allowed_ids.find_position(request.output, request.ids, request.prompt)
            columns.append([request.output, position])
        # one tensor, so that one copy goes to the device
        outputs, positions = torch.tensor(columns, device=device).unbind(1)
        return outputs, positions

    def _locate_slots(
        self, allowed_ids: AllowedIds, context: Any, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of each row and the position in it, integers (rows,)."""
        output_of_slot = []
        for slot in range(max(self._sampled) + 1):
            output_of_slot.append(self._sampled.get(slot, _NO_OUTPUT).output)
        slots = context.expanded_idx_mapping
        outputs = torch.tensor(output_of_slot, device=device)[slots]
        positions = context.pos + 1 - self._states.prompt_len.gpu[slots]
        is_in_text = [allowed_ids.is_in_text(number) for number in output_of_slot]
        if any(is_in_text):
            last_ids = self._collect_last_ids(context, allowed_ids.window)
            positions_in_texts = allowed_ids.find_positions(outputs, last_ids)
            rows_in_texts = torch.tensor(is_in_text, device=device)[slots]
            positions = torch.where(rows_in_texts, positions_in_texts, positions)
        return outputs, positions

    def _collect_last_ids(self, context: Any, window: int) -> torch.Tensor:
        """Return the last ids before what each row samples, in the second model runner.

        The rows of a request stand one behind the other: its last committed id, then its drafts,
        which are not among the committed ids.

        Returns:
            Integers (rows, window), the newest first; -1 before the beginning of a prompt.
        """
        device = context.pos.device
        distances = torch.arange(window, device=device)
        positions = context.pos[:, None] - distances
        slots = context.expanded_idx_mapping[:, None]
        committed_ids = self._states.all_token_ids.gpu[slots, positions.clamp(min=0)]
        rows = torch.arange(len(context.pos), device=device)[:, None] - distances
        fed_ids = context.input_ids[rows.clamp(min=0)]
        is_fed = distances <= context.expanded_local_pos[:, None]
        last_ids = torch.where(is_fed, fed_ids.long(), committed_ids.long())
        return torch.where(positions >= 0, last_ids, -1)

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

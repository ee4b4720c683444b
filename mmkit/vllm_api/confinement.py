"""Which outputs an engine can confine sampling to, and which parameters contradict one.

What confines is the logits processor `PlaceholderMask` of `mmkit.model.sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from ..errors import InputError
from ..language.spec import EXTRA_ARG
from ..plan.output import BoundOutput, find_output
from ..plan.plan import Plan
from .compat import find

_ROOT = __name__.removesuffix(".vllm_api.confinement")  # a package may hold a copy of mmkit

PROCESSOR = f"{_ROOT}.model.sampling:PlaceholderMask"
"""The name of mmkit's logits processor, by which vLLM loads it."""

MAX_NAME_CHARS = 80
"""Characters of an unknown name that an error shows."""

_OPTIONS_BESIDE_WHOLE_ANSWER = (
    "min_tokens",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
)
"""The options of `SamplingParams` that contradict an output which is the whole answer."""

_OPTIONS_THAT_LEAVE_NO_ID = ("structured_outputs", "bad_words")
"""The options among these that are refused on vLLM's own routes, too: they may take away all ids
that the output allows."""

_OPTIONS_BESIDE_TEXT = (
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
)
"""The options of `SamplingParams` that contradict an output in a text.

Each takes ids away or forces some, and an output may allow these alone: none would be left.
"""

_CONTEXT: Any = find("v1.worker.gpu.sample.logits_processor.interface:LogitsContext", default=None)
"""What vLLM's second model runner tells its logits processors, from 0.31 on."""

_SECOND_RUNNER_TELLS_IDS = _CONTEXT is not None and "input_ids" in _CONTEXT.__annotations__


def check_options(output: BoundOutput, options: Mapping[str, Any]) -> None:
    """Refuse options of `SamplingParams` that contradict an output.

    Raises:
        InputError: names the option.
    """
    names: tuple[str, ...] = _OPTIONS_BESIDE_TEXT
    if output.after is None:
        names = _OPTIONS_BESIDE_WHOLE_ANSWER
        fixed = {"max_tokens": output.num_tokens, "ignore_eos": True}
        for name, value in fixed.items():
            if options.get(name, value) not in (None, value):
                expected = f"{value} or none beside output {output.name!r}"
                remedy = "It follows from the output."
                raise InputError(name, expected, repr(options[name]), remedy)
    for name in names:
        if options.get(name):
            raise InputError(name, f"none beside output {output.name!r}", "some")


def check_requested_output(plan: Plan, params: Any, config: Any) -> None:
    """Refuse parameters of a request that ask for an output which cannot come.

    Args:
        plan: the plan of the model.
        params: vLLM's parameters of the request.
        config: vLLM's configuration of the engine; None where it is unknown.

    Raises:
        InputError: the spec has no such output, another parameter contradicts it, or the engine
            cannot confine sampling to it.
    """
    name = (getattr(params, "extra_args", None) or {}).get(EXTRA_ARG)
    if name is None:
        return
    got = repr(name)[:MAX_NAME_CHARS]
    output = find_output(plan.outputs, name, f"{plan.spec.name}.{EXTRA_ARG}", got)
    contradicting: tuple[str, ...] = _OPTIONS_BESIDE_TEXT
    if output.after is None:
        contradicting = _OPTIONS_THAT_LEAVE_NO_ID
        _check_allowed_ids(plan, output, params, config)
    for option in contradicting:
        if getattr(params, option, None):
            where = f"{plan.spec.name}.{option}"
            raise InputError(where, f"none beside output {output.name!r}", "some")
    if config is not None:
        check_engine(output, config)


def _check_allowed_ids(plan: Plan, output: BoundOutput, params: Any, config: Any) -> None:
    """Refuse allowed ids that are not those of an output which is the whole answer.

    Raises:
        InputError: they are others, or missing where only they confine sampling.
    """
    where = f"{plan.spec.name}.allowed_token_ids"
    allowed = getattr(params, "allowed_token_ids", None)
    if allowed is not None:
        if output.common is None or set(allowed) != set(output.common):
            raise InputError(where, f"none beside output {output.name!r}", "some")
    elif config is not None and find_ids_to_allow(output, config) is not None:
        expected = f"the ids of output {output.name!r}, to which this engine confines nothing else"
        raise InputError(where, expected, "none", "Use mmkit.model.sampling.sampling_params.")


def find_ids_to_allow(output: BoundOutput, config: Any) -> list[int] | None:
    """Return the ids of an output that parameters have to name as `allowed_token_ids`.

    None where an engine confines each position by itself, or nothing has to be confined.
    """
    if output.common is None or output.allows_all or masks_each_position(config):
        return None
    return list(output.common)


def check_engine(output: BoundOutput, config: Any) -> None:
    """Refuse an output that an engine cannot confine sampling to.

    Args:
        output: the output.
        config: vLLM's configuration of the engine.

    Raises:
        InputError: it cannot.
    """
    if not masks_each_position(config) and not output.allows_all:
        if output.common is None or _has_second_runner(config):
            expected = "an engine that confines each position"
            got = "one that makes no logits processor of mmkit's, as with speculative decoding"
            remedy = "Start it without speculative_config, and with mmkit installed."
            raise InputError(output.where, expected, got, remedy)
    if output.after is not None and not _tells_sampled_ids(config):
        expected = "an engine whose logits processors see the sampled ids"
        got = "asynchronous scheduling, in which they see them only if they are named"
        remedy = f"Start it with logits_processors=[{PROCESSOR!r}], or async_scheduling=False."
        raise InputError(output.where, expected, got, remedy)


def masks_each_position(config: Any) -> bool:
    """Return whether an engine makes a `PlaceholderMask`.

    vLLM's first model runner makes none with speculative decoding; the second one makes it from
    0.31 on.
    """
    is_loaded = any(point.value == PROCESSOR for point in _list_entry_points())
    if not is_loaded and not _is_named(config):
        return False
    if _has_second_runner(config):
        return _CONTEXT is not None
    return config.speculative_config is None


@cache
def _list_entry_points() -> Any:
    """Return the logits processors of installed packages; reading their files takes 5 ms."""
    return entry_points(group="vllm.logits_processors")


def _is_named(config: Any) -> bool:
    """Return whether the configuration of an engine names mmkit's logits processor."""
    for processor in getattr(config.model_config, "logits_processors", None) or ():
        name = processor
        if isinstance(processor, type):
            name = f"{processor.__module__}:{processor.__qualname__}"
        if name == PROCESSOR:
            return True
    return False


def _has_second_runner(config: Any) -> bool:
    """Return whether an engine runs vLLM's second model runner."""
    return bool(getattr(config, "use_v2_model_runner", False))


def _tells_sampled_ids(config: Any) -> bool:
    """Return whether mmkit's logits processor sees all ids that were sampled before.

    vLLM's first model runner samples the next id before it has copied the last one from the device,
    if it schedules asynchronously. It waits for the copy only if its configuration names a logits
    processor. Without that, the id is -1: it does not count the processors of entry points.
    """
    if _has_second_runner(config):
        return _SECOND_RUNNER_TELLS_IDS
    is_asynchronous = getattr(config.scheduler_config, "async_scheduling", False)
    return not is_asynchronous or _is_named(config)

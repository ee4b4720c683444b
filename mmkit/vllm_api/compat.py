"""Parts of vLLM whose names and modules differ between versions.

A feature of the installed vLLM decides, no version number; each flag names the releases for the
reader.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from operator import attrgetter
from typing import Any

import vllm.envs
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalFieldElem, PlaceholderRange
from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo

from ..errors import VllmApiError

NEWEST_TESTED = "0.33.0"

REMEDY = f"Install vLLM 0.11.2 to {NEWEST_TESTED}, or a newer mmkit."

_REQUIRED = object()


INSTALLED = f"vLLM {vllm.__version__}"
"""vLLM and its version, as errors name it."""

IS_NEWER = vllm.__version_tuple__[:3] > tuple(map(int, NEWEST_TESTED.split(".")))
"""Whether this vLLM is newer than the newest that mmkit was tested with. A vLLM that was built from
source without tags is not."""


def find(*paths: str, default: Any = _REQUIRED) -> Any:
    """Return the first of several parts of vLLM, each ``module:name``, that the installed vLLM has.

    Raises:
        VllmApiError: it has none of them, and there is no default.
    """
    for path in paths:
        module, _, name = path.partition(":")
        try:
            return attrgetter(name)(import_module(f"vllm.{module}"))
        except AttributeError:
            continue
        except ModuleNotFoundError as error:
            if not f"vllm.{module}.".startswith(f"{error.name}."):
                raise
    if default is not _REQUIRED:
        return default
    expected_parts = []
    for path in paths:
        module, _, name = path.partition(":")
        expected_parts.append(f"{name} in vllm.{module}")
    raise VllmApiError(INSTALLED, " or ".join(expected_parts), "none", REMEDY)


def _list_parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


BaseDummyInputsBuilder = find(
    "multimodal.processing:BaseDummyInputsBuilder", "multimodal.profiling:BaseDummyInputsBuilder"
)
ProcessorInputs = find(
    "multimodal.processing:ProcessorInputs", "multimodal.profiling:ProcessorInputs"
)
RENDERS = find("renderers.base:BaseRenderer._process_tokens", default=None) is not None
"""Whether vLLM has a renderer that makes the engine's input. The renderer has its processor from
its start, so that the patches are installed then."""

ITEMS = _list_parameters(BaseMultiModalProcessor.apply)[2]
"""The name of the argument with a request's items, where a request comes in parts: `mm_data` or
`mm_items`. From 0.17 a request comes as one `ProcessorInputs`."""

TAKES_PARTS = "prompt" in _list_parameters(BaseMultiModalProcessor.apply)
"""Whether a request comes in parts, as it does up to 0.16."""

INFO_PARSES = hasattr(BaseProcessingInfo, "get_data_parser")
"""Whether the info parses a caller's data, as it does from 0.16; before, the processor does."""

PROMPTS_ARE_IDS = "str" not in str(ProcessorInputs.__annotations__["prompt"])
"""Whether the prompt of a processor is always token ids, as it is from 0.29."""

HOLDS_CACHE = "cache" in _list_parameters(BaseMultiModalProcessor.__init__)
"""Whether the processor has the cache, as it has up to 0.30; from 0.31 the cache comes with the
request."""

BUILDER_MAKES_DUMMIES = hasattr(BaseDummyInputsBuilder, "get_dummy_processor_inputs")
"""Whether the dummy inputs builder makes the largest request, as it does up to 0.30; from 0.31 the
processor does."""

COUNTS_EMBEDS = hasattr(PlaceholderRange, "embeds_cumsum")
"""Whether vLLM counts the embed positions of a layout, as it does from 0.13; before, it counts all
positions."""

KEEPS_ON_CPU = "keep_on_cpu" in _list_parameters(MultiModalFieldConfig.batched)
"""Whether a field says that it stays on the CPU, as it does from 0.13; before, the model class
does."""

FILES_TELL_DECODING = hasattr(find("multimodal.media:MediaWithBytes", default=None), "io_config")
"""Whether a file that vLLM loaded keeps how it was converted, so that its bytes can be hashed; of
other files mmkit hashes the pixels."""

ELEMENTS_ARE_NAMED = "key" in _list_parameters(MultiModalFieldElem)
"""Whether a part of a field has the names of its modality and of the field, as in 0.11."""

TOUCHES = hasattr(MultiModalProcessorOnlyCache, "touch_sender_cache_item")
"""Whether a request tells the cache which items it must keep, as it does from 0.16."""

RELEASES = hasattr(MultiModalProcessorOnlyCache, "release_sender_touches")
"""Whether a request also tells the cache that it needs these items no longer, as it does from
0.31."""

SKIPS_LARGE = hasattr(MultiModalProcessorOnlyCache, "cache_if_fits")
"""Whether an item that is larger than the cache is served without it, as it is from 0.29; before,
vLLM raises an error."""

TELLS_MISSES = find("multimodal.cache:MultiModalCacheMissError", default=None) is not None
"""Whether the engine reports the items that it lacks, and the front end forgets them, as they do
from 0.28."""

_HASHES_BY_ALGORITHM = "algorithm" in _list_parameters(MultiModalHasher.hash_kwargs)


def hash_by_vllm(algorithm: str, **values: object) -> str:
    """Return vLLM's hash of values; before 0.28 the environment decides the algorithm."""
    if _HASHES_BY_ALGORITHM:
        return str(MultiModalHasher.hash_kwargs(algorithm, **values))
    return str(MultiModalHasher.hash_kwargs(**values))


def get_hasher_algorithm(mm_config: Any) -> str:
    """Return the algorithm of vLLM's hashes.

    Before 0.28 an environment variable sets it; before 0.15 it is always blake3.
    """
    algorithm = getattr(mm_config, "mm_hasher_algorithm", None)
    if not algorithm:
        algorithm = getattr(vllm.envs, "VLLM_MM_HASHER_ALGORITHM", "blake3")
    return str(algorithm)

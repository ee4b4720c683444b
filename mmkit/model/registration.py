"""Registration of a model class with vLLM, for a spec."""

from __future__ import annotations

from typing import Any

from ..errors import SpecError
from ..generate import generate_classes
from ..language.names import FORWARD_ARGUMENTS
from ..language.spec import Declaration
from ..plan.model_methods import check_method
from ..vllm_api.models import register
from .mixin import MultiModalModel
from .mrope import supply_positions

_MIXIN_METHODS = {"__init__", "embed_multimodal", "embed_input_ids", "compute_logits"}
"""The methods by which the mixin keeps a spec; no base before the mixin may hide them."""


def register_class(
    spec: Declaration,
    model: Any,
    *,
    info: type | None = None,
    dummy_inputs: type | None = None,
    processor: type | None = None,
) -> None:
    """Register a model class with vLLM, in this process.

    Args:
        spec: the declaration.
        model: the class.
        info: a subclass of the generated class, registered in its place.
        dummy_inputs: likewise.
        processor: likewise.

    Raises:
        SpecError: as for `check_class`.
    """
    check_class(spec, model)
    supply_positions(spec, model)
    generated_info, generated_dummy_inputs, generated_processor = generate_classes(spec, "vllm_api")
    generated_processor.sends_row_counts = issubclass(model, MultiModalModel)  # type: ignore[attr-defined]
    register(
        model,
        info=info or generated_info,
        dummy_inputs=dummy_inputs or generated_dummy_inputs,
        processor=processor or generated_processor,
    )
    model.mm_spec = spec


def check_class(spec: Declaration, model: type) -> None:
    """Refuse a model class that cannot run a spec.

    Raises:
        SpecError: the class is no multimodal model, the mixin is not first among its bases, or an
            `embed_<modality>`, or the `forward` of raw input, is missing or does not take the
            fields by their names.
    """
    where = f"{spec.name}, {model.__name__}"
    if not issubclass(model, MultiModalModel):
        if not getattr(model, "supports_multimodal", False):
            got = "a class without MultiModalModel"
            raise SpecError(where, "a multimodal model", got, _write_remedy(model))
        return  # vLLM's own, or written by hand
    _check_bases(where, model)
    is_overridden = model.embed_multimodal is not MultiModalModel.embed_multimodal
    if is_overridden and not spec.is_raw:
        return
    for modality in spec.modalities:
        if modality.is_ids_only:
            continue
        method = "forward" if spec.is_raw else f"embed_{modality.name}"
        fields = sorted(modality.received_fields)
        further = FORWARD_ARGUMENTS if spec.is_raw else ()
        check_method(where, model, method, fields, further)


def _check_bases(where: str, model: type) -> None:
    """Refuse a base before the mixin that hides methods of the mixin."""
    for base in model.__mro__[1 : model.__mro__.index(MultiModalModel)]:
        hidden = _MIXIN_METHODS & vars(base).keys()
        if hidden and not issubclass(base, MultiModalModel):
            expected = "MultiModalModel first among the bases"
            got = f"{base.__name__} before it, whose {min(hidden)} hides the mixin's"
            raise SpecError(where, expected, got, _write_remedy(model))


def _write_remedy(model: type) -> str:
    return f"Write class {model.__name__}(MultiModalModel, ...)."

"""What a model class must have when it is registered for a spec."""

from __future__ import annotations

from ..errors import SpecError
from ..language.names import FORWARD_ARGUMENTS
from ..language.spec import Declaration
from ..plan.model_methods import check_method
from .mixin import MultiModalModel

_MIXIN_METHODS = {"__init__", "embed_multimodal", "embed_input_ids", "compute_logits"}
"""The methods by which the mixin keeps a spec; no base before the mixin may hide them."""


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

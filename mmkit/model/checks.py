"""Checks of a model class when it is registered for a spec."""

from __future__ import annotations

import inspect

from ..errors import SpecError
from ..spec import Declaration
from .mixin import MultiModalModel

_OF_FORWARD = {"input_ids", "positions", "intermediate_tensors", "inputs_embeds"}
"""The arguments that vLLM passes to every `forward`."""

_OF_MIXIN = {"__init__", "embed_multimodal", "embed_input_ids", "compute_logits"}
"""The methods by which the mixin keeps a spec."""


def check_class(spec: Declaration, model: type) -> None:
    """Refuse a model class that cannot run a spec.

    Raises:
        SpecError: the class is no multimodal model, the mixin is not first among its bases, or an
            `embed_<modality>`, or the `forward` of raw input, is missing or does not take the
            fields by their names.
    """
    where = f"{spec.name}, {model.__name__}"
    remedy = f"Write class {model.__name__}(MultiModalModel, ...)."
    if not issubclass(model, MultiModalModel):
        if not getattr(model, "supports_multimodal", False):
            raise SpecError(where, "a multimodal model", "a class without MultiModalModel", remedy)
        return  # vLLM's own, or written by hand
    for base in model.__mro__[1 : model.__mro__.index(MultiModalModel)]:
        hidden = _OF_MIXIN & vars(base).keys()
        if hidden and not issubclass(base, MultiModalModel):
            got = f"{base.__name__} before it, whose {min(hidden)} hides the mixin's"
            raise SpecError(where, "MultiModalModel first among the bases", got, remedy)
    if model.embed_multimodal is not MultiModalModel.embed_multimodal and not spec.is_raw:
        return
    for modality in spec.modalities:
        method = "forward" if spec.is_raw else f"embed_{modality.name}"
        fields = sorted(name for name, field in modality.fields.items() if not field.hidden)
        if not callable(encode := getattr(model, method, None)):
            raise SpecError(where, f"a method {method}(self, {', '.join(fields)})", "none")
        taken = list(inspect.signature(encode).parameters)[1:]
        beside = _OF_FORWARD.intersection(taken) if spec.is_raw else ()
        try:
            inspect.signature(encode).bind(None, **dict.fromkeys([*fields, *beside]))
        except TypeError:
            expected = f"the fields ({', '.join(fields)}) as parameters"
            raise SpecError(f"{where}.{method}", expected, f"({', '.join(taken)})") from None

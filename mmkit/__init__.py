"""mmkit: declare a modality once; vLLM's processor classes are derived from the declaration.

>>> from mmkit import Modality, ModelSpec, Tensor, batched, cfg, embed, in_place
>>> ROBOT = ModelSpec(
...     "robot",
...     Modality(
...         "actions",
...         item=Tensor(shape=(cfg.action_tokens, cfg.action_dim)),
...         layout=embed(cfg.pad_token_id) * cfg.action_tokens,
...         update=in_place(),
...         fields={"actions": batched()},
...     ),
... )
"""

from typing import TYPE_CHECKING, Any

from .errors import InputError, MmkitError, SpecError, VllmApiError
from .expr import (
    Scope,
    call,
    ceil_div,
    cfg,
    equal,
    floor,
    fmt,
    isqrt,
    item,
    maximum,
    minimum,
    option,
    out,
    proc,
    prompt,
    total,
    where,
)
from .fields import batched, flat, shared
from .items import Audio, Image, ItemType, Tensor, Video, between
from .layout import each, embed, nothing, tok, token
from .process import hf, identity
from .spec import Modality, ModelSpec
from .updates import after, end, in_place, insert, replace, start

if TYPE_CHECKING:
    from .model import MultiModalModel

__version__ = "0.1.0"

__all__ = [
    "Audio",
    "Image",
    "InputError",
    "ItemType",
    "MmkitError",
    "Modality",
    "ModelSpec",
    "MultiModalModel",
    "Scope",
    "SpecError",
    "Tensor",
    "Video",
    "VllmApiError",
    "after",
    "batched",
    "between",
    "call",
    "ceil_div",
    "cfg",
    "each",
    "embed",
    "end",
    "equal",
    "flat",
    "floor",
    "fmt",
    "hf",
    "identity",
    "in_place",
    "insert",
    "isqrt",
    "item",
    "maximum",
    "minimum",
    "nothing",
    "option",
    "out",
    "proc",
    "prompt",
    "replace",
    "shared",
    "start",
    "tok",
    "token",
    "total",
    "where",
]


def __getattr__(name: str) -> Any:
    if name == "MultiModalModel":  # imports vLLM, so only when asked for
        from .model import MultiModalModel

        return MultiModalModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

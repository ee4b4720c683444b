"""mmkit: declare a modality once; vLLM's processor classes are derived from the declaration.

>>> from mmkit import Modality, ModelSpec, Tensor, already_expanded, batched, cfg, embed
>>> ROBOT = ModelSpec(
...     "robot",
...     Modality(
...         "actions",
...         item=Tensor(shape=(cfg.action_tokens, cfg.action_dim)),
...         layout=embed(cfg.pad_token_id) * cfg.action_tokens,
...         update=already_expanded(),
...         fields={"actions": batched()},
...     ),
... )
"""

from typing import TYPE_CHECKING, Any

from .errors import InputError, MmkitError, SpecError
from .expr import (
    Scope,
    ceil_div,
    cfg,
    fields,
    item,
    kwargs,
    later,
    maximum,
    minimum,
    proc,
    tok,
    where,
)
from .field import batched, constant, derived, flat
from .items import between
from .items.media import Audio, Image, Video
from .items.record import Record
from .items.tensor import Tensor
from .items.text import Text
from .layout import any_id, each, embed, literal, select
from .model_spec import ModelSpec
from .outputs import Output
from .process import hf
from .spec import Modality
from .updates import already_expanded, ending_with, insert, replace

if TYPE_CHECKING:
    from .model import MultiModalModel

__version__ = "0.2.0"

__all__ = [
    "Audio",
    "Image",
    "InputError",
    "MmkitError",
    "Modality",
    "ModelSpec",
    "MultiModalModel",
    "Output",
    "Record",
    "Scope",
    "SpecError",
    "Tensor",
    "Text",
    "Video",
    "already_expanded",
    "any_id",
    "batched",
    "between",
    "ceil_div",
    "cfg",
    "constant",
    "derived",
    "each",
    "embed",
    "ending_with",
    "fields",
    "flat",
    "hf",
    "insert",
    "item",
    "kwargs",
    "later",
    "literal",
    "maximum",
    "minimum",
    "proc",
    "replace",
    "select",
    "tok",
    "where",
]


def __getattr__(name: str) -> Any:
    if name == "MultiModalModel":  # imports vLLM, so only when asked for
        from .model import MultiModalModel

        return MultiModalModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

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

from .errors import InputError as InputError
from .errors import MmkitError as MmkitError
from .errors import SpecError as SpecError
from .expr import Scope as Scope
from .expr import ceil_div as ceil_div
from .expr import cfg as cfg
from .expr import fields as fields
from .expr import item as item
from .expr import kwargs as kwargs
from .expr import later as later
from .expr import maximum as maximum
from .expr import minimum as minimum
from .expr import proc as proc
from .expr import tok as tok
from .expr import where as where
from .field import batched as batched
from .field import constant as constant
from .field import derived as derived
from .field import flat as flat
from .field import hf as hf
from .items import between as between
from .items.media import Audio as Audio
from .items.media import Image as Image
from .items.media import Video as Video
from .items.record import Record as Record
from .items.tensor import Tensor as Tensor
from .items.tensor import Text as Text
from .layout import already_expanded as already_expanded
from .layout import any_id as any_id
from .layout import each as each
from .layout import embed as embed
from .layout import ending_with as ending_with
from .layout import insert as insert
from .layout import literal as literal
from .layout import replace as replace
from .layout import select as select
from .model_spec import ModelSpec as ModelSpec
from .spec import Modality as Modality
from .spec import Output as Output

if TYPE_CHECKING:
    from .model.mixin import MultiModalModel as MultiModalModel

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name == "MultiModalModel":  # imports vLLM, so only when asked for
        from .model.mixin import MultiModalModel

        return MultiModalModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

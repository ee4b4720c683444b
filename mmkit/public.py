"""The public names of mmkit that need no vLLM, which `mmkit` itself has, too.

A module of its own, because it imports PyTorch: what only imports a part of mmkit, such as the
help of the command, does not wait for it.
"""

from .errors import InputError as InputError
from .errors import MmkitError as MmkitError
from .errors import SpecError as SpecError
from .language.expr import Scope as Scope
from .language.expr import ceil_div as ceil_div
from .language.expr import cfg as cfg
from .language.expr import fields as fields
from .language.expr import item as item
from .language.expr import kwargs as kwargs
from .language.expr import largest_of as largest_of
from .language.expr import later as later
from .language.expr import maximum as maximum
from .language.expr import minimum as minimum
from .language.expr import proc as proc
from .language.expr import tok as tok
from .language.expr import where as where
from .language.field import batched as batched
from .language.field import constant as constant
from .language.field import derived as derived
from .language.field import flat as flat
from .language.field import hf as hf
from .language.field import identity as identity
from .language.items import between as between
from .language.items.lists import List as List
from .language.items.media import Audio as Audio
from .language.items.media import Image as Image
from .language.items.media import Video as Video
from .language.items.optional import optional as optional
from .language.items.record import Record as Record
from .language.items.tensor import Tensor as Tensor
from .language.items.tensor import Text as Text
from .language.layout import already_expanded as already_expanded
from .language.layout import any_id as any_id
from .language.layout import each as each
from .language.layout import embed as embed
from .language.layout import ending_with as ending_with
from .language.layout import insert as insert
from .language.layout import literal as literal
from .language.layout import replace as replace
from .language.layout import select as select
from .language.modality import Modality as Modality
from .language.policy import Policy as Policy
from .language.policy import concat as concat
from .language.spec import Output as Output
from .model_spec import ModelSpec as ModelSpec

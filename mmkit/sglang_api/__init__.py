"""Experimental: SGLang serves a model with the same spec as vLLM does.

Only this room knows SGLang, and nothing here imports vLLM::

    from mmkit.sglang_api import MultiModalModel, register

    @register(WAVES)
    class WavesForCausalLM(MultiModalModel, LlamaForCausalLM):
        def __init__(self, config, quant_config=None, prefix=""):
            super().__init__(config, quant_config, prefix)
            self.encoder = PatchEncoder(config)

        def embed_series(self, series):
            return [self.encoder(item) for item in series]

- `registration`: what SGLang has to know of a model;
- `specs`: which specs it can serve;
- `items`: a request's items, from the three lists that SGLang has for media;
- `fields`: what SGLang's caches and its transport see of an item;
- `processor`: the class that SGLang calls for a request;
- `binding`: a spec, bound to the checkpoint that SGLang serves;
- `model`: the mixin of the model class;
- `hooks`: the check of requests without items;
- `plugin`: what SGLang runs in each of its processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..wire.items import make_item_url as make_item_url

if TYPE_CHECKING:
    from .model import MultiModalModel as MultiModalModel
    from .registration import register as register

_IMPORTING_SGLANG = {"MultiModalModel": ".model", "register": ".registration"}
"""Names whose modules import SGLang. A client that makes the URLs of items needs none."""


def __getattr__(name: str) -> Any:
    if name not in _IMPORTING_SGLANG:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_IMPORTING_SGLANG[name], __name__), name)

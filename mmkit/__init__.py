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

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model.mixin import MultiModalModel as MultiModalModel
    from .model.serving import serve_transformers as serve_transformers
    from .public import *  # noqa: F403

__version__ = "0.3.0"

_IMPORTING_VLLM = {
    "MultiModalModel": ".model.mixin",
    "serve_transformers": ".model.serving",
}
"""Public names whose modules import vLLM, so that only who asks for them imports it."""


def __getattr__(name: str) -> Any:
    """Return a public name: `import mmkit` alone imports neither PyTorch nor vLLM."""
    if name == "__all__":
        return _list_public_names()
    if name in _IMPORTING_VLLM:
        value = getattr(import_module(_IMPORTING_VLLM[name], __name__), name)
    elif name in _list_public_names():
        value = getattr(import_module(".public", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # so that Python finds it without this function from now on
    return value


def __dir__() -> list[str]:
    """List the names of this module and the public ones that need no vLLM."""
    return sorted({*globals(), *_list_public_names()})


def _list_public_names() -> list[str]:
    public = import_module(".public", __name__)
    return [name for name in vars(public) if not name.startswith("_")]

"""Serving: routes for items of any modality in ``vllm serve``, and their client.

`Client`, `encode` and `content_part` need neither vLLM nor a GPU. The endpoint plugin
`mmkit.serve.plugin` adds the routes to the server; ``python -m mmkit.serve DIR`` starts ``vllm
serve DIR`` with it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client, RequestError, ServerGone
    from .wire import content_part, encode

__all__ = ["Client", "RequestError", "ServerGone", "content_part", "encode"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # the server needs no client
        from . import client, wire

        return getattr(client, name, None) or getattr(wire, name)
    raise AttributeError(f"module 'mmkit.serve' has no attribute {name!r}")

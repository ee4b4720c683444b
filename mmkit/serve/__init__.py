"""Serving: routes for items of any modality in ``vllm serve``, and their client.

`Client` and `AsyncClient` need neither vLLM nor a GPU. The endpoint plugin `mmkit.serve.plugin`
adds the routes to the server; ``python -m mmkit.serve DIR`` starts ``vllm serve DIR`` with it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import AsyncClient, Client, RequestError, ServerGone
    from .wire import content_part

__all__ = ["AsyncClient", "Client", "RequestError", "ServerGone", "content_part"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # the server needs no client
        from . import client, wire

        return getattr(wire if name == "content_part" else client, name)
    raise AttributeError(f"module 'mmkit.serve' has no attribute {name!r}")

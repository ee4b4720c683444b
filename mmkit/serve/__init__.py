"""Serving: routes for items of any modality in ``vllm serve``, and their client.

`Client`, `encode` and `content_part` need neither vLLM nor a GPU. The endpoint plugin
`mmkit.serve.plugin` adds the routes to the server; ``python -m mmkit.serve DIR`` starts ``vllm
serve DIR`` with it.
"""

from ..wire.items import content_part, encode
from .client import Client, RequestError, ServerGone

__all__ = ["Client", "RequestError", "ServerGone", "content_part", "encode"]

"""Items: what a caller may send.

An item type splits a caller's data into items, brings each to one canonical form (vLLM's hash sees
dtype and container, so equal values must be one form), validates it completely, tells its facts to
expressions, and knows its largest instance, from which dummy inputs and the token maximum are
derived.

Each item type is one class, which says everything that depends on the type: `ItemType` lists it.
"""

from .base import SCOPES, Between, ItemType, Size, between, fits, map_size, shape_text, unscoped
from .embeds import Embedding, embedding_rows, embeddings
from .values import dtype_name

__all__ = ["SCOPES", "Between", "Embedding", "ItemType", "Size", "between", "dtype_name"]
__all__ += ["embedding_rows", "embeddings", "fits", "map_size", "shape_text", "unscoped"]

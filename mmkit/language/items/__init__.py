"""Items: what a caller may send.

An item type splits a caller's data into items, converts each item to one canonical form (vLLM's
hash sees dtype and container, so equal values must have one form), validates it completely, and
provides its facts to expressions. It knows its largest instance, from which mmkit derives dummy
inputs and the token maximum.

Each item type is one class with everything that depends on the type; `ItemType` lists the methods.
"""

from .base import SCOPES, ItemType, flatten_options, select_options
from .size import Between, Size, between, fits, write_shape
from .values import dtype_name

__all__ = ["SCOPES", "Between", "ItemType", "Size", "between", "dtype_name"]
__all__ += ["fits", "flatten_options", "select_options", "write_shape"]

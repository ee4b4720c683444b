"""Tells transformers and vLLM about every model when it is imported, as MMKIT_MODULES does in a server's processes."""

from .compare import NAMES
from .serve import register

for name in NAMES:
    register(name)

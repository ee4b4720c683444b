"""The plugin that vLLM loads in every process: models of packages, and what checkpoints bring.

It imports the modules that MMKIT_MODULES names (see `mmkit.plugin`), lets vLLM's own classes serve
a checkpoint folder with a document, ``mmkit.json``, and lets vLLM serve a class with a spec that a
folder brings as code.
"""

from __future__ import annotations

from .. import plugin
from .checkpoints import serve_documents
from .remote_code import serve_remote_code


def load() -> None:
    """Do all three; it can be called again.

    Raises:
        MmkitError: a module of MMKIT_MODULES cannot be found.
    """
    serve_documents()
    serve_remote_code()
    plugin.load()

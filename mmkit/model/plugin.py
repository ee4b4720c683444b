"""The plugin that vLLM loads in every process: models of packages, and specs of checkpoints.

It imports the modules that MMKIT_MODULES names (see `mmkit.plugin`), and lets vLLM's own classes
serve a checkpoint folder with a document, ``mmkit.json``.
"""

from __future__ import annotations

from .. import plugin
from .checkpoints import serve_documents


def load() -> None:
    """Do both; it can be called again.

    Raises:
        MmkitError: a module of MMKIT_MODULES cannot be found.
    """
    serve_documents()
    plugin.load()

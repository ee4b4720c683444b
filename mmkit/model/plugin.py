"""The plugin that vLLM loads in every process: models of packages, and what checkpoints bring.

It imports the modules that MMKIT_MODULES names (see `mmkit.plugin`), lets vLLM's own classes serve
a checkpoint folder with a document, ``mmkit.json``, and lets vLLM serve a class with a spec that a
folder brings as code. What mmkit logs becomes a part of vLLM's log.
"""

from __future__ import annotations

from .. import plugin
from ..vllm_api.log import join_vllm_log
from .checkpoints import serve_documents
from .remote_code import serve_remote_code


def load() -> None:
    """Do all of this; it can be called again.

    Raises:
        MmkitError: a module of MMKIT_MODULES cannot be found.
    """
    join_vllm_log()
    serve_documents()
    serve_remote_code()
    plugin.load()

"""Checkpoint folders that bring the class of their model as code.

The config of such a folder names the class in its ``auto_map``. Where vLLM may run that code
(``--trust-remote-code``) and there is a spec, vLLM serves the class as `mmkit.serve_transformers`
does, and no package has to be installed. The spec is the class's `mm_spec` or, for a class without
one, the document ``mmkit.json`` beside it. vLLM has no hook for it: it
looks for a class by the name of the architecture, and for code of a folder only by itself. So the
two functions that look are replaced. Other classes are found as before.

Nothing of the folder is imported without the option.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from ..checkpoint_document import find_document
from ..errors import SpecError
from ..generate import name_model_module
from ..language.spec import DOCUMENT_FILE, Declaration
from ..plugin import claim_architecture, find_registered_module, is_of_folder

_METHODS = ("inspect_model_cls", "resolve_model_cls")
"""The methods of vLLM's registry that look for a class: before a model is made, and to make it."""


@cache
def serve_remote_code() -> None:
    """Let vLLM serve classes with a spec that a folder brings; called again, do nothing."""
    from vllm import ModelRegistry

    registry_class = type(ModelRegistry)
    for name in _METHODS:
        setattr(registry_class, name, wrap_search(getattr(registry_class, name)))


def wrap_search(search: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that looks for the class of a model, so that it finds classes of folders."""

    @wraps(search)
    def search_with_folder(self: Any, architectures: Any, model_config: Any) -> Any:
        if getattr(model_config, "trust_remote_code", False):
            register_class_of_folder(
                self, model_config.hf_config, str(model_config.model), model_config.code_revision
            )
        return search(self, architectures, model_config)

    return search_with_folder


def register_class_of_folder(
    registry: Any, config: Any, folder: str, code_revision: str | None = None
) -> None:
    """Register the class that the folder of a model brings, if it has a spec.

    A class of a package that has the architecture stays.

    Args:
        registry: vLLM's.
        config: of the model.
        folder: of the model, whose code is run.
        code_revision: of the code, if it lies in another repository.

    Raises:
        SpecError: vLLM cannot serve a class with this spec, or the document is malformed.
    """
    architectures = getattr(config, "architectures", None) or []
    references = getattr(config, "auto_map", None) or {}
    for key, reference in references.items():
        name = str(reference).rpartition(".")[2]
        if not key.startswith("AutoModel") or name not in architectures:
            continue
        model = _load_class(reference, folder, code_revision)
        take_spec_of_document(model, folder)
        module = name_model_module(model.__module__, name)
        registered = find_registered_module(registry.models.get(name))
        if registered == module or not _has_spec(model):
            return
        if registered is not None and not _is_replaceable(registered):
            return
        # in this process, and not by name: others find it by the folder, too
        registry.register_model(name, getattr(importlib.import_module(module), name))
        claim_architecture(name, module, None)
        return


def _has_spec(model: Any) -> bool:
    return isinstance(getattr(model, "mm_spec", None), Declaration)


_documents: dict[Any, bytes] = {}
"""The documents, as JSON, from which classes have their spec."""


def take_spec_of_document(model: Any, folder: str) -> None:
    """Give a class without a spec the spec of the document in its folder, if there is one.

    A class that lacks an ``embed_<modality>`` stays as it is: the document is for vLLM's class.

    Args:
        model: the class of transformers.
        folder: of the model.

    Raises:
        SpecError: the document is malformed. Or folders of the same code have other documents:
            transformers makes one class of the code in a process.
    """
    document = find_document(folder)
    text = None if document is None else document.text
    if _documents.get(model, text) != text:
        where = str(Path(folder, DOCUMENT_FILE))
        expected = f"the document from which {model.__name__} has its spec"
        remedy = "Serve folders of the same code, with other documents, by other processes."
        raise SpecError(where, expected, "another one", remedy)
    if document is None or _has_spec(model):
        return
    spec = document.parse(import_functions=True)
    for modality in spec.modalities:
        if not modality.is_ids_only and not hasattr(model, f"embed_{modality.name}"):
            return
    model.mm_spec = spec
    _documents[model] = document.text


def _is_replaceable(module: str) -> bool:
    """Return whether a class is vLLM's, or was brought by another folder."""
    return module.startswith("vllm.") or is_of_folder(module)


@cache
def _load_class(reference: str, folder: str, code_revision: str | None) -> Any:
    """Return the class of transformers that a config names, as ``module.Class``."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, folder, code_revision=code_revision)

"""Checkpoint folders that bring their spec as a document, for vLLM's own model classes.

A folder with ``mmkit.json`` is processed as its spec says: no package of its author has to be
installed, and none of its code is run. vLLM has no hook for it: it asks the class of a model for
its processor, and a class knows no folder. So the question itself is replaced.

A class whose processor is one of mmkit's keeps it: the package of its author is installed.

Nothing of vLLM, of mmkit's classes for it or of pydantic is imported before there is a document.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from ..checkpoint_document import CheckpointDocument, find_document
from ..errors import SpecError


@cache
def serve_documents() -> None:
    """Let vLLM take the spec of a checkpoint folder from its document; called again, do nothing."""
    from vllm.multimodal.registry import MultiModalRegistry

    get_model_class = MultiModalRegistry._get_model_cls
    MultiModalRegistry._get_model_cls = wrap_get_model_class(get_model_class)


def wrap_get_model_class(get_model_class: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's function that returns the class of a model, which has its processor.

    Where the folder of a model has a document, it returns a subclass with the processor of that.
    """

    @wraps(get_model_class)
    def get_class_with_processor(self: Any, model_config: Any) -> Any:
        model_class = get_model_class(self, model_config)
        document = find_document(str(model_config.model))
        if document is None or _has_processor_of_spec(self, model_class):
            return model_class
        trusts = bool(getattr(model_config, "trust_remote_code", False))
        try:
            return _make_class(self, model_class, document, trusts)
        except SpecError as error:
            # a ValueError says to vLLM that there is no processor: it would serve texts alone
            raise RuntimeError(str(error)) from error

    return get_class_with_processor


def _has_processor_of_spec(registry: Any, model_class: Any) -> bool:
    from ..vllm_api import Processor

    factories = getattr(model_class, "_processor_factory", None)
    if factories is None:  # before 0.12 the registry has them
        factories = registry._processor_factories.get(model_class)
    processor = getattr(factories, "processor", None)
    return isinstance(processor, type) and issubclass(processor, Processor)


@cache
def _make_class(
    registry: Any, model_class: Any, document: CheckpointDocument, import_functions: bool
) -> Any:
    """Return a subclass of a model class with the processor of a document.

    Args:
        registry: vLLM's.
        model_class: the class that runs the model.
        document: of the folder.
        import_functions: import the functions that it names.

    Raises:
        SpecError: the document is malformed, or names functions that are not imported.
    """
    from ..generate import generate_classes
    from ..vllm_api.models import prepare

    if not import_functions:
        _refuse_functions(document)
    spec = document.parse(import_functions=True)
    info, dummy_inputs, processor = generate_classes(spec, "vllm_api")
    subclass = type(model_class.__name__, (model_class,), {"__module__": model_class.__module__})
    prepare(model_class, spec)
    registry.register_processor(processor, info=info, dummy_inputs=dummy_inputs)(subclass)
    return subclass


def _refuse_functions(document: CheckpointDocument) -> None:
    """Refuse a document that names functions, whose modules may be anything.

    Raises:
        SpecError: it does, or is malformed.
    """
    names = document.list_functions()
    if names:
        remedy = (
            "Install and register the package of the model, or let vLLM run code of checkpoints "
            "by --trust-remote-code."
        )
        raise SpecError(document.where, "a document without functions", ", ".join(names), remedy)

"""Processors of checkpoint folders, made without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn
from transformers import PretrainedConfig
from vllm import ModelRegistry
from vllm.config import ModelConfig
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import InputProcessingContext
from vllm.plugins import load_general_plugins as load_general_plugins

from ..errors import MmkitError, SpecError
from ..language.vocabulary import TOKENIZER_FILES
from .compat import find

_load_tokenizer = find(
    "tokenizers:cached_tokenizer_from_config",
    "transformers_utils.tokenizer:cached_tokenizer_from_config",
)


_RegisteredModel = find("model_executor.models.registry:_RegisteredModel")
_LazyRegisteredModel = find("model_executor.models.registry:_LazyRegisteredModel")


def make_processor(classes: Any, config: ModelConfig) -> Any:
    """Make a processor of given classes. vLLM need not know the model.

    Args:
        classes: the classes of a spec (`ModelSpec.classes`), or what `find_factories` returns.
        config: the config of a checkpoint.
    """
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = _load_tokenizer(config)
    info = classes.info(InputProcessingContext(config, tokenizer))
    return classes.processor(info, classes.dummy_inputs(info))


def make_registered_processor(config: ModelConfig) -> Any:
    """Make the processor that is registered with vLLM for a checkpoint, whoever wrote it."""
    return MULTIMODAL_REGISTRY.create_processor(config)


def find_factories(model_class: Any) -> Any:
    """Return the processor classes that are registered for a model class; None for none."""
    factories = getattr(model_class, "_processor_factory", None)
    if factories is None:  # before 0.12 the registry has them
        in_registry = getattr(MULTIMODAL_REGISTRY, "_processor_factories", {})
        factories = in_registry.get(model_class)
    return factories


# -- configs ---------------------------------------------------------------------------------------


def load_model_config(folder: str | Path, **options: Any) -> ModelConfig:
    """Load the config of a checkpoint folder, in float32.

    A folder without a tokenizer has a config without one. Plugins are loaded first, since config
    classes may be theirs. The code of a folder runs only with `trust_remote_code=True`.

    Args:
        folder: the checkpoint folder.
        options: options of vLLM's ModelConfig.

    Raises:
        MmkitError: the model class cannot be imported.
        SpecError: the spec of the model class does not fit the checkpoint.
    """
    load_general_plugins()
    settings: dict[str, Any] = {
        "dtype": "float32",
        "seed": 0,
        "mm_processor_cache_gb": 1,
        "skip_tokenizer_init": not _has_tokenizer(Path(folder)),
    }
    settings.update(options)
    try:
        return ModelConfig(model=str(folder), tokenizer=str(folder), **settings)
    except ValueError as error:
        if "failed to be inspected" in str(error):
            _import_models(read_architectures(folder))
        spec_error = _find_spec_error(error)
        if spec_error is not None:
            raise spec_error from error
        raise


def load_config_for_spec(folder: str | Path, **options: Any) -> ModelConfig:
    """Load the config of a checkpoint folder for a spec, whose model vLLM need not know.

    The config may also name the language model to which a spec adds a modality. vLLM takes such a
    model for one of text only, so the config is loaded again under the name of a multimodal one.

    Args:
        folder: the checkpoint folder.
        options: options of vLLM's ModelConfig.
    """
    load_general_plugins()  # before a class stands in for one of theirs
    architectures = read_architectures(folder)
    register_stand_in(architectures)
    _inspect_in_this_process(architectures)
    config = load_model_config(folder, **options)
    overrides = options.get("hf_overrides", {})
    if config.is_multimodal_model or not isinstance(overrides, Mapping):
        return config
    multimodal_names = [f"MultiModal{name}" for name in architectures]
    register_stand_in(multimodal_names)
    options["hf_overrides"] = {**overrides, "architectures": multimodal_names}
    return load_model_config(folder, **options)


def _inspect_in_this_process(architectures: Sequence[str]) -> None:
    """Let vLLM inspect the classes of models in this process, which imports them anyway.

    vLLM would start another process for it, which takes as long as this one: it imports all that
    this one has imported. Of several classes, vLLM takes the first that can be imported.

    Raises:
        MmkitError: the only model class cannot be imported.
    """
    for name in architectures:
        registered = ModelRegistry.models.get(name)
        if not isinstance(registered, _LazyRegisteredModel):
            continue
        try:
            model_class = _import_model(name)
        except MmkitError:
            if len(architectures) == 1:
                raise
            continue
        ModelRegistry.models[name] = _RegisteredModel.from_model_cls(model_class)


def read_architectures(folder: str | Path) -> list[str]:
    """Return the names of the model classes in the config of a checkpoint."""
    config, _ = PretrainedConfig.get_config_dict(str(folder))
    return list(config.get("architectures") or [])


def _has_tokenizer(folder: Path) -> bool:
    for name in TOKENIZER_FILES:
        if (folder / name).exists():
            return True
    return False


def _import_models(architectures: Sequence[str]) -> None:
    """Import the registered model classes, and raise the exception of a class that fails.

    vLLM imports a model class in another process to inspect it. Where that fails, vLLM says only
    that the exception is in the logs.

    Raises:
        MmkitError: a model class cannot be imported.
    """
    for name in architectures:
        if name in ModelRegistry.models:
            _import_model(name)


def _import_model(name: str) -> type:
    """Return a registered model class.

    Raises:
        MmkitError: it cannot be imported.
    """
    try:
        model_class: type = ModelRegistry.models[name].load_model_cls()
    except Exception as error:
        got = f"{type(error).__name__}: {error}".rstrip(".")
        raise MmkitError(name, "a model class that can be imported", got) from error
    return model_class


def _find_spec_error(error: ValueError) -> SpecError | None:
    """Return the error of a spec inside an error of vLLM's config; None if there is none.

    vLLM binds a spec while it validates its config, to learn the modalities; pydantic then wraps
    what the spec raises.
    """
    if not isinstance(error, ValidationError):
        return None
    for detail in error.errors():
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, SpecError):
            return cause
    return None


# -- stand-ins -------------------------------------------------------------------------------------


class StandIn(nn.Module, SupportsMultiModal):
    """A model class that runs nothing, for checkpoints whose model class vLLM does not know."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def _run_nothing(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    # vLLM takes a class for a model if it has these methods
    embed_input_ids = _run_nothing
    embed_multimodal = _run_nothing
    forward = _run_nothing
    compute_logits = _run_nothing


def register_stand_in(architectures: Sequence[str], model_class: type = StandIn) -> None:
    """Register a model class for those architectures that vLLM does not know.

    vLLM then accepts their checkpoints, and reads its own attributes of a model from this class.
    """
    supported = ModelRegistry.get_supported_archs()
    for architecture in set(architectures):
        if architecture not in supported:
            ModelRegistry.register_model(architecture, model_class)

"""What ``mmkit doctor DIR`` finds in the folder of a checkpoint, part by part."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import MmkitError, SpecError
from ..language.spec import DOCUMENT_FILE
from ..model_spec import ModelSpec
from ..plugin import find_claim, find_registered_module
from .common import (
    Finding,
    count_noun,
    describe_error,
    describe_pieces,
    find_checkpoint,
    load_spec,
    open_checkpoint,
    require_vllm,
)

MAX_NAMES_SHOWN = 3
"""The most names of weights, or of files, in a sentence."""

HOW_TO = (
    "Derive a class with mm_spec and embed_<modality> from the one that was trained, and register "
    "it by mmkit.serve_transformers."
)

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_PROCESSOR_KEYS = ("processor_class", "image_processor_type", "feature_extractor_type")


def examine_folder(folder: str, *, trust_remote_code: bool = False) -> list[Finding]:
    """Return what the folder of a checkpoint has, and what it lacks to be served.

    Args:
        folder: the folder.
        trust_remote_code: run code that it brings.

    Raises:
        MmkitError: there is no such folder, it has no config.json, or vLLM cannot be imported.
    """
    path = find_checkpoint(folder, "doctor")
    with require_vllm():
        from ..vllm_api import checkpoint_processors
    checkpoint_processors.load_general_plugins()
    findings: list[Finding] = []
    config = _read_config(path, trust_remote_code, findings)
    model_class = _find_class(path, config, trust_remote_code, findings)
    hf_class = getattr(model_class, "hf_class", None)
    if hf_class is not None:
        findings += _examine_forward(hf_class)
    spec = _find_spec(path, model_class, trust_remote_code, findings)
    findings += examine_weights(path, hf_class)
    findings += _examine_tokenizer(path, config, trust_remote_code)
    findings.append(_describe_processor(path))
    if spec is not None:
        findings += _bind(spec, path, trust_remote_code)
    return findings


# -- config and class ------------------------------------------------------------------------------


def _read_config(path: Path, trusts: bool, findings: list[Finding]) -> Any:
    """Return the config that transformers reads; None if it cannot."""
    from transformers import AutoConfig

    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    model_type = values.get("model_type", "none")
    architectures = values.get("architectures") or ["none"]
    text = f"model_type {model_type}, architecture {architectures[0]}."
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusts)
    except Exception as error:
        remedy = (
            "Register the class of the config: the second argument of mmkit.serve_transformers."
        )
        if "auto_map" in values and not trusts:
            remedy = "Run the code of the folder by --trust-remote-code, or install its package."
        findings.append(Finding("config", f"{text[:-1]}: {describe_error(error)}.", remedy))
        return None
    remedy = ""
    if not config.architectures:
        remedy = "Name the class of the model in architectures of config.json."
    findings.append(Finding("config", text, remedy))
    return config


def _find_class(path: Path, config: Any, trusts: bool, findings: list[Finding]) -> Any:
    """Return the class that vLLM runs; None if there is none yet, or it is vLLM's."""
    from vllm import ModelRegistry

    if config is None or not config.architectures:
        return None
    name = config.architectures[0]
    try:
        _register_code_of_folder(path, config, trusts)
        module = find_claim([name])
        if module is not None:
            model_class = getattr(importlib.import_module(module), name)
            home = f"{model_class.hf_class.__module__}.{name}"
            findings.append(Finding("model", f"vLLM runs {home} as it was trained."))
            return model_class
        registered = find_registered_module(ModelRegistry.models.get(name))
        if registered is not None and not registered.startswith("vllm."):
            model_class = ModelRegistry.models[name].load_model_cls()
            findings.append(Finding("model", f"vLLM runs {registered}.{name}."))
            return model_class
    except Exception as error:
        text = f"{name} cannot be imported: {describe_error(error)}."
        findings.append(Finding("model", text, "Mend it: each process of vLLM imports it."))
        return None
    findings.append(_describe_missing_class(name, registered, config, trusts))
    return None


def _register_code_of_folder(path: Path, config: Any, trusts: bool) -> None:
    """Let vLLM find a class with a spec that the folder brings, as the plugin does."""
    from vllm import ModelRegistry

    from ..model.remote_code import register_class_of_folder

    if trusts:
        register_class_of_folder(ModelRegistry, config, str(path))


def _describe_missing_class(
    name: str, registered: str | None, config: Any, trusts: bool
) -> Finding:
    """Return what there is in place of a class with a spec."""
    import transformers

    if registered is not None:
        return Finding("model", f"vLLM has a class of its own, {registered}.{name}.")
    references = getattr(config, "auto_map", None) or {}
    is_code_of_folder = any(str(value).endswith(f".{name}") for value in references.values())
    if is_code_of_folder and not trusts:
        remedy = "Run it by --trust-remote-code."
        return Finding("model", f"{name} is code of the folder, which was not run.", remedy)
    if is_code_of_folder:
        text = f"{name} of the folder has no mm_spec, or no {DOCUMENT_FILE} and embed_<modality>."
        return Finding("model", text, HOW_TO)
    if hasattr(transformers, name):
        return Finding("model", f"transformers has {name}, and vLLM lacks it.", HOW_TO)
    text = f"Neither vLLM, transformers nor an installed plugin has {name}."
    return Finding("model", text, HOW_TO)


def _examine_forward(hf_class: Any) -> Iterator[Finding]:
    """Look whether the trained class takes what vLLM passes to it."""
    from ..training import MultiModalMixin

    forward: Any = hf_class.forward
    if issubclass(hf_class, MultiModalMixin):
        forward = super(MultiModalMixin, hf_class).forward
    parameters = inspect.signature(forward).parameters
    takes_all = any(value.kind is value.VAR_KEYWORD for value in parameters.values())
    missing = [name for name in ("inputs_embeds", "position_ids") if name not in parameters]
    if missing and not takes_all:
        text = f"forward of {hf_class.__name__} does not take {' and '.join(missing)}."
        remedy = (
            "Derive a class whose forward passes them to the language model, and the class with "
            "the mixin from that one."
        )
        yield Finding("forward", text, remedy)


# -- spec ------------------------------------------------------------------------------------------


def _find_spec(path: Path, model_class: Any, trusts: bool, findings: list[Finding]) -> Any:
    """Return the spec of the class, or of the folder's document; None without either."""
    document = path / DOCUMENT_FILE
    spec = getattr(model_class, "mm_spec", None)
    source = "the class"
    if not isinstance(spec, ModelSpec) and document.is_file():
        source = DOCUMENT_FILE
        try:
            spec = load_spec(str(document), import_functions=trusts)
        except MmkitError as error:
            findings.append(Finding("spec", str(error), "Write the document again."))
            return None
    if spec is None:
        findings.append(Finding("spec", f"None: neither a class nor {DOCUMENT_FILE} has one."))
        return None
    names = ", ".join(modality.name for modality in spec.modalities)
    findings.append(Finding("spec", f"{spec.name}, of {source}: items of {names}."))
    return spec


def _bind(spec: Any, path: Path, trusts: bool) -> Iterator[Finding]:
    """Bind the spec, and look how text around items is tokenized."""
    try:
        info = open_checkpoint(spec, path, trust_remote_code=trusts)
    except SpecError as error:
        sentences = [str(error), *(str(further) for further in error.others)]
        for sentence in dict.fromkeys(sentences):  # each once
            yield Finding("spec", sentence, "Change the spec, or the folder.")
        return
    except MmkitError as error:
        yield Finding("spec", str(error), "Look at the sentences above.")
        return
    sentence = describe_pieces(info.plan)
    if sentence:
        yield Finding("prompts", sentence)


# -- weights ---------------------------------------------------------------------------------------


def examine_weights(path: Path, hf_class: Any) -> Iterator[Finding]:
    """Look for weights, and compare their names and shapes with the class's.

    Args:
        path: the folder.
        hf_class: the class of transformers that vLLM runs, if it does.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = sorted(path.glob("pytorch_model*.bin"))
        if others:
            yield Finding(
                "weights", f"{count_noun(len(others), 'file')}, whose names are not read."
            )
            return
        remedy = "Put *.safetensors there: save_pretrained writes them."
        yield Finding("weights", "None.", remedy)
        return
    missing_files = _find_missing_files(path)
    if missing_files:
        text = f"The index names files that are not there: {_join_names(missing_files)}."
        yield Finding("weights", text, "Copy them.")
        return
    shapes, dtype = _read_shapes(files)
    text = f"{count_noun(len(shapes), 'tensor')} in {count_noun(len(files), 'file')}"
    if hf_class is None:
        yield Finding("weights", f"{text}.")
        return
    try:
        differences = _compare_weights(path, hf_class, shapes, dtype)
    except Exception as error:
        yield Finding("weights", f"{text}; not compared with the class: {describe_error(error)}.")
        return
    faults = [Finding("weights", *difference) for difference in differences]
    yield from faults or [Finding("weights", f"{text}, all those of the class.")]


def _find_missing_files(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return sorted(name for name in names if not (path / name).is_file())


def _read_shapes(files: list[Path]) -> tuple[dict[str, list[int]], str]:
    """Return the shape of each tensor, and the dtype of most, as safetensors writes it."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    dtypes: list[str] = []
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in list(tensors.keys()):
                tensor = tensors.get_slice(name)
                shapes[name] = tensor.get_shape()
                dtypes.append(tensor.get_dtype())
    return shapes, max(set(dtypes), key=dtypes.count)


_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def _compare_weights(
    path: Path, hf_class: Any, shapes: Mapping[str, list[int]], dtype: str
) -> list[tuple[str, str]]:
    """Return sentences with remedies about the names that checkpoint and class do not share.

    transformers loads tensors that hold one number each, so that its renamings count and no memory
    is needed.
    """
    import torch

    torch_dtype = getattr(torch, _DTYPES[dtype])
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        tensors[name] = torch.empty((), dtype=torch_dtype).expand(shape)
    _, info = hf_class.from_pretrained(
        None,
        config=hf_class.config_class.from_pretrained(path),
        state_dict=tensors,
        dtype=torch_dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    name = hf_class.__name__
    rename = "Rename them, or let transformers: see the names of weights in the guide."
    differences: list[tuple[str, str]] = []
    if info["missing_keys"]:
        differences.append(
            (f"Not there, and {name} has them: {_join_names(info['missing_keys'])}.", rename)
        )
    if info["unexpected_keys"]:
        remedy = f"{rename[:-1]}, or name them in _keys_to_ignore_on_load_unexpected of the class."
        names = _join_names(info["unexpected_keys"])
        differences.append((f"There, and {name} has no place for them: {names}.", remedy))
    if info["mismatched_keys"]:
        names = _join_names(key[0] for key in info["mismatched_keys"])
        remedy = "Compare config.json with the training's."
        differences.append((f"Of another shape than in {name}: {names}.", remedy))
    return differences


def _join_names(names: Any) -> str:
    names = sorted(names)
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    if len(names) > MAX_NAMES_SHOWN:
        shown += f" and {len(names) - MAX_NAMES_SHOWN} more"
    return shown


# -- tokenizer and processor -----------------------------------------------------------------------


def _examine_tokenizer(path: Path, config: Any, trusts: bool) -> Iterator[Finding]:
    from transformers import AutoTokenizer

    from ..training.saving import has_tokenizer

    if not has_tokenizer(path):
        text = "None: a prompt is a list of ids, and a server starts with --skip-tokenizer-init."
        yield Finding("tokenizer", text)
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusts)
    except Exception as error:
        remedy = "Save the tokenizer again, with this transformers."
        yield Finding("tokenizer", f"It cannot be read: {describe_error(error)}.", remedy)
        return
    template = "a chat template"
    if not getattr(tokenizer, "chat_template", None):
        template = "no chat template, which chats need: --chat-template FILE"
    yield Finding("tokenizer", f"{count_noun(len(tokenizer), 'token')}, {template}.")
    size = getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
    if size is not None and len(tokenizer) > size:
        text = f"{count_noun(len(tokenizer) - size, 'token')} beyond the {size} of the embeddings."
        yield Finding("tokenizer", f"{text} They may be targets, which are replaced.")


def _describe_processor(path: Path) -> Finding:
    """Return the names of the Hugging Face processors, which `hf()` in a spec calls."""
    names: list[str] = []
    for file in _PROCESSOR_FILES:
        if (path / file).is_file():
            values = json.loads((path / file).read_text(encoding="utf-8"))
            names += [str(values[key]) for key in _PROCESSOR_KEYS if values.get(key)]
    if not names:
        return Finding("processor", "None. Only a spec with hf() needs one.")
    return Finding("processor", f"{', '.join(dict.fromkeys(names))}.")

"""A processor in a checkpoint folder.

Beside what the model has there, config.json and the files of the tokenizer:

- processor_config.json, which names the class, and its code for those who trust it;
- hf_processor/, the Hugging Face processor that the spec uses, if there is one;
- processing_<name>.py, the class; the module of the spec, that of the config, and those beside
  them that they import.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import cached_file

from ..bound.calls import LazyProcessor
from ..field import HF
from ..generate import module_of, source
from ..items.base import dtype_name
from ..node import leaves
from ..spec import Declaration

if TYPE_CHECKING:
    from .processor import Processor

logger = logging.getLogger(__name__)

INNER = "hf_processor"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_PARTS = ("config", "tokenizer", "hf_processor", "mm_processor_kwargs", "dtype")
_OF_FILES = ("cache_dir", "force_download", "local_files_only", "token", "revision")


def described(processor: Processor) -> dict[str, Any]:
    """The contents of processor_config.json."""
    name, kwargs = type(processor).__name__, processor.mm_processor_kwargs
    stated: dict[str, Any] = {"processor_class": name, "mm_processor_kwargs": kwargs}
    stated["dtype"] = dtype_name(processor.dtype)
    if _inner(processor) is not None:
        stated[INNER] = INNER
    if _code_of_spec(processor.spec):
        stated["auto_map"] = {"AutoProcessor": f"processing_{processor.spec.name}.{name}"}
    return stated


def save(processor: Processor, folder: Any) -> None:
    """Write a processor into a folder, so that `AutoProcessor.from_pretrained` loads it: with
    ``trust_remote_code=True``, or where its class is registered.

    The folder receives the code of the spec and of the config class, too, except for modules of a
    script or a notebook, which no other process can import, and those that import from folders
    above their own. An existing config.json stays, and only learns of the code of its class.

    Args:
        processor: the spec's processor.
        folder: a checkpoint folder, or a new one.
    """
    path, spec, config = Path(folder), processor.spec, processor.config
    path.mkdir(parents=True, exist_ok=True)
    of_config, of_spec = _code(type(config).__module__), _code_of_spec(spec)
    for file in {*of_config, *of_spec}:
        if file.parent.resolve() != path.resolve():
            shutil.copy(file, path)
    if not (own := path / "config.json").exists():
        config.save_pretrained(path)
    if of_config:
        stored = json.loads(own.read_text(encoding="utf-8"))
        name = f"{of_config[0].stem}.{type(config).__name__}"
        stored["auto_map"] = {**stored.get("auto_map", {}), "AutoConfig": name}
        own.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    if (tokenizer := getattr(processor, "tokenizer", None)) is not None:
        tokenizer.save_pretrained(path)
    if (inner := _inner(processor)) is not None:
        inner.save_pretrained(path / INNER)
    if of_spec and (held := module_of(spec)):
        code = source(spec, f".{of_spec[0].stem}.{held[1]}", "training")
        (path / f"processing_{spec.name}.py").write_text(code, encoding="utf-8")


def load(
    cls: type[Processor], name: Any, *, trust_remote_code: bool = False, **options: Any
) -> Processor:
    """A processor from a folder that `save` wrote, or from any checkpoint of the model.

    Args:
        cls: the generated class.
        name: a folder, or a name on the hub.
        trust_remote_code: run code of the checkpoint for its config, tokenizer and processor.
        options: `config`, `tokenizer`, `hf_processor`, `mm_processor_kwargs` and `dtype` stand in
            place of what the checkpoint has; others are options of transformers' `from_pretrained`,
            for example `revision`, and those that it does not know are for the Hugging Face
            processor.
    """
    options.pop("_from_auto", None)
    given = {key: options.pop(key, None) for key in _PARTS}
    of_files = {key: options[key] for key in _OF_FILES if key in options}
    trusted = {**of_files, "trust_remote_code": trust_remote_code}
    stored, _ = cls.get_processor_dict(name, **of_files)
    saved = stored if stored.get("processor_class") == cls.__name__ else {}
    if given["config"] is None:
        given["config"] = AutoConfig.from_pretrained(name, **trusted)
    if given["tokenizer"] is None and has_tokenizer(name, **of_files):
        given["tokenizer"] = AutoTokenizer.from_pretrained(name, **trusted)
    if given["hf_processor"] is None and (not saved or INNER in saved):
        inner, local = name, Path(name) / INNER
        if saved and local.is_dir():
            inner = local
        elif saved:
            options["subfolder"] = INNER
        load_inner = partial(AutoProcessor.from_pretrained, inner, **{**options, **trusted})
        given["hf_processor"] = LazyProcessor(load_inner)
    for key in ("mm_processor_kwargs", "dtype"):
        given[key] = given[key] or saved.get(key)
    return cls(**given, chat_template=stored.get("chat_template"))


def _inner(processor: Processor) -> Any:
    """The Hugging Face processor to save with a processor; None where the spec uses none."""
    own, spec = processor.hf_processor, processor.spec
    if not isinstance(own, LazyProcessor):
        return own
    roots = {leaf.root for leaf in leaves([spec.prompt, spec.decoder_prompt, *spec.modalities])}
    processes = [m.process for m in spec.modalities if isinstance(m.process, HF)]
    is_used = "proc" in roots or any(process.processor is None for process in processes)
    return own.loaded if is_used or "loaded" in vars(own) else None


def has_tokenizer(name: Any, **options: Any) -> bool:
    """Whether a checkpoint has a tokenizer; transformers makes one up for some that have none."""
    options |= {"_raise_exceptions_for_missing_entries": False}
    return any(cached_file(str(name), file, **options) for file in TOKENIZER_FILES)


def _code_of_spec(spec: Declaration) -> list[Path]:
    return [] if module_of(spec) is None else _code(spec._module)


def _code(name: str) -> list[Path]:
    """The file of a module, and the files of its folder that it imports; none for a module of
    transformers, for one that no other process can import, and for one with imports from folders
    above."""
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or name.startswith(("transformers.", "__main__")):
        return []
    try:
        return [Path(file), *map(Path, get_relative_import_files(file))]
    except OSError:
        logger.warning("%s is not saved: it imports from folders above its own", file)
        return []

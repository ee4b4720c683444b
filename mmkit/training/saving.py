"""A processor in a checkpoint folder.

Beside what the model has there, config.json and the files of the tokenizer:

- processor_config.json, which names the class, and its code for those who trust it;
- hf_processor/, the Hugging Face processor that the spec uses, if there is one;
- processing_<name>.py, the class; the module of the spec, and those beside it that it imports.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PretrainedConfig
from transformers.dynamic_module_utils import custom_object_save, get_relative_import_files
from transformers.utils import cached_file

from ..bound.calls import LazyProcessor
from ..expr import leaves
from ..generate import hf_class, module_of, source
from ..items.values import dtype_name
from ..process import HF
from ..spec import Declaration

if TYPE_CHECKING:
    from .processor import Processor

logger = logging.getLogger(__name__)

INNER = "hf_processor"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_OF_FILES = ("cache_dir", "force_download", "local_files_only", "token", "revision")
_OF_AUTO = "_from_auto"


def described(processor: Processor) -> dict[str, Any]:
    """The contents of processor_config.json."""
    name = type(processor).__name__
    stated: dict[str, Any] = {
        "processor_class": name,
        "mm_processor_kwargs": processor.mm_processor_kwargs,
        "dtype": dtype_name(processor.dtype),
    }
    if _inner(processor) is not None:
        stated[INNER] = INNER
    if _files(processor.spec) is not None:
        stated["auto_map"] = {"AutoProcessor": f"{_code(processor.spec)}.{name}"}
    return stated


def save(processor: Processor, folder: Any) -> None:
    """Write a processor into a folder, so that `AutoProcessor.from_pretrained` loads it: with
    ``trust_remote_code=True``, or where its class is registered.

    The folder receives the code of the spec, too, except for a spec of a script or a notebook,
    which no other process can import, and for one that imports from folders above its own. An
    existing config.json stays.

    Args:
        processor: the spec's processor.
        folder: a checkpoint folder, or a new one.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    _save_config(processor.config, path / "config.json")
    if (tokenizer := getattr(processor, "tokenizer", None)) is not None:
        tokenizer.save_pretrained(path)
    if (inner := _inner(processor)) is not None:
        inner.save_pretrained(path / INNER)
    if (files := _files(processor.spec)) is not None:
        for file in files:
            if file.parent.resolve() != path.resolve():
                shutil.copy(file, path)
        module = module_of(processor.spec)
        assert module is not None
        code = source(processor.spec, f".{files[0].stem}.{module[1]}", hf=True)
        (path / f"{_code(processor.spec)}.py").write_text(code, encoding="utf-8")


def load(
    cls: type[Processor],
    name: Any,
    *,
    config: Any = None,
    tokenizer: Any = None,
    hf_processor: Any = None,
    mm_processor_kwargs: Any = None,
    dtype: Any = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Processor:
    """A processor from a folder that `save` wrote, or from any checkpoint of the model.

    Args:
        cls: the generated class.
        name: a folder, or a name on the hub.
        config: in place of the checkpoint's config.
        tokenizer: in place of the checkpoint's tokenizer.
        hf_processor: in place of the checkpoint's Hugging Face processor.
        mm_processor_kwargs: in place of the saved options.
        dtype: in place of the saved dtype.
        trust_remote_code: run code of the checkpoint for its config, tokenizer and processor.
        options: of transformers' `from_pretrained`, for example `revision`; further options go to
            the `from_pretrained` of the Hugging Face processor.
    """
    options.pop(_OF_AUTO, None)
    of_files = {key: options[key] for key in _OF_FILES if key in options}
    trusted = {**of_files, "trust_remote_code": trust_remote_code}
    stored, _ = cls.get_processor_dict(name, **of_files)
    if config is None:
        config = AutoConfig.from_pretrained(name, **trusted)
    if tokenizer is None and _has_tokenizer(name, of_files):
        tokenizer = AutoTokenizer.from_pretrained(name, **trusted)
    is_saved = stored.get("processor_class") == cls.__name__
    may_use = not {"proc", "function"}.isdisjoint(_roots(cls.spec))
    if hf_processor is None and may_use and (not is_saved or INNER in stored):
        where = {"subfolder": INNER} if is_saved else {}
        if is_saved and Path(name).is_dir():
            name, where = Path(name) / INNER, {}
        hf_processor = LazyProcessor(
            partial(AutoProcessor.from_pretrained, name, **{**options, **trusted, **where})
        )
    if is_saved:
        mm_processor_kwargs = mm_processor_kwargs or stored["mm_processor_kwargs"]
        dtype = dtype or stored["dtype"]
    return cls(
        config,
        tokenizer,
        hf_processor=hf_processor,
        mm_processor_kwargs=mm_processor_kwargs,
        dtype=dtype,
        chat_template=stored.get("chat_template"),
    )


def announce(spec: Declaration) -> None:
    """Let `AutoProcessor` of this process find the spec's processor in folders that `save` wrote,
    whatever their config."""
    cls = hf_class(spec)
    key = _key(cls.__name__)
    AutoProcessor.register(key, cls, exist_ok=True)


@cache
def _key(name: str) -> type:
    return type(f"{name}Config", (PretrainedConfig,), {})


def _roots(spec: Declaration) -> set[str]:
    """The roots that a spec reads; "proc" where it uses the Hugging Face processor of its model,
    and "function" where it may use it."""
    declared = [spec.prompt, spec.decoder_prompt, *spec.modalities]
    roots = {leaf.root for leaf in leaves(declared)}
    processes = [m.process for m in spec.modalities if isinstance(m.process, HF)]
    return roots | {"proc" for process in processes if process.processor is None}


def _inner(processor: Processor) -> Any:
    """The Hugging Face processor to save with a processor; None where the spec uses none."""
    own = processor.hf_processor
    if not isinstance(own, LazyProcessor):
        return own
    return own.loaded if own.is_loaded or "proc" in _roots(processor.spec) else None


def _save_config(config: Any, path: Path) -> None:
    """Write the config, if the folder has none yet, and the code of its class, if the class is no
    class of transformers."""
    config = deepcopy(config)
    module = type(config).__module__
    is_own = not module.startswith(("transformers.", "__main__"))
    is_own = is_own and _with_its_own(sys.modules[module]) is not None
    if is_own:
        config._auto_class = "AutoConfig"
    if not path.exists():
        config.save_pretrained(path.parent)
    elif is_own:
        stored = json.loads(path.read_text(encoding="utf-8"))
        custom_object_save(config, path.parent, config=stored)
        path.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")


def _has_tokenizer(name: Any, options: dict[str, Any]) -> bool:
    found = (
        cached_file(str(name), file, **options, _raise_exceptions_for_missing_entries=False)
        for file in _TOKENIZER_FILES
    )
    return any(file is not None for file in found)


def _files(spec: Declaration) -> list[Path] | None:
    """The modules to save with a spec; None where no other process can import it."""
    module = module_of(spec)
    return None if module is None else _with_its_own(module[0])


def _with_its_own(module: Any) -> list[Path] | None:
    """The file of a module, and the files of its folder that it imports; None for a module without
    a file, or with imports from folders above."""
    if (file := getattr(module, "__file__", None)) is None:
        return None
    try:
        return [Path(file), *map(Path, get_relative_import_files(file))]
    except OSError:
        logger.warning("%s is not saved: it imports from folders above its own", file)
        return None


def _code(spec: Declaration) -> str:
    return f"processing_{spec.name}"

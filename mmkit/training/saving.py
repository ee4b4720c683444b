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
from typing import Any, ClassVar, Self

from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.processing_utils import ProcessorMixin
from transformers.utils import cached_file
from typing_extensions import override

from ..generate import module_of, source
from ..language.items.base import dtype_name
from ..language.spec import Declaration
from ..plan.hf_calls import LazyProcessor

logger = logging.getLogger(__name__)

INNER = "hf_processor"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_PARTS = ("config", "tokenizer", "hf_processor", "mm_processor_kwargs", "dtype")
_OF_FILES = ("cache_dir", "force_download", "local_files_only", "token", "revision")


class SavedProcessor(ProcessorMixin):
    """A processor that `AutoProcessor` loads from the folder into which it was saved.

    Attributes:
        spec: the declaration.
    """

    spec: ClassVar[Declaration]
    attributes: ClassVar[list[str]] = []  # what is saved is said here
    audio_tokenizer: ClassVar[None] = None  # for transformers 4

    @override
    @classmethod
    def get_attributes(cls) -> list[str]:
        return cls.attributes  # for transformers 5

    @override
    def to_dict(self, **_: Any) -> dict[str, Any]:
        """The contents of processor_config.json."""
        name, kwargs = type(self).__name__, self.mm_processor_kwargs
        stated: dict[str, Any] = {"processor_class": name, "mm_processor_kwargs": kwargs}
        stated["dtype"] = dtype_name(self.dtype)
        if self._inner() is not None:
            stated[INNER] = INNER
        if _code_of_spec(self.spec):
            stated["auto_map"] = {"AutoProcessor": f"processing_{self.spec.name}.{name}"}
        return stated

    @override
    def save_pretrained(self, save_directory: Any, *options: Any, **more: Any) -> Any:
        """Write the processor into a folder, so that `AutoProcessor.from_pretrained` loads it: with
        ``trust_remote_code=True``, or where its class is registered.

        The folder receives the code of the spec and of the config class, too, except for modules of
        a script or a notebook, which no other process can import, and those that import from
        folders above their own. An existing config.json stays, and only learns of the code of its
        class.

        Args:
            save_directory: a checkpoint folder, or a new one.
            options: of transformers' `save_pretrained`, for example `push_to_hub`.
            more: others by name.
        """
        path, spec, config = Path(save_directory), self.spec, self.config
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
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(path)
        if (inner := self._inner()) is not None:
            inner.save_pretrained(path / INNER)
        if of_spec and (held := module_of(spec)):
            code = source(spec, f".{of_spec[0].stem}.{held[1]}", "training")
            (path / f"processing_{spec.name}.py").write_text(code, encoding="utf-8")
        return super().save_pretrained(save_directory, *options, **more)

    @override
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Self:
        """A processor that `save_pretrained` wrote, or one from any checkpoint of the model.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the hub.
            options: `config`, `tokenizer`, `hf_processor`, `mm_processor_kwargs` and `dtype` stand
                in place of what the checkpoint has; others are options of transformers'
                `from_pretrained`, for example `revision` and `trust_remote_code`, and those that it
                does not know are for the Hugging Face processor.
        """
        name = pretrained_model_name_or_path
        options.pop("_from_auto", None)
        given = {key: options.pop(key, None) for key in _PARTS}
        of_files = {key: options[key] for key in _OF_FILES if key in options}
        trusted = {**of_files, "trust_remote_code": options.pop("trust_remote_code", False)}
        stored, _ = cls.get_processor_dict(name, **of_files)
        saved = stored if stored.get("processor_class") == cls.__name__ else {}
        if given["config"] is None:
            given["config"] = AutoConfig.from_pretrained(name, **trusted)
        if given["tokenizer"] is None and has_tokenizer(name, **of_files):
            given["tokenizer"] = AutoTokenizer.from_pretrained(name, **trusted)
        if given["hf_processor"] is None and (not saved or INNER in saved):
            if saved or Path(name, INNER).is_dir():
                options["subfolder"] = INNER
            load = partial(AutoProcessor.from_pretrained, name, **{**options, **trusted})
            given["hf_processor"] = LazyProcessor(load)
        for key in ("mm_processor_kwargs", "dtype"):
            given[key] = given[key] or saved.get(key)
        return cls(**given, chat_template=stored.get("chat_template"))

    def _inner(self) -> Any:
        """The Hugging Face processor to save as well; None where the spec uses none."""
        own, bound = self.hf_processor, self.plan.modalities.values()
        if not isinstance(own, LazyProcessor):
            return own
        # what reads `proc` has loaded it when the spec was bound
        is_called = any(
            m.field_processor.hf_call and m.field_processor.hf_call.part is None for m in bound
        )
        return own.loaded if is_called or "loaded" in vars(own) else None


def has_tokenizer(name: Any, **options: Any) -> bool:
    """Whether a checkpoint has a tokenizer; transformers makes one up for some that have none."""
    options |= {"_raise_exceptions_for_missing_entries": False}
    return any(cached_file(str(name), file, **options) for file in TOKENIZER_FILES)


def _code_of_spec(spec: Declaration) -> list[Path]:
    return [] if module_of(spec) is None else _code(spec.declaring_module)


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

"""A processor in a checkpoint folder.

Beside what the model has there, config.json and the files of the tokenizer:

- processor_config.json, which names the class, and its code for those who trust it;
- hf_processor/, the Hugging Face processor that the spec uses, if there is one;
- mmkit.json, the spec as a document, unless a function of it has no name;
- processing_<name>.py, the class. It reads the document where that names no functions. Otherwise
  the module of the spec lies beside it;
- the module of the config, and those beside these modules that they import.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.processing_utils import ProcessorMixin
from transformers.utils import cached_file
from typing_extensions import override

from ..checkpoint_document import CheckpointDocument
from ..errors import InputError, SpecError
from ..generate import find_variable, write_source
from ..language.items.base import dtype_name
from ..language.spec import DOCUMENT_FILE, Declaration
from ..language.vocabulary import TOKENIZER_FILES
from ..plan.hf_calls import LazyProcessor

logger = logging.getLogger(__name__)

HF_PROCESSOR = "hf_processor"
"""The folder of the Hugging Face processor, and its key in processor_config.json."""

DOCUMENT_PROCESSOR = "DocumentProcessor"
"""The class that reads a document, which processor_config.json names where it names no functions;
see `mmkit.training.document_processor`."""

_FILE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision")
"""The options of transformers' `from_pretrained` that concern the files of a checkpoint."""


class SavedProcessor(ProcessorMixin):
    """A processor that `AutoProcessor` loads from the folder into which it was saved.

    Attributes:
        spec: the declaration.
    """

    spec: ClassVar[Declaration]
    attributes: ClassVar[list[str]] = []  # `save_pretrained` below writes the parts itself
    audio_tokenizer: ClassVar[None] = None  # for transformers 4

    @override
    @classmethod
    def get_attributes(cls) -> list[str]:
        """Return `attributes`, for transformers 5."""
        return cls.attributes

    @override
    def to_dict(self, **_: Any) -> dict[str, Any]:
        """Return the contents of processor_config.json."""
        name = type(self).__name__
        has_code = bool(_find_spec_code(self.spec))
        if is_declarative(self._document):
            name = DOCUMENT_PROCESSOR
            has_code = True
        contents: dict[str, Any] = {
            "processor_class": name,
            "mm_processor_kwargs": self.mm_processor_kwargs,
            "dtype": dtype_name(self.dtype),
        }
        if self._find_hf_processor() is not None:
            contents[HF_PROCESSOR] = HF_PROCESSOR
        if has_code:
            contents["auto_map"] = {"AutoProcessor": f"processing_{self.spec.name}.{name}"}
        return contents

    @override
    def save_pretrained(self, save_directory: Any, *options: Any, **more: Any) -> Any:
        """Write the processor into a folder, so that `AutoProcessor.from_pretrained` loads it.

        Loading takes ``trust_remote_code=True``, or a process that has registered the class; of a
        spec without functions, whose document is all that is read, one that has imported
        `mmkit.training`. The folder receives the code of other specs, and of the config class,
        except for modules of a script or a notebook, which no other process can import, and those
        that import from folders above their own. An existing config.json stays, and only learns of
        the code of its class.

        Args:
            save_directory: a checkpoint folder, or a new one.
            options: of transformers' `save_pretrained`, for example `push_to_hub`.
            more: others by name.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._save_document(folder)
        self._save_config(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        hf_processor = self._find_hf_processor()
        if hf_processor is not None:
            hf_processor.save_pretrained(folder / HF_PROCESSOR)
        self._save_class(folder)
        return super().save_pretrained(save_directory, *options, **more)

    def _save_document(self, folder: Path) -> None:
        """Write the document of the spec; without one, remove an earlier spec's document."""
        file = folder / DOCUMENT_FILE
        if self._document is None:
            file.unlink(missing_ok=True)  # it would be served
        else:
            text = json.dumps(self._document, indent=2, ensure_ascii=False)
            file.write_text(text + "\n", encoding="utf-8")

    def _save_config(self, folder: Path) -> None:
        """Write the config where there is none, and the code of its class."""
        code = _find_code(type(self.config).__module__)
        _copy_files(code, folder)
        if not (folder / "config.json").exists():
            self.config.save_pretrained(folder)
        if code:
            _name_config_code(folder, f"{code[0].stem}.{type(self.config).__name__}")

    def _save_class(self, folder: Path) -> None:
        """Write the class of the processor, and the code of a spec that has functions."""
        file = folder / f"processing_{self.spec.name}.py"
        if is_declarative(self._document):
            file.write_text(_READER, encoding="utf-8")
            return
        code = _find_spec_code(self.spec)
        _copy_files(code, folder)
        variable = find_variable(self.spec)
        if code and variable:
            source = write_source(self.spec, f".{code[0].stem}.{variable.name}", "training")
            file.write_text(source, encoding="utf-8")

    @override
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Self:
        """Load a processor that `save_pretrained` wrote, or one from any checkpoint of the model.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the hub.
            options: `config`, `tokenizer`, `hf_processor`, `mm_processor_kwargs` and `dtype` stand
                in place of what the checkpoint has; others are options of transformers'
                `from_pretrained`, for example `revision` and `trust_remote_code`, and those that it
                does not know are for the Hugging Face processor.
        """
        return cls(**cls.load_arguments(pretrained_model_name_or_path, **options))

    @classmethod
    def load_arguments(cls, name: Any, **options: Any) -> dict[str, Any]:
        """Return what a checkpoint has of the arguments of the class.

        Args:
            name: a folder, or a name on the hub.
            options: as for `from_pretrained`.
        """
        options.pop("_from_auto", None)
        config = options.pop("config", None)
        tokenizer = options.pop("tokenizer", None)
        hf_processor = options.pop("hf_processor", None)
        mm_processor_kwargs = options.pop("mm_processor_kwargs", None)
        dtype = options.pop("dtype", None)
        trust_remote_code = options.pop("trust_remote_code", False)
        file_options = select_file_options(options)
        code_options = {**file_options, "trust_remote_code": trust_remote_code}

        contents, _ = cls.get_processor_dict(name, **file_options)
        is_saved = contents.get("processor_class") in (cls.__name__, DOCUMENT_PROCESSOR)
        if config is None:
            config = AutoConfig.from_pretrained(name, **code_options)
        if tokenizer is None and has_tokenizer(name, **file_options):
            tokenizer = AutoTokenizer.from_pretrained(name, **code_options)
        if hf_processor is None and (not is_saved or HF_PROCESSOR in contents):
            if is_saved or Path(name, HF_PROCESSOR).is_dir():
                options["subfolder"] = HF_PROCESSOR
            # a partial can be pickled, and with it the processor; a function in here cannot
            load = partial(AutoProcessor.from_pretrained, name, **{**options, **code_options})
            hf_processor = LazyProcessor(load)
        if is_saved:
            mm_processor_kwargs = mm_processor_kwargs or contents.get("mm_processor_kwargs")
            dtype = dtype or contents.get("dtype")
        return {
            "config": config,
            "tokenizer": tokenizer,
            "hf_processor": hf_processor,
            "mm_processor_kwargs": mm_processor_kwargs,
            "dtype": dtype,
            "chat_template": contents.get("chat_template"),
        }

    @cached_property
    def _document(self) -> dict[str, Any] | None:
        return write_document(self.spec)

    def _find_hf_processor(self) -> Any:
        """Return the Hugging Face processor to save as well; None where the spec uses none."""
        if not isinstance(self.hf_processor, LazyProcessor):
            return self.hf_processor
        is_called = False
        for modality in self.plan.modalities.values():
            call = modality.field_processor.hf_call
            # looking at the part of the processor that a spec calls loads the processor
            if call is not None and call.part is None:
                is_called = True
        # an expression that reads `proc` has loaded it when the spec was bound
        is_used = is_called or "loaded" in vars(self.hf_processor)
        return self.hf_processor.loaded if is_used else None


def select_file_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `from_pretrained` that concern the files of a checkpoint."""
    return {key: options[key] for key in _FILE_OPTIONS if key in options}


# -- the document ----------------------------------------------------------------------------------

_READER = f'''\
"""The processor of this checkpoint, whose spec is the document {DOCUMENT_FILE}."""

from {__package__} import {DOCUMENT_PROCESSOR} as Processor


class {DOCUMENT_PROCESSOR}(Processor):
    """The processor of this checkpoint."""
'''
"""The source of a class that transformers loads from a folder with a document."""


def load_document(name: Any, file_options: dict[str, Any]) -> Declaration:
    """Return the spec of a checkpoint's document.

    Args:
        name: a folder, or a name on the hub.
        file_options: as `select_file_options` returns them.

    Raises:
        SpecError: the document is malformed, or names functions.
        InputError: there is none.
    """
    file = cached_file(
        str(name), DOCUMENT_FILE, _raise_exceptions_for_missing_entries=False, **file_options
    )
    if file is None:
        raise InputError(str(name), f"a checkpoint with {DOCUMENT_FILE}", "one without it")
    document = CheckpointDocument(Path(file).read_bytes(), f"{name}, {DOCUMENT_FILE}")
    return document.parse()


def write_document(spec: Declaration) -> dict[str, Any] | None:
    """Return a spec as a document; None where a function of it has no name."""
    from ..document import to_document  # imports pydantic

    try:
        return to_document(spec)
    except SpecError as error:
        logger.warning("%s is not saved: %s", DOCUMENT_FILE, error)
        return None


def is_declarative(document: dict[str, Any] | None) -> bool:
    """Return whether there is a document, and it names no functions."""
    from ..document import list_functions

    return document is not None and not list_functions(document)


# -- files -----------------------------------------------------------------------------------------


def has_tokenizer(name: Any, **options: Any) -> bool:
    """Return whether a checkpoint has a tokenizer.

    transformers makes one up for some checkpoints that have none.
    """
    options["_raise_exceptions_for_missing_entries"] = False
    return any(cached_file(str(name), file, **options) for file in TOKENIZER_FILES)


def _copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy files into a folder, but for those that lie there already."""
    for file in files:
        if file.parent.resolve() != folder.resolve():
            shutil.copy(file, folder)


def _name_config_code(folder: Path, name: str) -> None:
    """Write the class of a config, as ``module.Class``, into config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["auto_map"] = {**config.get("auto_map", {}), "AutoConfig": name}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _find_spec_code(spec: Declaration) -> list[Path]:
    """Return the files of a spec, as for `_find_code`; none if it cannot be imported."""
    if find_variable(spec) is None:
        return []
    return _find_code(spec.declaring_module)


def _find_code(module: str) -> list[Path]:
    """Return the file of a module, and the files of its folder that it imports.

    The list is empty for a module of transformers, for a module that no other process can import,
    and for a module with imports from folders above.
    """
    file = getattr(sys.modules[module], "__file__", None)
    if file is None or module.startswith(("transformers.", "__main__")):
        return []
    try:
        imports = get_relative_import_files(file)
    except OSError:
        logger.warning("%s is not saved: it imports from folders above its own", file)
        return []
    return [Path(path) for path in [file, *imports]]

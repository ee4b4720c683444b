"""A processor for transformers whose spec is the document of a checkpoint folder."""

from __future__ import annotations

from typing import Any, Self

from transformers import AutoProcessor, PretrainedConfig
from typing_extensions import override

from ..language.spec import Declaration
from .processor import Processor
from .saving import DOCUMENT_PROCESSOR, load_document, select_file_options


class DocumentProcessor(Processor):
    """Turns texts and items into tensors as the ``mmkit.json`` of a checkpoint says.

    `AutoProcessor` makes it from a folder that the processor of a spec without functions was saved
    into: with ``trust_remote_code=True``, or in a process that has imported `mmkit.training`, which
    runs no code of the folder.

    Attributes:
        spec: the declaration.
    """

    def __init__(
        self, config: Any, tokenizer: Any = None, *, spec: Declaration, **options: Any
    ) -> None:
        self.spec = spec  # type: ignore[misc]  # each has its own
        super().__init__(config, tokenizer, **options)

    @override
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Self:
        """Load a processor from a folder with a document.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the hub.
            options: as for `Processor.from_pretrained`.

        Raises:
            SpecError: the document is malformed, or names functions.
            InputError: there is none.
        """
        spec = load_document(pretrained_model_name_or_path, select_file_options(options))
        arguments = cls.load_arguments(pretrained_model_name_or_path, **options)
        return cls(spec=spec, **arguments)


class _DocumentConfig(PretrainedConfig):
    """No config of any model: the key under which `AutoProcessor` has the class by its name."""

    model_type = "mmkit_document"


assert DocumentProcessor.__name__ == DOCUMENT_PROCESSOR
AutoProcessor.register(_DocumentConfig, DocumentProcessor, exist_ok=True)

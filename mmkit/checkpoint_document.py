"""The document of a checkpoint: the file ``mmkit.json``, which holds its spec.

pydantic is imported when a document is parsed, and not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .language.spec import DOCUMENT_FILE, Declaration


class CheckpointDocument(NamedTuple):
    """The document of a checkpoint, not parsed.

    Attributes:
        text: the JSON.
        where: names the file in errors.
    """

    text: bytes
    where: str

    def list_functions(self) -> list[str]:
        """Return the names of the functions that the document names.

        Raises:
            SpecError: it is malformed.
        """
        from .document import list_functions

        return list_functions(self.text, where=self.where)

    def parse(self, *, import_functions: bool = False) -> Declaration:
        """Return the spec.

        Args:
            import_functions: import the functions that the document names.

        Raises:
            SpecError: it is malformed, or names functions that are not imported.
        """
        from .document import from_document

        return from_document(
            self.text, Declaration, import_functions=import_functions, where=self.where
        )


def find_document(folder: str) -> CheckpointDocument | None:
    """Return the document of a checkpoint folder; None where there is none."""
    file = Path(folder, DOCUMENT_FILE)
    if not file.is_file():
        return None
    return CheckpointDocument(file.read_bytes(), str(file))

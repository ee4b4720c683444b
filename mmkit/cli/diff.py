"""``mmkit diff``: two specs, or documents of specs, part by part.

No function is called. Refused (`MmkitError`) are specs and documents that cannot be read.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text
from typer import Argument, Exit

from ..document import find_differences, to_document
from .common import count_noun, load_spec

First = Annotated[
    str, Argument(metavar="A", help="A spec or the file of a document.", show_default=False)
]
Second = Annotated[
    str, Argument(metavar="B", help="The spec or document to compare it with.", show_default=False)
]


def diff(first: First, second: Second) -> None:
    """Compare two specs or documents of specs. Exit status 1 if they differ.

    Example: mmkit diff pulse.spec:PULSE checkpoint/mmkit.json
    """
    first_document = to_document(load_spec(first))
    second_document = to_document(load_spec(second))
    differences = find_differences(first_document, second_document)
    console = Console(highlight=False)
    if not differences:
        console.print(Text.assemble(("✓ ", "green"), "They declare the same."))
        return
    for path, before, after in differences:
        console.print(Text(path, "bold"), soft_wrap=True)
        if before is not None:
            console.print(Text(f"- {_write(before)}", "red"), soft_wrap=True)
        if after is not None:
            console.print(Text(f"+ {_write(after)}", "green"), soft_wrap=True)
    console.print(Text(count_noun(len(differences), "difference"), "dim"))
    raise Exit(1)


def _write(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)

"""Which specs of the examples are data alone: writes docs/data/documents.md.

``python -m tools.documents`` imports the specs. A test compares the page with what would be
written.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mmkit import ModelSpec

from .shared import ROOT, format_table

PAGE = ROOT / "docs" / "data" / "documents.md"

TEXT = """# Specs that are data alone

A [document](../reference/document.md) of a spec names its functions. {count} of {total} specs of
the examples need none: their documents run no code. `python -m tools.documents` writes this page.
The last column says in which part each function of the others stands. Functions process items
(`process`), write another prompt, make arrays of ids (`outputs`), or compute sizes and ids that
need a loop, a library or a method of the checkpoint's processor.

{table}
"""

_CALL = re.compile(r"(?:later|function)\('([\w.]+:[\w.]+)'\)")
"""A function in the source of an expression."""


def main() -> None:
    documents = {name: spec.to_document() for name, spec in find_specs().items()}
    PAGE.write_text(write_page(documents), encoding="utf-8")


def find_specs() -> dict[str, ModelSpec]:
    """Return the specs of the examples, by ``module:variable``."""
    specs = {}
    for path in sorted((ROOT / "examples").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "ModelSpec(" not in text and ".model_copy(" not in text:
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for variable, value in vars(importlib.import_module(name)).items():
            if isinstance(value, ModelSpec) and value.declaring_module == name:
                specs[f"{name}:{variable}"] = value
    return specs


def write_page(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page, of documents by ``module:variable``."""
    rows = []
    count = 0
    for name, document in documents.items():
        module, _, variable = name.partition(":")
        path = f"{module.replace('.', '/')}.py"
        places = list_functions_by_part(document)
        verdict = "no"
        if not places:
            verdict = "yes"
            count += 1
        functions = ", ".join(f"{part}: `{function}`" for part, function in places)
        rows.append([f"[{variable}](../../{path})", path.split("/")[1], verdict, functions])
    table = format_table(["spec", "examples of", "data alone", "functions"], rows)
    return TEXT.format(count=count, total=len(rows), table=table)


def list_functions_by_part(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the part and the name of each function of a document, each pair once."""
    places: dict[tuple[str, str], None] = {}
    for part, value in _list_parts(document):
        for function in _list_functions(value):
            places[part, function.partition(":")[2]] = None
    return list(places)


def _list_parts(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of the modalities, and the other parts of a document."""
    for modality in document["modalities"]:
        yield from modality.items()
    for name, value in document.items():
        if name != "modalities":
            yield name, value


def _list_functions(value: Any) -> Iterator[str]:
    """Yield the names of the functions in a part of a document."""
    if isinstance(value, str):
        yield from _CALL.findall(value)
    elif isinstance(value, list):
        for element in value:
            yield from _list_functions(element)
    elif isinstance(value, Mapping):
        if value.get("type") == "function":
            yield value["name"]
        for name, inner in value.items():
            if name in ("decode", "encode") and isinstance(inner, str):
                yield inner
            else:
                yield from _list_functions(inner)


if __name__ == "__main__":
    main()

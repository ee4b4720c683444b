"""What changed between two versions of vLLM in the classes that mmkit names.

    python -m tools.api_diff A B        A, B: a version of the matrix, as 0.33.0; or a folder that
    holds vllm/, as in its wheel

prints a difference of signatures: a line for each class with its module, and for each member that
it has or inherits. griffe reads both, neither is imported.
"""

import re
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Annotated, Any

import griffe
import typer

from tools.matrix import trees

HOMES = (
    "vllm.multimodal",
    "vllm.inputs",
    "vllm.renderers",
    "vllm.model_executor.models.interfaces",
)
"""The parts of vLLM whose classes mmkit builds on. A name of another part is another thing."""

MARKS = {"abstractmethod", "classmethod", "property", "staticmethod"}
"""The labels of a member that its line shows."""


def main(
    old: Annotated[str, typer.Argument(metavar="A")],
    new: Annotated[str, typer.Argument(metavar="B")],
) -> None:
    """Print the difference; ends as diff does, with 0 if nothing changed and with 1 else."""
    changes = list(
        unified_diff(list_signatures(old), list_signatures(new), old, new, n=0, lineterm="")
    )
    for line in changes:
        if not line.startswith("@@"):
            print(line)
    sys.exit(int(bool(changes)))


def list_signatures(place: str) -> list[str]:
    """Return the classes of one vLLM that mmkit names, and their members, a line each.

    Raises:
        ModuleNotFoundError: there is no vLLM.
    """
    if place in trees.RELEASES:
        trees.build([place])
        place = str(trees.RELEASES[place].folder)
    # never fall back on importing: a second vLLM in one process ends it
    loader = griffe.GriffeLoader(search_paths=[place], allow_inspection=False)
    package = loader.load("vllm", try_relative_path=False)
    return sorted(iterate_lines(package, find_capitalised_words(trees.ROOT / "mmkit")))


def find_capitalised_words(folder: Path) -> set[str]:
    """Return every word of a folder's sources that may be the name of a class."""
    words: set[str] = set()
    for path in folder.rglob("*.py"):
        words.update(re.findall(r"\b[A-Z]\w+", path.read_text()))
    return words


def iterate_lines(module: Any, names: set[str]) -> Iterator[str]:
    """Yield the lines of the classes with such names, in a module and those below it."""
    for name, member in module.members.items():
        if member.is_alias:
            continue
        if member.is_module:
            yield from iterate_lines(member, names)
        elif member.is_class and name in names and module.path.startswith(HOMES):
            yield f"{name}: {module.path}"
            for attribute, value in member.all_members.items():
                if value.is_function or value.is_attribute:
                    yield format_member(value, f"{name}.{attribute}")


def format_member(member: Any, name: str) -> str:
    """Return the kind, parameters and defaults of a member; types are no difference."""
    marks = "".join(f" {label}" for label in sorted(member.labels & MARKS))
    if not member.is_function:
        return name + marks
    untyped = griffe.Parameters()
    for parameter in member.parameters:
        untyped.add(
            griffe.Parameter(parameter.name, kind=parameter.kind, default=parameter.default)
        )
    return griffe.Function(name, parameters=untyped).signature(name=name) + marks


if __name__ == "__main__":
    typer.run(main)

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

NAMED = {
    word
    for path in (trees.ROOT / "mmkit").rglob("*.py")
    for word in re.findall(r"\b[A-Z]\w+", path.read_text())
}
"""Every word of mmkit's sources that may be a class."""


def surface(place: str) -> list[str]:
    """The classes of one vLLM that mmkit names, and their members, a line each.

    Raises:
        ModuleNotFoundError: there is no vLLM.
    """
    if place in trees.RELEASES:
        trees.build([place])
        place = str(trees.RELEASES[place].folder)
    # never fall back on importing: a second vLLM in one process ends it
    loader = griffe.GriffeLoader(search_paths=[place], allow_inspection=False)
    package = loader.load("vllm", try_relative_path=False)
    return sorted(lines(package))


def lines(module: Any) -> Iterator[str]:
    for name, member in module.members.items():
        if member.is_alias:
            continue
        if member.is_module:
            yield from lines(member)
        elif member.is_class and name in NAMED and module.path.startswith(HOMES):
            yield f"{name}: {module.path}"
            for of_class, one in member.all_members.items():
                if one.is_function or one.is_attribute:
                    yield signature(one, f"{name}.{of_class}")


def signature(member: Any, name: str) -> str:
    """Kind, parameters and defaults; types are no difference."""
    marks = "".join(f" {label}" for label in sorted(member.labels & MARKS))
    if not member.is_function:
        return name + marks
    parameters = (
        griffe.Parameter(one.name, kind=one.kind, default=one.default) for one in member.parameters
    )
    bare = griffe.Function(name, parameters=griffe.Parameters(*parameters))
    return bare.signature(name=name) + marks


MARKS = {"abstractmethod", "classmethod", "property", "staticmethod"}


def main(
    old: Annotated[str, typer.Argument(metavar="A")],
    new: Annotated[str, typer.Argument(metavar="B")],
) -> None:
    """Print the difference; ends as diff does, with 0 if nothing changed and with 1 else."""
    changes = list(unified_diff(surface(old), surface(new), old, new, n=0, lineterm=""))
    print(*(line for line in changes if not line.startswith("@@")), sep="\n")
    sys.exit(int(bool(changes)))


if __name__ == "__main__":
    typer.run(main)

"""List the messages of mmkit's errors, from its source: the site shows them on one page.

``python -m tools.messages`` prints them as Markdown.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

ERRORS = ("MmkitError", "SpecError", "InputError", "OptionsError", "VllmApiError")

SECTIONS = {
    "language": "Declaring a spec",
    "document": "Reading a spec from a document",
    "plan": "Binding a spec, expanding and processing a request",
    "training": "Training",
    "rendering": "Render processes",
    "vllm_api": "Requests in vLLM",
    "model": "The model class",
    "wire": "Items in JSON",
    "serve": "The server and its client",
    "testing": "The laws",
    "cli": "The command",
}
"""Headings by package of mmkit; what lies outside of these comes last."""

OTHERS = "Other messages"

HIDDEN = "…"
"""Stands for what depends on the request or the spec."""


@dataclass(frozen=True, order=True)
class Message:
    """A message of an error.

    Attributes:
        place: what the message begins with.
        expected: what mmkit expected.
        got: what there was.
        remedy: what to do; empty where that is plain.
        error: the class of the error.
        package: the folder of mmkit that raises it.
    """

    place: str
    expected: str
    got: str
    remedy: str
    error: str
    package: str


def main() -> None:
    print(write_messages())


def write_messages() -> str:
    """Return all messages as Markdown, in a table for each package."""
    parts = []
    messages = sorted(set(read_messages()))
    headings = SECTIONS | {"": OTHERS}
    for package, heading in headings.items():
        rows = []
        for message in messages:
            section = message.package if message.package in SECTIONS else ""
            if section == package:
                rows.append(_format_row(message))
        if rows:
            table = "\n".join(["| message | remedy | error |", "| --- | --- | --- |"])
            parts.append(f"### {heading}\n\n{table}\n" + "\n".join(sorted(set(rows))) + "\n")
    return "\n".join(parts)


def read_messages() -> Iterator[Message]:
    """Return the messages that the source of mmkit writes out."""
    for path in sorted((ROOT / "mmkit").rglob("*.py")):
        package = path.relative_to(ROOT / "mmkit").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = _read_name(node.func)
            if name not in ERRORS or len(node.args) < 3:
                continue
            texts = [_read_text(argument) for argument in node.args]
            for keyword in node.keywords:
                if keyword.arg == "remedy":
                    texts.append(_read_text(keyword.value))
            texts.append("")
            place, expected, got, remedy = texts[:4]
            if expected != HIDDEN:
                yield Message(place, expected, got, remedy, name, package)


def _read_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return function.id
    return ""


def _read_text(node: ast.expr) -> str:
    """Return a text of the source, with `HIDDEN` for what is put in at run time."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_read_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _read_text(node.left) + _read_text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_read_text(node.body)} / {_read_text(node.orelse)}"
    return HIDDEN


def _format_row(message: Message) -> str:
    sentence = f"expected {message.expected}, got {message.got}"
    if message.place not in ("", HIDDEN):
        sentence = f"{message.place}: {sentence}"
    shown = []
    for cell in [sentence, message.remedy]:
        plain = cell.replace("\n", " ").replace("<", "&lt;")
        shown.append(re.sub(r"([\\`*_\[\]|])", r"\\\1", plain))
    return f"| {' | '.join([*shown, f'`{message.error}`'])} |"


if __name__ == "__main__":
    main()

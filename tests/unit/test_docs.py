"""The documentation: links lead somewhere, pictures come from tests, every public name has an example."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT

SOURCES = [*PAGES, ROOT / "CHANGELOG.md"]
TESTS = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
REFERENCE = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
PUBLIC = [f"{name}/__init__" for name in ("serve", "testing", "training")]
PUBLIC += ["__init__", "model/sampling", "serve/client"]
"""The modules of mmkit whose names are public."""


def slug(heading: str) -> str:
    """The anchor of a heading, by the rule that code hosts and the site share for plain words."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    """As on a code host: files that exist, headings that exist. The site is built at night."""
    text = re.sub(r"(?ms)^ *(```+).*?^ *\1$", "", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        assert file.exists(), link
        if anchor:
            assert anchor in map(slug, re.findall(r"(?m)^#+ (.*)$", file.read_text(encoding="utf-8"))), link


def test_pictures_are_those_of_tests() -> None:
    """Every picture is named by a test that makes it; those of `mmkit show` by the name of their spec."""
    shows = "".join(text for text in TESTS if 'f"show-{name}.svg"' in text)
    for picture in (ROOT / "docs" / "images").iterdir():
        show = re.fullmatch(r"show-(.*)\.svg", picture.name)
        assert f'"{show[1]}"' in shows if show else any(picture.name in text for text in TESTS), picture.name


def public_names(module: str) -> set[str]:
    """What a module exports: `__all__`, and imports as the same name. It is read, not imported."""
    names: set[str] = set()
    for node in ast.parse((ROOT / "mmkit" / f"{module}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names.update(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names if alias.name == alias.asname)
    return names


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference_with_an_example(module: str) -> None:
    """A heading or the first cell of a table row names it, and a block of Python uses it."""
    titles = re.findall(r"(?m)^(?:#+ (.*)|\| ([^|]*) \|.*)$", REFERENCE)
    named = {word for title in titles for word in re.findall(r"\w+", "".join(title))}
    used = set(re.findall(r"\w+", "".join(re.findall(r"(?ms)^```python.*?\n(.*?)^```$", REFERENCE))))
    names = public_names(module)
    assert names
    assert names - named == names - used == set()


def test_the_fragments_render() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9", "--date", "2030-01-02"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in (ROOT / "changelog.d").iterdir():
        if path.name not in ("README.md", "template.md.jinja"):
            assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", path.name)
            assert f"- {path.read_text(encoding='utf-8').splitlines()[0]}\n" in done.stdout

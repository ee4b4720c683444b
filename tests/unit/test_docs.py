"""The documentation: links lead somewhere, pictures come from tests, every public name has an example."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import docs_hooks
import pytest

from tests.pages import PAGES, ROOT
from tools import diagrams, messages

SOURCES = PAGES + [ROOT / "CHANGELOG.md"]
TESTS = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
REFERENCE = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
PUBLIC_MODULES = [
    "public",
    "document/__init__",
    "model/sampling",
    "serve/__init__",
    "serve/client",
    "testing/__init__",
    "training/__init__",
]
"""The modules of mmkit whose names are public."""


def make_anchor(heading: str) -> str:
    """Return the anchor of a heading, by the rule that code hosts and the site share for plain words."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def make_relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def list_anchors(page: Path) -> list[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return [make_anchor(heading) for heading in headings]


@pytest.mark.parametrize("path", SOURCES, ids=make_relative)
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    """As on a code host. The site is built at night."""
    text = re.sub(r"(?ms)^ *(```+).*?^ *\1$", "", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        assert file.exists(), link
        if anchor:
            assert anchor in list_anchors(file), link


@pytest.mark.parametrize("path", [path for path in PAGES if "data" not in path.parts], ids=make_relative)
def test_a_page_whose_code_imports_the_examples_begins_with_how_to_get_them(path: Path) -> None:
    """The wheel has them, but not as a package that can be imported."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```(?:python|console)[^\n]*\n(.*?)^```$", text)
    imports = re.search(r"(?m)^(from|import) examples\b|python -m examples\.", "".join(blocks))
    if imports and path.name not in ("README.md", "CONTRIBUTING.md"):
        (start,) = re.findall(r"(?m)\A(?:---\n.*\n---\n+)?# .*\n\n(.*)$", text)
        assert "`mmkit examples` [copies them](" in start


COLUMNS = 79
"""The site shows so many columns of a code block at 1280 pixels without a scroll bar."""

WRAPPED = re.findall(r"\.language-(\w+) code", (ROOT / "docs" / "site.css").read_text(encoding="utf-8"))
"""The languages whose long lines wrap on the site."""


@pytest.mark.parametrize("path", SOURCES, ids=make_relative)
def test_no_code_block_scrolls_sideways(path: Path) -> None:
    too_long = []
    blocks = re.findall(r"(?ms)^( *)```(\w*)[^\n]*\n(.*?)^\1```$", path.read_text(encoding="utf-8"))
    for indent, language, content in blocks:
        for line in content.splitlines():
            if language not in WRAPPED and len(line.removeprefix(indent)) > COLUMNS:
                too_long.append(line)
    assert too_long == []


PICTURES = sorted(path.name for path in (ROOT / "docs" / "images").iterdir())


@pytest.mark.parametrize("picture", PICTURES)
def test_a_test_makes_each_picture(picture: str) -> None:
    """Its source has the name of the picture; those of `mmkit show` have the name of their spec."""
    of_show = re.fullmatch(r"show-(.*)\.svg", picture)
    if of_show is None:
        assert any(picture in text for text in TESTS)
    else:
        assert any('f"show-{name}.svg"' in text and f'"{of_show[1]}"' in text for text in TESTS)


def test_the_menu_of_the_site_leads_to_each_page() -> None:
    """The site is built with warnings as errors, and a page that no menu leads to is a warning."""
    menu = set(re.findall(r"(?m)^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 40
    assert pages - menu == set()


def test_the_diagrams_are_those_that_the_program_draws() -> None:
    for name, drawn in diagrams.draw_all().items():
        assert (diagrams.IMAGES / name).read_text(encoding="utf-8") == drawn
    assert set(diagrams.draw_all()) == {"architecture.svg", "prompt.svg", "request.svg"}


def test_the_list_of_messages_has_those_of_the_source() -> None:
    listed = messages.write_messages()
    assert 'expected a field "…" with the item, got none' in listed
    for heading in messages.SECTIONS.values():
        assert f"### {heading}" in listed


def find_public_names(module: str) -> set[str]:
    """Return what a module exports: `__all__`, and imports as the same name. It is parsed, not imported."""
    names: set[str] = set()
    for node in ast.parse((ROOT / "mmkit" / f"{module}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names.update(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names if alias.name == alias.asname)
    return names


def find_words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


HEADINGS = re.findall(r"(?m)^#+ (.*)$", REFERENCE)
FIRST_CELLS = re.findall(r"(?m)^\| ([^|]*) \|.*$", REFERENCE)
PYTHON_BLOCKS = re.findall(r"(?ms)^```python.*?\n(.*?)^```$", REFERENCE)


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_is_in_the_reference_with_an_example(module: str) -> None:
    """A heading or the first cell of a table row names it, and a block of Python uses it."""
    names = find_public_names(module)
    assert names
    assert names - find_words("\n".join(HEADINGS + FIRST_CELLS)) == set()
    assert names - find_words("\n".join(PYTHON_BLOCKS)) == set()


ROOTS = {"cfg", "fields", "item", "kwargs", "proc", "tok"}
"""The roots of expressions, which have no docstring of their own."""


def test_the_site_has_the_docstring_of_every_public_name_of_a_spec() -> None:
    shown: set[str] = set()
    for identifiers in docs_hooks.DOCSTRINGS.values():
        for identifier in identifiers:
            heading = re.search(r"heading: (\w+)", identifier)
            shown.add(heading[1] if heading else identifier.rpartition(".")[2])
    names = find_public_names("public") | find_public_names("document/__init__")
    assert names - ROOTS - shown == set()


def test_the_fragments_render() -> None:
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9", "--date", "2030-01-02"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in (ROOT / "changelog.d").iterdir():
        if path.name not in ("README.md", "template.md.jinja"):
            assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", path.name)
            assert f"- {path.read_text(encoding='utf-8').splitlines()[0]}\n" in done.stdout

"""The code of the pages of documentation that runs by day; and what runs it finds what is wrong."""

import pkgutil
import re
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, Page, find_fault, parse_page

SIGNATURES = (ROOT / "docs_hooks.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", [page for page in map(parse_page, PAGES) if page.blocks], ids=lambda page: page.path.stem
)
def test_page(page: Page, tmp_path: Path) -> None:
    assert find_fault(page.path, tmp_path) == ""


@pytest.mark.parametrize("name", re.findall(r'"(mmkit(?:\.\w+)+)', SIGNATURES))
def test_a_signature_in_the_reference_is_of_something_that_exists(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def fence(kind: str, *lines: str) -> str:
    return "\n".join([f"```{kind}", *lines, "```", ""])


PRINTING, FILE = fence("python", "print('one two   ')", "print(3)"), fence('python title="made/thing.py"', "VALUE = 5")
LATE, NEVER = "<!-- at night: takes all night -->\n\n", "<!-- not run: takes all day -->\n"
EXCERPT = 'python title="examples/terra/spec.py"'
RIGHT = [
    *(
        PRINTING,
        fence("text", "one...two", "3"),
        FILE,
        fence("console", "cat made/thing.py"),
        fence("text", "VALUE = 5"),
    ),
    *(NEVER, fence("console", "exit 7"), fence(EXCERPT, "TERRA = ModelSpec(", '    "terra",')),
    *(LATE, fence("python", "import made.thing", "assert made.thing.VALUE == 6")),
]


@pytest.mark.parametrize(
    ("parts", "expected", "night"),
    [
        (RIGHT, "", False),
        (RIGHT, r"AssertionError.*page\.md:29", True),
        ([fence("python", "1", "1 / 0")], r'page.md", line 3.*ZeroDivisionError.*page.md:2', False),
        ([PRINTING, fence("text", "one...two")], "expected the output.*page.md:2", False),
        ([FILE, fence("console", "false | cat made/thing.py")], "exit status.*page.md:5", False),
        ([NEVER.replace("takes all day", ""), fence("console", "exit 7")], "exit status 7", False),
        ([NEVER, fence("console", "exit '")], "unexpected EOF", False),
        ([LATE, fence("python", "assert = 6")], "SyntaxError", False),
        ([fence(EXCERPT, '    "terre",')], "no excerpt of examples/terra/spec.py", False),
        ([fence("", "x")], "a block '': no output, not a file", False),
        (["---\nengine: true\n---\n", fence("python", "assert 0")], "", False),
    ],
)
def test_what_is_wrong_with_a_page(parts: list[str], expected: str, night: bool, tmp_path: Path) -> None:
    path, folder = tmp_path / "page.md", tmp_path / "a folder"
    path.write_text("".join(parts))
    folder.mkdir()
    fault = find_fault(path, folder, night)
    if expected:
        assert re.search(f"(?s){expected}", fault)
    else:
        assert fault == ""

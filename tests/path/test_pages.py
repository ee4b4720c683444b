"""The code of the pages of documentation that runs by day; and what runs it finds what is wrong."""

import re
from pathlib import Path

import pytest

from tests.pages import PAGES, Page, complaint, read


@pytest.mark.parametrize("page", [page for page in map(read, PAGES) if page.blocks], ids=lambda page: page.path.stem)
def test_page(page: Page, tmp_path: Path) -> None:
    assert complaint(page.path, tmp_path) == ""


PAGE = """
```python
print("one two   ")
print(3)
```

```text
one...two
3
```

```python title="made/thing.py"
VALUE = 5
```

```console
cat made/thing.py
```

```text
VALUE = 5
```

<!-- not run: takes all day -->
```console
exit 7
```

```python title="examples/terra/spec.py"
TERRA = ModelSpec(
    "terra",
```

<!-- at night: takes all night -->

```python
import made.thing

assert made.thing.VALUE == 6
```
""".lstrip()


@pytest.mark.parametrize(
    ("old", "new", "expected", "night"),
    [
        ("", "", "", False),
        ("", "", r"AssertionError.*page\.md:36", True),
        ("print(3)", "print(1 / 0)", r'page.md", line 3.*ZeroDivisionError.*page.md:2', False),
        ("one...two\n3", "one...two", "expected the output.*page.md:2", False),
        ("cat made", "false | cat made", "exit status.*page.md:16", False),
        ("not run: takes all day", "not run: ", "exit status 7", False),
        ("exit 7", "exit '", "unexpected EOF", False),
        ("assert made", "assert = made", "SyntaxError", False),
        ('    "terra",', '    "terre",', "no excerpt of examples/terra/spec.py", False),
        ("```text", "```", "a block '': no output, not a file", False),
    ],
)
def test_what_is_wrong_with_a_page(old: str, new: str, expected: str, night: bool, tmp_path: Path) -> None:
    path, folder = tmp_path / "page.md", tmp_path / "a folder"
    path.write_text(PAGE.replace(old, new, 1))
    folder.mkdir()
    said = complaint(path, folder, night)
    assert re.search(f"(?s){expected}", said) if expected else said == ""


def test_a_page_that_runs_at_night(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("---\nengine: true\n---\n```python\nassert 0\n```\n")
    assert read(tmp_path / "page.md").night

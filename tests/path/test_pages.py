"""The code of the pages of documentation that runs by day; and what runs it finds what is wrong."""

import re
from pathlib import Path

import pytest

from tests.pages import PAGES, Page, complaint, read


@pytest.mark.parametrize("page", [page for page in map(read, PAGES) if page.blocks], ids=lambda page: page.path.stem)
def test_page(page: Page, tmp_path: Path) -> None:
    assert complaint(page.path, tmp_path) == ""


PAGE = """
# A page

```python
x = 1
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

- in a list

  ```console
  cat made/thing.py  # a comment
  ls examples/terra/spec.py
  ```

  ```text
  VALUE = 5
  examples/terra/spec.py
  ```

<!-- not run: takes all day -->
```console
exit 7
```

```json
{"a": [1]}
```

```python title="examples/terra/spec.py"
TERRA = ModelSpec(
    "terra",
```

```python
import made.thing

assert x == 1 and made.thing.VALUE == 5
```

<!-- at night: takes all night -->

```python
assert x == 0
```
""".lstrip()


def complaint_about(text: str, folder: Path, night: bool = False) -> str:
    path, folder = folder / "page.md", folder / "a folder"
    path.write_text(text)
    folder.mkdir()
    return complaint(path, folder, night)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("x = 1", "x = 1 / 0", r'page.md", line 4.*ZeroDivisionError.*page.md:4'),
        ("x = 1", "import sys; sys.exit(0)", "SystemExit.*page.md:4"),
        ("one...two\n3", "one...two", "expected the output.*page.md:4"),
        ("VALUE = 5\n  examples", "VALUE . 5\n  examples", "expected the output.*page.md:21"),
        ("cat made", "false | cat made", "exit status.*page.md:21"),
        ("not run: takes all day", "not run: ", "exit status 7"),
        ("<!-- not run: takes all day -->\n", "<!-- not run: takes all day -->\nBut:\n\n", "exit status 7"),
        ("exit 7", "exit '", "unexpected EOF"),
        ("assert x == 0", "assert x ==", "SyntaxError"),
        ('{"a": [1]}', '{"a": 1]}', "JSONDecodeError"),
        ('    "terra",', '    "terre",', "no excerpt of examples/terra/spec.py"),
        ("```json", "```", "a block '': no output, not a file"),
        ("```json", "```text", "a block 'text': no output, not a file"),
        ('```json\n{"a": [1]}\n```', "    x = 1", "an indented code block"),
    ],
)
def test_a_bad_page(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert re.search(f"(?s){expected}", complaint_about(PAGE.replace(old, new, 1), tmp_path))


def test_a_good_page(tmp_path: Path) -> None:
    assert complaint_about(PAGE, tmp_path) == ""


def test_what_runs_at_night(tmp_path: Path) -> None:
    assert re.search(r"(?s)AssertionError.*page\.md:53", complaint_about(PAGE, tmp_path, night=True))
    assert read(tmp_path / "page.md").night


def test_a_page_that_runs_at_night(tmp_path: Path) -> None:
    page = "---\nengine: true\n---\n```python\nassert 0\n```\n"
    assert complaint_about(page, tmp_path) == ""
    assert read(tmp_path / "page.md").night

"""What would let a broken matrix of vLLM versions pass; the rest shows where it runs, `make matrix`."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from tools.matrix import __main__ as matrix
from tools.matrix import page, trees
from tools.shared import PREFIX


def told(version: str, **result: Any) -> str:
    """A line that checks on some version print."""
    return PREFIX + json.dumps({"check": "engine", "vllm": version, "failures": [], **result})


@pytest.mark.parametrize(
    ("printed", "failure"),
    [
        ({"0.32.0": told("0.32.0+cpu", digest="a"), "0.31.0": told("0.31.0", digest="a")}, None),
        ({"0.32.0": told("0.32.0+cpu", digest="a"), "0.31.0": told("0.31.0", digest="b")}, "Terra's ids differ"),
        ({"0.32.0": told("0.32.0+cpu", failures=["wrong"])}, "0.32.0, engine: wrong"),
        ({"0.32.0": told("0.31.0+cpu")}, "0.32.0, engine: ran on vLLM 0.31.0+cpu"),
        ({"0.32.0": "no result"}, "0.32.0, engine: ended with 3, see"),
    ],
)
def test_whatever_goes_wrong_is_a_failure(
    printed: dict[str, str],
    failure: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the place of the checks, processes that print this and end."""
    for version, line in printed.items():
        (tmp_path / version).mkdir()
        code = f"import os; print({line!r}, flush=True); os._exit(3)\n"
        (tmp_path / version / "sitecustomize.py").write_text(code)
    monkeypatch.setattr(matrix, "build", lambda versions: None)
    monkeypatch.setattr(matrix, "read_facts", lambda version: {"kernels": "", "transformers": "", "patches": []})
    monkeypatch.setattr(matrix, "environment", lambda version: {"PYTHONPATH": str(tmp_path / version)})
    monkeypatch.setattr(matrix, "LOGS", tmp_path)
    with pytest.raises(SystemExit) as ended:
        matrix.main(list(printed), checks="engine", store=tmp_path / "stored.json")
    assert ended.value.code == (failure is not None)
    assert (failure or "") in capsys.readouterr().out


def test_some_checks_run_at_the_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, list[str]] = {}

    def run(version: str, checks: list[str], options: list[str]) -> dict[str, Any]:
        ran[version] = checks
        return {"version": version, "kernels": "", "transformers": "", "patches": 0, "checks": {}}

    monkeypatch.setattr(matrix, "build", lambda versions: None)
    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setattr(matrix, "LOGS", tmp_path)
    with pytest.raises(SystemExit, match="0"):
        matrix.main(["0.33.0", "0.32.0", "0.31.0"], checks="cases", ends="engine", store=tmp_path / "stored.json")
    assert ran == {"0.33.0": ["cases", "engine"], "0.32.0": ["cases"], "0.31.0": ["cases", "engine"]}


def test_a_tree_of_another_recipe_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(trees, "FOLDER", tmp_path)
    monkeypatch.setattr(trees, "_build", lambda release: built.append(release.version))
    for version, recipe in {"0.32.0": trees.RELEASES["0.32.0"].recipe, "0.33.0": ""}.items():
        (tmp_path / version).mkdir()
        (tmp_path / version / "tree.json").write_text(json.dumps({"recipe": recipe}))
    trees.build(["0.33.0", "0.32.0"])
    assert built == ["0.33.0"]


def test_a_version_without_a_tree_is_refused() -> None:
    message = r"_list_releases in tools/matrix/trees.py lists, 0.11.2 to 0.33.0, got '0"
    with pytest.raises(typer.BadParameter, match=message):
        trees.parse_version("0.99.0")


def test_the_page_in_the_docs_is_that_of_the_stored_results() -> None:
    assert page.format_page(json.loads(page.STORED.read_text())) == page.PAGE.read_text()

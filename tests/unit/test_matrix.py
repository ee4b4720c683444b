"""What would let a broken matrix of vLLM versions pass; the rest shows where it runs, `make matrix`."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from tools.matrix import __main__ as matrix
from tools.matrix import page, trees
from tools.shared import PREFIX


def print_result(version: str, **result: Any) -> str:
    """Return the line that checks on some version print."""
    return PREFIX + json.dumps({"check": "engine", "vllm": version, "failures": [], **result})


def build_nothing(versions: list[str]) -> None:
    """Stand in for the building of trees."""


DIGEST_A = print_result("0.32.0+cpu", digest="a")


@pytest.mark.parametrize(
    ("lines", "failure"),
    [
        pytest.param(
            {"0.32.0": DIGEST_A, "0.31.0": print_result("0.31.0", digest="a")},
            None,
            id="all is well",
        ),
        pytest.param(
            {"0.32.0": DIGEST_A, "0.31.0": print_result("0.31.0", digest="b")},
            "Terra's ids differ",
            id="other ids",
        ),
        pytest.param(
            {"0.32.0": print_result("0.32.0+cpu", failures=["wrong"])},
            "0.32.0, engine: wrong",
            id="a failure",
        ),
        pytest.param(
            {"0.32.0": print_result("0.31.0+cpu")},
            "0.32.0, engine: ran on vLLM 0.31.0+cpu",
            id="another version",
        ),
        pytest.param(
            {"0.32.0": "no result"},
            "0.32.0, engine: ended with 3, see",
            id="no result",
        ),
    ],
)
def test_whatever_goes_wrong_is_a_failure(
    lines: dict[str, str],
    failure: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the place of the checks, processes that print these lines and end."""

    def describe(version: str) -> dict[str, Any]:
        return {"kernels": "", "transformers": "", "patches": []}

    def make_environment(version: str) -> dict[str, str]:
        return {"PYTHONPATH": str(tmp_path / version)}

    for version, line in lines.items():
        (tmp_path / version).mkdir()
        code = f"import os; print({line!r}, flush=True); os._exit(3)\n"
        (tmp_path / version / "sitecustomize.py").write_text(code)
    monkeypatch.setattr(matrix, "build", build_nothing)
    monkeypatch.setattr(matrix, "read_facts", describe)
    monkeypatch.setattr(matrix, "environment", make_environment)
    monkeypatch.setattr(matrix, "LOGS", tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        matrix.main(list(lines), checks="engine", store=tmp_path / "stored.json")
    assert exit_info.value.code == (failure is not None)
    assert (failure or "") in capsys.readouterr().out


def test_checks_of_the_ends_run_on_the_first_and_the_last_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks_of: dict[str, list[str]] = {}

    def run(version: str, checks: list[str], options: list[str]) -> dict[str, Any]:
        checks_of[version] = checks
        return {"version": version, "kernels": "", "transformers": "", "patches": 0, "checks": {}}

    monkeypatch.setattr(matrix, "build", build_nothing)
    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setattr(matrix, "LOGS", tmp_path)
    with pytest.raises(SystemExit, match="0"):
        matrix.main(["0.33.0", "0.32.0", "0.31.0"], checks="cases", ends="engine", store=tmp_path / "stored.json")
    assert checks_of == {"0.33.0": ["cases", "engine"], "0.32.0": ["cases"], "0.31.0": ["cases", "engine"]}


def test_a_tree_of_another_recipe_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions: list[str] = []

    def build(release: Any) -> None:
        versions.append(release.version)

    monkeypatch.setattr(trees, "FOLDER", tmp_path)
    monkeypatch.setattr(trees, "_build", build)
    for version, recipe in {"0.32.0": trees.RELEASES["0.32.0"].recipe, "0.33.0": ""}.items():
        (tmp_path / version).mkdir()
        (tmp_path / version / "tree.json").write_text(json.dumps({"recipe": recipe}))
    trees.build(["0.33.0", "0.32.0"])
    assert versions == ["0.33.0"]


def test_a_version_without_a_tree_is_refused() -> None:
    message = r"_list_releases in tools/matrix/trees.py lists, 0.11.2 to 0.33.0, got '0"
    with pytest.raises(typer.BadParameter, match=message):
        trees.parse_version("0.99.0")


def test_the_page_in_the_docs_is_that_of_the_stored_results() -> None:
    assert page.format_page(json.loads(page.STORED.read_text())) == page.PAGE.read_text()

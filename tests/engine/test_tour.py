"""The notebook of the docs, executed as it is."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs" / "tour.ipynb"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each code cell says: text, or the picture's source."""
    notebook = nbformat.read(TOUR, as_version=4)
    with pytest.MonkeyPatch.context() as env:
        env.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        env.delenv("MMKIT_MODULES", raising=False)
        where = {"metadata": {"path": str(tmp_path_factory.mktemp("tour"))}}
        NotebookClient(notebook, timeout=280, kernel_name="python3", resources=where).execute()  # raises if a cell does
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(
            out.get("text", "") or out.get("data", {}).get("image/svg+xml", "")
            for out in cell.outputs
            if out.get("name") != "stderr"
        )
        for cell in cells
    ]


def test_the_notebook_has_no_outputs_in_git() -> None:
    cells = nbformat.read(TOUR, as_version=4).cells
    assert 12 <= len(cells) <= 24
    assert not any(cell.outputs for cell in cells if cell.cell_type == "code")


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_every_cell_says_what_the_text_promises(outputs: list[str]) -> None:
    _, declared, picture, plan, held, broken, ran, refused, source, ejected = outputs
    assert declared.startswith("ModelSpec('terra', Modality('actions'")
    assert "<svg" in picture
    assert "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3). Send one tensor per item." in plan
    assert held.count("holds") == 6
    assert "violated" not in held
    assert "L5 independence" in broken
    assert broken.count("violated") == 2
    assert "tokens right: 100%" in ran
    assert "actions turned round: 100%" not in ran
    assert "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3)." in refused
    assert "the next request: 100%" in refused
    assert "class TerraProcessor" in source
    assert "imports mmkit: False" in ejected
    assert "Processor" in ejected

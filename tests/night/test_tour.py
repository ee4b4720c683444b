"""The notebook of the docs, cell by cell, in this process."""

import ast
import io
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.terra import register
from tests.engine.processes import engines_in_this_process

NOTEBOOK = json.loads((Path(__file__).parents[2] / "docs" / "tour.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def shown(source: str, namespace: dict[str, Any]) -> str:
    """What a cell prints, or the picture that is its last expression."""
    cell = ast.parse(source)
    last = cell.body.pop() if isinstance(cell.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(cell, "<cell>", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    return printed.getvalue() or getattr(value, "data", "")


@pytest.fixture
def engines() -> Iterator[ExitStack]:
    register()
    with engines_in_this_process() as stack:
        yield stack


def test_every_cell_says_what_the_text_promises(engines: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    class LLM(vllm.LLM):
        """Ends when the other engines of this process do."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, enforce_eager=True)
            engines.callback(self.llm_engine.engine_core.shutdown)

    monkeypatch.setattr("vllm.LLM", LLM)
    module = ModuleType("tour")
    monkeypatch.setitem(sys.modules, "tour", module)
    outputs = [shown("".join(cell["source"]), vars(module)) for cell in CELLS]
    assert not any(cell["outputs"] for cell in CELLS)  # in git
    _, declared, picture, plan, held, broken, ran, refused, source = outputs
    assert declared.startswith("ModelSpec('terra', Modality('actions'")
    assert "<svg" in picture
    assert "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3)." in plan
    assert "6 held, 0 violated" in held
    assert "independence" in broken
    assert ", 2 violated" in broken
    assert "tokens right: 100%" in ran
    assert "actions turned round: 100%" not in ran
    assert "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3)." in refused
    assert "the next request: 100%" in refused
    assert "class TerraProcessor" in source

"""The kit as a plugin author uses it: one call, a decorator, or a pytest option; and on processors that are unlike what
mmkit generates: each law ends in a verdict, and none in an error of the kit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import testing
from mmkit.testing import ImageSample, Subject
from tests.oracles import SYSTEMS, hand_written

Started = Callable[..., tuple[int, str]]


@pytest.fixture
def start_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Started:
    """Exit code and output of pytest in an empty folder; in this process, which has vLLM already."""

    def start(*arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        code = pytest.main([*arguments, "-p", "no:cacheprovider", "-p", "no:faulthandler"])
        return code, "".join(capfd.readouterr())

    return start


def test_a_report_tells_what_does_not_apply() -> None:
    """docs/reference/testing.md shows the rest of it."""
    report = testing.check(TERRA, CHECKPOINT, laws=["ranges", "text", "safety"], examples=4)
    assert [result.status for result in report.results] == ["holds", "not applicable", "not applicable"]
    assert "  not applicable: needs the model: say model=True\n  1 held, 0 violated, 2 neither" in str(report)


def test_parametrize(tmp_path: Path, start_pytest: Started) -> None:
    """One test per law with its name as id; an expected failure that does not fail is one."""
    test = tmp_path / "test_laws.py"
    test.write_text(f"""
import mmkit.testing
from examples.terra.spec import TERRA

@mmkit.testing.parametrize(TERRA, {str(CHECKPOINT)!r}, examples=4, expected={{"cache": "a reason"}})
def test_laws(check):
    check()
""")
    code, output = start_pytest(str(test), "-v", "-rA", "-k", "ranges or cache or text")
    assert code == 1, output
    assert "PASSED" in output
    assert "test_laws[ranges]" in output
    assert re.search(r"test_laws\[cache\] _+\n\[XPASS\(strict\)\] a reason", output), output
    assert re.search(r"1 failed, 1 passed, 1 skipped, \d+ deselected", output), output


def test_a_broken_kit_is_an_error_that_no_xfail_takes(tmp_path: Path, start_pytest: Started) -> None:
    test = tmp_path / "test_broken.py"
    test.write_text("""
import pytest
import mmkit.testing

@pytest.mark.xfail
def test_broken():
    raise mmkit.testing.KitError("broken")
""")
    code, output = start_pytest(str(test), "-q")
    assert code == 1
    assert "1 error in" in output
    assert "xfailed" not in output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["examples.terra.spec:TERRA"], "ERROR: --mmkit: expected --mmkit-model DIR beside it, got none."),
        (["json:loads", "--mmkit-model", str(CHECKPOINT)], "json:loads: expected a ModelSpec, got a function."),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: list[str], sentence: str, start_pytest: Started) -> None:
    code, output = start_pytest("--mmkit", *options)
    assert code != 0
    assert sentence in output.splitlines()


def test_the_plugin_costs_other_test_runs_nothing() -> None:
    """pytest imports it at every start."""
    code = "import sys, pytest_mmkit; print(sorted({'torch', 'vllm', 'mmkit'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- processors unlike those of mmkit ----------------------------------------------------------------------------------


def breaking(image: torch.Tensor) -> torch.Tensor:
    """A mistake: it cannot read what begins brightly."""
    if image[0, 0, 0] > 0:
        raise RuntimeError("too bright")
    return image


FOREIGN: dict[str, tuple[Any, dict[str, str]]] = {
    # vLLM's LLaVA expands an expanded prompt again
    "numpy arrays as fields": (
        lambda images: [*map(np.asarray, images)],
        {"ranges": "holds$", "independence": "holds$", "round_trip": "holds$", "idempotence": r"violated: \d+ ids be"},
    ),
    "one-shot iterators": (
        lambda images: [iter(image) for image in images],
        {
            "ranges": "holds$",
            "round_trip": "violated: .*: a one-shot iterator, which caches and batches read more than once",
        },
    ),
    "an exception of the processor": (
        lambda images: [*map(breaking, images)],
        {"ranges": r"violated: RuntimeError: too bright\n +in the processing of image: \[ImageSample\("},
    ),
}
"""Of each: the values of its field, made of the right ones, and what the laws say."""


@pytest.mark.parametrize("name", FOREIGN)
def test_verdicts(name: str) -> None:
    """vLLM's own LLaVA, whose pixels are others."""
    values, said = FOREIGN[name]
    theirs = hand_written("llava")

    class Foreign(type(theirs)):
        def _apply_hf_processor_main(self, *given: Any, **named: Any) -> Any:
            done = super()._apply_hf_processor_main(*given, **named)
            if "pixel_values" in done:
                done["pixel_values"] = values(list(done["pixel_values"]))
            return done

    images = st.builds(ImageSample, st.integers(0, 3), st.integers(1, 60), st.integers(1, 60))
    foreign = Foreign(theirs.info, theirs.dummy_inputs)
    subject = Subject(foreign, {"image": images}, model_dir=SYSTEMS["llava"].checkpoint)
    report = testing.check(subject, examples=10)
    assert not report, "a law is violated"
    results = {result.law: result for result in report.results}
    assert all(result.status != "kit error" for result in results.values()), results
    for law, pattern in said.items():
        assert re.match(pattern, results[law].sentence), results[law]

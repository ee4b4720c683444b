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

# runs pytest with some arguments, and returns its exit code and its output
RunPytest = Callable[..., tuple[int, str]]


@pytest.fixture
def run_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> RunPytest:
    """Return a function that runs pytest in an empty folder, in this process, which has vLLM already."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        code = pytest.main([*arguments, "-p", "no:cacheprovider", "-p", "no:faulthandler"])
        output = capfd.readouterr()
        return code, output.out + output.err

    return run


def test_a_report_tells_what_does_not_apply() -> None:
    """docs/reference/testing.md shows the rest of it."""
    report = testing.check(TERRA, CHECKPOINT, laws=["ranges", "text", "safety"], examples=4)
    assert [result.status for result in report.results] == ["holds", "not applicable", "not applicable"]
    assert "  not applicable: needs the model: say model=True\n  1 held, 0 violated, 2 neither" in str(report)


def test_the_decorator_makes_a_test_of_each_law_and_strict_xfails(tmp_path: Path, run_pytest: RunPytest) -> None:
    test = tmp_path / "test_laws.py"
    test.write_text(f"""
import mmkit.testing
from examples.terra.spec import TERRA

@mmkit.testing.parametrize(TERRA, {str(CHECKPOINT)!r}, examples=4, expected={{"cache": "a reason"}})
def test_laws(check):
    check()
""")
    code, output = run_pytest(str(test), "-v", "-rA", "-k", "ranges or cache or text")
    assert code == 1, output
    assert "PASSED" in output
    assert "test_laws[ranges]" in output
    assert re.search(r"test_laws\[cache\] _+\n\[XPASS\(strict\)\] a reason", output), output
    assert re.search(r"1 failed, 1 passed, 1 skipped, \d+ deselected", output), output


def test_a_broken_kit_is_an_error_that_no_xfail_takes(tmp_path: Path, run_pytest: RunPytest) -> None:
    test = tmp_path / "test_broken.py"
    test.write_text("""
import pytest
import mmkit.testing

@pytest.mark.xfail
def test_broken():
    raise mmkit.testing.KitError("broken")
""")
    code, output = run_pytest(str(test), "-q")
    assert code == 1
    assert "1 error in" in output
    assert "xfailed" not in output


def test_the_option_without_a_folder_is_refused_in_one_sentence(run_pytest: RunPytest) -> None:
    code, output = run_pytest("--mmkit", "examples.terra.spec:TERRA")
    assert code != 0
    assert "ERROR: --mmkit: expected --mmkit-model DIR beside it, got none." in output.splitlines()


def test_what_is_no_spec_is_refused_in_one_sentence(run_pytest: RunPytest) -> None:
    code, output = run_pytest("--mmkit", "json:loads", "--mmkit-model", str(CHECKPOINT))
    assert code != 0
    assert "json:loads: expected a ModelSpec, got a function." in output.splitlines()


def test_a_processor_of_whose_items_nothing_is_drawn_is_refused(run_pytest: RunPytest) -> None:
    code, output = run_pytest("--mmkit", "registered", "--mmkit-model", str(CHECKPOINT))
    assert code == pytest.ExitCode.INTERRUPTED
    refusal = f"{CHECKPOINT}: expected a strategy for items of actions, got none. "
    assert refusal in output
    assert "pass --samples MODULE:FUNCTION (to pytest, --mmkit-samples)." in output


def test_a_modality_of_which_nothing_is_drawn_is_shown_as_skipped(
    run_pytest: RunPytest, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = st.builds(ImageSample, st.integers(0, 3), st.integers(20, 60), st.integers(20, 60))
    monkeypatch.setattr("mmkit.testing.subject.items_of_vllm", lambda: {"image": images})
    folder = SYSTEMS["qwen2_vl"].checkpoint
    arguments = ("--mmkit", "registered", "--mmkit-model", str(folder), "--mmkit-examples", "3")
    code, output = run_pytest(*arguments, "-rs", "-k", "ranges or items")
    assert code == 0, output
    assert "1 passed, 1 skipped" in output
    assert "items of video: no strategy for them. " in output


def test_the_plugin_costs_other_test_runs_nothing() -> None:
    """Importing it, as pytest does at every start, imports none of the heavy modules."""
    code = "import sys, pytest_mmkit; print(sorted({'torch', 'vllm', 'mmkit'} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


# -- processors unlike those of mmkit ----------------------------------------------------------------------------------

Values = Callable[[list[torch.Tensor]], list[Any]]


def check_llava(change_pixels: Values) -> dict[str, str]:
    """Check vLLM's own LLaVA with other pixels, and return the sentence of each law.

    Args:
        change_pixels: a function of the pixels of all items.
    """
    correct = hand_written("llava")

    class Foreign(type(correct)):
        def _apply_hf_processor_main(self, *arguments: Any, **options: Any) -> Any:
            result = super()._apply_hf_processor_main(*arguments, **options)
            if "pixel_values" in result:
                result["pixel_values"] = change_pixels(list(result["pixel_values"]))
            return result

    images = st.builds(ImageSample, st.integers(0, 3), st.integers(1, 60), st.integers(1, 60))
    foreign = Foreign(correct.info, correct.dummy_inputs)
    subject = Subject(foreign, {"image": images}, model_dir=SYSTEMS["llava"].checkpoint)
    report = testing.check(subject, examples=10)
    assert not report, "a law is violated"
    for result in report.results:
        assert result.status != "kit error", result
    return {result.law: result.sentence for result in report.results}


def test_numpy_arrays_may_be_fields() -> None:
    def make_arrays(images: list[torch.Tensor]) -> list[Any]:
        return [np.asarray(image) for image in images]

    sentences = check_llava(make_arrays)
    for law in ("ranges", "independence", "round_trip"):
        assert sentences[law] == "holds"
    # vLLM's LLaVA expands an expanded prompt again
    assert re.match(r"violated: \d+ ids be", sentences["idempotence"])


def test_one_shot_iterators_are_no_fields() -> None:
    def make_iterators(images: list[torch.Tensor]) -> list[Any]:
        return [iter(image) for image in images]

    sentences = check_llava(make_iterators)
    assert sentences["ranges"] == "holds"
    sentence = "violated: .*: a one-shot iterator, which caches and batches read more than once"
    assert re.match(sentence, sentences["round_trip"])


def test_an_exception_of_the_processor_is_a_violation_that_shows_the_items() -> None:
    def raise_at_bright_images(images: list[torch.Tensor]) -> list[Any]:
        for image in images:
            if image[0, 0, 0] > 0:
                raise RuntimeError("too bright")
        return images

    sentences = check_llava(raise_at_bright_images)
    sentence = r"violated: RuntimeError: too bright\n +in the processing of image: \[ImageSample\("
    assert re.match(sentence, sentences["ranges"])

"""The references of the examples, run by vLLM as they are: ids of transformers."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.llava_like.cases import Case
from examples.llava_like.offline import answer, engine
from examples.llava_like.reference import Reference
from examples.series.spec import WAVES
from mmkit.testing import LAWS, check
from tests import ROOT
from tests.engine.llava_like.conftest import cases, checkpoint, tokenizer
from tests.engine.one_class import copy_checkpoint
from tests.engine.processes import run_python
from tests.engine.terra.rollouts import generate, generate_by_reference, stack_episodes, start_engine
from tests.night.one_classes import register
from tests.path.planted.bug import Bug
from tests.path.planted.table import BUGS
from tests.path.test_planted_bugs import check_bug, name_bug

__all__ = ["cases", "checkpoint", "tokenizer"]

LLAVA = {"architectures": ["OneClassLlavaForConditionalGeneration"]}
TERRA = {"architectures": ["OneClassTerraForCausalLM"]}


@pytest.fixture(autouse=True)
def register_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMKIT_MODULES", "")
    register()


def answer_by_reference(reference: Reference, cases: list[Case], tokenizer: Any) -> list[list[int]]:
    answers = []
    for case in cases:
        text = case.prompt
        if not isinstance(text, str):
            text = tokenizer.decode(text, skip_special_tokens=False).removeprefix("<s>")
        answers.append(reference.answer(text, case.images))
    return answers


def test_llava_with_its_published_names_of_weights(
    checkpoint: Path, engines: ExitStack, cases: list[Case], tokenizer: Any
) -> None:
    expected = answer_by_reference(Reference(checkpoint), cases, tokenizer)
    llm = engines.enter_context(engine(checkpoint, seed=0, enforce_eager=True, hf_overrides=LLAVA))
    assert answer(llm, [case.request() for case in cases]) == expected


def test_terra_with_positions_outside_the_decoder(engines: ExitStack) -> None:
    frames, actions = stack_episodes(range(200, 202))
    terra = start_engine(engines, enforce_eager=True, hf_overrides=TERRA)
    assert np.array_equal(generate(terra, frames, actions), generate_by_reference(frames, actions))


SHARED = """
import json, sys
from examples.llava_like.cases import make_cases
from examples.llava_like.checkpoint import make_processor
from examples.llava_like.offline import answer, engine
from tests.night.one_classes import register
from tests.path.planted.bug import Bug
from tests.path.planted.table import BUGS
from tests.path.test_planted_bugs import check_bug, name_bug

if __name__ == "__main__":
    register()
    requests = [case.request() for case in make_cases(make_processor().tokenizer, 12)]
    names = {"architectures": ["OneClassLlavaForConditionalGeneration"]}
    with engine(sys.argv[1], seed=0, enforce_eager=True, tensor_parallel_size=2, hf_overrides=names) as llm:
        print(json.dumps(answer(llm, requests)))
"""


def test_layers_shared_by_two_processes(checkpoint: Path, cases: list[Case], tokenizer: Any, tmp_path: Path) -> None:
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    expected = answer_by_reference(Reference(checkpoint), cases[:12], tokenizer)
    output = run_python(str(script), str(checkpoint), PYTHONPATH=str(ROOT), VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert json.loads(output.splitlines()[-1]) == expected


def test_the_laws_hold_on_a_class_that_vllm_runs(tmp_path: Path) -> None:
    report = check(WAVES, copy_checkpoint(tmp_path / "waves"), model=True, examples=25)
    assert report, report
    held = {result.law for result in report.results if result.status == "holds"}
    assert held >= {"counts", "safety", "containment", "strangers", "logprobs"}


@pytest.mark.parametrize("bug", [bug for bug in BUGS if LAWS[bug.law].needs_engine], ids=name_bug)
def test_a_bug_is_caught(bug: Bug) -> None:
    check_bug(bug)


COMMAND = """
import sys
from mmkit.cli import main
from tests.night.one_classes import register

register()
sys.argv = ["mmkit", "check", "examples.series.spec:WAVES", "--config", sys.argv[1], "-k", "logprobs"]
main()
"""


def test_the_command_checks_log_probabilities(tmp_path: Path) -> None:
    output = run_python("-c", COMMAND, str(copy_checkpoint(tmp_path / "waves")), PYTHONPATH=str(ROOT))
    assert "logprobs PASSED" in output

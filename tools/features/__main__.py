"""Run features of vLLM on one checkpoint, by vLLM's own class and with mmkit.

``python -m tools.features --help``.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from tqdm import tqdm

from tools.shared import QUIET_VARIABLES, ROOT, format_table, run_module

from .rows import FEATURES, Feature

STORED = ROOT / "docs" / "data" / "features.json"
"""The results that docs/data/features.md shows; a run of some features changes these alone."""

SECONDS = 900
"""For one feature on one side."""

IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables of an engine in one process."""

IN_SEVERAL_PROCESSES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""Variables of an engine in several processes."""

WORDS = {
    "same": "works, the same answers",
    "differs": "differs",
    "fails": "fails with mmkit",
    "fails on both": "fails with both",
    "fails on vLLM's class alone": "works with mmkit; fails with vLLM's class",
}
"""What the page says of each verdict."""

MAX_ERROR_LENGTH = 120
"""Characters of an error in the table."""

Outcome = dict[str, Any]
"""An `answer`, or an `error`."""


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Parts of the names of features; by default all.")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Run each feature by vLLM's class and by the same model with mmkit."""
    results: dict[str, dict[str, str]] = {}
    if store and store.exists():
        results = json.loads(store.read_text())
    for feature in tqdm(find_features(names or [""]), unit="feature", disable=None):
        outcomes = {
            "vllm": run_feature(feature, use_vllm_class=True),
            "mmkit": run_feature(feature, use_vllm_class=False),
        }
        result = {"verdict": judge(outcomes["vllm"], outcomes["mmkit"])}
        for side, outcome in outcomes.items():
            if "error" in outcome:
                result[side] = outcome["error"]
        results[feature.name] = result
        tqdm.write(f"{feature.name}: {result}")
        if store:  # as it goes: all take half an hour
            store.write_text(json.dumps(results, indent=1) + "\n")
    print(format_results(results))
    verdicts = [result["verdict"] for result in results.values()]
    sys.exit("fails" in verdicts or "differs" in verdicts)


def find_features(parts: Sequence[str]) -> list[Feature]:
    """Return the features whose names have one of some parts."""
    return [feature for feature in FEATURES if any(part in feature.name for part in parts)]


def run_feature(feature: Feature, *, use_vllm_class: bool) -> Outcome:
    """Run one side of a feature in a process of its own, which it may take down."""
    variables = IN_SEVERAL_PROCESSES if feature.processes else IN_ONE_PROCESS
    with TemporaryDirectory() as folder:
        module = ["tools.features.rows", feature.name, folder]
        if use_vllm_class:
            module.append("--use-vllm-class")
        results, ending = run_module(
            *module,
            log=Path("out", "features.log"),
            seconds=SECONDS,
            variables=QUIET_VARIABLES | variables,
        )
    if results:
        return results[0]
    return {"error": ending}


def judge(vllm: Outcome, mmkit: Outcome) -> str:
    """Return the verdict on two outcomes."""
    if "error" in vllm and "error" in mmkit:
        return "fails on both"
    if "error" in vllm:
        return "fails on vLLM's class alone"
    if "error" in mmkit:
        return "fails"
    if vllm["answer"] != mmkit["answer"]:
        return "differs"
    return "same"


def format_results(results: dict[str, dict[str, str]]) -> str:
    """Return the table of the page."""
    rows = []
    for name, result in results.items():
        error = result.get("vllm", "").strip().partition("\n")[0]
        rows.append((name, WORDS[result["verdict"]], error[:MAX_ERROR_LENGTH]))
    return format_table(("feature", "result", "what vLLM's class ends with"), rows)


if __name__ == "__main__":
    typer.run(main)

"""Run features of vLLM on one checkpoint, by vLLM's own class and with mmkit:
``python -m tools.features --help``."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from tqdm import tqdm

from tools.shared import QUIET, ROOT, told
from tools.shared import table as markdown

from .rows import FEATURES, Feature

STORED = ROOT / "docs" / "data" / "features.json"
"""The results that docs/data/features.md shows; a run of some features changes these alone."""

SECONDS = 900
ALONE, SEVERAL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""Variables of an engine in one process, and of one in several."""

Outcome = dict[str, Any]
"""An `answer`, or an `error`."""


def outcome(feature: Feature, own: bool) -> Outcome:
    """What one side makes of a feature, in a process of its own, which it may take down."""
    variables = QUIET | (SEVERAL if feature.processes else ALONE)
    with TemporaryDirectory() as folder:
        words = ("tools.features.rows", feature.name, folder, *(["--own"] if own else []))
        log = Path("out", "features.log")
        results, ended = told(*words, log=log, seconds=SECONDS, variables=variables)
    return results[0] if results else {"error": ended}


def verdict(theirs: Outcome, ours: Outcome) -> str:
    """A word for two outcomes."""
    if "error" in theirs:
        return "fails on both" if "error" in ours else "fails on vLLM's class alone"
    if "error" in ours:
        return "fails"
    return "same" if theirs["answer"] == ours["answer"] else "differs"


WORDS = {
    "same": "works, the same answers",
    "differs": "differs",
    "fails": "fails with mmkit",
    "fails on both": "fails with both",
    "fails on vLLM's class alone": "works with mmkit; fails with vLLM's class",
}


def table(results: dict[str, dict[str, str]]) -> str:
    """The table of the page."""
    rows = [
        (name, WORDS[got["verdict"]], got.get("vllm", "").strip().partition("\n")[0][:120])
        for name, got in results.items()
    ]
    return markdown(("feature", "result", "what vLLM's class ends with"), rows)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Parts of the names of features; by default all.")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Run each feature by vLLM's class and by the same model with mmkit."""
    results = json.loads(store.read_text()) if store and store.exists() else {}
    chosen = [feature for feature in FEATURES if any(n in feature.name for n in names or [""])]
    for feature in tqdm(chosen, unit="feature", disable=None):
        sides = {"vllm": outcome(feature, True), "mmkit": outcome(feature, False)}
        errors = {side: got["error"] for side, got in sides.items() if "error" in got}
        results[feature.name] = {"verdict": verdict(*sides.values()), **errors}
        tqdm.write(f"{feature.name}: {results[feature.name]}")
        if store:  # as it goes: all take half an hour
            store.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    wrong = [name for name, got in results.items() if got["verdict"] in ("fails", "differs")]
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)

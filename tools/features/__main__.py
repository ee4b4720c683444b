"""Run features of vLLM on one checkpoint, by vLLM's own class and with mmkit:
``python -m tools.features --help``."""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer
from tqdm import tqdm

from .rows import FEATURES, Feature, tell

STORED = Path(__file__).parents[2] / "docs" / "data" / "features.json"
"""The results that docs/data/features.md shows; a run of some features changes these alone."""

SECONDS = 900
VARIABLES = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
ALONE, SEVERAL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""Variables of an engine in one process, and of one in several."""

Outcome = dict[str, Any]
"""An `answer`, or an `error`."""


def outcome(feature: Feature, own: bool) -> Outcome:
    """What one side makes of a feature, in a process of its own, which it may take down."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    variables = VARIABLES | (SEVERAL if feature.processes else ALONE)
    with mock.patch.dict(os.environ, variables):
        process = context.Process(target=tell, args=(sender, feature.name, own))
        process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(SECONDS) else {"error": f"none in {SECONDS} s"}
    except EOFError:
        process.join()
        return {"error": f"ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


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
    lines = ["| feature | result | what vLLM's class ends with |", "| --- | --- | --- |"]
    for name, got in results.items():
        said = got.get("vllm", "").strip().splitlines()
        lines.append(f"| {name} | {WORDS[got['verdict']]} | {said[0][:120] if said else ''} |")
    return "\n".join(lines)


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

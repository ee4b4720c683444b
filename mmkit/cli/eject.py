"""``mmkit eject``: a copy of mmkit inside a package, which then needs no mmkit."""

from __future__ import annotations

from ..eject import eject
from .common import find_in_working_directory, plural


def command(package: str) -> None:
    """Copy what a package needs of mmkit into it, and print what was written.

    Args:
        package: dotted name; one in the working directory is found, too.

    Raises:
        MmkitError: see `mmkit.eject.eject`.
    """
    find_in_working_directory()
    *modules, copy = eject(package)
    count = plural(len(modules), "module")
    print(f"{copy}: what {package} needs of mmkit. Imports rewritten in {count}:")
    for module in modules:
        print(f"  {module}")

"""All planted bugs, in the order of their laws."""

from __future__ import annotations

from mmkit.testing import LAWS

from . import caching, huggingface, items, models, outlines, refusals, requests
from .bug import Bug


def list_bugs() -> list[Bug]:
    """Return the bugs of all modules; those of one law in the order in which they are written."""
    by_law: dict[str, list[Bug]] = {law: [] for law in LAWS}
    for module in (requests, items, outlines, refusals, caching, models, huggingface):
        for value in vars(module).values():
            if isinstance(value, Bug):
                by_law[value.law].append(value)
    bugs: list[Bug] = []
    for of_law in by_law.values():
        bugs += of_law
    return bugs


BUGS = list_bugs()

"""The places for sessions, which the API servers of one address share."""

from __future__ import annotations

from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf
from pathlib import Path


class Places:
    """Numbered places, each of which one process may hold at a time. What a process holds is free
    when it ends, however it ends: a place is a lock on one byte of a file.

    Args:
        path: of the file, made where it is missing; None where no other process takes places.
    """

    def __init__(self, path: Path | None) -> None:
        # stays open: to close it would free all places
        self._file = None if path is None else path.open("ab")
        self._held: set[int] = set()

    def take(self, most: int) -> int | None:
        """The first free one of so many places; None if there is none."""
        for place in range(most):
            # locks do not keep a process from its own
            if place not in self._held and self._locked(place):
                self._held.add(place)
                return place
        return None

    def give_back(self, place: int) -> None:
        """Free a place that this process holds."""
        self._held.remove(place)
        if self._file is not None:
            lockf(self._file, LOCK_UN, 1, place)

    def _locked(self, place: int) -> bool:
        if self._file is not None:
            try:
                lockf(self._file, LOCK_EX | LOCK_NB, 1, place)
            except OSError:
                return False
        return True

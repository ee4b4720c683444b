"""Drawn values and a check of each of them, outside of a test file: the laws and comparisons."""

from __future__ import annotations

import sys
import time
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.strategies import SearchStrategy


def quiet(**options: Any) -> settings:
    """The current profile for checks that may take their time and raise one error, with other
    settings changed."""
    return settings(
        **{
            "deadline": None,
            "suppress_health_check": list(HealthCheck),
            "report_multiple_bugs": False,  # a group of them has no message; the smallest is one
            "phases": [phase for phase in settings().phases if phase is not Phase.explain],
            "verbosity": Verbosity.quiet,  # what is wrong is said by the error
            **options,
        }
    )


def for_each(values: SearchStrategy[Any], check: Callable[[Any], Any], **options: Any) -> None:
    """Call a check with drawn values, as the requests of a subject.

    Args:
        values: a strategy, as `Subject.requests()`.
        check: raises where something does not hold; its error comes from the smallest value.
        options: Hypothesis settings, as `max_examples`.
    """

    @quiet(**options)
    @given(values)
    def holds(value: Any) -> None:
        check(value)

    holds()


class OutOfTime(unittest.SkipTest):
    """The time of a law is over. Hypothesis hands a skipped test on at once, and makes nothing
    smaller."""


class Clock:
    """How long something may take, in seconds; None for no end."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.start = time.monotonic()

    def look(self) -> None:
        """Say when the time is over.

        Raises:
            OutOfTime: it is.
        """
        if self.seconds is not None and time.monotonic() - self.start >= self.seconds:
            raise OutOfTime(f"cut off after {self.seconds:.3g} s")


FEW = 20
"""A law that says something about fewer than one in so many drawn requests says too little.

Hypothesis' own health checks look at the first fifty draws and at a clock, which is the processor's
here, so they are off; this share is of all draws.
"""


@dataclass
class Tally:
    """How many requests were drawn, and about how many of them a law said something.

    Attributes:
        clock: how long the law may draw.
        drawn: draws that were begun.
        said: those on which the law held.
        failure: what the law raised last.
    """

    clock: Clock
    drawn: int = 0
    said: int = 0
    failure: Exception | None = None

    def once(self, check: Callable[[], Any]) -> None:
        """Call a check, which may reject what it draws, then look at the clock: Hypothesis wants
        that what was drawn once is drawn again."""
        self.drawn += 1
        try:
            check()
        except AssertionError as error:
            self.failure = error
            raise
        except UnsatisfiedAssumption:
            self.clock.look()
            raise
        self.said += 1
        self.clock.look()

    def started(self, machine: Callable[[], Any]) -> Any:
        """A state machine that is begun anew for each example."""

        def start() -> Any:
            self.drawn += 1
            self.said += 1
            begun = machine()
            begun.teardown = self._ended
            return begun

        return start

    def _ended(self) -> None:
        """The end of a state machine, which a failure may have brought."""
        match sys.exception():
            case None:
                self.clock.look()
            case AssertionError() as error:
                self.failure = error

    @property
    def few(self) -> bool:
        """Whether the law said something about too few of the draws."""
        return self.said * FEW < self.drawn

    @property
    def nothing(self) -> str:
        """That it said nothing about any."""
        of = f"none of {self.drawn} drawn requests is one" if self.drawn else "no request was found"
        return f"{of} about which this law says anything"

"""Checks of drawn values outside a test file, for laws and comparisons."""

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
    """The settings of the current profile for checks that may be slow and raise one error, with
    some settings changed."""
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
    """Call a check with drawn values, for example the requests of a subject.

    Args:
        values: a strategy, for example `Subject.requests()`.
        check: a function that raises where a value fails; the final error is that of the smallest
            failing value.
        options: Hypothesis settings, for example `max_examples`.
    """

    @quiet(**options)
    @given(values)
    def holds(value: Any) -> None:
        check(value)

    holds()


class OutOfTime(unittest.SkipTest):
    """The time of a law is over. Hypothesis passes a skipped test on at once, without shrinking."""


class Clock:
    """A time limit in seconds; None for no limit."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.start = time.monotonic()

    def look(self) -> None:
        """Check the time limit.

        Raises:
            OutOfTime: the time is over.
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
    """The number of drawn requests, and of those about which a law said something.

    Attributes:
        clock: the time limit of the law.
        drawn: number of draws that were begun.
        said: number of draws on which the law held.
        failure: the error that the law raised last.
    """

    clock: Clock
    drawn: int = 0
    said: int = 0
    failure: Exception | None = None

    def once(self, check: Callable[[], Any]) -> None:
        """Call a check, which may reject its draw, and look at the clock afterwards: Hypothesis
        needs a repeated draw to behave like the first."""
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
        """The end of a state machine, perhaps by a failure."""
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
        """The sentence for a law that said nothing about any request."""
        of = f"none of {self.drawn} drawn requests is one" if self.drawn else "no request was found"
        return f"{of} about which this law says anything"

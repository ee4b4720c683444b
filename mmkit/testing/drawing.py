"""Checks of drawn values outside a test file, for laws and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.strategies import SearchStrategy


def for_each(values: SearchStrategy[Any], check: Callable[[Any], Any], **options: Any) -> None:
    """Call a check with drawn values, for example the requests of a subject.

    The settings are those of the current profile, but that a check may be slow, and raises one
    error.

    Args:
        values: a strategy, for example `Subject.requests()`.
        check: a function that raises where a value fails; the final error is that of the smallest
            failing value.
        options: Hypothesis settings, for example `max_examples`.
    """
    chosen: dict[str, Any] = {
        "deadline": None,
        "suppress_health_check": list(HealthCheck),
        "report_multiple_bugs": False,  # a group of them has no message; the smallest is one
        "phases": [phase for phase in settings().phases if phase is not Phase.explain],
        "verbosity": Verbosity.quiet,  # what is wrong is said by the error
        **options,
    }

    @settings(**chosen)
    @given(values)
    def holds(value: Any) -> None:
        check(value)

    holds()

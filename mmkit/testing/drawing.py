"""Drawn values and a check of each of them, outside of a test file: the laws and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
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

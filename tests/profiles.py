"""Hypothesis profiles. HYPOTHESIS_PROFILE selects one; a plain pytest and `make test` take `ci`.

- ci: a moderate number of examples, the same ones each time.
- thorough: ten times as many, other ones each time, and failures are kept for the next run.
- mutants: for tools/mutants.py, which wants to know whether a test fails and not why.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, settings

EXAMPLES = 100
"""The number of examples of the profile `ci`."""


def register() -> None:
    """Register the profiles and load one. A busy machine is no reason to fail."""
    slow = (HealthCheck.too_slow, HealthCheck.data_too_large)
    settings.register_profile("base", deadline=None, suppress_health_check=slow, print_blob=True)
    base = settings.get_profile("base")
    settings.register_profile("ci", base, max_examples=EXAMPLES, derandomize=True)
    settings.register_profile("thorough", base, max_examples=10 * EXAMPLES)
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", settings.get_profile("ci"), database=None, phases=phases)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "ci")


def scaled(examples: int) -> int:
    """Return a number of examples: this one under `ci`, in proportion more under other profiles."""
    return max(1, examples * settings().max_examples // EXAMPLES)


@contextmanager
def profile(**options: Any) -> Iterator[None]:
    """Change some settings of the current Hypothesis profile; no failures are stored for the next run."""
    before = settings.get_current_profile_name()
    options.setdefault("database", None)
    settings.register_profile("changed", settings(), **options)
    settings.load_profile("changed")
    try:
        yield
    finally:
        settings.load_profile(before)

"""The property-based suite: mmkit against the laws, and the laws against planted bugs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import settings


def scaled(examples: int) -> int:
    """As many examples as the current profile has for a test that takes so many of the 300 of `ci`."""
    return max(1, examples * settings().max_examples // 300)


@contextmanager
def profile(**options: Any) -> Iterator[None]:
    """The current Hypothesis profile with some settings changed, and no failures kept for the next run."""
    before = settings.get_current_profile_name()
    settings.register_profile("changed", settings(), **{"database": None, **options})
    settings.load_profile("changed")
    try:
        yield
    finally:
        settings.load_profile(before)

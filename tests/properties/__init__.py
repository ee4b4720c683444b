"""The property-based suite: mmkit against the laws, and the laws against planted bugs."""

from hypothesis import settings


def scaled(examples: int) -> int:
    """As many examples as the current profile has for a test that takes so many of the 300 of `ci`."""
    return max(1, examples * settings().max_examples // 300)

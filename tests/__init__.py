"""The tests, in folders by what they cost: tests/README.md says which one a new test belongs to."""

from pathlib import Path

ROOT = Path(__file__).parents[1]

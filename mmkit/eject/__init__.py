"""A spec's vLLM classes as one file of plain Python, with no dependency on mmkit."""

from .source import eject

__all__ = ["eject"]

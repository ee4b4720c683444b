"""Terra on camera frames: drives of a simulator, an image tokenizer, and a world model of both."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained world model, with its tokenizer."""

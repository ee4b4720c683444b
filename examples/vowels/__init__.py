"""A model of real recordings: nine speakers say the vowels /ae/, and a small Llama answers who speaks.

The recordings are described in RECORDINGS.md, beside this file.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained checkpoint; ``python -m examples.vowels.train examples/vowels/checkpoint`` makes it anew."""


def register() -> None:
    """Tell transformers and vLLM about the model: the plugin that vLLM runs in each process. Can be called again."""
    from mmkit import serve_transformers

    from .configuration import VowelsConfig

    serve_transformers("examples.vowels.model:VowelsForCausalLM", VowelsConfig)

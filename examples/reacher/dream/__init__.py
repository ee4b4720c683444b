"""The robot's world as a model: a picture, a state and a chunk of actions in, the picture after them out.

The answer of the model is nine ids: the places of the tip and of the discs, each one of 64 x 64, and the side to which
the elbow is bent. The output draws the picture from them, as an image tokenizer would from its codes.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained checkpoint; ``python -m examples.reacher.dream.train CHECKPOINT`` makes it anew."""


def register() -> None:
    """Tell transformers and vLLM about the model: the plugin that vLLM runs in each process. Can be called again."""
    from mmkit import serve_transformers

    from .configuration import DreamConfig

    serve_transformers("examples.reacher.dream.model:DreamForCausalLM", DreamConfig)

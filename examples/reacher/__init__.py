"""A robot from nothing: a small Llama sees an arm through two cameras, and moves it to the disc that it is told.

`examples/vla` has the shape of OpenVLA's checkpoints, which nobody trains on a laptop. This model has the same
arithmetic of actions, and is trained in two minutes on two cores.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained checkpoint; ``python -m examples.reacher.train examples/reacher/checkpoint`` makes it anew."""


def register() -> None:
    """Tell transformers and vLLM about the model: the plugin that vLLM runs in each process. Can be called again."""
    from mmkit import serve_transformers

    from .configuration import ReacherConfig

    serve_transformers("examples.reacher.model:ReacherForCausalLM", ReacherConfig)

"""A user's script: registers a model by its spec, and generates frames in an engine of several processes.

test_plugin.py runs it as a script and imports it from another one, and test_ray.py has Ray start the processes.
"""

import json
import sys
from typing import Any

import numpy as np
from transformers import AutoConfig

from examples.terra.configuration import LlamaActionConfig
from examples.terra.model import LlamaActionForCausalLM as Terra
from examples.terra.spec import TERRA

AutoConfig.register("llama_action", LlamaActionConfig, exist_ok=True)


@TERRA.register
class LlamaActionForCausalLM(Terra):
    """Under the architecture name of the checkpoint, but from this module."""


def main(model: str, tensor_parallel_size: int = 1, **options: Any) -> None:
    """Print the first two frames that follow in two held-out episodes, as JSON (streams, frames, 64)."""
    from examples.terra.rollout import VllmTerra
    from examples.terra.worlds import make_episode

    first = make_episode(0)
    second = make_episode(1)
    context = np.stack([first.frames[:3], second.frames[:3]])
    actions = np.stack([first.actions, second.actions])
    terra = VllmTerra(model, tensor_parallel_size=tensor_parallel_size, enforce_eager=True, **options)
    frames = [step.tokens for step in terra.rollout(context, actions, 2)]
    print("FRAMES", json.dumps(np.stack(frames, axis=1).tolist()))


if __name__ == "__main__":
    options = {}
    if len(sys.argv) > 3:
        options = json.loads(sys.argv[3])
    main(sys.argv[1], int(sys.argv[2]), **options)

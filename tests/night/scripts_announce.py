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

    episodes = [make_episode(seed) for seed in range(2)]
    terra = VllmTerra(model, tensor_parallel_size=tensor_parallel_size, enforce_eager=True, **options)
    context, actions = np.stack([e.frames[:3] for e in episodes]), np.stack([e.actions for e in episodes])
    steps = [step.tokens for step in terra.rollout(context, actions, 2)]
    print("FRAMES", json.dumps(np.stack(steps, axis=1).tolist()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), **json.loads("".join(sys.argv[3:]) or "{}"))

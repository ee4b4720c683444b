"""A user's script: registers a model by its spec, and generates one frame in an engine of several processes.

tests/engine/test_plugin.py runs it as a script and imports it from another.
"""

import sys

from transformers import AutoConfig

from examples.terra.configuration import LlamaActionConfig
from examples.terra.model import LlamaActionForCausalLM as Terra
from examples.terra.spec import TERRA

AutoConfig.register("llama_action", LlamaActionConfig, exist_ok=True)


@TERRA.register
class LlamaActionForCausalLM(Terra):
    """Under the architecture name of the checkpoint, but from this module."""


def main(model: str) -> None:
    """Print the first generated frame of held-out episode 0."""
    from examples.terra.rollout import VllmTerra
    from examples.terra.world import make_episode

    episode = make_episode(0)
    (step,) = VllmTerra(model).rollout(episode.frames[None, :3], episode.actions[None], 1)
    print("FRAME", step.tokens[0].tolist())


if __name__ == "__main__":
    main(sys.argv[1])

"""Let the robot act in a dream: ``python -m examples.reacher.dream --help``."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from examples.server import Server
from mmkit.serve import Client

from .. import CHECKPOINT as ROBOT_CHECKPOINT
from ..__main__ import OPTIONS
from ..environment import DreamedWorld, ReacherEnv
from ..world import DISC_RADIUS, Observations, Scenes, locate_tips, observe
from . import CHECKPOINT

FIRST_SEED = 2001
"""Of the scenes, none of which either model was trained on."""

THREADS = 8
"""Dreams at once."""


class Moment(NamedTuple):
    """One chunk of a dream.

    Attributes:
        scene: before it, as the dream has it.
        chunk_ids: the answer of the robot's model.
        actions: what it means, (STEPS, 2).
        frame_ids: the answer of the world model.
    """

    scene: Scenes
    chunk_ids: list[int]
    actions: np.ndarray
    frame_ids: list[int]


class Dream(NamedTuple):
    """One episode.

    Attributes:
        beginning: the true scene.
        moments: chunk by chunk.
        touched: whether the arm touched its disc in the dream.
    """

    beginning: Scenes
    moments: list[Moment]
    touched: bool

    def is_true(self) -> bool:
        """Tell whether the same actions lead the arm to its disc in the world itself."""
        scene = self.beginning
        for moment in self.moments:
            scene = scene.move(moment.actions[None])
        distance = np.linalg.norm(locate_tips(scene.joints) - scene.goals)
        return bool(distance < DISC_RADIUS)


def main(
    robot_checkpoint: Annotated[
        Path, typer.Option("--robot", help="Folder of a checkpoint of the robot's model.")
    ] = ROBOT_CHECKPOINT,
    world_checkpoint: Annotated[
        Path, typer.Option("--world", help="Folder of a checkpoint of the world model.")
    ] = CHECKPOINT,
    out: Annotated[Path, typer.Option(help="Where the figures and the servers' logs go.")] = Path("dream"),
    count: Annotated[int, typer.Option(min=1, help="Dreams.")] = 100,
) -> None:
    """Serve both models, let the robot act in the dream, and compare with transformers and with the world itself."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory
    out.mkdir(parents=True, exist_ok=True)
    with (
        Server(robot_checkpoint, *OPTIONS, log=out / "robot.log") as robot_server,
        Server(world_checkpoint, *OPTIONS, log=out / "dream.log") as dream_server,
        Client(robot_server.url, timeout=240) as robot_client,
        Client(dream_server.url, timeout=240) as dream_client,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        seeds = range(FIRST_SEED, FIRST_SEED + count)
        dreams = list(pool.map(lambda seed: run_dream(robot_client, dream_client, seed), seeds))
    moments = [moment for dream in dreams for moment in dream.moments]
    report = {
        "dreams": count,
        "touched": sum(dream.touched for dream in dreams),
        "touched_in_both": sum(dream.touched and dream.is_true() for dream in dreams),
        "chunks": len(moments),
        "equal_chunks": count_equal_chunks(robot_checkpoint, moments),
        "equal_frames": count_equal_frames(world_checkpoint, moments),
    }
    (out / "dream.json").write_text(json.dumps(report, indent=1) + "\n")
    print(write_lines(report))


def run_dream(robot: Client, dream: Client, seed: int) -> Dream:
    """Let the robot act in one scene, of which it sees nothing but the dream after the first picture."""
    world = DreamedWorld(dream)
    env = ReacherEnv(world)
    observation, info = env.reset(seed=seed)
    beginning = info["scene"]
    moments = []
    touched = truncated = False
    while not touched and not truncated:
        scene = info["scene"]
        items = {
            "state": [observation["observation/state"]],
            "wrist": [observation["observation/wrist_image"]],
            "scene": [observation["observation/image"]],
        }
        prompt = f"<state> <wrist> <scene> {observation['prompt']}"
        (choice,) = robot.generate(prompt, items, output="chunk", temperature=0.0).choices
        observation, _, touched, truncated, info = env.step(choice.output)
        moments.append(Moment(scene, choice.token_ids, choice.output, world.ids[-1]))
    return Dream(beginning, moments, touched)


def count_equal_chunks(checkpoint: Path, moments: list[Moment]) -> int:
    """Return how many chunks the robot's model in transformers answers with the same ids."""
    from ..__main__ import load_model

    model, processor = load_model(checkpoint)
    output = processor.plan.outputs["chunk"]
    actions = model.act(processor, stack_observations([moment.scene for moment in moments]))
    num_equal = 0
    for moment, chunk in zip(moments, actions, strict=True):
        num_equal += bool((output.decode(moment.chunk_ids) == chunk).all())
    return num_equal


def stack_observations(scenes: list[Scenes]) -> Observations:
    """Return what is observed of single scenes."""
    return observe(Scenes(*(np.concatenate(parts) for parts in zip(*scenes, strict=True))))


def count_equal_frames(checkpoint: Path, moments: list[Moment]) -> int:
    """Return how many frames the world model in transformers answers with the same ids."""
    from transformers import PreTrainedTokenizerFast

    from .model import DreamForCausalLM
    from .spec import DREAM

    model: Any = DreamForCausalLM.from_pretrained(checkpoint).eval()
    processor = DREAM.hf_processor(model.config, PreTrainedTokenizerFast.from_pretrained(checkpoint))
    observations = stack_observations([moment.scene for moment in moments])
    frames = model.imagine(processor, observations, [moment.actions for moment in moments])
    return sum(moment.frame_ids == ids for moment, ids in zip(moments, frames, strict=True))


def write_lines(report: dict[str, int]) -> str:
    """Return the result in words."""
    return (
        f"In {report['touched']} of {report['dreams']} dreams the arm touches its disc. In "
        f"{report['touched_in_both']} of these, the same actions touch it in the true world, too.\n"
        f"Of {report['chunks']} chunks of actions, {report['equal_chunks']} have the same ids in transformers; "
        f"of {report['chunks']} frames, {report['equal_frames']}."
    )


if __name__ == "__main__":
    typer.run(main)

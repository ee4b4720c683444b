"""Roll out the episodes of a dataset, by engines in Ray actors: ``python -m examples.terra.batch --help``."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from examples.batch import Row, command
from mmkit import InputError

from . import CHECKPOINT, register

if TYPE_CHECKING:
    from mmkit.plan.plan import Plan

    from .configuration import LlamaActionConfig


def main(
    episodes: Annotated[Path, typer.Argument(help="Parquet file, or a folder of them.")],
    out: Annotated[Path, typer.Argument(help="Folder for the part files.")],
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Directory of a checkpoint.")] = CHECKPOINT,
    frames: Annotated[int, typer.Option(min=1, help="Frames to generate after those of the context.")] = 22,
    batch_size: Annotated[int, typer.Option(min=1, help="Episodes that an engine rolls out at once.")] = 16,
    num_engines: Annotated[int, typer.Option(min=1, help="Engines, each in a Ray actor of its own.")] = 1,
    make_episodes: Annotated[int, typer.Option(min=0, help="First write so many example episodes.")] = 0,
) -> None:
    """Roll out every episode of a dataset with a Terra world model, greedily.

    An episode has an `id`, `context`, lists of integers (context frames, num_image_patches), and `actions`, a list of
    context + frames - 1 or more items of the modality. Its output has `tokens` (frames, num_image_patches), or an
    `error`. A run that was stopped goes on where it was.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory
    if make_episodes:
        write_episodes(episodes, make_episodes)
    from .batch import Rollouts  # by the name of its module: what belongs to __main__ would travel by value

    options = {"model": str(model.resolve()), "frames": frames}
    command(episodes, out, Rollouts, options, engines=num_engines, batch_size=batch_size)


class Rollouts:
    """An engine that rolls out episodes: what a Ray actor holds.

    Args:
        model: directory of the checkpoint.
        frames: frames to generate.
    """

    schema = pa.schema([("tokens", pa.list_(pa.list_(pa.int32())))])

    def __init__(self, model: str, frames: int) -> None:
        from .rollout import VllmTerra
        from .spec import TERRA

        register()
        self.engine = VllmTerra(model)
        self.plan = TERRA.bind(self.engine.config)
        self.frames = frames

    def __call__(self, rows: list[Row]) -> list[Row]:
        answers: list[Row] = [{} for _ in rows]
        # by the number of context frames: a rollout has as many of each stream
        groups: dict[int, dict[int, Start]] = {}
        for i, row in enumerate(rows):
            try:
                start = read_episode(row, self.plan, self.engine.config, self.frames)
            except InputError as error:
                answers[i] = {"error": str(error)}
            else:
                groups.setdefault(len(start.context), {})[i] = start
        for starts in groups.values():
            context = np.stack([start.context for start in starts.values()])
            actions = np.stack([start.actions for start in starts.values()])
            steps = self.engine.rollout(context, actions, self.frames)
            tokens = np.stack([step.tokens for step in steps], axis=1)
            for i, generated in zip(starts, tokens, strict=True):
                answers[i] = {"tokens": generated.tolist()}
        return answers


class Start(NamedTuple):
    """An episode that the engine will take.

    Attributes:
        context: int64 (context frames, num_image_patches).
        actions: float32 (context + frames - 1, num_action_tokens, action_dim).
    """

    context: np.ndarray
    actions: np.ndarray


def read_episode(row: Row, plan: "Plan", config: "LlamaActionConfig", frames: int) -> Start:
    """Return the episode of a row.

    Args:
        row: its `context` and `actions`.
        plan: Terra's spec, bound to the config.
        config: of the checkpoint.
        frames: frames to generate.

    Raises:
        InputError: the episode cannot be used.
    """
    context = row.get("context") or []
    actions = row.get("actions") or []
    wrong_sizes = {len(frame) for frame in context} - {config.num_image_patches}
    if wrong_sizes:
        raise InputError("context", f"frames of {config.num_image_patches} ids", f"one of {min(wrong_sizes)}")
    most = config.num_temporal_embeddings - frames
    if not 1 <= len(context) <= most:
        raise InputError(
            "context",
            f"1 to {most} frames, as the model holds {config.num_temporal_embeddings} with the {frames} to generate",
            str(len(context)),
        )
    num_actions = len(context) + frames - 1
    if len(actions) < num_actions:
        raise InputError("actions", f"{num_actions} or more, one after every frame but the last", str(len(actions)))
    actions = actions[:num_actions]
    # what the last request will send, but for the frames that are not there yet
    placeholders = [config.pad_token_id] * config.num_action_tokens
    prompt: list[int] = []
    for frame in context:
        prompt += list(frame) + placeholders
    prompt += placeholders * (num_actions - len(context))
    plan.preview(prompt, {"actions": list(actions)})
    return Start(np.array(context, dtype=np.int64), np.array(actions, dtype=np.float32))


def write_episodes(path: Path, count: int) -> None:
    """Write held-out episodes of the town."""
    from .worlds import CONTEXT_FRAMES, make_episode

    episodes = [make_episode(seed) for seed in range(count)]
    columns: dict[str, Any] = {
        "id": range(count),
        "context": [episode.frames[:CONTEXT_FRAMES].tolist() for episode in episodes],
        "actions": [episode.actions.tolist() for episode in episodes],
    }
    pq.write_table(pa.table(columns), path)


if __name__ == "__main__":
    typer.run(main)

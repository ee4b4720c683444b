"""Train a robot, serve it, and let openpi's client drive it: ``python -m examples.reacher --help``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from examples.server import Server

from .world import MAX_DELTA, STEPS, Episodes, Scenes, draw_scenes, observe, plan_as_expert, run_episodes

SEEDS = (1001, 1002, 1003)
"""Of the scenes in which the model is judged."""
OPTIONS = ("--dtype", "float32", "--max-model-len", "64", "--enforce-eager")
OPENPI = Path(os.environ.get("MMKIT_OPENPI") or Path(sys.prefix, "openpi"), "bin", "python")
"""The interpreter of the environment with openpi's client; ``make openpi`` makes it."""


def main(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Folder of a checkpoint; by default one is trained, in two minutes.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the film, the table and the figures go.")] = Path("robot"),
    count: Annotated[int, typer.Option(min=30, help="Scenes of each of three seeds.")] = 300,
) -> None:
    """Judge a robot in scenes that it was not trained on, beside an expert and random actions."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory

    from .film import choose_scenes, write_film
    from .report import write_line, write_table

    out.mkdir(parents=True, exist_ok=True)
    if checkpoint is None:
        checkpoint = out / "checkpoint"
        subprocess.run([sys.executable, "-m", "examples.reacher.train", checkpoint], check=True)
    drive(checkpoint, out, count)
    results = []
    for seed in SEEDS:
        results.append(compare(checkpoint, seed, read_episodes(out, seed), count))
    scenes = draw_scenes(np.random.default_rng(SEEDS[0]), count)
    episodes = read_episodes(out, SEEDS[0])
    chosen = choose_scenes(scenes, episodes)
    write_film(out / "robot.gif", scenes.select(chosen), episodes.select(chosen))
    (out / "robot.json").write_text(json.dumps([result._asdict() for result in results], indent=1) + "\n")
    (out / "robot.md").write_text(write_table(results))
    print(write_table(results))
    print(write_line(results))
    print(f"written: {out}")


def drive(checkpoint: Path, out: Path, count: int) -> None:
    """Serve a checkpoint, and let openpi's client drive it; it writes a file for each seed."""
    with Server(checkpoint, *OPTIONS, log=out / "server.log") as server:
        command = [OPENPI, "-m", "examples.reacher.robots", f"ws://127.0.0.1:{server.port}"]
        command += ["--count", str(count), "--out", out.absolute(), "--seeds", *map(str, SEEDS)]
        environment = dict(os.environ)
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])  # nothing of this environment
        subprocess.run(command, env=environment, check=True)


def read_episodes(out: Path, seed: int) -> Episodes:
    """Return what became of the scenes of a seed."""
    with np.load(out / f"{seed}.npz") as arrays:
        return Episodes(**arrays)


def compare(checkpoint: Path, seed: int, episodes: Episodes, count: int) -> Any:
    """Return the result of a seed: what became of its scenes by server, transformers, expert and chance."""
    from .report import Result

    scenes = draw_scenes(np.random.default_rng(seed), count)
    in_transformers = run_episodes(scenes, load_planner(checkpoint))
    rng = np.random.default_rng(seed)

    def plan_by_chance(scenes: Scenes) -> np.ndarray:
        return rng.uniform(-MAX_DELTA, MAX_DELTA, (len(scenes.joints), STEPS, 2))

    is_equal = np.isclose(episodes.actions, in_transformers.actions, rtol=0, atol=1e-9, equal_nan=True)
    return Result(
        seed=seed,
        scenes=count,
        policy=int(episodes.touched.sum()),
        transformers=int(in_transformers.touched.sum()),
        equal=int(is_equal.all((1, 2, 3)).sum()),
        expert=int(run_episodes(scenes, plan_as_expert).touched.sum()),
        random=int(run_episodes(scenes, plan_by_chance).touched.sum()),
    )


def load_planner(checkpoint: Path) -> Any:
    """Return what asks a model in transformers for the next chunks of scenes."""
    model, processor = load_model(checkpoint)

    def plan(scenes: Scenes) -> np.ndarray:
        return model.act(processor, observe(scenes))  # type: ignore[no-any-return]

    return plan


def load_model(checkpoint: Path) -> tuple[Any, Any]:
    """Return the model of a checkpoint in transformers, and its processor."""
    from transformers import PreTrainedTokenizerFast

    from .model import ReacherForCausalLM
    from .spec import REACHER

    model: Any = ReacherForCausalLM.from_pretrained(checkpoint).eval()
    return model, REACHER.hf_processor(model.config, PreTrainedTokenizerFast.from_pretrained(checkpoint))


if __name__ == "__main__":
    typer.run(main)

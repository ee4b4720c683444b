"""Roll out a directory of episodes, with Ray Data or in one process: ``python -m examples.terra.batch --help``."""

import importlib.util
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from mmkit import InputError

from . import CHECKPOINT, register

if TYPE_CHECKING:
    from mmkit.plan import Plan

    from .configuration import LlamaActionConfig

Report = dict[str, str]
"""What became of one file: its `path`, and the sentence of its `error`, empty if the output was written."""

SUFFIX = ".safetensors"
FOR_ENGINES = (
    "HF_HUB_OFFLINE", "MMKIT_MODULES", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS",
)  # fmt: skip
"""Environment variables that Ray hands to the engines, wherever these run."""


def main(
    episodes: Annotated[Path, typer.Argument(help="Directory of *.safetensors files, one per episode.")],
    out: Annotated[Path, typer.Argument(help="Directory for the outputs, one per episode, of the same names.")],
    model: Annotated[Path, typer.Option(help="Directory of a checkpoint.")] = CHECKPOINT,
    frames: Annotated[int, typer.Option(min=1, help="Frames to generate after those of the context.")] = 22,
    batch_size: Annotated[int, typer.Option(min=1, help="Episodes that an engine rolls out at once.")] = 16,
    num_engines: Annotated[int, typer.Option(min=1, help="Engines, each in a Ray actor of its own.")] = 1,
    ray: Annotated[
        bool, typer.Option(help="Use Ray; without it, or where it is missing, one process does all.")
    ] = True,
    make_episodes: Annotated[int, typer.Option(min=0, help="First write so many example episodes.")] = 0,
) -> None:
    """Roll out every episode of a directory with a Terra world model, greedily.

    An episode holds `context`, integers (context frames, num_image_patches), and `actions`, float32 (context + frames
    - 1 or more, num_action_tokens, action_dim). Its output holds `tokens`, int64 (frames, num_image_patches). Outputs
    that are there already are kept, so that a run which was stopped goes on where it was; another model wants another
    directory. A file that cannot be used is reported in one sentence, and the others go on.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory
    if make_episodes:
        write_episodes(episodes, range(make_episodes))
    paths = sorted(path.resolve() for path in episodes.glob("*" + SUFFIX))
    if not paths:
        raise typer.BadParameter(f"{episodes}: expected a directory of *{SUFFIX} files, got none.")
    out.mkdir(parents=True, exist_ok=True)
    todo = [path for path in paths if not is_done(out / path.name, frames)]
    with_ray = ray and importlib.util.find_spec("ray") is not None
    if num_engines > 1 and not with_ray:
        raise typer.BadParameter(
            f"--num-engines: expected 1 without Ray, got {num_engines}. Install ray[data], or leave --no-ray out."
        )
    where = f"{num_engines} Ray actor(s)" if with_ray else "this process"
    print(f"{len(paths)} episode(s), {len(paths) - len(todo)} written before; vLLM in {where}", flush=True)

    failed = 0
    options = {"model": str(model.resolve()), "frames": frames, "out": str(out.resolve())}
    reports = run_ray(todo, batch_size, num_engines, options) if with_ray else run_here(todo, batch_size, options)
    with tqdm(total=len(todo), unit="episode") as bar:
        for report in reports if todo else ():
            if report["error"]:
                failed += 1
                bar.write(report["error"])
            bar.update()
    print(f"{len(todo) - failed} written to {out}, {failed} refused")
    if failed:
        raise typer.Exit(1)


# -- the two ways to run -----------------------------------------------------------------------------------------------


def run_here(paths: Iterable[Path], batch_size: int, options: dict[str, Any]) -> Iterator[Report]:
    """Roll out in this process, batch by batch."""
    rollouts, left = Rollouts(**options), iter(map(str, paths))
    while batch := list(itertools.islice(left, batch_size)):
        for path, error in zip(batch, rollouts({"path": np.array(batch)})["error"], strict=True):
            yield {"path": path, "error": str(error)}


def run_ray(paths: list[Path], batch_size: int, num_engines: int, options: dict[str, Any]) -> Iterator[Report]:
    """Roll out in Ray actors, on this machine or on the cluster of RAY_ADDRESS, whose nodes then share the directories.

    Only paths and reports travel: an actor reads and writes its episodes itself. So Ray may run a batch again when its
    actor has died.
    """
    import ray

    from .batch import Rollouts  # by the name of its module: what belongs to __main__ would travel by value

    ray.data.DataContext.get_current().enable_progress_bars = False  # ours counts episodes
    env = {name: os.environ[name] for name in FOR_ENGINES if name in os.environ}
    ray.init(logging_level=logging.WARNING, runtime_env={"env_vars": env})
    try:
        batches = -(-len(paths) // batch_size)
        results = ray.data.from_items([{"path": str(path)} for path in paths], override_num_blocks=batches).map_batches(
            Rollouts,
            fn_constructor_kwargs=options,
            batch_size=batch_size,
            # an engine that is ready takes the next batch, none waits in a queue behind a slower one
            compute=ray.data.ActorPoolStrategy(size=min(num_engines, batches), max_tasks_in_flight_per_actor=1),
            num_cpus=1,
            num_gpus=1 if ray.cluster_resources().get("GPU") else 0,
        )
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        yield from results.iter_rows()
    finally:
        ray.shutdown()


class Rollouts:
    """An engine that rolls out batches of episode files: what a Ray actor holds.

    Args:
        model: directory of the checkpoint.
        frames: frames to generate.
        out: directory of the outputs.
    """

    def __init__(self, model: str, frames: int, out: str) -> None:
        from .rollout import VllmTerra
        from .spec import TERRA

        register()
        self.engine = VllmTerra(model)
        self.plan = TERRA.bind(self.engine.config)
        self.frames, self.out = frames, Path(out)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Roll out the files of `path`, and say of each under `error` why it was not."""
        errors = dict.fromkeys(map(str, batch["path"]), "")
        groups: dict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        for path in errors:
            try:
                context, actions = read_episode(Path(path), self.plan, self.engine.config, self.frames)
            except InputError as error:
                errors[path] = str(error)
            else:
                groups.setdefault(len(context), {})[path] = context, actions
        for episodes in groups.values():  # of as many context frames
            context, actions = map(np.stack, zip(*episodes.values(), strict=True))
            steps = self.engine.rollout(context, actions, self.frames)
            tokens = np.stack([step.tokens for step in steps], axis=1)
            for path, generated in zip(episodes, tokens, strict=True):
                write(self.out / Path(path).name, {"tokens": generated})
        return {"path": list(errors), "error": list(errors.values())}


# -- files -------------------------------------------------------------------------------------------------------------


def read_episode(path: Path, plan: "Plan", config: "LlamaActionConfig", frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Read an episode, and make sure that the engine will take it.

    Args:
        path: the file.
        plan: Terra's spec, bound to the config.
        config: of the checkpoint.
        frames: frames to generate.

    Returns:
        Context, int64 (context frames, num_image_patches), and actions, float32 (context + frames - 1,
        num_action_tokens, action_dim).

    Raises:
        InputError: the file cannot be used.
    """
    with opened(path) as file:
        missing = {"context", "actions"} - set(file.keys())
        if missing:
            raise InputError(path.name, "the tensors context and actions", f"no {' and no '.join(sorted(missing))}")
        for name, shape, dtypes in (
            ("context", ("context frames", config.num_image_patches), ("I64", "I32", "I16", "I8", "U8")),
            ("actions", ("frames", config.num_action_tokens, config.action_dim), ("F32",)),
        ):
            has = file.get_slice(name)
            if has.get_dtype() not in dtypes:
                raise InputError(f"{path.name}, {name}", f"dtype {' or '.join(dtypes)}", has.get_dtype())
            if len(has.get_shape()) != len(shape) or has.get_shape()[1:] != list(shape[1:]):
                expected = f"shape ({', '.join(map(str, shape))})"
                raise InputError(f"{path.name}, {name}", expected, str(tuple(has.get_shape())))
        context, actions = file.get_tensor("context").astype(np.int64), file.get_tensor("actions")
    most = config.num_temporal_embeddings - frames
    if not 1 <= len(context) <= most:
        raise InputError(
            f"{path.name}, context",
            f"1 to {most} frames, as the model holds {config.num_temporal_embeddings} with the {frames} to generate",
            str(len(context)),
        )
    known = len(context) + frames - 1
    if len(actions) < known:
        raise InputError(
            f"{path.name}, actions", f"{known} or more, one after every frame but the last", str(len(actions))
        )
    placeholders = [config.pad_token_id] * config.num_action_tokens
    prompt = [token for frame in context.tolist() for token in [*frame, *placeholders]]
    try:
        # what the last request will send, but for the frames that are not there yet
        plan.preview([*prompt, *placeholders * (known - len(context))], {"actions": list(actions[:known])})
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None
    return context, actions[:known]


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open for reading.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InputError(path.name, "a safetensors file", str(error).rstrip(".")) from error


def is_done(path: Path, frames: int) -> bool:
    """Whether an output with so many frames is there."""
    try:
        with opened(path) as file:
            return file.get_slice("tokens").get_shape()[0] == frames
    except InputError:
        return False


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file, which is there as a whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, unfinished)
    unfinished.replace(path)


def write_episodes(directory: Path, seeds: Iterable[int]) -> None:
    """Write held-out episodes of the road world."""
    from .world import CONTEXT_FRAMES, make_episode

    directory.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        episode = make_episode(seed)
        write(
            directory / f"episode_{seed:04}{SUFFIX}",
            {"context": episode.frames[:CONTEXT_FRAMES], "actions": episode.actions},
        )


if __name__ == "__main__":
    typer.run(main)

"""Generate a video that follows its actions: ``python -m examples.terra --help``."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import typer
from tqdm import tqdm

from . import CHECKPOINT, register
from .drafts import FRAME_TOKENS

FIGURES = {
    "persistence": "{:.1%} of the vehicles there",
    "ego_in_place": "ego vehicle in place in {:.1%} of the frames",
    "psnr_db": "{:.1f} dB PSNR",
}
"""How the figures of `TownWorld.compare` are printed."""

T = TypeVar("T")


class Result(NamedTuple):
    """What a backend generated.

    Attributes:
        tokens: (streams, frames, num_image_patches).
        figures: for the report.
    """

    tokens: np.ndarray
    figures: dict[str, Any]


def main(
    model: Annotated[Path, typer.Option(help="Directory of a checkpoint.")] = CHECKPOINT,
    frames: Annotated[int, typer.Option(min=1, help="Frames to generate after the three of the context.")] = 22,
    streams: Annotated[int, typer.Option(min=1, help="Videos to generate at once.")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Processes that share each layer.")] = 1,
    drafts: Annotated[
        int, typer.Option(min=0, help="The most tokens that vLLM drafts per step from a video's own frames.")
    ] = FRAME_TOKENS,
    seed: Annotated[int, typer.Option(min=0, help="First episode; the model was trained on none of these.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for terra.gif, .mp4, .png and .json.")] = Path("out"),
    reference: Annotated[bool, typer.Option(help="Also run the Hugging Face reference, to compare.")] = True,
    log_level: Annotated[str, typer.Option(help="vLLM's log level.", envvar="VLLM_LOGGING_LEVEL")] = "ERROR",
) -> None:
    """Roll a Terra world model out in vLLM: three context frames, then one frame per action.

    Writes a video of the ground truth and vLLM side by side as GIF and MP4, a PNG strip of both and the Hugging Face
    reference, and a JSON report.
    """
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory
    if tensor_parallel_size > 1:  # on a CPU, one core per process; elsewhere the variable is not read
        cores = "|".join(str(core) for core in range(tensor_parallel_size))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)

    from transformers import AutoConfig

    from . import worlds
    from .pictures import enlarge, save_strip, save_video
    from .worlds import CONTEXT_FRAMES

    register()
    config = AutoConfig.from_pretrained(model)
    world = worlds.load_world(config)
    most = config.num_temporal_embeddings - CONTEXT_FRAMES
    if frames > most:
        raise typer.BadParameter(
            f"--frames: expected at most {most}, what the model holds after the context, got {frames}."
        )
    if seed + streams > world.num_episodes:
        raise typer.BadParameter(
            f"--seed: expected --seed and --streams within {world.num_episodes} episodes, got {seed} and {streams}."
        )
    episodes = [world.episode(number) for number in range(seed, seed + streams)]
    context = np.stack([episode.frames[:CONTEXT_FRAMES] for episode in episodes])
    actions = np.stack([episode.actions for episode in episodes])

    results = {"vLLM": run_vllm(model, context, actions, frames, tensor_parallel_size, drafts)}
    if reference:
        results["Hugging Face"] = run_reference(model, context, actions, frames)
    report: dict[str, Any] = {"model": model.name, "frames": frames, "streams": streams, "seed": seed}
    for name, result in results.items():
        report[name] = result.figures
    if reference:
        is_identical = results["vLLM"].tokens == results["Hugging Face"].tokens
        report["identical_tokens"] = bool(is_identical.all())
    for name, result in results.items():
        comparisons = []
        for tokens, episode in zip(result.tokens, episodes, strict=True):
            comparisons.append(world.compare(tokens, CONTEXT_FRAMES, episode))
        for figure in comparisons[0]:
            report[name][figure] = float(np.mean([comparison[figure] for comparison in comparisons]))

    out.mkdir(parents=True, exist_ok=True)
    truth = episodes[0].pictures[: CONTEXT_FRAMES + frames]
    rows = {"ground truth": enlarge(truth)}
    for name, result in results.items():
        generated = world.pictures(result.tokens[0])
        rows[name] = enlarge(np.concatenate([truth[:CONTEXT_FRAMES], generated]))
    side_by_side = {"ground truth": rows["ground truth"], "vLLM": rows["vLLM"]}
    save_video(side_by_side, episodes[0].actions, out / "terra.gif", out / "terra.mp4", CONTEXT_FRAMES)
    save_strip(rows, out / "terra.png", CONTEXT_FRAMES)
    (out / "terra.json").write_text(json.dumps(report, indent=2) + "\n")
    print_report(report, list(results), out)


def run_vllm(
    model: Path, context: np.ndarray, actions: np.ndarray, frames: int, tensor_parallel_size: int, drafts: int
) -> Result:
    """Roll out in vLLM."""
    from .rollout import VllmTerra

    print("Starting vLLM, half a minute ...", flush=True)
    start = time.perf_counter()
    engine = VllmTerra(model, tensor_parallel_size=tensor_parallel_size, drafts=drafts)
    start_seconds = time.perf_counter() - start
    steps = list(show_progress(engine.rollout(context, actions, frames), frames, "vLLM"))
    tokens = np.stack([step.tokens for step in steps], axis=1)
    figures = {
        "tensor_parallel_size": tensor_parallel_size,
        "drafts": drafts,
        "start_seconds": round(start_seconds, 2),
        "seconds_per_frame": round(float(np.median([step.seconds for step in steps])), 4),
        "prompt_tokens": [step.prompt_tokens for step in steps],
        "cached_tokens": [step.cached_tokens for step in steps],
    }
    return Result(tokens, figures)


def run_reference(model: Path, context: np.ndarray, actions: np.ndarray, frames: int) -> Result:
    """Roll out in the Hugging Face reference, with its KV cache."""
    import torch

    from .reference import LlamaActionForCausalLM

    reference = LlamaActionForCausalLM.from_pretrained(model).eval()
    steps = reference.rollout(torch.from_numpy(context), torch.from_numpy(actions), frames)
    tokens = []
    seconds = []
    last = time.perf_counter()
    for frame in show_progress(steps, frames, "Hugging Face"):
        now = time.perf_counter()
        seconds.append(now - last)
        tokens.append(frame.numpy())
        last = now
    figures = {"seconds_per_frame": round(float(np.median(seconds)), 4)}
    return Result(np.stack(tokens, axis=1), figures)


def show_progress(steps: Iterable[T], total: int, name: str) -> Iterator[T]:
    """Show progress, a frame per step."""
    return iter(tqdm(steps, total=total, desc=f"{name:>12}", unit="frame"))


def print_report(report: dict[str, Any], names: list[str], out: Path) -> None:
    """Print the figures of a run."""
    for name in names:
        figures = report[name]
        facts = [f"{1 / figures['seconds_per_frame']:.1f} frames per second"]
        for figure, text in FIGURES.items():
            if figure in figures:
                facts.append(text.format(figures[figure]))
        print(f"{name:>12}: {', '.join(facts)}")
    cached = report["vLLM"]["cached_tokens"]
    prompt = report["vLLM"]["prompt_tokens"]
    if len(cached) > 1:
        share = sum(cached[1:]) / sum(prompt[1:])
        print(f"{'prefix cache':>12}: {share:.1%} of the prompt tokens after the first frame")
    if "identical_tokens" in report:
        print(f"{'same tokens':>12}: {'yes' if report['identical_tokens'] else 'NO'}")
    files = [str(out / f"terra.{suffix}") for suffix in ("gif", "mp4", "png", "json")]
    print(f"{'written':>12}: {', '.join(files)}")


if __name__ == "__main__":
    typer.run(main)

"""Generate a video that follows its actions: ``python -m examples.terra --help``."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
Result = tuple[np.ndarray, dict[str, Any]]
"""Generated tokens (streams, frames, num_image_patches), and figures for the report."""


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
        cores = "|".join(map(str, range(tensor_parallel_size)))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)

    from transformers import AutoConfig

    from . import worlds
    from .pictures import enlarged, save_strip, save_video
    from .worlds import CONTEXT_FRAMES

    register()
    config = AutoConfig.from_pretrained(model)
    world = worlds.of_config(config)
    most = config.num_temporal_embeddings - CONTEXT_FRAMES
    if frames > most:
        raise typer.BadParameter(
            f"--frames: expected at most {most}, what the model holds after the context, got {frames}."
        )
    if seed + streams > world.num_episodes:
        raise typer.BadParameter(
            f"--seed: expected --seed and --streams within {world.num_episodes} episodes, got {seed} and {streams}."
        )
    episodes = [world.episode(each) for each in range(seed, seed + streams)]
    context = np.stack([episode.frames[:CONTEXT_FRAMES] for episode in episodes])
    actions = np.stack([episode.actions for episode in episodes])

    results = {"vLLM": run_vllm(model, context, actions, frames, tensor_parallel_size, drafts)}
    if reference:
        results["Hugging Face"] = run_reference(model, context, actions, frames)
    videos = {name: tokens for name, (tokens, _) in results.items()}
    report: dict[str, Any] = {"model": model.name, "frames": frames, "streams": streams, "seed": seed}
    report |= {name: figures for name, (_, figures) in results.items()}
    if reference:
        report["identical_tokens"] = bool((videos["vLLM"] == videos["Hugging Face"]).all())
    for name, streams_tokens in videos.items():
        compared = [
            world.compare(tokens, CONTEXT_FRAMES, episode)
            for tokens, episode in zip(streams_tokens, episodes, strict=True)
        ]
        report[name] |= {figure: float(np.mean([each[figure] for each in compared])) for figure in compared[0]}

    out.mkdir(parents=True, exist_ok=True)
    shown = episodes[0].pictures[: CONTEXT_FRAMES + frames]
    pictures = {"ground truth": shown}
    for name, tokens in videos.items():
        pictures[name] = np.concatenate([shown[:CONTEXT_FRAMES], world.pictures(tokens[0])])
    rows = {name: enlarged(video) for name, video in pictures.items()}
    side_by_side = {name: rows[name] for name in ("ground truth", "vLLM")}
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
    started = time.perf_counter()
    engine = VllmTerra(model, tensor_parallel_size=tensor_parallel_size, drafts=drafts)
    start_seconds = time.perf_counter() - started
    steps = list(progress(engine.rollout(context, actions, frames), frames, "vLLM"))
    return np.stack([step.tokens for step in steps], axis=1), {
        "tensor_parallel_size": tensor_parallel_size,
        "drafts": drafts,
        "start_seconds": round(start_seconds, 2),
        "seconds_per_frame": round(float(np.median([step.seconds for step in steps])), 4),
        "prompt_tokens": [step.prompt_tokens for step in steps],
        "cached_tokens": [step.cached_tokens for step in steps],
    }


def run_reference(model: Path, context: np.ndarray, actions: np.ndarray, frames: int) -> Result:
    """The same rollout by the Hugging Face reference with its KV cache."""
    import torch

    from .reference import LlamaActionForCausalLM

    reference = LlamaActionForCausalLM.from_pretrained(model).eval()
    steps = reference.rollout(torch.from_numpy(context), torch.from_numpy(actions), frames)
    tokens, seconds, last = [], [], time.perf_counter()
    for frame in progress(steps, frames, "Hugging Face"):
        now = time.perf_counter()
        seconds.append(now - last)
        tokens.append(frame.numpy())
        last = now
    return np.stack(tokens, axis=1), {"seconds_per_frame": round(float(np.median(seconds)), 4)}


def progress(steps: Iterable[T], total: int, name: str) -> Iterator[T]:
    """Show progress, a frame per step."""
    return iter(tqdm(steps, total=total, desc=f"{name:>12}", unit="frame"))


def print_report(report: dict[str, Any], names: list[str], out: Path) -> None:
    """The figures of a run, for people."""
    for name in names:
        figures = report[name]
        facts = [f"{1 / figures['seconds_per_frame']:.1f} frames per second"]
        facts += [text.format(figures[figure]) for figure, text in FIGURES.items() if figure in figures]
        print(f"{name:>12}: {', '.join(facts)}")
    cached, prompt = report["vLLM"]["cached_tokens"], report["vLLM"]["prompt_tokens"]
    if len(cached) > 1:
        print(
            f"{'prefix cache':>12}: {sum(cached[1:]) / sum(prompt[1:]):.1%} of the prompt tokens after the first frame"
        )
    if "identical_tokens" in report:
        print(f"{'same tokens':>12}: {'yes' if report['identical_tokens'] else 'NO'}")
    files = (out / f"terra.{kind}" for kind in ("gif", "mp4", "png", "json"))
    print(f"{'written':>12}: {', '.join(map(str, files))}")


if __name__ == "__main__":
    typer.run(main)

"""Generate a video that follows its actions: ``python -m examples.terra --help``."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
import typer
from tqdm import tqdm

from . import CHECKPOINT, register
from .world import CONTEXT_FRAMES, HELD_OUT_EPISODES, NUM_TILES, TOKENS_PER_FRAME, make_episode

if TYPE_CHECKING:
    from .configuration import LlamaActionConfig

T = TypeVar("T")
Result = tuple[np.ndarray, dict[str, Any]]
"""Generated tokens (streams, frames, num_image_patches), and figures for the report."""


def main(
    model: Annotated[Path, typer.Option(help="Directory of a checkpoint.")] = CHECKPOINT,
    frames: Annotated[int, typer.Option(min=1, help="Frames to generate after the three of the context.")] = 22,
    streams: Annotated[int, typer.Option(min=1, help="Videos to generate at once.")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Processes that share each layer.")] = 1,
    drafts: Annotated[
        int, typer.Option(min=0, help="Tokens that vLLM drafts per step from a video's own history.")
    ] = 8,
    seed: Annotated[
        int,
        typer.Option(min=0, max=HELD_OUT_EPISODES - 1, help="First episode; the model was trained on none of these."),
    ] = 0,
    out: Annotated[Path, typer.Option(help="Directory for terra.gif, terra.png and terra.json.")] = Path("out"),
    reference: Annotated[bool, typer.Option(help="Also run the Hugging Face reference, to compare.")] = True,
    log_level: Annotated[str, typer.Option(help="vLLM's log level.", envvar="VLLM_LOGGING_LEVEL")] = "ERROR",
) -> None:
    """Roll a Terra world model out in vLLM: three context frames, then one frame per action.

    Writes a GIF and a PNG strip (ground truth, vLLM and the Hugging Face reference side by side) and a JSON report.
    """
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory
    if tensor_parallel_size > 1:  # on a CPU, one core per process; elsewhere the variable is not read
        cores = "|".join(map(str, range(tensor_parallel_size)))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)

    from transformers import AutoConfig

    from .pictures import frame_image, save_gif, save_strip

    register()
    config = AutoConfig.from_pretrained(model)
    most = config.num_temporal_embeddings - CONTEXT_FRAMES
    if frames > most:
        raise typer.BadParameter(
            f"--frames: expected at most {most}, what the model holds after the context, got {frames}."
        )
    truth, actions = make_data(config, range(seed, seed + streams))
    context = truth[:, :CONTEXT_FRAMES]

    results = {"vLLM": run_vllm(model, context, actions, frames, tensor_parallel_size, drafts)}
    if reference:
        results["Hugging Face"] = run_reference(model, context, actions, frames)
    videos = {name: tokens for name, (tokens, _) in results.items()}
    report: dict[str, Any] = {"model": model.name, "frames": frames, "streams": streams, "seed": seed}
    report |= {name: figures for name, (_, figures) in results.items()}
    if reference:
        report["identical_tokens"] = bool((videos["vLLM"] == videos["Hugging Face"]).all())
    if is_road_world(config):
        expected = truth[:, CONTEXT_FRAMES : CONTEXT_FRAMES + frames]
        for name, tokens in videos.items():
            report[name]["token_accuracy"] = float((tokens == expected).mean())
        videos = {"ground truth": expected, **videos}

    out.mkdir(parents=True, exist_ok=True)
    rows = {
        name: [frame_image(frame, is_road_world(config)) for frame in np.concatenate([context[0], tokens[0]])]
        for name, tokens in videos.items()
    }
    save_gif(rows, out / "terra.gif", CONTEXT_FRAMES)
    save_strip(rows, out / "terra.png", CONTEXT_FRAMES)
    (out / "terra.json").write_text(json.dumps(report, indent=2) + "\n")
    print_report(report, list(results), out)


def is_road_world(config: "LlamaActionConfig") -> bool:
    """Whether the tokens of a checkpoint are the tiles of the road world."""
    return (config.num_image_patches, config.vocab_size) == (TOKENS_PER_FRAME, NUM_TILES + 1)


def make_data(config: "LlamaActionConfig", seeds: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Frames (streams, 25, num_image_patches) and actions (streams, 24, num_action_tokens, action_dim).

    Episodes of the road world, or random ones for a checkpoint of another world.
    """
    frames, actions = [], []
    for seed in seeds:
        if is_road_world(config):
            episode = make_episode(seed)
            frames.append(episode.frames)
            actions.append(episode.actions)
        else:
            rng, count = np.random.default_rng(seed), config.num_temporal_embeddings
            frames.append(rng.integers(0, config.pad_token_id, (count, config.num_image_patches)))
            shape = count - 1, config.num_action_tokens, config.action_dim
            actions.append(rng.standard_normal(shape, dtype=np.float32))
    return np.stack(frames), np.stack(actions)


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
        accuracy = f", {figures['token_accuracy']:.2%} of the tokens right" if "token_accuracy" in figures else ""
        print(f"{name:>12}: {figures['seconds_per_frame']:.3f} s per frame{accuracy}")
    cached, prompt = report["vLLM"]["cached_tokens"], report["vLLM"]["prompt_tokens"]
    if len(cached) > 1:
        print(
            f"{'prefix cache':>12}: {sum(cached[1:]) / sum(prompt[1:]):.1%} of the prompt tokens after the first frame"
        )
    if "identical_tokens" in report:
        print(f"{'same tokens':>12}: {'yes' if report['identical_tokens'] else 'NO'}")
    print(f"{'written':>12}: {out / 'terra.gif'}, {out / 'terra.png'}, {out / 'terra.json'}")


if __name__ == "__main__":
    typer.run(main)

"""Generate a video that follows its actions: ``python -m examples.terra --help``."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tqdm import tqdm

from .train import CHECKPOINT, CONTEXT_FRAMES


def main(
    model: Annotated[Path, typer.Option(help="Directory of a checkpoint.")] = CHECKPOINT,
    frames: Annotated[int, typer.Option(min=1, help="Frames to generate after the three of the context.")] = 22,
    streams: Annotated[int, typer.Option(min=1, help="Videos to generate at once.")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Processes that share each layer.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Episode of the first stream; the model was trained on none.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for terra.gif, terra.png and terra.json.")] = Path("out"),
    reference: Annotated[bool, typer.Option(help="Also run the Hugging Face reference, to compare.")] = True,
    load_format: Annotated[str, typer.Option(help="vLLM's load format; dummy for random weights.")] = "auto",
    log_level: Annotated[str, typer.Option(help="vLLM's log level.")] = "ERROR",
) -> None:
    """Roll a Terra world model out in vLLM: three context frames, then one frame per action.

    Writes a GIF and a PNG strip (ground truth, vLLM and the Hugging Face reference side by side) and a JSON report.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory
    if tensor_parallel_size > 1:  # on a CPU, one core per process; elsewhere the variable is not read
        cores = "|".join(map(str, range(tensor_parallel_size)))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)

    from transformers import AutoConfig

    from . import register
    from .pictures import frame_image, save_gif, save_strip
    from .rollout import VllmTerra
    from .world import make_episode

    register()
    config = AutoConfig.from_pretrained(model)
    if CONTEXT_FRAMES + frames > config.num_temporal_embeddings:
        most = config.num_temporal_embeddings - CONTEXT_FRAMES
        raise typer.BadParameter(f"expected at most {most} frames, as the model holds {most + CONTEXT_FRAMES} in all")
    truth, actions = make_data(config, range(seed, seed + streams), make_episode)
    context, total = truth[:, :CONTEXT_FRAMES], CONTEXT_FRAMES + frames

    print("Starting vLLM, half a minute ...", flush=True)
    started = time.perf_counter()
    engine = VllmTerra(model, tensor_parallel_size=tensor_parallel_size, load_format=load_format)
    start_seconds = time.perf_counter() - started
    generated = list(progress(engine.rollout(context, actions, frames), frames, "vLLM"))
    videos = {"vLLM": np.stack([frame.tokens for frame in generated], axis=1)}
    report: dict[str, Any] = {
        "model": model.name,
        "frames": frames,
        "streams": streams,
        "seed": seed,
        "tensor_parallel_size": tensor_parallel_size,
        "vllm": {
            "start_seconds": round(start_seconds, 2),
            "seconds_per_frame": round(float(np.median([frame.seconds for frame in generated])), 4),
            "prompt_tokens": [frame.prompt_tokens for frame in generated],
            "cached_tokens": [frame.cached_tokens for frame in generated],
        },
    }
    if reference:
        videos["Hugging Face"], report["hugging_face"] = run_reference(model, context, actions, frames)
        report["identical_tokens"] = bool((videos["vLLM"] == videos["Hugging Face"]).all())
    is_world = is_road_world(config)
    if is_world:
        wanted = truth[:, CONTEXT_FRAMES:total]
        for name, video in videos.items():
            report["vllm" if name == "vLLM" else "hugging_face"]["token_accuracy"] = float((video == wanted).mean())
        videos = {"ground truth": wanted, **videos}

    out.mkdir(parents=True, exist_ok=True)
    rows = {
        name: [frame_image(f, is_world) for f in np.concatenate([context[0], video[0]])]
        for name, video in videos.items()
    }
    save_gif(rows, out / "terra.gif", CONTEXT_FRAMES)
    save_strip(rows, out / "terra.png", CONTEXT_FRAMES)
    (out / "terra.json").write_text(json.dumps(report, indent=2) + "\n")
    print_report(report, out)


def is_road_world(config: Any) -> bool:
    """Whether the tokens of a checkpoint are the tiles of the road world."""
    from .world import NUM_TILES, TOKENS_PER_FRAME

    return (config.num_image_patches, config.vocab_size) == (TOKENS_PER_FRAME, NUM_TILES + 1)


def make_data(config: Any, seeds: Iterable[int], make_episode: Any) -> tuple[np.ndarray, np.ndarray]:
    """Frames (streams, 25, num_image_patches) and actions (streams, 24, num_action_tokens, action_dim).

    Random ones for a checkpoint of another world.
    """
    if is_road_world(config):
        episodes = [make_episode(seed) for seed in seeds]
        return np.stack([e.frames for e in episodes]), np.stack([e.actions for e in episodes])
    frames, actions = [], []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        count = config.num_temporal_embeddings
        frames.append(rng.integers(0, config.pad_token_id, (count, config.num_image_patches)))
        actions.append(rng.standard_normal((count - 1, config.num_action_tokens, config.action_dim), dtype=np.float32))
    return np.stack(frames), np.stack(actions)


def run_reference(
    model: Path, context: np.ndarray, actions: np.ndarray, frames: int
) -> tuple[np.ndarray, dict[str, float]]:
    """The same rollout by the Hugging Face reference: tokens (streams, frames, patches) and its part of the report."""
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


def progress(steps: Iterable[Any], total: int, name: str) -> Iterator[Any]:
    """Show progress, a frame per step."""
    return iter(tqdm(steps, total=total, desc=f"{name:>12}", unit="frame"))


def print_report(report: dict[str, Any], out: Path) -> None:
    """The figures of a run, for people."""
    for key, name in (("vllm", "vLLM"), ("hugging_face", "Hugging Face")):
        if key in report:
            part = report[key]
            accuracy = f", {part['token_accuracy']:.2%} of the tokens right" if "token_accuracy" in part else ""
            print(f"{name:>12}: {part['seconds_per_frame']:.3f} s per frame{accuracy}")
    cached, prompt = report["vllm"]["cached_tokens"], report["vllm"]["prompt_tokens"]
    if len(cached) > 1:
        print(
            f"{'prefix cache':>12}: {sum(cached[1:]) / sum(prompt[1:]):.1%} of the prompt tokens after the first frame"
        )
    if "identical_tokens" in report:
        print(f"{'same tokens':>12}: {'yes' if report['identical_tokens'] else 'NO'}")
    print(f"{'written':>12}: {out / 'terra.gif'}, {out / 'terra.png'}, {out / 'terra.json'}")


if __name__ == "__main__":
    typer.run(main)

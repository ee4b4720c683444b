"""Terra at its published size on one GPU: ``python -m benchmarks.terra_gpu --help``.

2.04 B parameters, bfloat16, random weights, whole rollouts: 3 frames of context, then 22 frames of
576 tokens, one action each. The Hugging Face reference with its KV cache, vLLM without and with
CUDA graphs, for 1, 8 and 64 videos at once. Each part runs in a process of its own, which gives all
its memory back. Without a GPU, `--tiny` runs the same on a CPU with a model of a few thousand
parameters, to see that the script works.

It needs no network and no checkpoint. For a machine without one, collect wheels where there is one,
with the same Python and platform, and carry them over with a checkout of this repository:

    pip download vllm==0.32.0 rich typer -d wheels            # torch for CUDA comes with vllm
    pip wheel . ./examples --no-deps -w wheels                # mmkit and the examples
    # there:
    python -m venv env
    env/bin/pip install --no-index --find-links wheels vllm vllm-mmkit rich typer
    env/bin/pip install --no-index --no-deps --find-links wheels vllm-mmkit-examples
    env/bin/python -m benchmarks.terra_gpu                    # in the checkout

The bound is what the memory's bandwidth allows: to make one token for each stream, a step reads
every weight but the rows of the embedding table that it does not use, and the keys and values of
every position so far,

    bytes per step = weights + streams * positions * layers * 2 * kv heads * head size * bytes per
    number

so a frame cannot take less than the sum of its steps' bytes by the bandwidth, that of copying
2 GiB, as measured here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any

import numpy as np
import typer

from . import measure

CONTEXT = 3
PARTS = ("hf", "eager", "graphs")
TINY = {
    "vocab_size": 65,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 350,
    "pad_token_id": 64,
    "bos_token_id": 64,
    "eos_token_id": 64,
    "num_spatio_embeddings": 14,
    "num_image_patches": 8,
}


def main(
    streams: Annotated[
        list[int] | None, typer.Option(help="Videos at once; may be given several times.")
    ] = None,
    parts: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}; may be given several times.")
    ] = None,
    frames: Annotated[int, typer.Option(min=2, max=22, help="Frames of each rollout.")] = 22,
    hf_frames: Annotated[
        int | None, typer.Option(min=2, max=22, help="Fewer frames for the slow reference.")
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A tiny model, on whatever device there is.")
    ] = False,
    memory: Annotated[
        float, typer.Option(help="Share of the GPU's memory that vLLM may take.")
    ] = 0.85,
    part: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Frames per second of Terra, and which fraction of the bandwidth's bound they are."""
    counts = streams or ([1, 2] if tiny else [1, 8, 64])
    if part is not None:
        print("RESULT", json.dumps(run(part, counts[0], frames, tiny, memory)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMKIT_BENCHMARK_MODEL"] = folder
        config(tiny).save_pretrained(folder)
        rows = []
        for kind in parts or PARTS:
            for count in counts:
                frame_counts = (hf_frames or frames) if kind == "hf" else frames
                rows.append(in_process(kind, count, frame_counts, tiny, memory))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    reference = {row["streams"]: row for row in rows if row["part"] == "hf" and "error" not in row}
    for row in rows:
        if (base := reference.get(row["streams"])) and "error" not in row:
            row["times_hf"] = row["frames_per_second"] / base["frames_per_second"]
    columns = ["part", "streams", "frames/s", "ms per step", "of the bound"]
    name = "terra_gpu_tiny" if tiny else "terra_gpu"
    report = {"frames": frames, "rows": rows}
    measure.store(name, report, [*columns, "times HF", "prefix cache"], [*map(shown, rows)])
    if any("error" in row for row in rows):
        raise typer.Exit(1)


def shown(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["part"], str(row["streams"]), row["error"][-60:], "", "", "", ""]
    return [
        row["part"],
        str(row["streams"]),
        f"{row['frames_per_second']:.2f}",
        f"{row['ms_per_step']:.2f}",
        f"{row['of_bound']:.0%}",
        f"{row['times_hf']:.1f}" if "times_hf" in row else "",
        "" if row["cached"] is None else f"{row['cached']:.1%}",
    ]


def in_process(kind: str, count: int, frames: int, tiny: bool, memory: float) -> dict[str, Any]:
    """One part in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.terra_gpu",
        "--part",
        kind,
        "--streams",
        str(count),
    ]
    command += ["--frames", str(frames), "--memory", str(memory), *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            outcome: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return outcome
    return {
        "part": kind,
        "streams": count,
        "error": f"ended with {done.returncode}: {done.stdout[-300:]}",
    }


def config(tiny: bool) -> Any:
    """The published sizes, or tiny ones."""
    from examples.terra.configuration import LlamaActionConfig

    dtype = "float32" if tiny else "bfloat16"
    return LlamaActionConfig(
        architectures=["LlamaActionForCausalLM"], dtype=dtype, **(TINY if tiny else {})
    )


def run(kind: str, streams: int, frames: int, tiny: bool, memory: float) -> dict[str, Any]:
    """One part, in this process: the first rollout warms up, the second is measured, with other
    frames and actions."""
    cfg = config(tiny)
    rollout = reference(cfg) if kind == "hf" else engine(kind, streams, memory)
    for _ in rollout(*drawn(cfg, streams, seed=0), 2):
        pass
    seconds, cached, prompts = [], 0, 0
    for taken, hits, length in rollout(*drawn(cfg, streams, seed=1), frames):
        seconds.append(taken)
        # the first frame of a rollout finds nothing in the cache, by intention
        if len(seconds) > 1:
            cached, prompts = cached + hits, prompts + length
    bandwidth = copying_bandwidth()
    least = sum(frame_bytes(cfg, streams, CONTEXT + number) for number in range(frames))
    return {
        "part": kind,
        "streams": streams,
        "parameters": parameters(cfg),
        "frames": frames,
        "frames_per_second": streams * frames / sum(seconds),
        "ms_per_step": 1000 * sum(seconds) / frames / cfg.num_image_patches,
        "of_bound": least / bandwidth / sum(seconds),
        "bandwidth_gb_s": bandwidth / 1e9,
        "cached": cached / prompts if prompts else None,
        "seconds_of_each_frame": [round(taken, 4) for taken in seconds],
    }


def drawn(cfg: Any, streams: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random contexts (streams, 3, num_image_patches) and actions."""
    random = np.random.default_rng(seed)
    context = random.integers(0, cfg.pad_token_id, (streams, CONTEXT, cfg.num_image_patches))
    shape = streams, cfg.num_temporal_embeddings, cfg.num_action_tokens, cfg.action_dim
    return context, random.normal(size=shape).astype(np.float32)


def engine(kind: str, streams: int, memory: float) -> Any:
    """Rollouts in vLLM: seconds, cached and all tokens of the prompts, frame by frame."""
    from examples.terra import register
    from examples.terra.rollout import VllmTerra

    register()
    terra = VllmTerra(
        os.environ["MMKIT_BENCHMARK_MODEL"],
        load_format="dummy",
        enforce_eager=kind == "eager",
        max_num_seqs=max(streams, 2),
        gpu_memory_utilization=memory,
    )

    def rollout(context: np.ndarray, actions: np.ndarray, frames: int) -> Any:
        for step in terra.rollout(context, actions, frames):
            yield step.seconds, step.cached_tokens, step.prompt_tokens

    return rollout


def reference(cfg: Any) -> Any:
    """Rollouts in the Hugging Face reference, which keeps its KV cache."""
    import torch

    from examples.terra.reference import LlamaActionForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = LlamaActionForCausalLM._from_config(cfg, dtype=cfg.dtype).eval()

    def rollout(context: np.ndarray, actions: np.ndarray, frames: int) -> Any:
        steps = model.rollout(
            torch.from_numpy(context).to(device), torch.from_numpy(actions).to(device), frames
        )
        while True:
            start = time.perf_counter()
            frame = next(steps, None)
            if frame is None:
                return
            frame.cpu()  # waits for the device
            yield time.perf_counter() - start, 0, 0

    return rollout


# -- the bound -------------------------------------------------------------------------------------


def parameters(cfg: Any) -> int:
    """Of the whole model."""
    return read_parameters(cfg) + cfg.vocab_size * cfg.hidden_size


def read_parameters(cfg: Any) -> int:
    """Those that every step reads: all but the embedding table."""
    head = cfg.head_dim or cfg.hidden_size // cfg.num_attention_heads
    attention = cfg.hidden_size * head * 2 * (cfg.num_attention_heads + cfg.num_key_value_heads)
    layer = attention + 3 * cfg.hidden_size * cfg.intermediate_size + 2 * cfg.hidden_size
    tables = cfg.hidden_size * (cfg.num_spatio_embeddings + cfg.num_temporal_embeddings)
    projection = cfg.hidden_size * (cfg.action_dim + 1)
    return int(
        cfg.num_hidden_layers * layer
        + cfg.hidden_size
        + cfg.vocab_size * cfg.hidden_size
        + tables
        + projection
    )


def frame_bytes(cfg: Any, streams: int, known: int) -> float:
    """Bytes read to generate one frame of every stream after so many known ones."""
    width = 4 if "32" in str(cfg.dtype) else 2
    head = cfg.head_dim or cfg.hidden_size // cfg.num_attention_heads
    position = cfg.num_hidden_layers * 2 * cfg.num_key_value_heads * head * width
    steps, begin = cfg.num_image_patches, known * cfg.num_spatio_embeddings
    positions = steps * begin + steps * (steps - 1) / 2
    return steps * read_parameters(cfg) * width + streams * positions * position


def copying_bandwidth(size: int = 2**31, rounds: int = 20) -> float:
    """Bytes per second read and written by copying a large tensor, at best."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, rounds = (size, rounds) if device == "cuda" else (2**26, 5)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)

"""Terra at its published size on one GPU: ``python -m benchmarks.terra_gpu --help``.

2.04 B parameters, bfloat16, random weights, whole rollouts: 3 frames of context, then 22 frames of
576 tokens, one action each. The Hugging Face reference with its KV cache, vLLM without and with
CUDA graphs, each in a process of its own, which gives all its memory back. `--part` runs some of
the three, `--tiny` the same with a model of a few thousand parameters on whatever device there is,
to see that the script works.

The bound is what the memory's bandwidth allows: to make one token for each stream, a step reads
every weight but the embedding table, and the keys and values of every position so far,

    bytes per step = weights + streams * positions * layers * 2 * kv heads * head size * bytes per
    number

so a frame cannot take less than the sum of its steps' bytes by the bandwidth, that of copying
2 GiB, as measured here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer

from tools.shared import print_result, run_module

from . import measure

CONTEXT = 3
PARTS = ("hf", "eager", "graphs")
COLUMNS = ["part", "streams", "frames/s", "ms per step", "of the bound"]
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
    frames: Annotated[int, typer.Option(min=2, max=22, help="Frames of each rollout.")] = 22,
    part: Annotated[list[str] | None, typer.Option(help="hf, eager or graphs; several.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny model, on any device.")] = False,
    in_process: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Frames per second of Terra, and which fraction of the bandwidth's bound they are."""
    counts, parts = streams or [1, 8, 64], part or list(PARTS)
    if in_process:
        for row in run(parts[0], counts, frames, tiny):
            print_result(row)
        return
    words = [f"--streams={count}" for count in counts]
    words += [f"--frames={frames}", "--in-process", *["--tiny"] * tiny]
    rows = []
    with TemporaryDirectory() as folder:
        for name in measure.progress(parts, "parts"):
            log = Path(folder, "log")
            command = ("benchmarks.terra_gpu", f"--part={name}", *words)
            outcome, ended = run_module(*command, log=log, seconds=3600, variables={})
            if len(outcome) < len(counts):
                raise SystemExit(f"{name}: {ended}\n{log.read_text()[-8000:]}")
            rows += outcome
    table = [[row["part"], str(row["streams"]), *shown(row)] for row in rows]
    name = "terra_gpu_tiny" if tiny else "terra_gpu"
    measure.store(name, {"frames": frames, "rows": rows}, COLUMNS, table)


def shown(row: dict[str, Any]) -> list[str]:
    speed = f"{row['frames_per_second']:.2f}", f"{row['ms_per_step']:.2f}"
    return [*speed, f"{row['of_bound']:.0%}"]


# -- in the processes ------------------------------------------------------------------------------


def run(part: str, counts: list[int], frames: int, tiny: bool) -> Iterator[dict[str, Any]]:
    """Rows of one part. For each count of streams, the first rollout warms up; the second is
    measured, with other frames and actions."""
    cfg = config(tiny)
    model = built(cfg, "meta")
    with reference(cfg) if part == "hf" else engine(cfg, part, max(counts)) as rollout:
        bandwidth = copying_bandwidth()
        for streams in counts:
            for _ in rollout(*drawn(cfg, streams, seed=0), 2):
                pass
            seconds = sum(rollout(*drawn(cfg, streams, seed=1), frames))
            least = sum(frame_bytes(model, streams, CONTEXT + number) for number in range(frames))
            yield {
                "part": part,
                "streams": streams,
                "frames_per_second": streams * frames / seconds,
                "ms_per_step": 1000 * seconds / frames / cfg.num_image_patches,
                "of_bound": least / bandwidth / seconds,
                "bandwidth_gb_s": bandwidth / 1e9,
            }


def config(tiny: bool) -> Any:
    """The published sizes, or tiny ones."""
    from examples.terra.configuration import LlamaActionConfig

    sizes: dict[str, Any] = TINY if tiny else {}
    dtype = "float32" if tiny else "bfloat16"
    return LlamaActionConfig(architectures=["LlamaActionForCausalLM"], dtype=dtype, **sizes)


def drawn(cfg: Any, streams: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random contexts (streams, 3, num_image_patches) and actions."""
    random = np.random.default_rng(seed)
    context = random.integers(0, cfg.pad_token_id, (streams, CONTEXT, cfg.num_image_patches))
    shape = streams, cfg.num_temporal_embeddings, cfg.num_action_tokens, cfg.action_dim
    return context, random.normal(size=shape).astype(np.float32)


@contextmanager
def engine(cfg: Any, part: str, streams: int) -> Iterator[Any]:
    """Rollouts in vLLM: the seconds of each frame."""
    from examples.terra import register
    from examples.terra.rollout import VllmTerra

    register()
    options: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": max(streams, 2)}
    with TemporaryDirectory() as folder:
        cfg.save_pretrained(folder)
        terra = VllmTerra(folder, enforce_eager=part == "eager", **options)

    def rollout(context: np.ndarray, actions: np.ndarray, frames: int) -> Any:
        for step in terra.rollout(context, actions, frames):
            yield step.seconds

    try:
        yield rollout
    finally:  # on a GPU, a process whose engine runs does not end
        terra.llm.llm_engine.engine_core.shutdown()


@contextmanager
def reference(cfg: Any) -> Iterator[Any]:
    """Rollouts in the Hugging Face reference, which keeps its KV cache."""
    import torch

    model = built(cfg, device()).eval()

    def rollout(context: np.ndarray, actions: np.ndarray, frames: int) -> Any:
        given = (torch.from_numpy(own).to(device()) for own in (context, actions))
        steps, start = model.rollout(*given, frames), time.perf_counter()
        for frame in steps:
            frame.cpu()  # waits for the device
            yield time.perf_counter() - start
            start = time.perf_counter()

    yield rollout


def built(cfg: Any, device: str) -> Any:
    """The reference with random weights."""
    import torch

    from examples.terra.reference import LlamaActionForCausalLM

    with torch.device(device):
        return LlamaActionForCausalLM._from_config(cfg, dtype=cfg.dtype)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# -- the bound -------------------------------------------------------------------------------------


def frame_bytes(model: Any, streams: int, known: int) -> float:
    """Bytes that a model reads to generate one frame of every stream after so many known ones."""
    cfg = model.config
    weights = sum(own.nbytes for own in model.parameters()) - model.model.embed_tokens.weight.nbytes
    head = cfg.head_dim or cfg.hidden_size // cfg.num_attention_heads
    width = model.dtype.itemsize
    position = cfg.num_hidden_layers * 2 * cfg.num_key_value_heads * head * width
    steps, begin = cfg.num_image_patches, known * cfg.num_spatio_embeddings
    positions = steps * begin + steps * (steps - 1) / 2
    return float(steps * weights + streams * positions * position)


def copying_bandwidth() -> float:
    """Bytes per second read and written by copying a large tensor, at best."""
    import torch

    size = 2**31 if device() == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)

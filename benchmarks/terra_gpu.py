"""Terra at its published size on one GPU: ``python -m benchmarks.terra_gpu --help``.

2.04 B parameters, bfloat16, random weights, whole rollouts: 3 frames of context, then 22 frames of
576 tokens, one action each. The Hugging Face reference with its KV cache, vLLM without and with
CUDA graphs, and vLLM's own Llama of the same size, each in a process of its own, which gives all
its memory back. Llama gets the same ids with ids in place of the actions: what Terra takes longer
is the share of mmkit and of the model's position table. `--part` runs some of the four, `--tiny`
the same with a model of a few thousand parameters on whatever device there is, to see that the
script works. Its seconds are processor time, and its engines run in this process: a tiny model's
step is Python alone, and while other work shares the cores, two processes that wait for each other
took 0.3 to 4 times as long in one run as in the next.

The bound is what the memory's bandwidth allows: to make one token for each stream, a step reads
every weight but the embedding table, and the keys and values of every position so far,

    bytes per step = weights + streams * positions * layers * 2 * kv heads * head size * bytes per
    number

so a frame cannot take less than the sum of its steps' bytes by the bandwidth, that of copying
2 GiB, as measured here.
"""

from __future__ import annotations

import os
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
PARTS = ("hf", "eager", "graphs", "llama")
COLUMNS = ["part", "streams", "frames/s", "ms per step", "of the bound"]
LLAMA_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
)
"""What the config of Llama takes from that of Terra."""

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
    part: Annotated[
        list[str] | None, typer.Option(help="hf, eager, graphs or llama; several.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny model, on any device.")] = False,
    in_process: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Frames per second of Terra, and which fraction of the bandwidth's bound they are."""
    counts = streams or [1, 8, 64]
    parts = part or list(PARTS)
    if in_process:
        for figure in measure_part(parts[0], counts, frames, tiny):
            print_result(figure)
        return
    options = [f"--streams={count}" for count in counts]
    options += [f"--frames={frames}", "--in-process"]
    if tiny:
        options.append("--tiny")
    figures = []
    for name in measure.show_progress(parts, "parts"):
        figures += run_part(name, options, len(counts))
    name = "terra_gpu_tiny" if tiny else "terra_gpu"
    rows = [format_row(figure) for figure in figures]
    measure.store(name, {"frames": frames, "rows": figures}, COLUMNS, rows)


def run_part(part: str, options: list[str], num_figures: int) -> list[dict[str, Any]]:
    """Measure one part in a process of its own.

    Raises:
        SystemExit: it has not printed all its figures.
    """
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        module = ("benchmarks.terra_gpu", f"--part={part}", *options)
        figures, ending = run_module(*module, log=log, seconds=3600, variables={})
        if len(figures) < num_figures:
            raise SystemExit(f"{part}: {ending}\n{log.read_text()[-8000:]}")
    return figures


def format_row(figure: dict[str, Any]) -> list[str]:
    """Return the line of the table for one part and number of streams."""
    return [
        figure["part"],
        str(figure["streams"]),
        f"{figure['frames_per_second']:.2f}",
        f"{figure['ms_per_step']:.2f}",
        f"{figure['of_bound']:.0%}",
    ]


# -- in the processes ------------------------------------------------------------------------------


def measure_part(part: str, counts: list[int], frames: int, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the figures of one part.

    For each count of streams, the first rollout warms up; the second is measured, with other frames
    and actions.
    """
    clock = time.perf_counter
    if tiny:
        clock = time.process_time
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    cfg = make_config(tiny)
    model = make_reference(cfg, "meta")
    if part == "hf":
        context = load_reference(cfg)
    elif part == "llama":
        context = start_llama(cfg, max(counts), eager=tiny)
    else:
        context = start_engine(cfg, part, max(counts))
    with context as rollout:
        bandwidth = measure_copying()
        for streams in counts:
            for _ in rollout(*draw_inputs(cfg, streams, seed=0), 2):
                pass
            begin = clock()
            for _ in rollout(*draw_inputs(cfg, streams, seed=1), frames):
                pass
            seconds = clock() - begin
            least = 0.0
            for number in range(frames):
                least += count_bytes(model, streams, CONTEXT + number)
            yield {
                "part": part,
                "streams": streams,
                "frames_per_second": streams * frames / seconds,
                "ms_per_step": 1000 * seconds / frames / cfg.num_image_patches,
                "of_bound": least / bandwidth / seconds,
                "bandwidth_gb_s": bandwidth / 1e9,
            }


def make_config(tiny: bool) -> Any:
    """Return the published sizes, or tiny ones."""
    from examples.terra.configuration import LlamaActionConfig

    sizes: dict[str, Any] = TINY if tiny else {}
    dtype = "float32" if tiny else "bfloat16"
    return LlamaActionConfig(architectures=["LlamaActionForCausalLM"], dtype=dtype, **sizes)


def draw_inputs(cfg: Any, streams: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random contexts (streams, 3, num_image_patches) and actions."""
    random = np.random.default_rng(seed)
    context = random.integers(0, cfg.pad_token_id, (streams, CONTEXT, cfg.num_image_patches))
    shape = streams, cfg.num_temporal_embeddings, cfg.num_action_tokens, cfg.action_dim
    return context, random.normal(size=shape).astype(np.float32)


@contextmanager
def start_engine(cfg: Any, part: str, streams: int) -> Iterator[Any]:
    """Yield a function that rolls out in vLLM, and yields each frame when it is complete."""
    from examples.terra import register
    from examples.terra.rollout import VllmTerra

    register()
    options: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": max(streams, 2)}
    with TemporaryDirectory() as folder:
        cfg.save_pretrained(folder)
        terra = VllmTerra(folder, enforce_eager=part == "eager", **options)

    try:
        yield terra.rollout
    finally:  # on a GPU, a process whose engine runs does not end
        terra.llm.llm_engine.engine_core.shutdown()


@contextmanager
def start_llama(cfg: Any, streams: int, *, eager: bool) -> Iterator[Any]:
    """Yield a function that rolls out in vLLM's own Llama, and yields each frame's results.

    Its prompts are as long as Terra's, and its engine has the same options. An id of no meaning
    stands at each position of an action. `eager` compiles nothing.
    """
    from transformers import LlamaConfig
    from vllm import LLM, SamplingParams

    from examples.terra.rollout import BLOCK_SIZE

    sizes = {name: getattr(cfg, name) for name in LLAMA_SIZES}
    llama = LlamaConfig(architectures=["LlamaForCausalLM"], dtype=cfg.dtype, **sizes)
    options: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": max(streams, 2)}
    options |= {"dtype": cfg.dtype, "skip_tokenizer_init": True, "block_size": BLOCK_SIZE}
    with TemporaryDirectory() as folder:
        llama.save_pretrained(folder)
        llm = LLM(folder, enable_prefix_caching=True, enforce_eager=eager, **options)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=cfg.num_image_patches, ignore_eos=True, detokenize=False
    )
    action = [1] * cfg.num_action_tokens

    def rollout(context: np.ndarray, actions: np.ndarray, frames: int) -> Any:
        prompts: list[list[int]] = []
        for stream in context.tolist():
            prompt: list[int] = []
            for frame in stream:
                prompt += frame + action
            prompts.append(prompt)
        for _ in range(frames):
            requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            results = llm.generate(requests, sampling, use_tqdm=False)  # type: ignore[arg-type]
            yield results
            for prompt, result in zip(prompts, results, strict=True):
                prompt += list(result.outputs[0].token_ids) + action

    try:
        yield rollout
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def load_reference(cfg: Any) -> Iterator[Any]:
    """Yield a function that rolls out in the Hugging Face reference, with its KV cache.

    That function yields each frame when it is complete.
    """
    import torch

    model = make_reference(cfg, find_device()).eval()

    def rollout(context: np.ndarray, actions: np.ndarray, frames: int) -> Any:
        context_there = torch.from_numpy(context).to(find_device())
        actions_there = torch.from_numpy(actions).to(find_device())
        for frame in model.rollout(context_there, actions_there, frames):
            yield frame.cpu()  # waits for the device

    yield rollout


def make_reference(cfg: Any, device: str) -> Any:
    """Return the reference with random weights."""
    import torch

    from examples.terra.reference import LlamaActionForCausalLM

    with torch.device(device):
        return LlamaActionForCausalLM._from_config(cfg, dtype=cfg.dtype)


def find_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# -- the bound -------------------------------------------------------------------------------------


def count_bytes(model: Any, streams: int, num_frames: int) -> float:
    """Return the bytes that a model reads to generate one frame of every stream.

    Args:
        model: with its config; its weights may be on the meta device.
        streams: that are generated at once.
        num_frames: of each stream so far.
    """
    cfg = model.config
    weights = sum(parameter.nbytes for parameter in model.parameters())
    # a step looks up one row of the table
    weights -= model.model.embed_tokens.weight.nbytes
    head_size = cfg.head_dim or cfg.hidden_size // cfg.num_attention_heads
    numbers_per_position = cfg.num_hidden_layers * 2 * cfg.num_key_value_heads * head_size
    bytes_per_position = numbers_per_position * model.dtype.itemsize
    steps = cfg.num_image_patches
    begin = num_frames * cfg.num_spatio_embeddings
    # step i reads begin + i positions
    positions = steps * begin + steps * (steps - 1) / 2
    return float(steps * weights + streams * positions * bytes_per_position)


def measure_copying() -> float:
    """Return the bytes per second read and written by copying a large tensor, at best."""
    import torch

    device = find_device()
    size = 2**31 if device == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device)
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
    measure.quiet_libraries()
    typer.run(main)

"""How the time of one request grows: ``python -m benchmarks.growth --help``.

Requests of a generated processor with more and more items, prompts of more and more tokens, and two
modalities mixed, against what vLLM does to any request: hashing its items, and copying the ids of
its prompt once (the floor). Uncached; parsed and processed as vLLM's renderer does it. Times are
those of the one thread on its core. An exponent of 1 is linear growth.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from time import thread_time as clock
from typing import Annotated, Any

import typer

from . import measure

COUNTS = (1, 10, 100, 1000)
LENGTHS = (1_000, 10_000, 100_000)
TEXT = 7
"""An ordinary token of the checkpoint."""


def main(
    rounds: Annotated[int, typer.Option(min=3, help="How often each size is measured.")] = 30,
) -> None:
    """Times, exponents, and ratios to the floor."""
    lines = {
        "items, in place": [(n, items(n)) for n in COUNTS],
        "items, replaced": [(n, replaced(n)) for n in COUNTS],
        "items, numbered": [(n, replaced(n, numbered=True)) for n in COUNTS],
        "two modalities, mixed": [(n, mixed(n)) for n in COUNTS[1:]],
        "prompt tokens, 6 items": [(n, items(6, n)) for n in LENGTHS],
        "prompt tokens, two modalities": [(n, mixed(6, n)) for n in LENGTHS],
        "Terra's whole context": [(24, items(24, frame=576))],
    }
    report: dict[str, Any] = {"rounds": rounds, "lines": {}}
    for name, requests in measure.progress(list(lines.items()), "growth"):
        report["lines"][name] = line(requests, rounds)
    measure.store("growth", report)
    measure.table(
        ["line", "size", "ms", "floor, ms", "times the floor", "exponent, steepest"],
        [row for name, rows_of in report["lines"].items() for row in shown(name, rows_of)],
    )


def shown(name: str, fit: dict[str, Any]) -> list[list[str]]:
    """A line as rows of the table."""
    slope = f"{fit['exponent']:.3f}, {fit['steepest']:.3f}" if fit["exponent"] else ""
    rows = [
        ["", f"{p['size']}", f"{p['ms']:.3f}", f"{p['floor_ms']:.3f}", f"{p['ratio']:.2f}", ""]
        for p in fit["points"]
    ]
    rows[0][0], rows[0][-1] = name, slope
    return rows


def line(requests: list[tuple[int, Any]], rounds: int) -> dict[str, Any]:
    """One line of the table: a time for each size, taken in turns, with its floor."""
    calls: dict[int, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for size, (processor, prompt, data) in requests:
        calls[size] = rendering(processor, prompt, data), floor(processor, prompt, data)
        calls[size][0]()
    whole: dict[int, list[float]] = {size: [] for size in calls}
    least: dict[int, list[float]] = {size: [] for size in calls}
    for _ in range(rounds):
        for size, (call, base) in calls.items():
            whole[size].append(seconds(call))
            least[size].append(seconds(base))
    points = []
    for size in calls:
        ratios = measure.ratio({"whole": whole[size], "floor": least[size]}, "whole", "floor")
        points.append(
            {
                "size": size,
                "ms": ratios["whole_ms"],
                "floor_ms": ratios["floor_ms"],
                "ratio": ratios["ratio"],
            }
        )
    sizes = [point["size"] for point in points]
    slope = measure.exponent(sizes, [point["ms"] for point in points]) if len(points) > 1 else None
    steps = [
        measure.exponent(sizes[i : i + 2], [p["ms"] for p in points[i : i + 2]])
        for i in range(len(sizes) - 1)
    ]
    return {"points": points, "exponent": slope, "steepest": max(steps, default=None)}


def seconds(call: Callable[[], Any]) -> float:
    start = clock()
    call()
    return clock() - start


def rendering(processor: Any, prompt: list[int], data: Any) -> Callable[[], Any]:
    """One request, as vLLM's renderer hands it to the processor."""
    from mmkit.testing import vllm_path

    return lambda: vllm_path.render(processor, prompt, data, {}, None)


def floor(processor: Any, prompt: list[int], data: Any) -> Callable[[], Any]:
    """What vLLM does to any such request: each item is hashed, the prompt is copied."""
    from vllm.multimodal.processing import ProcessorInputs

    from mmkit.testing import vllm_path

    inputs = ProcessorInputs(prompt, vllm_path.parsed(processor, data), hf_processor_mm_kwargs={})
    config = processor.info.ctx.get_mm_config()

    def call() -> Any:
        return inputs.get_mm_hashes(processor.info.model_id, config.mm_hasher_algorithm), list(
            prompt
        )

    return call


# -- requests --------------------------------------------------------------------------------------


def items(count: int, length: int = 0, frame: int = 64) -> tuple[Any, list[int], Any]:
    """Terra: a prompt that carries the placeholders; `length` tokens of it, or a frame of tokens
    before each item."""
    import torch

    from examples.terra.spec import TERRA

    body = max(1, length // count - 6) if length else frame
    prompt = (body * [TEXT] + 6 * [31]) * count
    torch.manual_seed(0)
    return made(TERRA), prompt, {"actions": list(torch.randn(count, 6, 3))}


def replaced(count: int, *, numbered: bool = False) -> tuple[Any, list[int], Any]:
    """Items of several lengths, each in place of a target; `numbered`: of one of its own."""
    import torch

    spec = series("numbered" if numbered else "replaced")
    targets = (
        [[30, i // 900, i // 30 % 30, i % 30] for i in range(count)] if numbered else [[30]] * count
    )
    prompt = [token for target in targets for token in [*[29] * 60, *target]]
    torch.manual_seed(0)
    steps = random.Random(0).choices(range(1, 65), k=count)
    return made(spec), prompt, {"series": [torch.randn(n, 4) for n in steps]}


def mixed(count: int, length: int = 0) -> tuple[Any, list[int], Any]:
    """Actions in place and series in place of a target, in turns."""
    import torch

    half = count // 2
    body = max(1, length // count - 6) if length else 64
    prompt = (body * [TEXT] + 6 * [31] + body * [TEXT] + [30]) * half
    torch.manual_seed(0)
    data = {"actions": list(torch.randn(half, 6, 3)), "series": list(torch.randn(half, 8, 4))}
    return made(series("mixed")), prompt, data


def series(kind: str) -> Any:
    """A spec over the checkpoint's 32 ids."""
    from examples.terra.spec import TERRA
    from mmkit import (
        Modality,
        ModelSpec,
        Tensor,
        batched,
        between,
        ceil_div,
        embed,
        fields,
        item,
        literal,
        replace,
    )

    target: Any = literal(30)
    if kind == "numbered":
        target = (
            literal([30])
            + literal(item.index // 900)
            + literal(item.index // 30 % 30)
            + literal(item.index % 30)
        )
    own = Modality(
        "series",
        item=Tensor(shape=(between(1, 64), 4)),
        layout=embed(28) * ceil_div(fields.series.shape[0], 4),
        update=replace(target),
        fields={"series": batched()},
    )
    return ModelSpec(kind, *([TERRA.modalities[0]] if kind == "mixed" else []), own)


def made(spec: Any) -> Any:
    """The spec's processor in vLLM, for a Terra that takes 1,000 items."""
    from examples import terra
    from mmkit.testing import vllm_path

    terra.register()
    many = {name: 1000 for name in ("actions", "series")}
    overrides = {"num_temporal_embeddings": 1001, "max_position_embeddings": 200_000}
    config = vllm_path.model_config(
        terra.CHECKPOINT, hf_overrides=overrides, limit_mm_per_prompt=many
    )
    classes = spec.classes
    return vllm_path.generated(classes.info, classes.dummy_inputs, classes.processor, config)


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)

"""What mmkit takes for an observation of a robot: ``python -m benchmarks.robots --help``.

An observation has one picture of 224 x 224 pixels, a state of eight numbers and an instruction, all
in the message of openpi's client; the answer is a chunk of 8 x 7 actions. There is no engine. The
times are the processor time of one thread for reading the message, for making and processing the
request, and for decoding the actions and writing the answer, with a new picture each time. The call
of the Hugging Face processor is taken out and shown beside them; the tokenizer is left out.

Each part runs a few times in a row. The first time has what the parts and processes before left in
the caches of the core, the fastest one has not.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from mmkit.serve.observations import decode_observation, encode_answer
from mmkit.wire.limits import Limits

from . import measure

PARTS = {
    "unpack": "read and check the observation",
    "process": "process the request and place its items",
    "decode": "decode the actions and write the answer",
    "mmkit": "mmkit in all",
    "hugging_face": "beside it: the Hugging Face processor",
}
"""The lines of the table."""

REPETITIONS = 3
"""How often each part of an observation runs."""


def main(
    observations: Annotated[int, typer.Option(min=4, help="Observations, each a new one.")] = 400,
) -> None:
    """Measure mmkit's part of an observation."""
    from tests.night.robot import make_checkpoint

    from .robot_model import ArmPolicy

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mmkit-bench-") as folder:
        checkpoint = make_checkpoint(Path(folder, "checkpoint"))
        config = json.loads((checkpoint / "config.json").read_text())
        config["architectures"] = [ArmPolicy.__name__]
        (checkpoint / "config.json").write_text(json.dumps(config))
        series = measure_mmkit(checkpoint, observations)
    rows = []
    medians = {}
    for name, what in PARTS.items():
        milliseconds = np.array(series[name])
        first, fastest = np.median(milliseconds, 0)
        p90 = np.percentile(milliseconds[:, 1], 90)
        medians[name] = {
            "first_ms": float(first),
            "fastest_ms": float(fastest),
            "fastest_p90_ms": float(p90),
        }
        rows.append([what, f"{first:.2f} ms", f"{fastest:.2f} ms", f"{p90:.2f} ms"])
    report = {
        "observations": observations,
        "repetitions": REPETITIONS,
        "load_before": load,
        "parts": medians,
    }
    columns = ["part", "first time", f"fastest of {REPETITIONS}", "90 % are below"]
    measure.store("robots", report, columns, rows)


class Times(NamedTuple):
    """The milliseconds of one part of one observation.

    Attributes:
        first: the first time.
        fastest: the fastest of `REPETITIONS` times in a row.
    """

    first: float
    fastest: float


def measure_mmkit(checkpoint: Path, observations: int) -> dict[str, list[Times]]:
    """Return the times of each part of each observation."""
    from mmkit import testing

    from .overhead import Side, render
    from .robot_model import ARM

    processor = testing.of_spec(ARM, checkpoint).processor
    policy = processor.plan.policy
    side = Side(processor)
    ids = policy.output.list_smallest_ids()
    generator = np.random.default_rng(0)
    series: dict[str, list[Times]] = {name: [] for name in PARTS}

    def unpack(message: bytes) -> Any:
        return policy.make_request(decode_observation(message, Limits(), policy.is_ignored))

    def process(prompt: list[int], data: Any) -> None:
        render(side, (prompt, data, {}))

    def decode() -> None:
        answer = {"actions": policy.decode(ids), "policy_timing": {"infer_ms": 1.0}}
        encode_answer(answer)

    for _ in range(observations):
        message = encode_answer(make_observation(generator))
        request = unpack(encode_answer(make_observation(generator)))
        prompt = processor.plan.encode(request["prompt"], add_special_tokens=True)
        times, _ = measure_part(side, unpack, message)
        series["unpack"].append(times)
        times, in_hugging_face = measure_part(side, process, prompt, request["multi_modal_data"])
        series["process"].append(times)
        series["hugging_face"].append(in_hugging_face)
        times, _ = measure_part(side, decode)
        series["decode"].append(times)
    for parts in zip(series["unpack"], series["process"], series["decode"], strict=True):
        first = sum(times.first for times in parts)
        series["mmkit"].append(Times(first, sum(times.fastest for times in parts)))
    return series


def measure_part(side: Any, run: Callable[..., Any], *arguments: Any) -> tuple[Times, Times]:
    """Return the times of a part without the Hugging Face processor, and those in it."""
    milliseconds = []
    milliseconds_in_hf = []
    for _ in range(REPETITIONS):
        side.seconds_in_hf = 0.0
        started = time.thread_time()
        run(*arguments)
        seconds = time.thread_time() - started - side.seconds_in_hf
        milliseconds.append(1000 * seconds)
        milliseconds_in_hf.append(1000 * side.seconds_in_hf)
    return (
        Times(milliseconds[0], min(milliseconds)),
        Times(milliseconds_in_hf[0], min(milliseconds_in_hf)),
    )


def make_observation(generator: np.random.Generator) -> dict[str, Any]:
    """Return a new observation."""
    return {
        "observation/image": generator.integers(0, 256, (224, 224, 3), np.uint8),
        "observation/state": generator.normal(size=8),
        "prompt": "pick up the can",
    }


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)

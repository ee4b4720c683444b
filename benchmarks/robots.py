"""What mmkit takes for an observation of a robot: ``python -m benchmarks.robots --help``.

An observation has one picture of 224 x 224 pixels, a state of eight numbers and an instruction, all
in the message of openpi's client; the answer is a chunk of 8 x 7 actions. There is no engine. The
times are the processor time of one thread for reading the message, for making and processing the
request, and for decoding the actions and writing the answer, with a new picture each time. The call
of the Hugging Face processor is taken out and shown beside them; the tokenizer is left out.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mmkit.serve.observations import decode_observation, encode_answer
from mmkit.serve.protocol import Limits

from . import measure

PARTS = {
    "unpack": "read and check the observation",
    "process": "process the request and place its items",
    "decode": "decode the actions and write the answer",
    "mmkit": "mmkit in all",
    "hugging_face": "beside it: the Hugging Face processor",
}
"""The lines of the table."""


def main(
    observations: Annotated[int, typer.Option(min=4, help="Observations, each a new one.")] = 400,
) -> None:
    """Measure mmkit's part of an observation."""
    from tests.night.robot import make_checkpoint

    from .robot_model import ArmPolicy

    with tempfile.TemporaryDirectory(prefix="mmkit-bench-") as folder:
        checkpoint = make_checkpoint(Path(folder, "checkpoint"))
        config = json.loads((checkpoint / "config.json").read_text())
        config["architectures"] = [ArmPolicy.__name__]
        (checkpoint / "config.json").write_text(json.dumps(config))
        series = measure_mmkit(checkpoint, observations)
    rows = []
    medians = {}
    for name, what in PARTS.items():
        median, p90 = np.percentile(series[name], [50, 90])
        medians[name] = {"median_ms": float(median), "p90_ms": float(p90)}
        rows.append([what, f"{median:.2f} ms", f"{p90:.2f} ms"])
    report = {"observations": observations, "parts": medians}
    measure.store("robots", report, ["part", "median", "90 % are below"], rows)


def measure_mmkit(checkpoint: Path, observations: int) -> dict[str, list[float]]:
    """Return the milliseconds of each part of each observation."""
    from mmkit import testing

    from .overhead import Side, render
    from .robot_model import ARM

    processor = testing.of_spec(ARM, checkpoint).processor
    policy = processor.plan.policy
    side = Side(processor)
    ids = policy.output.list_smallest_ids()
    generator = np.random.default_rng(0)
    series: dict[str, list[float]] = {}

    def add(name: str, started: float, seconds_elsewhere: float = 0.0) -> None:
        seconds = time.thread_time() - started - seconds_elsewhere
        series.setdefault(name, []).append(1000 * seconds)

    for _ in range(observations):
        message = encode_answer(make_observation(generator))
        started = time.thread_time()
        observation = decode_observation(message, Limits(), policy.is_ignored)
        request = policy.make_request(observation)
        add("unpack", started)

        prompt = processor.plan.encode(request["prompt"], add_special_tokens=True)
        side.seconds_in_hf = 0.0
        started = time.thread_time()
        render(side, (prompt, request["multi_modal_data"], {}))
        add("process", started, side.seconds_in_hf)
        series.setdefault("hugging_face", []).append(1000 * side.seconds_in_hf)

        started = time.thread_time()
        answer = {"actions": policy.decode(ids), "policy_timing": {"infer_ms": 1.0}}
        encode_answer(answer)
        add("decode", started)
    parts = zip(series["unpack"], series["process"], series["decode"], strict=True)
    series["mmkit"] = [sum(milliseconds) for milliseconds in parts]
    return series


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

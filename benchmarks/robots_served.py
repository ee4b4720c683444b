"""How long a robot waits for its actions: ``python -m benchmarks.robots_served --help``.

Two servers of the model of `benchmarks.robots`, one with vLLM's prefix caching and one without, get
the same numbers of robots in turns. Most of the prompt is the same in each observation; pictures
and states never come again. A robot sends an observation, waits for its chunk of 8 x 7 actions and
sends the next one. The server tells how long it decoded, processed, generated and decoded.

Robots and servers share the cores of this machine.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from . import measure

PARTS = {
    "unpack": ("server_timing", "unpack_ms", "read, check"),
    "process": ("server_timing", "process_ms", "process"),
    "engine": ("policy_timing", "infer_ms", "engine"),
    "decode": ("server_timing", "decode_ms", "decode"),
}
"""Where an answer has the time of each part, and the heads of the table's columns."""

CACHING = {True: "--enable-prefix-caching", False: "--no-enable-prefix-caching"}
OPTIONS = ("--dtype", "float32", "--block-size", "32", "--enforce-eager")

Round = dict[str, Any]
"""Observations per second (`rate`), and the milliseconds of each observation: `round_trip`, and the
parts."""


def main(
    robots: Annotated[
        list[int] | None, typer.Option(help="Robots at once; may be given several times.")
    ] = None,
    observations: Annotated[
        int, typer.Option(min=2, help="Observations of each robot in a round.")
    ] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each server, in turns.")] = 5,
) -> None:
    """Measure the round trip of an observation, with and without prefix caching."""
    load = os.getloadavg()[0]
    figures = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmkit-bench-")))
        servers = start_servers(folder, stack)
        process = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        for count in robots or [1, 4, 16]:
            results: dict[bool, list[Round]] = {True: [], False: []}
            for turn in range(rounds + 1):
                # each server is as often the first as the second
                for is_cached in (turn % 2 == 0, turn % 2 == 1):
                    port = servers[is_cached].port
                    seed = turn * 2 + is_cached
                    outcome = process.submit(run_robots, port, count, observations, seed).result()
                    if turn:  # the first round warms up
                        results[is_cached].append(outcome)
            figures += summarise(count, results)
            print(f"{count} robots", file=sys.stderr, flush=True)
    report = {
        "observations": observations,
        "rounds": rounds,
        "load_before": load,
        "rows": figures,
    }
    columns = ["robots", "prefix caching", "observations/s", "times uncached", "round trip", "90 %"]
    columns += [head for _, _, head in PARTS.values()]
    columns.append("robot, wire, waiting")
    measure.store("robots_served", report, columns, [format_row(figure) for figure in figures])


def start_servers(folder: Path, stack: ExitStack) -> dict[bool, Any]:
    """Return a server with prefix caching and one without, which end with the stack."""
    from examples.server import Server
    from tests.night.robot import make_checkpoint

    from . import robot_model

    checkpoint = make_checkpoint(folder / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = [robot_model.ArmPolicy.__name__]
    (checkpoint / "config.json").write_text(json.dumps(config))
    servers = {}
    for is_cached, option in CACHING.items():
        server = Server(
            checkpoint,
            *OPTIONS,
            option,
            environment={"MMKIT_MODULES": robot_model.__name__},
            log=folder / f"{option}.log",
        )
        servers[is_cached] = stack.enter_context(server)
    return servers


def summarise(count: int, results: dict[bool, list[Round]]) -> list[dict[str, Any]]:
    """Return the figures of one number of robots, with prefix caching and without.

    Times are medians of all observations, and rates those of the rounds.
    """
    ratios = []
    for cached, uncached in zip(results[True], results[False], strict=True):
        ratios.append(cached["rate"] / uncached["rate"])
    figures = []
    for is_cached, rounds in results.items():
        figure: dict[str, Any] = {"robots": count, "prefix_caching": is_cached}
        figure["rate"] = statistics.median(outcome["rate"] for outcome in rounds)
        figure["ratio"] = statistics.median(ratios) if is_cached else 1.0
        figure["ratio_range"] = [min(ratios), max(ratios)] if is_cached else [1.0, 1.0]
        for name in ("round_trip", *PARTS, "rest"):
            milliseconds = np.concatenate([outcome[name] for outcome in rounds])
            median, p90 = np.percentile(milliseconds, [50, 90])
            figure[name] = {"median_ms": float(median), "p90_ms": float(p90)}
        figures.append(figure)
    return figures


def format_row(figure: dict[str, Any]) -> list[str]:
    """Return the line of the table for one number of robots at one server."""
    least, most = figure["ratio_range"]
    ratio = f"{figure['ratio']:.2f} ({least:.2f} to {most:.2f})" if figure["prefix_caching"] else ""
    row = [
        str(figure["robots"]),
        "on" if figure["prefix_caching"] else "off",
        f"{figure['rate']:.1f}",
        ratio,
        f"{figure['round_trip']['median_ms']:.1f} ms",
        f"{figure['round_trip']['p90_ms']:.1f} ms",
    ]
    for name in (*PARTS, "rest"):
        row.append(f"{figure[name]['median_ms']:.2f} ms")
    return row


# -- in the robots' process ------------------------------------------------------------------------


def run_robots(port: int, count: int, observations: int, seed: int) -> Round:
    """Let robots ask a server, each over its own connection, one observation after the other."""
    from websockets.sync.client import connect

    sockets = []
    for _ in range(count):
        socket = connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None)
        socket.recv()  # what the robot talks to
        sockets.append(socket)
    messages = [write_messages(observations, (seed, robot)) for robot in range(count)]
    started = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        times = list(pool.map(ask, sockets, messages))
    seconds = time.perf_counter() - started
    for socket in sockets:
        socket.close()
    outcome: Round = {"rate": count * observations / seconds}
    for name in ("round_trip", *PARTS, "rest"):
        outcome[name] = [milliseconds[name] for of_robot in times for milliseconds in of_robot]
    return outcome


def write_messages(count: int, seed: Sequence[int]) -> list[bytes]:
    """Return observations that no cache knows, as openpi's client sends them."""
    from mmkit.serve.observations import encode_answer

    from .robots import make_observation

    generator = np.random.default_rng(seed)
    return [encode_answer(make_observation(generator)) for _ in range(count)]


def ask(socket: Any, messages: Sequence[bytes]) -> list[dict[str, float]]:
    """Send observations one after the other, and return the milliseconds of each."""
    times = []
    for message in messages:
        started = time.perf_counter()
        socket.send(message)
        answer = msgspec.msgpack.decode(socket.recv())
        milliseconds = {"round_trip": 1000 * (time.perf_counter() - started)}
        for name, (group, key, _) in PARTS.items():
            milliseconds[name] = answer[group][key]
        in_server = sum(milliseconds[name] for name in PARTS)
        milliseconds["rest"] = milliseconds["round_trip"] - in_server
        times.append(milliseconds)
    return times


if __name__ == "__main__":
    measure.quiet_libraries()
    typer.run(main)

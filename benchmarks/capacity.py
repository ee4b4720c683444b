"""How many machines so many users need: ``python -m benchmarks.capacity --help``.

A model of the cost, checked against what `benchmarks.serve_load` has measured. A request of one of
n clients takes a + b * n seconds; a and b follow from the measurements with 1 and 16 clients, and
the others are the check.

For Terra at its published size, on a GPU, a step cannot be faster than the memory: weights and all
KV caches are read once a step. That bound is `terra_gpu.frame_bytes`; it has not been measured.
"""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

import typer

from . import measure
from .report import stored
from .terra_gpu import config, frame_bytes, read_parameters

BANDWIDTH, MEMORY = 3.35e12, 80e9
"""Of an H100 SXM: bytes per second, and bytes (NVIDIA's data sheet)."""

SHARE = 0.85
"""Of the memory, for weights and KV caches."""

FULL = 25
"""Frames of a full context."""

RATES = (0.25, 1, 2)
"""Frames per second of each user."""

TOKENS = (1, 4)
"""Tokens that a step adds to a session: one, or with drafts several."""

MEASURED_TOKENS = 64
"""Of a request of `benchmarks.serve_load`."""

TOKEN_BYTES = 6
"""At most, of a token id in an answer: five digits and a comma."""


def main(
    users: Annotated[int, typer.Option(min=1, help="Interactive sessions at once.")] = 1000,
) -> None:
    """GPUs, cores and network that Terra's users need, and a check of the model."""
    report = {"users": users, "check": check(), "plan": plan(users), "routes": routes(users)}
    measure.store("capacity", report)
    for head, lines in (checked(report), planned(report), routed(report)):
        measure.table(head, lines)


def check() -> list[dict[str, float]]:
    """Requests per second as the model has them, and as they were measured."""
    rates = {
        row["clients"]: row["door"]["requests_per_second"] for row in stored("serve_load")["rows"]
    }
    seconds = {clients: clients / rate for clients, rate in rates.items()}
    each = (seconds[16] - seconds[1]) / 15
    fixed = seconds[1] - each
    return [
        {"clients": n, "model": n / (fixed + each * n), "measured": rate}
        for n, rate in rates.items()
    ]


def routes(users: int) -> dict[str, float]:
    """Cores of the API servers and bytes per second, where each user takes a frame per second.

    The time of a server's process grows with the tokens, since each is handed on as it comes; it is
    that of the measurement with the most clients.
    """
    door = max(stored("serve_load")["rows"], key=lambda row: row["clients"])["door"]
    tokens = config(tiny=False).num_image_patches
    of_token = door["server_cpu_ms"] / 1000 / MEASURED_TOKENS
    more = TOKEN_BYTES * (tokens - MEASURED_TOKENS)
    return {
        "cpu_us_of_a_token": of_token * 1e6,
        "cores": users * tokens * of_token,
        "bytes_sent": door["bytes_sent"],
        "bytes_received": door["bytes_received"],
        "megabits_per_second": users * 8e-6 * (door["bytes_sent"] + door["bytes_received"] + more),
    }


def plan(users: int) -> list[dict[str, Any]]:
    """What Terra's users need of H100s: as many sessions on each as memory and bandwidth allow."""
    cfg = config(tiny=False)
    weights = 2 * read_parameters(cfg)
    of_context = frame_bytes(cfg, 1, FULL - 1) - frame_bytes(cfg, 0, FULL - 1)
    session = of_context / cfg.num_image_patches  # what a step reads of a session is its KV
    rows = []
    for kv, size in (("bfloat16", session), ("fp8", session / 2)):
        for rate, tokens in product(RATES, TOKENS):
            by_memory = (MEMORY * SHARE - weights) / size
            bytes_of_a_step = BANDWIDTH * tokens / (rate * cfg.num_image_patches)
            by_bandwidth = (bytes_of_a_step - weights) / size
            sessions = int(min(by_memory, by_bandwidth))
            rows.append(
                {
                    "kv": kv,
                    "session_gb": size / 1e9,
                    "rate": rate,
                    "tokens_per_step": tokens,
                    "sessions": sessions,
                    "wall": "bandwidth" if by_bandwidth < by_memory else "memory",
                    "gpus": -(-users // sessions) if sessions else None,
                }
            )
    return rows


def checked(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A table of the check."""
    lines = [
        [
            str(r["clients"]),
            f"{r['measured']:.1f}",
            f"{r['model']:.1f}",
            f"{r['model'] / r['measured']:.2f}",
        ]
        for r in report["check"]
    ]
    return ["clients", "requests/s, measured", "the model's", "ratio"], lines


def planned(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A table of the plan."""
    lines = [
        [r["kv"], f"{r['rate']:g}", str(r["tokens_per_step"]), str(r["sessions"] or "none"),
         r["wall"], str(r["gpus"] or "")]
        for r in report["plan"]
    ]  # fmt: skip
    head = ["KV cache", "frames/s of each", "tokens per step", "sessions per H100", "first wall"]
    return [*head, f"H100s for {report['users']:,} users"], lines


def routed(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A table of the routes' share."""
    r = report["routes"]
    line = [
        f"{r['cpu_us_of_a_token']:.0f} µs",
        f"{r['bytes_sent']:,.0f}",
        f"{r['bytes_received']:,.0f}",
        f"{r['cores']:.0f}",
        f"{r['megabits_per_second']:.0f} Mbit/s",
    ]
    head = ["CPU of a token", "bytes of a request", "bytes of its answer"]
    return [*head, f"cores for {report['users']:,} users", "network, at most"], [line]


if __name__ == "__main__":
    measure.quiet()
    typer.run(main)

"""The stored results as the tables of docs/data/performance.md and docs/performance-terra.md:
``python -m benchmarks.report`` prints them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import measure
from . import stages as stages_
from . import text_latency as text_latency_
from .terra_drafts import KINDS

PARTS = {
    "uncached": "uncached",
    "uncached_own": "uncached, without HF",
    "cached": "cached",
    "prompt_update": "prompt update",
    "startup": "start-up",
}


def main() -> None:
    for name, table in tables().items():
        print(f"{name}:\n\n{table}\n")


def tables() -> dict[str, str]:
    """A table of Markdown for each stored result."""
    return {name: make(stored(name)) for name, make in MAKERS.items()}


def stored(name: str) -> dict[str, Any]:
    """A result of `measure.store`."""
    result: dict[str, Any] = json.loads((measure.RESULTS / f"{name}.json").read_text())
    return result


def overhead(report: dict[str, Any]) -> str:
    systems = report["systems"]
    rows = [
        [
            name,
            *(f"{s[part]['ratio']:.2f}" for part in PARTS),
            f"{s['uncached']['generated_ms']:.2f} ms",
            f"{s['peak_kib']['generated'] / s['peak_kib']['hand_written']:.2f}",
        ]
        for name, s in systems.items()
    ]
    rows.append(["median", *(f"{report['median'][part]:.2f}" for part in PARTS), "", ""])
    return markdown(["model", *PARTS.values(), "one request, uncached", "peak memory"], rows)


def growth(report: dict[str, Any]) -> str:
    rows = []
    for name, line in report["lines"].items():
        last = line["points"][-1]
        sizes = " to ".join(
            f"{p['size']:,}" for p in (line["points"][0], last)[: len(line["points"])]
        )
        exponent = "" if line["exponent"] is None else f"{line['exponent']:.2f}"
        steepest = "" if line["steepest"] is None else f"{line['steepest']:.2f}"
        rows.append(
            [name, sizes, exponent, steepest, f"{last['ms']:.2f} ms", f"{last['ratio']:.2f}"]
        )
    return markdown(
        ["one request with", "from", "exponent", "steepest step", "the largest", "times the floor"],
        rows,
    )


def startup(report: dict[str, Any]) -> str:
    imports = {f"importing {name}": ms for name, ms in report["import_ms"].items()}
    classes = {f"the classes of {name}": ms for name, ms in report["classes_ms"].items()}
    rows = [
        [name, f"{f['median']:.1f} ms", f"{f['least']:.1f} to {f['most']:.1f} ms"]
        for name, f in (imports | classes).items()
    ]
    return markdown(["", "median", "from, to"], rows)


def terra_cpu(report: dict[str, Any]) -> str:
    rows = [
        [str(r["streams"]), str(r["drafts"] or ""), f"{r['steps']:.0f}",
         f"{r['vllm_ms']:.0f} ms", f"{r['together']['hf_ms']:.0f} ms",
         measure.shown(r["together"]), measure.shown(r["each"]) if r["streams"] > 1 else "",
         "identical" if r["identical"] else "different", f"{r['cached']:.1%}"]
        for r in report["rows"]
    ]  # fmt: skip
    head = [
        "streams",
        "drafts",
        "steps",
        "vLLM, per frame",
        "HF, per frame",
        "times as fast",
        "than one by one",
        "ids",
    ]
    return markdown([*head, "prefix cache"], rows)


def terra_drafts(report: dict[str, Any]) -> str:
    rows = []
    for row in report["rows"]:
        for kind, name in KINDS.items():
            ms, times = row["ms"][kind], row["times"].get(kind)
            rows.append(
                [str(row["streams"]), name, f"{row['steps'][kind]:.1f}",
                 f"{ms:.0f} ms", f"{1000 * row['streams'] / ms:.0f}",
                 measure.shown(times) if times else "",
                 "identical" if row["identical"] else "different"]
            )  # fmt: skip
    head = [
        "streams",
        "drafts",
        "steps",
        "per frame",
        "frames/s",
        "times as fast with frames",
        "ids",
    ]
    return markdown(head, rows)


def render(report: dict[str, Any]) -> str:
    rows = [
        [row["model"], row["door"], row["what"].replace("_", "-"), f"{row['per_second']:.1f}",
         measure.shown(row), f"{row['mib']} MiB" if row["mib"] else ""]
        for row in report["rows"]
    ]  # fmt: skip
    head = ["model", "rendered", "by", "requests/s", "times hand-written", "memory of each process"]
    return markdown(head, rows)


def text_latency(report: dict[str, Any]) -> str:
    return markdown(*text_latency_.lines(report))


def stages(report: dict[str, Any]) -> str:
    return markdown(["", *(row["what"] for row in report["rows"])], stages_.lines(report))


MAKERS = {
    "overhead": overhead,
    "render": render,
    "stages": stages,
    "text_latency": text_latency,
    "growth": growth,
    "startup": startup,
    "terra_cpu": terra_cpu,
    "terra_drafts": terra_drafts,
}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()

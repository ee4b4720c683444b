"""Write the figures of the summary pages from what programs measured.

    python -m tools.figures

A figure on a page stands between two comments, which no reader sees:
`<!--vowels.http-->363<!--/-->`. The first comment names the figure. This program replaces what is
between them. tests/unit/test_figures.py fails while a page and its data disagree, and while README,
evidence or status has a number outside such comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from .lines import count_code_lines
from .shared import ROOT

DATA = ROOT / "docs" / "data"
RESULTS = ROOT / "benchmarks" / "results"

PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "deployment-scale.md",
    ROOT / "docs" / "evidence.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "operate.md",
    ROOT / "docs" / "status.md",
    ROOT / "docs" / "vowels.md",
    DATA / "gallery.md",
    DATA / "laws-on-vllm.md",
    DATA / "performance.md",
    DATA / "plugins-in-the-field.md",
    DATA / "recall.md",
    DATA / "terra-speed.md",
]
"""The pages with figures that this program writes."""

SPECS_OF_PLUGINS = (
    "gallery/vibevoice.py",
    "gallery/nemo_salm.py",
    "gallery/chatts.py",
    "wild/biomed_rna.py",
)
"""Specs of plugins outside vLLM, below the examples."""

FINDINGS_OF_ALL = {1, 2, 3, 4, 28}
"""Findings of the survey in code that all processors of vLLM share."""

_FIGURE = re.compile(r"<!--(?P<name>[a-z][\w.-]*)-->(?P<text>.*?)<!--/-->", re.DOTALL)


class FigureError(Exception):
    """A page names a figure that does not exist, or names it where Markdown would not show it."""


def main() -> None:
    figures = read_figures()
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = write_figures(before, figures)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))


def write_figures(text: str, figures: dict[str, str]) -> str:
    """Return the text of a page with its figures as they are in the data.

    Raises:
        FigureError: a figure is unknown, or begins a line: there Markdown takes the whole line for
            HTML and shows it as it is.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in figures:
            raise FigureError(f"{name}: expected one of {', '.join(sorted(figures))}.")
        figure = figures[name]
        begins_line = match.start() == 0 or text[match.start() - 1] == "\n"
        if begins_line and "\n" not in figure:
            raise FigureError(f"{name}: expected a word before it on its line.")
        return f"<!--{name}-->{figure}<!--/-->"

    return _FIGURE.sub(replace, text)


def read_figures() -> dict[str, str]:
    """Return each figure by its name, as pages show it."""
    figures: dict[str, Any] = {}
    figures |= read_release()
    figures |= read_vowels()
    figures |= read_versions()
    figures |= read_features()
    figures |= read_survey()
    figures |= read_recall()
    figures |= read_gallery()
    figures |= count_specs_of_plugins()
    figures |= read_costs()
    figures |= read_one_class()
    figures |= read_robots()
    figures["planted.bugs"] = len(read_rows(DATA / "planted-bugs.md"))
    figures["laws"] = len(read_rows(ROOT / "docs" / "laws.md"))
    for name, table in read_result_tables().items():
        figures[f"table.{name}"] = f"\n\n{table}\n\n"
    return {name: format_figure(figure) for name, figure in figures.items()}


def format_figure(figure: str | int) -> str:
    if isinstance(figure, int):
        return f"{figure:,}"
    return figure


def read_release() -> dict[str, str]:
    """Return the version of mmkit, without its last part."""
    source = (ROOT / "mmkit" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(\d+\.\d+)', source, re.MULTILINE)
    assert version is not None
    return {"version": version[1]}


def read_vowels() -> dict[str, int]:
    """Return the answers about the recordings of examples/vowels, see `examples.vowels.report`."""
    counts = read_json(DATA / "vowels.json")
    return {f"vowels.{name}": count for name, count in counts.items()}


def read_versions() -> dict[str, Any]:
    """Return which releases of vLLM were run."""
    entries = read_json(DATA / "versions.json")
    borrowed = [entry for entry in entries if entry["kernels"] != "native"]
    with_laws = [entry for entry in entries if "laws" in entry["checks"]]
    return {
        "versions": len(entries),
        "versions.newest": entries[0]["version"],
        "versions.oldest": entries[-1]["version"],
        "versions.borrowed": len(borrowed),
        "versions.with-laws": len(with_laws),
    }


def read_features() -> dict[str, int]:
    """Return how many features of vLLM work, and with how many the answers are the same."""
    verdicts = [row["verdict"] for row in read_json(DATA / "features.json").values()]
    return {
        "features": len(verdicts),
        "features.work": len(verdicts) - verdicts.count("fails on both"),
        "features.same": verdicts.count("same"),
    }


def read_survey() -> dict[str, int]:
    """Return what the laws found on vLLM's processors, from the table of the survey."""
    page = DATA / "laws-on-vllm.md"
    cells: list[str] = []
    entries = read_rows(page, head="entry")
    for row in entries:
        cells.extend(row[1:])
    violated = 0
    common = 0
    for cell in cells:
        # a number in parentheses was shown by another run
        findings = {int(number) for number in re.findall(r"(?<![\d(])\d+", cell)}
        if findings:
            violated += 1
        if findings and findings <= FINDINGS_OF_ALL:
            common += 1
    silent = cells.count("–")
    classes = [row[1] for row in read_rows(page, head="finding")]
    of_each_class = {f"survey.{name}": classes.count(name) for name in sorted(set(classes))}
    return of_each_class | {
        "survey.processors": len(entries),
        "survey.checks": len(cells),
        "survey.laws": len(cells) // len(entries),
        "survey.hold": len(cells) - violated - silent,
        "survey.violated": violated,
        "survey.silent": silent,
        "survey.common": common,
        "survey.findings": len(classes),
    }


def read_recall() -> dict[str, int]:
    """Return what became of the public bugs of vLLM under the laws."""
    outcomes = [row[4] for row in read_rows(DATA / "recall.md", head="bug")]
    replayed = [outcome for outcome in outcomes if outcome.startswith("replayed")]
    fixed = [outcome for outcome in replayed if "holds on none" not in outcome]
    return {
        "recall.bugs": len(outcomes),
        "recall.replayed": len(replayed),
        "recall.fixed": len(fixed),
        "recall.rebuilt": sum(outcome.startswith("rebuilt") for outcome in outcomes),
        "recall.missed": sum(outcome.startswith("not caught") for outcome in outcomes),
    }


def read_gallery() -> dict[str, Any]:
    """Return the sizes of the specs of vLLM's processors, and with how much they are compared."""
    specs = []
    by_hand = []
    stored = []
    drawn = []
    figures: dict[str, Any] = {}
    for row in read_rows(DATA / "gallery.md", head="system"):
        lines = [int(cell.replace(",", "") or 0) for cell in [row[2], row[3], row[5], row[6]]]
        specs.append(lines[0])
        by_hand.append(lines[1])
        stored.append(lines[2])
        drawn.append(lines[3])
        if "[BLIP-2]" in row[0]:
            figures["gallery.blip2"] = lines[0]
            figures["gallery.blip2.by-hand"] = lines[1]
    ratios = [spec / hand for spec, hand in zip(specs, by_hand, strict=True)]
    return figures | {
        "gallery.processors": len(specs),
        "gallery.shortest": min(specs),
        "gallery.longest": max(specs),
        "gallery.ratio": f"{median(ratios) * 100:.0f} %",
        "gallery.stored": sum(stored),
        "gallery.drawn": max(drawn),
    }


def count_specs_of_plugins() -> dict[str, int]:
    """Return the lines of the specs of plugins, counted as those of the gallery."""
    figures = {}
    for path in SPECS_OF_PLUGINS:
        file = ROOT / "examples" / path
        source = file.read_text(encoding="utf-8")
        figures[f"plugins.{file.stem}"] = count_code_lines(source, imports=False)
    return figures


def read_costs() -> dict[str, str]:
    """Return the costs against vLLM's classes by hand, from the results of the benchmarks."""
    overhead = read_json(RESULTS / "overhead.json")
    by_hand_in_vllm = [
        system for name, system in overhead["systems"].items() if name not in OURS_BY_HAND
    ]
    ratios = [system["uncached"]["ratio"] for system in by_hand_in_vllm]
    starts = []
    for system in by_hand_in_vllm:
        start = system["startup"]
        starts.append(start["generated_ms"] - start["hand_written_ms"])
    middle = overhead["median"]
    figures = {
        "cost.models": f"{len(ratios)}",
        "cost.uncached": format_saving(middle["uncached"]),
        "cost.uncached.least": format_saving(max(ratios)),
        "cost.uncached.most": format_saving(min(ratios)),
        "cost.cached": format_saving(middle["cached"]),
        "cost.startup": f"{max(starts):.0f} ms",
    }
    clients = 16
    for name in ["serve_load", "serve_load_stream"]:
        rows = read_json(RESULTS / f"{name}.json")["rows"]
        row = next(row for row in rows if row["clients"] == clients)
        figures[f"cost.{name}"] = f"{row['ratio']:.2f}"
    figures["cost.clients"] = f"{clients}"
    for row in read_json(RESULTS / "serve_load.json")["rows"]:
        microseconds = row["door"]["server_cpu_ms"] * 1000 / TOKENS_OF_AN_ANSWER
        figures[f"cost.server.{row['clients']}"] = f"{microseconds:.0f} µs"
    for row in read_json(RESULTS / "render.json")["rows"]:
        if row["what"] not in ("hand_written", "generated"):
            figures[f"cost.render.{row['model']}"] = f"{row['ratio']:.2f}"
    return figures


def read_one_class() -> dict[str, int]:
    """Return how one class was compared with two, see `benchmarks.one_class`."""
    result = read_json(RESULTS / "one_class.json")
    return {f"one_class.{name}": result[name] for name in ("tokens", "rounds")}


TOKENS_OF_AN_ANSWER = 64
"""The tokens that each request of benchmarks/serve_load.py generates."""

OURS_BY_HAND = ("terra", "series", "record")
"""Systems of the benchmark whose other side is benchmarks/hand_written.py."""


def format_saving(ratio: float) -> str:
    return f"{(1 - ratio) * 100:.0f} %"


def read_result_tables() -> dict[str, str]:
    """Return the table of Markdown of each stored result of the benchmarks that has one."""
    tables = {}
    for path in sorted(RESULTS.glob("*.json")):
        result = read_json(path)
        if "table" in result:
            tables[path.stem] = "\n".join(result["table"])
    return tables


def read_robots() -> dict[str, int]:
    """Return how the benchmarks of robots were run, and the load of the machine before them."""
    alone = read_json(RESULTS / "robots.json")
    served = read_json(RESULTS / "robots_served.json")
    return {
        "robots.load": round(alone["load_before"]),
        "robots_served.load": round(served["load_before"]),
        "robots_served.rounds": served["rounds"],
        "robots_served.observations": served["observations"],
    }


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_rows(page: Path, head: str | None = None) -> list[list[str]]:
    """Return the rows of the table of a page whose first heading is `head`, else of its first.

    Raises:
        FigureError: the page has no such table.
    """
    for table in _read_tables(page.read_text(encoding="utf-8").splitlines()):
        if head is None or table[0][0] == head:
            return table[2:]
    raise FigureError(f"{page.name}: expected a table, got none that begins with {head}.")


def _read_tables(lines: Iterable[str]) -> list[list[list[str]]]:
    tables: list[list[list[str]]] = []
    inside = False
    for line in lines:
        if not line.startswith("|"):
            inside = False
            continue
        if not inside:
            tables.append([])
            inside = True
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        tables[-1].append([cell.strip() for cell in cells])
    return tables


if __name__ == "__main__":
    main()

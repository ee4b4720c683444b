"""Which specs of the examples can be outlined: writes docs/data/outlines.md.

``python -m tools.outlines`` binds each spec to its checkpoint, in a minute. A test compares the
page with what would be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mmkit.plan.modality import BoundModality
from mmkit.plan.outline import find_unknown_reads
from mmkit.plan.plan import Plan

from .shared import ROOT, format_table

PAGE = ROOT / "docs" / "data" / "outlines.md"

REASONS = {
    ("chatts", "timeseries"): "Never: mean and scale of the values are text in the prompt.",
    ("ultravox", "audio"): "Its processor cuts audio into chunks, each with its own length.",
    ("qwen3_vl", "video"): "Its processor chooses the frames, whose times are text in the prompt.",
    ("gemma3", "image"): "With `do_pan_and_scan` its processor counts the crops.",
}
"""Why an outline needs processing, by spec and modality."""

TEXT = """# Requests without their pixels

Whether [`plan.outline`](../reference/plan.md#outline) can tell ids, ranges, numbers of rows and
cache keys from the facts of an item. `python -m tools.outlines` writes this page. "Reads" is what
layout and targets read of the item, or what keeps them from following from it. A layout that reads
nothing is the same for every item.

{count} of {total} specs can, in one modality at least. [The law](../laws.md) `outline` compares
them with vLLM's path.

{table}
"""


def main() -> None:
    PAGE.write_text(write_page(), encoding="utf-8")


def write_page() -> str:
    """Return the page, of the specs as they are now."""
    rows = []
    can = set()
    specs = set()
    for name, path, plan in bind_specs():
        specs.add(name)
        for modality in plan.modalities.values():
            unknown_reads = find_unknown_reads(modality)
            verdict = "no"
            if not unknown_reads:
                can.add(name)
                verdict = "yes"
            what = unknown_reads or list_known_reads(modality)
            words = ", ".join(f"`{expression}`" for expression in what)
            reason = REASONS.get((name, modality.name), "")
            link = f"[{name}](../../{path})"
            rows.append([link, modality.name, verdict, words, reason])
    columns = ["spec", "modality", "without pixels", "reads", "why"]
    table = format_table(columns, rows)
    return TEXT.format(count=len(can), total=len(specs), table=table)


def list_known_reads(modality: BoundModality) -> list[str]:
    """Return what the layout and the targets read of an item, through derived fields as well."""
    reads = set()
    parts = [modality.layout_evaluator.layout, *modality.updates]
    for name in modality.field_processor.from_facts:
        if name in (modality.layout_evaluator.fields or ()):
            parts.append(modality.field_processor.fields[name])
    for part in parts:
        for dependency in part.dependencies():
            if dependency.root == "item":
                reads.add(repr(dependency))
    return sorted(reads)


def bind_specs() -> Iterator[tuple[str, Path, Plan]]:
    """Yield each spec by name, with the path of its file and its plan."""
    from tests import hf_law
    from tests.oracles import SYSTEMS, processor
    from tests.unit import test_plugins_in_the_field as plugins

    for name, system in SYSTEMS.items():
        module = system.spec.partition(":")[0]
        yield name, Path(f"examples/{module.replace('.', '/')}.py"), processor(name).plan
    gallery = Path("examples/gallery")
    yield "vibevoice", gallery / "vibevoice.py", plugins.PLANS["VibeVoice"]
    yield "nemo_salm", gallery / "nemo_salm.py", plugins.PLANS["NeMo in chunks"]
    yield "chatts", gallery / "chatts.py", plugins.CHATTS_PLAN
    for name, open_subject in hf_law.EXAMPLES.items():
        plan = open_subject().plan
        assert plan is not None
        yield name, Path(f"examples/{name}/spec.py"), plan


if __name__ == "__main__":
    main()

"""The processor laws on vLLM's own hand-written processors, one subject per checkpoint of `tools.survey.zoo`.

`python -m tools.survey.findings [NAME ...] [--examples N] [--laws L2,L5] [--json FILE]` checks them and prints
a table; it fails if anything turns up that `FOUND` does not know. Per law every distinct violation is kept, not the
first: a violation is told by the first line of its message without its numbers, and the search goes on without it.
The same examples are drawn each time.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, assume
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmkit.testing import (
    LAWS,
    AudioSample,
    ImageSample,
    Law,
    NotApplicable,
    Request,
    Sample,
    Subject,
    VideoSample,
    Violation,
)
from mmkit.testing import check_law as run_law
from tests.profiles import profile
from tools.survey.zoo import ZOO, Items, model_config

SEEDS = st.integers(0, 3)
CHECKED = tuple(n for n, law in LAWS.items() if not law.needs_model and n != "L12")  # L12 is about generated classes


def samples(modality: str, items: Items) -> SearchStrategy[Sample]:
    """Items of the sizes that the zoo names. Shrinks towards the smallest."""
    if modality == "audio":
        return st.builds(AudioSample, SEEDS, _within(items.samples), st.just(items.rate))
    width, height = _within(items.width), _within(items.height)
    if modality == "image":
        return st.builds(ImageSample, SEEDS, width, height)
    return st.builds(VideoSample, SEEDS, _within(items.frames), width, height, st.just(items.metadata))


def _within(bounds: tuple[int, int]) -> SearchStrategy[int]:
    return st.sampled_from(bounds) | st.integers(*bounds)


@functools.cache
def subject(name: str) -> Subject:
    """The processor that vLLM makes of a checkpoint of the zoo, and requests for it."""
    entry = ZOO[name]
    made = MULTIMODAL_REGISTRY.create_processor(model_config(name, enable_mm_embeds=True))
    kwargs = st.sampled_from([{}, *entry.kwargs]) if entry.kwargs else None
    drawn = {modality: samples(modality, items) for modality, items in entry.items.items()}
    return Subject(made, drawn, model_dir=made.info.ctx.model_config.model, kwargs=kwargs)


@dataclass(frozen=True)
class Finding:
    """Something that docs/laws-on-vllm.md tells of."""

    kind: str
    """``bug``, ``limit`` (of vLLM's interface, or stated in its source), or ``harmless``."""

    title: str
    laws: str
    """Where it shows, as "L2 L5"."""

    entries: str
    """Where it shows; "*" for all, but those after a minus."""

    patterns: tuple[str, ...]
    """Of messages, for `re.search`."""

    always: bool = True
    """A few examples suffice to see it."""

    def covers(self, entry: str) -> bool:
        names = self.entries.split()
        return f"-{entry}" not in names and ("*" in names or entry in names)


FOUND: dict[int, Finding] = {
    1: Finding(
        "limit",
        "an expanded prompt is expanded again",
        "L10",
        "* -whisper",
        (r"L10 .*(\d+ ids became \d+|refused with|have other lengths)",),
    ),
    2: Finding("limit", "surplus placeholders stay", "L9", "*", (r"one item of \w+ too few: accepted",), False),
    3: Finding(
        "limit",
        "a refused request leaves its items in the sender's cache",
        "L3",
        "*",
        (r"in two processes: MultiModalCacheMissError",),
        False,
    ),
    4: Finding(
        "limit", "an array is not its PIL image", "L7", "*", (r"the same content as ndarray has another",), False
    ),
    5: Finding(
        "bug",
        "embeddings of one modality beside raw items of another",
        "L11",
        "qwen2_5_omni qwen3_omni gemma4 ovis2_5",
        (r"embeddings of \w+ pass the parser, then ValueError: Failed to apply",),
        False,
    ),
    6: Finding(
        "bug",
        "embeddings are counted and have no field",
        "L11",
        "aria paligemma kimi_vl deepseek_ocr llava_next_video llava_onevision whisper gemma3n",
        (r"pass the parser, then RuntimeError: Expected there to be \d+ \w+ items in keyword arguments",),
    ),
    7: Finding(
        "limit",
        "embeddings are refused by accident",
        "L11",
        "llama4 glm4v ovis ovis2_5 isaac step3_vl internvl_hf qwen3_omni gemma4 minicpmv4_6",
        (r"pass the parser, then (KeyError|IndexError|AttributeError|TypeError: 'int' object)",),
    ),
    8: Finding(
        "bug",
        "MiniCPM-V reads the sizes of a video's frames as one size",
        "L11",
        "minicpmv minicpmo",
        (r"embeddings of video pass the parser, then TypeError: can't multiply sequence",),
        False,
    ),
    9: Finding(
        "bug",
        "Gemma 3: an image and one newline",
        "L2 L3 L4 L5 L7 L8 L9 L10 L11",
        "gemma3 gemma3n",
        (r"RuntimeError: Expected there to be \d+ prompt placeholders",),
        False,
    ),
    10: Finding(
        "limit",
        "Gemma 3: newlines at the edge of an item are merged",
        "L2",
        "gemma3 gemma3n",
        (r"the ids at \w+\[\d+\] are", r"begins inside the range before it", r"outside the ranges"),
        False,
    ),
    11: Finding("limit", "PaliGemma ends every prompt with a newline", "L2", "paligemma", (r"outside the ranges",)),
    12: Finding("limit", "Phi-3-V: prompts go through text", "L2", "phi3v", (r"outside the ranges",), False),
    13: Finding(
        "bug",
        "LFM2-VL counts tiles and a thumbnail that are not made",
        "L2 L3 L4 L5 L6 L7 L8 L9 L10 L11",
        "lfm2_vl",
        (r"IndexError: index -1 is out of bounds", r"\['(spatial_shapes|pixel_values|pixel_attention_mask)'\]"),
        False,
    ),
    14: Finding("bug", "LFM2-VL: tiles exceed the maximum", "L6", "lfm2_vl", (r"has an item of \d+ rows",)),
    15: Finding("bug", "LLaVA-OneVision: one largest size", "L6", "llava_onevision", (r"has an item of \d+ rows",)),
    16: Finding("bug", "Qwen3-VL: many small frames", "L6", "qwen3_vl", (r"video has an item of \d+ rows",), False),
    17: Finding(
        "limit",
        "the dummy item is not the stated maximum",
        "L6",
        "gemma4 isaac step3_vl qwen3_omni",
        (r"rows are stated for \w+, and the dummy item has \d\d",),
    ),
    18: Finding(
        "bug",
        "Ovis: images of different grids",
        "L2 L3 L4 L5 L7 L8 L9 L10 L11",
        "ovis",
        (r"expected sequence of length \d+ at dim",),
        False,
    ),
    19: Finding(
        "bug",
        "Llama 4 counts without `max_patches`",
        "L3 L5",
        "llama4",
        (r"\['pixel_values'\]: torch.float32",),
        False,
    ),
    20: Finding(
        "bug",
        "one hash for an image that is processed in two ways",
        "L3 L5",
        "deepseek_vl2 h2ovl",
        (r"\['(pixel_values(_flat)?|images_spatial_crop|image_num_patches)'\]", r"embed positions alone and"),
        False,
    ),
    21: Finding(
        "harmless",
        "padding to the largest image of the request",
        "L3 L5",
        "llava_next llava_onevision",
        (r"\['pixel_values'\]",),
        False,
    ),
    22: Finding(
        "harmless", "Molmo: positions in the joint prompt", "L3 L5", "molmo", (r"\['image_input_idx'\]",), False
    ),
    23: Finding(
        "limit",
        "Qwen3-Omni: the last frame of an audio",
        "L3 L5",
        "qwen3_omni",
        (r"\['input_audio_features'\]: values differ",),
        False,
    ),
    24: Finding("bug", "MiniCPM-V counts without `max_slice_nums`", "L1", "minicpmv minicpmo", ()),
    25: Finding(
        "bug",
        "MiniCPM-o labels audio embeddings as images",
        "L11",
        "minicpmo",
        (r"embeddings of audio pass the parser, then KeyError: \"Modality 'image' not found",),
    ),
    26: Finding(
        "bug",
        "a cache smaller than the request",
        "L3",
        "*",
        (r"AssertionError: Expected a cached item for mm_hash",),
        False,
    ),
    27: Finding(
        "bug",
        "Gemma 4: the dummy audio is one window long",
        "L6",
        "gemma4",
        (r"rows are stated for audio, and the dummy item has \d\b",),
    ),
}
"""By their numbers in docs/laws-on-vllm.md; what L1 is for has a test of its own."""


def expected(entry: str, law: str) -> dict[str, int]:
    """Patterns of the messages that are known, with the numbers of their findings."""
    return {
        pattern: number
        for number, finding in FOUND.items()
        for pattern in finding.patterns
        if law in finding.laws.split() and finding.covers(entry)
    }


@dataclass
class Verdict:
    """What came of one law on one entry."""

    entry: str
    law: str
    status: str = "holds"
    violations: dict[str, str] = field(default_factory=dict)
    """Message by kind of violation."""

    reason: str = ""
    seconds: float = 0.0


def kind(message: str) -> str:
    """What is the same in two messages about one fault."""
    return re.sub(r"-?\d+(\.\d+)?", "#", message.split("\n", 1)[0].split(" on data=")[0])[:160]


def tolerant(law: Law, known: Callable[[str], bool]) -> Law:
    """The law, but that it passes over the violations that `known` says yes to."""

    def attempt(call: Callable[..., Any], *given: Any) -> tuple[bool, Any]:
        try:
            return True, call(*given)
        except (HypothesisException, NotApplicable):
            raise
        except Violation as violation:
            if not known(str(violation)):
                raise
        except Exception as error:
            if not known(f"{law.name}: {type(error).__name__}: {error}"):
                raise
        return False, None

    def check(subject: Subject, *rest: Any) -> Any:
        if law.kind != "machine":
            attempt(law.check, subject, *rest)
            return None

        @st.composite
        def drawn(draw: Callable[..., Any], requests: SearchStrategy[Request]) -> Request:
            fine, request = attempt(draw, requests)
            assume(fine)
            return request

        forgiving = copy(subject)
        forgiving.requests = lambda **options: drawn(subject.requests(**options))

        class Tolerant(law.check(forgiving)):
            def _compare(self, *given: Any) -> None:
                if not attempt(super()._compare, *given)[0]:  # a cache after a violation is another story
                    self.seen.clear()
                    for cache in self.caches.values():
                        cache.sender.clear_cache()
                        if cache.receiver is not None:
                            cache.receiver.clear_cache()

        return Tolerant

    return replace(law, check=check)


@contextmanager
def steadily() -> Iterator[None]:
    """The same examples each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: more threads are five times slower on a busy machine
    try:
        with profile(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)):
            yield
    finally:
        torch.set_num_threads(threads)


def verdict(
    entry: str,
    number: str,
    *,
    examples: int,
    known: Sequence[str] = (),
    sought: Sequence[str] = (),
    most: int = 8,
    doublings: int = 4,
) -> Verdict:
    """Check a law of one entry, and again without each violation that was found, until nothing new turns up.

    Args:
        entry: a name of the zoo.
        number: of a law.
        examples: to draw each time.
        known: patterns (for `re.search`) of violations to pass over and count.
        sought: those of them for which the examples are doubled, up to `doublings` times, until all have been seen.
        most: distinct violations to look for that are not known.
    """
    law, found, begin = LAWS[number], Verdict(entry, number), time.perf_counter()

    def passed_over(message: str) -> bool:
        pattern = next((p for p in known if re.search(p, message)), None)
        if pattern is not None:
            found.violations.setdefault(pattern, message)
        return pattern is not None or kind(message) in found.violations

    while len(set(found.violations) - set(known)) < most:
        try:
            run_law(tolerant(law, passed_over), subject(entry), examples=examples, database=False)
        except NotApplicable as reason:
            found.status, found.reason = "skipped", str(reason)
            break
        except Violation as violation:
            message = str(violation)
            if kind(message) in found.violations:
                break
            found.violations[kind(message)] = message
        except Exception as error:  # of Hypothesis: nothing could be drawn, or it did not happen again
            found.violations[type(error).__name__] = f"{law.name}: {type(error).__name__}: {error}"
            break
        else:
            if not doublings or set(sought) <= set(found.violations):
                break
            examples, doublings = 2 * examples, doublings - 1
    if found.violations:
        found.status = "violated"
    found.seconds = time.perf_counter() - begin
    return found


def survey(
    names: Iterable[str], *, laws: Iterable[str] = CHECKED, examples: int = 30, tell: Callable[[Verdict], None] = print
) -> list[Verdict]:
    made = []
    for name in names:
        for number in laws:
            try:
                subject(name)
            except Exception as error:
                made.append(Verdict(name, number, "violated", {"create": f"{type(error).__name__}: {error}"}))
            else:
                made.append(verdict(name, number, examples=examples, known=list(expected(name, number))))
            tell(made[-1])
    return made


MARKS = {"holds": "[green]✓[/]", "skipped": "[dim]–[/]"}


def table(verdicts: Sequence[Verdict], laws: Sequence[str]) -> Any:
    from rich.table import Table

    made = Table("entry", *laws, "s", title="laws on vLLM's hand-written processors")
    for name in dict.fromkeys(v.entry for v in verdicts):
        row: Mapping[str, Verdict] = {v.law: v for v in verdicts if v.entry == name}
        marks = [MARKS.get(row[n].status, f"[red]{len(row[n].violations)}[/]") for n in laws]
        made.add_row(name, *marks, f"{sum(v.seconds for v in row.values()):.1f}")
    return made


def markdown(verdicts: Sequence[Verdict], laws: Sequence[str]) -> str:
    """The table of docs/laws-on-vllm.md: findings by their numbers, `?` for what is none of them."""
    lines = ["| entry | " + " | ".join(laws) + " |", "| --- |" + " :-: |" * len(laws)]
    for name in dict.fromkeys(v.entry for v in verdicts):
        cells = []
        for law in laws:
            found = next(v for v in verdicts if (v.entry, v.law) == (name, law))
            numbers = {str(expected(name, law).get(what, "?")) for what in found.violations}
            mark = {"holds": "✓", "skipped": "–"}.get(found.status, "")
            cells.append(mark or ", ".join(sorted(numbers, key=lambda n: (len(n), n))))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(description="The laws on vLLM's hand-written processors.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="entries of tools.survey.zoo; all without any")
    parser.add_argument("--examples", type=int, default=30)
    parser.add_argument("--laws", default=",".join(CHECKED), metavar="L2,L5", help="%(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table of docs/laws-on-vllm.md there")
    given = parser.parse_args(arguments)
    names, laws = given.names or list(ZOO), given.laws.split(",")
    if unknown := [n for n in names if n not in ZOO] + [n for n in laws if n not in LAWS]:
        parser.error(f"expected names of {', '.join(ZOO)}, and laws of {', '.join(LAWS)}, got {', '.join(unknown)}")
    console = Console(width=None if sys.stdout.isatty() else 200)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=console, disable=not sys.stdout.isatty())
    with steadily(), progress:
        task = progress.add_task("", total=len(names) * len(laws))

        so_far: list[Verdict] = []

        def tell(verdict: Verdict) -> None:
            so_far.append(verdict)
            if given.json:  # each time: the next one may take long
                given.json.write_text(json.dumps([asdict(v) for v in so_far], indent=1))
            progress.update(task, advance=1, description=f"{verdict.entry} {verdict.law}")
            for what, message in verdict.violations.items():
                number = expected(verdict.entry, verdict.law).get(what)
                if number is not None:
                    message = f"finding {number}: " + message.split("\n", 1)[0][:160]
                console.print(f"{verdict.entry}: {message}", markup=False, highlight=False, soft_wrap=True)

        verdicts = survey(names, laws=laws, examples=given.examples, tell=tell)
    console.print(table(verdicts, laws))
    if given.markdown:
        given.markdown.write_text(markdown(verdicts, laws) + "\n")
    return int(any(what not in expected(v.entry, v.law) for v in verdicts for what in v.violations))


if __name__ == "__main__":
    # as the module that tests import, not as __main__
    from tools.survey.findings import main as run

    sys.exit(run())

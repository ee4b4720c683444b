"""The laws of `mmkit.testing` on vLLM's own processors, compared with docs/data/laws-on-vllm.md.

Per law every distinct violation is looked for, not only the first: a violation is recognised by the
first line of its message without its numbers, and the search goes on without it. The same examples
are drawn each time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

import torch
import typer
from hypothesis import settings
from hypothesis.errors import HypothesisException
from tqdm import tqdm

from mmkit.testing import Case, KitError, Law, NotApplicable, Violation, check_law
from tools.shared import format_table

from . import page
from .laws import EVERY, SURVEYED
from .zoo import ZOO, subject

MAX_UNKNOWN = 8
"""Distinct violations to look for that are no finding of the page."""

DOUBLINGS = 4
"""How often the examples are doubled while a finding of the page has not shown up."""

MAX_MESSAGE_LENGTH = 160
"""Characters of a message that are printed or compared."""

Entry: Any = StrEnum("Entry", [(name, name) for name in ZOO])
"""What the command line takes as an entry of the zoo."""

Surveyed: Any = StrEnum("Surveyed", [(name, name) for name in SURVEYED])
"""What the command line takes as a law."""


def main(
    names: Annotated[list[Entry] | None, typer.Argument(metavar="[NAME]...")] = None,
    laws: Annotated[list[Surveyed], typer.Option("--law")] = SURVEYED,
    examples: Annotated[int, typer.Option(min=1, help="Per law, before doublings.")] = 30,
    doublings: Annotated[
        int, typer.Option(min=0, help="Of the examples, while a finding has not been seen.")
    ] = DOUBLINGS,
) -> None:
    """Check the laws on entries of the zoo, and report where the stored page disagrees.

    The exit status is 1 if it does.
    """
    settings.register_profile("survey", derandomize=True)
    settings.load_profile("survey")
    torch.set_num_threads(1)  # tiny tensors: more threads are five times slower on a busy machine
    stored = page.read_page()
    verdicts: list[Verdict] = []
    disagreements: list[str] = []
    pairs = [(entry, law) for entry in names or ZOO for law in laws]
    for entry, law in tqdm(pairs, unit="law", disable=None):
        verdict = survey_law(entry, law, stored, examples, doublings)
        verdicts.append(verdict)
        for number, message in verdict.findings.items():
            first_line = message.splitlines()[0][:MAX_MESSAGE_LENGTH]
            tqdm.write(f"{entry}: finding {number}: {first_line}")
        for sentence in find_disagreements(verdict, stored):
            disagreements.append(sentence)
            tqdm.write(sentence)
    print(f"\n{format_verdicts(verdicts)}\n")
    for sentence in disagreements:
        print(sentence)
    num_held = sum(str(verdict) == "✓" for verdict in verdicts)
    num_skipped = sum(verdict.is_skipped for verdict in verdicts)
    num_errors = sum(bool(verdict.kit_error) for verdict in verdicts)
    print(
        f"{len(verdicts)} checks: {num_held} hold, {num_skipped} say nothing, "
        f"{num_errors} kit error(s)"
    )
    print(f"{len(disagreements)} disagreement(s) with {page.PATH.name}")
    sys.exit(bool(disagreements))


@dataclass
class Verdict:
    """What came of one law on one entry.

    Attributes:
        is_skipped: the law has nothing to say about the entry.
        findings: first messages, by findings of the page.
        unknown: other messages, by their kinds.
        kit_error: what broke in the kit itself.
    """

    entry: str
    law: str
    is_skipped: bool = False
    findings: dict[int, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    kit_error: str = ""

    def __str__(self) -> str:
        """Return a cell of the page's table."""
        marks = [str(number) for number in sorted(self.findings)]
        marks.extend("?" for _ in self.unknown)
        if self.kit_error:
            marks.append("kit error")
        if marks:
            return ", ".join(marks)
        return "–" if self.is_skipped else "✓"


def survey_law(
    entry: str, law: str, stored: page.Page, examples: int, doublings: int = DOUBLINGS
) -> Verdict:
    """Check a law on one entry, again without each violation, until nothing new turns up."""
    verdict = Verdict(entry, law)
    findings_of_page = stored.cells.get((entry, law), set())
    max_examples = examples << doublings

    def is_found(message: str) -> bool:
        number = stored.find(entry, law, message)
        if number is None:
            return shorten(message) in verdict.unknown
        verdict.findings.setdefault(number, message)
        return True

    while len(verdict.unknown) < MAX_UNKNOWN:
        try:
            check_law(tolerate(EVERY[law], is_found), subject(entry), examples=examples)
        except NotApplicable:
            verdict.is_skipped = True
            break
        except KitError as error:
            verdict.kit_error = str(error)
            break
        except Violation as error:
            message = str(error)
            if is_found(message):  # it does not happen each time
                break
            verdict.unknown[shorten(message)] = message
        else:
            if examples >= max_examples or findings_of_page <= verdict.findings.keys():
                break
            examples *= 2
    return verdict


def tolerate(law: Law, is_found: Callable[[str], bool]) -> Law:
    """Return the law, but that it passes over the violations that have been found before."""

    def check(case: Case) -> None:
        try:
            law.check(case)
        except (HypothesisException, NotApplicable, KitError):
            raise
        except Violation as violation:
            if not is_found(str(violation)):
                raise
        except Exception as error:
            message = f"{law.name}: {type(error).__name__}: {error}"
            if case.is_of_kit(error) or not is_found(message):
                raise

    return replace(law, check=check)


def shorten(message: str) -> str:
    """Return what is the same in two messages about one fault."""
    first_line = message.split("\n", 1)[0].split(" on data=")[0]
    return re.sub(r"-?\d+(\.\d+)?", "#", first_line)[:MAX_MESSAGE_LENGTH]


def find_disagreements(verdict: Verdict, stored: page.Page) -> list[str]:
    """Return a sentence for each difference between a verdict and the page."""
    entry = verdict.entry
    sentences = []
    if verdict.kit_error:
        sentences.append(f"{entry}, kit error: {verdict.kit_error}")
    for message in verdict.unknown.values():
        sentences.append(f"{entry}, not on the page: {message}")
    findings = stored.cells.get((entry, verdict.law), set())
    for number in sorted(findings - verdict.findings.keys()):
        sentences.append(f"{entry}, {verdict.law}: finding {number} of the page was not seen")
    return sentences


def format_verdicts(verdicts: list[Verdict]) -> str:
    """Return the table of the page: a row per entry, a column per law."""
    laws = dict.fromkeys(verdict.law for verdict in verdicts)
    rows: dict[str, list[str]] = {}
    for verdict in verdicts:
        row = rows.setdefault(verdict.entry, [verdict.entry])
        row.append(str(verdict))
    return format_table(["entry", *laws], rows.values())


if __name__ == "__main__":
    typer.run(main)

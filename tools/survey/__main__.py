"""The laws of `mmkit.testing` on vLLM's own processors, compared with docs/data/laws-on-vllm.md.

Per law every distinct violation is looked for, not the first: one is told by the first line of its
message without its numbers, and the search goes on without it. The same examples are drawn each
time.
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
from tools.shared import table as markdown

from . import page
from .laws import EVERY, SURVEYED
from .zoo import ZOO, subject

UNKNOWN = 8
"""Distinct violations to look for that are no finding of the page."""
DOUBLINGS = 4
"""How often the examples are doubled while a finding of the page has not been seen."""

Entry: Any = StrEnum("Entry", [(name, name) for name in ZOO])
Surveyed: Any = StrEnum("Surveyed", [(name, name) for name in SURVEYED])
"""What the command line takes as an entry of the zoo, and as a law."""


@dataclass
class Verdict:
    """What came of one law on one entry.

    Attributes:
        findings: first messages, by findings of the page.
        unknown: other messages, by their kinds.
        kit_error: what broke in the kit itself.
    """

    entry: str
    law: str
    skipped: bool = False
    findings: dict[int, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    kit_error: str = ""

    def __str__(self) -> str:
        """A cell of the page's table."""
        numbers = [str(n) for n in sorted(self.findings)] + ["?"] * len(self.unknown)
        numbers += ["kit error"] * bool(self.kit_error)
        return ", ".join(numbers) or ("–" if self.skipped else "✓")


def kind(message: str) -> str:
    """What is the same in two messages about one fault."""
    return re.sub(r"-?\d+(\.\d+)?", "#", message.split("\n", 1)[0].split(" on data=")[0])[:160]


def tolerant(law: Law, known: Callable[[str], bool]) -> Law:
    """The law, but that it passes over the violations that `known` says yes to."""

    def check(case: Case) -> None:
        try:
            law.check(case)
        except (HypothesisException, NotApplicable, KitError):
            raise
        except Violation as violation:
            if not known(str(violation)):
                raise
        except Exception as error:
            said = f"{law.name}: {type(error).__name__}: {error}"
            if case.is_of_kit(error) or not known(said):
                raise

    return replace(law, check=check)


def verdict(
    entry: str, law: str, stated: page.Page, examples: int, doublings: int = DOUBLINGS
) -> Verdict:
    """Check a law of one entry, again without each violation, until nothing new turns up."""
    result, most = Verdict(entry, law), examples << doublings

    def known(message: str) -> bool:
        number = stated.finding(entry, law, message)
        if number is not None:
            result.findings.setdefault(number, message)
        return number is not None or kind(message) in result.unknown

    while len(result.unknown) < UNKNOWN:
        try:
            check_law(tolerant(EVERY[law], known), subject(entry), examples=examples)
        except NotApplicable:
            result.skipped = True
            break
        except KitError as error:
            result.kit_error = str(error)
            break
        except Violation as error:
            if known(str(error)):  # it does not happen each time
                break
            result.unknown[kind(str(error))] = str(error)
        else:
            if examples >= most or stated.cells.get((entry, law), set()) <= result.findings.keys():
                break
            examples *= 2
    return result


def disagreements(seen: Verdict, stated: page.Page) -> list[str]:
    """What the page says otherwise."""
    gone = sorted(stated.cells.get((seen.entry, seen.law), set()) - seen.findings.keys())
    return [
        *([f"{seen.entry}, kit error: {seen.kit_error}"] * bool(seen.kit_error)),
        *(f"{seen.entry}, not on the page: {message}" for message in seen.unknown.values()),
        *(
            f"{seen.entry}, {seen.law}: finding {number} of the page was not seen"
            for number in gone
        ),
    ]


def table(verdicts: list[Verdict]) -> str:
    """The table of the page."""
    laws = list(dict.fromkeys(seen.law for seen in verdicts))
    rows = [
        [entry, *(str(seen) for seen in verdicts if seen.entry == entry)]
        for entry in dict.fromkeys(seen.entry for seen in verdicts)
    ]
    return markdown(["entry", *laws], rows)


def main(
    names: Annotated[list[Entry] | None, typer.Argument(metavar="[NAME]...")] = None,
    laws: Annotated[list[Surveyed], typer.Option("--law")] = SURVEYED,
    examples: Annotated[int, typer.Option(min=1, help="Per law, before doublings.")] = 30,
    doublings: Annotated[
        int, typer.Option(min=0, help="Of the examples, while a finding has not been seen.")
    ] = DOUBLINGS,
) -> None:
    """Check the laws on entries of the zoo, and tell where the stored page disagrees; status 1
    if it does."""
    settings.register_profile("survey", derandomize=True)
    settings.load_profile("survey")
    torch.set_num_threads(1)  # tiny tensors: more threads are five times slower on a busy machine
    stated, verdicts, wrong = page.read(), [], []
    for entry, law in tqdm(
        [(entry, law) for entry in names or ZOO for law in laws], unit="law", disable=None
    ):
        seen = verdict(entry, law, stated, examples, doublings)
        verdicts.append(seen)
        for number, message in seen.findings.items():
            tqdm.write(f"{entry}: finding {number}: {message.splitlines()[0][:160]}")
        for sentence in disagreements(seen, stated):
            wrong.append(sentence)
            tqdm.write(sentence)
    print("", table(verdicts), "", *wrong, sep="\n")
    held = sum(str(seen) == "✓" for seen in verdicts)
    skipped = sum(seen.skipped for seen in verdicts)
    broken = sum(bool(seen.kit_error) for seen in verdicts)
    print(f"{len(verdicts)} checks: {held} hold, {skipped} say nothing, {broken} kit error(s)")
    print(f"{len(wrong)} disagreement(s) with {page.PATH.name}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)

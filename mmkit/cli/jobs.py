"""``mmkit check --jobs N``: processes that share the laws, each with a subject of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path
from typing import Any

from ..testing import LAWS, Report, Result, Subject, check_subject
from .check import subject_of
from .common import REGISTERED, load_spec, quiet

Opening = tuple[str, Path, bool]
"""The name of a spec, or `REGISTERED`; the folder of a checkpoint; whether its code may run."""


def shared(
    opening: Opening,
    numbers: Sequence[str],
    jobs: int,
    *,
    progress: Callable[[Result], None] | None,
    expected: Mapping[str, str],
    title: str,
    budget: float | None,
    examples: int | None,
) -> Report:
    """Check laws in several processes.

    Args:
        opening: what they are checked on.
        numbers: of the laws.
        jobs: processes.
        progress: called with each result as it comes.
        expected: as for `check`.
        title: for the report.
        budget: seconds for all laws together; each gets its share.
        examples: as for `check`.

    Returns:
        The results in the order of the numbers. A law whose process died is a kit error.

    Raises:
        UsageError: there is no processor for the checkpoint.
    """
    share = None if budget is None else budget * jobs / len(numbers)
    options = {"examples": examples, "budget": share}
    results: dict[str, Result] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), quiet) as pool:
        # those that take longest come first
        waiting = {
            pool.submit(_check, opening, title, number, expected.get(number), options): number
            for number in sorted(numbers, key=lambda number: LAWS[number].kind == "drawn")
        }
        for done in as_completed(waiting):
            number = waiting[done]
            try:
                title, results[number] = done.result()
            except BrokenProcessPool as death:
                detail = f"its process died: {death}"
                results[number] = Result(LAWS[number].name, "kit error", detail)
            if progress is not None:
                progress(results[number])
    return Report(title, [results[number] for number in numbers])


@cache
def _opened(target: str, folder: Path, trust_remote_code: bool) -> Subject:
    spec = None if target == REGISTERED else load_spec(target)
    return subject_of(spec, folder, trust_remote_code)


def _check(
    opening: Opening, title: str, number: str, known: str | None, options: dict[str, Any]
) -> tuple[str, Result]:
    """The result of a law, and the title of its report, which names the modalities that cannot be
    drawn."""
    expected = {} if known is None else {number: known}
    subject = _opened(*opening)
    report = check_subject(subject, laws=[number], title=title, expected=expected, **options)
    (result,) = report.results
    return report.subject, result

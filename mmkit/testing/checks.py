"""Checks of laws: of one law, of all with a report, or of each as a test of pytest."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from ..errors import MmkitError
from ..model_spec import ModelSpec
from .law import Case, KitError, Law, NotApplicable, NotDrawn, Status, Verdict, Violation
from .laws import LAWS
from .strategies import for_each
from .subject import Subject, of_spec
from .vllm_engine import open_both
from .vllm_model import load_model

# A law that says something about fewer than one in so many drawn requests says too little.
# Hypothesis' own health checks look at the first fifty draws and at a clock, which is the
# processor's here, so they are off; this share is of all draws.
_MAX_DRAWS_PER_CHECK = 20


# -- reports ---------------------------------------------------------------------------------------


def check(
    subject: Subject | ModelSpec,
    model_dir: str | Path = "",
    *,
    laws: Iterable[str] | None = None,
    model: bool = False,
    examples: int | None = None,
    **options: Any,
) -> Report:
    """Check the laws on a spec, or on any processor.

    Args:
        subject: a spec, or what `of_spec`, `of_registered` or `Subject` make.
        model_dir: for a spec, a folder with config, tokenizer and processor files; weights are not
            needed.
        laws: names of laws, for example ``["ranges", "cache"]``; None for all.
        model: check the laws about the model class too. It is loaded with dummy weights, without an
            engine. For a class that `mmkit.serve_transformers` registers, an engine in this process
            runs the checkpoint's weights, if it has any.
        examples: Hypothesis examples per law; None for the current profile's number.
        options: for `of_spec`: `kwargs` and `samples` to draw from, `classes` to check in place of
            the generated ones, options of vLLM's ModelConfig; `trust_remote_code=True` runs code
            that the folder brings.

    Returns:
        One result per law; false if a law is violated, or mmkit's own code failed.

    Raises:
        SpecError: the spec does not fit the checkpoint.
        MmkitError: an unknown law.
    """
    names = LAWS if laws is None else laws
    chosen = [find_law(name) for name in names]
    subject = _open_subject(subject, model_dir, **options)
    if subject.plan is None:
        title = str(subject.model_dir)
    else:
        title = subject.plan.spec.name
    if subject.undrawn:
        title += f", without items of {subject.describe_undrawn()}"
    report = Report(title)
    for law in chosen:
        report.results.append(_make_result(law, subject, examples, has_model=model))
    return report


@dataclass(frozen=True)
class Result:
    """The result of one law.

    Attributes:
        law: name of the law.
        status: ``holds``; ``violated``; ``not applicable``: the law has nothing to say about this
            subject; ``not drawn``: the law said something about too few of the drawn requests;
            ``kit error``: an exception of mmkit's own code, which says nothing about the subject.
        detail: the observation, the reason, or the traceback of a kit error.
    """

    law: str
    status: Status
    detail: str = ""

    @property
    def sentence(self) -> str:
        """The status, and the detail."""
        if not self.detail:
            return self.status
        return f"{self.status}: {self.detail}"


@dataclass
class Report:
    """The results of all laws; true if none is violated, and mmkit's own code did not fail.

    Attributes:
        subject: title of the report.
        results: one per law.
    """

    subject: str
    results: list[Result] = field(default_factory=list)

    def __bool__(self) -> bool:
        statuses = {result.status for result in self.results}
        return statuses.isdisjoint({"violated", "kit error"})

    @property
    def summary(self) -> str:
        """The numbers of laws that hold, that are violated, and of the others."""
        counts = Counter(result.status for result in self.results)
        held = counts["holds"]
        violated = counts["violated"]
        neither = len(self.results) - held - violated
        return f"{held} held, {violated} violated, {neither} neither"

    def __str__(self) -> str:
        width = max((len(result.law) for result in self.results), default=0)
        lines = [self.subject]
        for result in self.results:
            lines.append(f"  {result.law:{width}}  {result.sentence}")
        lines.append(f"  {self.summary}")
        return "\n".join(lines)


def _open_subject(subject: Subject | ModelSpec, model_dir: str | Path, **options: Any) -> Subject:
    if isinstance(subject, ModelSpec):
        return of_spec(subject, model_dir, **options)
    return subject


def _make_result(law: Law, subject: Subject, examples: int | None, *, has_model: bool) -> Result:
    """Check a law, and return its verdict as a result."""
    if law.needs_model and not has_model:
        return Result(law.name, "not applicable", "needs the model: say model=True")
    try:
        check_law(law, subject, examples=examples)
    except KitError as error:
        return Result(law.name, error.status, "".join(traceback.format_exception(error)))
    except Verdict as verdict:
        return Result(law.name, verdict.status, str(verdict).removeprefix(f"{law.name}: "))
    return Result(law.name, "holds")


# -- one law ---------------------------------------------------------------------------------------


def check_law(law: str | Law, subject: Subject, *, examples: int | None = None) -> None:
    """Check one law on a subject.

    Args:
        law: a law, or its name, for example ``"cache"``.
        subject: see `of_spec` and `of_registered`.
        examples: Hypothesis examples; None for the current profile's number.

    Raises:
        Violation: the law does not hold. The message has the smallest failing request that
            Hypothesis found.
        NotApplicable: the law has nothing to say about this subject.
        NotDrawn: the law said something about none, or fewer than one in twenty, of the drawn
            requests.
        KitError: mmkit's own code failed; see `Case.is_of_kit`.
        MmkitError: an unknown law.
    """
    if isinstance(law, str):
        law = find_law(law)
    if not subject.limits:
        raise NotDrawn(f"give samples= a strategy for items of {subject.describe_undrawn()}")
    max_examples = max(1, (examples or settings().max_examples) // law.cost)
    for model_context in _list_model_contexts(law, subject):
        case = Case(law, subject)
        try:
            with model_context as case.model:
                _check_drawn_requests(case, max_examples)
        except Verdict:
            raise
        except Exception as error:
            raise case.verdict(error) from error


def find_law(name: str) -> Law:
    """Return the law of a name.

    Raises:
        MmkitError: there is none.
    """
    if name not in LAWS:
        raise MmkitError("laws", f"some of {', '.join(LAWS)}", repr(name))
    return LAWS[name]


def _list_model_contexts(law: Law, subject: Subject) -> list[Any]:
    """Return the contexts in which a law is checked: one per dtype of its model, or one of none.

    Raises:
        NotApplicable: the model takes no rows.
    """
    if not law.needs_model:
        return [nullcontext()]
    if subject.plan is not None and subject.plan.spec.is_raw:
        raise NotApplicable("the items take no positions: forward gets their fields, not rows")
    if law.needs_engine:
        return [open_both(subject)]
    config = subject.processor.info.ctx.model_config
    return [load_model(config, dtype=dtype) for dtype in law.dtypes]


def _check_drawn_requests(case: Case, max_examples: int) -> None:
    """Check a law on drawn requests.

    Raises:
        NotDrawn: the law was checked for too few of them; the others were rejected.
    """
    drawn_count = 0
    checked_count = 0

    def check_once(data: Any) -> None:
        nonlocal drawn_count, checked_count
        drawn_count += 1
        replace(case, data=data).check()
        checked_count += 1

    try:
        for_each(st.data(), check_once, max_examples=max_examples)
    except Unsatisfiable as error:
        share = "no request was found"
        if drawn_count:
            share = f"none of {drawn_count} drawn requests is one"
        raise NotDrawn(f"{share} about which this law says anything") from error
    if checked_count * _MAX_DRAWS_PER_CHECK < drawn_count:
        raise NotDrawn(f"holds on {checked_count} of {drawn_count} drawn requests")


# -- pytest ----------------------------------------------------------------------------------------


def parametrize(
    subject: Subject | ModelSpec,
    model_dir: str | Path = "",
    *,
    expected: Mapping[str, str] | None = None,
    model: bool = False,
    examples: int | None = None,
    **options: Any,
) -> Any:
    """Return a pytest decorator that makes one test per law of a test function.

    The test function receives `check`, and calls it.

    Args:
        subject: as for `check`.
        model_dir: as for `check`.
        expected: laws that are known to be violated, each with the reason or a link; their tests
            are strict `xfail`.
        model: as for `check`.
        examples: as for `check`.
        options: as for `check`.
    """
    import pytest

    @cache  # the subject is opened by the first test, not where tests are collected
    def open_subject() -> Subject:
        return _open_subject(subject, model_dir, **options)

    parameters = []
    for name, law in LAWS.items():
        if law.needs_model and not model:
            continue
        test = _make_test(law, open_subject, examples)
        parameters.append(pytest.param(test, id=name, marks=list_marks(law, expected or {})))
    return pytest.mark.parametrize("check", parameters)


def _make_test(
    law: Law, open_subject: Callable[[], Subject], examples: int | None
) -> Callable[[], None]:
    def check_in_this_test() -> None:
        check_in_test(law, open_subject(), examples)

    return check_in_this_test


def check_in_test(law: Law, subject: Subject, examples: int | None) -> None:
    """Check a law in a test of pytest.

    The test is skipped where the law has nothing to say, and shows a violation without the code
    that found it.
    """
    import pytest

    message = ""
    try:
        check_law(law, subject, examples=examples)
    except NotApplicable as reason:
        pytest.skip(f"{law.name}: {reason}")
    except Violation as violation:
        message = str(violation)
    # inside the `except`, pytest would show the violation twice: as the failure's context, too
    if message:
        pytest.fail(message, pytrace=False)


def list_marks(law: Law, expected: Mapping[str, str]) -> list[Any]:
    """Return the mark of a law that is known to be violated; none for other laws."""
    import pytest

    if law.name not in expected:
        return []
    failure = pytest.fail.Exception
    return [pytest.mark.xfail(strict=True, raises=failure, reason=expected[law.name])]

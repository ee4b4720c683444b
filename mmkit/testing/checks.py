"""Laws checked: one, some with a report, or each as a test of pytest."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
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
from .vllm_model import loaded_model

# A law that says something about fewer than one in so many drawn requests says too little.
# Hypothesis' own health checks look at the first fifty draws and at a clock, which is the
# processor's here, so they are off; this share is of all draws.
_FEW = 20


def check_law(law: str | Law, subject: Subject, *, examples: int | None = None) -> None:
    """Check one law on a subject.

    Args:
        law: a law, or its name, for example ``"cache"``.
        subject: see `of_spec` and `of_registered`.
        examples: Hypothesis examples; None for those of the current profile.

    Raises:
        Violation: the law does not hold. The message has the smallest failing request that
            Hypothesis found.
        NotApplicable: the law has nothing to say about this subject.
        NotDrawn: the law said something about none, or fewer than one in twenty, of the drawn
            requests.
        KitError: mmkit's own code failed; see `Case.is_of_kit`.
        MmkitError: an unknown law.
    """
    law = law_of(law) if isinstance(law, str) else law
    if not subject.limits:
        without = " and ".join(subject.undrawn) or "some modality"
        raise NotDrawn(f"give samples= a strategy for items of {without}")
    models: list[Any] = [nullcontext()]
    if law.needs_model:
        if subject.plan is not None and subject.plan.spec.is_raw:
            raise NotApplicable("the items take no positions: forward gets their fields, not rows")
        config = subject.processor.info.ctx.model_config
        models = [loaded_model(config, dtype=dtype) for dtype in law.dtypes]
    examples = max(1, (examples or settings().max_examples) // law.cost)
    for model in models:
        case = Case(law, subject)
        try:
            with model as case.model:
                _check(case, examples)
        except Verdict:
            raise
        except Exception as error:
            raise case.verdict(error) from error


def law_of(name: str) -> Law:
    """The law of a name.

    Raises:
        MmkitError: there is none.
    """
    if name not in LAWS:
        raise MmkitError("laws", f"some of {', '.join(LAWS)}", repr(name))
    return LAWS[name]


def _check(case: Case, examples: int) -> None:
    drawn = said = 0

    def once(data: Any) -> None:
        nonlocal drawn, said
        drawn += 1
        replace(case, data=data).check()
        said += 1

    try:
        for_each(st.data(), once, max_examples=examples)
    except Unsatisfiable as error:
        of = f"none of {drawn} drawn requests is one" if drawn else "no request was found"
        raise NotDrawn(f"{of} about which this law says anything") from error
    if said * _FEW < drawn:
        raise NotDrawn(f"holds on {said} of {drawn} drawn requests")


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
        return self.status + (f": {self.detail}" if self.detail else "")


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
        return not any(result.status in ("violated", "kit error") for result in self.results)

    @property
    def summary(self) -> str:
        """The numbers of laws that hold, that are violated, and of the rest."""
        counts = Counter(result.status for result in self.results)
        held, violated = counts["holds"], counts["violated"]
        return f"{held} held, {violated} violated, {len(self.results) - held - violated} neither"

    def __str__(self) -> str:
        width = max((len(result.law) for result in self.results), default=0)
        lines = [f"  {result.law:{width}}  {result.sentence}" for result in self.results]
        return "\n".join([self.subject, *lines, f"  {self.summary}"])


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
            engine.
        examples: Hypothesis examples per law; None for those of the current profile.
        options: for `of_spec`: `kwargs` and `samples` to draw from, `classes` to check in place of
            the generated ones, options of vLLM's ModelConfig; `trust_remote_code=True` runs code
            that the folder brings.

    Returns:
        One result per law; false if a law is violated, or mmkit's own code failed.

    Raises:
        SpecError: the spec does not fit the checkpoint.
        MmkitError: an unknown law.
    """
    chosen = [law_of(name) for name in (LAWS if laws is None else laws)]
    subject = _opened(subject, model_dir, **options)
    title = str(subject.model_dir) if subject.plan is None else subject.plan.spec.name
    if subject.undrawn:
        title += f", without items of {' and '.join(subject.undrawn)}"
    return Report(title, [_result(law, subject, examples, model=model) for law in chosen])


def _opened(subject: Subject | ModelSpec, model_dir: str | Path, **options: Any) -> Subject:
    return of_spec(subject, model_dir, **options) if isinstance(subject, ModelSpec) else subject


def _result(law: Law, subject: Subject, examples: int | None, *, model: bool) -> Result:
    if law.needs_model and not model:
        return Result(law.name, "not applicable", "needs the model: say model=True")
    try:
        check_law(law, subject, examples=examples)
    except KitError as error:
        return Result(law.name, error.status, "".join(traceback.format_exception(error)))
    except Verdict as verdict:
        return Result(law.name, verdict.status, str(verdict).removeprefix(f"{law.name}: "))
    return Result(law.name, "holds")


def parametrize(
    subject: Subject | ModelSpec,
    model_dir: str | Path = "",
    *,
    expected: Mapping[str, str] | None = None,
    model: bool = False,
    examples: int | None = None,
    **options: Any,
) -> Any:
    """A pytest decorator: one test per law. The test function receives `check`, and calls it. The
    arguments are those of `check`; `expected` has laws that are known to be violated, each with the
    reason or a link: a strict `xfail`."""
    import pytest

    made, known = cache(partial(_opened, subject, model_dir, **options)), expected or {}
    checks = []
    for name, law in LAWS.items():
        if model or not law.needs_model:
            call = partial(check_in_test, law, made, examples)
            checks.append(pytest.param(call, id=name, marks=marks_of(law, known)))
    return pytest.mark.parametrize("check", checks)


def check_in_test(law: Law, subject: Callable[[], Subject], examples: int | None) -> None:
    """`check_law` in a test of pytest, which is skipped where the law has nothing to say, and shows
    a violation without the code that found it."""
    import pytest

    try:
        check_law(law, subject(), examples=examples)
    except NotApplicable as reason:
        pytest.skip(str(reason))
    except Violation as violation:
        pytest.fail(str(violation), pytrace=False)


def marks_of(law: Law, expected: Mapping[str, str]) -> list[Any]:
    """The mark of a law that is known to be violated."""
    import pytest

    if law.name not in expected:
        return []
    raised = pytest.fail.Exception
    return [pytest.mark.xfail(strict=True, raises=raised, reason=expected[law.name])]

"""A conformance kit for multimodal processors on vLLM: the laws, and one line to check them.

>>> import mmkit.testing
>>> print(mmkit.testing.check(SPEC, "path/of/checkpoint"))  # every law that needs no model
>>> print(mmkit.testing.check(SPEC, "path/of/checkpoint", model=True))  # and those that do
>>> print(mmkit.testing.check_registered("path/of/checkpoint"))  # what vLLM has for it

In a test file, with one test per law and law names as ids (``pytest -k L3``)::

    @mmkit.testing.parametrize(SPEC, "path/of/checkpoint", expected={"L5": "pads to the batch"})
    def test_laws(check):
        check()

Or without any file: ``pytest --mmkit package.module:SPEC --mmkit-model path/of/checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test

from ..model_spec import ModelSpec
from ..vllm_api import harness
from .drawing import for_each, quiet
from .laws import LAWS, Case, Law, NotApplicable, Violation
from .strategies import (
    AudioSample,
    ImageSample,
    RecordSample,
    Request,
    Sample,
    TensorSample,
    TextSample,
    VideoSample,
    items,
    prompts,
)
from .subject import Subject, of_registered, of_spec

__all__ = [
    "LAWS",
    "AudioSample",
    "Case",
    "ImageSample",
    "Law",
    "NotApplicable",
    "RecordSample",
    "Report",
    "Request",
    "Result",
    "Sample",
    "Subject",
    "TensorSample",
    "TextSample",
    "VideoSample",
    "Violation",
    "check",
    "check_law",
    "check_registered",
    "check_subject",
    "items",
    "of_registered",
    "of_spec",
    "parametrize",
    "prompts",
]


@dataclass(frozen=True)
class Result:
    """What came of one law: `holds`, `violated`, or `skipped`, and why."""

    law: str
    status: Literal["holds", "violated", "skipped"]
    detail: str = ""


@dataclass
class Report:
    """What came of all laws; true if none is violated."""

    subject: str
    results: list[Result] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.violations

    @property
    def violations(self) -> list[Result]:
        """The results of the laws that do not hold."""
        return [result for result in self.results if result.status == "violated"]

    def __str__(self) -> str:
        width = max((len(result.law) for result in self.results), default=0)
        lines = [self.subject]
        for result in self.results:
            detail = f": {result.detail}" if result.detail else ""
            lines.append(f"  {result.law:{width}}  {result.status}{detail}")
        return "\n".join(lines)


def check_law(
    law: str | Law, subject: Subject, *, examples: int | None = None, database: bool = True
) -> None:
    """Check one law on a subject.

    Args:
        law: a law, or its number, as ``"L3"``.
        subject: see `of_spec` and `of_registered`.
        examples: Hypothesis examples; None for those of the current profile.
        database: let Hypothesis keep failures for the next run.

    Raises:
        Violation: the law does not hold; the message has the smallest request for which Hypothesis
            saw it.
        NotApplicable: it has nothing to say about this subject.
    """
    law = LAWS[law] if isinstance(law, str) else law
    if law.needs_model and subject.plan is not None and subject.plan.spec.is_raw:
        raise NotApplicable("the items take no positions: forward gets their fields, not rows")
    options: dict[str, Any] = {
        "max_examples": max(1, (examples or settings().max_examples) // law.cost)
    }
    if not database:
        options["database"] = None
    if not law.needs_model:
        _check(Case(law, subject), options)
        return
    config = subject.processor.info.ctx.model_config
    for dtype in law.dtypes:
        with harness.loaded_model(config, dtype=dtype) as model:
            _check(Case(law, subject, model=model), options)


def _check(case: Case, options: dict[str, Any]) -> None:
    law = case.law
    try:
        if law.kind == "once":
            law.check(case)
        elif law.kind == "machine":
            chosen = quiet(stateful_step_count=6, **options)
            run_state_machine_as_test(law.check(case), settings=chosen)
        else:
            for_each(st.data(), lambda data: law.check(replace(case, data=data)), **options)
    except (Violation, NotApplicable):
        raise
    except Unsatisfiable as error:
        raise NotApplicable("no request was found about which this law says anything") from error
    except Exception as error:
        notes = "".join(f"\n    {note}" for note in getattr(error, "__notes__", ()))
        raise Violation(f"{law.name}: {type(error).__name__}: {error}{notes}") from error


def check_subject(
    subject: Subject,
    *,
    laws: Iterable[str] | None = None,
    model: bool = False,
    examples: int | None = None,
    title: str = "",
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Check laws on a subject; the arguments are those of `check`, and a title for the report."""
    report = Report(title or str(subject.model_dir))
    for number in LAWS if laws is None else laws:
        law = LAWS[number]
        if law.needs_model and not model:
            result = Result(law.name, "skipped", "needs the model: say model=True")
        else:
            try:
                check_law(law, subject, examples=examples)
                result = Result(law.name, "holds")
            except NotApplicable as reason:
                result = Result(law.name, "skipped", str(reason))
            except Violation as violation:
                result = Result(law.name, "violated", str(violation).removeprefix(f"{law.name}: "))
        report.results.append(result)
        if progress is not None:
            progress(result)
    return report


def check(
    spec: ModelSpec,
    model_dir: str | Path,
    *,
    laws: Iterable[str] | None = None,
    model: bool = False,
    examples: int | None = None,
    progress: Callable[[Result], None] | None = None,
    **options: Any,
) -> Report:
    """Check the laws on a spec, with the config, tokenizer and processor files of a checkpoint
    folder.

    Args:
        spec: the declaration.
        model_dir: a folder; weights are not needed.
        laws: their numbers, as ``["L2", "L3"]``; None for all.
        model: check the laws about the model class too. It is loaded with dummy weights, without an
            engine.
        examples: Hypothesis examples per law; None for those of the current profile.
        progress: called with each result as it comes.
        options: for `of_spec`: `kwargs` and `samples` to draw from, subclasses of the generated
            classes to check in their place, options of vLLM's ModelConfig; `trust_remote_code=True`
            runs code that the folder brings.

    Returns:
        One result per law; false if one is violated.

    Raises:
        SpecError: the spec does not fit the checkpoint.
        KeyError: a law that there is not.
    """
    subject = of_spec(spec, model_dir, **options)
    return check_subject(
        subject, laws=laws, model=model, examples=examples, title=spec.name, progress=progress
    )


def check_registered(
    model_dir: str | Path,
    *,
    laws: Iterable[str] | None = None,
    model: bool = False,
    examples: int | None = None,
    progress: Callable[[Result], None] | None = None,
    **options: Any,
) -> Report:
    """Check the laws on the processor that vLLM has for a checkpoint, hand-written or not; see
    `check`."""
    subject = of_registered(model_dir, **options)
    return check_subject(subject, laws=laws, model=model, examples=examples, progress=progress)


def parametrize(
    spec: ModelSpec,
    model_dir: str | Path,
    *,
    expected: Mapping[str, str] | None = None,
    model: bool = False,
    examples: int | None = None,
    **options: Any,
) -> Any:
    """A pytest decorator: the test function is called once per law, with a `check` to call.

    Args:
        spec: as for `check`.
        model_dir: as for `check`.
        expected: laws that this spec is known to violate, with the reason; it is a failure if one
            of them holds.
        model: as for `check`.
        examples: as for `check`.
        options: as for `check`.
    """
    import pytest

    subjects: list[Subject] = []

    def run(law: Law) -> None:
        if not subjects:
            subjects.append(of_spec(spec, model_dir, **options))
        try:
            check_law(law, subjects[0], examples=examples)
        except NotApplicable as reason:
            pytest.skip(str(reason))

    reasons = expected or {}
    checks = []
    for law in LAWS.values():
        if law.needs_model and not model:
            continue
        marks = []
        if law.number in reasons:
            reason = reasons[law.number]
            marks.append(pytest.mark.xfail(strict=True, raises=Violation, reason=reason))
        checks.append(pytest.param(partial(run, law), id=law.name, marks=marks))
    return pytest.mark.parametrize("check", checks)

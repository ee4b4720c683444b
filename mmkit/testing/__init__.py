"""A conformance kit for multimodal processors on vLLM: the laws, and one line to check them.

>>> import mmkit.testing
>>> print(mmkit.testing.check(SPEC, "path/of/checkpoint"))  # every law that needs no model
>>> print(mmkit.testing.check(SPEC, "path/of/checkpoint", model=True))  # and those that do
>>> print(mmkit.testing.check_registered("path/of/checkpoint"))  # what vLLM has for it

In a test file, with one test per law and law names as ids (``pytest -k ranges``)::

    @mmkit.testing.parametrize(SPEC, "path/of/checkpoint", expected={"L5": "pads to the batch"})
    def test_laws(check):
        check()

Or without any file: ``pytest --mmkit package.module:SPEC --mmkit-model path/of/checkpoint``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test

from ..model_spec import ModelSpec
from ..vllm_api import harness
from .drawing import Clock, OutOfTime, Tally, for_each, quiet
from .laws import LAWS, Case, KitError, Law, NotApplicable, NotDrawn, Violation
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
from .verdicts import Report, Result, Status, frames_of

__all__ = [
    "LAWS",
    "AudioSample",
    "Case",
    "ImageSample",
    "KitError",
    "Law",
    "NotApplicable",
    "NotDrawn",
    "RecordSample",
    "Report",
    "Request",
    "Result",
    "Sample",
    "Status",
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


def check_law(
    law: str | Law,
    subject: Subject,
    *,
    examples: int | None = None,
    database: bool = True,
    seconds: float | None = None,
) -> str:
    """Check one law on a subject.

    Args:
        law: a law, or its number, for example ``"L3"``.
        subject: see `of_spec` and `of_registered`.
        examples: Hypothesis examples; None for those of the current profile.
        database: let Hypothesis keep failures for the next run.
        seconds: the time after which no more requests are drawn; None for no limit.

    Returns:
        A note on a law that holds, for example that its time was over; mostly empty.

    Raises:
        Violation: the law does not hold. The message has the smallest failing request that
            Hypothesis found.
        NotApplicable: the law has nothing to say about this subject.
        NotDrawn: the law said something about none, or fewer than one in twenty, of the drawn
            requests.
        KitError: mmkit's own code failed; see `verdicts.is_of_kit`.
    """
    law = LAWS[law] if isinstance(law, str) else law
    if subject.undrawn and not subject.samples:
        raise NotDrawn(f"give samples= a strategy for items of {' and '.join(subject.undrawn)}")
    if law.needs_model and subject.plan is not None and subject.plan.spec.is_raw:
        raise NotApplicable("the items take no positions: forward gets their fields, not rows")
    options: dict[str, Any] = {
        "max_examples": max(1, (examples or settings().max_examples) // law.cost)
    }
    if not database:
        options["database"] = None
    clock = Clock(seconds)
    if not law.needs_model:
        return _check(Case(law, subject), options, clock)
    config = subject.processor.info.ctx.model_config
    said = ""
    for dtype in law.dtypes:
        with ExitStack() as loaded:
            case = Case(law, subject)
            with _judged(case):
                case.model = loaded.enter_context(harness.loaded_model(config, dtype=dtype))
            said = _check(case, options, clock)
    return said


def _check(case: Case, options: dict[str, Any], clock: Clock) -> str:
    law = case.law
    tally = Tally(clock)
    with _judged(case):
        try:
            if law.kind == "once":
                tally.once(case.check)
            elif law.kind == "machine":
                machine = law.check(case)
                chosen = quiet(stateful_step_count=6, **options)
                run_state_machine_as_test(tally.started(machine), settings=chosen)
            else:
                for_each(
                    st.data(),
                    lambda data: tally.once(replace(case, data=data).check),
                    **options,
                )
        except Unsatisfiable as error:
            raise NotDrawn(tally.nothing) from error
        except OutOfTime as end:
            if tally.failure is not None:  # it was being made smaller
                raise tally.failure from None
            if not tally.said:
                raise NotDrawn(f"{end} before it said anything") from None
            return f"{end} on {tally.said} drawn requests"
    if tally.few:
        raise NotDrawn(f"holds on {tally.said} of {tally.drawn} drawn requests")
    return ""


@contextmanager
def _judged(case: Case) -> Iterator[None]:
    """Turn exceptions into verdicts."""
    name = case.law.name
    try:
        yield
    except (Violation, NotApplicable):
        raise
    except KitError as error:
        message = str(error)
        raise KitError(
            message if message.startswith(name) else f"{name}: {message}"
        ) from error.__cause__
    except Exception as error:
        # notes of Hypothesis about its own function say nothing
        said = [
            note
            for note in getattr(error, "__notes__", ())
            if not note.lstrip().startswith(_NO_NEWS)
        ]
        notes = "".join(f"\n    {note}" for note in said)
        kind = KitError if case.is_of_kit(error) else Violation
        raise kind(f"{name}: {type(error).__name__}: {error}{notes}") from error


_NO_NEWS = ("Failing test case", "Falsifying example", "while generating", "You can reproduce")


def check_subject(
    subject: Subject,
    *,
    laws: Iterable[str] | None = None,
    model: bool = False,
    examples: int | None = None,
    title: str = "",
    progress: Callable[[Result], None] | None = None,
    expected: Mapping[str, str] | None = None,
    budget: float | None = None,
) -> Report:
    """Check laws on a subject. The arguments are those of `check`, and `title`, the report's."""
    without = f", without items of {' and '.join(subject.undrawn)}" if subject.undrawn else ""
    report = Report((title or str(subject.model_dir)) + without)
    numbers = list(LAWS if laws is None else laws)
    reasons = dict(expected or {})
    for number in reasons:
        LAWS[number]  # an unknown law is a KeyError before any check
    waiting = [LAWS[number] for number in numbers if model or not LAWS[number].needs_model]
    end = None if budget is None else time.monotonic() + budget
    for number in numbers:
        law = LAWS[number]
        start = time.monotonic()
        share = None
        if end is not None and law in waiting:
            share = max(0.0, end - start) / len(waiting)
        if law not in waiting:
            result = Result(law.name, "not applicable", "needs the model: say model=True")
        else:
            result = _result(law, subject, examples, share)
            waiting.remove(law)
        seconds = time.monotonic() - start
        result = replace(result, expected=reasons.get(number, ""), seconds=round(seconds, 3))
        report.results.append(result)
        if progress is not None:
            progress(result)
    return report


def _result(law: Law, subject: Subject, examples: int | None, seconds: float | None) -> Result:
    try:
        said = check_law(law, subject, examples=examples, seconds=seconds)
    except NotDrawn as share:
        return Result(law.name, "not drawn", str(share))
    except NotApplicable as reason:
        return Result(law.name, "not applicable", str(reason))
    except Violation as violation:
        return Result(law.name, "violated", str(violation).removeprefix(f"{law.name}: "))
    except KitError as error:
        detail = str(error).removeprefix(f"{law.name}: ")
        return Result(law.name, "kit error", detail, frames_of(error.__cause__))
    return Result(law.name, "holds", said)


def check(
    spec: ModelSpec,
    model_dir: str | Path,
    *,
    laws: Iterable[str] | None = None,
    model: bool = False,
    examples: int | None = None,
    progress: Callable[[Result], None] | None = None,
    expected: Mapping[str, str] | None = None,
    budget: float | None = None,
    **options: Any,
) -> Report:
    """Check the laws on a spec, with the config, tokenizer and processor files of a checkpoint
    folder.

    Args:
        spec: the declaration.
        model_dir: a folder; weights are not needed.
        laws: numbers of laws, for example ``["L2", "L3"]``; None for all.
        model: check the laws about the model class too. It is loaded with dummy weights, without an
            engine.
        examples: Hypothesis examples per law; None for those of the current profile.
        progress: called with each result as it comes.
        expected: laws that are known to be violated, by number, with the reason or a link; a law
            among them that holds is a failure.
        budget: seconds for all laws together, without the loading of models. Each law draws one
            request, and no more when its share is over; its result says so.
        options: for `of_spec`: `kwargs` and `samples` to draw from, subclasses of the generated
            classes to check in their place, options of vLLM's ModelConfig; `trust_remote_code=True`
            runs code that the folder brings.

    Returns:
        One result per law; false if a law failed, or mmkit's own code did.

    Raises:
        SpecError: the spec does not fit the checkpoint.
        KeyError: an unknown law.
    """
    subject = of_spec(spec, model_dir, **options)
    return check_subject(
        subject,
        laws=laws,
        model=model,
        examples=examples,
        title=spec.name,
        progress=progress,
        expected=expected,
        budget=budget,
    )


def check_registered(
    model_dir: str | Path,
    *,
    laws: Iterable[str] | None = None,
    model: bool = False,
    examples: int | None = None,
    progress: Callable[[Result], None] | None = None,
    expected: Mapping[str, str] | None = None,
    budget: float | None = None,
    **options: Any,
) -> Report:
    """Check the laws on the processor that vLLM has for a checkpoint, hand-written or not; see
    `check`."""
    subject = of_registered(model_dir, **options)
    return check_subject(
        subject,
        laws=laws,
        model=model,
        examples=examples,
        progress=progress,
        expected=expected,
        budget=budget,
    )


def parametrize(
    spec: ModelSpec,
    model_dir: str | Path,
    *,
    expected: Mapping[str, str] | None = None,
    model: bool = False,
    examples: int | None = None,
    **options: Any,
) -> Any:
    """A pytest decorator: one test per law. The test function receives `check`, and calls it.

    Args:
        spec: as for `check`.
        model_dir: as for `check`.
        expected: laws that this spec is known to violate, with the reason; a law among them that
            holds is a failure.
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

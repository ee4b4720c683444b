"""Verdicts: the result of a law, the owner of an exception, and reports that machines read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from traceback import StackSummary, format_exception_only, walk_tb
from typing import Any, Literal
from xml.etree import ElementTree

from ..vllm_api import harness
from .subject import Subject

Status = Literal["holds", "violated", "not applicable", "not drawn", "kit error"]


@dataclass(frozen=True)
class Result:
    """The result of one law.

    Attributes:
        law: name of the law.
        status: ``holds``; ``violated``; ``not applicable``: the law has nothing to say about this
            subject; ``not drawn``: the law said something about too few of the drawn requests;
            ``kit error``: an exception of mmkit's own code, which says nothing about the subject.
        detail: the observation, or the reason.
        traceback: the traceback of a kit error.
        expected: the reason why a violation is known; empty for laws that should hold.
        seconds: duration of the check.
    """

    law: str
    status: Status
    detail: str = ""
    traceback: str = ""
    expected: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the law is violated, or holds although a violation is known."""
        return self.status == ("holds" if self.expected else "violated")

    @property
    def sentence(self) -> str:
        """The status, the known violation if there is one, and the detail."""
        known = f" (expected to be violated: {self.expected})" if self.expected else ""
        return f"{self.status}{known}" + (f": {self.detail}" if self.detail else "")


@dataclass
class Report:
    """The results of all laws; true if no law failed and none ended in a kit error.

    Attributes:
        subject: title of the report.
        results: one per law.
    """

    subject: str
    results: list[Result] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.exit_status == 0

    @property
    def violations(self) -> list[Result]:
        """The results of the laws that do not hold."""
        return [result for result in self.results if result.status == "violated"]

    @property
    def failures(self) -> list[Result]:
        """Violations that were not expected, and laws that hold although a violation was."""
        return [result for result in self.results if result.failed]

    @property
    def kit_errors(self) -> list[Result]:
        """The results of the laws in which mmkit's own code failed."""
        return [result for result in self.results if result.status == "kit error"]

    @property
    def exit_status(self) -> int:
        """1 if a law failed, else 3 if mmkit's own code failed, else 0."""
        if self.failures:
            return 1
        return 3 if self.kit_errors else 0

    @property
    def summary(self) -> str:
        """The numbers of laws that hold, that are violated, and of the rest."""
        counts = Counter(result.status for result in self.results)
        held, violated = counts["holds"], counts["violated"]
        return f"{held} held, {violated} violated, {len(self.results) - held - violated} neither"

    def __str__(self) -> str:
        width = max((len(result.law) for result in self.results), default=0)
        lines = [self.subject]
        for result in self.results:
            lines.append(f"  {result.law:{width}}  {result.sentence}")
            lines += [f"    {line}" for line in result.traceback.splitlines()]
        return "\n".join([*lines, f"  {self.summary}"])

    def json(self) -> str:
        """The report as JSON: the subject, the counts, and the results with all attributes."""
        counts = Counter(result.status for result in self.results)
        results = [{**asdict(result), "failed": result.failed} for result in self.results]
        whole = {"subject": self.subject, "counts": counts, "results": results}
        return json.dumps(whole, indent=2) + "\n"

    def junit(self) -> str:
        """The report as JUnit's XML: one test case per law. Kit errors are errors; laws that
        neither hold nor fail are skipped."""
        counts = {
            "tests": len(self.results),
            "failures": len(self.failures),
            "errors": len(self.kit_errors),
            "skipped": sum(_element(result) == "skipped" for result in self.results),
        }
        attributes = {name: str(count) for name, count in counts.items()}
        attributes["name"] = self.subject
        attributes["time"] = f"{sum(result.seconds for result in self.results):.3f}"
        suite = ElementTree.Element("testsuite", attributes)
        for result in self.results:
            time = f"{result.seconds:.3f}"
            case = ElementTree.SubElement(
                suite, "testcase", classname=self.subject, name=result.law, time=time
            )
            if element := _element(result):
                said = ElementTree.SubElement(case, element, message=_printable(result.sentence))
                said.text = _printable(result.traceback)
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _element(result: Result) -> str:
    """JUnit's name of a verdict; empty for a law that holds."""
    if result.failed:
        return "failure"
    if result.status == "kit error":
        return "error"
    return "" if result.status == "holds" else "skipped"


def _printable(text: str) -> str:
    """A text without characters that XML cannot hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


# -- whose exception it is -------------------------------------------------------------------------

_KIT = ("mmkit.testing", *(f"mmkit.vllm_api.{name}" for name in ("doors", "harness", "kit")))
_NOBODY = {"abc", "builtins", "collections", "torch", "typing"}


def is_of_kit(error: BaseException, subject: Subject, check: Any = None, model: Any = None) -> bool:
    """Whether an exception belongs to the kit, and not to the code under test.

    The innermost frame that belongs to either decides. `mmkit.testing`, its modules of
    `mmkit.vllm_api`, and the check of a law belong to the kit. The packages of the classes of the
    processor (with its info, dummy inputs, data parser and tokenizer) and of the model, and those
    of their base classes, belong to the code under test: vLLM always, the rest of mmkit where the
    processor is generated. A frame of another library belongs to its caller.

    Args:
        error: the exception, with its traceback.
        subject: the subject of the law.
        check: the law's function, in whatever module.
        model: vLLM's model, if the law needs one.
    """
    if isinstance(error, harness.NotTaken):
        return False
    packages = _packages(subject, model)
    code = getattr(check, "__code__", None)
    for frame, _ in reversed([*walk_tb(error.__traceback__)]):
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code is code or any(f"{module}.".startswith(f"{part}.") for part in _KIT):
            return True
        if module.partition(".")[0] in packages:
            return False
    return True


def frames_of(error: BaseException | None) -> str:
    """The traceback of an exception, without the frames of Hypothesis and of the function that it
    calls; empty without an exception."""
    if error is None:
        return ""
    around = ("hypothesis", "mmkit.testing.drawing", "contextlib")
    frames = [
        (frame, line)
        for frame, line in walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith(around)
    ]
    return "".join([*StackSummary.extract(frames).format(), *format_exception_only(error)])


def _packages(subject: Subject, model: Any) -> set[str]:
    processor = subject.processor
    parts = [processor, processor.info, processor.dummy_inputs, processor.info.ctx.tokenizer]
    parts += [getattr(processor, "data_parser", None), model]
    classes = {base for part in parts if part is not None for base in type(part).__mro__}
    return {cls.__module__.partition(".")[0] for cls in classes} - _NOBODY

"""A law, and the `Case` that its check receives: a case draws requests and reports violations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, ClassVar, Literal, NoReturn

from hypothesis.errors import Flaky

from .differences import differences
from .strategies import Request
from .subject import Subject

Status = Literal["holds", "violated", "not applicable", "not drawn", "kit error"]


class Verdict(Exception):
    """What `check_law` raises where a law does not hold, or says nothing."""

    status: ClassVar[Status]


class Violation(Verdict, AssertionError):
    """A law does not hold; the message has the law and the observation."""

    status = "violated"


class NotApplicable(Verdict):
    """A law has nothing to say about this subject; the message has the reason."""

    status: ClassVar[Status] = "not applicable"


class NotDrawn(NotApplicable):
    """A law said something about too few of the drawn requests; the message has the share."""

    status = "not drawn"


class KitError(Verdict):
    """mmkit's own code failed, so nothing is known of the law. The cause has the traceback."""

    status = "kit error"


@dataclass(frozen=True)
class Refused:
    """What the code under test has raised; equal to whatever else it raises, and false."""

    error: Exception = field(compare=False)

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: for example ``independence``.
        check: a function of a `Case` that raises `Violation`; its docstring says what holds.
        cost: requests per example; the number of examples is divided by it.
        needs_model: the check needs the model, loaded without an engine.
        dtypes: the dtypes in which the model is loaded, one after the other.
    """

    name: str
    check: Callable[[Case], Any]
    cost: int = 1
    needs_model: bool = False
    dtypes: tuple[str, ...] = ("float32",)


def law(**options: Any) -> Callable[[Callable[[Case], Any]], Law]:
    """A decorator that makes a law of a check, with its name."""
    return lambda check: Law(check.__name__, check, **options)


@dataclass
class Case:
    """One check of a law.

    Attributes:
        law: the law.
        subject: the processor under test.
        data: Hypothesis' ``data()``.
        model: vLLM's model, for laws that need it.
        request: the current request, which a violation shows.
        before: further lines that a violation shows.
    """

    law: Law
    subject: Subject
    data: Any = None
    model: Any = None
    request: Request | None = None
    before: str = ""

    def draw(self, strategy: Any) -> Any:
        """A value that Hypothesis chooses."""
        return self.data.draw(strategy)

    def draw_request(self, **options: Any) -> Request:
        """A drawn request, which becomes the current one; options of `Subject.requests`."""
        self.request = self.draw(self.subject.requests(**options))
        return self.request

    def check(self) -> None:
        """Check the law. What the code under test raises names the request."""
        try:
            self.law.check(self)
        except Exception as error:
            if self.request and not isinstance(error, (Violation, KitError)):
                error.add_note(f"in {self.request!r}{self.before}")
            raise

    def is_of_kit(self, error: BaseException) -> bool:
        """Whether an exception belongs to the kit, and not to the code under test.

        The innermost frame that belongs to either decides. `mmkit.testing` and the check of a law
        belong to the kit. The packages of the classes of the processor (with its info, dummy
        inputs, data parser and tokenizer) and of the model, and those of their base classes, belong
        to the code under test: vLLM always, the rest of mmkit where the processor is generated. A
        frame of another library belongs to its caller.
        """
        processor, code = self.subject.processor, getattr(self.law.check, "__code__", None)
        parts = [processor, processor.info, processor.dummy_inputs, processor.info.ctx.tokenizer]
        parts += [getattr(processor, "data_parser", None), self.model]
        classes = {base for part in parts for base in type(part).__mro__}
        packages = {cls.__module__.partition(".")[0] for cls in classes} - _NOBODY
        for frame, _ in reversed([*walk_tb(error.__traceback__)]):
            module = str(frame.f_globals.get("__name__"))
            if frame.f_code is code or f"{module}.".startswith(f"{__package__}."):
                return True
            if module.partition(".")[0] in packages:
                return False
        return True

    def verdict(self, error: Exception) -> Verdict:
        """The verdict that an exception is."""
        # what Hypothesis cannot do twice depends on what the code under test did before
        of_kit = self.is_of_kit(error) and not isinstance(error, Flaky)
        # those of Hypothesis about its own function say nothing
        said = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
        message = "\n    ".join([f"{self.law.name}: {type(error).__name__}: {error}", *said])
        return KitError(message) if of_kit else Violation(message)

    def attempt(self, call: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """What a call returns, or a `Refused`, which is false, where the code under test raises.

        Raises:
            KitError: the exception belongs to the kit.
        """
        try:
            return call(*given, **options)
        except KitError:
            raise
        except Exception as error:
            if self.is_of_kit(error):
                raise self.verdict(error) from error
            return Refused(error)

    def fail(self, observation: str) -> NoReturn:
        """Report that the law does not hold.

        Args:
            observation: the end of the sentence that begins with the law's name.

        Raises:
            Violation: always.
        """
        request = f"\n    in {self.request!r}{self.before}" if self.request else ""
        raise Violation(f"{self.law.name}: {observation}{request}")

    def same(self, one: Any, other: Any, what: str, where: str = "", **options: Any) -> None:
        """Fail if two outcomes, or parts of outcomes, differ; `differences` has the options."""
        if difference := differences(one, other, where, **options):
            self.fail(f"{what}: {difference}")


_NOBODY = {"abc", "builtins", "collections", "torch", "typing"}

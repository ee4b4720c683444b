"""A law, and the `Case` that its check receives: a case draws requests and reports violations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, ClassVar, Literal, NoReturn

from hypothesis.errors import Flaky

from .differences import find_difference
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
    """mmkit's own code failed, so nothing is known of the law.

    The cause has the traceback.
    """

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
        needs_engine: the check needs an engine with the checkpoint's weights, and the same model in
            transformers, in place of the model alone.
        dtypes: the dtypes in which the model is loaded, one after the other.
    """

    name: str
    check: Callable[[Case], Any]
    cost: int = 1
    needs_model: bool = False
    needs_engine: bool = False
    dtypes: tuple[str, ...] = ("float32",)


def law(**options: Any) -> Callable[[Callable[[Case], Any]], Law]:
    """Return a decorator that makes a law of a check, under the name of the function.

    Args:
        options: attributes of `Law`, for example `cost`.
    """

    def make_law(check: Callable[[Case], Any]) -> Law:
        return Law(check.__name__, check, **options)

    return make_law


@dataclass
class Case:
    """One check of a law.

    Attributes:
        law: the law.
        subject: the processor under test.
        data: Hypothesis' ``data()``.
        model: vLLM's model, for laws that need it; for laws that need an engine, what
            `mmkit.testing.vllm_engine.open_both` gives.
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
        """Draw a value of a strategy by Hypothesis."""
        return self.data.draw(strategy)

    def draw_request(self, **options: Any) -> Request:
        """Draw a request, which becomes the current one; options of `Subject.requests`."""
        self.request = self.draw(self.subject.requests(**options))
        return self.request

    def check(self) -> None:
        """Check the law; a note on what it raises shows the request."""
        try:
            self.law.check(self)
        except Exception as error:
            if self.request and not isinstance(error, (Violation, KitError)):
                error.add_note(f"in {self.request!r}{self.before}")
            raise

    def is_of_kit(self, error: BaseException) -> bool:
        """Return whether an exception belongs to the kit, and not to the code under test.

        The innermost frame that belongs to either decides. `mmkit.testing` and the check of a law
        belong to the kit. The packages of the classes of the processor (with its info, dummy
        inputs, data parser and tokenizer) and of the model, and those of their base classes, belong
        to the code under test: vLLM always, the rest of mmkit where the processor is generated. A
        frame of another library belongs to its caller.
        """
        check_code = getattr(self.law.check, "__code__", None)
        packages = self._find_packages_under_test()
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            module = str(frame.f_globals.get("__name__"))
            if frame.f_code is check_code or f"{module}.".startswith(f"{__package__}."):
                return True
            if _get_package(module) in packages:
                return False
        return True

    def _find_packages_under_test(self) -> set[str]:
        """Return the packages of the classes of the processor and of the model."""
        processor = self.subject.processor
        parts = [
            processor,
            processor.info,
            processor.dummy_inputs,
            processor.info.ctx.tokenizer,
            getattr(processor, "data_parser", None),
            self.model,
        ]
        packages = set()
        for part in parts:
            for base in type(part).__mro__:
                packages.add(_get_package(base.__module__))
        return packages - _SHARED_PACKAGES

    def verdict(self, error: Exception) -> Verdict:
        """Return the verdict that an exception is: a `KitError` or a `Violation`."""
        lines = [f"{self.law.name}: {type(error).__name__}: {error}"]
        for note in getattr(error, "__notes__", ()):
            if note.startswith("in "):  # notes of Hypothesis are about the kit's own function
                lines.append(note)
        message = "\n    ".join(lines)
        # A check that does not fail twice depends on what the code under test did before.
        if self.is_of_kit(error) and not isinstance(error, Flaky):
            return KitError(message)
        return Violation(message)

    def attempt(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that may refuse its arguments.

        Returns:
            What the call returns, or a `Refused`, which is false, where the code under test raises.

        Raises:
            KitError: the exception belongs to the kit.
        """
        try:
            return call(*arguments, **options)
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

    def check_equal(
        self, first: Any, second: Any, what: str, where: str = "", **options: Any
    ) -> None:
        """Fail if two outcomes, or parts of outcomes, differ.

        Args:
            first: an outcome, or a part of one.
            second: what should be equal to it.
            what: what the two are, for the message.
            where: the name of the part, for the message.
            options: of `find_difference`.
        """
        difference = find_difference(first, second, where, **options)
        if difference:
            self.fail(f"{what}: {difference}")


# Packages of base classes that everybody uses: a frame of theirs belongs to its caller.
_SHARED_PACKAGES = {"abc", "builtins", "collections", "torch", "typing"}


def _get_package(module: str) -> str:
    return module.partition(".")[0]

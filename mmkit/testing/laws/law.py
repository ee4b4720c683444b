"""A law, and the `Case` that its check receives: a case draws requests and reports violations."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from ...vllm_api import harness
from ..strategies import Request
from ..subject import Subject
from ..verdicts import is_of_kit


class Violation(AssertionError):
    """A law does not hold; the message has the law and the observation."""


class NotApplicable(Exception):
    """A law has nothing to say about this subject; the message has the reason."""


class NotDrawn(NotApplicable):
    """A law said something about too few of the drawn requests; the message has the share."""


class KitError(Exception):
    """mmkit's own code failed, so nothing is known of the law. The cause has the traceback."""


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: number and name, for example ``L5 independence``.
        statement: the law in one sentence.
        check: a function of a `Case` that raises `Violation`.
        kind: ``drawn`` for checks of drawn requests, ``once`` for a single check, ``machine`` for
            a check that returns a state machine of Hypothesis.
        cost: requests per example; the number of examples is divided by it.
        needs_model: the check needs the model, loaded without an engine.
        dtypes: the dtypes in which the model is loaded, one after the other.
    """

    name: str
    statement: str
    check: Callable[[Case], Any]
    kind: str = "drawn"
    cost: int = 1
    needs_model: bool = False
    dtypes: tuple[str, ...] = ("float32",)

    @property
    def number(self) -> str:
        return self.name.split()[0]


def law(name: str, statement: str, **options: Any) -> Callable[[Callable[[Case], Any]], Law]:
    """A decorator that makes a law of a check."""
    return lambda check: Law(name, statement, check, **options)


@dataclass
class Case:
    """One check of a law.

    Attributes:
        law: the law.
        subject: the processor under test.
        data: Hypothesis' ``data()``, for laws that draw.
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
        """Whether an exception belongs to the kit."""
        return is_of_kit(error, self.subject, self.law.check, self.model)

    def refused(self, error: Exception) -> None:
        """Accept an exception as a refusal by the code under test.

        Raises:
            KitError: the exception belongs to the kit.
        """
        if isinstance(error, KitError):
            raise error
        if self.is_of_kit(error):
            raise KitError(f"{self.law.name}: {type(error).__name__}: {error}") from error

    def fail(self, observation: str) -> NoReturn:
        """Report that the law does not hold.

        Args:
            observation: the end of the sentence that begins with the law's name.

        Raises:
            Violation: always, except in this case:
            KitError: the law was handling an exception that belongs to the kit.
        """
        if isinstance(handled := sys.exception(), Exception) and _caught_by_law(self.law, handled):
            self.refused(handled)
        request = f"\n    in {self.request!r}{self.before}" if self.request else ""
        raise Violation(f"{self.law.name}: {observation}{request}")

    def same(self, one: Any, other: Any, what: str, where: str = "") -> None:
        """Fail if two outcomes, or parts of outcomes, differ."""
        if difference := differences(one, other, where):
            self.fail(f"{what}: {difference}")


def _caught_by_law(law: Law, error: Exception) -> bool:
    """Whether a law itself handles an exception, and not a caller of the law."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    frame = traceback.tb_frame
    own = frame.f_code is getattr(law.check, "__code__", None)
    return own or str(frame.f_globals.get("__name__")).startswith(f"{__package__}.")


def differences(one: Any, other: Any, where: str = "") -> str | None:
    """The first difference of two outcomes, or of parts of outcomes; None if they are equal."""
    pairs: list[tuple[str, Any, Any]]
    match one, other:
        case harness.Outcome(), harness.Outcome():
            names = ("ids", "ranges", "hashes", "fields")
            pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
        case torch.Tensor(), torch.Tensor():
            forms = [f"{value.dtype} {tuple(value.shape)}" for value in (one, other)]
            if forms[0] != forms[1]:
                return f"{where}: {forms[0]} and {forms[1]}"
            return None if _equal_values(one, other) else f"{where}: values differ"
        case np.ndarray(), np.ndarray():
            forms = [f"numpy {value.dtype} {value.shape}" for value in (one, other)]
            if forms[0] != forms[1]:
                return f"{where}: {forms[0]} and {forms[1]}"
            equal = np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
            return None if equal else f"{where}: values differ"
        case dict(), dict():
            if set(one) != set(other):
                return f"{where}: {sorted(map(str, one))} and {sorted(map(str, other))}"
            pairs = [(f"{where}[{key!r}]", one[key], other[key]) for key in one]
        case ((list() | tuple()), (list() | tuple())):
            if len(one) != len(other):
                return f"{where}: {len(one)} and {len(other)} long"
            if all(isinstance(value, int) for value in (*one, *other)):
                return _unless(list(one) == list(other), one, other, where)
            pairs = [
                (f"{where}[{i}]", *both) for i, both in enumerate(zip(one, other, strict=True))
            ]
        case (Iterator(), _) | (_, Iterator()):
            return f"{where}: a one-shot iterator, which caches and batches read more than once"
        case _:
            return _unless(type(one) is type(other) and _alike(one, other), one, other, where)
    for place, a, b in pairs:
        if difference := differences(a, b, place):
            return difference
    return None


def _equal_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one shape are equal, NaN to NaN."""
    if torch.equal(one, other):
        return True
    absent = one.isnan()
    if not torch.equal(absent, other.isnan()):
        return False
    return torch.equal(one.masked_fill(absent, 0), other.masked_fill(absent, 0))


def _alike(one: Any, other: Any) -> bool:
    """Whether values of one class are equal; where `==` is not true, whether their pickles are."""
    with suppress(Exception):
        if one == other:
            return True
    with suppress(Exception):
        return pickle.dumps(one) == pickle.dumps(other)
    return False


def _unless(equal: bool, one: Any, other: Any, where: str) -> str | None:
    return None if equal else f"{where}: {brief(one)} and {brief(other)}"


def brief(value: Any) -> str:
    """The `repr` of a value, cut to 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."

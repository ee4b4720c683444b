"""What a law is, and what its check is given: a `Case`, which draws requests and says what does not
hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ...vllm_api import harness
from ..strategies import Request
from ..subject import Subject


class Violation(AssertionError):
    """A law does not hold; the message names the law and what was seen."""


class NotApplicable(Exception):
    """A law has nothing to say about this subject; the message tells why."""


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: ``L5 independence``.
        statement: what it says, in one sentence.
        check: gets a `Case`, and raises `Violation`.
        kind: ``drawn`` for checks of drawn requests, ``once`` for a single check, ``machine`` for
            one that returns a state machine of Hypothesis.
        cost: requests per example; of a law with several, as many fewer examples are drawn.
        needs_model: the check wants the model, loaded without an engine.
        dtypes: in which the model is loaded, one after the other.
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
    """Make a law of the function below."""
    return lambda check: Law(name, statement, check, **options)


@dataclass
class Case:
    """One check of a law.

    Attributes:
        law: which.
        subject: what it is checked on.
        data: Hypothesis' ``data()``, for laws that draw.
        model: vLLM's model, for laws that need it.
        request: what the law is being checked for; a violation shows it.
        before: what else a violation shows of it.
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
        """A request, with the options of `Subject.requests`, about which the case is from now
        on."""
        self.request = self.draw(self.subject.requests(**options))
        return self.request

    def fail(self, observation: str) -> NoReturn:
        """Say that the law does not hold."""
        request = f"\n    in {self.request!r}{self.before}" if self.request else ""
        raise Violation(f"{self.law.name}: {observation}{request}")

    def same(self, one: Any, other: Any, what: str, where: str = "") -> None:
        """Fail if two outcomes, or parts of them, differ."""
        if difference := differences(one, other, where):
            self.fail(f"{what}: {difference}")


def differences(one: Any, other: Any, where: str = "") -> str | None:
    """The first difference of two outcomes, or of parts of them; None if they are equal."""
    pairs: list[tuple[str, Any, Any]]
    match one, other:
        case harness.Outcome(), harness.Outcome():
            names = ("ids", "ranges", "hashes", "fields")
            pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
        case torch.Tensor(), torch.Tensor():
            forms = [f"{value.dtype} {tuple(value.shape)}" for value in (one, other)]
            if forms[0] != forms[1]:
                return f"{where}: {forms[0]} and {forms[1]}"
            return None if torch.equal(one, other) else f"{where}: values differ"
        case dict(), dict():
            if set(one) != set(other):
                return f"{where}: {sorted(one)} and {sorted(other)}"
            pairs = [(f"{where}[{key!r}]", one[key], other[key]) for key in one]
        case ((list() | tuple()), (list() | tuple())):
            if len(one) != len(other):
                return f"{where}: {len(one)} and {len(other)} long"
            if all(isinstance(value, int) for value in (*one, *other)):
                return _unless(list(one) == list(other), one, other, where)
            pairs = [
                (f"{where}[{i}]", *both) for i, both in enumerate(zip(one, other, strict=True))
            ]
        case _:
            equal = type(one) is type(other) and bool(one == other)
            return _unless(equal, one, other, where)
    for place, a, b in pairs:
        if difference := differences(a, b, place):
            return difference
    return None


def _unless(equal: bool, one: Any, other: Any, where: str) -> str | None:
    return None if equal else f"{where}: {brief(one)} and {brief(other)}"


def brief(value: Any) -> str:
    """Its repr, as far as a sentence has room for it."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."

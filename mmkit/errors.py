"""One exception family, one message style: where, expected, got, remedy; and the contexts that name
the part of a spec that an error is about.

Example: ``robot.actions[3]: expected a (6, 3) float32 tensor, got dtype bool. Convert it to
    float32.``
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DISTRIBUTION = "vllm-mmkit"
"""What pip calls mmkit."""


class MmkitError(ValueError):
    """Base of every error that mmkit raises on purpose. Its arguments are the parts of a
    `sentence`, or one text that is the whole message.

    Attributes:
        where: the path of what is wrong, for example ``robot.actions[3]``; empty for an error made
            of one text.
    """

    def __init__(self, where: str, expected: str = "", got: str = "", remedy: str = "") -> None:
        super().__init__(sentence(where, expected, got, remedy) if expected else where)
        self.where = where if expected else ""


class SpecError(MmkitError):
    """A spec that cannot work. mmkit raises it when a spec is declared, or bound to a config and a
    tokenizer.

    Attributes:
        others: further errors of the same spec, where it was bound.
    """

    others: tuple[SpecError, ...] = ()


class InputError(MmkitError):
    """A request that cannot be served. mmkit raises it before the request reaches the engine; it is
    HTTP status 400 in vLLM's server."""


def relocated(error: InputError, where: str) -> InputError:
    """Return an `InputError` that says the same of another path."""
    moved = InputError(where + str(error).removeprefix(error.where))
    moved.where = where
    return moved


class OptionsError(InputError):
    """Options of a request (`mm_processor_kwargs`) with which the spec cannot serve it, whatever
    its items: a caller's mistake, since without them the spec is sound."""


class VllmApiError(MmkitError):
    """The installed vLLM has none of the interfaces that mmkit knows."""


def sentence(where: str, expected: str, got: str, remedy: str = "") -> str:
    """A message in mmkit's one style: where, expected, got, and a remedy. What is raised in a
    context that knows where has no `where` of its own; see `At`."""
    parts = f"{where}:" if where else "", f"expected {expected}, got {got}.", remedy
    return " ".join(filter(None, parts))


class Refusals(list[SpecError]):
    """Collects why a spec cannot be bound: every reason, not only the first."""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A context after whose errors the next part is looked at."""
        try:
            yield
        except SpecError as error:
            self += [error, *error.others]

    def refuse(self) -> None:
        """Raise the first error, with the others as its `others`; nothing where there is none."""
        if self:
            first, *others = self
            first.others = tuple(others)
            raise first


@contextmanager
def of_spec(item: str = "the largest item", remedy: str = "") -> Iterator[None]:
    """A context in which the refusal of an item is a mistake of the spec, for which mmkit made it.

    Args:
        item: names it.
        remedy: what to state in the spec, where that is known.
    """
    try:
        yield
    except InputError as error:
        reason = f"{item} that mmkit made is refused: {error}"
        raise SpecError(" ".join(filter(None, (reason, remedy)))) from error


@contextmanager
def of_options(where: str) -> Iterator[None]:
    """A context in which whatever fails is a mistake of the options of a request.

    Args:
        where: names the options, for example ``robot, mm_processor_kwargs``.

    Raises:
        OptionsError: in place of what fails; an InputError stays as it is.
    """
    try:
        yield
    except InputError:
        raise
    except MmkitError as error:
        raise OptionsError(f"{where}: {error}") from error
    except Exception as error:
        got = f"{type(error).__name__}: {error}".rstrip(": .")
        raise OptionsError(where, "options that the model takes", got) from error


class At:
    """A context in which errors name a part of a spec: ``with At("robot.actions, layout"):``.

    Args:
        where: the part.
        expected: of a function of the spec, whose own errors of mmkit stay as they are.
        kind: what becomes of every other exception of a function.
    """

    def __init__(self, where: str, expected: str = "", kind: type[MmkitError] = SpecError) -> None:
        self.where, self.expected, self.kind = where, expected, kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, SpecError) and not self.expected:
            raise SpecError(f"{self.where}: {error}") from error
        if isinstance(error, Exception) and not isinstance(error, MmkitError):
            got = f"{type(error).__name__}: {error}".rstrip(": .")
            raise self.kind(self.where, self.expected or "a value", got) from error

"""One exception family, one message style, and contexts that name what an error is about.

A message says where, expected, got, and a remedy.

Example: ``robot.actions[3]: expected a (6, 3) float32 tensor, got dtype bool. Convert it to
    float32.``
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

DISTRIBUTION = "vllm-mmkit"
"""What pip calls mmkit."""


class MmkitError(ValueError):
    """Base of every error that mmkit raises on purpose.

    Its arguments are the parts of a message, see `write_message`, or one text that is the whole
    message.

    Attributes:
        where: the path of what is wrong, for example ``robot.actions[3]``; empty for an error that
            does not say where yet, see `prepend`.
    """

    def __init__(self, where: str, expected: str = "", got: str = "", remedy: str = "") -> None:
        if expected:
            message = write_message(where, expected, got, remedy)
            self.where = where
        else:
            message = where
            self.where = ""
        super().__init__(message)

    def prepend(self, where: str) -> None:
        """Put the path of what encloses the error in front of its message and path."""
        self.args = (f"{where}: {self}",)
        if self.where:
            self.where = f"{where}: {self.where}"
        else:
            self.where = where


class SpecError(MmkitError):
    """A spec that cannot work.

    mmkit raises it when a spec is declared, or bound to a config and a tokenizer; and at a request,
    if only this shows that a function of the spec, or its Hugging Face processor, is at fault.

    Attributes:
        others: further errors of the same spec, where it was bound.
    """

    others: tuple[SpecError, ...] = ()


class InputError(MmkitError):
    """A request that cannot be served.

    mmkit raises it before the request reaches the engine; it is HTTP status 400 in vLLM's server.
    """


class OptionsError(InputError):
    """Options of a request (`mm_processor_kwargs`) with which the spec cannot serve it.

    It is a caller's mistake, whatever the items: without the options the spec is sound.
    """


class VllmApiError(MmkitError):
    """The installed vLLM has none of the interfaces that mmkit knows."""


def write_message(where: str, expected: str, got: str, remedy: str = "") -> str:
    """Write a message in mmkit's one style: where, expected, got, and a remedy.

    `where` is empty where the error is raised inside `locate_errors`, which says where.
    """
    message = f"expected {expected}, got {got}."
    if where:
        message = f"{where}: {message}"
    if remedy:
        message = f"{message} {remedy}"
    return message


class ErrorCollector(list[SpecError]):
    """Collects why a spec cannot be bound: every reason, not only the first."""

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect the SpecError that ends the body of the context, and go on after it."""
        try:
            yield
        except SpecError as error:
            self.append(error)
            self.extend(error.others)

    def raise_first(self) -> None:
        """Raise the first error, with the other ones as its `others`, if there is any."""
        if not self:
            return
        first = self[0]
        first.others = tuple(self[1:])
        raise first


class convert_errors:
    """Convert the errors of a function, for example one of the spec, into an error of mmkit.

    MmkitErrors pass through.

    Args:
        where: what the function belongs to.
        expected: what the function should have done.
        to: the class of the error that is raised.
    """

    def __init__(self, where: str, expected: str, to: type[MmkitError] = SpecError) -> None:
        self.where = where
        self.expected = expected
        self.to = to

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, MmkitError):
            raise self.to(self.where, self.expected, describe_error(error)) from error


class locate_errors(convert_errors):
    """Name the part of a spec that a SpecError is about.

    Any error that is not mmkit's, from a function of the spec, becomes a SpecError: ``with
    locate_errors("robot.actions, layout"):``.

    The exception stays the same object and gets the name in front, so that its traceback is
    printed once, however many contexts it passes.

    Args:
        where: the part.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where, "a value")

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:  # nearly always
            return
        if isinstance(error, SpecError):
            error.prepend(self.where)
        super().__exit__(error_type, error, traceback)


def describe_error(error: Exception) -> str:
    """Return the class and the message of an error, for the `got` of a message."""
    return f"{type(error).__name__}: {error}".rstrip(": .")


@contextmanager
def report_as_spec_error(item: str = "the largest item", remedy: str = "") -> Iterator[None]:
    """Report an InputError about an item that mmkit made from the spec as a SpecError.

    Args:
        item: names the item.
        remedy: what to state in the spec, where that is known.
    """
    try:
        yield
    except InputError as error:
        message = f"{item} that mmkit made is refused: {error}"
        if remedy:
            message = f"{message} {remedy}"
        raise SpecError(message) from error


@contextmanager
def report_as_options_error(where: str) -> Iterator[None]:
    """Report every error as a mistake of the options of a request.

    An InputError stays as it is.

    Args:
        where: names the options, for example ``robot, mm_processor_kwargs``.

    Raises:
        OptionsError: in place of the error.
    """
    try:
        yield
    except InputError:
        raise
    except MmkitError as error:
        raise OptionsError(f"{where}: {error}") from error
    except Exception as error:
        raise OptionsError(where, "options that the model takes", describe_error(error)) from error


def relocate(error: InputError, where: str) -> InputError:
    """Return a copy of an error about another path."""
    copy = InputError(where + str(error).removeprefix(error.where))
    copy.where = where
    return copy

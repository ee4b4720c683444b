"""A planted bug, and the ways to plant one: another method, another step of a request, another declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

from hypothesis import Phase

from mmkit import ModelSpec
from mmkit.testing import NotApplicable, Subject, Violation, check_law
from mmkit.vllm_api import pipeline
from mmkit.vllm_api.items import Parser
from tests.profiles import profile

from .base import MIXED, ByHand, frames, make_mixed, series, with_model


@dataclass(frozen=True)
class Bug:
    """One planted bug.

    Attributes:
        law: the law that must catch it.
        name: as docs/data/planted-bugs.md has it.
        subject: makes the broken subject.
        message: a regular expression for what the law says.
    """

    law: str
    name: str
    subject: Callable[[], Subject]
    message: str


def planted(law: str, message: str) -> Callable[[Callable[[], Subject]], Bug]:
    """Return a decorator that makes a bug of a function that returns the broken subject."""

    def make_bug(make_subject: Callable[[], Subject]) -> Bug:
        return Bug(law, make_subject.__name__, make_subject, message)

    return make_bug


def violation(law: str, subject: Subject, examples: int, *, shrink: bool = False) -> str | None:
    """Return what a law says of a subject, which is the same every time; None if it says nothing."""
    phases = [Phase.generate]
    if shrink:
        phases.append(Phase.shrink)
    with profile(derandomize=True, phases=phases):
        try:
            check_law(law, subject, examples=examples)
        except Violation as error:
            return str(error)
        except NotApplicable:
            pass
    return None


# -- other methods -----------------------------------------------------------------------------------------------------

# A change is a function of the correct method, or step, and of its arguments.
Change = Callable[..., Any]


def override(base: type, name: str, change: Change) -> type:
    """Return a subclass with another method."""

    @wraps(getattr(base, name))
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        correct = getattr(super(subclass, self), name)
        return change(correct, *arguments, **options)

    subclass = type(base.__name__, (base,), {"__module__": __name__, name: method})
    return subclass


def override_step(base: type, step: str, change: Change) -> type:
    """Return a subclass of a processor that takes another step in its requests, a function of `pipeline`."""
    changed = partial(change, getattr(pipeline, step))

    def render(correct: Callable[..., Any], *arguments: Any) -> Any:
        with patch.object(pipeline, step, changed):
            return correct(*arguments)

    return override(base, "render", render)


def with_processor(name: str, change: Change) -> Subject:
    """Return `MIXED` with another method of its processor."""
    return make_mixed(processor=override(MIXED.classes.processor, name, change))


def with_step(step: str, change: Change, spec: ModelSpec = MIXED) -> Subject:
    """Return a spec with another step in its requests."""
    return make_mixed(spec, processor=override_step(spec.classes.processor, step, change))


def with_info(name: str, change: Change) -> Subject:
    """Return `MIXED` with another method of its processing info."""
    return make_mixed(info=override(MIXED.classes.info, name, change))


def with_dummy_inputs(name: str, change: Change) -> Subject:
    """Return `MIXED` with another method of its dummy inputs."""
    return make_mixed(dummy_inputs=override(MIXED.classes.dummy_inputs, name, change))


def with_parser(change: Change, spec: ModelSpec = MIXED) -> Subject:
    """Return a spec whose parser has another `parse_modality`."""
    parser_class = override(Parser, "parse_modality", change)

    def get_data_parser(correct: Callable[[], Parser]) -> Parser:
        parser = correct()
        return parser_class(parser.plan, parser.hidden_size)

    return make_mixed(spec, info=override(spec.classes.info, "get_data_parser", get_data_parser))


def with_model_method(name: str, change: Change) -> Subject:
    """Return `MIXED` with a model class by hand that has another method."""
    return with_model(override(ByHand, name, change))


# -- other declarations ------------------------------------------------------------------------------------------------


def with_series(model: type | None = None, **changes: Any) -> Subject:
    """Return both modalities, with another declaration of series, and with a model class for laws that need one."""
    return _make_subject(ModelSpec("mixed", series(**changes), frames()), model)


def with_frames(model: type | None = None, **changes: Any) -> Subject:
    """Return both modalities, with another declaration of frames, and with a model class for laws that need one."""
    return _make_subject(ModelSpec("mixed", series(), frames(**changes)), model)


def _make_subject(spec: ModelSpec, model: type | None) -> Subject:
    if model is None:
        return make_mixed(spec)
    return with_model(model, spec)

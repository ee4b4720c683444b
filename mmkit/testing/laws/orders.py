"""A law about requests that are in flight together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from inspect import unwrap
from threading import Thread
from types import CodeType, FunctionType
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ...vllm_api import harness
from ..strategies import Request
from ..subject import Subject
from .law import Case, differences, law

_PATIENCE = 5.0
"""Seconds for which a request that is stopped waits for another one. Longer says that the other one
waits for it, as where a processor has a lock."""


@dataclass(frozen=True)
class Orders:
    """The check of L18: requests that wait together for vLLM's renderer, then two in two threads.

    Attributes:
        lost: rendered requests may be cancelled, and overtake each other on their way to the
            engine. From 0.28 on vLLM asks for some later ones again; before, these fail with any
            processor.
        shared: the threads share vLLM's caches, which vLLM has no lock for.
    """

    lost: bool = harness.Miss is not None
    shared: bool = False

    def __call__(self, case: Case) -> None:
        parts = self._in_flight, self._in_threads
        case.draw(st.sampled_from(parts))(case)

    def _in_flight(self, case: Case) -> None:
        subject = case.subject
        few = {}
        for name, limit in subject.limits.items():
            if limit != 0:
                six = case.draw(st.lists(subject.samples[name], min_size=6, max_size=6))
                few[name] = st.sampled_from([*{repr(one): one for one in six}.values()][:3])
        # a hand-written processor keeps the items of a refused request: L3 tells
        refused = self.lost or subject.plan is not None
        of_few = subject.requests(of=few, most=1)
        strategy = _some_refused(subject, of_few) if refused else of_few
        requests = case.draw(st.lists(strategy, min_size=3, max_size=8))
        alone = [_outcome(subject, request) for request in requests]
        capacity = case.draw(
            st.sampled_from([factor * _room(alone) for factor in (1e6, 2, 1.5, 1)])
        )
        caches = harness.Caches(subject.processor, capacity, pair=True)
        returned = harness.in_flight(subject.processor, requests, caches)
        arriving = in_order = [number for number, _ in returned]
        if self.lost and case.draw(st.booleans()):
            some = case.draw(st.sampled_from([len(requests), *range(len(requests))]))
            arriving = case.draw(st.permutations(in_order))[:some]
        before = f" after {requests!r} in flight together"
        before += f", of which {arriving} arrive in this order" * (arriving != in_order)
        by_hand_refused = subject.plan is None and any(isinstance(one, Exception) for one in alone)
        drifted = arriving != in_order or by_hand_refused

        def compare(number: int, there: Any, when: str) -> None:
            told = replace(case, request=requests[number], before=before)
            if drifted and harness.Miss is not None and isinstance(there, harness.Miss):
                caches.forget(there.mm_hashes)
                there = _outcome(subject, requests[number], caches)
                when += ", and sent again"
            if unlike := _unlike(told, alone[number], there):
                told.fail(f"{when}: {unlike}")

        results = dict(returned)
        for number in arriving:
            compare(number, _handed_over(results[number], caches), "in flight with others")
        for number in case.draw(st.permutations(in_order)) * 2:
            there = _outcome(subject, requests[number], caches)
            compare(number, there, "after others that were in flight")

    def _in_threads(self, case: Case) -> None:
        subject = case.subject
        few = subject.requests(most=2)
        request, other = (case.draw(_some_refused(subject, few)) for _ in "12")
        alone, other_alone = _outcome(subject, request), _outcome(subject, other)
        told = replace(case, request=request, before=f" beside {other!r}")
        told_other = replace(case, request=other, before=f" beside {request!r}")
        steps = _steps(subject.processor)

        def beside(only: str = "") -> tuple[Any, dict[str, _Running]]:
            """The results of the request, and of the other one at each step, or one, of it."""
            # no processor that has learned from earlier requests
            fresh = copy(subject)
            fresh.processor = harness.again(subject.processor)
            caches = None
            if self.shared:
                room = _room([alone, other_alone])
                caches = harness.Caches(fresh.processor, room, pair=True)
                _outcome(fresh, request, caches)
            others: dict[str, _Running] = {}

            def stop(frame: Any, *_: Any) -> None:
                step = steps.get(frame.f_code, "")
                if not step or step in others or (only and step != only):
                    return
                if not any(running.is_alive() for running in others.values()):
                    others[step] = _Running(lambda: _outcome(fresh, other, caches))
                    others[step].join(_PATIENCE)

            first = _Running(lambda: _outcome(fresh, request, caches), stop)
            first.join()
            for running in others.values():
                running.join()
            return first.result, others

        there, others = beside()
        for step, running in others.items():
            if unlike := _unlike(told_other, other_alone, running.result):
                told_other.fail(f"while another thread has another one at {step}: {unlike}")
        if unlike := _unlike(told, alone, there):
            at = next((s for s in others if _unlike(told, alone, beside(s)[0])), "several steps")
            told.fail(f"while another thread processes another one at {at}: {unlike}")


orders = law(
    "L18 orders",
    "requests that are in flight together, in one thread or several, give what each gives alone, "
    "and leave nothing behind",
    cost=5,
)(Orders())


class _Running(Thread):
    """Something that runs in a thread of its own from now on.

    Attributes:
        result: what it returned.
    """

    result: Any

    def __init__(self, run: Callable[[], Any], trace: Any = None) -> None:
        super().__init__(daemon=True)
        self._runs, self._trace = run, trace
        self.start()

    def run(self) -> None:
        if self._trace is not None:
            sys.settrace(self._trace)
        self.result = self._runs()


def _some_refused(subject: Subject, requests: SearchStrategy[Request]) -> SearchStrategy[Request]:
    """Requests, of which some lack the placeholders of their items."""

    def changed(request: Request, lacks: bool) -> Request:
        return replace(request, prompt=subject.ordinary[:1]) if lacks else request

    return st.builds(changed, requests, st.sampled_from([False, False, True]))


def _outcome(subject: Subject, request: Request, caches: harness.Caches | None = None) -> Any:
    """The outcome of a request, or the error."""
    try:
        return subject.run(request, caches)
    except Exception as error:
        return error


def _handed_over(result: Any, caches: harness.Caches) -> Any:
    """The engine's view of a rendered request, or the error."""
    if isinstance(result, Exception):
        return result
    try:
        return harness.outcome(result, caches)
    except Exception as error:
        return error


def _room(outcomes: list[Any]) -> float:
    """A cache, in GiB, into which the items of any one of the requests fit."""
    sizes = [harness.size_gib(one) for one in outcomes if isinstance(one, harness.Outcome)]
    return max([*sizes, 1e-9])


def _unlike(case: Case, alone: Any, there: Any) -> str | None:
    """The difference between an outcome, or error, and that of the request alone."""
    for error in (alone, there):
        if isinstance(error, Exception):
            case.refused(error)
    match alone, there:
        case Exception(), Exception():
            return None
        case _, Exception():
            return f"{type(there).__name__}: {there}"
        case Exception(), _:
            return f"accepted, and alone {type(alone).__name__}: {alone}"
    difference = differences(alone, there)
    return f"alone and there, {difference}" if difference else None


def _steps(processor: Any) -> dict[CodeType, str]:
    """The functions of the classes of what the requests of a processor share, with their names."""
    shared = [processor, processor.info, getattr(processor, "data_parser", None)]
    with suppress(Exception):  # many have none
        hf_processor = processor.info.get_hf_processor()
        shared += [hf_processor, *vars(hf_processor).values()]
    classes = {cls for part in shared for cls in type(part).__mro__}
    return {
        code: f"{cls.__name__}.{name}"
        for cls in classes
        if hasattr(cls, "__dict__") and cls.__module__ != "builtins"
        for name, code in _functions(cls)
    }


def _functions(cls: type) -> Iterator[tuple[str, CodeType]]:
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        function = unwrap(function) if callable(function) else function
        if isinstance(function, FunctionType):
            yield name, function.__code__

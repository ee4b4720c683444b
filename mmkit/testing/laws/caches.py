"""The law about vLLM's processor caches."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from hypothesis import strategies as st

from ..differences import differences
from ..law import Case, law
from ..strategies import Request
from ..vllm_path import LEAST_CACHE_GIB, Caches, Miss, Outcome

STEPS = ("new", "seen before", "refused before")
"""What a request of the sequence is. One that is refused before lacks its placeholders."""

_TRIES = 4
"""Of a request whose items the engine's half of a cache lacks."""


@law(
    "any sequence of requests gives the same outputs with and without vLLM's processor caches, "
    "however small",
    cost=2,
)
def cache(case: Case) -> None:
    """Requests of a few items, so that some of a request are cached, and at other positions. Each
    is sent without a cache, with vLLM's cache in one process, and with its pair of sender and
    receiver. Shrinks towards few requests, a large cache, and no refused request."""
    subject = case.subject
    # in GiB: of all items, or hardly any
    capacity = case.draw(st.sampled_from([1.0, LEAST_CACHE_GIB]))
    few = subject.of_few(case.draw)
    caches = {
        "in one process": Caches(subject.processor, capacity, pair=False),
        "in two processes": Caches(subject.processor, capacity, pair=True),
    }
    seen: list[Request] = []
    drifts = False
    for step in case.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6)):
        again = step == "seen before" and seen
        request = case.draw(st.sampled_from(seen) if again else few)
        told = replace(case, request=request, before=f" after {seen!r}" if seen else "")
        when = ""
        if step == "refused before" and request.order:
            when = ", refused without a prompt before"
            for some in caches.values():
                with suppress(Exception):
                    subject.run(replace(request, prompt=[]), some)
        expected = subject.run(request)
        # where one request fills them, the two halves evict in different orders, and vLLM asks for
        # the items again that the engine then lacks
        drifts = drifts or expected.gib > capacity
        for name, some in caches.items():
            outcome = told.attempt(_run, told, some, _TRIES if drifts and Miss else 0)
            if not outcome:
                told.fail(f"with a cache {name}: {outcome}{when}")
            if difference := differences(expected, outcome):
                told.fail(f"without a cache and with one {name}: {difference}{when}")
        seen.append(request)


def _run(case: Case, caches: Caches, tries: int) -> Outcome:
    assert case.request is not None
    for _ in range(tries):
        try:
            return case.subject.run(case.request, caches)
        except Miss as error:
            caches.forget(error.mm_hashes)
    return case.subject.run(case.request, caches)

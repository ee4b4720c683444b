"""The law about vLLM's processor caches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from hypothesis import strategies as st

from ..differences import find_difference
from ..law import Case, law
from ..strategies import Request
from ..vllm_path import LEAST_CACHE_GIB, CacheMiss, Caches, Outcome
from .items import is_never_cached

STEPS = ("new", "seen before", "refused before")
"""What a request of the sequence is. A request that is refused before lacks its placeholders."""

_LARGE_CACHE_GIB = 1.0
_MAX_REQUESTS = 6  # of a sequence
_MAX_TRIES = 4  # of a request whose items the engine's half of a cache lacks


@law(cost=2)
def cache(case: Case) -> None:
    """A sequence of requests gives the same result with and without vLLM's caches.

    The caches may be small, requests may be refused, and the caller overwrites its items once they
    are processed.

    Requests are of a few items, so that some of a request are cached, and at other positions. Each
    is sent without a cache, with vLLM's cache in one process, and with its pair of sender and
    receiver. Shrinks towards few requests, a large cache, and no refused request.
    """
    subject = case.subject
    capacity = case.draw(st.sampled_from([_LARGE_CACHE_GIB, LEAST_CACHE_GIB]))
    new_requests = _draw_request_strategy(case)
    caches_by_arrangement = {
        "in one process": Caches(subject.processor, capacity, pair=False),
        "in two processes": Caches(subject.processor, capacity, pair=True),
    }
    past_requests: list[Request] = []
    may_miss = False
    for step in case.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=_MAX_REQUESTS)):
        if step == "seen before" and past_requests:
            request = case.draw(st.sampled_from(past_requests))
        else:
            request = case.draw(new_requests)
        case.request = request
        case.before = f" after {past_requests!r}" if past_requests else ""
        when = ""
        if step == "refused before" and request.order:
            when = ", refused without a prompt before"
            _run_without_prompt(case, request, list(caches_by_arrangement.values()))
        expected = subject.run(request)
        # Where a single request fills them, the two halves of a cache evict in different orders.
        # vLLM then asks for the items again that the engine lacks.
        may_miss = may_miss or expected.gib > capacity
        for arrangement, caches in caches_by_arrangement.items():
            tries = _MAX_TRIES if may_miss else 0
            outcome = case.attempt(_run_with_retries, case, request, caches, tries)
            if not outcome:
                case.fail(f"with a cache {arrangement}: {outcome}{when}")
            for name in expected.hashes:
                if is_never_cached(subject, name):  # such an item has a new hash each time
                    outcome.hashes[name] = expected.hashes[name]
            difference = find_difference(expected, outcome)
            if difference:
                case.fail(f"without a cache and with one {arrangement}: {difference}{when}")
        past_requests.append(request)


def _draw_request_strategy(case: Case) -> st.SearchStrategy[Request]:
    """Draw three items of each modality, and return a strategy for requests of these.

    So few items repeat in a sequence of requests.
    """
    strategies = {}
    for name in case.subject.limits:
        samples = case.subject.samples[name]
        three_items = case.draw(st.tuples(samples, samples, samples))
        strategies[name] = st.sampled_from(three_items)
    return case.subject.requests(of=strategies)


def _run_without_prompt(case: Case, request: Request, all_caches: Sequence[Caches]) -> None:
    """Send a request that is refused: without its placeholders."""
    without_prompt = replace(request, prompt=[])
    for caches in all_caches:
        with suppress(Exception):
            case.subject.run(without_prompt, caches)


def _run_with_retries(case: Case, request: Request, caches: Caches, tries: int) -> Outcome:
    """Run a request, and again where the engine's half of the cache lacks one of its items.

    vLLM does the same: it drops such items from the API server's half, and sends the request again.
    """
    if CacheMiss is None:
        tries = 0
    for _ in range(tries):
        try:
            return case.subject.run(request, caches)
        except CacheMiss as error:
            for item_hash in error.mm_hashes:
                caches.sender.invalidate(item_hash)
    return case.subject.run(request, caches)

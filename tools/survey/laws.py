"""Laws about vLLM itself, on its own processors: its doors, names of items, and its caches between
requests that are in flight together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from mmkit.testing import LAWS, Case, Request
from mmkit.testing.law import law
from mmkit.testing.vllm_path import Caches, Miss, outcome, render, run

from .doors import TEMPLATE, Doors, renderer_from_config, with_server_kwargs

doors_of = cache(Doors)


@law(
    "the same request gives the same ids, ranges, fields and hashes by every door of vLLM that "
    "takes it: no text begins twice, no option and no uuid is lost, and options of the server do "
    "what those of a request do",
    cost=6,
)
def doors(case: Case) -> None:
    subject = case.subject
    request = case.draw_request()
    expected = subject.run(request)
    if request.kwargs:
        _of_server(case, request, expected)
    if renderer_from_config is None:
        return
    opened = doors_of(subject.processor)
    by_ids = opened.generate(request.prompt, request.data(), request.kwargs)
    case.same(expected, by_ids, "the processor and LLM.generate, of ids")
    uuids = _uuids(request, "one") if case.draw(st.booleans()) else None
    if subject.processor.info.ctx.tokenizer is not None:
        _by_chat(case, opened, request, uuids)
    if uuids is not None:
        _with_uuids(case, opened, request, uuids)


def _of_server(case: Case, request: Request, expected: Any) -> None:
    """Options that are the server's do the same for the first request and for the second."""
    server = with_server_kwargs(case.subject.processor, request.kwargs)
    for which in ("first", "second"):
        served = run(server, request.prompt, request.data())
        what = f"options of a request and, for the {which} request, of the server"
        for part in ("ids", "ranges", "fields"):
            case.same(getattr(expected, part), getattr(served, part), what, part)


def _uuids(request: Request, name: str) -> dict[str, list[str]]:
    return {
        modality: [f"{name} {i}" for i in range(len(samples))]
        for modality, samples in request.items.items()
    }


def _with_uuids(case: Case, opened: Doors, request: Request, uuids: dict[str, list[str]]) -> None:
    """Uuids are what identifies items, whether there is any cache or not."""

    def hashes(names: dict[str, list[str]]) -> dict[str, list[str]]:
        return opened.generate(request.prompt, request.data(), request.kwargs, names).hashes

    named, others = hashes(uuids), hashes(_uuids(request, "other"))
    for modality in named:
        if not set(named[modality]).isdisjoint(others[modality]):
            case.fail(f"items of {modality} with other uuids have the same hash")
    with opened.without_caches():
        case.same(named, hashes(uuids), "with a cache and with none, items of one uuid", "hashes")


def _by_chat(case: Case, opened: Doors, request: Request, uuids: Any) -> None:
    """The chat template writes the beginning of a text, so nothing else may. Chats have parts for
    PIL images alone that are no files."""
    tokenizer = case.subject.processor.info.ctx.tokenizer
    text, parts = tokenizer.decode(request.prompt), []
    for name, values in request.data().items():
        for i, value in enumerate(values):
            is_pil = type(value).__module__.startswith("PIL.")
            if name != "image" or not is_pil or opened.llm.model_config.is_encoder_decoder:
                return
            part = {"type": "image_pil", "image_pil": value}
            parts.append({**part, "uuid": uuids[name][i]} if uuids else part)
    message = (*parts, {"type": "text", "text": text})
    template = tokenizer.decode(case.subject.first) + TEMPLATE
    by_chat = case.attempt(opened.chat, message, template, request.kwargs)
    if opened.read is None:
        case.fail(f"LLM.chat, the text {text!r}: {by_chat}")
    text, options = opened.read
    if options not in (None, request.kwargs):
        case.fail(f"LLM.chat reads parts with the options {options!r}")
    ids = tokenizer.encode(text, add_special_tokens=False)
    of_ids = case.attempt(opened.generate, ids, request.data(), request.kwargs, uuids)
    case.same(of_ids, by_chat, f"the ids of a text and, by LLM.chat, the text {text!r}")


@law(
    "a caller's name for an item (its uuid) changes nothing of what becomes of it, and brings back "
    "neither what was sent under that name before nor what other kwargs made of it",
    cost=3,
)
def names(case: Case) -> None:
    subject = case.subject
    request = case.draw_request()
    # another modality has the same names
    uuids = _uuids(request, "one")
    caches = Caches(subject.processor, 1.0, pair=case.draw(st.booleans()))
    others = {
        name: [case.draw(subject.samples[name]) for _ in samples]
        for name, samples in request.items.items()
    }
    requests = {
        "without names and with them": request,
        "without names and under those that other items had": replace(request, items=others),
        "without names and under those that it had with other kwargs": replace(
            request, items=others, kwargs=case.draw(subject.kwargs)
        ),
    }
    for what, case.request in requests.items():
        sent = case.request.prompt, case.request.data(), case.request.kwargs
        alone = case.attempt(run, subject.processor, *sent)
        named = case.attempt(run, subject.processor, *sent, caches, uuids=uuids)
        if alone and named:  # other items, or other kwargs, may not fit the prompt
            case.same(replace(alone, hashes={}), replace(named, hashes={}), what)


# -- requests in flight together, for make recall alone --------------------------------------------


@law(
    "of requests that are rendered one after the other, some reach the engine in another order or "
    "never, and later ones give what they give alone",
    cost=5,
)
def lost(case: Case) -> None:
    processor, few = case.subject.processor, case.subject.of_few(case.draw, most=1)
    requests = case.draw(st.lists(few, min_size=3, max_size=6))
    alone = [case.subject.run(request) for request in requests]
    caches = Caches(processor, 1e6, pair=True)
    rendered = [
        render(processor, list(one.prompt), one.data(), dict(one.kwargs), caches.sender)
        for one in requests
    ]
    numbers = list(range(len(requests)))
    arriving = case.draw(st.permutations(numbers))[: case.draw(st.sampled_from(numbers))]
    for number in [*arriving, *case.draw(st.permutations(numbers))]:
        case.request = requests[number]
        result, rendered[number] = rendered[number], None
        there = case.attempt(_arrived, case, result, caches)
        if not there:
            case.fail(f"after others in flight: {there}")
        case.same(alone[number], there, "alone and after others in flight")


def _arrived(case: Case, result: Any, caches: Caches) -> Any:
    """A rendered request, or one that is sent again, as the engine has it. From 0.28 on vLLM asks
    again for items that the engine lacks."""
    try:
        return outcome(result, caches) if result is not None else _sent(case, caches)
    except Exception as error:
        if Miss is None or not isinstance(error, Miss):
            raise
        caches.forget(error.mm_hashes)
        return _sent(case, caches)


def _sent(case: Case, caches: Caches) -> Any:
    assert case.request is not None
    return case.subject.run(case.request, caches)


@law(
    "a request gives what it gives alone while another thread, with the same caches, processes "
    "another one",
    cost=5,
)
def shared(case: Case) -> None:
    subject = case.subject
    few = subject.of_few(case.draw, most=1)
    request, other = case.draw(few), case.draw(few)
    case.request, case.before = request, f" beside {other!r}"
    alone = subject.run(request), subject.run(other)
    caches = Caches(subject.processor, max(one.gib for one in alone), pair=True)
    subject.run(request, caches)
    step = case.draw(st.integers(0, 5))
    _interrupt(caches.sender, step, lambda: subject.run(other, caches))
    there, when = case.attempt(subject.run, request, caches), "while another thread has another one"
    if not there:
        case.fail(f"{when}, before step {step} of the sender's cache: {there}")
    case.same(alone[0], there, f"alone and {when}")


def _interrupt(cache: Any, step: int, other: Callable[[], Any]) -> None:
    """Before some call of a cache, as another thread would, something else happens."""
    calls = iter(range(step, -1, -1))

    def interrupted(method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls, None) == 0:
                other()
            return method(*arguments, **options)

        return call

    for name in dir(type(cache)):
        method = getattr(cache, name)
        if not name.startswith("_") and callable(method):
            setattr(cache, name, interrupted(method))


EVERY = LAWS | {own.name: own for own in (doors, names, lost, shared)}
SURVEYED = [
    name
    for name, own in LAWS.items()
    if not own.needs_model and name != "outputs"  # which processors by hand do not declare
] + ["doors", "names"]

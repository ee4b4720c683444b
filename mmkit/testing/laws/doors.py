"""A law about the doors by which requests come: `LLM.generate`, `LLM.chat`, the server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from ...vllm_api import doors as vllm_doors
from ...vllm_api import harness
from ..strategies import Request
from ..subject import NO_KWARGS
from .law import Case, NotApplicable, law


@law(
    "L19 doors",
    "the same request gives the same ids, ranges, fields and hashes by every door of vLLM that "
    "takes it: no text begins twice, no option and no uuid is lost, and options of the server do "
    "what those of a request do",
    cost=6,
)
def doors(case: Case) -> None:
    subject = case.subject
    if not vllm_doors.KNOWN and subject.kwargs is NO_KWARGS:
        raise NotApplicable("before vLLM 0.17 no door works without an engine")
    request = case.draw_request()
    assume(vllm_doors.KNOWN or request.kwargs)
    expected = subject.run(request)
    if request.kwargs:
        _of_server(case, request, expected)
    if subject.doors is None:
        return
    by_ids = subject.doors.generate(request.prompt, request.data(), request.kwargs)
    case.same(expected, by_ids, "the processor and LLM.generate, of ids")
    uuids = _uuids(request, "one") if case.draw(st.booleans()) else None
    tokenizer = subject.processor.info.ctx.tokenizer
    if tokenizer is not None:
        text = tokenizer.decode(request.prompt)
        _by_text(case, request, text, uuids)
        _by_chat(case, request, text, uuids)
    if uuids is not None:
        _with_uuids(case, request, uuids)


def _of_server(case: Case, request: Request, expected: harness.Outcome) -> None:
    """Options that are the server's do the same for the first request and for the second."""
    server = vllm_doors.with_server_kwargs(case.subject.processor, request.kwargs)
    for which in ("first", "second"):
        outcome = harness.run(server, request.prompt, request.data())
        what = f"options of a request and, for the {which} request, of the server"
        for part in ("ids", "ranges", "fields"):
            case.same(getattr(expected, part), getattr(outcome, part), what, part)


def _uuids(request: Request, name: str) -> dict[str, list[str]]:
    return {
        modality: [f"{name} {i}" for i in range(len(samples))]
        for modality, samples in request.items.items()
    }


def _with_uuids(case: Case, request: Request, uuids: dict[str, list[str]]) -> None:
    """Uuids are what identifies items, whether there is any cache or not."""
    opened = case.subject.doors
    assert opened is not None

    def hashes(names: dict[str, list[str]]) -> dict[str, list[str]]:
        return opened.generate(request.prompt, request.data(), request.kwargs, names).hashes

    named, others = hashes(uuids), hashes(_uuids(request, "other"))
    for modality in named:
        if not set(named[modality]).isdisjoint(others[modality]):
            case.fail(f"items of {modality} with other uuids have the same hash")
    with opened.without_caches():
        case.same(named, hashes(uuids), "with a cache and with none, items of one uuid", "hashes")


def _attempt(case: Case, run: Callable[[], harness.Outcome]) -> harness.Outcome | str:
    """The result of a request, or its refusal: a text may mean something else than its ids."""
    try:
        return run()
    except Exception as error:
        case.refused(error)
        return f"refused with {type(error).__name__}: {error}"


def _compare(case: Case, one: Any, other: Any, what: str) -> None:
    refusals = [outcome for outcome in (one, other) if isinstance(outcome, str)]
    if len(refusals) == 1:
        case.fail(f"{what}: one of them is {refusals[0]}")
    if not refusals:
        case.same(one, other, what)


def _by_text(case: Case, request: Request, text: str, uuids: Any) -> None:
    opened, sent = case.subject.doors, (request.data(), request.kwargs, uuids)
    assert opened is not None
    ids = harness.encoded(case.subject.processor, text)
    by_ids, by_text = (
        _attempt(case, partial(opened.generate, prompt, *sent)) for prompt in (ids, text)
    )
    _compare(case, by_ids, by_text, f"by LLM.generate, the ids of a text and the text {text!r}")


def _by_chat(case: Case, request: Request, text: str, uuids: Any) -> None:
    """The chat template writes the beginning of a text, so nothing else may."""
    subject = case.subject
    opened, tokenizer = subject.doors, subject.processor.info.ctx.tokenizer
    assert opened is not None
    parts: list[Any] = []
    for name, values in request.data().items():
        names = uuids[name] if uuids else [None] * len(values)
        for value, uuid in zip(values, names, strict=True):
            part = opened.part(name, value)
            if part is None:
                return
            parts.append(part if uuid is None else {**part, "uuid": uuid})
    message = (*parts, {"type": "text", "text": text})
    template = tokenizer.decode(subject.first) + vllm_doors.TEMPLATE
    ways = {"LLM.chat": opened.chat}
    if opened.serves:
        ways["chat completions"] = opened.chat_completions
    sent = (request.data(), request.kwargs, uuids)
    for way, chat in ways.items():
        by_chat = _attempt(case, partial(chat, message, template, request.kwargs))
        read = opened.last
        if read is None:
            case.fail(f"{way}, the text {text!r}: {by_chat}")
        # no part of a spec is read with options
        if subject.plan is None and read.options not in (None, request.kwargs):
            case.fail(f"{way} reads parts with the options {read.options!r}")
        ids = tokenizer.encode(read.text, add_special_tokens=False)
        of_ids = _attempt(case, partial(opened.generate, ids, *sent))
        what = f"the ids of a text and, by {way}, the text {read.text!r}"
        _compare(case, of_ids, by_chat, what)

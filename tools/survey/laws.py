"""Laws about vLLM itself, on its own processors: its doors, and names of items."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from mmkit.testing import LAWS, Case, Request
from mmkit.testing.law import law
from mmkit.testing.vllm_path import Caches, run

from .doors import TEMPLATE, Doors, renderer_from_config, with_server_kwargs

doors_of = cache(Doors)


@law(cost=6)
def doors(case: Case) -> None:
    """The same request gives the same ids, ranges, fields and hashes by every door of vLLM that
    takes it: no text begins twice, no option and no uuid is lost, and options of the server do what
    those of a request do."""
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
    template = tokenizer.decode(case.subject.bos_ids) + TEMPLATE
    by_chat = case.attempt(opened.chat, message, template, request.kwargs)
    if opened.read is None:
        case.fail(f"LLM.chat, the text {text!r}: {by_chat}")
    text, options = opened.read
    if options not in (None, request.kwargs):
        case.fail(f"LLM.chat reads parts with the options {options!r}")
    ids = tokenizer.encode(text, add_special_tokens=False)
    of_ids = case.attempt(opened.generate, ids, request.data(), request.kwargs, uuids)
    case.same(of_ids, by_chat, f"the ids of a text and, by LLM.chat, the text {text!r}")


@law(cost=3)
def names(case: Case) -> None:
    """A caller's name for an item (its uuid) changes nothing of what becomes of it, and brings back
    neither what was sent under that name before nor what other kwargs made of it."""
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


EVERY = LAWS | {own.name: own for own in (doors, names)}
SURVEYED = [
    name
    for name, own in LAWS.items()
    if not own.needs_model and name != "outputs"  # which processors by hand do not declare
] + ["doors", "names"]

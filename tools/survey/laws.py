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


@cache
def open_doors(processor: Any) -> Doors:
    """Return the doors of a processor, the same ones at each call."""
    return Doors(processor)


@law(cost=6)
def doors(case: Case) -> None:
    """Check that every door of vLLM gives the same ids, ranges, fields and hashes of a request.

    No text begins twice, no option and no uuid is lost, and options of the server do what those of
    a request do.
    """
    subject = case.subject
    request = case.draw_request()
    expected = subject.run(request)
    if request.kwargs:
        _compare_server_kwargs(case, request, expected)
    if renderer_from_config is None:
        return
    all_doors = open_doors(subject.processor)
    by_ids = all_doors.generate(request.prompt, request.data(), request.kwargs)
    case.check_equal(expected, by_ids, "the processor and LLM.generate, of ids")
    uuids = None
    if case.draw(st.booleans()):
        uuids = _make_uuids(request, "one")
    if subject.processor.info.ctx.tokenizer is not None:
        _compare_chat(case, all_doors, request, uuids)
    if uuids is not None:
        _compare_uuids(case, all_doors, request, uuids)


def _compare_server_kwargs(case: Case, request: Request, expected: Any) -> None:
    """Check that options of the server do the same for the first request and for the second."""
    server = with_server_kwargs(case.subject.processor, request.kwargs)
    for which in ("first", "second"):
        outcome = run(server, request.prompt, request.data())
        what = f"options of a request and, for the {which} request, of the server"
        for part in ("ids", "ranges", "fields"):
            case.check_equal(getattr(expected, part), getattr(outcome, part), what, part)


def _make_uuids(request: Request, prefix: str) -> dict[str, list[str]]:
    """Return a uuid for each item; items of several modalities have the same ones."""
    uuids = {}
    for modality, samples in request.items.items():
        uuids[modality] = [f"{prefix} {i}" for i in range(len(samples))]
    return uuids


def _compare_uuids(
    case: Case, all_doors: Doors, request: Request, uuids: dict[str, list[str]]
) -> None:
    """Check that uuids are what identifies items, whether there is any cache or not."""

    def hash_items(uuids: dict[str, list[str]]) -> dict[str, list[str]]:
        return all_doors.generate(request.prompt, request.data(), request.kwargs, uuids).hashes

    hashes = hash_items(uuids)
    hashes_of_other_uuids = hash_items(_make_uuids(request, "other"))
    for modality in hashes:
        if not set(hashes[modality]).isdisjoint(hashes_of_other_uuids[modality]):
            case.fail(f"items of {modality} with other uuids have the same hash")
    with all_doors.without_caches():
        what = "with a cache and with none, items of one uuid"
        case.check_equal(hashes, hash_items(uuids), what, "hashes")


def _compare_chat(case: Case, all_doors: Doors, request: Request, uuids: Any) -> None:
    """Check a chat of images.

    The chat template writes the beginning of a text, so nothing else may. Of the parts that are no
    files, chats have only those of PIL images.
    """
    tokenizer = case.subject.processor.info.ctx.tokenizer
    parts: list[dict[str, Any]] = []
    for name, values in request.data().items():
        for i, value in enumerate(values):
            is_pil = type(value).__module__.startswith("PIL.")
            if name != "image" or not is_pil or all_doors.llm.model_config.is_encoder_decoder:
                return
            part = {"type": "image_pil", "image_pil": value}
            if uuids:
                part["uuid"] = uuids[name][i]
            parts.append(part)
    text = tokenizer.decode(request.prompt)
    parts.append({"type": "text", "text": text})
    template = tokenizer.decode(case.subject.bos_ids) + TEMPLATE
    by_chat = case.attempt(all_doors.chat, parts, template, request.kwargs)
    if all_doors.last_chat is None:
        case.fail(f"LLM.chat, the text {text!r}: {by_chat}")
    text, options = all_doors.last_chat
    if options not in (None, request.kwargs):
        case.fail(f"LLM.chat reads parts with the options {options!r}")
    ids = tokenizer.encode(text, add_special_tokens=False)
    by_ids = case.attempt(all_doors.generate, ids, request.data(), request.kwargs, uuids)
    case.check_equal(by_ids, by_chat, f"the ids of a text and, by LLM.chat, the text {text!r}")


@law(cost=3)
def names(case: Case) -> None:
    """Check that a caller's name for an item (its uuid) changes nothing of what becomes of it.

    It brings back neither what was sent under that name before nor what other kwargs made of it.
    """
    subject = case.subject
    request = case.draw_request()
    # another modality has the same names
    uuids = _make_uuids(request, "one")
    caches = Caches(subject.processor, 1.0, pair=case.draw(st.booleans()))
    other_items = {}
    for name, samples in request.items.items():
        other_items[name] = [case.draw(subject.samples[name]) for _ in samples]
    requests = {
        "without names and with them": request,
        "without names and under those that other items had": replace(request, items=other_items),
        "without names and under those that it had with other kwargs": replace(
            request, items=other_items, kwargs=case.draw(subject.kwargs)
        ),
    }
    for what, case.request in requests.items():
        prompt, data, kwargs = case.request.prompt, case.request.data(), case.request.kwargs
        unnamed = case.attempt(run, subject.processor, prompt, data, kwargs)
        named = case.attempt(run, subject.processor, prompt, data, kwargs, caches, uuids=uuids)
        if unnamed and named:  # other items, or other kwargs, may not fit the prompt
            case.check_equal(replace(unnamed, hashes={}), replace(named, hashes={}), what)


def _list_surveyed() -> list[str]:
    """Return the names of the laws that need no model, and of those about vLLM itself."""
    surveyed = []
    for name, any_law in LAWS.items():
        # processors by hand do not declare outputs
        if not any_law.needs_model and name != "outputs":
            surveyed.append(name)
    return [*surveyed, doors.name, names.name]


EVERY = LAWS | {doors.name: doors, names.name: names}
SURVEYED = _list_surveyed()

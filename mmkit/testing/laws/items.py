"""Laws about single items: their rows, their hashes, and the embeddings that stand for them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from ...plan.layouts import TooManyRows
from .. import vllm_path
from ..differences import find_difference
from ..law import Case, NotApplicable, Refused, law
from ..strategies import ImageSample, Request, Sample, leave_out_parts
from ..subject import Subject
from ..updates import find_most_rows
from ..vllm_model import get_hidden_size, list_embedding_forms, parse_embeddings
from ..vllm_path import Data, Outcome, decode_on_backgrounds


@law()
def worst_case(case: Case) -> None:
    """No item has more encoder rows than is stated.

    The dummy item has as many as stated, or as many as fit the context.
    """
    subject = case.subject
    names = sorted(subject.limits.keys() - subject.ids_only)
    if not names:
        raise NotApplicable("no item has encoder rows")
    name = case.draw(st.sampled_from(names))
    most = find_most_rows(subject.processor, name)
    sample = case.draw(subject.samples[name])
    # where the largest item does not fit the context, the dummy item is a smaller one
    is_too_small = most.dummy < most.scheduled and not _is_fitted(subject, name)
    if most.dummy > most.scheduled or is_too_small:
        case.fail(
            f"{most.scheduled} rows are stated for {name}, and the dummy item has {most.dummy}; "
            "tokens that take no row, as a start mark, do not count"
        )
    item_updates = case.attempt(subject.find_updates, name, [sample])
    if isinstance(item_updates, Refused) and isinstance(item_updates.error, TooManyRows):
        case.fail(f"{sample!r} is refused: {item_updates.error}")
    case.request = subject.make_minimal_request(name, sample)
    rows = sum(subject.run(case.request).mask(name, 0))
    if rows > most.scheduled:
        case.fail(f"{name} has an item of {rows} rows, and at most {most.scheduled} are stated")


def _is_fitted(subject: Subject, name: str) -> bool:
    """Return whether the dummy item of a modality is chosen so that it fits the context."""
    if subject.plan is None:
        return False
    modality = subject.plan.modalities[name]
    return not modality.needs_hf and modality.is_fitted


# -- hashes ----------------------------------------------------------------------------------------


@law()
def identity(case: Case) -> None:
    """Equal content has equal hashes in every container; other content or options have others.

    Other content is also the same item without a part that may be absent. The options are those
    that change what an item becomes: of the request, or of decoding.
    """
    request = case.draw_request(most=1)
    name = next(iter(request.items))
    assume(name not in case.subject.ids_only)  # such an item has no hash in the engine
    assume(not is_never_cached(case.subject, name))  # such an item has a new hash each time
    (sample,) = request.items[name]
    outcome = case.subject.run(request)
    # One hash for two contents makes an answer wrong, and is looked for first. Two hashes for one
    # content only cost a cache miss.
    _check_other_content(case, request, name, outcome)
    if isinstance(sample, ImageSample):
        _check_decoding(case, request, name, sample)
    _check_other_options(case, request, name, outcome)
    _check_other_containers(case, request, name, outcome)


def is_never_cached(subject: Subject, name: str) -> bool:
    """Return whether a spec lets vLLM keep nothing of the items of a modality."""
    return subject.plan is not None and subject.plan.modalities[name].is_never_kept


def _check_other_content(case: Case, request: Request, name: str, outcome: Outcome) -> None:
    (sample,) = request.items[name]
    _check_other_sample(case, request, name, outcome, sample.other())
    if case.subject.plan is None:
        return
    smaller_samples = leave_out_parts(sample, case.subject.plan.modalities[name].item)
    if smaller_samples:
        other = case.draw(st.sampled_from(smaller_samples))
        _check_other_sample(case, request, name, outcome, other)


def _check_other_sample(
    case: Case, request: Request, name: str, outcome: Outcome, other: Sample
) -> None:
    (sample,) = request.items[name]
    if not find_difference(sample.list_forms()[0], other.list_forms()[0]):
        return
    outcome_of_other = _attempt_value(case, request, name, other.value(), request.kwargs)
    if outcome_of_other and outcome_of_other.hashes[name] == outcome.hashes[name]:
        case.fail(f"{other!r} has the same hash")


def _check_decoding(case: Case, request: Request, name: str, sample: ImageSample) -> None:
    """Check an image file that vLLM decodes on two backgrounds."""
    outcomes = []
    for picture in decode_on_backgrounds(sample.transparent()):
        # with a list of uuids, as from its chat, vLLM hashes the file instead of the pixels
        uuids = {name: [None]}
        outcomes.append(_attempt_value(case, request, name, picture, request.kwargs, uuids))
    on_white, on_black = outcomes
    if on_white and on_black and on_white.hashes[name] == on_black.hashes[name]:
        case.fail("a file decoded on white and on black (rgba_background_color): one hash")


def _check_other_options(case: Case, request: Request, name: str, outcome: Outcome) -> None:
    (sample,) = request.items[name]
    kwargs = case.draw(case.subject.kwargs)
    with_options = _attempt_value(case, request, name, sample.value(), kwargs)
    if not with_options or with_options.hashes[name] != outcome.hashes[name]:
        return
    # options that change nothing of an item need not change its hash
    with_first = _gather_first_item(with_options, name)
    if find_difference(_gather_first_item(outcome, name), with_first):
        case.fail(f"kwargs {kwargs!r} have the same hash")


def _check_other_containers(case: Case, request: Request, name: str, outcome: Outcome) -> None:
    (sample,) = request.items[name]
    for value in sample.list_forms():
        container = type(value).__name__
        in_container = _attempt_value(case, request, name, value, request.kwargs)
        if in_container:
            if in_container.hashes[name] != outcome.hashes[name]:
                case.fail(f"the same content as {container} has another hash")
        elif case.subject.plan is not None:
            case.fail(f"the same content as {container} is refused: {in_container.error}")


def _attempt_value(
    case: Case, request: Request, name: str, value: Any, kwargs: Data, uuids: Any = None
) -> Any:
    """Run a request with another value for its item of a modality, and with other options."""
    data = {**request.data(), name: [value]}
    processor = case.subject.processor
    return case.attempt(vllm_path.run, processor, request.prompt, data, kwargs, uuids=uuids)


def _gather_first_item(outcome: Outcome, name: str) -> list[Any]:
    """Return what became of the first item of a modality: its fields, and its ids and mask."""
    layouts = []
    for item_range in outcome.ranges.get(name, [])[:1]:
        ids = outcome.ids[item_range.offset : item_range.end]
        layouts.append((ids, item_range.mask))
    return [outcome.values(name, 0), layouts]


# -- embeddings ------------------------------------------------------------------------------------

# A refusal that has one of these says that embeddings are not taken.
_REFUSAL_WORDS = ("embedding", "--enable-mm-embeds")


@law()
def embeds(case: Case) -> None:
    """Precomputed embeddings get the ranges of the item that they were computed from."""
    subject = case.subject
    accepting = _find_modalities_with_embeddings(subject)
    if not accepting:
        raise NotApplicable("no modality takes embeddings")
    request = case.draw_request()
    present = sorted(accepting.intersection(request.items))
    assume(present)
    name = case.draw(st.sampled_from(present))
    outcome = subject.run(request)
    if not outcome.ranges.get(name):
        raise NotApplicable(f"no position of the prompt stands for {name}")
    width = get_hidden_size(subject.processor)
    rows = []
    for item_range in outcome.ranges[name]:
        rows.append(torch.ones(sum(item_range.mask), width))
    forms = list_embedding_forms(subject, name, rows, outcome)
    refusals = []
    for form in forms:
        refusal = _check_embeddings(case, request, outcome, name, form)
        if refusal:
            refusals.append(refusal)
    # where several modalities may take embeddings, another one may still do
    if len(refusals) == len(forms) and len(accepting) == 1:
        raise NotApplicable(f"embeddings are refused: {refusals[0]}")


def _find_modalities_with_embeddings(subject: Subject) -> set[str]:
    """Return the modalities that take embeddings; of a hand-written processor, all of them."""
    if subject.plan is None:
        return set(subject.samples)
    accepting = set()
    for name, modality in subject.plan.modalities.items():
        if modality.parser.takes_embeds:
            accepting.add(name)
    return accepting


def _check_embeddings(case: Case, request: Request, outcome: Outcome, name: str, form: Any) -> str:
    """Check that embeddings get the ranges of the items that they replace, or are refused as such.

    Args:
        case: the case.
        request: the request with the items.
        outcome: its outcome.
        name: the modality of the items that are replaced.
        form: the embeddings as a caller sends them.

    Returns:
        The reason of a refusal; empty where the embeddings are accepted.
    """
    subject = case.subject
    parsed_items = case.attempt(parse_embeddings, subject.processor, name, form)
    result = parsed_items
    if parsed_items:
        data = {**request.data(), name: form}
        result = case.attempt(
            vllm_path.run, subject.processor, request.prompt, data, request.kwargs
        )
    if result:
        case.check_equal(outcome.ranges, result.ranges, "the raw item and its embeddings", "ranges")
        return ""
    if result is None:
        reason = "taken for something else"
    else:
        reason = str(result.error)
    if subject.plan is not None and not parsed_items:
        case.fail(f"the spec takes embeddings of {name}, and the parser refuses them: {reason}")
    # A hand-written processor may refuse embeddings, also behind its parser, if it says so. The
    # parser of a spec refuses those that the spec does not take.
    message = str(result).lower()
    says_so = any(word in message for word in _REFUSAL_WORDS)
    if subject.plan is not None or (parsed_items and not says_so):
        form_name = type(form).__name__
        case.fail(f"embeddings of {name} pass the parser, then {result} (sent as a {form_name})")
    return reason

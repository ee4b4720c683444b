"""Laws about what requests become: ids, ranges, fields, hashes; what is refused; caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter, ne
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from ...errors import InputError
from ...language.items.base import ends
from ...language.layout import as_text
from ...plan.layouts import TooManyRows
from ...plan.merging import MergedRuns
from ...plan.plan import Plan
from .. import updates, vllm_path
from ..differences import brief, differences, near
from ..law import Case, NotApplicable, Refused, law
from ..strategies import ImageSample, PlainSample, Request, can_spell
from ..subject import Subject, special_texts
from ..updates import ItemUpdate, find_most_rows
from ..vllm_model import embeddings, hidden_size, parsed_embeddings
from ..vllm_path import LEAST_CACHE_GIB, CacheMiss, Caches, Outcome, decode_on_backgrounds, run

Pieces = Mapping[str, Sequence[ItemUpdate]]


@law()
def ranges(case: Case) -> None:
    """Placeholder ranges are in bounds, disjoint and in the order of their items; the ids at a
    range are the layout of its item; everything outside is the caller's prompt; numbered
    placeholders in another order are refused, or get the items of their numbers."""
    request = case.draw_request()
    pieces = case.subject.find_request_updates(request)
    _check_ranges(case, request, pieces)
    for permuted in _permuted(case, request, pieces):
        case.request, order = permuted, [*permuted.order]
        if done := case.attempt(case.subject.run, permuted):
            starts = {(name, i): done.ranges[name][i][0] for name, i in order}
            placed = sorted(order, key=starts.__getitem__)
            if placed != order:
                case.fail(f"placeholders of {order} get the items {placed}")


def _permuted(case: Case, request: Request, pieces: Pieces) -> Iterator[Request]:
    """The same items, with the numbered placeholders of a modality (``<|image_1|>``) in another
    order."""
    for name, own in pieces.items():
        targets = {tuple(piece.target) for piece in own if piece.target != piece.ids}
        if 1 < len(own) == len(targets):
            numbers = list(range(len(own)))
            order = case.draw(st.permutations(numbers).filter(partial(ne, numbers)))
            prompt = [*own[0].prefix]
            for number in order:
                prompt += [*own[number].target, case.subject.ordinary_ids[0]]
            places = tuple((name, number) for number in order)
            yield Request(prompt, {name: request.items[name]}, request.kwargs, places)


def _check_ranges(case: Case, request: Request, pieces: Pieces) -> None:
    subject, runs = case.subject, case.subject.runs
    outcome = subject.run(request)
    ids, placed = outcome.ids, []
    for name, own in pieces.items():
        if subject.plan is None and not any(piece.ids for piece in own):
            raise NotApplicable(f"no position of the prompt stands for {name}")
        places = outcome.ranges.get(name, [])
        if len(places) != len(own):
            case.fail(f"{len(places)} ranges for {len(own)} items of {name}")
        if places != sorted(places, key=itemgetter(0)):
            case.fail(f"the ranges of {name} are not in order")
        numbered = enumerate(zip(places, own, strict=True))
        placed += [(*place, piece, f"{name}[{i}]") for i, (place, piece) in numbered]
    # with one token for each character of a run
    text, prompt = runs.split(ids), runs.split(subject.rewrite_prompt(request))
    rebuilt: list[int] = []
    position = copied = 0
    for offset, length, mask, piece, item in sorted(placed, key=itemgetter(0, 1)):
        end = offset + length
        if offset < position:
            before = f"the range before it, which ends at {position}"
            case.fail(f"{item} at {offset} begins inside {before}")
        if end > len(ids):
            case.fail(f"{item} ends at {end}, past {len(ids)} ids")
        surplus = _surplus(runs, ids[offset:end], piece.ids)
        if surplus is None:
            here, layout = brief(ids[offset:end]), brief(piece.ids)
            case.fail(f"the ids at {item} are {here}, its layout is {layout}")
        if mask != piece.mask[len(piece.mask) - length :]:
            case.fail(f"the mask of {item} is not that of its layout")
        # the token that two layouts share is in the range of the first
        rebuilt += text[copied : len(runs.split(ids[:offset])) + surplus[0]]
        rebuilt += [] if piece.is_inserted else runs.split(piece.target)
        position, copied = end, len(runs.split(ids[:end])) - surplus[1]
    rebuilt += text[copied:]
    if rebuilt != prompt:
        here, there = brief(rebuilt), brief(prompt)
        case.fail(f"outside the ranges the prompt is {here}, the caller's {there}")


def _surplus(runs: MergedRuns, ids: list[int], layout: list[int]) -> tuple[int, int] | None:
    """The numbers of merged characters that a range has at its beginning and at its end beyond
    those of its layout; None where it differs otherwise."""
    run = as_text([*runs.tokens_by_length.values()])

    def edges(ids: list[int]) -> tuple[int, str, int]:
        text = as_text(runs.split(ids))
        rest = text.lstrip(run)
        return len(text) - len(rest), rest.rstrip(run), len(rest) - len(rest.rstrip(run))

    (before, core, after), (lead, own, tail) = edges(ids), edges(layout)
    return (before - lead, after - tail) if core == own else None


@law()
def text(case: Case) -> None:
    """A text prompt and its token ids give the same result, and the tokens outside its items are
    those of the text."""
    processor = case.subject.processor
    tokenizer = processor.info.ctx.tokenizer
    if tokenizer is None:
        raise NotApplicable("the model has no tokenizer")
    request = case.draw_request()
    text = _beside_words(case, tokenizer.decode(request.prompt), request)

    def outcome(prompt: Any, *, direct: bool = False) -> Any:
        sent = prompt, request.data(), request.kwargs
        return case.attempt(run, processor, *sent, direct=direct)

    # decoding may change what the ids mean
    ids = vllm_path.encode_text(processor, text)
    of_ids = outcome(ids)
    assume(of_ids or outcome(text))
    if of_ids and case.subject.plan is not None:
        # hand-written processors change it by vLLM's own search in the text
        _check_outside(case, replace(request, prompt=ids), of_ids)
    for route in ("renderer", "processor"):
        of_text = outcome(text, direct=route == "processor")
        case.same(of_ids, of_text, f"the ids of a text and, by the {route}, the text {text!r}")


def _beside_words(case: Case, text: str, request: Request) -> str:
    """A text in which targets of several tokens may stand directly behind a word: there the
    tokenizer may split them otherwise."""
    if case.subject.plan is None:
        return text
    tokenizer = case.subject.processor.info.ctx.tokenizer
    pieces = chain.from_iterable(case.subject.find_request_updates(request).values())
    targets = {tuple(piece.target) for piece in pieces if len(piece.target) > 1}
    for target in sorted(targets):
        spelled = tokenizer.decode(list(target)).strip()
        if spelled and case.draw(st.booleans()):
            text = text.replace(f" {spelled}", spelled)
    return text


def _check_outside(case: Case, request: Request, outcome: Outcome) -> None:
    """Compare the ids outside the items with those of the prompt. The first and the last of each
    stretch may be a part of a token that reaches across the edge of a target."""
    runs = case.subject.runs
    ids, prompt = outcome.ids, as_text(runs.split(case.subject.rewrite_prompt(request)))
    places = sorted(place[:2] for of_modality in outcome.ranges.values() for place in of_modality)
    position = start = 0
    for number, (offset, length) in enumerate([*places, (len(ids), 0)]):
        is_last = number == len(places)
        stretch = runs.split(ids[start:offset])[number > 0 :]
        inner = as_text(stretch if is_last else stretch[:-1])
        found = prompt.find(inner, position)
        if is_last:
            found = len(prompt) - len(inner) if prompt[position:].endswith(inner) else -1
        if found < 0 or (number == 0 and found):
            got, expected = brief(ids[start:offset]), brief(request.prompt)
            case.fail(
                f"outside its items the prompt has {got}, and the ids of the text are {expected}"
            )
        position, start = found + len(inner), offset + length


@law()
def independence(case: Case) -> None:
    """The fields and the layout of an item do not depend on the other items of the request:
    integers not at all, floating pixels by 64 units in the last place of the largest."""
    subject = case.subject
    request = case.draw_request(least=2)
    if subject.plan is not None:
        modalities = subject.plan.modalities
        assume(all(modalities[name].may_cache(n) for name, n in request.counts.items()))
    together = subject.run(request)
    for name, samples in request.items.items():
        for i, sample in enumerate(samples):
            alone = subject.run(subject.make_minimal_request(name, sample, request.kwargs))
            fields = alone.values(name, 0), together.values(name, i)
            case.same(*fields, f"{name}[{i}] alone and in this request", alike=near)
            rows, beside = sum(alone.mask(name, 0)), sum(together.mask(name, i))
            if rows != beside:
                counts = f"{rows} embed positions alone and {beside} in this request"
                case.fail(f"{name}[{i}] has {counts}")


@law()
def round_trip(case: Case) -> None:
    """Splitting the processed fields into items and batching these again changes nothing, and no
    declared field is left out."""
    subject, plan = case.subject, case.subject.plan
    request = case.draw_request()
    outcome = subject.run(request)
    for name, samples in request.items.items():
        items = outcome.fields.get(name, [])
        if len(items) != len(samples) or not all(items):
            case.fail(f"{name} has items without fields")
        declared = sorted(plan.modalities[name].fields) if plan else []
        for i, fields in enumerate(items):
            if plan is not None and sorted(fields) != declared:
                case.fail(f"{name}[{i}] has {sorted(fields)}, declared are {declared}")
    if plan is not None:  # which splits and batches as it declares
        return
    sent = request.data(), request.kwargs
    for field, (raw, joined) in updates.split_and_batch(subject.processor, *sent).items():
        if joined is None:
            case.fail(f"the field {field!r} was processed and reaches no item")
        before, after = _as_list(raw), _as_list(joined)
        if isinstance(raw, list) and isinstance(joined, torch.Tensor) and len(raw) == len(joined):
            # rows of a flat field that vLLM pads with zeros to the largest
            after = [row[tuple(map(slice, own.shape))] for own, row in zip(raw, after, strict=True)]
        case.same(before, after, f"the field {field!r} before and after")


def _as_list(value: Any) -> Any:
    """A stacked tensor and the list of its parts are the same field."""
    return list(value) if isinstance(value, torch.Tensor) and value.ndim else value


@law()
def idempotence(case: Case) -> None:
    """A prompt that is expanded already is not expanded again."""
    subject = case.subject
    request = case.draw_request()
    outcome = subject.run(request)
    case.request = again = replace(request, prompt=outcome.ids)
    second = case.attempt(subject.run, again)
    if not second:
        case.fail(f"refused with {second}")
    expected = [outcome.ids]
    if subject.plan is None:  # vLLM's own classes may put something around every prompt
        expected.append(subject.rewrite_prompt(again))
    if second.ids not in expected:
        case.fail(f"{len(outcome.ids)} ids became {len(second.ids)}")
    for name, ranges in outcome.ranges.items():
        here, there = ([own[1:] for own in some] for some in (ranges, second.ranges.get(name, [])))
        if here != there:
            case.fail(f"the ranges of {name} have other lengths or masks")


# -- items -----------------------------------------------------------------------------------------


@law()
def worst_case(case: Case) -> None:
    """No item has more encoder rows than stated, and the dummy item has as many as stated, or as
    fit the context."""
    subject = case.subject
    name = case.draw(st.sampled_from(sorted(subject.limits)))
    stated, reached = find_most_rows(subject.processor, name)
    sample = case.draw(subject.samples[name])
    modality = subject.plan.modalities[name] if subject.plan else None
    # where the largest item does not fit the context, another one may have more rows than the dummy
    is_fitted = modality is not None and not modality.needs_hf and modality.is_fitted
    if reached > stated or (reached != stated and not is_fitted):
        case.fail(f"{stated} rows are stated for {name}, and the dummy item has {reached}")
    done = case.attempt(subject.find_updates, name, [sample])
    if isinstance(done, Refused) and isinstance(done.error, TooManyRows):
        case.fail(f"{sample!r} is refused: {done.error}")
    case.request = subject.make_minimal_request(name, sample)
    rows = sum(subject.run(case.request).mask(name, 0))
    if rows > stated:
        case.fail(f"{name} has an item of {rows} rows, and at most {stated} are stated")


@law()
def identity(case: Case) -> None:
    """Items of equal content have equal hashes whatever their container; other content, kwargs that
    change what it becomes, or options of decoding that do, have another hash."""
    subject = case.subject
    request = case.draw_request(most=1)
    name = next(iter(request.items))
    assume(not _is_never_kept(subject, name))  # no two items have one hash
    (sample,) = request.items[name]

    def outcome(value: Any, kwargs: Any = request.kwargs, uuids: Any = None) -> Any:
        data = {**request.data(), name: [value]}
        return case.attempt(run, subject.processor, request.prompt, data, kwargs, uuids=uuids)

    # one hash for two contents makes an answer wrong, two for one content only cost a miss: the
    # former first
    here = subject.run(request)
    first, other = here.hashes[name], sample.other()
    if differences(sample.same()[0], other.same()[0]):
        there = outcome(other.value())
        if there and there.hashes[name] == first:
            case.fail(f"{other!r} has the same hash")
    if isinstance(sample, ImageSample):
        # with a list of uuids, as from its chat, vLLM hashes files
        shown = [
            outcome(one, uuids={name: [None]})
            for one in decode_on_backgrounds(sample.transparent())
        ]
        if all(shown) and shown[0].hashes[name] == shown[1].hashes[name]:
            case.fail("a file decoded on white and on black (rgba_background_color): one hash")
    kwargs = case.draw(subject.kwargs)
    there = outcome(sample.value(), kwargs)
    # options that change nothing of an item need not change its hash
    same_hash = there and there.hashes[name] == first
    if same_hash and differences(_becomes(here, name), _becomes(there, name)):
        case.fail(f"kwargs {kwargs!r} have the same hash")
    for value in sample.same():
        container, there = type(value).__name__, outcome(value)
        if not there and subject.plan is not None:
            case.fail(f"the same content as {container} is refused: {there.error}")
        # a container that is refused has no hash
        if there and there.hashes[name] != first:
            case.fail(f"the same content as {container} has another hash")


def _is_never_kept(subject: Subject, name: str) -> bool:
    """Whether a spec lets vLLM keep nothing of the items of a modality."""
    return subject.plan is not None and subject.plan.modalities[name].is_never_kept


def _becomes(outcome: Outcome, name: str) -> list[Any]:
    """The fields of a modality's first item, and its ids with their mask."""
    places = outcome.ranges.get(name, [])[:1]
    return [outcome.values(name, 0), [(outcome.ids[at : at + n], mask) for at, n, mask in places]]


@law(cost=4)
def refusal(case: Case) -> None:
    """Missing, surplus or malformed items, and placeholder counts that do not match, are refused in
    a message that names the modality. So is a text in an item that spells a placeholder; no other
    special token comes out of a text."""
    subject = case.subject
    request = case.draw_request()
    named = (*subject.samples, "prompt", "multi_modal_data")
    data = request.data()
    for change, mistake in _mistakes(subject, request, data):
        sent = request.prompt, {**data, **change}, request.kwargs
        if done := case.attempt(run, subject.processor, *sent):
            case.fail(f"{mistake}: accepted")
        if subject.plan is None:
            continue
        if not isinstance(done.error, InputError):
            case.fail(f"{mistake}: refused with {done}")
        if not any(name in str(done.error) for name in named):
            case.fail(f"{mistake}: the message names no modality: {done.error}")
    if subject.plan is not None:
        for name in request.items:
            _check_special_tokens_in_texts(case, subject.plan, request, name)


def _check_special_tokens_in_texts(case: Case, plan: Plan, request: Request, name: str) -> None:
    """Spell a special token in each text of an item, and compare its layout with that of the drawn
    item: a text of the same length has as many of this token."""
    modality, special = plan.modalities[name], special_texts(plan)
    kind: Any = modality.item
    value = kind.canonical(request.items[name][0].value(), name)
    for place, drawn in kind.texts(value):
        part = place.removeprefix(".")
        of_part = kind.part(part, value) if part else kind
        fitting = [text for text in special if can_spell(of_part, text, len(drawn))]
        if not fitting:
            continue
        word = case.draw(st.sampled_from(sorted(fitting)))
        text = word + drawn[len(word) :]
        sent = {**value, part: text} if part else text
        mistake = f"{word!r} in {part or 'a text'} of {name}"

        def layout(item: Any) -> list[int]:
            (piece,) = case.subject.find_updates(name, [PlainSample(0, item)], request.kwargs)
            return piece.ids

        ids = case.attempt(layout, sent)
        if isinstance(ids, Refused):
            continue
        if word in modality.parser.placeholder_texts:
            case.fail(f"{mistake}: accepted")
        count, count_of_drawn = ids.count(special[word]), layout(value).count(special[word])
        if count > count_of_drawn:
            tokens = f"{count} of this token, and {count_of_drawn}"
            case.fail(f"{mistake}: the layout has {tokens} with another text")


def _has_layout(subject: Subject, request: Request, name: str) -> bool:
    """Whether the layout of an item but the first stands in the prompt, which may then be the
    expanded prompt of fewer items."""
    prompt = as_text(subject.rewrite_prompt(request))
    later = subject.find_request_updates(request)[name][1:]
    return any(as_text(own.ids) in prompt for own in later if len(own.ids) > len(own.target))


def _mistakes(
    subject: Subject, request: Request, data: Mapping[str, list[Any]]
) -> Iterator[tuple[dict[str, list[Any]], str]]:
    """Changes of its data that must be refused with the prompt of a request, and what is wrong with
    them."""
    yield {"no_such_modality": [1]}, "an unknown modality"
    for name, values in data.items():
        *before, last = values
        if any(written == name for written, _ in request.order):
            yield {name: [*values, values[0]]}, f"one item of {name} too many"
            if before and not _has_layout(subject, request, name):
                yield {name: values[1:]}, f"one item of {name} too few"
        # elsewhere vLLM's renderer refuses it, before any processor sees it
        if subject.plan is not None:
            yield {name: [*before, None]}, f"None as an item of {name}"
        if not isinstance(last, str):
            yield {name: [*before, "text"]}, f"a text as an item of {name}"
        if isinstance(last, dict):
            (part, _), *rest = last.items()
            yield {name: [*before, dict(rest)]}, f"an item of {name} without {part}"
            yield {name: [*before, {**last, part: None}]}, f"None as {part} of {name}"
            yield {name: [*before, {**last, "no_such_part": 1}]}, f"an unknown part in {name}"
        yield {name: [*before, object()]}, f"an object as an item of {name}"
        kind = subject.plan.modalities[name].item if subject.plan else None
        for part, other, mistake in _malformed(kind, last):
            sent = {**last, part: other} if part else other
            yield {name: [*before, sent]}, f"{mistake} in {part or 'an item'} of {name}"


def _malformed(kind: Any, value: Any) -> Iterator[tuple[str, torch.Tensor, str]]:
    """The part of an item that is a tensor, empty for an item that is one; another tensor in its
    place; and what is wrong with that."""
    for part, own in value.items() if isinstance(value, dict) else [("", value)]:
        if isinstance(own, torch.Tensor):
            of_part = kind.part(part, kind.canonical(value, part)) if kind and part else kind
            yield from ((part, *wrong) for wrong in _wrong_tensors(of_part, own))


def _wrong_tensors(kind: Any, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:
    """Tensors in place of a well-formed one, and what is wrong with them."""
    yield torch.stack([tensor, tensor])[None], "a wrong shape"
    wrong = {"NaN": torch.nan} if tensor.is_floating_point() else {}
    if (bound := getattr(kind, "bound", None)) is not None:
        wrong["a value beyond the bound"] = 2 * ends(bound)[1] + 1
    for mistake, value in wrong.items() if tensor.numel() else ():
        # a float keeps its dtype, as callers send it; an integer type may lack the value
        other = tensor.clone() if tensor.is_floating_point() else tensor.double()
        other.view(-1)[0] = value
        yield other, mistake


@law()
def embeds(case: Case) -> None:
    """Precomputed embeddings get the ranges of the item that they were computed from."""
    subject, plan = case.subject, case.subject.plan
    accepting = {*subject.samples}
    if plan is not None:
        accepting = {name for name, own in plan.modalities.items() if own.parser.takes_embeds}
    if not accepting:
        raise NotApplicable("no modality takes embeddings")
    request = case.draw_request()
    present = sorted({*request.items} & accepting)
    assume(present)
    name = case.draw(st.sampled_from(present))
    outcome = subject.run(request)
    if not outcome.ranges.get(name):
        raise NotApplicable(f"no position of the prompt stands for {name}")
    width = hidden_size(subject.processor)
    rows = [torch.ones(sum(mask), width) for _, _, mask in outcome.ranges[name]]
    refusals: list[str] = []
    forms = embeddings(subject, name, rows, outcome)
    for form in forms:
        read = case.attempt(parsed_embeddings, subject.processor, name, form)
        request_of = request.prompt, {**request.data(), name: form}, request.kwargs
        done = read and case.attempt(run, subject.processor, *request_of)
        if done:
            case.same(outcome.ranges, done.ranges, "the raw item and its embeddings", "ranges")
            continue
        reason = "taken for something else" if done is None else str(done.error)
        if plan is not None and not read:
            case.fail(f"the spec takes embeddings of {name}, and the parser refuses them: {reason}")
        # a refusal that says so is one, whoever gives it; that of a generated class comes from its
        # parser
        if plan is not None or (read and not any(word in str(done).lower() for word in _SAYING_SO)):
            sent = f"(sent as a {type(form).__name__})"
            case.fail(f"embeddings of {name} pass the parser, then {done} {sent}")
        refusals.append(reason)
    if len(refusals) == len(forms) and len(accepting) == 1:  # another modality may take them
        raise NotApplicable(f"embeddings are refused: {refusals[0]}")


_SAYING_SO = ("embedding", "--enable-mm-embeds")


# -- sequences of requests -------------------------------------------------------------------------

# what a request of the sequence is; one that is refused before lacks its placeholders
STEPS = ("new", "seen before", "refused before")

_TRIES = 4  # of a request whose items the engine's half of a cache lacks


@law(cost=2)
def cache(case: Case) -> None:
    """Any sequence of requests gives the same outputs with and without vLLM's processor caches,
    however small, also where a caller overwrites its items once they are processed.

    Requests are of a few items, so that some of a request are cached, and at other positions. Each
    is sent without a cache, with vLLM's cache in one process, and with its pair of sender and
    receiver. Shrinks towards few requests, a large cache, and no refused request."""
    subject = case.subject
    # in GiB: of all items, or hardly any
    capacity = case.draw(st.sampled_from([1.0, LEAST_CACHE_GIB]))
    # of three of each modality at most, so that items repeat
    three = {name: case.draw(st.tuples(*[subject.samples[name]] * 3)) for name in subject.limits}
    few = subject.requests(of={name: st.sampled_from(own) for name, own in three.items()})
    pairs = {"in one process": False, "in two processes": True}
    caches = {how: Caches(subject.processor, capacity, pair=pair) for how, pair in pairs.items()}
    seen: list[Request] = []
    drifts = False
    for step in case.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6)):
        again = step == "seen before" and seen
        request = case.request = case.draw(st.sampled_from(seen) if again else few)
        case.before = f" after {seen!r}" if seen else ""
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
        for how, some in caches.items():
            outcome = case.attempt(_run, case, request, some, _TRIES if drifts and CacheMiss else 0)
            if not outcome:
                case.fail(f"with a cache {how}: {outcome}{when}")
            for name in filter(partial(_is_never_kept, subject), expected.hashes):
                outcome.hashes[name] = expected.hashes[name]
            if difference := differences(expected, outcome):
                case.fail(f"without a cache and with one {how}: {difference}{when}")
        seen.append(request)


def _run(case: Case, request: Request, caches: Caches, tries: int) -> Outcome:
    for _ in range(tries):
        try:
            return case.subject.run(request, caches)
        except CacheMiss as error:
            # as vLLM does before it sends a request again whose items the engine lacks
            for item_hash in error.mm_hashes:
                caches.sender.invalidate(item_hash)
    return case.subject.run(request, caches)

"""The law about outlines: what follows of a request from the facts of its items alone."""

from __future__ import annotations

from hypothesis import assume

from ...language.items.facts import Facts, NeedsItem
from ...plan.outline import NeedsProcessing, Outline, find_unknown_reads
from ...plan.plan import Plan
from ...vllm_api.hashes import make_hasher
from ..law import Case, NotApplicable, Refused, law
from ..strategies import Request
from ..subject import Samples, Subject
from ..vllm_path import ItemRange, Outcome, mask_flags


@law()
def outline(case: Case) -> None:
    """The outline of a request is what vLLM's path gives: ids, ranges, and numbers of rows.

    So it is by facts alone, where these tell the layout, and by the items themselves, which have
    their hashes, too.
    """
    plan = case.subject.plan
    if plan is None:
        raise NotApplicable("only a spec tells what follows from facts")
    request = case.draw_request(of=_select_samples(plan, case.subject))
    by_facts = case.attempt(
        plan.outline, request.prompt, _state_facts(plan, request), options=request.kwargs
    )
    # with these options, a layout may need processing
    assume(not (isinstance(by_facts, Refused) and isinstance(by_facts.error, NeedsProcessing)))
    outcome = case.subject.run(request)
    by_items = case.attempt(
        plan.outline,
        request.prompt,
        request.data(),
        options=request.kwargs,
        hasher=make_hasher(case.subject.processor.info),
    )
    outlines = {"facts": by_facts, "items": by_items}
    if isinstance(by_facts, Refused) and isinstance(by_facts.error, NeedsItem):
        del outlines["facts"]  # the layout has the text of an item
    for what, outlined in outlines.items():
        if not outlined:
            case.fail(f"by its {what} it is refused with {outlined}")
        _check_places(case, outcome, outlined, what)
    _check_hashes(case, plan, outcome, by_items)


def _select_samples(plan: Plan, subject: Subject) -> Samples:
    """Return the strategies for the items of modalities that can be outlined.

    Raises:
        NotApplicable: there are none.
    """
    samples = {}
    reads: list[str] = []
    for name, strategy in subject.samples.items():
        if name not in plan.modalities:
            continue
        unknown_reads = find_unknown_reads(plan.modalities[name])
        reads += unknown_reads
        if not unknown_reads:
            samples[name] = strategy
    if not samples:
        raise NotApplicable(f"its layouts read {', '.join(reads)}")
    return samples


def _state_facts(plan: Plan, request: Request) -> dict[str, list[Facts]]:
    """Return the facts of the items of a request."""
    facts: dict[str, list[Facts]] = {}
    for name, values in request.data().items():
        item_type = plan.modalities[name].item
        facts[name] = []
        for value in values:
            facts[name].append(item_type.state_facts(item_type.canonical(value, name)))
    return facts


def _check_places(case: Case, outcome: Outcome, outlined: Outline, what: str) -> None:
    """Compare the ids, the ranges with their masks, and the numbers of encoder rows."""
    both = f"vLLM's path and the outline by {what}"
    case.check_equal(outcome.ids, outlined.prompt_token_ids, both, "ids")
    ranges = _list_ranges(outlined)
    for name in case.subject.ids_only:
        # nothing but their ids reaches the engine
        ranges.pop(name, None)
    case.check_equal(outcome.ranges, ranges, both, "ranges")
    rows: dict[str, list[int]] = {}
    for name, ranges_of_modality in outcome.ranges.items():
        rows[name] = [sum(item_range.mask) for item_range in ranges_of_modality]
    for name in case.subject.ids_only.intersection(outlined.rows):
        rows[name] = [0] * len(outlined.rows[name])
    case.check_equal(rows, outlined.rows, both, "rows")


def _list_ranges(outlined: Outline) -> dict[str, list[ItemRange]]:
    ranges: dict[str, list[ItemRange]] = {}
    for placement in outlined.placements:
        length = len(placement.tokens)
        mask = mask_flags(placement.tokens.mask, length)
        item_range = ItemRange(placement.start, length, mask)
        ranges.setdefault(placement.modality, []).append(item_range)
    return ranges


def _check_hashes(case: Case, plan: Plan, outcome: Outcome, outlined: Outline) -> None:
    for name, hashes in outcome.hashes.items():
        if not plan.modalities[name].is_never_kept:  # else each request has others
            both = "vLLM's path and the outline by items"
            case.check_equal(hashes, outlined.hashes[name], both, f"hashes[{name!r}]")

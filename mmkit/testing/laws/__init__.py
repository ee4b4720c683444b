"""The laws of every multimodal processor on vLLM, each a named check on a `Subject`.

A law draws what it needs (a request, several requests, a change to one) through Hypothesis, and
raises `Violation` with one sentence where it does not hold. docs/laws.md has the contract of each
law and the limits of its test.
"""

from __future__ import annotations

from .caches import cache
from .decoding import outputs
from .huggingface import positions, reference
from .items import embeds, identity, refusal, worst_case
from .models import containment, counts, safety, strangers
from .outcomes import idempotence, independence, ranges, round_trip, text

LAWS = {
    law.name: law
    for law in (
        counts,
        ranges,
        cache,
        text,
        independence,
        worst_case,
        identity,
        round_trip,
        refusal,
        idempotence,
        embeds,
        safety,
        containment,
        strangers,
        reference,
        positions,
        outputs,
    )
}
"""By name."""

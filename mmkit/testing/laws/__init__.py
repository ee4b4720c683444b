"""The laws of every multimodal processor on vLLM, each a named check on a `Subject`.

A law draws what it needs (a request, several requests, a change to one) through Hypothesis, and
raises `Violation` with one sentence where it does not hold. docs/laws.md has the contract of each
law and the limits of its test.
"""

from __future__ import annotations

from ..law import Law
from .caching import cache
from .huggingface import positions, reference
from .items import embeds, identity, worst_case
from .models import containment, counts, logprobs, outputs, safety, strangers
from .outlines import outline
from .refusals import refusal
from .requests import idempotence, ids_only, independence, ranges, round_trip, text

_IN_ORDER = (
    ranges,
    text,
    independence,
    round_trip,
    idempotence,
    ids_only,
    worst_case,
    identity,
    refusal,
    embeds,
    outline,
    cache,
    counts,
    safety,
    containment,
    strangers,
    logprobs,
    outputs,
    reference,
    positions,
)

LAWS: dict[str, Law] = {law.name: law for law in _IN_ORDER}

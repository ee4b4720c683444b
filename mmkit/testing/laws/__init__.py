"""The laws of every multimodal processor on vLLM, each a named check on a `Subject`.

A law draws what it needs (a request, several requests, a change to one) through Hypothesis, and
raises `Violation` with one sentence where it does not hold. docs/laws.md has the contract of each
law and the limits of its test.
"""

from __future__ import annotations

from . import doors, items, orders, outcomes, outputs, reference, system
from .law import Case, KitError, Law, NotApplicable, NotDrawn, Violation, differences

__all__ = [
    "LAWS",
    "Case",
    "KitError",
    "Law",
    "NotApplicable",
    "NotDrawn",
    "Violation",
    "differences",
]

_IN_ORDER = (
    outcomes.counts,
    outcomes.ranges,
    system.caches,
    outcomes.text,
    outcomes.independence,
    items.worst_case,
    items.identity,
    outcomes.round_trip,
    items.refusal,
    outcomes.idempotence,
    items.embeds,
    system.processes,
    system.safety,
    system.containment,
    system.wire,
    system.strangers,
    reference.processing,
    orders.orders,
    doors.doors,
    reference.positions,
    items.names,
    outputs.outputs,
)

LAWS = {law.number: law for law in _IN_ORDER}

"""Metrics beside those of vLLM, at the server's ``/metrics``."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

REFUSED = Counter(
    "mmkit:refused_requests",
    "Requests and session messages that were refused, by route, modality (empty where it is "
    "about none) and reason: schema, encoding, item, prompt, sampling, limit, capacity, engine.",
    ["route", "modality", "reason"],
)
SESSIONS = Gauge("mmkit:sessions_open", "Sessions open now.", multiprocess_mode="livesum")

"""Containment: encoder rows that the language model cannot carry become zeros, and so do those of
an item that are not as many as its layout has positions.

Keys and values that are not finite stay in the KV cache after their request, and reach the next
request that gets the blocks: attention multiplies masked values by zero, and zero times NaN is NaN.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""The least time between two lines in the log."""


def contained(
    rows: Sequence[torch.Tensor], bound: float
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The rows of some items, all zeros for an unsound item: one with a value that is not finite,
    or larger than a bound.

    Nothing waits for the device, and the values of sound items keep every bit.

    Args:
        rows: one floating (rows, hidden_size) tensor per item, of any number of rows.
        bound: the largest magnitude; see `mmkit.plan.soundness.compute_largest_magnitude`.

    Returns:
        The rows, and the number of unsound items, a 0-dimensional tensor on the rows' device.
    """
    lengths = [len(one) for one in rows]
    is_even = lengths[0] > 0 and lengths.count(lengths[0]) == len(lengths)
    together = torch.stack(list(rows)) if is_even else torch.cat(list(rows))
    # not even a bound beyond the rows' own dtype lets an infinity through
    most = min(bound, torch.finfo(together.dtype).max)
    if is_even:  # one item, or items of one size, by half as many kernels
        unsound = ~(together.abs().amax(dim=(1, 2)) <= most)  # true for NaN, too
        together.masked_fill_(unsound[:, None, None], 0)  # in place: `stack` has made a copy
        return list(together), unsound.sum()
    unsound = ~(together.abs().amax(dim=-1) <= most)
    owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    owners = owners.to(together.device, non_blocking=True)
    counts = torch.zeros(len(rows), dtype=torch.int64, device=together.device)
    counts.index_add_(0, owners, unsound.long())
    together.masked_fill_((counts[owners] > 0)[:, None], 0)  # in place: `cat` has made a copy
    return list(together.split(lengths)), (counts > 0).sum()


class Reporter:
    """Tells the operator of unsound items, once their number has arrived from the device, without
    waiting: by the metric `mmkit:unsound_items`, and by lines in the log at most every
    `QUIET_SECONDS`.

    Args:
        spec: the name of the spec.
        bound: the largest magnitude.
        modalities: their names. The metric has a value for each from the start.
    """

    def __init__(self, spec: str, bound: float, modalities: Iterable[str]) -> None:
        self._spec, self._bound, self._metric = spec, bound, unsound_items()
        for name in modalities:
            self._metric.labels(name)
        self._sent: deque[tuple[str, torch.Tensor, torch.Event | None]] = deque()
        self._unsaid: Counter[str] = Counter()
        self._unsaid_errors: dict[str, list[Exception]] = {}
        self._quiet_until = -math.inf

    def add(self, modality: str, number: torch.Tensor) -> None:
        """Count a 0-dimensional integer tensor."""
        event = None
        if number.device.type != "cpu":
            event = torch.Event(number.device.type)
            on_host = torch.empty_like(number, device="cpu", pin_memory=True)
            number = on_host.copy_(number, non_blocking=True)
            event.record()
        self._sent.append((modality, number, event))
        self.poll()

    def add_errors(self, modality: str, errors: Sequence[Exception]) -> None:
        """Count items whose rows did not fit their layout, one error for each."""
        self._metric.labels(modality).inc(len(errors))
        self._unsaid_errors.setdefault(modality, []).extend(errors)
        self.poll()

    def poll(self) -> None:
        """Report the numbers that have arrived; on a CPU they arrive at once."""
        while self._sent and ((event := self._sent[0][2]) is None or event.query()):
            modality, number, _ = self._sent.popleft()
            if count := int(number):
                self._metric.labels(modality).inc(count)
                self._unsaid[modality] += count
        if not (self._unsaid or self._unsaid_errors) or time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        text = (
            "mmkit: %s.%s: the encoder rows of %d item(s) were not finite, or larger than %g in "
            "magnitude. The requests were answered as if these rows were zeros."
        )
        for name, count in self._unsaid.items():
            logger.warning(text, self._spec, name, count, self._bound)
        self._unsaid.clear()
        text = (
            "mmkit: %s The requests of %d such item(s) were answered as if all rows of the item "
            "were zeros."
        )
        for errors in self._unsaid_errors.values():
            logger.error(text, errors[0], len(errors))
        self._unsaid_errors.clear()


@cache
def unsound_items() -> Any:
    """The metric, a Prometheus counter with the label `modality`, in the process of the model."""
    from prometheus_client import Counter as Metric

    return Metric(
        "mmkit:unsound_items",
        "Items whose encoder rows, or embeddings, were not finite or too large for the model's "
        "dtype, or not as many as their layout has positions, by modality. Their requests were "
        "answered as if the rows were zeros. Counted in the worker, once per tensor-parallel "
        "group.",
        ["modality"],
    )

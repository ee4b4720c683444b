"""Containment: encoder rows that the language model cannot carry become zeros.

Keys and values that are not finite stay in the KV cache after their request, and reach the next
request that gets the blocks: attention multiplies masked values by zero, and zero times NaN is NaN.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""The least time between two lines in the log."""


def largest_magnitude(dtype: torch.dtype) -> float:
    """The largest magnitude of a row's values that a language model of this dtype receives; a power
    of two, which every dtype holds exactly.

    Rows enter the residual stream in the model's dtype. Every layer adds to that stream; the added
    values come from a normalised copy and do not grow with the row. A quarter of the range of
    float16, 16384, therefore leaves the rest to the layers. bfloat16 and float32 have range enough,
    but norms sum the squares of a row's values in float32, whose range ends at 2**128: with 2**53,
    about 9e15, the sum stays finite for rows of up to four million values.
    """
    return 2.0**14 if dtype == torch.float16 else 2.0**53


def contained(
    rows: Sequence[torch.Tensor], bound: float
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The rows of some items, all zeros for an unsound item: one with a value that is not finite,
    or larger than a bound.

    Nothing waits for the device, and the values of sound items keep every bit.

    Args:
        rows: one floating (rows, hidden_size) tensor per item, of any number of rows.
        bound: the largest magnitude; see `largest_magnitude`.

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
    owners = (
        torch.arange(len(rows))
        .repeat_interleave(torch.tensor(lengths))
        .to(together.device, non_blocking=True)
    )
    counts = torch.zeros(len(rows), dtype=torch.int64, device=together.device)
    counts.index_add_(0, owners, unsound.long())
    together.masked_fill_((counts[owners] > 0)[:, None], 0)  # in place: `cat` has made a copy
    return list(together.split(lengths)), (counts > 0).sum()


class Tally:
    """Counts on the device, reported when they have arrived on the host, without waiting.

    Args:
        report: called with a name and the growth of its count.
    """

    def __init__(self, report: Callable[[str, int], None]) -> None:
        self._report = report
        self._counted: dict[str, torch.Tensor] = {}
        self._reported: dict[str, int] = {}
        self._copy: tuple[list[str], torch.Tensor, torch.Event] | None = None
        self._stale = False

    def add(self, name: str, number: torch.Tensor) -> None:
        """Count a 0-dimensional integer tensor."""
        before = self._counted.get(name)
        self._counted[name] = number if before is None else before + number
        self._stale = True
        self.poll()

    def poll(self) -> None:
        """Report the counts that have arrived, and request the newer ones. On a CPU they arrive at
        once."""
        if self._copy is not None:
            names, numbers, event = self._copy
            if not event.query():
                return
            self._copy = None
            self._arrived(names, numbers)
        if not self._stale:
            return
        self._stale = False
        names, numbers = list(self._counted), torch.stack([*self._counted.values()])
        if numbers.device.type == "cpu":
            self._arrived(names, numbers)
            return
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        on_host.copy_(numbers, non_blocking=True)
        event = torch.Event(numbers.device.type)
        event.record()
        self._copy = names, on_host, event

    def _arrived(self, names: list[str], numbers: torch.Tensor) -> None:
        for name, number in zip(names, numbers.tolist(), strict=True):
            if grown := number - self._reported.get(name, 0):
                self._reported[name] = number
                self._report(name, grown)


@cache
def unsound_items() -> Any:
    """The metric, a Prometheus counter with the label `modality`, in the process of the model."""
    from prometheus_client import Counter

    return Counter(
        "mmkit:unsound_items",
        "Items whose encoder rows, or embeddings, were not finite or too large for the model's "
        "dtype, by modality. Their requests were answered as if the rows were zeros. Counted in "
        "the worker, once per tensor-parallel group.",
        ["modality"],
    )


class Reporter:
    """Reports unsound items to the operator: by a metric, and by a line in the log at most every
    `QUIET_SECONDS`."""

    def __init__(self, spec: str, bound: float) -> None:
        self._spec, self._bound, self._metric = spec, bound, unsound_items()
        self._unsaid: dict[str, int] = {}
        self._quiet_until = -math.inf

    def __call__(self, modality: str, number: int) -> None:
        self._metric.labels(modality).inc(number)
        self._unsaid[modality] = self._unsaid.get(modality, 0) + number
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        for name, count in self._unsaid.items():
            logger.warning(
                "mmkit: %s.%s: the encoder rows of %d item(s) were not finite, or larger than %g "
                "in magnitude. The requests were answered as if these rows were zeros.",
                self._spec,
                name,
                count,
                self._bound,
            )
        self._unsaid.clear()

"""Containment: encoder rows that the language model cannot carry become zeros.

So do the rows of an item that are not as many as its layout has positions. Keys and values that are
not finite stay in the KV cache after their request, and reach the next request that gets the
blocks: attention multiplies masked values by zero, and zero times NaN is NaN.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""The least time between two lines in the log."""


def zero_unsound_rows(
    rows: Sequence[torch.Tensor], bound: float
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the rows of some items, all zeros for an unsound item.

    An item is unsound if one of its values is not finite, or larger than a bound. Nothing waits for
    the device, and the values of sound items keep every bit.

    Args:
        rows: one floating (rows, hidden_size) tensor per item, of any number of rows.
        bound: the largest magnitude; see `mmkit.plan.soundness.compute_largest_magnitude`.

    Returns:
        The rows, and the number of unsound items, a 0-dimensional tensor on the rows' device.
    """
    # stack and cat copy, so that the tensors of the encoder stay as they are
    lengths = [len(tensor) for tensor in rows]
    if lengths[0] > 0 and lengths.count(lengths[0]) == len(lengths):
        # one item, or items of one size, take half as many kernels
        return _zero_even_items(torch.stack(list(rows)), bound)
    return _zero_uneven_items(torch.cat(list(rows)), lengths, bound)


def _zero_even_items(rows: torch.Tensor, bound: float) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Zero unsound items of one length, in place.

    Args:
        rows: floating (items, rows, hidden_size).
        bound: the largest magnitude.
    """
    # the negation is true for NaN, too
    is_unsound = ~(rows.abs().amax(dim=(1, 2)) <= _limit_to_dtype(bound, rows.dtype))
    rows.masked_fill_(is_unsound[:, None, None], 0)
    return list(rows), is_unsound.sum()


def _zero_uneven_items(
    rows: torch.Tensor, lengths: Sequence[int], bound: float
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Zero unsound items of several lengths, in place.

    Args:
        rows: floating (rows of all items, hidden_size).
        lengths: the number of rows of each item.
        bound: the largest magnitude.
    """
    # the negation is true for NaN, too
    is_unsound_row = ~(rows.abs().amax(dim=-1) <= _limit_to_dtype(bound, rows.dtype))
    item_of_row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    item_of_row = item_of_row.to(rows.device, non_blocking=True)
    num_unsound_rows = torch.zeros(len(lengths), dtype=torch.int64, device=rows.device)
    num_unsound_rows.index_add_(0, item_of_row, is_unsound_row.long())
    is_unsound = num_unsound_rows > 0
    rows.masked_fill_(is_unsound[item_of_row][:, None], 0)
    return list(rows.split(list(lengths))), is_unsound.sum()


def _limit_to_dtype(bound: float, dtype: torch.dtype) -> float:
    """Return a bound that lets no infinity through, not even where it is beyond the dtype."""
    return min(bound, torch.finfo(dtype).max)


class Reporter:
    """Tells the operator of unsound items, by a metric and by lines in the log.

    It does so once their number has arrived from the device, without waiting. The metric is
    `mmkit:unsound_items`; lines come at most every `QUIET_SECONDS`.

    Args:
        spec: the name of the spec.
        bound: the largest magnitude.
        modalities: their names. The metric has a value for each from the start.
    """

    def __init__(self, spec: str, bound: float, modalities: Iterable[str]) -> None:
        self._spec = spec
        self._bound = bound
        self._metric = get_unsound_items_metric()
        for name in modalities:
            self._metric.labels(name)
        self._pending: deque[_PendingNumber] = deque()
        self._unreported: Counter[str] = Counter()
        self._unreported_errors: dict[str, list[Exception]] = {}
        self._quiet_until = -math.inf

    def add(self, modality: str, number: torch.Tensor) -> None:
        """Count a 0-dimensional integer tensor."""
        event = None
        if number.device.type != "cpu":
            event = torch.Event(number.device.type)
            on_host = torch.empty_like(number, device="cpu", pin_memory=True)
            number = on_host.copy_(number, non_blocking=True)
            event.record()
        self._pending.append(_PendingNumber(modality, number, event))
        self.poll()

    def add_errors(self, modality: str, errors: Sequence[Exception]) -> None:
        """Count items whose rows did not fit their layout, one error for each."""
        self._metric.labels(modality).inc(len(errors))
        self._unreported_errors.setdefault(modality, []).extend(errors)
        self.poll()

    def poll(self) -> None:
        """Report the numbers that have arrived; on a CPU they arrive at once."""
        while self._pending and self._pending[0].has_arrived():
            pending = self._pending.popleft()
            count = int(pending.number)
            if count:
                self._metric.labels(pending.modality).inc(count)
                self._unreported[pending.modality] += count
        if not self._unreported and not self._unreported_errors:
            return
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        self._log()

    def _log(self) -> None:
        """Write a line per modality for values, and one for numbers of rows."""
        text = (
            "mmkit: %s.%s: the encoder rows of %d item(s) were not finite, or larger than %g in "
            "magnitude. The requests were answered as if these rows were zeros."
        )
        for name, count in self._unreported.items():
            logger.warning(text, self._spec, name, count, self._bound)
        self._unreported.clear()
        text = (
            "mmkit: %s The requests of %d such item(s) were answered as if all rows of the item "
            "were zeros."
        )
        for errors in self._unreported_errors.values():
            logger.error(text, errors[0], len(errors))
        self._unreported_errors.clear()


class _PendingNumber(NamedTuple):
    """A number of unsound items on its way from the device.

    Attributes:
        modality: of the items.
        number: on the host, 0-dimensional.
        event: on the device, after the copy; None for a number of the host.
    """

    modality: str
    number: torch.Tensor
    event: torch.Event | None

    def has_arrived(self) -> bool:
        """Return whether the number can be read without waiting."""
        return self.event is None or self.event.query()


@cache
def get_unsound_items_metric() -> Any:
    """Return the metric, a Prometheus counter with the label `modality`, of the model's process."""
    from prometheus_client import Counter as Metric

    return Metric(
        "mmkit:unsound_items",
        "Items whose encoder rows, or embeddings, were not finite or too large for the model's "
        "dtype, or not as many as their layout has positions, by modality. Their requests were "
        "answered as if the rows were zeros. Counted in the worker, once per tensor-parallel "
        "group.",
        ["modality"],
    )

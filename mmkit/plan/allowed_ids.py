"""Which ids of a model may be sampled, as tables on the device of its logits.

No engine is known here: `mmkit.model.sampling` has vLLM's logits processor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from .output import BoundOutput
from .plan import Plan

logger = logging.getLogger(__name__)


class AllowedIds:
    """The ids of a model that may be sampled.

    They are never placeholders, and at each position of an output some of the others. Outputs have
    numbers, from 1; 0 is a request for none. Tables are on the device of the logits.

    Attributes:
        free: the position at which all ids may stand, in every output.
        window: the number of last ids that tell the positions in outputs of texts; 0 without any.
    """

    def __init__(self, plan: Plan) -> None:
        self._outputs: list[BoundOutput | None] = [None, *plan.outputs.values()]
        self._names = list(plan.outputs)
        self._placeholder_ids = torch.tensor(sorted(plan.embed_ids), dtype=torch.int64)
        lengths = [len(output.positions) for output in plan.outputs.values()]
        self.free = max(lengths, default=0)
        # By output and position: the first id that is allowed, the id after the last one, and one
        # more id that is allowed, or -1. Row 0, and the positions after an output, allow all ids.
        self._table = torch.zeros(len(self._outputs), self.free + 1, 3, dtype=torch.int64)
        self._table[..., 1] = torch.iinfo(torch.int64).max
        self._table[..., 2] = -1
        # By output: the id behind which it stands in a text, or -2, which no id is, and its length.
        self._marks = torch.full((len(self._outputs),), -2)
        self._lengths = torch.tensor([0, *lengths])
        self.window = 0
        for number, output in enumerate(plan.outputs.values(), start=1):
            rows = []
            for ids, end in output.positions:
                rows.append([ids.start, ids.stop, -1 if end is None else end])
            self._table[number, : len(rows)] = torch.tensor(rows)
            if output.after is not None:
                self._marks[number] = output.after
                self.window = max(self.window, output.window)

    def get_output_number(self, name: Any) -> int:
        """Return the number of an output, from 1; 0 for none of that name."""
        if name not in self._names:
            return 0
        return self._names.index(name) + 1

    def is_in_text(self, number: int) -> bool:
        """Return whether an output stands in a text."""
        output = self._outputs[number]
        return output is not None and output.after is not None

    def mask_placeholders(self, logits: torch.Tensor) -> None:
        """Give the placeholder ids minus infinity, in place."""
        self._placeholder_ids = self._placeholder_ids.to(logits.device)
        logits.index_fill_(-1, self._placeholder_ids, float("-inf"))

    def mask_outputs(
        self, logits: torch.Tensor, outputs: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Give minus infinity, in place, to the ids that may not stand at a position.

        Args:
            logits: floating (rows, vocabulary size).
            outputs: the number of the output of each row, integers (rows,).
            positions: in that output, integers (rows,).
        """
        self._table = self._table.to(logits.device)
        rules = self._table[outputs, positions.clamp(0, self.free)]
        start, stop, end = rules.unbind(-1)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        is_outside = (ids < start[:, None]) | (ids >= stop[:, None])
        # One column of each row: the id that ends an output. Where there is none, the id is 0, and
        # is outside or not as before: to choose the rows with an end would wait for the device.
        end_column = end.clamp(min=0)[:, None]
        has_no_end = end[:, None] < 0
        is_end_outside = is_outside.gather(1, end_column) & has_no_end
        is_outside.scatter_(1, end_column, is_end_outside)
        logits.masked_fill_(is_outside, float("-inf"))

    def find_position(self, number: int, ids: Sequence[int], prompt: Sequence[int]) -> int:
        """Return the position of the next id in an output, on the host.

        Args:
            number: of the output.
            ids: the ids of the answer.
            prompt: the ids before it.
        """
        output = self._outputs[number]
        if output is None:
            return self.free
        if output.after is None:
            return len(ids)
        if ids and ids[-1] == _UNKNOWN_ID:
            _report_unknown_ids(output.where)
            return self.free
        num_missing = output.window - len(ids)
        last_ids = ids[-output.window :]
        if num_missing > 0:
            last_ids = [*prompt[-num_missing:], *ids]
        position = output.find_position(last_ids)
        return self.free if position is None else position

    def find_positions(self, outputs: torch.Tensor, last_ids: torch.Tensor) -> torch.Tensor:
        """Return the positions of the next ids in outputs of texts, as `find_position` does.

        Args:
            outputs: the number of the output of each row, integers (rows,).
            last_ids: the ids before it, the newest first, integers (rows, `window`); -1 before the
                beginning of a prompt.
        """
        device = last_ids.device
        self._table = self._table.to(device)
        self._marks = self._marks.to(device)
        self._lengths = self._lengths.to(device)
        is_mark = last_ids == self._marks[outputs][:, None]
        # the first of several: the newest mark
        position = is_mark.int().argmax(1)
        # of each id, its own position behind that mark; negative for the mark, and before it
        positions = position[:, None] - 1 - torch.arange(last_ids.shape[1], device=device)
        rules = self._table[outputs[:, None], positions.clamp(0, self.free)]
        start, stop, _ = rules.unbind(-1)
        is_inside = (last_ids >= start) & (last_ids < stop)
        has_begun = (is_inside | (positions < 0)).all(1) & is_mark.any(1)
        is_whole = position >= self._lengths[outputs]
        return torch.where(has_begun & ~is_whole, position, self.free)


_UNKNOWN_ID = -1
"""What vLLM has in place of an id that is sampled and not copied from the device yet."""


@cache
def _report_unknown_ids(where: str) -> None:
    """Log, once for an output, that this engine does not tell the ids that it samples.

    The server that sends the requests has checked its own configuration. Engines on other hosts may
    be started with another one.
    """
    text = (
        "mmkit: %s is not confined: this engine schedules asynchronously, and its configuration "
        "does not name the logits processor of mmkit."
    )
    logger.error(text, where)

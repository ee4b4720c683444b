"""Requests in two threads at once: nothing of one stays on the processor for the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch

from mmkit import ModelSpec
from mmkit.testing import Request, TensorSample
from mmkit.testing.differences import differences

from .planted import ID, frames, mixed, series

FRAME, A, B = ID["<frame>"], ID["A"], ID["B"]
REQUESTS = [
    Request([A, FRAME], {"frames": [TensorSample(0, (2, 3))]}),
    Request([FRAME, FRAME, B, B], {"frames": [TensorSample(1, (2, 3)), TensorSample(2, (2, 3))]}),
]


def test_each_gives_what_it_gives_alone() -> None:
    """Both are in the middle of their processing before either goes on."""
    meeting = Barrier(1)

    def met(items: Any, scope: Any) -> dict[str, Any]:
        meeting.wait(30)
        return {"frames": torch.stack(list(items))}

    subject = mixed(ModelSpec("mixed", series(), frames(process=met)))
    alone = [subject.run(request) for request in REQUESTS]
    meeting = Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        together = [*threads.map(subject.run, REQUESTS)]
    assert [differences(*pair) for pair in zip(alone, together, strict=True)] == [None, None]

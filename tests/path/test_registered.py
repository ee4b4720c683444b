"""The laws on some of vLLM's own processors; docs/data/laws-on-vllm.md has all of them, by `python -m tools.survey`."""

from __future__ import annotations

import re

import pytest
from vllm.model_executor.models import registry

from mmkit.testing import check, of_registered
from tools.survey.zoo import checkpoint

CASES = {
    "whisper": (  # an encoder-decoder
        ["ranges", "cache", "text", "independence", "worst_case", "identity", "round_trip", "refusal", "idempotence"],
        {"embeds": "pass the parser, then RuntimeError: Expected there to be 1 audio items in keyword arguments"},
    ),
    "qwen2_vl": (  # images and videos
        ["ranges", "text", "worst_case", "round_trip"],
        {"refusal": "one item of (image|video) too few: accepted", "idempotence": "ids became"},
    ),
    "paligemma": (  # nothing in the prompt stands for an image
        ["text", "independence", "worst_case", "round_trip", "refusal"],
        {"ranges": "outside the ranges the prompt is", "embeds": "pass the parser, then RuntimeError"},
    ),
}
"""By entry of the zoo, laws that hold, and the messages of those that do not."""


@pytest.mark.parametrize("name", CASES)
def test_check_registered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM looks at each model class in a process of its own, the first time on a machine
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda call: call())
    holding, violated = CASES[name]
    length = 64 if name == "whisper" else 2048
    options = {"enable_mm_embeds": True, "max_model_len": length}
    report = check(of_registered(checkpoint(name), **options), laws=[*holding, *violated], examples=20)
    assert report.violations == report.results[len(holding) :]
    assert [result.law for result in report.violations] == [*violated]
    assert {result.status for result in report.results[: len(holding)]} == {"holds"}
    for result, pattern in zip(report.violations, violated.values(), strict=True):
        assert re.search(pattern, result.detail), result

"""The laws of every multimodal processor on vLLM, each a named check on a `Subject`.

A law draws what it needs (a request, several requests, a change to one) through Hypothesis, and
raises `Violation` with one sentence where it does not hold. docs/laws.md has the contract of each
law and the limits of its test.
"""

from __future__ import annotations

from ..law import Law
from . import huggingface, models, requests

_CHECKS = {**vars(requests), **vars(models), **vars(huggingface)}

LAWS = {law.name: law for law in _CHECKS.values() if isinstance(law, Law)}

"""vLLM's outputs as clients see them."""

from __future__ import annotations

from typing import Any

from .protocol import Choice, PromptTokensDetails, Usage


def usage(prompt: int, completion: int, cached: int) -> Usage:
    """Token counts."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def choice(part: Any) -> Choice:
    """One of vLLM's outputs."""
    logprobs = [
        {token: likelihood.logprob for token, likelihood in step.items()}
        for step in part.logprobs or ()
    ]
    return Choice(
        index=part.index,
        token_ids=list(part.token_ids),
        text=part.text or None,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        logprobs=logprobs or None,
    )

"""vLLM's outputs as clients see them."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..bound.output import BoundOutput
from .protocol import Choice, Produced, PromptTokensDetails, Usage
from .wire import encoded


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


@dataclass(frozen=True)
class Output:
    """The form in which an output is answered.

    Attributes:
        bound: the output.
        as_png: whether as a PNG file.
    """

    bound: BoundOutput
    as_png: bool

    async def produced(self, ids: Sequence[int]) -> Produced:
        """The output that ids are; decoded in a thread, since that may take its time.

        Raises:
            InputError: ids that are no output.
            SpecError: the function of the spec fails.
        """
        return await asyncio.to_thread(self._produced, ids)

    def _produced(self, ids: Sequence[int]) -> Produced:
        array = self.bound.decode(ids)
        if not self.as_png:
            return Produced(name=self.bound.name, tensor=encoded(array, "output"))
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(array).save(file, "PNG")
        return Produced(name=self.bound.name, png=base64.b64encode(file.getvalue()).decode())

"""vLLM 0.17 to 0.28: a request is one `ProcessorInputs`, as later; its prompt goes through the processor, as before."""

from __future__ import annotations

from typing import Any

from . import requests
from .generation_c import DummyInputs as DummyInputs
from .generation_c import call as call
from .generation_c import dummy as dummy
from .generation_c import render as render
from .prompts import PromptProcessor
from .prompts import embedded as embedded
from .prompts import process as process
from .prompts import spelled as spelled
from .requests import ProcessingInfo as ProcessingInfo
from .requests import RequestProcessor
from .requests import parsed as parsed
from .requests import tokenized as tokenized


class Processor(PromptProcessor, RequestProcessor):
    """Processes the requests of a spec; generated classes set `spec`."""

    def cache_of(self, inputs: Any) -> Any:
        return self.cache


HOOKS = (*requests.HOOKS, Processor, DummyInputs)

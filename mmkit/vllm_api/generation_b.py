"""vLLM 0.17 to 0.28: a request is one `ProcessorInputs`, as later; its prompt goes through the
processor, as before."""

from __future__ import annotations

from typing import Any

from . import requests
from .generation_c import DummyInputs, call, dummy, render
from .prompts import PromptProcessor, embedded, process, spelled
from .requests import ProcessingInfo, RequestProcessor, encoded, parsed


class Processor(PromptProcessor, RequestProcessor):
    """Processes the requests of a spec; generated classes set `spec`."""

    def cache_of(self, inputs: Any) -> Any:
        return self.cache


HOOKS = (*requests.HOOKS, Processor, DummyInputs)

"""The check of requests without items, which SGLang gives to no processor of media.

SGLang's plugins may put a function before one of its own. So prompts with placeholders and no items
are refused, and the spec's `prompt` rewrites prompts without items, as on vLLM.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..errors import MmkitError
from ..plan.plan import Plan

_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"

_is_registered = False


def install() -> None:
    """Let SGLang call `check_request` before it validates a request; it can be called again."""
    global _is_registered
    if not _is_registered:
        HookRegistry.register(_TARGET, check_request, HookType.BEFORE)
        _is_registered = True


def check_installed() -> None:
    """Refuse to serve without the check.

    Raises:
        MmkitError: SGLang has not put it before its own.
    """
    method = TokenizerManager._validate_one_request
    if not _is_registered or not hasattr(method, "__wrapped__"):
        expected = f"a plugin of SGLang that is loaded before the server starts, and {_TARGET}"
        remedy = "Register the model in an entry point of the group sglang.srt.plugins."
        raise MmkitError("SGLang", expected, "no check of requests", remedy)


def check_request(manager: Any, request: Any, input_ids: Any) -> None:
    """Refuse a request without items that has placeholders, and rewrite its prompt.

    Args:
        manager: SGLang's `TokenizerManager`.
        request: of the caller.
        input_ids: the ids of its prompt, which are changed in place; None for embeddings.

    Raises:
        InputError: ids outside the vocabulary, or placeholders or targets without items.
    """
    plan = getattr(manager.mm_processor, "plan", None)
    if not isinstance(plan, Plan) or input_ids is None or request.contains_mm_input():
        return
    ids = list(input_ids)
    plan.check_ids(ids)
    rewritten = plan.rewrite_and_place(ids, []).token_ids
    if rewritten != ids:
        input_ids[:] = rewritten

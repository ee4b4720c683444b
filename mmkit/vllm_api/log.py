"""What mmkit logs in a process of vLLM: a part of vLLM's log."""

from __future__ import annotations

import logging

from typing_extensions import override

_ROOT = __name__.removesuffix(".vllm_api.log")  # a package may hold a copy of mmkit


def join_vllm_log() -> None:
    """Send what mmkit logs to vLLM's log, in its format and from its level (VLLM_LOGGING_LEVEL).

    vLLM leaves the root logger to others, and a package that its server imports for SageMaker
    (``model_hosting_container_standards``) hides all warnings that go there.

    A logger "mmkit" that somebody has given a handler stays as it is. So this can be called again.
    """
    logger = logging.getLogger(_ROOT)
    if logger.handlers:
        return
    logger.addHandler(_VllmLogHandler())
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.DEBUG)  # vLLM's logger and its handlers have levels


class _VllmLogHandler(logging.Handler):
    """Passes records to vLLM's logger, whatever handlers that has when they come."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        vllm_logger = logging.getLogger("vllm")
        if vllm_logger.isEnabledFor(record.levelno):
            vllm_logger.handle(record)

"""What mmkit logs, in the log of vLLM."""

import logging
from collections.abc import Iterator

import pytest

from mmkit.vllm_api.log import join_vllm_log
from tests.path.test_serve_robots import build_app_with_key

LOGGER = logging.getLogger("mmkit")


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def vllm_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    """What comes to vLLM's log, in a process in which mmkit's plugin has not run."""
    records = Records()
    vllm_logger = logging.getLogger("vllm")
    monkeypatch.setattr(vllm_logger, "handlers", [records])
    monkeypatch.setattr(vllm_logger, "disabled", False)
    monkeypatch.setattr(LOGGER, "handlers", [])
    monkeypatch.setattr(LOGGER, "propagate", True)
    level_before, vllm_level_before = LOGGER.level, vllm_logger.level
    LOGGER.setLevel(logging.NOTSET)
    vllm_logger.setLevel(logging.INFO)
    yield records
    LOGGER.setLevel(level_before)
    vllm_logger.setLevel(vllm_level_before)


def test_what_mmkit_logs_is_in_the_log_of_a_server(vllm_log: Records) -> None:
    """A library that vLLM's server imports sets the root logger's level to ERROR."""
    build_app_with_key()
    assert logging.getLogger().level == logging.ERROR
    vllm_log.messages.clear()
    join_vllm_log()
    join_vllm_log()
    logger = LOGGER.getChild("rendering.pool")
    logger.warning("1 on 2 core(s)")
    logger.debug("a detail")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logger.warning("nobody wants to see it")
    assert vllm_log.messages == ["1 on 2 core(s)"]


def test_a_log_that_somebody_has_set_up_stays(vllm_log: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records()
    monkeypatch.setattr(LOGGER, "handlers", [records])
    join_vllm_log()
    LOGGER.error("of a spec")
    assert (records.messages, vllm_log.messages) == (["of a spec"], [])

"""The models of examples/wild: 400 chats each, tiny models of their shapes in engines, and the laws."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.server import Server
from examples.wild.biomed_rna import BIOMED_RNA
from mmkit.serve import content_part
from mmkit.testing import check
from tests.profiles import scaled
from tests.wild import biomed_rna
from tests.wild.common import Message
from tests.wild.compare import NAMES, compare_chat, draw_chat, open_model
from tests.wild.serve import ANSWER_TOKENS, answer_by_account, make_checkpoint, measure

pytestmark = pytest.mark.timeout(600)

REQUESTS = 10


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_served_as_its_own_code_says(
    name: str, tmp_path: Path, engines: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKIT_MODULES", "")
    counts = measure(name, tmp_path, chats=400, requests=REQUESTS, examples=scaled(5))
    assert counts.offline == counts.chat == counts.requests == REQUESTS
    assert counts.distinct > REQUESTS / 2
    assert counts.laws >= 8


def test_the_laws_hold_on_cells_without_a_prompt(tmp_path: Path) -> None:
    report = check(BIOMED_RNA, biomed_rna.write_config(tmp_path), examples=scaled(15))
    assert report, report
    held = {result.law for result in report.results if result.status == "holds"}
    assert held >= {"ranges", "independence", "round_trip", "worst_case", "identity", "refusal", "cache"}


def encode_chat(messages: list[Message]) -> list[Message]:
    """Return a chat as a client sends it in JSON."""
    encoded = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in message["content"]:
            if part["type"] == "text":
                parts.append(part)
            else:
                parts.append(content_part(part["type"], part[part["type"]]))
        encoded.append({**message, "content": parts})
    return encoded


def test_a_server_answers_chats_about_molecules(tmp_path: Path) -> None:
    opened = open_model("molca")
    model = make_checkpoint(opened, "molca", tmp_path / "checkpoint")
    options = ("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--served-model-name", "m")
    environment = {"MMKIT_MODULES": "tests.wild.registered"}
    with Server(tmp_path / "checkpoint", *options, environment=environment, log=tmp_path / "log") as server:
        for number in range(REQUESTS):
            messages = draw_chat(opened, number)
            body = {
                "model": "m",
                "messages": encode_chat(messages),
                "temperature": 0.0,
                "max_tokens": ANSWER_TOKENS,
                "min_tokens": ANSWER_TOKENS,
                "return_token_ids": True,
            }
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["prompt_token_ids"] == compare_chat(opened, messages).ids
            assert answer.json()["choices"][0]["token_ids"] == answer_by_account(opened, model, messages)

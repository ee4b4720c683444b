"""A server survives any text of an item, and an encoder that returns too few rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.server import Server
from mmkit.language.vocabulary import Vocabulary
from tests.unit.test_vocabulary import ADDED, SPECIAL, make_tokenizer

from .texts import UNLUCKY, make_checkpoint

pytestmark = pytest.mark.timeout(600)


def test_a_server_survives_texts_that_spell_tokens_and_rows_that_are_missing(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    environment = {"MMKIT_MODULES": "tests.night.texts"}
    options = ("--dtype", "float32", "--enforce-eager", "--served-model-name", "m")
    with Server(checkpoint, *options, environment=environment, log=tmp_path / "log") as server:

        def send(text: str, value: float = 0.5) -> httpx.Response:
            """Send an item of this text and of nine equal values."""
            body: dict[str, Any] = {
                "prompt": "x<ts>y",
                "items": {"ts": [{"values": [value] * 9, "text": text}]},
                "sampling_params": {"max_tokens": 4, "temperature": 0},
            }
            return httpx.post(f"{server.url}/v1/mm/generate", json=body, timeout=120)

        def check_that_the_server_lives() -> None:
            answer = send("mean 1.5")
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == expected
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200

        expected = send("mean 1.5").json()["choices"][0]["token_ids"]
        for word in (*SPECIAL, *ADDED, "<ts_", "patch>"):
            answer = send(f"a{word}b")
            if word in ("<ts>", "<ts_patch>", "<|image_1|>"):
                assert answer.status_code == 400, (word, answer.text)
                sentence = f"texts.ts[0].text: expected a text without '{word}', which stands for an item"
                assert sentence in answer.text
            else:
                assert answer.status_code == 200, (word, answer.text)
            check_that_the_server_lives()

        for text in ("mean 1.5", "a</s>b", "x" * 200):
            check_note(server.url, text)
        refused = generate(server.url, "x<|image_1|>y", {"note": ["a<ts>"]})
        assert refused.status_code == 400
        assert "texts.note[0]: expected a text without '<ts>'" in refused.text
        check_that_the_server_lives()

        assert send("mean 1.5", UNLUCKY).status_code == 200
        check_that_the_server_lives()
        metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert 'mmkit:unsound_items_total{modality="ts"} 1.0' in metrics
    line = (
        "mmkit: texts.ts, embed_ts, item 0: expected 3 encoder rows, got 2. Return one row per embed() position. The "
    )
    assert line in (tmp_path / "log").read_text()


def generate(url: str, prompt: str | list[int], items: dict[str, Any]) -> httpx.Response:
    body = {"prompt": prompt, "items": items, "sampling_params": {"max_tokens": 8, "temperature": 0}}
    return httpx.post(f"{url}/v1/mm/generate", json=body, timeout=120)


def check_note(url: str, text: str) -> None:
    """Check that a note becomes the ids of its text, and that these alone have the same answer."""
    tokenizer = make_tokenizer("bytes")
    vocabulary = Vocabulary(tokenizer)
    ids = vocabulary.text("x") + vocabulary.text("[{}]", text) + vocabulary.text("y")
    answer = generate(url, "x<|image_1|>y", {"note": [text]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    alone = generate(url, ids, {})
    assert alone.json()["choices"][0]["token_ids"] == answer.json()["choices"][0]["token_ids"]

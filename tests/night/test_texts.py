"""What a caller writes into an item, and what an encoder makes of it, ends no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.server import Server
from tests.unit.test_vocabulary import ADDED, SPECIAL

from .texts import UNLUCKY, make_checkpoint

pytestmark = pytest.mark.timeout(600)


def test_texts_that_spell_tokens_and_rows_that_are_missing(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    environment = {"MMKIT_MODULES": "tests.night.texts"}
    options = ("--dtype", "float32", "--enforce-eager", "--served-model-name", "m")
    with Server(checkpoint, *options, environment=environment, log=tmp_path / "log") as server:

        def answer(text: str, first: float = 0.5) -> httpx.Response:
            sent: dict[str, Any] = {"prompt": "x<ts>y", "sampling_params": {"max_tokens": 4, "temperature": 0}}
            sent["items"] = {"ts": [{"values": [first] * 9, "text": text}]}
            return httpx.post(f"{server.url}/v1/mm/generate", json=sent, timeout=120)

        def check_that_it_lives() -> None:
            good = answer("mean 1.5")
            assert good.status_code == 200, good.text
            assert good.json()["choices"][0]["token_ids"] == expected
            assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200

        expected = answer("mean 1.5").json()["choices"][0]["token_ids"]
        for word in (*SPECIAL, *ADDED, "<ts_", "patch>"):
            got = answer(f"a{word}b")
            assert got.status_code == (400 if word in ("<ts>", "<ts_patch>") else 200), (word, got.text)
            if got.status_code == 400:
                assert f"texts.ts[0].text: expected a text without '{word}', which stands for an item" in got.text
            check_that_it_lives()
        assert answer("mean 1.5", UNLUCKY).status_code == 200
        check_that_it_lives()
        metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert 'mmkit:unsound_items_total{modality="ts"} 1.0' in metrics
    line = (
        "mmkit: texts.ts, embed_ts, item 0: expected 3 encoder rows, got 2. Return one row per embed() position. The "
    )
    assert line in (tmp_path / "log").read_text()

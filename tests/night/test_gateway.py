"""An item through LiteLLM, which refuses content parts that OpenAI's API lacks: as the URL of an image it arrives."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.series.untrained import make_model, make_tokenizer
from examples.series.waves import make_wave
from mmkit.serve import content_part
from mmkit.serve.process import Server

pytestmark = pytest.mark.timeout(900)

SAMPLING: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("untrained")
    tokenizer = make_tokenizer()
    make_model(seed=0, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    options = ("--served-model-name", "waves", "--dtype", "float32", "--max-model-len", "128", "--enforce-eager")
    with Server(folder, *options, log=Path(folder, "log")) as server:
        yield server


def test_an_item_as_a_url_is_the_item(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch one
    litellm = pytest.importorskip("litellm", reason="needs litellm: pip install litellm")
    wave, text = make_wave(1).series, {"type": "text", "text": "is a"}

    def messages(**how: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [content_part("series", wave, **how), text]}]

    def direct(**how: Any) -> Any:
        body = {"model": "waves", "messages": messages(**how), "return_token_ids": True, **SAMPLING}
        told = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=240).raise_for_status().json()
        return told["prompt_token_ids"], told["choices"][0]["token_ids"], told["choices"][0]["message"]["content"]

    own = direct()
    assert direct(as_url=True) == own
    gateway = {"model": "openai/waves", "api_base": f"{server.url}/v1", "api_key": "none", **SAMPLING}
    answer = litellm.completion(messages=messages(as_url=True), **gateway)
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (own[2], len(own[0]))
    with pytest.raises(Exception, match="Invalid user message"):
        litellm.completion(messages=messages(), **gateway)

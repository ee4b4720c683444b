"""A server of a model without a spec answers as if mmkit were not installed: vLLM's own LLaVA, chat and errors."""

import base64
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import make_checkpoint
from mmkit.serve.process import Server
from mmkit.serve.wire import encoded

pytestmark = pytest.mark.timeout(900)

OPTIONS = (
    "--dtype float32 --block-size 32 --max-num-seqs 4 --max-model-len 512 --enforce-eager --enable-mm-embeds "
    "--served-model-name llava --enable-auto-tool-choice --tool-call-parser hermes --num-gpu-blocks-override 64"
)
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
HIDDEN, ROWS = 64, 16


def picture(seed: int) -> dict[str, Any]:
    return {"type": "image_url", **encoded(draw_picture(seed), "picture")}


def embeddings(*shape: int) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(torch.linspace(-1, 1, shape[0] * shape[1]).view(shape), file)
    return {"type": "image_embeds", "image_embeds": base64.b64encode(file.getvalue()).decode()}


CONTENTS: dict[str, Any] = {
    "text": "what is it?",
    "image": [picture(0), {"type": "text", "text": "what is it?"}],
    "an image under a name": [{**picture(0), "uuid": "photo"}],
    "an unknown name": [{"type": "image_url", "image_url": None, "uuid": "other"}],
    "embeddings": [embeddings(ROWS, HIDDEN), {"type": "text", "text": "what?"}],
    "a part of no kind": [{"type": "series", "series": [[0.5]]}],
}
BODIES: dict[str, dict[str, Any]] = {
    **{name: {"messages": [{"role": "user", "content": content}]} for name, content in CONTENTS.items()},
    "tools": {"messages": [{"role": "user", "content": "look"}], "tools": [TOOL], "tool_choice": "auto"},
    "log probabilities": {"messages": [{"role": "user", "content": CONTENTS["image"]}], "logprobs": True},
    "options of a processor": {
        "messages": [{"role": "user", "content": CONTENTS["image"]}],
        "mm_processor_kwargs": {"size": {"height": 1, "width": 1}},
    },
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "what is it?"}),
    "a bare placeholder": ("/v1/completions", {"prompt": [1, 3, 5]}),
    "tokens": ("/tokenize", {"messages": [{"role": "user", "content": CONTENTS["image"]}]}),
    "a route of ours": ("/v1/mm/generate", {"prompt": "what is it?"}),
}


class VllmServer(Server):
    """``vllm serve``, with vLLM's plugins or without them."""

    def __init__(self, model: Path, *options: str, **others: Any) -> None:
        super().__init__(model, *options, **others)
        arguments = self._command[self._command.index("mmkit.serve") + 2 :]
        module = "vllm.entrypoints.openai.api_server"
        self._command = [sys.executable, "-m", module, "--model", str(model), *arguments]


def answers(checkpoint: Path, log: Path, **environment: str) -> Iterator[tuple[str, int, str]]:
    """The status and the body, but for its number and its time, of each request."""
    with VllmServer(checkpoint, *OPTIONS.split(), log=log, environment=environment) as server:
        bodies = {name: ("/v1/chat/completions", body) for name, body in BODIES.items()}
        for name, (route, body) in {**bodies, **OTHERS}.items():
            sent = {"model": "llava", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **body}
            answer = httpx.post(f"{server.url}{route}", json=sent, timeout=120)
            yield name, answer.status_code, _without_numbers(answer.text)


def _without_numbers(text: str) -> str:
    try:
        body = json.loads(text)
    except ValueError:
        return text
    for name in ("id", "created"):
        body.pop(name, None)
    for choice in body.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id", None)
    return json.dumps(body)


def test_answers_and_errors_are_those_without_mmkit(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    alone = list(answers(checkpoint, tmp_path / "alone.log", VLLM_PLUGINS=""))
    assert {code for _, code, _ in alone} >= {200, 400, 404}
    for without, beside in zip(alone, answers(checkpoint, tmp_path / "beside.log"), strict=True):
        assert beside == without

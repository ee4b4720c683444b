"""A server of a model without a spec answers as if mmkit were not installed: vLLM's own LLaVA, chat and errors."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import make_checkpoint
from examples.server import Server
from mmkit.serve.wire import encode_value
from tests.engine.llava_like.bodies import save_tensor

pytestmark = pytest.mark.timeout(900)

OPTIONS = (
    "--dtype float32 --block-size 32 --max-num-seqs 4 --max-model-len 512 --enforce-eager --enable-mm-embeds "
    "--served-model-name llava --enable-auto-tool-choice --tool-call-parser hermes --num-gpu-blocks-override 64"
)
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
WHAT = {"type": "text", "text": "what is it?"}
PHOTO = {"type": "image_url", **encode_value(draw_picture(0), "picture")}
ROWS = {"type": "image_embeds", "image_embeds": save_tensor(torch.linspace(-1, 1, 16 * 64).view(16, 64))}


def chat(*content: Any, route: str = "/v1/chat/completions", **more: Any) -> tuple[str, dict[str, Any]]:
    return route, {"messages": [{"role": "user", "content": [*content]}], **more}


REQUESTS = [
    chat(WHAT),
    chat(PHOTO, WHAT),
    chat({**PHOTO, "uuid": "photo"}),
    chat({"type": "image_url", "image_url": None, "uuid": "an unknown name"}),
    chat(ROWS, WHAT),
    chat({"type": "a part of no kind", "series": [[0.5]]}),
    chat(WHAT, tools=[TOOL], tool_choice="auto"),
    chat(PHOTO, WHAT, logprobs=True),
    chat(PHOTO, WHAT, mm_processor_kwargs={"size": {"height": 1, "width": 1}}),
    chat(PHOTO, WHAT, route="/tokenize"),
    ("/v1/completions", {"prompt": "what is it?"}),
    ("/v1/completions", {"prompt": [1, 3, 5]}),  # a bare placeholder
    ("/v1/mm/generate", {"prompt": "what is it?"}),
]
NUMBERS = re.compile(r'"(id|created)":("[^"]*"|[0-9]+)')  # of an answer, of a call and of a second


def answers(checkpoint: Path, log: Path, **environment: str) -> Iterator[tuple[int, str]]:
    """The status and the body, but for its numbers, of each request to ``vllm serve``."""
    server = Server(checkpoint, *OPTIONS.split(), log=log, environment=environment)
    rest = server._command[server._command.index("mmkit.serve") + 2 :]
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    server._command = [sys.executable, *module, *rest]
    with server:
        for route, body in REQUESTS:
            sent = {"model": "llava", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **body}
            answer = httpx.post(f"{server.url}{route}", json=sent, timeout=120)
            yield answer.status_code, NUMBERS.sub("", answer.text)


def test_answers_and_errors_are_those_without_mmkit(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    alone = list(answers(checkpoint, tmp_path / "alone.log", VLLM_PLUGINS=""))
    assert {code for code, _ in alone} >= {200, 400, 404}
    for without, beside in zip(alone, answers(checkpoint, tmp_path / "beside.log"), strict=True):
        assert beside == without

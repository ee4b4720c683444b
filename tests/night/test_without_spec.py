"""A server of a model without a spec, vLLM's own LLaVA, gives the answers and errors that it gives without mmkit."""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import make_checkpoint
from examples.server import Server
from mmkit.wire.items import encode_value
from tests.engine.llava_like.bodies import save_tensor

pytestmark = pytest.mark.timeout(900)

OPTIONS = [
    "--dtype=float32",
    "--block-size=32",
    "--max-num-seqs=4",
    "--max-model-len=512",
    "--enforce-eager",
    "--enable-mm-embeds",
    "--served-model-name=llava",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--num-gpu-blocks-override=64",
]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
QUESTION = {"type": "text", "text": "what is it?"}
PHOTO = {"type": "image_url", **encode_value(draw_picture(0), "picture")}
EMBEDDINGS = {"type": "image_embeds", "image_embeds": save_tensor(torch.linspace(-1, 1, 16 * 64).view(16, 64))}


class Request(NamedTuple):
    route: str
    body: dict[str, Any]


class Answer(NamedTuple):
    status: int
    text: str


def make_chat(*content: Any, route: str = "/v1/chat/completions", **fields: Any) -> Request:
    return Request(route, {"messages": [{"role": "user", "content": list(content)}], **fields})


REQUESTS = [
    make_chat(QUESTION),
    make_chat(PHOTO, QUESTION),
    make_chat({**PHOTO, "uuid": "photo"}),
    make_chat({"type": "image_url", "image_url": None, "uuid": "an unknown name"}),
    make_chat(EMBEDDINGS, QUESTION),
    make_chat({"type": "a part of no kind", "series": [[0.5]]}),
    make_chat(QUESTION, tools=[TOOL], tool_choice="auto"),
    make_chat(PHOTO, QUESTION, logprobs=True),
    make_chat(PHOTO, QUESTION, mm_processor_kwargs={"size": {"height": 1, "width": 1}}),
    make_chat(PHOTO, QUESTION, route="/tokenize"),
    Request("/v1/completions", {"prompt": "what is it?"}),
    # a placeholder without an item
    Request("/v1/completions", {"prompt": [1, 3, 5]}),
    Request("/v1/mm/generate", {"prompt": "what is it?"}),
]
IDS_AND_TIMES = re.compile(r'"(id|created)":("[^"]*"|[0-9]+)')
"""Ids of answers and calls, and times in seconds, which differ in each run."""


def make_vllm_server(checkpoint: Path, log: Path, environment: dict[str, str]) -> Server:
    """Return a server by vLLM's own command, with the options and the address of one by mmkit's."""
    server = Server(checkpoint, *OPTIONS, log=log, environment=environment)
    options = server._command[server._command.index("mmkit.serve") + 2 :]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    server._command = command + options
    return server


def collect_answers(checkpoint: Path, log: Path, **environment: str) -> list[Answer]:
    """Start a server, and return its answer to each request, without ids and times."""
    answers = []
    with make_vllm_server(checkpoint, log, environment) as server:
        for request in REQUESTS:
            body = {"model": "llava", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **request.body}
            answer = httpx.post(f"{server.url}{request.route}", json=body, timeout=120)
            answers.append(Answer(answer.status_code, IDS_AND_TIMES.sub("", answer.text)))
    return answers


def test_answers_and_errors_are_those_without_mmkit(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)

    answers_without_mmkit = collect_answers(checkpoint, tmp_path / "without.log", VLLM_PLUGINS="")
    answers_with_mmkit = collect_answers(checkpoint, tmp_path / "with.log")

    assert {answer.status for answer in answers_without_mmkit} >= {200, 400, 404}
    for with_mmkit, without_mmkit in zip(answers_with_mmkit, answers_without_mmkit, strict=True):
        assert with_mmkit == without_mmkit

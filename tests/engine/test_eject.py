"""A package with a copy of mmkit inside, served by vLLM's own server where there is no mmkit."""

import json
import sys
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from examples.llava_like import ARCHITECTURE
from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.reference import Reference
from mmkit.serve.process import Server
from tests.ejected import ejected

pytestmark = pytest.mark.timeout(600)

OPTIONS = ("--dtype", "float32", "--block-size", "32", "--served-model-name", "llava", "--enforce-eager",
    "--hf-overrides", json.dumps({"architectures": [ARCHITECTURE]}))  # fmt: skip
IMAGE, ROWS = 3, 16


def test_chat_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are those of transformers; the guard came along, and the routes of mmkit did not."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    environment = ejected(tmp_path, "llava_like") | {"MMKIT_MODULES": ""}
    server = Server(checkpoint, *OPTIONS, environment=environment, log=tmp_path / "log")
    stock = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    server._command[: server._command.index(str(checkpoint))] = stock
    monkeypatch.chdir(tmp_path)  # `python -m` finds what is there first
    tokenizer, reference = AutoTokenizer.from_pretrained(checkpoint), Reference(checkpoint)
    picture = draw_picture(0)
    png = BytesIO()
    picture.save(png, "PNG")
    url = f"data:image/png;base64,{b64encode(png.getvalue()).decode()}"
    image, text = {"type": "image_url", "image_url": {"url": url}}, "what is it?"
    messages = [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
    sampling = {"model": "llava", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with server, httpx.Client(base_url=server.url, timeout=240) as client:
        response = client.post("/v1/chat/completions", json={"messages": messages, **sampling})
        assert response.status_code == 200, response.text
        answer = response.json()["choices"][0]["message"]["content"]
        for ids in ([IMAGE], [2**31], [1, -5]):
            refused = client.post("/v1/completions", json={"prompt": ids, **sampling})
            assert refused.status_code == 400, refused.text
        assert client.get("/v1/mm/modalities").status_code == 404
        assert client.get("/health").status_code == 200
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "<image>\nwhat is it?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    ids = torch.tensor([[token for token in ids for _ in range(ROWS if token == IMAGE else 1)]])
    inputs = reference.processor.image_processor(images=[picture], return_tensors="pt")
    length = {"max_new_tokens": 8, "min_new_tokens": 8}
    output = reference.model.generate(input_ids=ids, **inputs, **length, do_sample=False)
    assert answer == tokenizer.decode(output[0, ids.shape[1] :])

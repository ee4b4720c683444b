"""Packages with a copy of mmkit inside, where there is no mmkit: requests, vLLM's engine and its own server."""

import json
import pickle
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
from examples.llava_like.spec import LLAVA_LIKE
from mmkit.serve.process import Server
from mmkit.testing import of_spec, vllm_path
from mmkit.testing.differences import differences
from mmkit.testing.drawing import for_each
from mmkit.testing.strategies import Request
from tests import oracles
from tests.ejected import ejected
from tests.engine.processes import run
from tests.profiles import scaled

pytestmark = pytest.mark.timeout(900)

OPTIONS = ("--dtype=float32", "--block-size=32", "--served-model-name=llava", "--enforce-eager")
OVERRIDES = ("--hf-overrides", json.dumps({"architectures": [ARCHITECTURE]}))
IMAGE, ROWS = 3, 16


RUN = """
import inspect, pickle, sys
from examples.llava_like.laws import testing
from examples.llava_like.spec import LLAVA_LIKE

processor = testing.of_spec(LLAVA_LIKE, sys.argv[1]).processor
outcomes = [testing.vllm_path.run(processor, *request) for request in pickle.load(open(sys.argv[2], "rb"))]
assert "mmkit" not in sys.modules
results = inspect.getsourcefile(type(processor)), [(o.ids, o.ranges, o.hashes, o.fields) for o in outcomes]
pickle.dump(results, open(sys.argv[3], "wb"))
"""


def test_drawn_requests(tmp_path: Path) -> None:
    """Ids, ranges, hashes and fields; a package's laws come along."""
    checkpoint = oracles.SYSTEMS["llava"].checkpoint
    subject, requests, outcomes = of_spec(LLAVA_LIKE, checkpoint), [], []

    def collect(request: Request) -> None:
        requests.append((list(request.prompt), request.data(), dict(request.kwargs)))
        ours = vllm_path.run(subject.processor, *requests[-1])
        outcomes.append((ours.ids, ours.ranges, ours.hashes, ours.fields))

    for_each(subject.requests(most=2), collect, max_examples=scaled(15), database=None)
    (tmp_path / "requests").write_bytes(pickle.dumps(requests))
    environment = ejected(tmp_path, "llava_like", laws="import mmkit.testing as testing\n")
    run("-c", RUN, checkpoint, "requests", "results", cwd=tmp_path, **environment)
    source, theirs = pickle.loads((tmp_path / "results").read_bytes())
    assert source.endswith("examples/llava_like/_mmkit/generated/examples/llava_like/spec/LLAVA_LIKE.py")
    assert differences(outcomes, theirs) is None


def test_two_copies_in_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are those of transformers; the guards came along, and the routes of mmkit did not."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    environment = ejected(tmp_path, "terra", "llava_like") | {"MMKIT_MODULES": ""}
    server = Server(checkpoint, *OPTIONS, *OVERRIDES, environment=environment, log=tmp_path / "log")
    stock = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    server._command[: server._command.index(str(checkpoint))] = stock
    monkeypatch.chdir(tmp_path)  # `python -m` finds what is there first
    picture, png = draw_picture(0), BytesIO()
    picture.save(png, "PNG")
    url = f"data:image/png;base64,{b64encode(png.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    sampling = {"model": "llava", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with server, httpx.Client(base_url=server.url, timeout=240) as client:
        asked = {"messages": [{"role": "user", "content": parts}], **sampling}
        response = client.post("/v1/chat/completions", json=asked)
        assert response.status_code == 200, response.text
        for ids in ([IMAGE], [2**31], [1, -5]):
            refused = client.post("/v1/completions", json={"prompt": ids, **sampling})
            assert refused.status_code == 400, refused.text
        assert client.get("/v1/mm/modalities").status_code == 404
        assert client.get("/health").status_code == 200
    tokenizer, reference = AutoTokenizer.from_pretrained(checkpoint), Reference(checkpoint)
    chat = [{"role": "user", "content": "<image>\nwhat is it?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    written = tokenizer.encode(prompt, add_special_tokens=False)
    ids = torch.tensor([[token for token in written for _ in range(ROWS if token == IMAGE else 1)]])
    inputs = reference.processor.image_processor(images=[picture], return_tensors="pt")
    length = {"max_new_tokens": 8, "min_new_tokens": 8}
    output = reference.model.generate(input_ids=ids, **inputs, **length, do_sample=False)
    assert response.json()["choices"][0]["message"]["content"] == tokenizer.decode(output[0, ids.shape[1] :])

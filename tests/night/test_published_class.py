"""A class of transformers that nobody may edit, served by the files of the page about trained checkpoints."""

import base64
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, CLIPVisionConfig, LlamaConfig, VipLlavaConfig
from transformers import VipLlavaForConditionalGeneration as Published

from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import SPECIAL, make_processor
from examples.server import Server
from tests import ROOT
from tests.night.test_models import enlarge_weights
from tests.pages import parse_page

PAGE = ROOT / "docs" / "how-to" / "serve-checkpoint.md"
PACKAGE = "vip_served"
NUM_TOKENS = 12
QUESTIONS = ("USER: <image>\nWhat is this?", "<image><image> Which of them is larger?", "No picture at all.")


def write_package(folder: Path) -> None:
    """Write the files of the package that the page shows."""
    for block in parse_page(PAGE).blocks:
        if block.title is not None and block.title.startswith(f"{PACKAGE}/"):
            path = folder / block.title
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.content)


def write_checkpoint(folder: Path) -> None:
    """Write a tiny checkpoint with random weights, by transformers' own classes and names of weights."""
    processor = make_processor()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = VipLlavaConfig(
        vision_config=CLIPVisionConfig(image_size=56, patch_size=14, num_hidden_layers=4, **sizes),
        text_config=LlamaConfig(
            vocab_size=len(processor.tokenizer),
            num_hidden_layers=2,
            num_key_value_heads=2,
            head_dim=32,
            bos_token_id=processor.tokenizer.bos_token_id,
            eos_token_id=processor.tokenizer.eos_token_id,
            **sizes,
        ),
        vision_feature_layers=[-2, -3, 1],
        image_token_index=processor.image_token_id,
        image_seq_length=16,
        dtype="float32",
    )
    model = Published(config)
    enlarge_weights(model, seed=0)
    model.lm_head.weight.data[: len(SPECIAL)] = 0.0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the package, with the checkpoint in it."""
    folder = tmp_path_factory.mktemp("vip")
    write_package(folder)
    write_checkpoint(folder / "checkpoint")
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    (folder / "vip_plugin.py").write_text(f"import {PACKAGE}\n\n{PACKAGE}.register()\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "MMKIT_MODULES": "vip_plugin"}


@pytest.fixture(scope="module")
def server(folder: Path, environment: dict[str, str]) -> Iterator[Server]:
    options = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager")
    with Server(folder / "checkpoint", *options, environment=environment, log=folder / "log") as server:
        yield server


def answer_by_transformers(folder: Path, text: str, images: list[Image.Image]) -> list[int]:
    """Return greedy ids of transformers' class with its own processor."""
    model = Published.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    inputs: Any = processor(text=text, images=images or None, return_tensors="pt")
    never = [model.config.image_token_id]
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False, suppress_tokens=never)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def test_the_check_of_the_page_finds_transformers_answers(folder: Path, environment: dict[str, str]) -> None:
    (block,) = [block for block in parse_page(PAGE).blocks if f"from {PACKAGE}.model import" in block.content]
    command = [sys.executable, "-c", block.content]
    process = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def make_url(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}}


def test_the_doctor_finds_nothing_to_mend(folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "mmkit", "doctor", str(folder / "checkpoint")]
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "all those of the class" in process.stdout


@pytest.mark.timeout(900)
def test_ids_over_http_are_those_of_transformers(folder: Path, server: Server) -> None:
    answers = []
    for number, text in enumerate(QUESTIONS * 4):
        images = [draw_picture(10 * number + index) for index in range(text.count("<image>"))]
        body: dict[str, Any] = {
            "prompt": text,
            "sampling_params": {"temperature": 0.0, "max_tokens": NUM_TOKENS},
        }
        if images:
            body["items"] = {"image": [make_url(image) for image in images]}
        reply = httpx.post(f"{server.url}/v1/mm/generate", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        ids = reply.json()["choices"][0]["token_ids"]
        assert ids == answer_by_transformers(folder / "checkpoint", text, images)
        answers.append(tuple(ids))
    assert len(set(answers)) > 8

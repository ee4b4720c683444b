"""A class that extends a language model, served by the file of the page about trained checkpoints."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from typing import Any

import httpx
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from examples.server import Server
from tests import ROOT
from tests.night import extended_class
from tests.night.extended_class import NUM_ROWS, PointLLMConfig, PointLLMLlamaForCausalLM
from tests.night.test_models import enlarge_weights
from tests.pages import parse_page

PAGE = ROOT / "docs" / "how-to" / "serve-checkpoint.md"
PACKAGE = "pointllm_served"
NUM_POINTS = 64
NUM_TOKENS = 12
QUESTIONS = ("USER: <point>\nWhat is this object? ASSISTANT:", "Look: <point> Which colour has it?")

PLUGIN = f"""\
import mmkit
from pointllm import PointLLMConfig

mmkit.serve_transformers("{PACKAGE}.model:PointLLMLlamaForCausalLM", PointLLMConfig)
"""


def write_package(folder: Path) -> None:
    """Write the file of the page, the code that was trained, and a module that registers the class."""
    (block,) = [block for block in parse_page(PAGE).blocks if block.title == f"{PACKAGE}/model.py"]
    package = folder / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text(block.content)
    copy(str(extended_class.__file__), folder / "pointllm.py")
    (folder / "points_plugin.py").write_text(PLUGIN)


def make_tokenizer() -> Any:
    letters = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    tokenizer.add_tokens(["<point_patch>", "<point_start>", "<point_end>"], special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> PointLLMLlamaForCausalLM:
    """Return the model with random weights."""
    config = PointLLMConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        num_points=NUM_POINTS,
        num_point_rows=NUM_ROWS,
        point_patch_token=tokenizer.convert_tokens_to_ids("<point_patch>"),
        dtype="float32",
    )
    model = PointLLMLlamaForCausalLM(config)
    enlarge_weights(model, seed=0)
    return model.eval()


@pytest.fixture(scope="module")
def folder(model: PointLLMLlamaForCausalLM, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the package, with the checkpoint in it."""
    folder = tmp_path_factory.mktemp("points")
    write_package(folder)
    model.save_pretrained(folder / "checkpoint")
    tokenizer.save_pretrained(folder / "checkpoint")
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "MMKIT_MODULES": "points_plugin"}


@pytest.fixture(scope="module")
def server(folder: Path, environment: dict[str, str]) -> Iterator[Server]:
    options = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager")
    with Server(folder / "checkpoint", *options, environment=environment, log=folder / "log") as server:
        yield server


def test_the_doctor_finds_nothing_to_mend(folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "mmkit", "doctor", str(folder / "checkpoint")]
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "all those of the class" in process.stdout


@pytest.mark.timeout(900)
def test_ids_over_http_are_those_of_the_class_that_was_trained(
    model: PointLLMLlamaForCausalLM, tokenizer: Any, server: Server
) -> None:
    random = torch.Generator().manual_seed(0)
    expansion = "<point_start>" + "<point_patch>" * NUM_ROWS + "<point_end>"
    answers = set()
    for question in QUESTIONS * 5:
        cloud = torch.randn(NUM_POINTS, 6, generator=random)
        inputs = tokenizer(question.replace("<point>", expansion), return_tensors="pt")
        ids: Any = model.generate(
            **inputs,
            point_clouds=cloud[None],
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            suppress_tokens=[model.config.point_patch_token],
        )
        body = {
            "prompt": question,
            "items": {"point": [cloud.tolist()]},
            "sampling_params": {"temperature": 0.0, "max_tokens": NUM_TOKENS},
        }
        reply = httpx.post(f"{server.url}/v1/mm/generate", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        answer = reply.json()["choices"][0]["token_ids"]
        assert answer == ids[0, inputs["input_ids"].shape[1] :].tolist()
        answers.add(tuple(answer))
    assert len(answers) > 5

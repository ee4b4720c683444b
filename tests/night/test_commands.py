"""Commands that take a minute and more, each in processes of its own."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from examples.server import Server
from examples.terra.configuration import LlamaActionConfig
from examples.terra.reference import LlamaActionForCausalLM
from mmkit.cli.new import KINDS, new
from mmkit.serve import Client
from tests.engine.processes import run
from tests.language_models import CHATML, language_model

pytestmark = pytest.mark.timeout(900)

PUBLISHED: dict[str, Any] = dict(
    vocab_size=262_145, num_image_patches=576, num_spatio_embeddings=582, pad_token_id=262_144, dtype="float32",
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1,
    head_dim=32, architectures=["LlamaActionForCausalLM"],
)  # fmt: skip
"""The published layout, with a narrow hidden size."""


def test_published_layout_runs(tmp_path: Path) -> None:
    """Frames of 576 tokens, identical to the reference."""
    torch.manual_seed(0)
    LlamaActionForCausalLM(LlamaActionConfig(**PUBLISHED)).save_pretrained(tmp_path / "model")
    run("-m", "examples.terra", "--out", str(tmp_path), "--model", str(tmp_path / "model"), "--frames", "2")
    report: dict[str, Any] = json.loads((tmp_path / "terra.json").read_text())
    assert report["vLLM"]["prompt_tokens"] == [3 * 582, 4 * 582]
    assert report["vLLM"]["cached_tokens"][1] >= 0.95 * 4 * 582
    assert report["identical_tokens"]
    assert "persistence" not in report["vLLM"]


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_llava_like_gives_the_ids_of_vllms_own_class(tmp_path: Path, split: str) -> None:
    """Two processes share each layer, or each has half of the layers; vLLM's own class is in one process."""
    report = tmp_path / "report.json"
    run("-m", "examples.llava_like", "--prompts", "60", f"--{split}-parallel-size", "2", "--report", str(report))
    answers = json.loads(report.read_text())
    assert len(answers["ids"]) > 60
    assert answers["ids"] == answers["vllm"]


@pytest.mark.parametrize(
    ("kind", "language"), [*((kind, "") for kind in KINDS), ("series", "qwen2"), ("series", "llama")]
)
def test_a_new_package_by_the_commands_of_its_readme(kind: str, language: str, tmp_path: Path) -> None:
    """Trained, checked, served, and asked in chat messages by the client of OpenAI."""
    base = tmp_path / "base" if language else None
    if language == "qwen2":
        language_model(tmp_path / "base", Qwen2Config, chat_template=CHATML, tie_word_embeddings=True)
    elif language == "llama":
        language_model(tmp_path / "base", LlamaConfig, chat_template=None)
    folder = new("package", "thing", tmp_path, kind=kind, language_model=base)
    environment = installed(folder, tmp_path / "site")
    run("-m", "package.train", "checkpoint", cwd=folder, **environment)
    output = run("-m", "pytest", "-p", "no:cacheprovider", cwd=folder, **environment)
    assert re.search(r"\d+ passed", output)
    assert "failed" not in output
    options = ("--dtype", "float32")
    with Server(folder / "checkpoint", *options, environment=environment, log=tmp_path / "log") as server:
        answers = run("-m", "package.ask", server.url, cwd=folder, **environment)
    (right,) = re.findall(r"(\d+) of 20 right", answers)
    assert int(right) >= 18, answers


def test_unsound_rows_are_counted(tmp_path: Path) -> None:
    """In float16 the encoder of a new package overflows: the worker counts, and the API server tells."""
    folder = new("weather", "series", tmp_path)
    environment = installed(folder, tmp_path / "site")
    run("-m", "weather.train", "checkpoint", "--steps", "0", cwd=folder, **environment)
    log, options = tmp_path / "log", ("--dtype", "float16")
    with (
        Server(folder / "checkpoint", *options, environment=environment, log=log) as server,
        Client(server.url) as client,
    ):
        (series,) = client.modalities().modalities
        assert (series.name, series.shape) == ("series", [[1, 64], 4])
        answer = client.generate("look: <series>", {"series": [series.example]}, max_tokens=4, ignore_eos=True)
        assert len(answer.choices[0].token_ids) == 4
        assert answer.choices[0].text
        client.generate("look: <series>", {"series": [torch.full((9, 4), 60000.0)]}, max_tokens=1)
        scraped = httpx.get(f"{server.url}/metrics", timeout=240).text
    assert 'mmkit:unsound_items_total{modality="series"} 1.0' in scraped
    assert "vllm:num_requests_running" in scraped
    assert "weather.series: the encoder rows of 1 item(s) were not finite" in log.read_text()


def installed(folder: Path, target: Path) -> dict[str, str]:
    """The package is installed beside this environment rather than into it; the variables with which it is found."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    run("-m", "pip", "install", *options, "--target", str(target), str(folder), cwd=folder)
    return {"PYTHONPATH": str(target), "MMKIT_MODULES": ""}

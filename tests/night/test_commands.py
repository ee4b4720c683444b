"""Commands that take a minute and more, each in its own processes."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, Olmo2Config, Qwen2Config

from examples.server import Server
from examples.terra.configuration import LlamaActionConfig
from examples.terra.reference import LlamaActionForCausalLM
from mmkit.cli.new import KINDS, new
from mmkit.serve import Client
from tests.engine.processes import run_python
from tests.language_models import CHATML, train_language_model

pytestmark = pytest.mark.timeout(900)

PUBLISHED_LAYOUT: dict[str, Any] = {
    "architectures": ["LlamaActionForCausalLM"],
    "vocab_size": 262_145,
    "num_image_patches": 576,
    "num_spatio_embeddings": 582,
    "pad_token_id": 262_144,
}
NARROW_SIZES: dict[str, Any] = {
    "dtype": "float32",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def test_the_published_layout_generates_the_frames_of_the_reference(tmp_path: Path) -> None:
    """Frames have 576 tokens, and 6 more for the action."""
    torch.manual_seed(0)
    config = LlamaActionConfig(**PUBLISHED_LAYOUT, **NARROW_SIZES)
    LlamaActionForCausalLM(config).save_pretrained(tmp_path / "model")

    run_python("-m", "examples.terra", "--out", str(tmp_path), "--model", str(tmp_path / "model"), "--frames", "2")

    report: dict[str, Any] = json.loads((tmp_path / "terra.json").read_text())
    assert report["vLLM"]["prompt_tokens"] == [3 * 582, 4 * 582]
    assert report["vLLM"]["cached_tokens"][1] >= 0.95 * 4 * 582
    assert report["identical_tokens"]
    assert "persistence" not in report["vLLM"]


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_llava_like_gives_the_ids_of_vllms_own_class(tmp_path: Path, split: str) -> None:
    """Two processes share each layer, or each has half of the layers. vLLM's own class runs in one process."""
    report = tmp_path / "report.json"

    run_python("-m", "examples.llava_like", "--prompts", "60", f"--{split}-parallel-size", "2", "--report", str(report))

    answers = json.loads(report.read_text())
    assert len(answers["ids"]) > 60
    assert answers["ids"] == answers["vllm"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_works_by_the_commands_of_its_readme(kind: str, tmp_path: Path) -> None:
    folder = new("package", ["thing"], tmp_path, kinds=[kind])
    check_commands_of_readme(folder, tmp_path)


def test_a_new_package_with_qwen2_as_its_language_model(tmp_path: Path) -> None:
    base = train_language_model(tmp_path / "base", Qwen2Config, chat_template=CHATML, tie_word_embeddings=True)
    folder = new("package", ["thing"], tmp_path, kinds=["series"], language_model=base)
    check_commands_of_readme(folder, tmp_path)


def test_a_new_package_with_llama_as_its_language_model(tmp_path: Path) -> None:
    # its config says not where an answer ends: the package has to
    base = train_language_model(tmp_path / "base", LlamaConfig, chat_template=None, eos_token_id=None)
    folder = new("package", ["thing"], tmp_path, kinds=["series"], language_model=base)
    check_commands_of_readme(folder, tmp_path)


def test_a_new_package_with_a_language_model_that_vllms_own_classes_do_not_serve(tmp_path: Path) -> None:
    base = train_language_model(tmp_path / "base", Olmo2Config, chat_template=None)
    folder = new("package", ["thing"], tmp_path, kinds=["series"], language_model=base)
    check_commands_of_readme(folder, tmp_path)


def check_commands_of_readme(folder: Path, tmp_path: Path) -> None:
    """Train, test and serve a package, and ask it in chat messages by the client of OpenAI."""
    environment = install_package(folder, tmp_path / "site")
    run_python("-m", "package.train", "checkpoint", cwd=folder, **environment)
    scores = run_python("-m", "package.score", "checkpoint", cwd=folder, **environment)
    (num_right,) = re.findall(r"(\d+) of 100 right", scores)
    assert int(num_right) >= 90
    check_tests(folder, environment)
    answers = ask_server(folder, environment, tmp_path / "log")
    (right,) = re.findall(r"(\d+) of 20 right", answers)
    assert int(right) >= 18, answers


def check_tests(folder: Path, environment: dict[str, str]) -> None:
    """Run the tests of a package."""
    output = run_python("-m", "pytest", "-p", "no:cacheprovider", cwd=folder, **environment)
    assert re.search(r"\d+ passed", output)
    assert "failed" not in output


def ask_server(folder: Path, environment: dict[str, str], log: Path) -> str:
    """Serve the checkpoint of a package, and return what its script prints of twenty questions."""
    with Server(folder / "checkpoint", "--dtype", "float32", environment=environment, log=log) as server:
        return run_python("-m", "package.ask", server.url, cwd=folder, **environment)


ANSWERS_OF_TRANSFORMERS = """
from pathlib import Path

from package.ask import list_questions
from package.score import answer, load

model, processor = load(Path("checkpoint"))
for question in list_questions():
    print(f"{question.text} {answer(model, processor, question)} (true: {question.answer})")
"""


@pytest.mark.parametrize("language_model", [None, Qwen2Config])
def test_a_new_package_with_two_modalities(language_model: Any, tmp_path: Path) -> None:
    """It is right about items of each, alone and beside the other, and the server says what transformers says."""
    base = None
    if language_model is not None:
        base = train_language_model(tmp_path / "base", language_model, chat_template=CHATML)
    folder = new("package", ["series", "image"], tmp_path, language_model=base)
    environment = install_package(folder, tmp_path / "site")
    run_python("-m", "package.train", "checkpoint", cwd=folder, **environment)
    scores = run_python("-m", "package.score", "checkpoint", cwd=folder, **environment)
    print(scores)
    right = dict(re.findall(r"(\w+): (\d+) of 100 right", scores))
    assert right.keys() == {"series", "image"}
    assert min(map(int, right.values())) >= 90, scores
    check_tests(folder, environment)
    expected = run_python("-c", ANSWERS_OF_TRANSFORMERS, cwd=folder, **environment).splitlines()
    *answers, summary = ask_server(folder, environment, tmp_path / "log").splitlines()
    assert len(answers) == 20
    assert answers == expected
    print(summary)


def test_items_whose_encoder_rows_are_not_finite_are_counted_in_the_metrics(tmp_path: Path) -> None:
    """In float16 the encoder of a new package overflows. The worker counts the item, and the API server tells."""
    folder = new("weather", ["series"], tmp_path)
    environment = install_package(folder, tmp_path / "site")
    run_python("-m", "weather.train", "checkpoint", "--steps", "0", cwd=folder, **environment)
    log = tmp_path / "log"
    with (
        Server(folder / "checkpoint", "--dtype", "float16", environment=environment, log=log) as server,
        Client(server.url) as client,
    ):
        (series,) = client.modalities().modalities
        assert series.name == "series"
        assert series.shape == [[1, 64], 4]

        answer = client.generate("look: <series>", {"series": [series.example]}, max_tokens=4, ignore_eos=True)
        assert len(answer.choices[0].token_ids) == 4
        assert answer.choices[0].text

        client.generate("look: <series>", {"series": [torch.full((9, 4), 60000.0)]}, max_tokens=1)
        metrics = httpx.get(f"{server.url}/metrics", timeout=240).text
    assert 'mmkit:unsound_items_total{modality="series"} 1.0' in metrics
    assert "vllm:num_requests_running" in metrics
    assert "weather.series: the encoder rows of 1 item(s) were not finite" in log.read_text()


def install_package(folder: Path, target: Path) -> dict[str, str]:
    """Install a package to a folder outside of this environment, and return the variables with which it is found."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    run_python("-m", "pip", "install", *options, "--target", str(target), str(folder), cwd=folder)
    return {"PYTHONPATH": str(target), "MMKIT_MODULES": ""}

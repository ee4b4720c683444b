"""The references of the examples, run by vLLM as they are: ids of transformers."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer, Qwen2VLForConditionalGeneration
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from examples.llava_like.cases import Case
from examples.llava_like.offline import answer, engine
from examples.llava_like.reference import Reference
from examples.series import CHECKPOINT
from examples.series.spec import WAVES
from examples.series.untrained import make_model, make_tokenizer
from examples.series.waves import ANSWER_WORDS, FIRST_TEST_SEED, PROMPT, make_wave
from mmkit.testing import LAWS, check
from tests import ROOT
from tests.engine.llava_like.conftest import cases, checkpoint, tokenizer
from tests.engine.one_class import OneClassWavesForCausalLM, copy_checkpoint
from tests.engine.processes import run_python
from tests.engine.terra.rollouts import generate, generate_by_reference, stack_episodes, start_engine
from tests.night import one_classes
from tests.night.one_classes import register
from tests.night.test_llava_like import merge_adapter
from tests.night.test_models import IMAGE, IMAGES, NUM_TOKENS, write_model
from tests.path.planted.bug import Bug
from tests.path.planted.table import BUGS
from tests.path.test_planted_bugs import check_bug, name_bug
from tools.features import parts

__all__ = ["cases", "checkpoint", "tokenizer"]

LLAVA = {"architectures": ["OneClassLlavaForConditionalGeneration"]}
TERRA = {"architectures": ["OneClassTerraForCausalLM"]}


@pytest.fixture(autouse=True)
def register_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMKIT_MODULES", "")
    register()


def answer_by_reference(reference: Reference, cases: list[Case], tokenizer: Any) -> list[list[int]]:
    answers = []
    for case in cases:
        text = case.prompt
        if not isinstance(text, str):
            text = tokenizer.decode(text, skip_special_tokens=False).removeprefix("<s>")
        answers.append(reference.answer(text, case.images))
    return answers


def test_llava_with_its_published_names_of_weights(
    checkpoint: Path, engines: ExitStack, cases: list[Case], tokenizer: Any
) -> None:
    expected = answer_by_reference(Reference(checkpoint), cases, tokenizer)
    llm = engines.enter_context(engine(checkpoint, seed=0, enforce_eager=True, hf_overrides=LLAVA))
    assert answer(llm, [case.request() for case in cases]) == expected


def test_terra_with_positions_outside_the_decoder(engines: ExitStack) -> None:
    frames, actions = stack_episodes(range(200, 202))
    terra = start_engine(engines, enforce_eager=True, hf_overrides=TERRA)
    assert np.array_equal(generate(terra, frames, actions), generate_by_reference(frames, actions))


SHARED = """
import json, sys
from examples.llava_like.cases import make_cases
from examples.llava_like.checkpoint import make_processor
from examples.llava_like.offline import answer, engine
from tests.night.one_classes import count_served_weights, register

if __name__ == "__main__":
    register()
    requests = [case.request() for case in make_cases(make_processor().tokenizer, 12)]
    names = {"architectures": [sys.argv[2]]}
    with engine(sys.argv[1], seed=0, enforce_eager=True, tensor_parallel_size=2, hf_overrides=names) as llm:
        print(json.dumps([answer(llm, requests), llm.apply_model(count_served_weights)]))
"""


Count = Callable[[Any], dict[str, int]]

TOWERS = [
    ("OneClassLlavaForConditionalGeneration", one_classes.count_weights),
    ("ShardedLlavaForConditionalGeneration", one_classes.count_sharded_weights),
]
"""Classes, and what counts the weights of tower and projector in each of two processes: all of them, or a part."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "count"), TOWERS, ids=[name for name, _ in TOWERS])
def test_layers_shared_by_two_processes(
    name: str, count: Count, checkpoint: Path, cases: list[Case], tokenizer: Any, tmp_path: Path
) -> None:
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    reference = Reference(checkpoint)
    expected = answer_by_reference(reference, cases[:12], tokenizer)
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    output = run_python(str(script), str(checkpoint), name, PYTHONPATH=str(ROOT), **variables)
    answers, counts = json.loads(output.splitlines()[-1])
    assert answers == expected
    assert counts == [count(reference.model)] * 2


def test_positions_in_three_dimensions(engines: ExitStack, tmp_path: Path) -> None:
    model = write_model(tmp_path, "qwen2_vl", Qwen2VLForConditionalGeneration, seed=2)
    processor = AutoProcessor.from_pretrained(tmp_path)
    never = [model.config.image_token_id, model.config.video_token_id]
    requests = []
    expected = []
    for text, images in ((f"what is {IMAGE}?", IMAGES[:1]), (f"a {IMAGE} and {IMAGE}{IMAGE} differ", IMAGES)):
        requests.append({"prompt": text, "multi_modal_data": {"image": images}})
        inputs = processor(text=text, images=images, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False, suppress_tokens=never)
        expected.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
    names = {"architectures": ["OneClassQwen2VLForConditionalGeneration"]}
    llm = engines.enter_context(engine(tmp_path, seed=0, enforce_eager=True, max_model_len=1024, hf_overrides=names))
    assert llm.llm_engine.model_config.uses_mrope
    assert answer(llm, requests, NUM_TOKENS) == expected


def test_an_adapter_of_the_language_model(
    checkpoint: Path, engines: ExitStack, cases: list[Case], tmp_path: Path
) -> None:
    adapter = parts.write_adapter(tmp_path / "adapter", checkpoint, "language_model.")
    merged = merge_adapter(tmp_path / "merged", checkpoint, adapter)
    requests = [case.request() for case in cases[:6]]
    options: dict[str, Any] = {"seed": 0, "enforce_eager": True, "hf_overrides": LLAVA}
    expected = answer(engines.enter_context(engine(merged, **options)), requests)
    llm = engines.enter_context(engine(checkpoint, enable_lora=True, max_lora_rank=8, **options))
    greedy = SamplingParams(temperature=0.0, max_tokens=len(expected[0]), ignore_eos=True)
    results = llm.generate(requests, greedy, lora_request=LoRARequest("adapter", 1, str(adapter)), use_tqdm=False)
    assert [list(result.outputs[0].token_ids) for result in results] == expected
    assert answer(llm, requests) != expected


HEADS = [
    ("NestedForCausalLM", True, False),
    ("NestedForCausalLM", False, True),
    ("HeadBesideForCausalLM", True, False),
]
"""A class, and whether the configs of its language model and of the whole say that head and embeddings share a
weight: what the class does is something else."""


@pytest.mark.parametrize(("name", "is_tied_inside", "is_tied_outside"), HEADS)
def test_a_head_that_the_config_describes_wrongly(
    name: str, is_tied_inside: bool, is_tied_outside: bool, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    language = make_model(0, len(tokenizer)).config.to_dict() | {"model_type": "llama"}
    language["tie_word_embeddings"] = is_tied_inside
    torch.manual_seed(0)
    config = one_classes.NestedConfig(language, dtype="float32", tie_word_embeddings=is_tied_outside)
    model = getattr(one_classes, name)(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    report = check(WAVES, tmp_path, laws=["logprobs"], model=True, examples=5)
    assert [result.status for result in report.results] == ["holds"], report


FOLDER = """
from examples.series.configuration import WavesConfig
from examples.series.spec import WAVES
from mmkit import ModelSpec
from tests.engine.one_class import OneClassWavesForCausalLM

SPEC = ModelSpec("folder", WAVES["series"])


class FolderConfig(WavesConfig):
    model_type = "folder_waves"


class FolderForCausalLM(OneClassWavesForCausalLM):
    mm_spec = SPEC
    config_class = FolderConfig
"""

SERVED_BY_CODE = """
import json, sys
from examples.series.offline import answer, engine
from examples.series.waves import FIRST_TEST_SEED, make_wave

if __name__ == "__main__":
    series = [make_wave(seed).series for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + 30)]
    with engine(sys.argv[1], enforce_eager=True, trust_remote_code=True) as llm:
        print(json.dumps(answer(llm, series)))
"""


def write_folder_with_code(folder: Path) -> Path:
    """Write the checkpoint of the series, with its class and spec as code."""
    copy_checkpoint(folder, "FolderForCausalLM")
    (folder / "modeling_waves.py").write_text(FOLDER)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "folder_waves"
    names = {"AutoConfig": "FolderConfig", "AutoModelForCausalLM": "FolderForCausalLM"}
    config["auto_map"] = {key: f"modeling_waves.{name}" for key, name in names.items()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_class_that_the_folder_brings_as_code(tmp_path: Path) -> None:
    folder = write_folder_with_code(tmp_path / "waves-1.5")
    script = tmp_path / "served_by_code.py"
    script.write_text(SERVED_BY_CODE)
    modules = str(tmp_path / "modules")
    output = run_python(str(script), str(folder), PYTHONPATH=str(ROOT), VLLM_PLUGINS="mmkit", HF_MODULES_CACHE=modules)
    model = OneClassWavesForCausalLM.from_pretrained(CHECKPOINT).eval()
    processor = WAVES.hf_processor(model.config, AutoTokenizer.from_pretrained(CHECKPOINT))
    series = [make_wave(seed).series for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + 30)]
    expected = [model.answer(processor, PROMPT, item, ANSWER_WORDS) for item in series]
    assert json.loads(output.splitlines()[-1]) == expected


def test_the_laws_hold_on_a_class_that_vllm_runs(tmp_path: Path) -> None:
    report = check(WAVES, copy_checkpoint(tmp_path / "waves"), model=True, examples=25)
    assert report, report
    held = {result.law for result in report.results if result.status == "holds"}
    assert held >= {"counts", "safety", "containment", "strangers", "logprobs"}


@pytest.mark.parametrize("bug", [bug for bug in BUGS if LAWS[bug.law].needs_engine], ids=name_bug)
def test_a_bug_is_caught(bug: Bug) -> None:
    check_bug(bug)


COMMAND = """
import sys
from mmkit.cli import main
from tests.night.one_classes import register

register()
sys.argv = ["mmkit", "check", "examples.series.spec:WAVES", "--config", sys.argv[1], "-k", "logprobs"]
main()
"""


def test_the_command_checks_log_probabilities(tmp_path: Path) -> None:
    output = run_python("-c", COMMAND, str(copy_checkpoint(tmp_path / "waves")), PYTHONPATH=str(ROOT))
    assert "logprobs PASSED" in output

"""Processors for transformers beside vLLM."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoProcessor

from examples import series
from examples.series.spec import WAVES
from examples.terra import CHECKPOINT
from examples.terra.configuration import LlamaActionConfig
from examples.terra.spec import TERRA
from mmkit import ModelSpec, cfg, embed
from mmkit.testing import ImageSample, NotApplicable, check_law, of_spec, vllm_path
from mmkit.testing.differences import find_difference
from mmkit.training import DocumentProcessor
from tests import ROOT, hf_law
from tests.oracles import SYSTEMS


def test_a_checkpoint_that_was_saved_with_its_processor_is_served(tmp_path: Path) -> None:
    """vLLM finds the Hugging Face processor that `hf()` calls, without the code of the folder."""
    system = SYSTEMS["llava"]
    spec = system.load_spec()
    shutil.copytree(system.checkpoint, tmp_path, dirs_exist_ok=True)
    before = of_spec(spec, tmp_path)
    saved = hf_law.make_processor(before)
    saved.save_pretrained(tmp_path)
    after = of_spec(spec, tmp_path)
    data = {"image": [ImageSample(0, 40, 30).value()]}
    outcomes = [vllm_path.run(subject.processor, "look <image>", data) for subject in (before, after)]
    assert not find_difference(*outcomes)
    again = spec.hf_processor_class.from_pretrained(tmp_path)
    assert again.dtype == saved.dtype
    of_document = AutoProcessor.from_pretrained(tmp_path)
    assert type(of_document) is DocumentProcessor
    expected = saved("look <image>", image=data["image"])
    for processor in (again, of_document):
        received = processor("look <image>", images=data["image"])
        assert torch.equal(received["input_ids"], expected["input_ids"])
        assert torch.equal(received["pixel_values"], expected["pixel_values"])


def test_a_saved_processor_without_one_of_transformers_is_no_reference(tmp_path: Path) -> None:
    """The law draws no requests in search of one that such a processor takes."""
    shutil.copytree(series.CHECKPOINT, tmp_path, dirs_exist_ok=True)
    hf_law.make_processor(hf_law.open_series()).save_pretrained(tmp_path)
    subject = of_spec(WAVES, tmp_path)
    with pytest.raises(NotApplicable, match=r"^the model has no Hugging Face processor"):
        check_law("reference", subject, examples=4)


LOADED = """
import sys

sys.modules["vllm"] = None  # whatever imports it fails
import mmkit

assert "transformers" not in sys.modules
import torch
from transformers import AutoConfig, AutoProcessor


def load(folder, **options):
    processor = AutoProcessor.from_pretrained(folder, **options)
    batch = processor(input_ids=[14, *[101] * 6], actions=torch.ones(6, 3))
    assert batch["actions"].tolist() == [[[1.0] * 3] * 6]
    assert batch["mm_token_type_ids"].tolist() == [[0, *[4] * 6]]
    assert processor.dtype == torch.float16 and processor.mm_processor_kwargs == {"size": 3}
    return type(processor).__module__.partition(".")[0]


of_document = AutoProcessor.from_pretrained(sys.argv[2], trust_remote_code=True)
print(type(of_document).__module__.partition(".")[0], of_document.spec.name)
folders = sys.argv[3:]
print([load(folder, trust_remote_code=True) for folder in folders])
sys.path.append(sys.argv[1])
from examples.terra.configuration import LlamaActionConfig
from examples.terra.spec import TERRA

AutoConfig.register("llama_action", LlamaActionConfig)
AutoProcessor.register(LlamaActionConfig, TERRA.hf_processor_class)
print([load(folder) for folder in folders])
"""


def test_loading_where_there_is_no_vllm(tmp_path: Path) -> None:
    """A folder that is there already, and a new one; with the code in it, then with a class that is registered."""
    AutoConfig.register("llama_action", LlamaActionConfig, exist_ok=True)
    folders = [tmp_path / "a checkpoint", tmp_path / "a new one"]
    config = AutoConfig.from_pretrained(CHECKPOINT)
    config.save_pretrained(folders[0])
    for folder in folders:
        TERRA.hf_processor(config, kwargs={"size": 3}, dtype="float16").save_pretrained(folder)
    modality = TERRA["actions"].model_copy(update={"layout": embed(5) * cfg.num_action_tokens})
    spec = ModelSpec("no_code", modality)
    spec.hf_processor(config).save_pretrained(tmp_path / "a document")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(ROOT), str(tmp_path / "a document"), *map(str, folders)],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    modules = [str([module] * 2) for module in ("transformers_modules", "mmkit")]
    assert done.stdout.splitlines() == ["transformers_modules no_code", *modules], done.stderr

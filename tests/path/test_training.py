"""Processors for transformers beside vLLM."""

import shutil
from pathlib import Path

import torch

from mmkit.testing import ImageSample, of_spec
from mmkit.testing.laws.law import differences
from mmkit.vllm_api import harness
from tests import hf_law
from tests.oracles import SYSTEMS


def test_a_checkpoint_that_was_saved_with_its_processor_is_served(tmp_path: Path) -> None:
    """vLLM finds the Hugging Face processor that `hf()` calls, without the code of the folder."""
    system = SYSTEMS["llava"]
    spec = system.load_spec()
    shutil.copytree(system.checkpoint, tmp_path, dirs_exist_ok=True)
    before = of_spec(spec, tmp_path)
    saved = hf_law.processor_of(before)
    saved.save_pretrained(tmp_path)
    after = of_spec(spec, tmp_path)
    data = {"image": [ImageSample(0, 40, 30).value()]}
    outcomes = [harness.run(one.processor, "look <image>", data) for one in (before, after)]
    assert not differences(*outcomes)
    again = spec.hf_processor_class.from_pretrained(tmp_path)
    assert again.dtype == saved.dtype
    received = again("look <image>", images=data["image"])
    assert torch.equal(received["pixel_values"], saved("look <image>", image=data["image"])["pixel_values"])

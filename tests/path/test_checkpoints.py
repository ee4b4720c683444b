"""Checkpoint folders that bring their spec as a document: which processor vLLM makes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmkit import ModelSpec, SpecError
from mmkit.model.plugin import load
from mmkit.model.remote_code import take_spec_of_document
from mmkit.testing import ImageSample, of_spec, vllm_path
from mmkit.testing.differences import find_difference
from mmkit.vllm_api import Processor
from mmkit.vllm_api.checkpoint_processors import load_model_config
from tests.oracles import SYSTEMS
from tests.unit.common import refuses

SYSTEM = SYSTEMS["llava"]
SPEC = SYSTEM.load_spec()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint of LLaVA with the document of a spec."""
    shutil.copytree(SYSTEM.checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "mmkit.json").write_text(json.dumps(SPEC.to_document()))
    return tmp_path


def make_processor(folder: Path | str, **options: Any) -> Any:
    """Return the processor that vLLM makes for a folder, where mmkit's plugin is loaded."""
    load()
    return MULTIMODAL_REGISTRY.create_processor(load_model_config(folder, **options))


def test_the_spec_of_a_folder_makes_the_processor_of_vllms_class(folder: Path) -> None:
    processor = make_processor(folder)
    assert isinstance(processor, Processor)
    assert processor.spec.name == "llava_like"
    data = {"image": [ImageSample(0, 40, 30).value()]}
    expected = vllm_path.run(of_spec(SPEC, folder).processor, "look <image>", data)
    assert not find_difference(vllm_path.run(processor, "look <image>", data), expected)


def test_other_folders_of_the_class_keep_vllms_processor(folder: Path) -> None:
    make_processor(folder)
    processor = make_processor(SYSTEM.checkpoint)
    assert type(processor).__module__.startswith("vllm.")


def process_nothing(items: Any, scope: Any) -> dict[str, Any]:
    side = scope.cfg.vision_config.image_size
    return {"pixel_values": torch.zeros(len(items), 3, side, side)}


def test_a_document_with_functions_needs_trust(folder: Path) -> None:
    blind = ModelSpec("blind", SPEC["image"].model_copy(update={"process": process_nothing}))
    (folder / "mmkit.json").write_text(json.dumps(blind.to_document()))
    sentence = f"{folder}/mmkit.json: expected a document without functions, got {__name__}:process_nothing. Install …"
    with refuses(RuntimeError, sentence):
        make_processor(folder)
    processor = make_processor(folder, trust_remote_code=True)
    assert processor.spec["image"] == blind["image"]


def test_a_malformed_document_is_refused_and_no_text_is_served(folder: Path) -> None:
    (folder / "mmkit.json").write_text("{}")
    with refuses(RuntimeError, f"{folder}/mmkit.json, mmkit: expected a value, got none."):
        make_processor(folder)


def test_a_class_that_the_folder_brings_has_the_spec_of_the_document(folder: Path) -> None:
    class Complete:
        def embed_image(self, pixel_values: torch.Tensor) -> torch.Tensor: ...

    class Incomplete:
        """The document is for vLLM's class."""

    for model in (Complete, Complete, Incomplete):
        take_spec_of_document(model, str(folder))
    assert Complete.mm_spec["image"] == SPEC["image"]  # type: ignore[attr-defined]
    assert not hasattr(Incomplete, "mm_spec")
    (folder / "mmkit.json").write_text(json.dumps(ModelSpec("other", SPEC["image"]).to_document()))
    sentence = f"{folder}/mmkit.json: expected the document from which Complete has its spec, got another one. Serve …"
    with refuses(SpecError, sentence):
        take_spec_of_document(Complete, str(folder))

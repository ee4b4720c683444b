"""The LLaVA-like model compared with vLLM's own class.

The spec is registered on that class, and features of vLLM that need something of the model class are used with both.
`python -m tools.features` uses all features with both, and test_commands.py compares the ids.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from examples.llava_like.cases import Case
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer, engine
from examples.llava_like.reference import Reference
from examples.llava_like.spec import LLAVA_LIKE
from tests.engine.llava_like.conftest import cases, checkpoint, tokenizer
from tools.features import parts
from tools.features.rows import FEATURES, Side

__all__ = ["cases", "checkpoint", "tokenizer"]


@pytest.fixture(scope="module")
def llava(checkpoint: Path, engines: ExitStack) -> Any:
    return engines.enter_context(engine(checkpoint, seed=0))


@pytest.fixture(scope="module")
def requests(cases: list[Case]) -> list[Any]:
    return [case.request() for case in cases]


@pytest.fixture(scope="module")
def answers(llava: Any, requests: list[Any]) -> list[list[int]]:
    return answer(llava, requests)


def test_the_spec_replaces_the_hand_written_processor_of_vllms_own_class(
    checkpoint: Path, engines: ExitStack, requests: list[Any], answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration as Llava

    # set to their values, so that monkeypatch undoes what registering changes before the next test
    monkeypatch.setattr(Llava, "_processor_factory", Llava._processor_factory)
    monkeypatch.setattr(Llava, "mm_spec", None, raising=False)
    monkeypatch.setenv("MMKIT_MODULES", "")
    LLAVA_LIKE.register(Llava)

    llm = engines.enter_context(engine(checkpoint, use_vllm_class=True, seed=0, enforce_eager=True))
    assert type(llm.llm_engine.model_executor.driver_worker.worker.get_model()) is Llava
    assert type(llm.llm_engine.renderer.mm_processor) is LLAVA_LIKE.classes.processor
    assert answer(llm, requests) == answers


def test_an_image_has_a_row_for_the_class_token_with_the_full_strategy(
    tmp_path: Path, engines: ExitStack, cases: list[Case]
) -> None:
    folder = make_checkpoint(tmp_path, strategy="full")
    llava = engines.enter_context(engine(folder, seed=0, enforce_eager=True))
    reference = Reference(folder)
    cases_of_text = [case for case in cases[:12] if isinstance(case.prompt, str)]
    case_with_images = next(case for case in cases_of_text if case.images)

    answers = answer(llava, [case.request() for case in cases_of_text])
    embeddings = reference.embed(case_with_images.images)
    (answer_to_embeddings,) = answer(llava, [case_with_images.request(embeddings)])

    assert answers == [reference.answer(case.prompt, case.images) for case in cases_of_text]
    assert embeddings[0].shape == (17, 64)
    assert answer_to_embeddings == answers[cases_of_text.index(case_with_images)]


@pytest.mark.parametrize("name", ["log probabilities", "LoRA, mixed", "EAGLE-3", "classification: `classify`"])
def test_a_feature_answers_as_with_vllms_own_class(engines: ExitStack, tmp_path: Path, name: str) -> None:
    (feature,) = (feature for feature in FEATURES if feature.name.startswith(name))
    answer_of_vllms_class = feature.run(Side(True, tmp_path / "vllm", engines))
    answer_of_our_class = feature.run(Side(False, tmp_path / "mmkit", engines))
    assert answer_of_our_class == answer_of_vllms_class


def merge_adapter(folder: Path, checkpoint: Path, adapter: Path) -> Path:
    """Write the checkpoint with the weights of an adapter added to its own, and return the folder."""
    weights = load_file(checkpoint / parts.WEIGHTS)
    adapter_weights = load_file(adapter / "adapter_model.safetensors")
    for name, lora_a in adapter_weights.items():
        if not name.endswith(".lora_A.weight"):
            continue
        lora_b = adapter_weights[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{module}.weight"] += lora_b @ lora_a
    return parts.write_variant(folder, checkpoint, weights)


def test_an_adapter_of_the_tower_answers_as_its_weights_in_the_checkpoint(engines: ExitStack, tmp_path: Path) -> None:
    """vLLM's own class cannot be compared: it counts one position less than CLIP computes, and fails."""
    (feature,) = (feature for feature in FEATURES if "tower" in feature.name)
    side = Side(False, tmp_path / "side", engines)
    ids = feature.run(side)
    folder = merge_adapter(tmp_path / "merged", side.checkpoint, side.folder / "adapter")
    llm = engines.enter_context(engine(folder, seed=0, enforce_eager=True))
    assert answer(llm, side.requests) == ids

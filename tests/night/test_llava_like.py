"""The LLaVA-like model beside vLLM's own class: the spec on that class, and features of vLLM that ask something of the
model class (`python -m tools.features` runs all of them on both sides). test_commands.py compares the ids of both."""

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
def answers(llava: Any, cases: list[Case]) -> list[list[int]]:
    return answer(llava, [case.request() for case in cases])


def test_the_spec_on_vllms_own_class(
    checkpoint: Path, engines: ExitStack, cases: list[Case], answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered on it, the spec takes the place of the hand-written classes, with the same answers."""
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration as Llava

    # what registering changes, so that the class is vLLM's again for the tests that follow
    monkeypatch.setattr(Llava, "_processor_factory", Llava._processor_factory)
    monkeypatch.setattr(Llava, "mm_spec", None, raising=False)
    monkeypatch.setenv("MMKIT_MODULES", "")
    LLAVA_LIKE.register(Llava)
    llm = engines.enter_context(engine(checkpoint, use_vllm_class=True, seed=0, enforce_eager=True))
    assert type(llm.llm_engine.model_executor.driver_worker.worker.get_model()) is Llava
    assert type(llm.llm_engine.renderer.mm_processor) is LLAVA_LIKE.classes.processor
    assert answer(llm, [case.request() for case in cases]) == answers


def test_full_strategy(tmp_path: Path, engines: ExitStack, cases: list[Case]) -> None:
    """With the class token an image has one row more."""
    folder = make_checkpoint(tmp_path, strategy="full")
    llava, reference = engines.enter_context(engine(folder, seed=0, enforce_eager=True)), Reference(folder)
    cases = [case for case in cases[:12] if isinstance(case.prompt, str)]
    answers = answer(llava, [case.request() for case in cases])
    assert [reference.answer(case.prompt, case.images) for case in cases] == answers
    case = next(case for case in cases if case.images)
    (row, *_) = rows = reference.embed(case.images)
    assert row.shape == (17, 64)
    assert answer(llava, [case.request(rows)]) == [answers[cases.index(case)]]


@pytest.mark.parametrize("name", ["log probabilities", "LoRA, mixed", "EAGLE-3", "classification: `classify`"])
def test_a_feature_answers_as_with_vllms_own_class(engines: ExitStack, tmp_path: Path, name: str) -> None:
    (feature,) = (feature for feature in FEATURES if feature.name.startswith(name))
    theirs, ours = (feature.run(Side(own, tmp_path / str(own), engines)) for own in (True, False))
    assert ours == theirs


def merged(folder: Path, checkpoint: Path, lora: Path) -> Path:
    """The checkpoint with the weights of an adapter added to its own."""
    weights, added = load_file(checkpoint / parts.WEIGHTS), load_file(lora / "adapter_model.safetensors")
    for name in [name for name in added if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{module}.weight"] += added[name.replace("lora_A", "lora_B")] @ added[name]
    return parts.write_variant(folder, checkpoint, weights)


def test_an_adapter_of_the_tower_is_as_its_weights_in_the_checkpoint(engines: ExitStack, tmp_path: Path) -> None:
    """vLLM's own class counts a position less than CLIP computes, and fails."""
    (feature,) = (feature for feature in FEATURES if "tower" in feature.name)
    side = Side(False, tmp_path / "side", engines)
    ids = feature.run(side)
    folder = merged(tmp_path / "merged", side.checkpoint, side.folder / "adapter")
    llm = engines.enter_context(engine(folder, seed=0, enforce_eager=True))
    assert answer(llm, side.requests) == ids

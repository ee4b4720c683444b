"""Random specs against the laws, and against a deliberately naive evaluator of their descriptions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkit.testing import LAWS, Subject, check_law, harness, items
from mmkit.testing.specs import MARKS, NUMBERS, ROWS, WORDS, ModalitySample, SpecSample, checkpoint, specs
from mmkit.vllm_api import DummyInputs, ProcessingInfo, Processor

ID = {word: i for i, word in enumerate(WORDS)}


@functools.cache
def config() -> Any:
    harness.stand_in("MmkitMadeUp")
    return harness.model_config(checkpoint(), enable_mm_embeds=True)


def subject_of(sample: SpecSample) -> Subject:
    """The processor of a spec, of classes that no module keeps."""
    bases = {"info": ProcessingInfo, "dummy_inputs": DummyInputs, "processor": Processor}
    made = harness.generated(
        **{k: type(k, (base,), {"spec": sample.spec}) for k, base in bases.items()}, config=config()
    )
    plan = made.info.plan
    samples = {name: items(modality.item) for name, modality in plan.modalities.items()}
    return Subject(made, samples, model_dir=checkpoint(), plan=plan)


def number(value: Any, length: int, element: int) -> int:
    return {"length": length, "element": element, **NUMBERS}[value] if isinstance(value, str) else value


def lay(tree: Any, name: str, length: int, element: int = 0) -> list[tuple[int, bool]]:
    """The tokens of a layout, each with whether it receives an encoder row, one by one."""
    kind, *rest = tree
    if kind == "literal":
        return [(ID[MARKS[name][2 + rest[0]]], False)]
    if kind == "embed":
        return [(ID[MARKS[name][1]], True)]
    if kind == "sequence":
        return [token for part in rest[0] for token in lay(part, name, length, element)]
    if kind == "where":
        return lay(rest[1] if length > rest[0] else rest[2], name, length, element)
    if kind == "repeat":
        return [token for _ in range(number(rest[1], length, element)) for token in lay(rest[0], name, length, element)]
    over, body, separator = rest
    elements = list(ROWS) if over == "rows" else list(range(number(over, length, element)))
    tokens: list[tuple[int, bool]] = []
    for position, inner in enumerate(elements):
        if position and separator is not None:
            tokens += lay(separator, name, length, element)
        tokens += lay(body, name, length, inner)
    return tokens


def layout_of(modality: ModalitySample, length: int) -> list[tuple[int, bool]]:
    return [(ID[MARKS[modality.name][1]], True), *lay(modality.tree, modality.name, length)]


QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck))


@QUIET
@given(specs(), st.data())
def test_counts_and_ids_are_those_of_the_description(sample: SpecSample, data: Any) -> None:
    """L1 and L2: every item has the ids, the mask and the number of rows that its description says."""
    subject = subject_of(sample)
    request = data.draw(subject.requests())
    outcome = subject.run(request)
    for modality in sample.modalities:
        for i, item in enumerate(request.items.get(modality.name, ())):
            expected = layout_of(modality, item.shape[0])
            offset, length, mask = outcome.ranges[modality.name][i]
            assert outcome.ids[offset : offset + length] == [token for token, _ in expected]
            assert list(mask) == [embeds for _, embeds in expected]
            fields = outcome.fields[modality.name][i]
            assert fields[f"{modality.name}_data"].tolist() == item.tensor().tolist()


@pytest.mark.parametrize("number", ["L2", "L4", "L5", "L6", "L7", "L8", "L9", "L10", "L11"])
def test_law(number: str) -> None:
    law = LAWS[number]

    @QUIET
    @given(specs(), st.data())
    def holds(sample: SpecSample, data: Any) -> None:
        if number == "L11" and not any(modality.embeds for modality in sample.modalities):
            return
        law.check(subject_of(sample), data)

    holds()


@settings(max_examples=max(5, settings().max_examples // 20), deadline=None, suppress_health_check=list(HealthCheck))
@given(specs())
def test_caches_change_nothing(sample: SpecSample) -> None:
    """L3, as a state machine on each spec."""
    check_law("L3", subject_of(sample), examples=8)

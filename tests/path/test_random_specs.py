"""Random specs in vLLM's processing path, against the laws."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmkit import ModelSpec
from mmkit.generate import Classes
from mmkit.testing import LAWS, Case, NotApplicable, Subject, check_law, items, processors
from mmkit.vllm_api import DummyInputs, ProcessingInfo, Processor
from tests.profiles import scaled
from tests.random_specs import checkpoint, specs


@functools.cache
def config() -> Any:
    processors.register_stand_in(["MmkitMadeUp"])
    return processors.load_model_config(checkpoint(), enable_mm_embeds=True)


def subject_of(spec: ModelSpec) -> Subject:
    """The processor of a spec, of classes that no module keeps."""
    bases = (ProcessingInfo, DummyInputs, Processor)
    classes = Classes(*[type(base.__name__, (base,), {"spec": spec}) for base in bases])
    instance = processors.make_processor(classes, config())
    plan = instance.info.plan
    samples = {name: items(modality.item) for name, modality in plan.modalities.items()}
    return Subject(instance, samples, model_dir=checkpoint(), plan=plan)


QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(QUIET, max_examples=scaled(150))


@pytest.mark.parametrize(
    "number",
    ["ranges", "text", "independence", "worst_case", "identity", "round_trip", "refusal", "idempotence", "embeds"],
)
def test_law(number: str) -> None:
    law = LAWS[number]

    @(QUIET if number in ("refusal", "embeds") else MANY)
    @given(specs(), st.data())
    def holds(spec: ModelSpec, data: Any) -> None:
        with suppress(NotApplicable):
            law.check(Case(law, subject_of(spec), data))

    holds()


@settings(QUIET, max_examples=scaled(8))
@given(specs())
def test_caches_change_nothing(spec: ModelSpec) -> None:
    """cache, as a state machine on each spec."""
    check_law("cache", subject_of(spec), examples=8)

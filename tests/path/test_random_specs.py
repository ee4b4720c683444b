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
def load_config() -> Any:
    processors.register_stand_in(["MmkitMadeUp"])
    return processors.load_model_config(checkpoint(), enable_mm_embeds=True)


def open_subject(spec: ModelSpec) -> Subject:
    """Return the processor of a spec, of classes that no module keeps."""
    classes = Classes(
        make_class(ProcessingInfo, spec),
        make_class(DummyInputs, spec),
        make_class(Processor, spec),
    )
    processor = processors.make_processor(classes, load_config())
    plan = processor.info.plan
    samples = {name: items(modality.item) for name, modality in plan.modalities.items()}
    return Subject(processor, samples, model_dir=checkpoint(), plan=plan)


def make_class(base: type, spec: ModelSpec) -> type:
    return type(base.__name__, (base,), {"spec": spec})


FEW = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=scaled(25))
MANY = settings(FEW, max_examples=scaled(40))


def check_random_specs(law: str, profile: settings) -> None:
    """Check a law on one request of each drawn spec."""

    @profile
    @given(specs(), st.data())
    def check(spec: ModelSpec, data: Any) -> None:
        with suppress(NotApplicable):
            LAWS[law].check(Case(LAWS[law], open_subject(spec), data))

    check()


@pytest.mark.parametrize(
    "law", ["ranges", "text", "independence", "worst_case", "identity", "round_trip", "idempotence"]
)
def test_a_law_holds_on_random_specs(law: str) -> None:
    check_random_specs(law, MANY)


@pytest.mark.parametrize("law", ["refusal", "embeds"])
def test_a_slow_law_holds_on_random_specs(law: str) -> None:
    check_random_specs(law, FEW)


@settings(FEW, max_examples=scaled(8))
@given(specs())
def test_caches_change_nothing(spec: ModelSpec) -> None:
    """The law draws sequences of requests for each spec."""
    check_law("cache", open_subject(spec), examples=8)

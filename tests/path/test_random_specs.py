"""Random specs in vLLM's processing path, against the laws and against the naive references of tests/unit/naive.py."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mmkit import InputError
from mmkit.layout import as_text
from mmkit.testing import LAWS, Case, NotApplicable, Subject, check_law, items, vllm_path
from mmkit.vllm_api import DummyInputs, ProcessingInfo, Processor
from tests.profiles import scaled
from tests.random_specs import ID, MARKS, NUMBERS, ROWS, WORDS, ModalitySample, SpecSample, checkpoint, specs
from tests.unit import naive


@functools.cache
def config() -> Any:
    vllm_path.stand_in("MmkitMadeUp")
    return vllm_path.model_config(checkpoint(), enable_mm_embeds=True)


def subject_of(sample: SpecSample) -> Subject:
    """The processor of a spec, of classes that no module keeps."""
    bases = {"info": ProcessingInfo, "dummy_inputs": DummyInputs, "processor": Processor}
    instance = vllm_path.generated(
        **{k: type(k, (base,), {"spec": sample.spec}) for k, base in bases.items()}, config=config()
    )
    plan = instance.info.plan
    samples = {name: items(modality.item) for name, modality in plan.modalities.items()}
    return Subject(instance, samples, model_dir=checkpoint(), plan=plan)


def layout_of(modality: ModalitySample, length: int) -> list[tuple[int, bool]]:
    env = {"cfg": {**NUMBERS, "rows": list(ROWS)}, "item": {"length": length}}
    return [(ID[MARKS[modality.name][1]], True), *naive.lay(modality.tree, env)]


def ways_of(modality: ModalitySample, length: int) -> list[naive.Way]:
    """How an item gets into the prompt, by the names of the updates."""
    tokens = layout_of(modality, length)
    target, layout = ID[MARKS[modality.name][0]], [token for token, _ in tokens]
    embeds = {token for token, embeds in tokens if embeds}
    written = {
        "replace": ("replace", [target]),
        "replace text": ("replace", [target, ID["a"]]),
        "start": ("start", []),
        "after": ("after", [ID["<s>"]]),
        "in place": ("in_place", []),
    }
    return [(*written[kind], layout, embeds) for kind in modality.updates]


QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(QUIET, max_examples=scaled(150))


@st.composite
def damaged(draw: Any, prompt: list[int]) -> list[int]:
    """A prompt with a piece left out, or written twice, or with other tokens in it."""
    begin, end = sorted([draw(st.integers(0, len(prompt))), draw(st.integers(0, len(prompt)))])
    how, odd = draw(st.sampled_from(["same", "less", "more", "odd"])), draw(st.lists(st.integers(0, len(WORDS) - 1)))
    between = {"same": prompt[begin:end], "less": [], "more": prompt[begin:end] * 2, "odd": odd}[how]
    return [*prompt[:begin], *between, *prompt[end:]]


@MANY
@given(specs(), st.data())
def test_prompt_updates_are_those_of_the_naive_reference(sample: SpecSample, data: Any) -> None:
    """All kinds of updates, alternatives, and modalities that share a prompt; also prompts that must be refused."""
    subject = subject_of(sample)
    request = data.draw(subject.requests())
    request = replace(request, prompt=data.draw(damaged(request.prompt)))
    given_items = {m: request.items[m.name] for m in sample.modalities if request.items.get(m.name)}
    alternatives = {m.name: [ways_of(m, item.shape[0]) for item in items] for m, items in given_items.items()}
    absent = [m for m in sample.modalities if m not in given_items]
    bare = {ID[MARKS[m.name][1]] for m in absent} & {*request.prompt}
    # a target that can only stand for an item
    targets = [target for m in absent for kind, target, *_ in ways_of(m, m.least) if kind == "replace"]
    bare |= {target[0] for target in targets if as_text(target) in as_text(request.prompt)}
    end = [ID["</s>"]] if sample.suffix and request.prompt[-1:] != [ID["</s>"]] else []
    expected = None if bare else naive.place([*request.prompt, *end], alternatives)
    try:
        outcome = subject.run(request)
    except InputError:
        event("refused")
        assert expected is None
        return
    event("placed")
    assert expected is not None, "what the reference refuses is accepted"
    ids, places = expected
    assert outcome.ids == ids
    starts = {(name, i): place[0] for name, ranges in outcome.ranges.items() for i, place in enumerate(ranges)}
    assert starts == {(name, i): start for name, i, start, _ in places}


@pytest.mark.parametrize(
    "number",
    ["ranges", "text", "independence", "worst_case", "identity", "round_trip", "refusal", "idempotence", "embeds"],
)
def test_law(number: str) -> None:
    law = LAWS[number]

    @(QUIET if number in ("refusal", "embeds") else MANY)
    @given(specs(), st.data())
    def holds(sample: SpecSample, data: Any) -> None:
        with suppress(NotApplicable):
            law.check(Case(law, subject_of(sample), data))

    holds()


@settings(QUIET, max_examples=scaled(8))
@given(specs())
def test_caches_change_nothing(sample: SpecSample) -> None:
    """cache, as a state machine on each spec."""
    check_law("cache", subject_of(sample), examples=8)

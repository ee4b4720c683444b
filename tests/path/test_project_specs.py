"""Every spec of the gallery against every law that needs no model."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import strategies as st

from mmkit.testing import (
    LAWS,
    AudioSample,
    ImageSample,
    Subject,
    VideoSample,
    Violation,
    check_law,
    of_spec,
)
from tests import hf_law
from tests.oracles import SYSTEMS
from tests.profiles import scaled

EXAMPLES = scaled(15)
# transformers 4 takes a side of one or three pixels for the channels
SIDE = st.integers(4 if version("transformers") < "5" else 1, 160)
SMALL = {
    "image": st.builds(ImageSample, st.integers(0, 2), SIDE, SIDE),
    "audio": st.builds(AudioSample, st.integers(0, 2), st.integers(1000, 40000)),
}


def videos(timed: bool) -> st.SearchStrategy[VideoSample]:
    """Small videos, with the times of at least two frames where the model wants them."""
    side = st.integers(10, 60)  # of strips, transformers makes more patches than `longest_edge` allows
    return st.builds(VideoSample, st.integers(0, 2), st.integers(1 + timed, 4), side, side, st.just(timed))


KWARGS: dict[str, Any] = {
    "llava_onevision": st.sampled_from([{}, {"do_normalize": False}]),  # another size of tiles is refused
}
"""Where the kit would draw others by itself."""
EXPECTED = {
    ("molmo", "independence"): (
        "image_input_idx",
        "it counts over all images of a call; the model uses its order alone",
    ),
    ("minicpmv", "reference"): (
        "ids: 14 and 13 long",
        "vLLM's class leaves out the <s> that transformers writes",
    ),
}
"""What a message says, and why."""
LEFT_OUT: dict[str, set[str]] = {
    "cache": {"molmo"},  # as independence, but few sequences of requests show it
    "text": {"fuyu"},  # no tokenizer
    "embeds": {"fuyu", "florence2", "molmo", "chameleon", "gemma3", "idefics3", "minicpmv", "pixtral_hf", "whisper"},
    "reference": {"fuyu", "florence2", "molmo", "internvl2", "qwen_vl", "ultravox", "whisper", "phi3v"},
    "positions": SYSTEMS.keys() - {"qwen2_vl", "qwen3_vl"},  # positions of one dimension
    "outputs": {*SYSTEMS},  # none declares outputs
}
"""Systems about which a law has nothing to say: no embeddings, a Hugging Face processor that writes no
placeholders. tests/night/test_gallery.py checks that it is so."""
PAIRS = [
    (name, number)
    for number, law in LAWS.items()
    for name in SYSTEMS
    if not law.needs_model and name not in LEFT_OUT.get(number, ())
]
SUBJECTS: dict[str, Subject] = {}


def subject(name: str) -> Subject:
    if name not in SUBJECTS:
        system = SYSTEMS[name]
        spec = system.load_spec()
        names = [modality.name for modality in spec.modalities]
        timed = any(getattr(modality.item, "metadata", False) for modality in spec.modalities)
        samples = {kind: small for kind, small in {**SMALL, "video": videos(timed)}.items() if kind in names}
        options: dict[str, Any] = {"kwargs": KWARGS.get(name), "samples": samples, "trust_remote_code": True}
        SUBJECTS[name] = of_spec(spec, system.checkpoint, **options)
    return SUBJECTS[name]


def pairs_by_day() -> list[tuple[str, str]]:
    """Every law on one spec, and every spec under one law: the pair whose other half is the least used."""
    free = [pair for pair in PAIRS if pair not in EXPECTED]
    chosen: list[tuple[str, str]] = []
    for half, values in ((1, LAWS), (0, SYSTEMS)):
        for value in values:
            able = [pair for pair in free if pair[half] == value]
            if able and all(pair[half] != value for pair in chosen):
                chosen.append(min(able, key=lambda pair: sum(pair[1 - half] == other[1 - half] for other in chosen)))
    return chosen


def hold(name: str, number: str) -> None:
    """A law on a spec of the gallery, or the violation that is known."""
    if known := EXPECTED.get((name, number)):
        with pytest.raises(Violation, match=known[0]):
            check_law(number, subject(name), examples=100, database=False)
    else:
        check_law(number, subject(name), examples=EXAMPLES)


@pytest.mark.parametrize(("name", "number"), pairs_by_day())
def test_gallery(name: str, number: str) -> None:
    hold(name, number)


@pytest.mark.parametrize("name", [*SYSTEMS, *hf_law.EXAMPLES])
def test_the_processor_for_transformers(name: str) -> None:
    """What it makes of requests is what vLLM's path makes of them."""
    hf_law.check(hf_law.EXAMPLES[name]() if name in hf_law.EXAMPLES else subject(name), scaled(5))

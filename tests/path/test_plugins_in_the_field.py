"""The specs of two plugins in the field on vLLM's path: drawn requests against the plain account of tests/unit, and
every law that needs no model. Checkpoints are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from examples.gallery.nemo_salm import NEMO_SALM
from mmkit.testing import LAWS, AudioSample, NotApplicable, Subject, check_law, of_spec, vllm_path
from mmkit.testing.strategies import for_each
from tests.profiles import scaled
from tests.random_specs import write_checkpoint
from tests.unit import test_plugins_in_the_field as plain

MARKS = ["<|AUDIO|>", "<|object_ref_start|>", "<|box_start|>", "<|object_ref_end|>", "<|audio|>"]
WORDS = ["<unk>", "<s>", "</s>", *MARKS, *(f"w{i}" for i in range(300))]
SPECS = {name: plain.FIELDS[name] for name in ("VibeVoice", "NeMo", "NeMo in chunks")}
SAYS_NOTHING = {"embeds", "reference", "positions", "outputs"}
"""No embeddings, no Hugging Face processor, positions of one dimension, no outputs."""


def subject_of(name: str, folder: Path) -> Subject:
    """The spec of a plugin on a checkpoint that is written into a folder."""
    spec, options, *_ = SPECS[name]
    known = {"model_type": "qwen2", "architectures": [f"{spec.name.title()}ForCausalLM"], **options}
    write_checkpoint(folder, WORDS, MARKS, vocab_size=len(WORDS), max_position_embeddings=512, **known)
    # of more rows than a request has items: the same token is written and stands for a row, so two of them beside one
    # item of two rows are an expanded prompt
    audio = st.builds(AudioSample, st.integers(0, 3), st.integers(8_000, 40_000), st.just(16_000))
    return of_spec(spec, folder, samples={"audio": audio} if spec is NEMO_SALM else None)


def as_by_hand(name: str, subject: Subject, examples: int) -> int:
    """Compare drawn requests on vLLM's path with the plain account; how many there were."""
    _, _, ids_of, requests, names, mark = SPECS[name]
    known = subject.processor.info.ctx.tokenizer.get_vocab()
    seen: list[int] = []

    def same(request: Any) -> None:
        texts, lengths = request
        prompt, _ = plain.joined(texts, [[known[mark]]] * len(lengths))
        expected, starts = plain.joined(texts, [ids_of(known, n) for n in lengths])
        audio = [*map(plain.noise, lengths)]
        got = vllm_path.run(subject.processor, prompt, {"audio": audio} if audio else {})
        assert got.ids == expected
        assert [start for start, *_ in got.ranges.get("audio", [])] == starts
        plain.same_fields(audio, got.fields.get("audio", []), names)
        seen.append(len(lengths))

    for_each(requests, same, max_examples=examples, database=None)
    return len(seen)


@pytest.fixture(scope="module", params=SPECS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def subject(name: str, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(name, tmp_path_factory.mktemp("field"))


def test_requests_are_placed_as_by_hand(name: str, subject: Subject) -> None:
    assert as_by_hand(name, subject, scaled(15)) > 0


@pytest.mark.parametrize("law", [name for name, law in LAWS.items() if not law.needs_model])
def test_law(subject: Subject, law: str) -> None:
    if law in SAYS_NOTHING:
        with pytest.raises(NotApplicable):
            check_law(law, subject, examples=1)
    else:
        check_law(law, subject, examples=scaled(15))

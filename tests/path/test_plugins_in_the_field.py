"""The specs of two plugins in the field on vLLM's path: drawn requests against the plain account of tests/unit, and
every law that needs no model. Checkpoints are made up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from examples.gallery.nemo_salm import NEMO_SALM
from mmkit.testing import LAWS, AudioSample, NotApplicable, Subject, check_law, of_spec, vllm_path
from mmkit.testing.strategies import for_each
from tests.profiles import scaled
from tests.random_specs import write_checkpoint
from tests.unit import test_plugins_in_the_field as plain

MARKS = ["<|AUDIO|>", "<|object_ref_start|>", "<|box_start|>", "<|object_ref_end|>", "<|audio|>"]
WORDS = ["<unk>", "<s>", "</s>"] + MARKS + [f"w{number}" for number in range(300)]
SPECS = {name: plain.AUDIO_MODELS[name] for name in ("VibeVoice", "NeMo", "NeMo in chunks")}
SAYS_NOTHING = {"embeds", "reference", "positions", "outputs", "ids_only"}
"""No embeddings, no Hugging Face processor, positions of one dimension, no outputs, and rows for each item."""


LAWS_WITHOUT_MODEL = [name for name, law in LAWS.items() if not law.needs_model]


def make_subject(name: str, folder: Path) -> Subject:
    """Return the spec of a plugin on a checkpoint that is written into a folder."""
    model = SPECS[name]
    config = {"model_type": "qwen2", "architectures": [f"{model.spec.name.title()}ForCausalLM"]}
    config.update(model.options)
    write_checkpoint(folder, WORDS, MARKS, vocab_size=len(WORDS), max_position_embeddings=512, **config)
    if model.spec is not NEMO_SALM:
        return of_spec(model.spec, folder)
    # of more rows than a request has items: the same token is written and stands for a row, so two of them beside one
    # item of two rows are an expanded prompt
    audio = st.builds(AudioSample, st.integers(0, 3), st.integers(8_000, 40_000), st.just(16_000))
    return of_spec(model.spec, folder, samples={"audio": audio})


def compare_requests(name: str, subject: Subject, examples: int) -> int:
    """Compare random requests on vLLM's path with the plain account; return how many there were."""
    model = SPECS[name]
    vocabulary = subject.processor.info.ctx.tokenizer.get_vocab()
    num_requests = 0

    def compare(request: plain.Request) -> None:
        nonlocal num_requests
        prompt, _ = plain.join(request.texts, [[vocabulary[model.mark]]] * len(request.items))
        layouts = [model.list_ids(vocabulary, samples) for samples in request.items]
        expected, starts = plain.join(request.texts, layouts)
        audio = [plain.make_noise(samples) for samples in request.items]
        run = vllm_path.run(subject.processor, prompt, {"audio": audio} if audio else {})
        assert run.ids == expected
        assert [placement.offset for placement in run.ranges.get("audio", [])] == starts
        plain.check_audio_fields(audio, run.fields.get("audio", []), model.names)
        num_requests += 1

    for_each(model.requests, compare, max_examples=examples, database=None)
    return num_requests


@pytest.fixture(scope="module", params=SPECS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def subject(name: str, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(name, tmp_path_factory.mktemp("field"))


def test_requests_become_what_the_plain_account_says(name: str, subject: Subject) -> None:
    assert compare_requests(name, subject, scaled(15)) > 0


@pytest.mark.parametrize("law", LAWS_WITHOUT_MODEL)
def test_law(subject: Subject, law: str) -> None:
    if law in SAYS_NOTHING:
        with pytest.raises(NotApplicable):
            check_law(law, subject, examples=1)
    else:
        check_law(law, subject, examples=scaled(15))

"""Outputs in the engine and over HTTP: actions of a vision-language-action model, and a table whose positions have
different ids."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm import SamplingParams

from examples.llava_like.cases import draw_picture
from examples.llava_like.offline import engine
from examples.server import Server
from examples.vla.checkpoint import BINS, PADDING, STATISTICS, make_checkpoint
from mmkit import InputError
from mmkit.model.sampling import sampling_params
from mmkit.serve import Client
from tests.engine.processes import run_engines_in_their_processes
from tests.unit.common import expect_refusal

from .vla import OVERRIDES, WITH_TABLES

pytestmark = pytest.mark.timeout(600)

PROMPT = "<image>pick up the can"


def make_request(shade: int) -> dict[str, Any]:
    image = Image.new("RGB", (56, 56), (shade, 128, 255 - shade))
    return {"prompt": PROMPT, "multi_modal_data": {"image": image}}


REQUESTS = [make_request(shade) for shade in range(0, 240, 10)]
FREE = SamplingParams(temperature=0.0, max_tokens=29, ignore_eos=True)
EDGES = np.linspace(-1.0, 1.0, BINS)
CENTRES = (EDGES[:-1] + EDGES[1:]) / 2
LOW = np.array(STATISTICS["town"]["action"]["q01"])
HIGH = np.array(STATISTICS["town"]["action"]["q99"])
# the gripper is not scaled
LOW[-1] = -1.0
HIGH[-1] = 1.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("vla"))


@pytest.fixture(scope="module")
def vla(checkpoint: Path, engines: ExitStack) -> Any:
    return engines.enter_context(engine(checkpoint, seed=0, hf_overrides=OVERRIDES))


@pytest.fixture(scope="module")
def outputs(vla: Any, checkpoint: Path) -> Any:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    return WITH_TABLES.bind(vla.model_config.hf_config, processor.tokenizer, processor=processor).outputs


def generate(llm: Any, requests: Any, params: Any) -> list[list[list[int]]]:
    """Return the ids of each answer of each request."""
    results = llm.generate(requests, params, use_tqdm=False)
    return [[list(output.token_ids) for output in result.outputs] for result in results]


def generate_one_each(llm: Any, requests: Any, params: Any) -> list[list[int]]:
    """Return the ids of the only answer of each request."""
    ids = []
    for answers in generate(llm, requests, params):
        (answer,) = answers
        ids.append(answer)
    return ids


def test_an_action_has_seven_tokens_whatever_the_model_would_say(vla: Any, outputs: Any) -> None:
    action = outputs["action"]
    first_padding_id = vla.model_config.hf_config.text_config.vocab_size - PADDING
    (ids_without_output,) = generate_one_each(vla, REQUESTS[:1], FREE)
    with pytest.raises(InputError, match=r"vla\.outputs\.action\[\d\]: expected an id from"):
        action.decode(ids_without_output[:7])

    actions = []
    for ids in generate_one_each(vla, REQUESTS, sampling_params(action, vla, temperature=0.0)):
        array = action.decode(ids)
        bins = [min(first_padding_id - 1 - token, BINS - 2) for token in ids]
        assert np.allclose(array, (CENTRES[bins] + 1) / 2 * (HIGH - LOW) + LOW)
        assert (action.decode(action.encode(array)) == array).all()
        actions.append(array)
    assert len(np.unique(actions, axis=0)) > 1


def test_each_position_of_each_request_has_its_own_ids(vla: Any, outputs: Any) -> None:
    """A batch has requests with either output and without one, with several answers each. They begin at different
    steps, and move within the batch.
    """
    ids_without_output = generate_one_each(vla, REQUESTS, FREE)
    table = sampling_params(outputs["table"], vla, temperature=2.0, seed=0, n=3)
    action = sampling_params(outputs["action"], vla, temperature=2.0, seed=0, n=3)
    params = [FREE, table, action, FREE] * (len(REQUESTS) // 4)

    answers_of_requests = generate(vla, REQUESTS, params)

    decoded = []
    for number, answers in enumerate(answers_of_requests):
        if params[number] is table:
            decoded += [str(outputs["table"].decode(ids).tolist()) for ids in answers]
        elif params[number] is action:
            decoded += [str(outputs["action"].decode(ids).tolist()) for ids in answers]
        else:
            assert answers == [ids_without_output[number]]
    assert len(set(decoded)) > 12, "answers differ, and so do the requests"


def test_drafts_keep_to_an_output_of_one_range(
    checkpoint: Path, engines: ExitStack, outputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes no logits processors for speculative decoding: only `allowed_token_ids` can restrict the ids."""
    run_engines_in_their_processes(monkeypatch, "tests.night.vla")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    options = {"seed": 0, "hf_overrides": OVERRIDES, "speculative_config": drafts}
    llm = engines.enter_context(engine(checkpoint, **options))

    for ids in generate_one_each(llm, REQUESTS, sampling_params(outputs["action"], llm, temperature=0.0)):
        outputs["action"].decode(ids)

    got = "one that makes no logits processor of mmkit's, as with speculative decoding"
    sentence = f"vla.outputs.table: expected an engine that confines each position, got {got}. Start it without …"
    expect_refusal(InputError, sentence, sampling_params, outputs["table"], llm)


def test_a_client_gets_decoded_outputs_of_requests_and_of_each_chunk_of_a_session(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The server finds the class as each process does that is spawned by this one."""
    items = {"image": [draw_picture(0)]}
    wild = {"temperature": 2.0, "seed": 1}
    options = ("--dtype", "float32", "--block-size", "32", "--enforce-eager", "--hf-overrides", json.dumps(OVERRIDES))
    with (
        Server(checkpoint, *options, log=tmp_path / "log") as server,
        Client(server.url, timeout=240) as client,
    ):
        action, table = client.modalities().outputs
        assert action.tokens == 7
        assert action.shape == [7]
        assert action.dtype == "float64"
        assert table.tokens == 29
        assert table.shape == [4, 3, 2]
        assert table.dtype == "int64"

        for choice in client.generate(PROMPT, items, output="action", n=3, **wild).choices:
            assert choice.output.shape == (7,)
            assert choice.output.dtype == np.float64
            assert (choice.output >= LOW).all()
            assert (choice.output <= HIGH).all()

        with client.session(PROMPT, items, output="table", stream=True, **wild) as session:
            chunks = [session.first]
            for _ in range(3):
                chunks.append(session.next(prompt="and now"))
        for chunk in chunks:
            # a row has six ids of cells and the separator
            rows = np.array(chunk.token_ids[:-1]).reshape(4, 7)
            assert (chunk.output == rows[:, :6].reshape(4, 3, 2)).all()
            assert set(chunk.output[..., 0].flat) <= set(range(40, 44))
        assert len({str(chunk.token_ids) for chunk in chunks}) > 1

        free = client.generate(PROMPT, items, max_tokens=7, temperature=0.0, ignore_eos=True)
        assert free.choices[0].output is None

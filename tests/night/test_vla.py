"""Outputs in the engine and over HTTP: the actions of a vision-language-action model, and positions that are confined
one by one."""

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
from tests.unit.common import expect_refusal

from .vla import OVERRIDES, WITH_TABLES

pytestmark = pytest.mark.timeout(600)

PROMPT = "<image>pick up the can"
REQUESTS = [
    {"prompt": PROMPT, "multi_modal_data": {"image": Image.new("RGB", (56, 56), (shade, 128, 255 - shade))}}
    for shade in range(0, 240, 10)
]
FREE = SamplingParams(temperature=0.0, max_tokens=29, ignore_eos=True)
EDGES = np.linspace(-1.0, 1.0, BINS)
CENTRES = (EDGES[:-1] + EDGES[1:]) / 2
LOW, HIGH = (np.array(STATISTICS["town"]["action"][name]) for name in ("q01", "q99"))
LOW[-1], HIGH[-1] = -1.0, 1.0  # the gripper is not scaled


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


def ids_of(llm: Any, requests: Any, params: Any) -> list[list[int]]:
    results = llm.generate(requests, params, use_tqdm=False)
    return [list(part.token_ids) for result in results for part in result.outputs]


def test_an_action_has_seven_tokens_whatever_the_model_would_say(vla: Any, outputs: Any) -> None:
    action = outputs["action"]
    first_padding_id = vla.model_config.hf_config.text_config.vocab_size - PADDING
    said, *_ = ids_of(vla, REQUESTS[:1], FREE)
    with pytest.raises(InputError, match=r"vla\.outputs\.action\[\d\]: expected an id from"):
        action.decode(said[:7])
    ids = ids_of(vla, REQUESTS, sampling_params(action, vla, temperature=0.0))
    actions = [action.decode(one) for one in ids]
    for one, array in zip(ids, actions, strict=True):
        bins = [min(first_padding_id - 1 - token, BINS - 2) for token in one]
        assert np.allclose(array, (CENTRES[bins] + 1) / 2 * (HIGH - LOW) + LOW)
        assert (action.decode(action.encode(array)) == array).all()
    assert len(np.unique(actions, axis=0)) > 1


def test_each_position_of_each_request_has_its_own_ids(vla: Any, outputs: Any) -> None:
    """Confined or not, of both outputs, several answers each, begun at different steps and moved within the batch.
    Names that are no output, which any caller may send as `vllm_xargs`, change nothing."""
    alone = ids_of(vla, REQUESTS, FREE)
    wild = {"temperature": 2.0, "seed": 0, "n": 3}
    odd = FREE.clone()
    odd.extra_args = {"mmkit_output": ["film"]}
    confined = [outputs["table"], outputs["action"]]
    params = [FREE, *(sampling_params(one, vla, **wild) for one in confined), odd]
    results = vla.generate(REQUESTS, params * (len(REQUESTS) // 4), use_tqdm=False)
    drawn = []
    for i, result in enumerate(results):
        ids = [list(part.token_ids) for part in result.outputs]
        if i % 4 in (0, 3):
            assert ids == [alone[i]]
        else:
            drawn += [str(confined[i % 4 - 1].decode(one).tolist()) for one in ids]
    assert len(set(drawn)) > 12, "answers differ, and so do the requests"


def test_drafts_keep_to_an_output_of_one_range(
    checkpoint: Path, engines: ExitStack, outputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes no logits processors for speculative decoding: `allowed_token_ids` says it, or nothing does.

    In a process of its own: n-grams import numba, beside which vLLM 0.32 starts no further engine on a CPU.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("MMKIT_MODULES", "tests.night.vla")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    options = {"seed": 0, "hf_overrides": OVERRIDES, "speculative_config": drafts}
    llm = engines.enter_context(engine(checkpoint, **options))
    for ids in ids_of(llm, REQUESTS, sampling_params(outputs["action"], llm, temperature=0.0)):
        outputs["action"].decode(ids)
    got = "one that makes no logits processor of mmkit's, as with speculative decoding"
    sentence = f"vla.outputs.table: expected an engine that confines each position, got {got}. Start it without …"
    expect_refusal(InputError, sentence, sampling_params, outputs["table"], llm)


def test_over_http(checkpoint: Path, tmp_path: Path) -> None:
    """Every chunk of a session begins a new output. The server learns of the class as any process does that is spawned
    from here."""
    items, wild = {"image": [draw_picture(0)]}, {"temperature": 2.0, "seed": 1}
    options = ("--dtype", "float32", "--block-size", "32", "--enforce-eager", "--hf-overrides", json.dumps(OVERRIDES))
    with (
        Server(checkpoint, *options, log=tmp_path / "log") as server,
        Client(server.url, timeout=240) as client,
    ):
        action, table = client.modalities().outputs
        assert (action.tokens, action.shape, action.dtype) == (7, [7], "float64")
        assert (table.tokens, table.shape, table.dtype) == (29, [4, 3, 2], "int64")
        for choice in client.generate(PROMPT, items, output="action", n=3, **wild).choices:
            assert (choice.output.shape, choice.output.dtype) == ((7,), np.float64)
            assert ((choice.output >= LOW) & (choice.output <= HIGH)).all()
        with client.session(PROMPT, items, output="table", stream=True, **wild) as session:
            chunks = [session.first, *(session.next(prompt="and now") for _ in range(3))]
        for chunk in chunks:
            assert (chunk.output == np.array(chunk.token_ids[:-1]).reshape(4, 7)[:, :6].reshape(4, 3, 2)).all()
            assert set(chunk.output[..., 0].flat) <= set(range(40, 44))
        assert len({str(chunk.token_ids) for chunk in chunks}) > 1
        free = client.generate(PROMPT, items, max_tokens=7, temperature=0.0, ignore_eos=True)
        assert free.choices[0].output is None

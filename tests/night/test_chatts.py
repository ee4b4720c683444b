"""ChatTS in an engine and over HTTP: several series of several lengths in each of several requests."""

import numpy as np
import pytest

from mmkit.serve import Client
from mmkit.serve.process import Server
from mmkit.vllm_api import harness
from tests.engine.processes import engines_in_this_process, run

pytestmark = pytest.mark.timeout(600)

RANDOM = np.random.default_rng(0)
LENGTHS = [(), (1,), (40,), (7, 23), (4, 4, 4), (40, 1, 13, 8)]
ITEMS = [[RANDOM.normal(size=n).cumsum() * 10.0 ** RANDOM.integers(-2, 5) for n in lengths] for lengths in LENGTHS]
ITEMS.append([ITEMS[2][0][::-1].copy()])  # the text of another one, and other patches
PROMPTS = ["look: " + "and <ts><ts/>, ".join([""] * (len(items) + 1)) + "what now?" for items in ITEMS]
TOKENS = 12

WITH_ITEMS = list(zip(PROMPTS, ITEMS, strict=True))[1:]
RENDER = """
import pathlib, sys
from tests.engine import chatts
from tests.engine.test_chatts import WITH_ITEMS
pathlib.Path(sys.argv[2]).write_text("\\n".join(chatts.send(sys.argv[1], *zip(*WITH_ITEMS))))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The checkpoint, and the ids of transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMKIT_MODULES", "tests.night.chatts")  # for the processes of these tests alone
        from tests.night.chatts import Reference

        folder = tmp_path_factory.mktemp("chatts")
        reference = Reference(folder)
        ids = [reference.answer(prompt, items, TOKENS) for prompt, items in zip(PROMPTS, ITEMS, strict=True)]
        assert len(set(map(tuple, ids))) == len(ids)
        yield folder, ids


def test_same_ids_in_the_engine(expected):
    from vllm import LLM, SamplingParams

    folder, ids = expected
    with engines_in_this_process() as engines:
        llm = LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=512)
        engines.callback(llm.llm_engine.engine_core.shutdown)
        requests = [
            {"prompt": prompt, "multi_modal_data": {"timeseries": items}}
            for prompt, items in zip(PROMPTS, ITEMS, strict=True)
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        results = llm.generate(requests, sampling, use_tqdm=False)
    assert [list(result.outputs[0].token_ids) for result in results] == ids


def test_same_ids_of_requests_from_another_host(expected, tmp_path):
    """Rendered by a process that has no engine; the layouts have literals, whose masks vLLM's bytes lose."""
    from vllm import LLM, SamplingParams

    folder, ids = expected
    file = tmp_path / "requests"
    run("-c", RENDER, str(folder), str(file), MMKIT_MODULES="tests.night.chatts")
    received = [harness.received(body.encode()) for body in file.read_text().splitlines()]
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    with engines_in_this_process() as engines:
        llm = LLM(str(folder), hf_overrides={"architectures": ["SentChatTSForCausalLM"]}, **options)
        engines.callback(llm.llm_engine.engine_core.shutdown)
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        ordinary = [{"prompt": p, "multi_modal_data": {"timeseries": own}} for p, own in WITH_ITEMS]
        for requests in (received, ordinary):
            results = llm.generate(requests, sampling, use_tqdm=False)
            assert [list(result.outputs[0].token_ids) for result in results] == ids[1:]


def test_same_ids_over_http(expected, tmp_path):
    folder, ids = expected
    options = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512")
    log = tmp_path / "log"
    with Server(folder, *options, log=log) as server, Client(server.url, timeout=240) as client:
        for prompt, items, wanted in zip(PROMPTS, ITEMS, ids, strict=True):
            sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
            (choice,) = client.generate(prompt, {"timeseries": items} if items else None, **sampling).choices
            assert choice.token_ids == wanted

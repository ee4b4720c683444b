"""Outputs that stand in a text: what the engine says is legal, however it is asked, and comes over every route."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams

from examples.series.configuration import WavesConfig
from examples.series.offline import engine
from examples.server import Server
from mmkit import InputError
from mmkit.model.sampling import sampling_params
from mmkit.serve.client import Client, RequestError
from mmkit.serve.protocol import AnswerPart, Choice
from mmkit.vllm_api.errors import Refused
from tests.engine.processes import engines_in_this_process, run_engines_in_their_processes
from tests.engine.test_series import TEMPLATE
from tests.unit.common import refuses

from .outputs_in_text import BEGIN, END, MOST, SPEAKING, find_illegal_id, write_checkpoint

SERIES = [torch.sin(torch.arange(4.0 + number))[:, None] for number in range(12)]
NAMES = ("action", "step", "last")
ENGINE: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 16, "seed": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaking")
    write_checkpoint(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[Any]:
    with engines_in_this_process() as engines:
        yield engines.enter_context(engine(checkpoint, **ENGINE))


def bind(llm: Any) -> Any:
    """Return the outputs of the model."""
    return SPEAKING.bind(llm.model_config.hf_config, llm.get_tokenizer()).outputs


def get_marks(outputs: Any, name: str) -> dict[str, Any]:
    """Return the arguments of `find_illegal_id` for an output."""
    output = outputs[name]
    return {"begin": output.after, "end": output.until, "first_level": output.allowed[0].start}


def make_requests(num_requests: int) -> list[Any]:
    requests: list[Any] = []
    for number in range(num_requests):
        series = SERIES[number % len(SERIES)]
        requests.append({"prompt": "<series> is a", "multi_modal_data": {"series": series}})
    return requests


def check_parts(output: Any, ids: list[int], prompt: list[int]) -> tuple[int, int]:
    """Check that the parts of an answer are the answer; return how many whole outputs it has, and how many cut off."""
    parts = output.split_answer(ids, prompt)
    joined: list[int] = []
    for part in parts:
        assert part.start == len(joined)
        joined += part.ids
        if part.array is not None:
            assert part.array.shape[1:] == (3,)
            assert 1 <= len(part.array) <= MOST
            assert output.encode(part.array) == part.ids
    assert joined == ids
    whole = [part for part in parts if part.array is not None]
    cut_off = [part for part in parts if part.is_output and part.array is None]
    assert cut_off in ([], parts[-1:])
    return len(whole), len(cut_off)


def test_drawn_generations_are_legal(llm: Any) -> None:
    """480 answers in one run, of three outputs, greedy and sampled, beside requests for no output."""
    outputs = bind(llm)
    begin = outputs["action"].after
    params: list[Any] = []
    names: list[str] = []
    for name in NAMES:
        common: dict[str, Any] = {"max_tokens": 40, "logit_bias": {begin: 12.0}}
        greedy = sampling_params(outputs[name], llm, temperature=0.0, ignore_eos=True, **common)
        drawn = sampling_params(outputs[name], llm, temperature=1.3, n=4, seed=1, logprobs=1, stop=["saw"], **common)
        params += [greedy] * 12 + [drawn] * 37
        names += [name] * 49
    free = SamplingParams(temperature=1.3, seed=1, max_tokens=40, logit_bias={begin: 12.0})
    num_asked = len(params)
    params += [free] * 12
    results = llm.generate(make_requests(len(params)), params, use_tqdm=False)

    num_answers = num_whole = num_cut_off = 0
    for name, result in zip(names, results, strict=False):
        for completion in result.outputs:
            ids = list(completion.token_ids)
            assert find_illegal_id(ids, **get_marks(outputs, name)) is None
            whole, cut_off = check_parts(outputs[name], ids, result.prompt_token_ids)
            num_answers += 1
            num_whole += whole
            num_cut_off += cut_off
    assert num_answers == 3 * (12 + 4 * 37)
    assert num_whole > num_answers
    assert num_cut_off > 0
    num_illegal = 0
    for result in results[num_asked:]:
        ids = list(result.outputs[0].token_ids)
        num_illegal += find_illegal_id(ids, **get_marks(outputs, "action")) is not None
    assert num_illegal > 8


def test_an_answer_goes_on_where_its_prompt_ends(llm: Any) -> None:
    outputs = bind(llm)
    action = outputs["action"]
    begun = [action.after, action.allowed[0].start + 5]
    request = make_requests(1)[0]
    (rendered,) = llm.generate([request], SamplingParams(max_tokens=1), use_tqdm=False)
    request = {"prompt_token_ids": rendered.prompt_token_ids + begun, "multi_modal_data": request["multi_modal_data"]}
    params = sampling_params(action, llm, temperature=0.0, stop_token_ids=[action.until])
    (result,) = llm.generate([request], params, use_tqdm=False)
    ids = list(result.outputs[0].token_ids)
    assert find_illegal_id(begun + ids, **get_marks(outputs, "action")) is None
    assert ids[-1] == action.until
    (part,) = action.split_answer(ids, result.prompt_token_ids)
    assert part.start == -2
    assert part.ids == begun + ids
    assert part.array[0, 0] == 5


def test_preempted_requests_go_on(llm: Any, checkpoint: Path) -> None:
    outputs = bind(llm)
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 90, "ignore_eos": True}
    params = sampling_params(outputs["action"], llm, logit_bias={outputs["action"].after: 12.0}, **common)
    requests = make_requests(8)
    answers = [list(result.outputs[0].token_ids) for result in llm.generate(requests, params, use_tqdm=False)]
    options = {**ENGINE, "block_size": 32, "num_gpu_blocks_override": 9, "enable_prefix_caching": False}
    with engine(checkpoint, disable_log_stats=False, **options) as small:
        results = small.generate(requests, params, use_tqdm=False)
        assert [list(result.outputs[0].token_ids) for result in results] == answers
        counts = [metric.value for metric in small.get_metrics() if metric.name == "vllm:num_preemptions"]
        assert counts[0] > 0
    for ids in answers:
        assert find_illegal_id(ids, **get_marks(outputs, "action")) is None


def test_with_drafts_such_an_output_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_engines_in_their_processes(monkeypatch, "tests.night.outputs_in_text")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    sentence = "speaking.outputs.action: expected an engine that confines each position, got one that makes no …"
    with engine(checkpoint, speculative_config=drafts, **ENGINE) as llm:
        action = bind(llm)["action"]
        with refuses(InputError, sentence):
            sampling_params(action, llm, temperature=0.0)
        params = SamplingParams(temperature=0.0, extra_args={"mmkit_output": "action"})
        with refuses(Refused, sentence):
            llm.generate(make_requests(1), params, use_tqdm=False)
        # an output that is the whole answer is refused as before: its positions have different ids
        with refuses(InputError, sentence.replace("action", "whole")):
            sampling_params(bind(llm)["whole"], llm)


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = "--dtype float32 --max-model-len 128 --served-model-name speaking --enforce-eager"
    log = tmp_path_factory.mktemp("log") / "log"
    environment = {"MMKIT_MODULES": "tests.night.outputs_in_text"}
    with Server(checkpoint, *options.split(), environment=environment, log=log) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def make_options(outputs: Any) -> dict[str, Any]:
    bias = {str(outputs["action"].after): 12.0}
    return {"max_tokens": 40, "temperature": 1.0, "seed": 3, "n": 2, "logit_bias": bias}


def test_own_routes_return_texts_and_arrays(client: Client, llm: Any) -> None:
    outputs = bind(llm)
    action = outputs["action"]
    tokenizer = llm.get_tokenizer()
    options = make_options(outputs)
    answer = client.generate("<series> is a", {"series": [SERIES[0]]}, output="action", **options)
    num_whole = 0
    for choice in answer.choices:
        parts = action.split_answer(choice.token_ids)
        assert choice.parts is not None
        assert len(choice.parts) == len(parts)
        for received, part in zip(choice.parts, parts, strict=True):
            assert received.start == part.start
            assert received.length == len(part.ids)
            if not part.is_output:
                assert received.type == "text"
                assert (received.text or "").split() == tokenizer.decode(part.ids, skip_special_tokens=True).split()
            elif part.array is not None:
                assert received.output is not None
                assert np.array_equal(received.output, part.array)
                num_whole += 1
    assert num_whole > 0


@dataclass
class StreamedAnswer:
    """One of the answers of a stream, put together from its events.

    Attributes:
        ids: its ids.
        text: its text.
        starts: where its outputs begin, by the events in which they do.
        whole: its outputs that are whole.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    starts: list[int] = field(default_factory=list)
    whole: list[AnswerPart] = field(default_factory=list)

    def add(self, choice: Choice, after: int) -> None:
        """Add what an event has of this answer.

        Raises:
            AssertionError: an output begins in it that is not among its ids.
        """
        num_before = len(self.ids)
        self.ids += choice.token_ids
        self.text += choice.text or ""
        for part in choice.parts or ():
            assert part.type == "output"
            if part.output is not None:
                self.whole.append(part)
            # an output that begins and ends in one event comes once, whole
            if part.start not in self.starts:
                assert part.start >= num_before
                assert self.ids[part.start] == after
                self.starts.append(part.start)


def draw_sampling(rng: random.Random, after: int) -> dict[str, Any]:
    """Draw the options of a request for one to three answers; few, some or many outputs are in them."""
    options: dict[str, Any] = {
        "n": rng.randint(1, 3),
        "seed": rng.randrange(1000),
        "temperature": rng.choice([0.7, 1.3]),
        "max_tokens": rng.randint(1, 40),
        "logit_bias": {str(after): rng.choice([-100.0, 4.0, 12.0, 12.0])},
    }
    if rng.random() < 0.3:
        # the most likely id alone: vLLM takes no second answer at temperature 0
        options["top_k"] = 1
    return options


def test_drawn_generations_that_are_streamed_are_legal(client: Client, checkpoint: Path) -> None:
    """400 answers, up to three in a stream: put together they are those of the same request without a stream."""
    config, tokenizer = WavesConfig.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    outputs = SPEAKING.bind(config, tokenizer).outputs
    rng = random.Random(0)
    counts = Counter[str]()
    while counts["answers"] < 400:
        output = outputs[rng.choice(NAMES)]
        items = {"series": [rng.choice(SERIES)]}
        options = draw_sampling(rng, output.after)
        answer = client.generate("<series> is a", items, output=output.name, **options)
        streamed = [StreamedAnswer() for _ in range(options["n"])]
        for event in client.stream("<series> is a", items, output=output.name, **options):
            for choice in event.choices:
                streamed[choice.index].add(choice, output.after)
        for choice in answer.choices:
            check_streamed_answer(streamed[choice.index], choice)
            assert find_illegal_id(choice.token_ids, **get_marks(outputs, output.name)) is None
            num_whole, num_cut_off = check_parts(output, choice.token_ids, [])
            counts["answers"] += 1
            counts["in streams of several"] += options["n"] > 1
            counts["whole outputs"] += num_whole
            counts["cut off"] += num_cut_off
            counts["without output"] += num_whole + num_cut_off == 0
    print(dict(counts))
    assert counts["in streams of several"] > 200
    assert counts["whole outputs"] > 400
    assert counts["cut off"] > 40
    assert counts["without output"] > 40


def check_streamed_answer(streamed: StreamedAnswer, choice: Choice) -> None:
    """Compare an answer that was streamed with the same one as a whole."""
    assert streamed.ids == choice.token_ids
    assert streamed.text == (choice.text or "")
    parts = [part for part in choice.parts or () if part.type == "output"]
    assert streamed.starts == [part.start for part in parts]
    whole = [part for part in parts if part.output is not None]
    assert [part.start for part in streamed.whole] == [part.start for part in whole]
    assert [part.length for part in streamed.whole] == [part.length for part in whole]
    for received, part in zip(streamed.whole, whole, strict=True):
        assert received.output is not None
        assert part.output is not None
        assert np.array_equal(received.output, part.output)


def test_sessions_have_parts_too(client: Client, llm: Any) -> None:
    """An output that a chunk leaves open goes on in the next one."""
    outputs = bind(llm)
    bias = {str(outputs["action"].after): 12.0}
    options: dict[str, Any] = {"max_tokens": 7, "temperature": 0.0, "logit_bias": bias, "output": "action"}
    for more in ({}, {"on_tokens": str}):
        with client.session("<series> is a", {"series": [SERIES[0]]}, **options, **more) as session:
            first = session.first
            second = session.next()
        ids = first.token_ids + second.token_ids
        assert find_illegal_id(ids, **get_marks(outputs, "action")) is None
        expected = [part for part in outputs["action"].split_answer(ids) if part.array is not None]
        received = []
        for chunk in (first, second):
            received += [part.output.tolist() for part in chunk.parts or () if part.output is not None]
        assert received == [part.array.tolist() for part in expected]


def test_the_description_has_the_marks(client: Client, llm: Any) -> None:
    outputs = bind(llm)
    by_name = {info.name: info for info in client.modalities().outputs}
    action = by_name["action"]
    assert (action.after, action.until) == (outputs["action"].after, outputs["action"].until)
    assert (action.most, action.tokens, action.shape) == (MOST, 3 * MOST + 2, [1, 3])
    assert (by_name["step"].until, by_name["step"].most, by_name["step"].tokens) == (None, None, 4)
    assert (by_name["whole"].after, by_name["whole"].tokens) == (None, 3)


def ask(server: Server, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": [{"type": "text", "text": "is a"}]}]
    body = {"model": "speaking", "messages": messages, "max_tokens": 20, **body}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def test_the_routes_of_vllm(server: Server, llm: Any) -> None:
    outputs = bind(llm)
    options: dict[str, Any] = make_options(outputs) | {"vllm_xargs": {"mmkit_output": "action"}}
    response = ask(server, return_token_ids=True, skip_special_tokens=False, **options)
    assert response.status_code == 200
    for choice in response.json()["choices"]:
        ids = choice["token_ids"]
        assert find_illegal_id(ids, **get_marks(outputs, "action")) is None
        assert choice["message"]["content"].count(BEGIN) >= choice["message"]["content"].count(END)


@pytest.mark.parametrize(
    ("sentence", "body"),
    [
        (
            "speaking.structured_outputs: expected none beside output 'action', got some.",
            {"response_format": {"type": "json_object"}, "vllm_xargs": {"mmkit_output": "action"}},
        ),
        (
            "speaking.structured_outputs: expected none beside output 'whole', got some.",
            {"response_format": {"type": "json_object"}, "vllm_xargs": {"mmkit_output": "whole"}},
        ),
        (
            "speaking.min_tokens: expected none beside output 'action', got some.",
            {"min_tokens": 3, "vllm_xargs": {"mmkit_output": "action"}},
        ),
        (
            "speaking.mmkit_output: expected one of action, step, last, whole, got 'film'.",
            {"vllm_xargs": {"mmkit_output": "film"}},
        ),
    ],
)
def test_requests_that_no_output_can_answer(server: Server, sentence: str, body: dict[str, Any]) -> None:
    response = ask(server, **body)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


def test_own_routes_refuse_what_contradicts_an_output(client: Client) -> None:
    with refuses(RequestError, "min_tokens: expected none beside output 'action', got some."):
        client.generate("is a", output="action", max_tokens=5, min_tokens=2)

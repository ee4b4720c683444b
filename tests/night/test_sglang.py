"""SGLang, in an environment of its own, serves the specs that vLLM serves here.

`make sglang` makes the environment; MMKIT_SGLANG names another one. Without it these tests are skipped.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, Qwen2VLForConditionalGeneration
from vllm import SamplingParams

from examples.gallery.qwen2_vl import QWEN2_VL
from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import engine as llava_engine
from examples.llava_like.spec import LLAVA_LIKE
from examples.series import CHECKPOINT
from examples.series.offline import engine as series_engine
from examples.series.spec import WAVES
from examples.series.waves import PROMPT, make_wave
from examples.server import Server
from mmkit.errors import MmkitError
from mmkit.model.mrope import get_mrope_input_positions
from mmkit.plan.plan import Plan
from mmkit.sglang_api import make_item_url
from mmkit.testing.vllm_path import Outcome, run
from mmkit.vllm_api.checkpoint_processors import load_config_for_spec, make_processor
from tests import ROOT

from .sglang.cases import MAKERS, Case
from .sglang.notes import NOTES
from .sglang.process import digest
from .test_models import write_model

PYTHON = Path(os.environ.get("MMKIT_SGLANG") or Path(sys.prefix, "sglang"), "bin", "python")
"""That of the environment with SGLang."""

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with SGLang: make sglang"),
]

SPECS = {"series": WAVES, "llava_like": LLAVA_LIKE, "notes": NOTES, "qwen2_vl": QWEN2_VL}

VARIABLES = {
    "MMKIT_MODULES": "tests.night.sglang.sglang_models",
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
}
OPTIONS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--dtype", "float32"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "4096", "--max-running-requests", "4"),
    *("--host", "127.0.0.1", "--log-level", "warning"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints of the models, by name."""
    folders = {"series": CHECKPOINT, "qwen2_vl": tmp_path_factory.mktemp("qwen2_vl")}
    # with this seed, <|video_pad|> is the likeliest id in the answer to one of the requests
    write_model(folders["qwen2_vl"], "qwen2_vl", Qwen2VLForConditionalGeneration, seed=1)
    folders["llava_like"] = make_checkpoint(tmp_path_factory.mktemp("llava_like"))
    for name, architecture in (("notes", "NotesForCausalLM"), ("faulty", "FaultyForCausalLM")):
        folders[name] = copy_checkpoint(tmp_path_factory.mktemp(name), architecture)
    return folders


def copy_checkpoint(folder: Path, architecture: str) -> Path:
    """Return a folder with the weights of examples/series for another class."""
    for file in CHECKPOINT.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- requests, processed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_ids_runs_and_fields_are_those_of_vllm(name: str, folders: dict[str, Path]):
    """And so are M-RoPE positions, and the sentences of refusals."""
    described = process_in_sglang(name, folders[name])
    processor = make_processor(SPECS[name].classes, load_config_for_spec(folders[name]))
    cases = MAKERS[name](AutoTokenizer.from_pretrained(folders[name]), NUM_CASES)
    num_refused = 0
    known_by: dict[str, set[str]] = {}
    for case, description in zip(cases, described, strict=True):
        try:
            expected = describe_outcome(run(processor, case.prompt, case.data), processor.pipeline.plan)
        except MmkitError as error:
            num_refused += 1
            expected = {"error": str(error)}
        for item in description.get("items", ()):
            values = item.pop("values")
            known_by.setdefault(str(values), set()).add(str(item["fields"]))
        if name == "qwen2_vl":
            for item in [*description["items"], *expected["items"]]:
                del item["fields"]["pixel_values"]  # vLLM normalises them on the device, as integers
        assert description == expected
    assert num_refused == NUM_REFUSED[name]
    # items of other fields have other values in SGLang's caches
    assert all(len(fields) == 1 for fields in known_by.values())
    assert len(known_by) == len(set.union(*known_by.values()))


NUM_CASES = 50
NUM_REFUSED = {"series": 3, "llava_like": 0, "notes": 6, "qwen2_vl": 0}


def process_in_sglang(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return what the program tests/night/sglang/process.py prints."""
    command = [PYTHON, "-m", "tests.night.sglang.process", name, folder, str(NUM_CASES)]
    process = subprocess.run(command, cwd=ROOT, env=os.environ | VARIABLES, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-5000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


def describe_outcome(outcome: Outcome, plan: Plan) -> dict[str, Any]:
    """Return a request of vLLM's path in the form of tests/night/sglang/process.py."""
    items = []
    for name, ranges in outcome.ranges.items():
        for index, place in enumerate(ranges):
            runs = find_runs(place.mask, place.offset)
            fields = {key: digest(value) for key, value in outcome.values(name, index).items()}
            items.append({"modality": name, "runs": runs, "fields": fields})
    items.sort(key=lambda item: item["runs"])
    description = {"ids": list(outcome.ids), "items": items}
    if any(modality.grid for modality in plan.modalities.values()):
        features = [feature for features in outcome.features.values() for feature in features]
        model: Any = SimpleNamespace(mm_plan=plan)
        positions, delta = get_mrope_input_positions(model, outcome.ids, features)
        description["positions"] = [positions.tolist(), delta]
    return description


def find_runs(mask: tuple[bool, ...], offset: int) -> list[list[int]]:
    """Return the first and the last position of each run that receives encoder rows."""
    runs = []
    position = offset
    for is_embed, group in groupby(mask):
        length = len(list(group))
        if is_embed:
            runs.append([position, position + length - 1])
        position += length
    return runs


# -- servers -----------------------------------------------------------------------------------------------------------


class SglangServer(Server):
    """``sglang.launch_server`` with the models of tests/night/sglang/sglang_models.py."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        super().__init__(folder, environment=VARIABLES, log=log, start_seconds=900)
        self.log = log
        self._command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(folder)]
        self._command += [*OPTIONS, "--port", str(self.port), *options]

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300)

    def generate(self, case: Case, **options: Any) -> httpx.Response:
        """Send a request whose answer has five ids, the likeliest ones."""
        body: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}}
        body["text" if isinstance(case.prompt, str) else "input_ids"] = case.prompt
        urls = []
        for name, items in case.data.items():
            urls += [make_item_url(name, item) for item in items]
        if urls:
            body["audio_data"] = urls
        return self.post("/generate", body | options)


@pytest.fixture(scope="module")
def waves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with SglangServer(CHECKPOINT, tmp_path_factory.mktemp("log") / "log") as server:
        yield server


def answer_in_vllm(llm: Any, cases: list[Case], masked_ids: Sequence[int] = ()) -> list[list[int]]:
    """Return the five likeliest ids after each prompt, of those that are not masked."""
    requests = []
    for case in cases:
        key = "prompt" if isinstance(case.prompt, str) else "prompt_token_ids"
        requests.append({key: case.prompt, "multi_modal_data": case.data})
    bias = dict.fromkeys(masked_ids, -100.0)
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logit_bias=bias or None)
    return [list(result.outputs[0].token_ids) for result in llm.generate(requests, sampling, use_tqdm=False)]


def make_good_cases(name: str, folder: Path, count: int) -> list[Case]:
    """Return requests that are served."""
    good = []
    for number, case in enumerate(MAKERS[name](AutoTokenizer.from_pretrained(folder), count)):
        if number not in REFUSED_NUMBERS[name]:
            good.append(case)
    return good


REFUSED_NUMBERS = {"series": {30, 31, 34}, "llava_like": set(), "notes": set(range(7, 200, 8)), "qwen2_vl": set()}
AnswersOfVllm: TypeAlias = Callable[[str], list[list[int]]]
STARTS: dict[str, Any] = {
    "series": series_engine,
    "notes": series_engine,
    "llava_like": partial(llava_engine, max_model_len=512),
    "qwen2_vl": partial(llava_engine, max_model_len=1024, use_vllm_class=True),
}
"""What starts vLLM for each model."""


@pytest.fixture(scope="module")
def answers_of_vllm(engines: ExitStack, folders: dict[str, Path]) -> AnswersOfVllm:
    """A function that returns the answers of vLLM for a model, and starts vLLM once for each."""
    from .sglang import vllm_model  # noqa: F401 (registers it)

    @cache
    def answer(name: str) -> list[list[int]]:
        cases = make_good_cases(name, folders[name], NUM_ANSWERED[name])
        llm = engines.enter_context(STARTS[name](folders[name], enforce_eager=True))
        masked_ids: list[int] = []
        if name == "qwen2_vl":  # vLLM's class does not mask placeholders; mmkit does, in SGLang too
            config = AutoConfig.from_pretrained(folders[name])
            masked_ids = [config.image_token_id, config.video_token_id]
        return answer_in_vllm(llm, cases, masked_ids)

    return answer


NUM_ANSWERED = {"series": 100, "llava_like": 50, "notes": 57, "qwen2_vl": 50}
"""Requests, with the refused ones."""


def check_answers(server: SglangServer, cases: list[Case], expected: list[list[int]]) -> None:
    """Compare the answers of a server with those of vLLM, several requests at a time."""
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(server.generate, cases))
    for answer, ids in zip(answers, expected, strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.json()["output_ids"] == ids


MALFORMED = [
    (
        Case(PROMPT, {"series": [np.zeros((65, 1), np.float32)]}),
        "waves.series[0]: expected a (1..64, 1) float32 tensor",
    ),
    (Case(PROMPT, {"series": [np.full((3, 1), np.nan, np.float32)]}), "waves.series[0]: expected finite values"),
    (
        Case("is a", {"series": [np.ones((3, 1), np.float32)]}),
        "waves.series: expected 1 target '<series>' in",
    ),
    (Case(PROMPT, {}), "waves.series: expected one item per target, got the target '<series>' without its item."),
    (Case("<patch> is a", {}), "waves.series: expected one item per placeholder, got 1 placeholder '<patch>' and no"),
    (Case([5, 99], {}), "waves.prompt[1]: expected a token id from 0 to 22, got 99."),
]


def test_a_hundred_requests_and_refusals_among_them(waves: SglangServer, answers_of_vllm: AnswersOfVllm):
    """Refusals are answered 400, with the sentence of mmkit, and others have the answers of vLLM meanwhile."""
    cases = make_good_cases("series", CHECKPOINT, NUM_ANSWERED["series"])
    expected = answers_of_vllm("series")
    check_answers(waves, cases, expected)
    for number in range(100):
        if number % 4:
            answer = waves.generate(cases[number % len(cases)])
            assert answer.status_code == 200
            assert answer.json()["output_ids"] == expected[number % len(cases)]
        else:
            case, sentence = MALFORMED[number // 4 % len(MALFORMED)]
            answer = waves.generate(case)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(sentence)


@pytest.mark.parametrize("name", ["llava_like", "notes", "qwen2_vl"])
def test_answers_are_those_of_vllm(name: str, answers_of_vllm: AnswersOfVllm, folders: dict[str, Path], tmp_path: Path):
    cases = make_good_cases(name, folders[name], NUM_ANSWERED[name])
    expected = answers_of_vllm(name)
    assert len(cases) == 50
    # the parts of a record, and the positions of a picture, are cut by chunks of four tokens
    options = ["--chunked-prefill-size", "4"] if name in ("notes", "qwen2_vl") else []
    if name == "qwen2_vl":  # SGLang's first request would be a chat, and the tokenizer has no template
        options.append("--skip-server-warmup")
    with SglangServer(folders[name], tmp_path / "log", *options) as server:
        check_answers(server, cases, expected)
        if name == "llava_like":
            check_embeddings(server)


def check_embeddings(server: SglangServer) -> None:
    """Rows that a caller sends stand beside pictures, in other requests of the same batch and in none of their own."""
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    embedding = Case("<image> what", {"image": [{"image_embeds": rows}]})
    picture = Case("<image> what", {"image": [draw_picture(3)]})
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(server.generate, [embedding, picture] * 4))
    ids = [answer.json()["output_ids"] for answer in answers]
    assert ids == ids[:2] * 4
    assert ids[0] != ids[1]
    other = Case("<image> what", {"image": [{"image_embeds": -rows}]})
    assert server.generate(other).json()["output_ids"] != ids[0]
    short = Case("<image> what", {"image": [{"image_embeds": rows[:15]}]})
    assert (
        server.generate(short)
        .json()["error"]["message"]
        .startswith("llava_like.image[0]: expected 16 embedding row(s)")
    )


def test_no_placeholder_is_sampled_and_log_probabilities_leave_it_out(waves: SglangServer):
    """On vLLM reported log probabilities are the model's, placeholders included."""
    case = Case(PROMPT, {"series": [make_wave(2000).series]})
    sampling = {"temperature": 100.0, "max_new_tokens": 80, "ignore_eos": True}
    answer = waves.generate(case, sampling_params=sampling, return_logprob=True, token_ids_logprob=[PLACEHOLDER]).json()
    assert PLACEHOLDER not in answer["output_ids"]
    for ((log_probability, token, _),) in answer["meta_info"]["output_token_ids_logprobs"]:
        assert token == PLACEHOLDER
        assert log_probability < -1e30


PLACEHOLDER = 4
"""The id of ``<patch>``."""


# -- what vLLM's room has, and this one has not ------------------------------------------------------------------------


def test_an_item_is_known_by_its_content_alone(waves: SglangServer):
    """There is no `uuid` that names an item, and hashes that a caller makes are refused."""
    answer = waves.generate(Case(PROMPT, {"series": [np.ones((3, 1), np.float32)]}), mm_hashes=["ab"])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("waves.mm_hashes: expected no hashes of items")


def test_there_are_no_routes_of_mmkit(waves: SglangServer):
    assert waves.post("/v1/mm/generate", {"prompt": PROMPT}).status_code == 404


def test_a_chat_has_no_parts_of_a_new_modality(waves: SglangServer):
    content = [{"type": "series", "series": [[0.1]]}, {"type": "text", "text": "is a"}]
    body = {"model": "waves", "messages": [{"role": "user", "content": content}], "max_tokens": 5}
    assert waves.post("/v1/chat/completions", body).status_code == 400


def test_usage_counts_the_rows_of_items_as_tokens_of_audio(waves: SglangServer):
    answer = waves.generate(Case(PROMPT, {"series": [np.ones((8, 1), np.float32)]})).json()
    assert answer["meta_info"]["audio_tokens"] == 2


def test_a_wrong_encoder_is_no_error_at_the_start(folders: dict[str, Path], tmp_path: Path):
    """SGLang runs no largest item when it starts. Its rows become zeros, as they do on vLLM later on.

    It does not say either that a checkpoint lacks a weight.
    """
    weights = folders["faulty"] / "model.safetensors"
    tensors = load_file(weights)
    del tensors["encoder.up.bias"]
    save_file(tensors, weights, {"format": "pt"})
    values = np.arange(64, dtype=np.float32)[:, None]
    with SglangServer(folders["faulty"], tmp_path / "log") as server:
        too_many, not_finite, sound = (
            server.generate(Case(PROMPT, {"series": [values[:length]]})).json() for length in (64, 63, 62)
        )
        again = server.generate(Case(PROMPT, {"series": [values[:62] ** 2]}))
    # both have 16 rows of zeros
    assert too_many["output_ids"] == not_finite["output_ids"]
    assert len(sound["output_ids"]) == 5
    assert again.status_code == 200
    # the line about the other item would follow after a minute, with further ones
    assert "expected 16 encoder rows, got 17" in server.log.read_text()

"""Files as people have them, over every route: what was recorded is what the model gets, or one sentence says why not.

A file goes through `LLM.generate`, `LLM.chat`, vLLM's chat over HTTP, `/v1/mm/generate`, the client and the processor
of training. MMKIT_DECODER=torchcodec lets the server of sounds decode by torchcodec, where it is installed.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor, AutoTokenizer
from vllm import SamplingParams
from vllm.multimodal.media import MediaConnector

from examples.llava_like import ARCHITECTURE
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import engine
from examples.llava_like.spec import LLAVA_LIKE
from examples.server import Server
from mmkit import InputError
from mmkit.cli.new import new
from mmkit.serve import Client, RequestError
from tests.engine.processes import run_python

from . import files
from .files import REFUSED, File
from .test_commands import install_package

pytestmark = pytest.mark.timeout(900)

TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
SERVED = ("--dtype", "float32", "--enforce-eager", "--served-model-name", "m", "--max-num-seqs", "4")
IN_ITS_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

Answer = tuple[int, ...] | str
"""The length of the prompt and the ids of the answer, or the sentence that refuses."""


def data_url(file: File) -> str:
    return f"data:{file.mime};base64,{base64.b64encode(file.data).decode()}"


@dataclass
class Routes:
    """All routes to one model.

    Attributes:
        modality: of the files.
        llm: an engine of this process.
        server: of the same checkpoint.
        processor: of training.
        prompt: a text with one target.
        question: the text of a chat message with one item that becomes that prompt.
    """

    modality: str
    llm: Any
    server: Server
    processor: Any
    prompt: str
    question: str

    def answers(self, file: File, value: Any) -> dict[str, Answer]:
        """Return what comes of a file on each route.

        Args:
            file: as it is sent.
            value: as its reader gives it; None where no reader takes it.
        """
        kind = f"{self.modality}_url"
        part = {"type": kind, kind: {"url": data_url(file)}}
        answers = {
            "LLM.chat": self._chat(part),
            "HTTP chat": self._http_chat(part),
            "/v1/mm/generate": self._http_generate({kind: {"url": data_url(file)}}),
        }
        if self.modality == "audio":
            data = base64.b64encode(file.data).decode()
            answers["input_audio"] = self._http_chat(
                {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
            )
        if value is not None:
            answers["LLM.generate"] = self._generate(value)
            if self._has_wire_form(value):
                answers["client"] = self._client(value)
        return answers

    def _has_wire_form(self, value: Any) -> bool:
        return not isinstance(value, tuple)  # samples with their rate

    def _generate(self, value: Any) -> Answer:
        request = {"prompt": self.prompt, "multi_modal_data": {self.modality: [value]}}
        try:
            (result,) = self.llm.generate([request], GREEDY, use_tqdm=False)
        except ValueError as error:
            return str(error)
        return len(result.prompt_token_ids), *result.outputs[0].token_ids

    def _chat(self, part: dict[str, Any]) -> Answer:
        content = [part, {"type": "text", "text": self.question}]
        try:
            (result,) = self.llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        except ValueError as error:
            return str(error)
        return len(result.prompt_token_ids), *result.outputs[0].token_ids

    def _http_chat(self, part: dict[str, Any]) -> Answer:
        content = [part, {"type": "text", "text": self.question}]
        body = {"messages": [{"role": "user", "content": content}], "return_token_ids": True}
        body |= {"model": "m", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        return self._post("/v1/chat/completions", body)

    def _http_generate(self, item: dict[str, Any]) -> Answer:
        options = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        body = {"prompt": self.prompt, "items": {self.modality: [item]}, "sampling_params": options}
        return self._post("/v1/mm/generate", body)

    def _post(self, path: str, body: dict[str, Any]) -> Answer:
        response = httpx.post(self.server.url + path, json=body, timeout=120)
        answer = response.json()
        if response.status_code == 400:
            return str(answer["error"]["message"])
        assert response.status_code == 200, response.text
        return answer["usage"]["prompt_tokens"], *answer["choices"][0]["token_ids"]

    def _client(self, value: Any) -> Answer:
        options = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        with Client(self.server.url) as client:
            try:
                answer = client.generate(self.prompt, {self.modality: [value]}, **options)
            except (RequestError, InputError) as error:
                return str(error)
        assert answer.usage is not None
        return answer.usage.prompt_tokens, *answer.choices[0].token_ids

    def render(self, value: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Return the ids and the fields that the engine gets of a prompt with an item."""
        request = {"prompt": self.prompt, "multi_modal_data": {self.modality: [value]}}
        (result,) = self.llm.llm_engine.renderer.render_cmpl([request], skip_mm_cache=True)
        (item,) = result["mm_kwargs"][self.modality]
        return result["prompt_token_ids"], {name: field.data for name, field in item.items()}

    def prepare_for_training(self, value: Any) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Return the ids and the fields of the processor of training."""
        batch = self.processor(self.prompt, **{self.modality: [value]})
        fields = {name: batch[name] for name in self.processor.plan.modalities[self.modality].fields}
        return batch["input_ids"][0].tolist(), fields


def assert_equal(trained: torch.Tensor, served: torch.Tensor, processor: Any, name: str) -> None:
    """Check that training and serving have one field, which the model may be left to normalise when it serves."""
    trained = trained.reshape(served.shape)
    if served.dtype == torch.uint8 and trained.is_floating_point():
        of_videos = processor.hf_processor.video_processor
        mean, deviation = (torch.tensor(values)[:, None] for values in (of_videos.image_mean, of_videos.image_std))
        by_channel = served.unflatten(-1, (len(mean), -1)) / 255
        served = ((by_channel - mean) / deviation).reshape(trained.shape)
        assert torch.allclose(trained, served, atol=1e-4), name
    else:
        assert torch.equal(trained, served), name


def check_file(routes: Routes, file: File, value: Any) -> Answer:
    """Check that all routes agree on a file, and that training agrees with them. Returns the answer, or a refusal."""
    answers = routes.answers(file, value)
    refusals = {route: answer for route, answer in answers.items() if isinstance(answer, str)}
    for route, sentence in refusals.items():
        assert sentence.strip(), route
        assert "Traceback" not in sentence, (route, sentence)
        assert len(sentence) < 400, (route, sentence)
    if refusals:
        assert refusals.keys() == answers.keys(), (file.name, answers)
        assert file.expected is None or isinstance(file.expected, str), (file.name, refusals)
        if value is not None:
            with pytest.raises(InputError):
                routes.prepare_for_training(value)
        return next(iter(refusals.values()))
    assert not isinstance(file.expected, str), (file.name, answers)
    assert len(set(answers.values())) == 1, (file.name, answers)
    if value is not None:
        ids, fields = routes.render(value)
        training_ids, training_fields = routes.prepare_for_training(value)
        assert ids == training_ids
        for name in training_fields:
            assert_equal(training_fields[name], fields[name], routes.processor, f"{file.name}: {name}")
    return next(iter(answers.values()))


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(engines: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routes]:
    folder = tmp_path_factory.mktemp("pictures")
    checkpoint = make_checkpoint(folder / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    llm = engines.enter_context(engine(checkpoint, seed=0, enforce_eager=True))
    hf_processor = AutoProcessor.from_pretrained(checkpoint)
    processor = LLAVA_LIKE.hf_processor(AutoConfig.from_pretrained(checkpoint), tokenizer, processor=hf_processor)
    overrides = json.dumps({"architectures": [ARCHITECTURE]})
    options = (*SERVED, "--block-size", "32", "--hf-overrides", overrides)
    with Server(checkpoint, *options, environment=IN_ITS_PROCESSES, log=folder / "log") as server:
        prompt = "USER: <image>\nWhat is this?\nASSISTANT:"
        yield Routes("image", llm, server, processor, prompt, "What is this?")


def read_picture(file: File) -> Any:
    try:
        return Image.open(io.BytesIO(file.data))
    except OSError:
        return None


def test_pictures(pictures: Routes) -> None:
    """Upright, in RGB, on white; with what nobody can see refused."""
    all_files = files.pictures()
    assert len(all_files) >= 60
    refused = 0
    for file in all_files:
        answer = check_file(pictures, file, read_picture(file))
        if isinstance(answer, str):
            refused += 1
        elif isinstance(file.expected, np.ndarray):
            converted = pictures.processor.plan.modalities["image"].item.convert(read_picture(file), "image")
            difference = np.abs(np.asarray(converted).astype(float) - file.expected)
            assert difference.max() <= 1, file.name
    assert refused >= 10


# -- sounds ------------------------------------------------------------------------------------------------------------

COUNT = 20
"""Clips that a model is asked about."""

HIDE = """
from importlib.machinery import PathFinder

find_any = PathFinder.find_spec


def find_spec(name, path=None, target=None):
    if name.partition(".")[0] in {hidden!r}:
        return None
    return find_any(name, path, target)


PathFinder.find_spec = staticmethod(find_spec)
"""


def without(*hidden: str, folder: Path) -> str:
    """Return a folder for PYTHONPATH that hides libraries from the processes that have it."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    return str(folder)


@dataclass
class Ear:
    """A package for sounds as `mmkit new` writes it, trained."""

    folder: Path
    checkpoint: Path
    environment: dict[str, str]

    def server(self, *hidden: str) -> Server:
        """Return a server that cannot import some libraries."""
        name = "_".join(("without", *hidden))
        places = (without(*hidden, folder=self.folder / name), self.environment["PYTHONPATH"])
        environment = {**IN_ITS_PROCESSES, **self.environment, "PYTHONPATH": os.pathsep.join(places)}
        return Server(self.checkpoint, *SERVED, environment=environment, log=self.folder / f"{name}.log")


@pytest.fixture(scope="module")
def ear(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ear]:
    folder = new("ear", ["audio"], tmp_path_factory.mktemp("ear"))
    environment = install_package(folder, folder / "site")
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    run_python("-m", "ear.train", "checkpoint", cwd=folder, **environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "site"))
        patch.setenv("PYTHONPATH", environment["PYTHONPATH"])
        import ear

        ear.register()
        yield Ear(folder, folder / "checkpoint", environment)


@pytest.fixture(scope="module")
def sounds(ear: Ear, engines: ExitStack) -> Iterator[Routes]:
    from ear.data import QUESTION
    from ear.spec import EAR

    tokenizer = AutoTokenizer.from_pretrained(ear.checkpoint)
    processor = EAR.hf_processor(AutoConfig.from_pretrained(ear.checkpoint), tokenizer)
    llm = engines.enter_context(
        engine(ear.checkpoint, use_vllm_class=True, enable_mm_embeds=False, enforce_eager=True, seed=0)
    )
    with ear.server(*HIDDEN) as server:
        yield Routes("audio", llm, server, processor, f"user: <audio>{QUESTION}\nassistant: ", QUESTION)


DECODER = os.environ.get("MMKIT_DECODER", "soundfile")
"""Of the server that answers: soundfile, or torchcodec where it is installed."""
HIDDEN = {"soundfile": ("torchcodec",), "torchcodec": ("soundfile",)}[DECODER]


def is_refused(coding: str) -> bool:
    """Return whether the decoder of the server takes no files of a coding."""
    return DECODER == "torchcodec" and coding.startswith("RIFX")


def read_sound(file: File) -> Any:
    try:
        samples, rate = soundfile.read(io.BytesIO(file.data), dtype="float32", always_2d=True)
    except RuntimeError:
        return None
    return samples.mean(axis=1), rate


def test_sounds(sounds: Routes) -> None:
    """Scaled to -1..1, and mono, in every coding."""
    from ear.data import sample

    samples, _ = sample(7)
    samples = np.clip(samples, -1, 1)[:4000]
    all_files = files.special_sounds(samples)
    for name in filter(files.available, files.CODINGS):
        file = files.sound(name, samples)
        all_files.append(file._replace(expected=None) if is_refused(name) else file)
    assert len(all_files) >= 30
    refused = []
    for file in all_files:
        value = None if is_refused(file.name) else read_sound(file)
        if isinstance(check_file(sounds, file, value), str):
            refused.append(file.name)
    assert set(refused) >= {"no sample", "cut in its header", "cut FLAC", "an empty sound", "a text as a sound"}


@pytest.mark.parametrize("name", files.CODINGS)
def test_every_coding_of_clips_has_the_right_answers(sounds: Routes, name: str) -> None:
    """Those that the same clips as numbers have."""
    from ear.data import FIRST_TRAINING_SEED, sample

    if not files.available(name):
        pytest.skip(f"libsndfile does not write {name} here")
    if is_refused(name):
        pytest.skip("FFmpeg makes noise of it, so it is refused")

    def is_right(seed: int) -> bool:
        samples, answer = sample(seed)
        samples = samples[:7575]  # whole blocks of ADPCM, of 505; 8000 are the most
        part = {"type": "audio_url", "audio_url": {"url": data_url(files.sound(name, samples))}}
        content = [part, {"type": "text", "text": sounds.question}]
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16}
        response = httpx.post(f"{sounds.server.url}/v1/chat/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["message"]["content"]
        return text == answer

    with ThreadPoolExecutor(4) as pool:
        right = sum(pool.map(is_right, range(FIRST_TRAINING_SEED - COUNT, FIRST_TRAINING_SEED)))
    assert right == COUNT


def test_files_are_refused_where_nothing_decodes_them(ear: Ear) -> None:
    """With a sentence that says what to install; numbers are answered."""
    from ear.data import QUESTION, sample

    samples, answer = sample(7)
    remedy = "soundfile or torchcodec on the server, to decode a file of audio, got neither. Send samples, or install"
    with ear.server("soundfile", "torchcodec") as server, Client(server.url) as client:
        prompt = f"user: <audio>{QUESTION}\nassistant: "
        routes = Routes("audio", None, server, None, prompt, QUESTION)
        for name in filter(files.available, files.CODINGS):
            url = data_url(files.sound(name, samples))
            part = {"type": "audio_url", "audio_url": {"url": url}}
            for refusal in (routes._http_chat(part), routes._http_generate({"audio_url": {"url": url}})):
                assert isinstance(refusal, str), (name, refusal)
                assert remedy in refusal
        completion = client.generate(prompt, {"audio": [samples]}, max_tokens=16, temperature=0.0)
        assert completion.choices[0].text == answer


# -- videos ------------------------------------------------------------------------------------------------------------

FAULTS = {"MPEG-1, no duration", "one frame", "APNG"}
"""Files of which vLLM's loader makes something else, see docs/status.md."""


@pytest.fixture(scope="module")
def videos(engines: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routes]:
    from . import moving

    folder = tmp_path_factory.mktemp("videos")
    checkpoint = moving.make_checkpoint(folder / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    hf_processor = AutoProcessor.from_pretrained(checkpoint)
    processor = moving.QWEN2_VL.hf_processor(AutoConfig.from_pretrained(checkpoint), tokenizer, processor=hf_processor)
    llm = engines.enter_context(engine(checkpoint, use_vllm_class=True, enforce_eager=True, seed=0, max_model_len=2048))
    environment = {**IN_ITS_PROCESSES, "MMKIT_MODULES": moving.__name__}
    options = (*SERVED, "--max-model-len", "2048")
    with Server(checkpoint, *options, environment=environment, log=folder / "log") as server:
        yield Routes("video", llm, server, processor, "<|video_pad|>a", "a")


def test_videos(videos: Routes) -> None:
    """Of the frames that vLLM's loader takes for the model."""
    all_files = files.videos()
    assert len(all_files) >= 12
    for file in all_files:
        try:
            loaded = MediaConnector().fetch_video(data_url(file), video_processor="Qwen2VLVideoProcessor")
        except (ValueError, ArithmeticError, TypeError):
            loaded = None
        check_file(videos, file, None if loaded is None else loaded.media[0])
        if file.expected != REFUSED and file.name not in FAULTS:
            frames, _ = MediaConnector().fetch_video(data_url(file))
            assert file.expected is None or len(frames) == file.expected, file.name

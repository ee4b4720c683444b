"""What the matrix runs on each version of vLLM, in a process of that version.

    python -m tools.matrix.checks cases laws plugins differential sounds engine serve one_class

prints a result per check. None of it knows which version it runs on.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import typer
from hypothesis import settings
from packaging.version import Version

from tools.shared import ROOT, print_result, quiet_libraries

ORACLES = ROOT / "tests" / "data" / "oracles"

EXAMPLES = 10
"""Drawn per law and spec; the tests draw more."""

HAS_TRANSFORMERS_4 = version("transformers").startswith("4.")

REQUESTS = 60
"""Drawn for the differential check."""

PLUGIN_REQUESTS = 400
"""Drawn per plugin."""

SAMPLE_RATE = 8000
"""Of the files of sounds, in Hz."""

SAMPLES = 2000
"""Of each channel of a file."""

SOUNDS = (
    ("WAV", "PCM_U8", "FILE"),
    ("WAV", "PCM_16", "FILE"),
    ("WAV", "PCM_24", "FILE"),
    ("WAV", "PCM_32", "FILE"),
    ("WAV", "FLOAT", "FILE"),
    ("WAV", "DOUBLE", "FILE"),
    ("WAV", "ULAW", "FILE"),
    ("WAV", "PCM_16", "BIG"),
    ("RF64", "PCM_16", "FILE"),
    ("AIFF", "PCM_16", "FILE"),
    ("AU", "PCM_16", "FILE"),
    ("FLAC", "PCM_16", "FILE"),
    ("OGG", "VORBIS", "FILE"),
)
"""Formats of files of sounds, as soundfile names them: the form, its subtype and its endian."""

EPISODES = range(100, 102)
"""Of Terra's world."""

FRAMES = 12
"""That Terra adds to an episode."""

ONE_CLASS_REQUESTS = 50
"""To a class of transformers that vLLM runs as it is."""

MAX_ERROR_LENGTH = 500
"""Characters of an error in a result."""

_NO_TEXT = "the processor of transformers 4 wants a text beside images and videos"

EXCEPTIONS: Mapping[str, tuple[str, str, str]] = {
    "qwen2_vl": ("transformers", "5", _NO_TEXT),
    "qwen3_vl": ("transformers", "5", _NO_TEXT),
    "qwen2_vl, cases": (
        "vllm",
        "0.28",
        "vLLM normalises pixels on the device from 0.28 on, and the stored results are later ones",
    ),
    "qwen2_audio, reference": (
        "transformers",
        "5.19",
        "the processor up to transformers 5.10 adds tokens around audio",
    ),
    "ultravox, text": (
        "vllm",
        "0.17",
        "vLLM up to 0.16 tokenizes a text of this model without the tokenizer's first token",
    ),
}
"""Specs of the gallery, and laws on one, that cannot hold below a version of a package, and why.
An exception that is none any more is a failure."""

FORMAT_4: Mapping[str, tuple[str, Sequence[str]]] = {
    "chameleon": ("LlamaTokenizerFast", ()),
    "deepseek_vl2": ("LlamaTokenizerFast", ()),
    "gemma3": ("GemmaTokenizerFast", ("boi_token", "eoi_token", "image_token")),
    "paligemma": ("GemmaTokenizerFast", ("image_token",)),
    "qwen2_vl": ("Qwen2TokenizerFast", ()),
}
"""What transformers 4 writes into `tokenizer_config.json` where 5 writes something else: the class
that the model's processor asks for, and special tokens with names of their own."""

Details = dict[str, Any]
"""The result of a check; it holds if `failures` is empty."""


class Outcome:
    """What came of each spec.

    Attributes:
        check: the name of the check.
        specs: counts of what held, by spec.
        subjects: what was checked, under the names that `EXCEPTIONS` may have for it.
        refused: the reasons of what is refused, by subject.
        failures: sentences.
    """

    def __init__(self, check: str) -> None:
        self.check = check
        self.specs: dict[str, int] = {}
        self.subjects: set[str] = set()
        self.refused: dict[str, list[str]] = defaultdict(list)
        self.failures: list[str] = []

    @contextmanager
    def count(self, spec: str, what: str = "") -> Iterator[None]:
        """Count one thing of a spec as held unless the block raises."""
        self.specs.setdefault(spec, 0)
        subjects = (spec, f"{spec}, {self.check}", f"{spec}, {what}")
        self.subjects.update(subjects)
        try:
            yield
        except Exception as error:
            self._add_error(error, subjects)
        else:
            self.specs[spec] += 1

    def _add_error(self, error: Exception, subjects: tuple[str, str, str]) -> None:
        """Add an error to what is refused, or to the failures."""
        exceptions = find_exceptions()
        for subject in subjects:
            if subject in exceptions:
                self.refused[subject].append(exceptions[subject])
                return
        spec, _, spec_and_what = subjects
        if _is_of_transformers(error):
            self.refused[spec].append(_shorten(error))
        else:
            self.failures.append(f"{spec_and_what}: {_shorten(error)}")

    def details(self) -> Details:
        """Return everything; an exception that was not needed is a failure."""
        failures = list(self.failures)
        for subject, why in find_exceptions().items():
            spec = subject.split(",")[0]
            if subject in self.subjects and not {subject, spec} & self.refused.keys():
                failures.append(f"{subject}: holds, so that its exception has to go: {why}")
        refused = {}
        for subject, reasons in self.refused.items():
            refused[subject] = {"count": len(reasons), "why": reasons[0]}
        return {"specs": self.specs, "refused": refused, "failures": failures}


def find_exceptions() -> dict[str, str]:
    """Return the specs, and laws on one, that cannot hold here, and why."""
    exceptions = {}
    for subject, (package, below, why) in EXCEPTIONS.items():
        if Version(version(package)) < Version(below):
            exceptions[subject] = why
    return exceptions


def check_cases() -> Details:
    """Run the stored cases of hand-written classes through each spec of the gallery.

    Results that are stored as wrong are left out.
    """
    from tests.oracles import compare_results, replay
    from tests.path.test_gallery import CASES

    outcome = Outcome("cases")
    for name, case in CASES:
        if "wrong" in case:
            continue
        with outcome.count(name, case["id"]):
            try:
                result = replay(name, case)
            except ValueError:
                if "error" not in case:
                    raise
            else:
                assert "error" not in case, "taken, and should be refused"
                difference = compare_results(case["expect"], result)
                assert not difference, difference
    return outcome.details()


def check_laws(names: Sequence[str] = ()) -> Details:
    """Check laws that need no model, all or some, on each spec of the project."""
    from mmkit.testing import LAWS
    from tests.path.test_gallery import EXPECTED, LEFT_OUT

    laws = [law for law in names or LAWS if not LAWS[law].needs_model]
    outcome = Outcome("laws")
    checked: set[str] = set()
    silent: dict[str, str] = {}
    for name, instance in _iterate_subjects(outcome):
        laws_of_spec = []
        for law in laws:
            if name not in LEFT_OUT.get(law, ()) and (name, law) not in EXPECTED:
                laws_of_spec.append(law)
        silent_here = _check_laws_on(outcome, name, instance, laws_of_spec)
        silent.update(silent_here)
        checked.update(set(laws_of_spec) - silent_here.keys())
    # what remains are laws that have nothing to say on this version
    for law in checked:
        silent.pop(law, None)
    facts = {"laws": laws, "examples": settings().max_examples, "silent": silent}
    return facts | outcome.details()


def _check_laws_on(
    outcome: Outcome, name: str, instance: Any, laws: Sequence[str]
) -> dict[str, str]:
    """Check laws on a spec. Returns why some have nothing to say about it."""
    from mmkit.testing import NotApplicable, check_law

    silent: dict[str, str] = {}
    for law in laws:
        with outcome.count(name, law):
            try:
                check_law(law, instance)
            except NotApplicable as reason:
                silent[law] = str(reason)
                outcome.specs[name] -= 1
    return silent


def check_plugins() -> Details:
    """Check the specs of plugins in the field.

    Drawn requests are compared with the plain account of what the plugins do, and the laws are
    checked. Counts per spec are laws.
    """
    from mmkit.testing import LAWS
    from tests.path import test_plugins_in_the_field as field

    outcome = Outcome("plugins")
    requests: dict[str, int] = {}
    laws = [name for name, law in LAWS.items() if not law.needs_model]
    for name in field.SPECS:
        with tempfile.TemporaryDirectory() as folder, outcome.count(name, "requests"):
            instance = field.make_subject(name, Path(folder))
            requests[name] = field.compare_requests(name, instance, PLUGIN_REQUESTS)
            _check_laws_on(outcome, name, instance, laws)
            # the requests are no law
            outcome.specs[name] -= 1
    return {"requests": sum(requests.values())} | outcome.details()


def _iterate_subjects(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """Yield each spec of the project that this version takes, and the requests for it."""
    from tests import hf_law
    from tests.oracles import SYSTEMS
    from tests.path.test_gallery import open_subject

    for name in list(SYSTEMS) + list(hf_law.EXAMPLES):
        with outcome.count(name):
            if name in hf_law.EXAMPLES:
                instance = hf_law.EXAMPLES[name]()
            else:
                instance = open_subject(name)
            # the block counts one, and a subject is no law
            outcome.specs[name] -= 1
            yield name, instance


def _is_of_transformers(error: BaseException) -> bool:
    """Return whether transformers 4 rejects what the stored cases, made with 5, have.

    That is an image of one pixel, or an option of a request that it reads in another way than the
    specs.
    """
    from mmkit import SpecError

    while error.__cause__ is not None:
        error = error.__cause__
    if not HAS_TRANSFORMERS_4:
        return False
    if isinstance(error, SpecError):
        for note in getattr(error, "__notes__", []):
            if "mm_processor_kwargs" in note:
                return True
    return "/transformers" in traceback.extract_tb(error.__traceback__)[-1].filename


def copy_in_format_4(folder: str) -> Path:
    """Copy the stored checkpoints, in the format that transformers 4 writes."""
    copy = Path(shutil.copytree(ORACLES, folder, dirs_exist_ok=True))
    for name, (tokenizer_class, tokens) in FORMAT_4.items():
        path = copy / name / "checkpoint" / "tokenizer_config.json"
        config = json.loads(path.read_text())
        special = {token: config.pop(token) for token in tokens}
        config["tokenizer_class"] = tokenizer_class
        config["extra_special_tokens"] = special
        path.write_text(json.dumps(config))
    return copy


def check_differential() -> Details:
    """Run generated requests through vLLM's own LLaVA processor and through the generated one."""
    from transformers import AutoTokenizer
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration

    from examples.llava_like.cases import make_cases
    from mmkit.testing.compare import Given, compare
    from tests.oracles import SYSTEMS

    llava = SYSTEMS["llava"]
    cases = make_cases(AutoTokenizer.from_pretrained(llava.checkpoint), REQUESTS)
    requests = [Given(case.prompt, {"image": list(case.images)}) for case in cases]
    comparison = compare(
        llava.load_spec(),
        llava.checkpoint,
        LlavaForConditionalGeneration,
        examples=0,
        given_requests=requests,
    )
    failures = [comparison.difference] if comparison.difference else []
    return {"requests": comparison.requests - comparison.refused, "failures": failures}


def check_sounds() -> Details:
    """Load files of sounds as a server does, and compare their items with those of training.

    Where vLLM's loader decodes no file, all are refused in a sentence of mmkit's.
    """
    import numpy as np

    from mmkit import Audio, InputError
    from mmkit.language.expr import Scope
    from mmkit.vllm_api.compat import find
    from mmkit.vllm_api.patches import install

    install()
    connector = find("multimodal.media:MediaConnector", "multimodal.utils:MediaConnector")()
    item_type = Audio(largest=SAMPLES, rate=SAMPLE_RATE).bind(Scope(SimpleNamespace()))
    num_equal = 0
    refusals: list[str] = []
    failures: list[str] = []
    for coding in SOUNDS:
        for channels in (1, 2):
            name = f"{coding}, {channels} channel(s)"
            data, decoded = _make_sound(coding, channels)
            trained = item_type.canonical((decoded, SAMPLE_RATE), "sound")
            content = base64.b64encode(data).decode()
            try:
                loaded = connector.fetch_audio(f"data:audio/wav;base64,{content}")
                served = item_type.canonical(loaded, "sound")
            except InputError as error:
                refusals.append(f"{name}: {_shorten(error)}")
                continue
            if np.array_equal(trained, served):
                num_equal += 1
            else:
                failures.append(f"{name}: another item than in training")
    refused = {}
    if num_equal:
        failures += refusals
    else:
        refused["sounds"] = {"count": len(refusals), "why": refusals[0]}
    return {"files": num_equal, "refused": refused, "failures": failures}


def _make_sound(coding: tuple[str, str, str], channels: int) -> tuple[bytes, Any]:
    """Return a file of a sound, and its samples as training reads them: mono, float32."""
    import numpy as np
    import soundfile

    form, subtype, endian = coding
    waves = []
    for channel in range(1, channels + 1):
        waves.append(np.sin(np.arange(SAMPLES) * 0.3) / channel)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack(waves, axis=1), SAMPLE_RATE, subtype, endian, form)
    data = buffer.getvalue()
    samples, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    return data, samples.mean(axis=1)


def check_engine() -> Details:
    """Compare Terra in the engine, greedy, with the Hugging Face reference."""
    import numpy as np

    from examples.terra import CHECKPOINT, register
    from examples.terra.rollout import VllmTerra

    register()
    rollouts = _make_rollouts()
    terra = VllmTerra(CHECKPOINT, dtype="float32", seed=0)
    steps = list(terra.rollout(rollouts.context, rollouts.actions, FRAMES))
    frames = np.stack([step.tokens for step in steps], axis=1)
    cached_tokens = sum(step.cached_tokens for step in steps)
    prompt_tokens = sum(step.prompt_tokens for step in steps)
    cached = {"cached": round(cached_tokens / prompt_tokens, 3)}
    return _compare_ids(frames, rollouts.frames) | cached


def check_serve() -> Details:
    """Compare Terra over HTTP, in closed loops at the same time, with the same reference."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import vllm

    try:
        from vllm.plugins import ENDPOINT_PLUGINS_GROUP  # noqa: F401
    except ImportError:  # this vLLM loads no routes
        return {"routes": False, "failures": []}
    from examples.server import Server
    from examples.terra import CHECKPOINT
    from examples.terra.serve_demo import OPTIONS, run_closed_loop
    from mmkit.serve import Client

    rollouts = _make_rollouts()
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = Path("out", "matrix", f"{vllm.__version__}-server.log")
    with (
        Server(CHECKPOINT, *OPTIONS, environment=environment, log=log) as server,
        Client(server.url) as client,
        ThreadPoolExecutor() as pool,
    ):
        loops = []
        for context, actions in zip(rollouts.context, rollouts.actions, strict=True):
            loops.append(pool.submit(run_closed_loop, client, context, actions, FRAMES))
        frames = np.stack([loop.result() for loop in loops])
    return {"routes": True} | _compare_ids(frames, rollouts.frames)


def check_one_class() -> Details:
    """Compare a class of transformers that vLLM runs as it is with transformers.

    It is the model of series, with a `forward` that changes states and logits.
    """
    from examples.series.offline import answer, engine
    from examples.series.spec import WAVES
    from examples.series.untrained import make_tokenizer
    from examples.series.waves import ANSWER_WORDS, FIRST_TEST_SEED, PROMPT, make_wave
    from tests.engine.one_class import OneClassWavesForCausalLM, copy_checkpoint, register

    register()
    failures = []
    with tempfile.TemporaryDirectory(prefix="mmkit-matrix-") as folder:
        checkpoint = copy_checkpoint(Path(folder))
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(checkpoint)  # as this version of transformers writes it
        model = OneClassWavesForCausalLM.from_pretrained(checkpoint).eval()
        processor = WAVES.hf_processor(model.config, tokenizer)
        seeds = range(FIRST_TEST_SEED, FIRST_TEST_SEED + ONE_CLASS_REQUESTS)
        all_series = [make_wave(seed).series for seed in seeds]
        with engine(checkpoint, enforce_eager=True, block_size=32) as llm:
            all_ids = answer(llm, all_series)
        for seed, series, ids in zip(seeds, all_series, all_ids, strict=True):
            expected = model.answer(processor, PROMPT, series, ANSWER_WORDS)
            if ids != expected:
                failures.append(f"series {seed}: {ids}, and {expected} in transformers")
    return {"requests": len(all_ids), "failures": failures}


class Rollouts(NamedTuple):
    """Episodes, and what the Hugging Face reference makes of them, as arrays of NumPy.

    Attributes:
        context: the first frames, (episodes, frames, tokens).
        actions: of the episodes, (episodes, frames, ...).
        frames: that the reference adds, (episodes, `FRAMES`, tokens).
    """

    context: Any
    actions: Any
    frames: Any


def _make_rollouts() -> Rollouts:
    """Return the rollouts of the reference, for `EPISODES`."""
    import numpy as np
    import torch

    from examples.terra import CHECKPOINT
    from examples.terra.reference import LlamaActionForCausalLM
    from examples.terra.worlds import CONTEXT_FRAMES, make_episode

    episodes = [make_episode(seed) for seed in EPISODES]
    context = np.stack([episode.frames[:CONTEXT_FRAMES] for episode in episodes])
    actions = np.stack([episode.actions for episode in episodes])
    reference = LlamaActionForCausalLM.from_pretrained(CHECKPOINT).eval()
    frames = reference.rollout(torch.from_numpy(context), torch.from_numpy(actions), FRAMES)
    return Rollouts(context, actions, torch.stack(list(frames), dim=1).numpy())


def _compare_ids(ids: Any, expected: Any) -> Details:
    """Return the number of ids, their digest, and a failure if some differ."""
    failures = []
    wrong = int((ids != expected).sum())
    if wrong:
        failures.append(f"{wrong} of {ids.size} ids are not the reference's")
    digest = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:12]
    return {"ids": ids.size, "digest": digest, "failures": failures}


CHECKS: dict[str, Callable[..., Details]] = {
    "cases": check_cases,
    "laws": check_laws,
    "plugins": check_plugins,
    "differential": check_differential,
    "sounds": check_sounds,
    "engine": check_engine,
    "serve": check_serve,
    "one_class": check_one_class,
}


def _shorten(error: BaseException) -> str:
    """Return the class and the message of an error, not too long for a result."""
    text = f"{type(error).__name__}: {error}".strip()
    if len(text) > MAX_ERROR_LENGTH:
        text = f"{text[: MAX_ERROR_LENGTH - 3]}..."
    return text


def main(
    names: Annotated[list[str], typer.Argument(metavar="CHECK...")],
    examples: int = EXAMPLES,
    laws: str = "",
) -> None:
    quiet_libraries(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    settings.register_profile("matrix", derandomize=True, deadline=None, max_examples=examples)
    settings.load_profile("matrix")
    import vllm

    with tempfile.TemporaryDirectory(prefix="mmkit-matrix-") as folder:
        if HAS_TRANSFORMERS_4:
            os.environ["MMKIT_ORACLES"] = str(copy_in_format_4(folder))
        for name in names:
            start = time.perf_counter()
            try:
                details = check_laws(laws.split()) if name == "laws" else CHECKS[name]()
                result = {"vllm": vllm.__version__} | details
            except Exception as error:
                traceback.print_exc()
                result = {"failures": [_shorten(error)]}
            seconds = round(time.perf_counter() - start, 1)
            print_result({"check": name, "seconds": seconds} | result)
    sys.stdout.flush()
    os._exit(0)  # engines of some versions leave threads behind that do not end


if __name__ == "__main__":
    typer.run(main)

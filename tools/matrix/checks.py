"""What the matrix runs on each version of vLLM, in a process of that version.

    python -m tools.matrix.checks cases laws plugins differential engine serve

tells a result per check. None of it knows which version it runs on.
"""

from __future__ import annotations

import hashlib
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
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from hypothesis import settings
from packaging.version import Version

from tools.shared import ROOT, quiet, tell

ORACLES = ROOT / "tests" / "data" / "oracles"

EXAMPLES = 10
"""Drawn per law and spec; the tests draw more."""
IS_4 = version("transformers").startswith("4.")
"""An older transformers."""
REQUESTS, PLUGIN_REQUESTS = 60, 400
EPISODES = range(100, 102)
"""Of Terra's world."""
FRAMES = 12

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
"""What a check tells; it holds if `failures` is empty."""


class Outcome:
    """What came of each spec: counts of what held, what transformers refused, and what failed."""

    def __init__(self, check: str) -> None:
        self.check = check
        self.specs: dict[str, int] = {}
        self.seen: set[str] = set()
        self.refused: dict[str, list[str]] = defaultdict(list)
        self.failures: list[str] = []

    @contextmanager
    def of(self, name: str, what: str = "") -> Iterator[None]:
        """Counts one thing of a spec as held unless the block raises."""
        self.specs.setdefault(name, 0)
        self.seen |= {name, f"{name}, {self.check}", f"{name}, {what}"}
        try:
            yield
        except Exception as error:
            known = exceptions()
            subjects = (name, f"{name}, {self.check}", f"{name}, {what}")
            if known_as := next((subject for subject in subjects if subject in known), None):
                self.refused[known_as].append(known[known_as])
            elif _of_transformers(error):
                self.refused[name].append(_brief(error))
            else:
                self.failures.append(f"{name}, {what}: {_brief(error)}")
        else:
            self.specs[name] += 1

    def told(self) -> Details:
        """Everything, and each exception that was needless as a failure."""
        stale = [
            f"{subject}: holds, so that its exception has to go: {why}"
            for subject, why in exceptions().items()
            if subject in self.seen and not {subject, subject.split(",")[0]} & self.refused.keys()
        ]
        refused = {
            subject: {"count": len(reasons), "why": reasons[0]}
            for subject, reasons in self.refused.items()
        }
        return {"specs": self.specs, "refused": refused, "failures": [*self.failures, *stale]}


def exceptions() -> Mapping[str, str]:
    """Specs, and laws on one, that cannot hold here, and why."""
    return {
        subject: why
        for subject, (package, below, why) in EXCEPTIONS.items()
        if Version(version(package)) < Version(below)
    }


def cases() -> Details:
    """The stored results of the hand-written classes, but for those that are wrong, through each
    spec of the gallery."""
    from tests.oracles import compare_results, replay
    from tests.path.test_gallery import CASES

    outcome = Outcome("cases")
    for name, case in CASES:
        if "wrong" in case:
            continue
        with outcome.of(name, case["id"]):
            try:
                got = replay(name, case)
            except ValueError:
                if "error" not in case:
                    raise
            else:
                assert "error" not in case, "taken, and should be refused"
                differs = compare_results(case["expect"], got)
                assert not differs, differs
    return outcome.told()


def laws(numbers: Sequence[str] = ()) -> Details:
    """Laws that need no model, all or some, on each spec of the project."""
    from mmkit.testing import LAWS
    from tests.path.test_gallery import EXPECTED, LEFT_OUT

    chosen = [number for number in numbers or LAWS if not LAWS[number].needs_model]
    outcome = Outcome("laws")
    checked: set[str] = set()
    silent: dict[str, str] = {}
    for name, instance in _subjects(outcome):
        left_out = {law for law in chosen if name in LEFT_OUT.get(law, ())}
        own = [law for law in chosen if law not in left_out and (name, law) not in EXPECTED]
        said_nothing = _hold(outcome, name, instance, own)
        silent |= said_nothing
        checked |= {*own} - said_nothing.keys()
    # laws that have nothing to say on this version
    silent = {number: reason for number, reason in silent.items() if number not in checked}
    about = {"laws": chosen, "examples": settings().max_examples, "silent": silent}
    return {**about, **outcome.told()}


def _hold(outcome: Outcome, name: str, instance: Any, laws: Sequence[str]) -> dict[str, str]:
    """Check laws on a spec. Returns why some have nothing to say about it."""
    from mmkit.testing import NotApplicable, check_law

    silent: dict[str, str] = {}
    for law in laws:
        with outcome.of(name, law):
            try:
                check_law(law, instance)
            except NotApplicable as reason:
                silent[law] = str(reason)
                outcome.specs[name] -= 1
    return silent


def plugins() -> Details:
    """Drawn requests through the specs of plugins in the field, against the plain account of what
    the plugins do, and the laws. Counts per spec are laws."""
    from mmkit.testing import LAWS
    from tests.path import test_plugins_in_the_field as field

    outcome = Outcome("plugins")
    requests: dict[str, int] = {}
    chosen = [name for name, law in LAWS.items() if not law.needs_model]
    for name in field.SPECS:
        with tempfile.TemporaryDirectory() as folder, outcome.of(name, "requests"):
            instance = field.subject_of(name, Path(folder))
            requests[name] = field.as_by_hand(name, instance, PLUGIN_REQUESTS)
            _hold(outcome, name, instance, chosen)
            outcome.specs[name] -= 1
    return {"requests": sum(requests.values()), **outcome.told()}


def _subjects(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    """Each spec of the project that this version takes."""
    from tests import hf_law
    from tests.oracles import SYSTEMS
    from tests.path.test_gallery import subject

    gallery = {name: partial(subject, name) for name in SYSTEMS}
    for name, make in {**gallery, **hf_law.EXAMPLES}.items():
        with outcome.of(name):
            instance = make()
            outcome.specs[name] -= 1
            yield name, instance


def _of_transformers(error: BaseException) -> bool:
    """Whether transformers 4 does not take what the stored cases, made with 5, have: an image of
    one pixel, or an option of a request that it reads in another way than the specs."""
    from mmkit import SpecError

    while error.__cause__ is not None:
        error = error.__cause__
    if not IS_4:
        return False
    notes = getattr(error, "__notes__", [])
    at_an_option = isinstance(error, SpecError) and any("mm_processor_kwargs" in n for n in notes)
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return at_an_option or "/transformers" in raised_in


def in_format_4(folder: str) -> Path:
    """A copy of the stored checkpoints, in the format that transformers 4 writes."""
    copy = Path(shutil.copytree(ORACLES, folder, dirs_exist_ok=True))
    for name, (kind, tokens) in FORMAT_4.items():
        path = copy / name / "checkpoint" / "tokenizer_config.json"
        stored = json.loads(path.read_text())
        special = {token: stored.pop(token) for token in tokens}
        changes = {"tokenizer_class": kind, "extra_special_tokens": special}
        path.write_text(json.dumps({**stored, **changes}))
    return copy


def differential() -> Details:
    """Generated requests through vLLM's own LLaVA processor and through the generated one."""
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


def engine() -> Details:
    """Terra in the engine, greedy, against the Hugging Face reference."""
    import numpy as np

    from examples.terra import CHECKPOINT, register
    from examples.terra.rollout import VllmTerra

    register()
    context, actions, expected = _rollouts()
    terra = VllmTerra(CHECKPOINT, dtype="float32", seed=0)
    steps = list(terra.rollout(context, actions, FRAMES))
    got = np.stack([step.tokens for step in steps], axis=1)
    cached = sum(step.cached_tokens for step in steps) / sum(step.prompt_tokens for step in steps)
    return {**_compared(got, expected), "cached": round(cached, 3)}


def serve() -> Details:
    """Terra over HTTP, in closed loops at the same time, against the same reference."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import vllm

    try:
        from vllm.plugins import ENDPOINT_PLUGINS_GROUP  # noqa: F401
    except ImportError:  # this vLLM loads no routes
        return {"routes": False, "failures": []}
    from examples.server import Server
    from examples.terra import CHECKPOINT
    from examples.terra.serve_demo import OPTIONS, closed_loop
    from mmkit.serve import Client

    context, actions, expected = _rollouts()
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = Path("out", "matrix", f"{vllm.__version__}-server.log")
    with (
        Server(CHECKPOINT, *OPTIONS, environment=environment, log=log) as server,
        Client(server.url) as client,
        ThreadPoolExecutor() as pool,
    ):
        loops = pool.map(
            lambda frames, steer: closed_loop(client, frames, steer, FRAMES), context, actions
        )
        got = np.stack(list(loops))
    return {"routes": True, **_compared(got, expected)}


def _rollouts() -> tuple[Any, Any, Any]:
    """Frames (streams, 3, tokens) and actions of some episodes, and the frames that the Hugging
    Face reference adds."""
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
    return context, actions, torch.stack(list(frames), dim=1).numpy()


def _compared(got: Any, expected: Any) -> Details:
    wrong = int((got != expected).sum())
    return {
        "ids": got.size,
        "digest": hashlib.sha256(got.astype("<i8").tobytes()).hexdigest()[:12],
        "failures": [f"{wrong} of {got.size} ids are not the reference's"] if wrong else [],
    }


CHECKS: dict[str, Callable[..., Details]] = {
    check.__name__: check for check in (cases, laws, plugins, differential, engine, serve)
}


def _brief(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return text if len(text) <= 500 else f"{text[:497]}..."


def main(
    names: Annotated[list[str], typer.Argument(metavar="CHECK...")],
    examples: int = EXAMPLES,
    laws: str = "",
) -> None:
    quiet(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    settings.register_profile("matrix", derandomize=True, deadline=None, max_examples=examples)
    settings.load_profile("matrix")
    import vllm

    checks = {**CHECKS, "laws": partial(CHECKS["laws"], laws.split())}
    with tempfile.TemporaryDirectory(prefix="mmkit-matrix-") as folder:
        if IS_4:
            os.environ["MMKIT_ORACLES"] = str(in_format_4(folder))
        for name in names:
            start = time.perf_counter()
            try:
                result = {"vllm": vllm.__version__, **checks[name]()}
            except Exception as error:
                traceback.print_exc()
                result = {"failures": [_brief(error)]}
            seconds = round(time.perf_counter() - start, 1)
            tell({"check": name, "seconds": seconds, **result})
    sys.stdout.flush()
    os._exit(0)  # engines of some versions leave threads behind that do not end


if __name__ == "__main__":
    typer.run(main)

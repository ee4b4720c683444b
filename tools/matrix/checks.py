"""What the matrix runs on each version of vLLM, in a process of that version.

    python -m tools.matrix.checks laws training differential engine serve

prints one line of JSON per check, `RESULT {...}`. None of it knows which version it runs on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import settings

PREFIX = "RESULT "
"""What the lines with results begin with; libraries print what they like between them."""

EXAMPLES = 10
"""Drawn per law and spec; the tests draw more."""
REQUESTS = 60
EPISODES = range(100, 102)
"""Of Terra's world."""
FRAMES = 12

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # small tensors wait for threads longer than they are worked on
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The environment, where it says nothing else."""

NEWEST_ALONE = frozenset(
    {"gemma3", "idefics3", "llava_next", "llava_onevision", "minicpmv", "paligemma", "phi3v"}
    | {"pixtral_hf", "qwen2_vl", "qwen3_vl", "ultravox", "whisper"}
)
"""Systems of the gallery that the tests compare on their own vLLM alone: transformers processes
their items in another way from version to version."""

Details = dict[str, Any]
"""What a check tells; it holds if `failures` is empty."""


@dataclass
class Problems:
    """What failed, and what transformers 4 refuses."""

    failures: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def add(self, what: str, error: Exception) -> None:
        (self.refused if _of_transformers(error) else self.failures).append(
            f"{what}: {_brief(error)}"
        )


def laws(numbers: Sequence[str] = ()) -> Details:
    """Laws that need no model, all or some, on each spec of the project, and the stored cases of
    the gallery."""
    from mmkit.testing import LAWS, NotApplicable, Violation, check_law
    from tests.oracles import one_spawned_process
    from tests.path.test_gallery import CASES, is_wrong
    from tests.path.test_project_specs import EXPECTED, LEFT_OUT

    chosen = [number for number in numbers or LAWS if not LAWS[number].needs_model]
    problems = Problems()
    checked: list[str] = []
    silent: dict[str, str] = {}
    cases = 0
    for name, instance in _subjects(problems):
        for number in chosen:
            if (name, number) in EXPECTED or (number == "L3" and name in LEFT_OUT["L3"]):
                continue
            try:
                with one_spawned_process():
                    check_law(number, instance, database=False)
                checked.append(number)
            except NotApplicable as reason:
                silent[number] = str(reason)
            except Violation as violation:
                problems.add(name, violation)
    for name, case in CASES:
        if name in NEWEST_ALONE or is_wrong(name, case):
            continue
        try:
            differs = _differs(name, case)
        except Exception as error:
            problems.add(f"{name}/{case['id']}", error)
        else:
            cases += 1
            problems.failures += [
                f"{name}/{case['id']}: {difference}" for difference in differs[:1]
            ]
    # laws that have nothing to say on this version
    silent = {number: reason for number, reason in silent.items() if number not in checked}
    return {"laws": len(checked), "cases": cases, "silent": silent, **vars(problems)}


def training() -> Details:
    """Drawn requests through the processor for transformers of each spec, and vLLM's path."""
    from tests import hf_law

    problems, compared = Problems(), 0
    for name, instance in _subjects(problems):
        try:
            compared += sum(hf_law.check(instance, settings().max_examples))
        except Exception as error:
            problems.add(name, error)
    return {"requests": compared, **vars(problems)}


def _subjects(problems: Problems) -> Iterator[tuple[str, Any]]:
    """Each spec of the project that every version has to take."""
    from tests import hf_law
    from tests.oracles import SYSTEMS
    from tests.path.test_project_specs import subject

    systems = {name: partial(subject, name) for name in SYSTEMS if name not in NEWEST_ALONE}
    for name, make in {**systems, **hf_law.EXAMPLES}.items():
        try:
            instance = make()
        except Exception as error:
            problems.add(name, error)
        else:
            yield name, instance


def _of_transformers(error: BaseException) -> bool:
    """Whether transformers 4 does not take what the stored checkpoints and cases, made with 5,
    have: a tokenizer class, an image of one pixel. It also reads some options of a request in
    another way than 5, and than the specs, as Fuyu's `size`."""
    import transformers

    from mmkit import SpecError

    while error.__cause__ is not None:
        error = error.__cause__
    if int(transformers.__version__.split(".")[0]) >= 5:
        return False
    notes = getattr(error, "__notes__", [])
    at_an_option = isinstance(error, SpecError) and any("mm_processor_kwargs" in n for n in notes)
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return at_an_option or "/transformers" in raised_in


def _differs(name: str, case: dict[str, Any]) -> list[str]:
    """How the result of a spec differs from the stored one of the hand-written processor."""
    from tests.oracles import SYSTEMS, differences, replay

    if "error" in case:
        return _taken(name, case)
    return differences(case["expect"], replay(name, case), SYSTEMS[name].padded)


def _taken(name: str, case: dict[str, Any]) -> list[str]:
    """Whether a case that has to be refused is not."""
    from tests.oracles import replay

    with suppress(ValueError):
        replay(name, case)
        return ["taken, and should be refused"]
    return []


def differential() -> Details:
    """Generated requests through vLLM's own LLaVA processor and through the generated one, in all
    kinds of caches."""
    from examples.llava_like.cases import make_cases
    from mmkit.testing.laws import differences
    from mmkit.vllm_api import harness
    from tests.oracles import hand_written, processor

    theirs, ours = hand_written("llava"), processor("llava")
    cases = make_cases(ours.info.ctx.tokenizer, REQUESTS)
    failures, compared = [], 0
    for route, capacity, pair in (
        ("no cache", 0.0, False),
        ("its cache", 0.1, False),
        ("a pair of caches", 0.1, True),
    ):
        caches = [
            harness.Caches(sides, capacity, pair=pair) if capacity else None
            for sides in (theirs, ours)
        ]
        for i, case in enumerate(cases):
            data = {"image": list(case.images)} if case.images else {}
            sides = zip((theirs, ours), caches, strict=True)
            one, other = (harness.run(side, case.prompt, data, {}, cache) for side, cache in sides)
            for part in ("ids", "ranges", "fields"):
                if difference := differences(getattr(one, part), getattr(other, part), part):
                    failures.append(f"request {i} ({case.kind}), {route}: {difference}")
            compared += 1
    return {"requests": compared, "class": type(theirs).__name__, "failures": failures}


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
    from examples.terra import CHECKPOINT
    from examples.terra.serve_demo import OPTIONS, closed_loop
    from mmkit.serve import Client
    from mmkit.serve.process import Server

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
    from examples.terra.world import CONTEXT_FRAMES, make_episode

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


CHECKS: dict[str, Callable[[], Details]] = {
    check.__name__: check for check in (laws, training, differential, engine, serve)
}


def _brief(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return text if len(text) <= 500 else f"{text[:497]}..."


def _about() -> Details:
    """What this process runs on."""
    import transformers
    import vllm

    from mmkit.vllm_api import Processor

    generation = Processor.__module__.rpartition("_")[2].upper()
    return {
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        "generation": generation,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix.checks")
    parser.add_argument("checks", nargs="+", choices=CHECKS)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--laws", nargs="*", default=[])
    options = parser.parse_args()
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    settings.register_profile(
        "matrix", derandomize=True, deadline=None, max_examples=options.examples
    )
    settings.load_profile("matrix")
    checks = {**CHECKS, "laws": partial(laws, options.laws)}
    for name in options.checks:
        start = time.perf_counter()
        try:
            result = {**_about(), **checks[name]()}
        except Exception as error:
            traceback.print_exc()
            result = {"failures": [_brief(error)]}
        seconds = round(time.perf_counter() - start, 1)
        print(PREFIX + json.dumps({"check": name, "seconds": seconds, **result}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    for child in multiprocessing.active_children():  # that of L12
        child.terminate()
    os._exit(0)  # engines of some versions leave threads behind that do not end

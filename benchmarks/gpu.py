"""What only a GPU tells, in ten minutes: ``python -m benchmarks.gpu --help``, or ``make gpu``.

It finds a GPU, runs its parts one after the other, each in processes of its own with a limit of
time, and writes `benchmarks/results/gpu.json` after each: a part that fails, hangs or finds no time
loses no other. Where there is no GPU, the same parts run with small sizes on the CPU, to see that
the script is complete; that writes `gpu_on_cpu.json`.

A run of chosen parts keeps what is stored of the others.

- **terra**: the published size in bfloat16 by `benchmarks.terra_gpu`, beside vLLM's own Llama of
  the same size, and beside the Hugging Face reference. On a CPU a frame is 8 steps of a few
  thousand parameters, which say nothing of a GPU: what is constant for a request is large in them.
- **laws**: the laws about models, with the models of the examples on the device.
- **answers**: of the LLaVA-like model in float32, compared with those of transformers on the CPU;
  with TF32 and without. Where an answer differs, the margin between the two ids by the reference
  tells rounding from a fault: a margin above `LARGEST_MARGIN` is none of rounding.
- **one class**: a class of transformers that vLLM runs as it is, against a class for vLLM, by
  `benchmarks.one_class`.
- **tests**: those of tests/engine with the marker `gpu`.

Nothing is downloaded: each checkpoint is in the repository, or is made from a seed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.shared import print_result, run_module

from . import measure

Row = dict[str, Any]
"""A line of the table: `what`, `figure`, and a `remark` that may be empty."""

COLUMNS = ("part", "what", "figure", "remark")

LARGEST_MARGIN = 1e-3
"""The largest difference of two logits, as a fraction of the largest logit, that rounding turns
round. TF32 has 10 bits of a fraction, which is as much."""

PRECISIONS = {"highest": "float32", "high": "TF32"}
"""Of matrix products, as torch names them."""


@dataclass
class Run:
    """One run of the script.

    Attributes:
        has_gpu: whether it measures, or only shows that each part runs.
        deadline: by `time.monotonic`, when it ends.
        folder: for logs and files.
    """

    has_gpu: bool
    deadline: float
    folder: Path

    def find_limit(self, seconds: float) -> float:
        """Return the seconds that a part has, of which a GPU needs at most so many.

        Raises:
            PartError: next to none is left.
        """
        # a CPU measures nothing, and may have other work
        limit = seconds if self.has_gpu else 4 * seconds
        limit = min(limit, self.deadline - time.monotonic())
        if limit < 10:
            raise PartError("no time was left")
        return limit

    def run_module(self, *module: str, seconds: float, **variables: str) -> list[Row]:
        """Return the results that a module prints before it ends or its time is over.

        Raises:
            PartError: there are none.
        """
        limit = self.find_limit(seconds)
        log = self.folder / f"{len(list(self.folder.iterdir()))}.log"
        results, ending = run_module(*module, log=log, seconds=limit, variables=variables)
        if not results:
            raise PartError(f"{' '.join(module)} {ending}\n{log.read_text()[-3000:]}")
        return results


class PartError(Exception):
    """A part has no result."""


def main(
    part: Annotated[
        list[str] | None, typer.Option(help="Of the parts above; may be given several times.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="When the script ends.")] = 10.0,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
    small: Annotated[bool, typer.Option("--small", hidden=True)] = False,
) -> None:
    """Run the parts, and store their results in one file."""
    if child is not None:
        CHILDREN[child](small)
        return
    import torch

    has_gpu = torch.cuda.is_available()
    names = part or list(PARTS)
    unknown = set(names) - set(PARTS)
    if unknown:
        raise typer.BadParameter(f"expected parts among {', '.join(PARTS)}.")
    file = "gpu" if has_gpu else "gpu_on_cpu"
    report: dict[str, Any] = {"parts": read_parts(file) if part else {}}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mmkit-gpu-") as folder:
        run = Run(has_gpu, begin + 60 * minutes, Path(folder))
        for name in names:
            report["parts"][name] = run_part(name, run)
            report["seconds"] = sum(outcome["seconds"] for outcome in report["parts"].values())
            rows = list_rows(report["parts"])
            measure.store(file, report, COLUMNS, rows)
    if any("error" in report["parts"][name] for name in names):
        raise typer.Exit(1)


def read_parts(file: str) -> dict[str, Any]:
    """Return the outcomes that are stored, so that a run of some parts keeps the others."""
    stored = measure.find_folder() / f"{file}.json"
    if not stored.exists():
        return {}
    parts: dict[str, Any] = json.loads(stored.read_text())["parts"]
    return parts


def run_part(name: str, run: Run) -> dict[str, Any]:
    """Return the rows and the seconds of a part, and its error where it has one.

    Rows of a part that fails later are kept. Seconds of processors are those of the processes that
    ended by themselves.
    """
    begin = time.monotonic()
    begin_on_processors = count_processor_seconds()
    rows: list[Row] = []
    outcome: dict[str, Any] = {"rows": rows}
    try:
        PARTS[name](run, rows)
    except Exception as error:  # no part takes the others down
        outcome["error"] = f"{type(error).__name__}: {error}"
        print(f"{name}: {outcome['error']}", file=sys.stderr)
    outcome["seconds"] = round(time.monotonic() - begin)
    outcome["processor_seconds"] = round(count_processor_seconds() - begin_on_processors)
    return outcome


def count_processor_seconds() -> float:
    """Return the processor time of all processes that this one started, and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def list_rows(parts: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table."""
    rows = []
    for name, outcome in parts.items():
        for row in outcome["rows"]:
            rows.append([name, row["what"], row["figure"], row.get("remark", "")])
        if "error" in outcome:
            first_line = outcome["error"].splitlines()[0]
            rows.append([name, "", "failed", first_line.replace("|", "/")])
    return rows


# -- terra -----------------------------------------------------------------------------------------


def measure_terra(run: Run, rows: list[Row]) -> None:
    """Add frames per second: Terra's, those of vLLM's Llama, and of the Hugging Face reference."""
    streams = [1, 8, 64] if run.has_gpu else [1, 4]
    # a tiny frame has 8 tokens, the published one 576
    num_frames = 2 if run.has_gpu else 22
    options = [f"--frames={num_frames}", "--in-process"]
    options += [f"--streams={count}" for count in streams]
    # a CPU takes minutes to compile, and no figure of it is shown
    ours = "graphs" if run.has_gpu else "eager"
    if not run.has_gpu:
        options.append("--tiny")
    unit = "frames/s" if run.has_gpu else "frames in a second of a processor"
    of_terra: dict[int, float] = {}
    errors: list[str] = []
    # the reference last: a slow one takes no time from the others
    for part, seconds in ((ours, 150.0), ("llama", 120.0), ("hf", 150.0)):
        module = ("benchmarks.terra_gpu", f"--part={part}", *options)
        try:
            results = run.run_module(*module, seconds=seconds)
        except PartError as error:
            errors.append(f"{part}: {error}")
            continue
        for result in results:
            frames = result["frames_per_second"]
            remark = f"{result['of_bound']:.0%} of the bound"
            if part == ours:
                of_terra[result["streams"]] = frames
            elif result["streams"] in of_terra:
                remark = f"Terra: {of_terra[result['streams']] / frames:.2f} times as many"
            what = f"{NAMES[part]}, {result['streams']} video(s)"
            rows.append({"what": what, "figure": f"{frames:.2f} {unit}", "remark": remark})
    if errors:
        raise PartError("\n".join(errors))


NAMES = {
    "graphs": "Terra in vLLM",
    "eager": "Terra in vLLM, eager",
    "llama": "vLLM's own Llama",
    "hf": "the reference",
}
"""What the parts of `benchmarks.terra_gpu` are called in the table."""


# -- laws ------------------------------------------------------------------------------------------


def measure_laws(run: Run, rows: list[Row]) -> None:
    """Add the results of the laws with models on the device."""
    for result in run.run_module("benchmarks.gpu", "--child=laws", *run_small(run), seconds=120.0):
        rows.append(result)
        if result["violations"]:
            raise PartError(result["violations"])


def check_laws(small: bool) -> None:
    """Check the laws about models on the examples, in this process."""
    from examples import llava_like, series, terra
    from examples.llava_like.checkpoint import make_checkpoint
    from examples.llava_like.spec import LLAVA_LIKE
    from examples.series.spec import WAVES
    from examples.terra.spec import TERRA
    from mmkit.testing import LAWS, check

    for package in (terra, series, llava_like):
        package.register()
    names = [name for name, law in LAWS.items() if law.needs_model]
    with tempfile.TemporaryDirectory() as folder:
        overrides = {"hf_overrides": {"architectures": [llava_like.ARCHITECTURE]}}
        subjects: list[tuple[Any, Any, dict[str, Any]]] = [
            (TERRA, terra.CHECKPOINT, {}),
            (WAVES, series.CHECKPOINT, {}),
            (LLAVA_LIKE, make_checkpoint(Path(folder)), overrides),
        ]
        for spec, checkpoint, options in subjects:
            report = check(
                spec, checkpoint, laws=names, model=True, examples=3 if small else 15, **options
            )
            held = [result.law for result in report.results if result.status == "holds"]
            print_result(
                {
                    "what": spec.name,
                    "figure": f"{len(held)} laws hold",
                    "remark": ", ".join(held),
                    "violations": "" if report else str(report),
                }
            )


# -- answers ---------------------------------------------------------------------------------------


def compare_answers(run: Run, rows: list[Row]) -> None:
    """Add how many answers of the LLaVA-like model differ from those of transformers."""
    for precision, name in PRECISIONS.items():
        (result,) = run.run_module(
            "benchmarks.gpu",
            f"--child={precision}",
            *run_small(run),
            seconds=100.0,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the precision is that of this process
        )
        rows.append({**result, "what": name})


def answer_in_precision(precision: str, small: bool) -> None:
    """Compare the answers of the engine with those of transformers on the CPU."""
    import torch
    from transformers import AutoTokenizer

    from examples import llava_like
    from examples.llava_like.cases import make_cases
    from examples.llava_like.checkpoint import make_checkpoint
    from examples.llava_like.offline import answer, engine
    from examples.llava_like.reference import Reference

    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"
    llava_like.register()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        cases = make_cases(tokenizer, 6 if small else 60)
        with engine(checkpoint, seed=0, enforce_eager=True) as llm:
            answers = answer(llm, [case.request() for case in cases])
        reference = Reference(checkpoint)
        differences = []
        for case, ids in zip(cases, answers, strict=True):
            text = case.prompt
            if not isinstance(text, str):
                text = tokenizer.decode(text[1:])
            expected = reference.answer(text, case.images)
            if expected != ids:
                differences.append(describe_difference(reference, text, case.images, expected, ids))
    faults = [margin for margin in differences if margin > LARGEST_MARGIN]
    remark = ""
    if differences:
        verdict = "a fault" if faults else "rounding"
        remark = f"{verdict}: largest relative margin {max(differences):.1e}"
    equal = len(cases) - len(differences)
    figure = f"{equal} of {len(cases)} answers equal"
    print_result({"figure": figure, "remark": remark, "margins": differences})


def describe_difference(
    reference: Any, text: str, images: Any, expected: list[int], ids: list[int]
) -> float:
    """Return the margin by which the reference prefers its id to that of the engine.

    It is that of the first position at which they differ, as a fraction of the largest logit there.
    """
    import torch

    position = 0
    while expected[position] == ids[position]:
        position += 1
    inputs = dict(reference.processor(text=text, images=list(images) or None, return_tensors="pt"))
    before = torch.tensor([expected[:position]], dtype=torch.long)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], before], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.inference_mode():
        logits = reference.model(**inputs).logits[0, -1]
    margin = logits[expected[position]] - logits[ids[position]]
    return float(margin / logits.abs().max())


# -- one class -------------------------------------------------------------------------------------


def measure_one_class(run: Run, rows: list[Row]) -> None:
    """Add how many times as long a class of transformers takes as a class for vLLM."""
    folder = run.folder / "one_class"
    folder.mkdir()
    options = ["--rounds=11", "--tokens=100"]
    if not run.has_gpu:
        options = ["--rounds=2", "--tokens=8", "--eager"]
    module = ("benchmarks.one_class", *options)
    limit = run.find_limit(110.0)
    log = folder / "log"
    _, ending = run_module(
        *module, log=log, seconds=limit, variables={"MMKIT_RESULTS": str(folder)}
    )
    stored = folder / "one_class.json"
    if not stored.exists():
        raise PartError(f"{ending}\n{log.read_text()[-3000:]}")
    for figure in json.loads(stored.read_text())["rows"]:
        what = f"{figure['batch']} request(s) at once"
        remark = f"{figure['one_class_ms']:.2f} ms a token, {figure['two_classes_ms']:.2f} ms"
        ratio = f"{measure.format_ratio(figure)} times as long"
        rows.append({"what": what, "figure": ratio, "remark": remark})


# -- tests -----------------------------------------------------------------------------------------


def run_tests(run: Run, rows: list[Row]) -> None:
    """Add how many tests of tests/engine with the marker `gpu` pass."""
    report = run.folder / "tests.xml"
    options = ["-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", "tests/engine"]
    limit = run.find_limit(150.0)
    log = run.folder / "tests.log"
    _, ending = run_module("pytest", *options, log=log, seconds=limit, variables={})
    if not report.exists():
        raise PartError(f"{ending}\n{log.read_text()[-3000:]}")
    suite = ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    failed = []
    for case in suite:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name", ""))
    figure = f"{passed} of {counts['tests']} pass"
    rows.append({"what": "tests/engine", "figure": figure, "remark": ", ".join(failed)})
    if failed:
        raise PartError(log.read_text()[-3000:])


def run_small(run: Run) -> list[str]:
    """Return the options of a child: small sizes where there is no GPU."""
    return [] if run.has_gpu else ["--small"]


PARTS: dict[str, Callable[[Run, list[Row]], None]] = {
    "terra": measure_terra,
    "answers": compare_answers,
    "laws": measure_laws,
    "one_class": measure_one_class,
    "tests": run_tests,
}
"""By name, the most wanted first."""

CHILDREN: dict[str, Callable[[bool], None]] = {
    "laws": check_laws,
    "highest": lambda small: answer_in_precision("highest", small),
    "high": lambda small: answer_in_precision("high", small),
}
"""What runs in a process of its own, by the value of `--child`."""


if __name__ == "__main__":
    measure.quiet_libraries()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    typer.run(main)

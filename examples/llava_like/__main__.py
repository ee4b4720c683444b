"""Compare the model with vLLM's own, request by request: ``python -m examples.llava_like --help``."""

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import register

EMBEDDINGS = "precomputed embeddings"


def main(
    model: Annotated[Path | None, typer.Option(help="Folder of a checkpoint; by default a tiny one is made.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 40,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Processes that share each layer.")] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(min=1, help="Processes that share the layers out.")] = 1,
    compare: Annotated[bool, typer.Option(help="Also run vLLM's own class.")] = True,
    report: Annotated[Path | None, typer.Option(help="JSON file to write all token ids to.")] = None,
    log_level: Annotated[str, typer.Option(help="vLLM's log level.", envvar="VLLM_LOGGING_LEVEL")] = "ERROR",
) -> None:
    """Answer prompts about drawn pictures with a LLaVA checkpoint, by the model of this package and by vLLM's own.

    The weights are random, and so are the answers; that all ids agree is the point.
    """
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory
    sizes = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
    num_processes = tensor_parallel_size * pipeline_parallel_size
    if num_processes > 1:
        # on a CPU, one core per process; elsewhere the variable is not read
        cores = "|".join(str(core) for core in range(num_processes))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)

    from transformers import AutoTokenizer
    from transformers.utils import logging

    from .cases import make_cases
    from .checkpoint import make_checkpoint

    logging.disable_progress_bar()
    console = Console()
    register()
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = make_checkpoint(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(model)
        cases = make_cases(tokenizer, prompts)
        kinds = [case.kind for case in cases]
        requests = [case.request() for case in cases]
        requests_with_embeddings = embed_images(model, cases)
        kinds += [EMBEDDINGS] * len(requests_with_embeddings)
        requests += requests_with_embeddings
        console.print("Starting vLLM with the model of this package, half a minute ...")
        ids = run(model, requests, **sizes)
        theirs: list[list[int]] | None = None
        if compare and not importable("torchvision"):
            console.print("vLLM's own LLaVA needs torchvision, which cannot be imported, so there is no comparison.")
        elif compare:
            console.print("Starting vLLM with its own class ...")
            theirs = run(model, requests, use_vllm_class=True)
    console.print(table(kinds, tokenizer.batch_decode(ids), ids, theirs))
    if report is not None:
        report.write_text(json.dumps({"kinds": kinds, "ids": ids, "vllm": theirs}) + "\n")
    if theirs is not None and theirs != ids:
        raise typer.Exit(1)


def importable(name: str) -> bool:
    """Whether a module can be imported; torchvision beside another build of torch raises RuntimeError."""
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):
        return False
    return True


def embed_images(model: Path, cases: list[Any]) -> list[dict[str, Any]]:
    """Return the requests with images, with what transformers computes for these in their place."""
    import torch

    from .reference import Reference

    reference = Reference(model)
    requests = []
    for case in cases:
        if case.images:
            embeddings = torch.stack(reference.embed(case.images))
            requests.append(case.request(embeddings))
    return requests


def run(model: Path, requests: list[dict[str, Any]], **options: Any) -> list[list[int]]:
    """Return greedy answers of an engine that is started for them."""
    from .offline import answer, engine

    with engine(model, **options) as llm:
        return answer(llm, requests)


def table(kinds: list[str], texts: list[str], ids: list[list[int]], theirs: list[list[int]] | None) -> Table:
    """Return a table with one row per kind of request."""
    grid = Table("request", "sent", "an answer")
    if theirs is not None:
        grid.add_column("same ids as vLLM's own", justify="right")
    for kind in dict.fromkeys(kinds):
        rows = [i for i, kind_of_row in enumerate(kinds) if kind_of_row == kind]
        cells: list[str | Text] = [kind, str(len(rows)), Text(repr(texts[rows[0]]))]
        if theirs is not None:
            num_equal = sum(ids[i] == theirs[i] for i in rows)
            colour = "green" if num_equal == len(rows) else "red"
            cells.append(Text(f"{num_equal} of {len(rows)}", colour))
        grid.add_row(*cells)
    return grid


if __name__ == "__main__":
    typer.run(main)

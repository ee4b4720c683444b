"""Ask a server about recordings that the model has never seen, beside two baselines: ``python -m examples.vowels``."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from examples.server import Server

from . import CHECKPOINT
from .recordings import count_right, load_recordings

ROTATION = 185
"""How far recordings are rotated for the swapped requests: by half of them, so that nearly all change the speaker."""
OPTIONS = ("--dtype", "float32", "--max-model-len", "64", "--enforce-eager")


def main(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder of a checkpoint; examples.vowels.train makes one.")
    ] = CHECKPOINT,
    out: Annotated[Path, typer.Option(help="Where the picture, the table and the figures go.")] = Path("vowels"),
) -> None:
    """Ask a server, transformers and two baselines about the recordings for the test."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory

    from .ask import ask_about
    from .baselines import answer_by_neighbour, answer_by_regression
    from .picture import draw
    from .report import Counts, choose_panels, write_line, write_table
    from .score import answer_all

    train = load_recordings("train")
    test = load_recordings("test")
    rotated = test[ROTATION:] + test[:ROTATION]
    out.mkdir(parents=True, exist_ok=True)
    with Server(checkpoint, *OPTIONS, log=out / "server.log") as server:
        answers = ask_about(server.url, test)
        answers_swapped = ask_about(server.url, rotated)
    answers_of_neighbour = answer_by_neighbour(train, test)
    counts = Counts(
        recordings=len(test),
        http=count_right(answers, test),
        transformers=count_right(answer_all(checkpoint), test),
        swapped=count_right(answers_swapped, rotated),
        before_swap=count_right(answers_swapped, test),
        neighbour=count_right(answers_of_neighbour, test),
        regression=count_right(answer_by_regression(train, test), test),
    )
    (out / "vowels.json").write_text(json.dumps(counts._asdict(), indent=1) + "\n")
    (out / "vowels.md").write_text(write_table(counts))
    (out / "vowels.svg").write_text(draw(choose_panels(test, answers, answers_of_neighbour)))
    print(write_line(counts))
    print(f"written: {out}")


if __name__ == "__main__":
    typer.run(main)

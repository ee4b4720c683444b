"""Record drives: `python -m examples.terra.drive.record --help`. Needs `requirements/drive.txt`."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from .drives import DATA, FIRST_TRAINING_SEED, PER_FILE, save


def main(
    drives: Annotated[int, typer.Option(min=1, help="Drives to record.")] = 3000,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first one.")] = FIRST_TRAINING_SEED,
    out: Annotated[Path, typer.Option(help="Folder of the recordings.")] = DATA,
    processes: Annotated[int, typer.Option(min=1, help="Processes that record.")] = 2,
) -> None:
    """Record drives, a hundred in a file; files that are there are not recorded again.

    `--first 0 --drives 24` records those that models are judged on: held_out.npz.
    """
    firsts = [seed for seed in range(first, first + drives, PER_FILE) if not (out / f"{seed}.npz").exists()]
    sizes = [min(PER_FILE, first + drives - seed) for seed in firsts]
    # spawned, as SDL wants it
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        files = pool.map(_record, firsts, sizes, [out] * len(firsts))
        for _ in tqdm(files, "recording", len(firsts), unit="file"):
            pass


def _record(first: int, size: int, out: Path) -> None:
    from .simulator import record

    save([record(seed) for seed in range(first, first + size)], out / f"{first}.npz")


if __name__ == "__main__":
    typer.run(main)

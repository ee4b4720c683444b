"""Judge the world model on drives never seen: `python -m examples.terra.drive.judge --help`.

Every figure is of generated frames, decoded to pixels, against the recorded ones; see `metrics`.
"""

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from .. import CHECKPOINT
from ..reference import LlamaActionForCausalLM
from .drives import CONTEXT_FRAMES, NUM_FRAMES, Drive
from .metrics import METRES_NEAR, blobs, ego_distance, kept, mass, psnr, ssim, unity, without_clock
from .simulator import CELLS, Town, record, render
from .tokenizer import Tokenizer

GENERATED = NUM_FRAMES - CONTEXT_FRAMES
FIGURES = Path(__file__).parent / "figures.json"
"""Those of docs/terra-drive.md."""
MARK = "<!-- figures.json -->"
"""Stands before and behind the table on the page."""
MODEL, TOWN = "world model", "the town itself"
SHUFFLES = 100
"""Orders of a drive's actions that are looked at; most orders of actions that are much alike lead the same way."""

COLUMNS = {
    "persistence": "vehicles there, %",
    "ego": "ego in place, %",
    "mass": "mass",
    "unity": "unity",
    "life": "life",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
}


def main(
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT,
    drives: Annotated[int, typer.Option(min=1, help="Drives to judge.")] = 24,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first one.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to write the figures.")] = Path("out/drive-judge.json"),
    page: Annotated[Path | None, typer.Option(help="A page whose table of figures to replace.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
) -> None:
    """Generate all frames of every drive after three of context, and print the figures beside those of baselines."""
    torch.set_num_threads(threads)
    seeds = range(first, first + drives)
    judged = [record(seed) for seed in tqdm(seeds, "recording", unit="drive")]
    tokenizer = Tokenizer.load(model)
    world_model = LlamaActionForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    context = torch.from_numpy(np.stack([tokenizer.encode(drive.frames[:CONTEXT_FRAMES]) for drive in judged]))

    def dream(actions: np.ndarray, label: str) -> np.ndarray:
        steps = world_model.rollout(context, torch.from_numpy(actions), GENERATED)
        ids = torch.stack(list(tqdm(steps, label, GENERATED, unit="frame")), dim=1)
        return tokenizer.decode(ids.numpy(), CELLS)

    actions = np.stack([drive.actions for drive in judged])
    others = {
        "shuffled": np.stack([shuffled(drive, seed) for drive, seed in zip(judged, seeds, strict=True)]),
        "of another drive": np.concatenate(
            [actions[:, : CONTEXT_FRAMES - 1], np.roll(actions, 1, axis=0)[:, CONTEXT_FRAMES - 1 :]], axis=1
        ),
    }
    last = np.stack([drive.frames[CONTEXT_FRAMES - 1] for drive in judged])
    shape = (len(judged), GENERATED, *last.shape[1:])
    videos = {MODEL: dream(actions, "true actions")}
    for name, other in others.items():
        videos[f"{MODEL}, actions {name}"] = dream(other, name)
        videos[f"{TOWN}, actions {name}"] = np.stack([followed(*pair) for pair in zip(seeds, other, strict=True)])
    videos |= {
        "last frame": np.broadcast_to(last[:, None], shape),
        "empty scene": np.broadcast_to(render([]), shape),
        "tokenizer alone": np.stack(
            [tokenizer.decode(tokenizer.encode(drive.frames[CONTEXT_FRAMES:]), CELLS) for drive in judged]
        ),
    }
    per_drive: dict[str, list[Any]] = {
        name: [judge(*pair) for pair in tqdm(zip(video, judged, strict=True), name, len(judged), unit="drive")]
        for name, video in videos.items()
    }
    persistence = np.mean([each["persistence"] for each in per_drive[MODEL]], axis=0)
    report = {
        "first": first,
        "drives": drives,
        "generated": GENERATED,
        "figures": {name: summary(each) for name, each in per_drive.items()},
        "persistence by frame": persistence.round(1).tolist(),
        "ego in place though its actions lead elsewhere, %": {
            name: ignored(*(per_drive[f"{who}, actions {name}"] for who in (MODEL, TOWN))) for name in others
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    if page is not None:
        before, _, after = page.read_text().split(MARK)
        page.write_text(f"{before}{MARK}\n{markdown(report)}\n{MARK}{after}")


def judge(video: np.ndarray, drive: Drive) -> dict[str, Any]:
    """The figures of one drive: of every frame where they are of frames.

    Args:
        video: uint8 (generated frames, height, width, 3).
        drive: what happened.
    """
    truth = drive.frames[CONTEXT_FRAMES:]
    pairs = [(blobs(frame), blobs(true)) for frame, true in zip(video, truth, strict=True)]
    moves, lives = (
        [not np.array_equal(*pair) for pair in pairwise(frames)] for frames in map(without_clock, (truth, video))
    )
    return {
        "persistence": [100 * kept(*pair) for pair in pairs],
        "ego": [100.0 * (ego_distance(*pair) <= METRES_NEAR) for pair in pairs],
        "mass": [mass(*pair) for pair in pairs],
        "unity": [unity(*pair) for pair in pairs],
        "life": float(np.mean([life for life, move in zip(lives, moves, strict=True) if move])),
        "psnr": psnr(video, truth),
        "ssim": [ssim(*pair) for pair in zip(video, truth, strict=True)],
    }


def summary(drives: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Mean and standard deviation over drives of each figure; of the mass the median, the least and the most of all
    frames."""
    figures = {}
    for name in COLUMNS:
        values = [np.mean(drive[name]) for drive in drives]
        figures[name] = [float(np.mean(values)), float(np.std(values))]
    masses = [drive["mass"] for drive in drives]
    figures["mass"] = [float(value) for value in (np.median(masses), np.min(masses), np.max(masses))]
    return {name: [round(value, 4) for value in values] for name, values in figures.items()}


def followed(seed: int, actions: np.ndarray) -> np.ndarray:
    """The frames after the context, where the ego vehicle of a drive goes as other actions lead it."""
    town = Town(seed)
    for _ in range(CONTEXT_FRAMES - 1):
        town.advance()
    frames = []
    for action in actions[CONTEXT_FRAMES - 1 :]:
        town.follow(action)
        frames.append(town.picture())
    return np.stack(frames)


def shuffled(drive: Drive, seed: int) -> np.ndarray:
    """The actions of a drive in another order, but for those of the context: of SHUFFLES orders, the one that leads the
    ego vehicle of the town itself away from its true place in the most frames."""
    rng = np.random.default_rng(seed)
    town = Town(seed)
    for _ in range(CONTEXT_FRAMES - 1):
        town.advance()
    ego = town.vehicles[0]

    def path(actions: np.ndarray) -> np.ndarray:
        ways = accumulate(actions, lambda there, action: [there, *there.led(action)][-1], initial=ego)
        return np.stack([there.position for there in ways])[1:]

    after = drive.actions[CONTEXT_FRAMES - 1 :]
    orders = [rng.permutation(len(after)) for _ in range(SHUFFLES)]
    truth = path(after)
    away = [(np.linalg.norm(path(after[order]) - truth, axis=-1) > METRES_NEAR).sum() for order in orders]
    return np.concatenate([drive.actions[: CONTEXT_FRAMES - 1], after[orders[int(np.argmax(away))]]])


def ignored(shown: list[dict[str, Any]], town: list[dict[str, Any]]) -> float:
    """Of the frames in which the town itself has the ego vehicle elsewhere than the true actions led it, the share in
    percent that shows it there nevertheless."""
    pairs = [pair for drives in zip(shown, town, strict=True) for pair in zip(*(d["ego"] for d in drives), strict=True)]
    return round(float(np.mean([model for model, truth in pairs if not truth])), 1)


def cells(figures: dict[str, list[float]]) -> list[str]:
    """The figures of a row, as the table shows them."""
    digits = {"persistence": 1, "ego": 1, "psnr": 1}
    shown = []
    for name, (first, *rest) in figures.items():
        form = f".{digits.get(name, 2)}f"
        spread = f" ({rest[0]:{form}} to {rest[1]:{form}})" if name == "mass" else f" ± {rest[0]:{form}}"
        shown.append(f"{first:{form}}{spread}")
    return shown


def title(report: dict[str, Any]) -> str:
    """What the figures are of."""
    drives = f"{report['drives']} drives never seen, from seed {report['first']}"
    return f"{report['generated']} frames of each of {drives}: mean ± standard deviation over drives"


def show(report: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table("", *COLUMNS.values(), title=title(report))
    for name, figures in report["figures"].items():
        table.add_row(name, *cells(figures))
    Console().print(table)


def markdown(report: dict[str, Any]) -> str:
    """The figures as a table of a page."""
    lines = [[title(report), *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    lines += [[name, *cells(figures)] for name, figures in report["figures"].items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    typer.run(main)

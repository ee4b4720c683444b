"""Judge the world model on drives never seen: `python -m examples.terra.drive.judge --help`.

Every figure is of generated frames, decoded to pixels, against the recorded ones; see `metrics`.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
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
from .metrics import METRES_NEAR, blobs, ego_distance, mass, persistence, psnr, ssim, unity, without_clock
from .simulator import CELLS, Town, Vehicle, record, render
from .tokenizer import Tokenizer

GENERATED = NUM_FRAMES - CONTEXT_FRAMES
FIGURES = Path(__file__).parent / "figures.json"
"""Those of docs/data/terra-town.md."""
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
    recorded = [record(seed) for seed in tqdm(seeds, "recording", unit="drive")]
    tokenizer = Tokenizer.load(model)
    dream = Dream(model, tokenizer, recorded)
    actions = np.stack([drive.actions for drive in recorded])
    wrong_actions = {
        "shuffled": np.stack([shuffle_actions(drive, seed) for drive, seed in zip(recorded, seeds, strict=True)]),
        "of another drive": take_actions_of_another_drive(actions),
    }

    videos = {MODEL: dream.generate(actions, "true actions")}
    for name, wrong in wrong_actions.items():
        videos[f"{MODEL}, actions {name}"] = dream.generate(wrong, name)
        videos[f"{TOWN}, actions {name}"] = drive_town(seeds, wrong)
    videos.update(make_baselines(recorded, tokenizer))

    figures: dict[str, list[dict[str, Any]]] = {}
    for name, video in videos.items():
        progress = tqdm(zip(video, recorded, strict=True), name, len(recorded), unit="drive")
        figures[name] = [judge(frames, drive) for frames, drive in progress]

    report = make_report(first, figures, list(wrong_actions))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    show(report)
    if page is not None:
        before, _, after = page.read_text().split(MARK)
        page.write_text(f"{before}{MARK}\n{markdown(report)}\n{MARK}{after}")


class Dream:
    """What a world model generates after the context of recorded drives.

    Args:
        model: folder of the checkpoint.
        tokenizer: the image tokenizer of the checkpoint.
        drives: the recorded drives.
    """

    def __init__(self, model: Path, tokenizer: Tokenizer, drives: list[Drive]) -> None:
        self._model = LlamaActionForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._tokenizer = tokenizer
        contexts = [tokenizer.encode(drive.frames[:CONTEXT_FRAMES]) for drive in drives]
        self._context = torch.from_numpy(np.stack(contexts))

    def generate(self, actions: np.ndarray, label: str) -> np.ndarray:
        """Generate the frames of all drives after their context, with a progress bar.

        Args:
            actions: float32 (drives, frames - 1, waypoints, 3).
            label: names the actions on the progress bar.

        Returns:
            uint8 (drives, GENERATED, height, width, 3).
        """
        steps = self._model.rollout(self._context, torch.from_numpy(actions), GENERATED)
        frames = list(tqdm(steps, label, GENERATED, unit="frame"))
        return self._tokenizer.decode(torch.stack(frames, dim=1).numpy(), CELLS)


def drive_town(seeds: Sequence[int], actions: np.ndarray) -> np.ndarray:
    """Return the frames of all drives after their context, where the town itself follows other actions."""
    videos = []
    for seed, drive_actions in zip(seeds, actions, strict=True):
        videos.append(follow_actions(seed, drive_actions))
    return np.stack(videos)


def make_baselines(drives: list[Drive], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Return the videos of baselines that know no actions: the last frame of the context, a scene without vehicles, and
    the true frames as the tokenizer shows them."""
    last = np.stack([drive.frames[CONTEXT_FRAMES - 1] for drive in drives])
    shape = (len(drives), GENERATED) + last.shape[1:]
    tokenized = []
    for drive in drives:
        ids = tokenizer.encode(drive.frames[CONTEXT_FRAMES:])
        tokenized.append(tokenizer.decode(ids, CELLS))
    return {
        "last frame": np.broadcast_to(last[:, None], shape),
        "empty scene": np.broadcast_to(render([]), shape),
        "tokenizer alone": np.stack(tokenized),
    }


def make_report(first: int, figures: dict[str, list[dict[str, Any]]], wrong_actions: list[str]) -> dict[str, Any]:
    """Return what figures.json holds.

    Args:
        first: seed of the first drive.
        figures: by video, the figures of each drive.
        wrong_actions: names of the wrong actions.
    """
    persistence = np.mean([drive["persistence"] for drive in figures[MODEL]], axis=0)
    ignored = {}
    for name in wrong_actions:
        of_model = figures[f"{MODEL}, actions {name}"]
        of_town = figures[f"{TOWN}, actions {name}"]
        ignored[name] = share_of_ignored_actions(of_model, of_town)
    return {
        "first": first,
        "drives": len(figures[MODEL]),
        "generated": GENERATED,
        "figures": {name: summarize(drives) for name, drives in figures.items()},
        "persistence by frame": persistence.round(1).tolist(),
        "ego in place though its actions lead elsewhere, %": ignored,
    }


def judge(video: np.ndarray, drive: Drive) -> dict[str, Any]:
    """Return the figures of one drive: of every frame where they are of frames.

    Args:
        video: uint8 (generated frames, height, width, 3).
        drive: what happened.
    """
    truth = drive.frames[CONTEXT_FRAMES:]
    figures: dict[str, Any] = {"persistence": [], "ego": [], "mass": [], "unity": [], "ssim": []}
    for frame, true_frame in zip(video, truth, strict=True):
        shown = blobs(frame)
        true_blobs = blobs(true_frame)
        figures["persistence"].append(100 * persistence(shown, true_blobs))
        figures["ego"].append(100.0 * (ego_distance(shown, true_blobs) <= METRES_NEAR))
        figures["mass"].append(mass(shown, true_blobs))
        figures["unity"].append(unity(shown, true_blobs))
        figures["ssim"].append(ssim(frame, true_frame))
    figures["psnr"] = psnr(video, truth)
    moves = find_moves(truth)
    figures["life"] = float(np.mean(find_moves(video)[moves]))
    return figures


def find_moves(frames: np.ndarray) -> np.ndarray:
    """Return whether something but the clock moves from each frame to the next: bool (frames - 1,)."""
    scenes = without_clock(frames)
    return np.array([not np.array_equal(before, after) for before, after in pairwise(scenes)])


def summarize(drives: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return mean and standard deviation over drives of each figure; of the mass the median, the least and the most of
    all frames."""
    figures = {}
    for name in COLUMNS:
        values = [np.mean(drive[name]) for drive in drives]
        figures[name] = [round(float(np.mean(values)), 4), round(float(np.std(values)), 4)]
    masses = [drive["mass"] for drive in drives]
    extremes = [np.median(masses), np.min(masses), np.max(masses)]
    figures["mass"] = [round(float(value), 4) for value in extremes]
    return figures


def follow_actions(seed: int, actions: np.ndarray) -> np.ndarray:
    """Return the frames after the context, where the ego vehicle of a drive goes as other actions lead it."""
    town = _town_after_context(seed)
    frames = []
    for action in actions[CONTEXT_FRAMES - 1 :]:
        town.follow(action)
        frames.append(town.picture())
    return np.stack(frames)


def take_actions_of_another_drive(actions: np.ndarray) -> np.ndarray:
    """Return the actions of drives, but after the context those of the drive before."""
    context = actions[:, : CONTEXT_FRAMES - 1]
    after = np.roll(actions, 1, axis=0)[:, CONTEXT_FRAMES - 1 :]
    return np.concatenate([context, after], axis=1)


def shuffle_actions(drive: Drive, seed: int) -> np.ndarray:
    """Return the actions of a drive in another order, but for those of the context: of SHUFFLES orders, the one that
    leads the ego vehicle of the town itself away from its true place in the most frames."""
    rng = np.random.default_rng(seed)
    ego = _town_after_context(seed).vehicles[0]
    actions = drive.actions[CONTEXT_FRAMES - 1 :]
    truth = find_path(ego, actions)
    orders = [rng.permutation(len(actions)) for _ in range(SHUFFLES)]
    frames_away = []
    for order in orders:
        distances = np.linalg.norm(find_path(ego, actions[order]) - truth, axis=-1)
        frames_away.append((distances > METRES_NEAR).sum())
    best = orders[int(np.argmax(frames_away))]
    return np.concatenate([drive.actions[: CONTEXT_FRAMES - 1], actions[best]])


def find_path(vehicle: Vehicle, actions: np.ndarray) -> np.ndarray:
    """Return the position of a vehicle after each action: float64 (actions, 2), in metres."""
    positions = []
    for action in actions:
        places = vehicle.follow(action)
        if places:
            vehicle = places[-1]
        positions.append(vehicle.position)
    return np.stack(positions)


def share_of_ignored_actions(of_model: list[dict[str, Any]], of_town: list[dict[str, Any]]) -> float:
    """Return the share of ignored actions, in percent: of the frames in which the town itself has the ego vehicle
    elsewhere than the true actions led it, those in which the model shows it there nevertheless.

    Args:
        of_model, of_town: the figures of each drive, generated by wrong actions.
    """
    shown_in_place = []
    for model_drive, town_drive in zip(of_model, of_town, strict=True):
        for model_ego, town_ego in zip(model_drive["ego"], town_drive["ego"], strict=True):
            if not town_ego:
                shown_in_place.append(model_ego)
    return round(float(np.mean(shown_in_place)), 1)


def _town_after_context(seed: int) -> Town:
    town = Town(seed)
    for _ in range(CONTEXT_FRAMES - 1):
        town.advance()
    return town


def cells(figures: dict[str, list[float]]) -> list[str]:
    """Return the figures of a row, as the table shows them."""
    digits = {"persistence": 1, "ego": 1, "psnr": 1}
    texts = []
    for name, values in figures.items():
        numbers = [f"{value:.{digits.get(name, 2)}f}" for value in values]
        if name == "mass":
            texts.append(f"{numbers[0]} ({numbers[1]} to {numbers[2]})")
        else:
            texts.append(f"{numbers[0]} ± {numbers[1]}")
    return texts


def title(report: dict[str, Any]) -> str:
    """Return the title of the table."""
    drives = f"{report['drives']} drives never seen, from seed {report['first']}"
    return f"{report['generated']} frames of each of {drives}: mean ± standard deviation over drives"


def show(report: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table("", *COLUMNS.values(), title=title(report))
    for name, figures in report["figures"].items():
        table.add_row(name, *cells(figures))
    Console().print(table)


def markdown(report: dict[str, Any]) -> str:
    """Return the figures as a table of a page."""
    rows = [[title(report)] + list(COLUMNS.values()), ["---"] * (1 + len(COLUMNS))]
    for name, figures in report["figures"].items():
        rows.append([name] + cells(figures))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    typer.run(main)

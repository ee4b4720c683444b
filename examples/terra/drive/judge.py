"""Judge the world model on drives never seen: `python -m examples.terra.drive.judge --help`.

Every figure is of generated frames, decoded to pixels, against the recorded ones.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from skimage.metrics import structural_similarity
from tqdm import tqdm

from ..reference import LlamaActionForCausalLM
from . import CHECKPOINT
from .drives import CONTEXT_FRAMES, HELD_OUT, METRES_NEAR, METRES_PER_PIXEL, NUM_FRAMES, VIEW_METRES, Drive, load
from .metrics import ego_distance, psnr
from .tokenizer import Tokenizer, decode_frames, encode_frames

GENERATED = NUM_FRAMES - CONTEXT_FRAMES
CUT_METRES = 4.0
"""Half the side of the square that is moved with the ego vehicle."""

Video = np.ndarray
"""uint8 (drives, GENERATED, height, width, 3)."""


def main(
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT,
    drives: Annotated[int, typer.Option(min=1, help="Drives to judge, from seed 0 on.")] = 24,
    out: Annotated[Path, typer.Option(help="Where to write the figures.")] = Path("out/drive-judge.json"),
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
) -> None:
    """Generate 22 frames of every drive after three of context, and print the figures beside those of baselines."""
    torch.set_num_threads(threads)
    judged = load(HELD_OUT)[:drives]
    tokenizer = Tokenizer.load(model)
    world_model = LlamaActionForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    frames = np.stack([drive.frames for drive in judged])
    truth = frames[:, CONTEXT_FRAMES:]
    tokens = torch.from_numpy(encode_frames(tokenizer, frames))
    actions = np.stack([drive.actions for drive in judged])

    def dream(actions: np.ndarray, label: str) -> Video:
        context = tokens[:, :CONTEXT_FRAMES]
        steps = world_model.rollout(context, torch.from_numpy(actions), GENERATED)
        ids = torch.stack(list(tqdm(steps, label, GENERATED, unit="frame")), dim=1)
        return decode_frames(tokenizer, ids.numpy())

    videos: dict[str, Video] = {
        "world model": dream(actions, "true actions"),
        "world model, actions shuffled": dream(shuffled(actions), "shuffled"),
        "last frame": np.broadcast_to(frames[:, CONTEXT_FRAMES - 1 : CONTEXT_FRAMES], truth.shape),
        "last frame, ego vehicle moved": np.stack([moved(drive, empty_scene(frames)) for drive in judged]),
        "empty scene": np.broadcast_to(empty_scene(frames), truth.shape),
        "tokenizer alone": decode_frames(tokenizer, tokens[:, CONTEXT_FRAMES:].numpy()),
    }
    places = np.stack([drive.places[CONTEXT_FRAMES:] for drive in judged])
    figures = {name: judge(video, truth, places) for name, video in videos.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"drives": len(judged), "figures": figures}, indent=2) + "\n")
    show(figures, len(judged))


def judge(video: Video, truth: Video, places: np.ndarray) -> dict[str, list[float]]:
    """Mean and standard deviation over drives of three figures.

    Args:
        video, truth: generated and recorded frames.
        places: float32 (drives, GENERATED, 2), where the ego vehicle is, in metres.
    """
    per_frame: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], float]] = {
        "PSNR, dB": lambda frame, true, place: float(psnr(frame, true)),
        "SSIM": lambda frame, true, place: float(structural_similarity(frame, true, channel_axis=-1)),
        "ego in place, %": lambda frame, true, place: 100.0 * (ego_distance(frame, place) <= METRES_NEAR),
    }
    figures = {}
    for name, figure in per_frame.items():
        drives = zip(video, truth, places, strict=True)
        means = [np.mean([figure(*step) for step in zip(*drive, strict=True)]) for drive in drives]
        figures[name] = [round(float(np.mean(means)), 3), round(float(np.std(means)), 3)]
    return figures


def shuffled(actions: np.ndarray) -> np.ndarray:
    """Actions (drives, frames - 1, ...) in another order, of each drive; those of the context stay."""
    rng = np.random.default_rng(0)
    other = actions.copy()
    for drive in other:
        rng.shuffle(drive[CONTEXT_FRAMES - 1 :])
    return other


def empty_scene(frames: np.ndarray) -> np.ndarray:
    """What stands still in frames (drives, frames, height, width, 3): uint8 (height, width, 3)."""
    return np.median(frames[:, 0], axis=0).astype(np.uint8)


def moved(drive: Drive, scene: np.ndarray) -> Video:
    """The last frame of the context with the ego vehicle moved, without turning, to where each action leads."""
    last = drive.frames[CONTEXT_FRAMES - 1]
    half = round(CUT_METRES / METRES_PER_PIXEL)
    corners = ((drive.places + VIEW_METRES / 2) / METRES_PER_PIXEL).round().astype(int)[:, ::-1]
    padding = ((half, half), (half, half), (0, 0))
    rest, start = np.pad(last, padding, mode="edge"), corners[CONTEXT_FRAMES - 1]
    padded_scene = np.pad(scene, padding, mode="edge")

    def cut(picture: np.ndarray, corner: np.ndarray) -> np.ndarray:
        return picture[corner[0] : corner[0] + 2 * half, corner[1] : corner[1] + 2 * half]

    vehicle = cut(rest, start).copy()
    differs = (np.abs(vehicle.astype(int) - cut(padded_scene, start)).max(-1) > 15)[..., None]
    cut(rest, start)[:] = cut(padded_scene, start)

    def frames() -> Iterator[np.ndarray]:
        for corner in corners[CONTEXT_FRAMES:]:
            frame = rest.copy()
            target = cut(frame, corner)
            target[:] = np.where(differs, vehicle, target)
            yield frame[half:-half, half:-half]

    return np.stack(list(frames()))


def show(figures: dict[str, dict[str, list[float]]], drives: int) -> None:
    """Print the figures as a table."""
    title = f"{GENERATED} frames of each of {drives} drives never seen: mean ± standard deviation over drives"
    table = Table("", *next(iter(figures.values())), title=title)
    for name, row in figures.items():
        table.add_row(name, *(f"{mean:.2f} ± {spread:.2f}" for mean, spread in row.values()))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

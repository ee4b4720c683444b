"""Recorded drives as tokens, and the windows that a world model is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .drives import NUM_FRAMES
from .simulator import CELL_PIXELS, record
from .tokenizer import Tokenizer

CODEBOOK_DRIVES = 60
"""Drives whose frames the codebook is learned from."""


@dataclass(frozen=True)
class Tokens:
    """Drives as a world model sees them.

    Attributes:
        frames: int16 (drives, frames, tokens of a frame).
        actions: float32 (drives, frames - 1, waypoints, 3).
    """

    frames: Tensor
    actions: Tensor

    def draw_windows(self, rng: np.random.Generator, size: int, num_frames: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw windows, each placed at a random moment, so that every moment is trained.

        Returns:
            Frames int64 (size, num_frames, tokens), actions float32 (size, num_frames - 1, waypoints, 3) and the
            moment of each first frame, int64 (size, 1).
        """
        drives = torch.from_numpy(rng.integers(len(self.frames), size=(size, 1)))
        firsts = torch.from_numpy(rng.integers(NUM_FRAMES - num_frames + 1, size=(size, 1)))
        moments = torch.from_numpy(rng.integers(NUM_FRAMES - num_frames + 1, size=(size, 1)))
        steps = firsts + torch.arange(num_frames)
        return self.frames[drives, steps].long(), self.actions[drives, steps[:, :-1]], moments


def record_tokens(seeds: Sequence[int], file: Path) -> tuple[Tokens, Tokenizer]:
    """Record drives, and return them as tokens of a codebook that is learned from the first of them.

    It shows a progress bar. Where an earlier run wrote the tokens, they are read.

    Args:
        seeds: of the drives.
        file: NPZ. It is read only if it is of the same seeds.
    """
    if file.exists():
        with np.load(file) as arrays:
            if np.array_equal(arrays["seeds"], seeds):
                tokens = Tokens(torch.from_numpy(arrays["frames"]), torch.from_numpy(arrays["actions"]))
                return tokens, Tokenizer(arrays["codebook"])
    tokenizer = None
    pictures: list[np.ndarray] = []  # of the first drives, until the codebook is learned
    frames: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    for count, seed in enumerate(tqdm(seeds, "recording", unit="drive"), 1):
        drive = record(seed)
        pictures.append(drive.frames)
        actions.append(drive.actions)
        if tokenizer is None and count < min(CODEBOOK_DRIVES, len(seeds)):
            continue
        if tokenizer is None:
            tokenizer = Tokenizer.learn(np.concatenate(pictures), CELL_PIXELS)
        for picture in pictures:
            frames.append(tokenizer.encode(picture).astype(np.int16))
        pictures.clear()
    assert tokenizer is not None, "no seeds"
    all_frames = np.stack(frames)
    all_actions = np.stack(actions)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, seeds=seeds, codebook=tokenizer.codebook, frames=all_frames, actions=all_actions)
    return Tokens(torch.from_numpy(all_frames), torch.from_numpy(all_actions)), tokenizer

"""Recorded drives as tokens, and the windows that a world model is trained on."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .drives import FIRST_TRAINING_SEED, NUM_FRAMES, load
from .tokenizer import Tokenizer, encode_frames


@dataclass(frozen=True)
class Tokens:
    """Drives as a world model sees them.

    Attributes:
        frames: int16 (drives, frames, tokens of a frame).
        actions: float32 (drives, frames - 1, waypoints, 3).
    """

    frames: Tensor
    actions: Tensor

    def windows(self, rng: np.random.Generator, size: int, num_frames: int) -> tuple[Tensor, Tensor, Tensor]:
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


def read(paths: Iterable[Path], tokenizer: Tokenizer) -> Tokens:
    """Turn recordings into tokens, with a progress bar."""
    frames, actions = [], []
    for path in tqdm(list(paths), "reading", unit="file"):
        drives = load(path)
        tokens = np.concatenate([encode_frames(tokenizer, drive.frames)[None] for drive in drives])
        frames.append(tokens.astype(np.int16))
        actions.append(np.stack([drive.actions for drive in drives]))
    return Tokens(torch.from_numpy(np.concatenate(frames)), torch.from_numpy(np.concatenate(actions)))


def training_files(data: Path) -> list[Path]:
    """Recordings to train on."""
    return sorted(path for path in data.glob("*.npz") if int(path.stem) >= FIRST_TRAINING_SEED)

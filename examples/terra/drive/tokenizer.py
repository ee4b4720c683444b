"""An image tokenizer: frames to ids and back, by vector quantization with a codebook of patches."""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

CODEBOOK = Path("image_tokenizer/codebook.safetensors")
"""The file of a tokenizer in its world model's checkpoint: in a folder of its own, as vLLM takes every file of weights
beside the model's for the model's."""
MAX_CODES = 1024


class Tokenizer:
    """Frames to ids and back. An id depends on its own patch alone, so that what stands still keeps its ids.

    Args:
        codebook: uint8 (ids, side, side, 3), the patch of each id, RGB.
    """

    def __init__(self, codebook: np.ndarray) -> None:
        self.codebook = codebook
        self._codes = codebook.reshape(len(codebook), -1).astype(np.float64)

    @classmethod
    def learn(cls, frames: np.ndarray, side: int, max_codes: int = MAX_CODES) -> "Tokenizer":
        """Learn a codebook: patch by patch, the one that differs most from those that are in it.

        Args:
            frames: uint8 (frames, height, width, 3).
            side: of a patch, in pixels.
            max_codes: ids there may be. There are fewer where they draw every patch as it is.
        """
        counts = Counter(patch.tobytes() for patch in _patches(frames, side))
        distinct = np.stack([np.frombuffer(patch, np.uint8) for patch, _ in counts.most_common()])
        patches = distinct.astype(np.float64)
        codes = [0]
        errors = np.square(patches - patches[0]).sum(1)
        while errors.any() and len(codes) < max_codes:
            worst = int(errors.argmax())
            codes.append(worst)
            errors = np.minimum(errors, np.square(patches - patches[worst]).sum(1))
        return cls(distinct[codes].reshape(-1, side, side, 3))

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """Return the id of the nearest patch of the codebook, for every patch.

        Args:
            frames: uint8 (..., height, width, 3), RGB.

        Returns:
            int64 (..., rows * cols), row by row from the top left.
        """
        side = self.codebook.shape[1]
        height, width = frames.shape[-3:-1]
        patches = _patches(frames.reshape((-1,) + frames.shape[-3:]), side).astype(np.float64)
        # the squared distance, without the square of the patch itself, which all codes share
        distances = np.square(self._codes).sum(1) - 2 * patches @ self._codes.T
        num_patches = (height // side) * (width // side)
        return distances.argmin(1).reshape(frames.shape[:-3] + (num_patches,))

    def decode(self, ids: np.ndarray, rows: int) -> np.ndarray:
        """Return the frames that ids stand for.

        Args:
            ids: integers (..., rows * cols).
            rows: of a frame.

        Returns:
            uint8 (..., height, width, 3), RGB.
        """
        side = self.codebook.shape[1]
        patches = self.codebook[ids].reshape(-1, rows, ids.shape[-1] // rows, side, side, 3)
        frames = patches.swapaxes(2, 3)
        return frames.reshape(ids.shape[:-1] + (rows * side, -1, 3))

    def save(self, folder: Path) -> None:
        """Write the codebook into a checkpoint."""
        (folder / CODEBOOK).parent.mkdir(parents=True, exist_ok=True)
        save_file({"codebook": self.codebook}, folder / CODEBOOK)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read what `save` wrote.

        Raises:
            ValueError: a folder without it.
        """
        if not (folder / CODEBOOK).exists():
            remedy = "Name a checkpoint of examples.terra.drive, and load its config by AutoConfig from its folder."
            raise ValueError(
                f"image tokenizer: expected {CODEBOOK} in the checkpoint's folder, got none in '{folder}'. {remedy}"
            )
        return cls(load_file(folder / CODEBOOK)["codebook"])


def _patches(frames: np.ndarray, side: int) -> np.ndarray:
    """Return the patches of frames (frames, height, width, 3): (frames * rows * cols, side * side * 3)."""
    count, height, width, _ = frames.shape
    patches = frames.reshape(count, height // side, side, width // side, side, 3).swapaxes(2, 3)
    return np.ascontiguousarray(patches).reshape(-1, side * side * 3)


@cache
def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer in the folder of a checkpoint, loaded once."""
    return Tokenizer.load(folder)

"""Write recordings.npz from a wheel of aeon: ``python -m examples.vowels.extract aeon-1.6.0-py3-none-any.whl``.

``pip download --no-deps aeon==1.6.0`` fetches the wheel. Nothing of it is installed or run.
"""

from pathlib import Path
from typing import Annotated
from zipfile import ZipFile

import numpy as np
import typer

from .recordings import FILE

MEMBER = "aeon/datasets/data/JapaneseVowels/JapaneseVowels_{}.ts"
SCALE = 10_000
"""Values are kept as whole numbers of this fraction: half of the data set's six digits, in half of the bytes."""


def read_split(text: str) -> tuple[list[np.ndarray], list[int]]:
    """Return the recordings (frames, 12) and the speakers of a file of the format ``.ts``.

    After ``@data`` each line is a recording: channels separated by colons, values by commas, and the label at the end.
    """
    recordings = []
    speakers = []
    for line in text.partition("@data")[2].split():
        *channels, speaker = line.split(":")
        values = [[float(value) for value in channel.split(",")] for channel in channels]
        recordings.append(np.array(values).T)
        speakers.append(int(speaker))
    return recordings, speakers


def main(
    wheel: Annotated[Path, typer.Argument(help="A wheel of aeon.")],
    out: Annotated[Path, typer.Option(help="Where the recordings go.")] = FILE,
) -> None:
    """Write the recordings of a wheel as one compressed file."""
    arrays: dict[str, np.ndarray] = {"scale": np.float32(SCALE)}
    with ZipFile(wheel) as archive:
        for split in ("train", "test"):
            text = archive.read(MEMBER.format(split.upper())).decode()
            recordings, speakers = read_split(text)
            frames = np.round(np.concatenate(recordings) * SCALE)
            arrays[f"{split}_frames"] = frames.astype(np.int16)
            arrays[f"{split}_lengths"] = np.array([len(frames) for frames in recordings], dtype=np.uint8)
            arrays[f"{split}_speakers"] = np.array(speakers, dtype=np.uint8)
    np.savez_compressed(out, **arrays)
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    typer.run(main)

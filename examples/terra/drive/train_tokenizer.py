"""Train the tokenizer: `python -m examples.terra.drive.train_tokenizer --help`."""

import io
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from . import CHECKPOINT
from .data import training_files
from .drives import DATA, HELD_OUT, load
from .metrics import psnr
from .tokenizer import SMALL, Tokenizer, decode_frames, encode_frames

BATCH = 16
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 50
VEHICLE_WEIGHT = 10.0
"""How much more a pixel counts that differs from the empty scene: vehicles are 1 % of a frame."""
VEHICLE_DIFFERENCE = 0.06


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 3000,
    data: Annotated[Path, typer.Option(help="Folder of the recordings.")] = DATA,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
) -> None:
    """Train on recorded drives, and print the error on frames that were never seen, beside JPEG at the same bits."""
    torch.set_num_threads(threads)
    frames = np.concatenate([drive.frames[::3] for path in training_files(data) for drive in load(path)])
    held_out = np.concatenate([drive.frames[::3] for drive in load(HELD_OUT)])
    tokenizer = train(torch.from_numpy(frames), steps, seed)
    tokenizer.save(out)
    tokenizer = Tokenizer.load(out)  # in 16 bits, as it will be used
    again = decode_frames(tokenizer, encode_frames(tokenizer, held_out))
    bits = tokenizer.config.rows * tokenizer.config.cols * np.log2(tokenizer.config.vocab_size)
    jpegs, sizes = zip(*(as_jpeg(frame, bits / 8) for frame in held_out[::10]), strict=True)
    print(f"{psnr(again, held_out).mean():.2f} dB on {len(held_out)} frames never seen, {bits / 8:.0f} bytes a frame")
    print(f"JPEG: {psnr(np.stack(jpegs), held_out[::10]).mean():.2f} dB with {np.mean(sizes):.0f} bytes a frame")


def train(frames: Tensor, steps: int, seed: int) -> Tokenizer:
    """Train from scratch on frames, uint8 (frames, height, width, 3)."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = Tokenizer(SMALL).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(tokenizer.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    scene = frames[:: max(1, len(frames) // 500)].median(0).values.permute(2, 0, 1).float() / 255
    average = 0.0
    bar = tqdm(range(steps), "tokenizer", unit="step")
    for step in bar:
        pixels = frames[rng.integers(len(frames), size=BATCH)].permute(0, 3, 1, 2).float() / 255
        is_vehicle = (pixels - scene).abs().amax(1, keepdim=True) > VEHICLE_DIFFERENCE
        loss = ((tokenizer(pixels) - pixels).square() * (1 + VEHICLE_WEIGHT * is_vehicle)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(tokenizer.parameters(), 1.0)  # without it, codes saturate early and stay so
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / WARM_UP_STEPS, 1 - step / steps)
        optimizer.step()
        average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
        bar.set_postfix(error=f"{average:.5f}", refresh=False)
    return tokenizer.eval()


def as_jpeg(frame: np.ndarray, most_bytes: float) -> tuple[np.ndarray, int]:
    """A frame as the best JPEG of so many bytes, and its bytes: without the tables, which all frames could share."""
    best = None
    for quality in range(1, 96):
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=quality, optimize=True, subsampling=2)
        size = len(file.getvalue()) - file.getvalue().index(b"\xff\xda")
        if best is not None and size > most_bytes:
            break
        best = np.asarray(Image.open(file).convert("RGB")), size
    assert best is not None
    return best


if __name__ == "__main__":
    typer.run(main)

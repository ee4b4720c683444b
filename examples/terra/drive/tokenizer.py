"""An image tokenizer: frames to ids and back, by small convolutions and finite scalar quantization.

Finite scalar quantization: Mentzer, Minnen, Agustsson, Tschannen, "Finite Scalar Quantization: VQ-VAE Made Simple",
arXiv:2309.15505.
"""

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

WEIGHTS, SIZES = Path("image_tokenizer/model.safetensors"), Path("image_tokenizer/config.json")
"""The files of a tokenizer in its world model's checkpoint: in a folder of their own, as vLLM takes every file of
weights beside the model's for the model's."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Sizes of a tokenizer.

    Attributes:
        height, width: of a frame, in pixels.
        levels: values that each number of a code can have; their product is the size of the vocabulary.
        widths: channels at each scale; each scale halves height and width.
        blocks: residual blocks behind the last scale, on either side.
    """

    height: int
    width: int
    levels: tuple[int, ...]
    widths: tuple[int, ...]
    blocks: int

    @property
    def rows(self) -> int:
        """Rows of tokens."""
        return self.height >> len(self.widths)

    @property
    def cols(self) -> int:
        """Columns of tokens."""
        return self.width >> len(self.widths)

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return math.prod(self.levels)


SMALL = TokenizerConfig(height=80, width=80, levels=(8, 5, 5, 5), widths=(32, 64, 96), blocks=1)
"""The tokenizer of the drives: 100 tokens a frame."""
PUBLISHED = TokenizerConfig(height=288, width=512, levels=(8,) * 6, widths=(32, 64, 96, 96), blocks=1)
"""The geometry of the published Terra: 18 x 32 = 576 tokens a frame, 262,144 ids."""


class Tokenizer(nn.Module):
    """Frames to ids and back.

    Args:
        config: the sizes.
    """

    levels: Tensor
    strides: Tensor

    def __init__(self, config: TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        levels = torch.tensor(config.levels)
        self.register_buffer("levels", levels, persistent=False)
        self.register_buffer("strides", levels.cumprod(0) // levels, persistent=False)
        inner, outer = config.widths[-1], config.widths[0]
        down: list[nn.Module] = []
        for before, after in zip((3, *config.widths), config.widths, strict=False):
            down += [nn.Conv2d(before, after, 2, stride=2), nn.GELU()]
        # an id depends on its own patch alone, so that what stands still keeps its ids
        blocks = [Residual(inner, 1) for _ in range(config.blocks)]
        self.encoder = nn.Sequential(*down, *blocks, nn.Conv2d(inner, len(config.levels), 1))
        up: list[nn.Module] = []
        for before, after in pairwise(config.widths[::-1]):
            up += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1), nn.GELU()]
        blocks = [Residual(inner, 3) for _ in range(config.blocks)]
        inwards = nn.Conv2d(len(config.levels), inner, 3, padding=1)
        # the last scale is the dearest: four pixels of each place at once
        outwards = [nn.Conv2d(outer, 12, 3, padding=1), nn.PixelShuffle(2)]
        self.decoder = nn.Sequential(inwards, *blocks, *up, *outwards)

    def quantize(self, codes: Tensor) -> Tensor:
        """Round codes to the levels, with the gradient of the identity.

        Args:
            codes: float (batch, len(levels), rows, cols).

        Returns:
            The same shape; whole numbers from 0 to level - 1.
        """
        highest = (self.levels - 1).view(-1, 1, 1)
        bounded = torch.sigmoid(codes) * highest
        return bounded + (bounded.round() - bounded).detach()

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Codes, as `quantize` returns them, to frames: float (batch, 3, height, width), about 0 to 1."""
        highest = (self.levels - 1).view(-1, 1, 1)
        pixels: Tensor = self.decoder(codes / highest * 2 - 1)
        return pixels + 0.5

    def forward(self, frames: Tensor) -> Tensor:
        """Frames as they come back: float (batch, 3, height, width), as `frames`, from 0 to 1."""
        return self.decode_codes(self.quantize(self.encoder(frames - 0.5)))

    @torch.inference_mode()
    def encode(self, frames: Tensor) -> Tensor:
        """Frames to ids.

        Args:
            frames: uint8 (batch, height, width, 3), RGB.

        Returns:
            int64 (batch, rows * cols), row by row from the top left.
        """
        pixels = frames.permute(0, 3, 1, 2).float() / 255
        codes = self.quantize(self.encoder(pixels - 0.5)).long()
        return (codes * self.strides.view(-1, 1, 1)).sum(1).flatten(1)

    @torch.inference_mode()
    def decode(self, ids: Tensor) -> Tensor:
        """Ids to frames.

        Args:
            ids: int64 (batch, rows * cols), below `config.vocab_size`.

        Returns:
            uint8 (batch, height, width, 3), RGB.
        """
        grid = ids.view(len(ids), 1, self.config.rows, self.config.cols)
        codes = grid // self.strides.view(-1, 1, 1) % self.levels.view(-1, 1, 1)
        pixels = functional.hardtanh(self.decode_codes(codes.float()), 0, 1) * 255
        return pixels.round().to(torch.uint8).permute(0, 2, 3, 1)

    def save(self, folder: Path) -> None:
        """Write the weights, in 16 bits, and the sizes."""
        (folder / WEIGHTS).parent.mkdir(parents=True, exist_ok=True)
        weights = {name: weight.half().contiguous() for name, weight in self.state_dict().items()}
        save_file(weights, folder / WEIGHTS)
        (folder / SIZES).write_text(json.dumps(asdict(self.config)) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read what `save` wrote.

        Raises:
            ValueError: a folder without it.
        """
        if not (folder / SIZES).exists():
            remedy = "Name a checkpoint of examples.terra.drive, and load its config by AutoConfig from its folder."
            raise ValueError(
                f"image tokenizer: expected {SIZES} in the checkpoint's folder, got none in '{folder}'. {remedy}"
            )
        sizes = json.loads((folder / SIZES).read_text())
        for name in ("levels", "widths"):
            sizes[name] = tuple(sizes[name])
        tokenizer = cls(TokenizerConfig(**sizes))
        tokenizer.load_state_dict({name: weight.float() for name, weight in load_file(folder / WEIGHTS).items()})
        return tokenizer.eval()


class Residual(nn.Module):
    """Two convolutions beside the identity.

    Args:
        width: channels.
        kernel: side of the convolutions, 1 or 3.
    """

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(width, width, kernel, padding=kernel // 2) for _ in range(2))
        self.inner = nn.Sequential(nn.GELU(), first, nn.GELU(), second)

    def forward(self, features: Tensor) -> Tensor:
        """Float (batch, width, rows, cols), both."""
        inner: Tensor = self.inner(features)
        return features + inner


@cache
def of_checkpoint(folder: Path) -> Tokenizer:
    """The tokenizer in the folder of a checkpoint, loaded once."""
    return Tokenizer.load(folder)


def encode_frames(tokenizer: Tokenizer, frames: np.ndarray) -> np.ndarray:
    """Frames uint8 (..., height, width, 3) to ids int64 (..., rows * cols)."""
    flat = torch.from_numpy(frames.reshape(-1, *frames.shape[-3:]))
    return tokenizer.encode(flat).numpy().reshape(*frames.shape[:-3], -1)


def decode_frames(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Ids int64 (..., rows * cols) to frames uint8 (..., height, width, 3)."""
    frames = tokenizer.decode(torch.from_numpy(ids.reshape(-1, ids.shape[-1]))).numpy()
    return frames.reshape(*ids.shape[:-1], *frames.shape[1:])

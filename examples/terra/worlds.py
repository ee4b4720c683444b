"""The worlds that checkpoints of Terra dream of: where their episodes come from, and what their tokens look like."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import world as tiles
from .drive import tokenizer
from .drive.drives import CELL_METRES, FRAME_SECONDS, HELD_OUT_DRIVES, VIEW_METRES
from .drive.metrics import METRES_NEAR, blobs, ego_distance, kept, psnr
from .drive.simulator import CELLS, EGO, EXITS, JUNCTIONS, UNITS, heading_at, record, render

if TYPE_CHECKING:
    from .configuration import LlamaActionConfig

TILES, DRIVE = "tiles", "drive"
"""Values of `LlamaActionConfig.image_tokenizer`."""
NOISE_TILE = 12
"""Side of the square that is drawn for a token without a picture, in pixels."""


@dataclass(frozen=True)
class Episode:
    """What happened, for a context and for comparison.

    Attributes:
        tokens: int64 (frames, num_image_patches).
        actions: float32 (frames - 1, num_action_tokens, action_dim); action i leads from frame i to frame i + 1.
        pictures: uint8 (frames, height, width, 3), RGB.
    """

    tokens: np.ndarray
    actions: np.ndarray
    pictures: np.ndarray


class World(ABC):
    """A world."""

    axes = np.array([[1, 0], [0, -1]])
    """How the x and the y of waypoints are drawn, (right, down) each."""

    @property
    @abstractmethod
    def num_episodes(self) -> int:
        """Seeds below this have an episode that no model was trained on."""

    @abstractmethod
    def episode(self, seed: int) -> Episode:
        """The held-out episode of a seed."""

    @abstractmethod
    def pictures(self, tokens: np.ndarray) -> np.ndarray:
        """What tokens look like: integers (frames, num_image_patches) to uint8 (frames, height, width, 3)."""

    @abstractmethod
    def tokens(self, pictures: np.ndarray) -> np.ndarray:
        """The other way: uint8 (frames, height, width, 3) to int64 (frames, num_image_patches).

        Raises:
            ValueError: a picture that no tokens have.
        """

    def arrows(self, actions: np.ndarray) -> np.ndarray:
        """Where actions (actions, num_action_tokens, action_dim) lead: float (actions, 2), (right, down), at most 1
        long."""
        ends = actions[:, -1, :2] @ self.axes
        return np.asarray(ends / max(1e-9, np.linalg.norm(ends, axis=-1).max()))

    def compare(self, tokens: np.ndarray, first: int, truth: Episode) -> dict[str, float]:
        """Figures of generated frames beside what happened.

        Args:
            tokens: integers (generated frames, num_image_patches).
            first: index of the first of them in the episode.
            truth: the episode.
        """
        return {}


class TileWorld(World):
    """The road world of `examples.terra.world`: a token is a tile."""

    @property
    def num_episodes(self) -> int:
        return tiles.HELD_OUT_EPISODES

    def episode(self, seed: int) -> Episode:
        drive = tiles.make_episode(seed)
        return Episode(drive.frames, drive.actions, self.pictures(drive.frames))

    def pictures(self, tokens: np.ndarray) -> np.ndarray:
        return np.stack([np.asarray(tiles.render(frame)) for frame in tokens])

    def tokens(self, pictures: np.ndarray) -> np.ndarray:
        known = _ids_by_tile()
        ids = [known.get(tile.tobytes()) for tile in _tiles(pictures)]
        if None in ids:
            row, col = divmod(ids.index(None) % tiles.TOKENS_PER_FRAME, tiles.GRID)
            raise ValueError(f"no tile looks like row {row}, column {col} of the picture")
        return np.array(ids).reshape(len(pictures), -1)

    def compare(self, tokens: np.ndarray, first: int, truth: Episode) -> dict[str, float]:
        return {"token_accuracy": float((tokens == truth.tokens[first : first + len(tokens)]).mean())}


class DriveWorld(World):
    """Camera frames of a simulator, by way of a learned codebook.

    Args:
        folder: of the checkpoint, with its tokenizer.
    """

    axes = np.array([[0, -1], [-1, 0]])  # ahead is upwards

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizer.of_checkpoint(folder)

    @property
    def num_episodes(self) -> int:
        return HELD_OUT_DRIVES

    def episode(self, seed: int) -> Episode:
        drive = record(seed)
        return Episode(self.tokens(drive.frames), drive.actions, drive.frames)

    def pictures(self, tokens: np.ndarray) -> np.ndarray:
        return self._tokenizer.decode(np.asarray(tokens), CELLS)

    def tokens(self, pictures: np.ndarray) -> np.ndarray:
        return self._tokenizer.encode(pictures)

    def compare(self, tokens: np.ndarray, first: int, truth: Episode) -> dict[str, float]:
        frames, pictures = self.pictures(tokens), truth.pictures[first : first + len(tokens)]
        shown, true = ([blobs(frame) for frame in video] for video in (frames, pictures))
        distances = [ego_distance(*pair) for pair in zip(shown, true, strict=True)]
        return {
            "persistence": float(np.mean([kept(*pair) for pair in zip(shown, true, strict=True)])),
            "ego_in_place": float(np.mean([distance <= METRES_NEAR for distance in distances])),
            "psnr_db": psnr(frames, pictures),
        }

    def steering(self, episode: Episode, known: int) -> dict[str, Any]:
        """What the page steers by, from the frame after `known` ones on: where the ego vehicle is and heads for, where
        the streets lead, and what they look like when they are empty."""
        (ego,) = (blob for blob in blobs(episode.pictures[known - 1]) if blob.colour == EGO)
        row, col = np.round(((ego.place[::-1] + VIEW_METRES / 2) / CELL_METRES - 0.5) * UNITS).astype(int).tolist()
        down, right = heading_at((row, col))
        ahead, left = np.round(episode.actions[known - 1][-1, :2] / CELL_METRES * UNITS).astype(int).tolist()
        row, col = row + ahead * down - left * right, col + ahead * right + left * down
        return {
            "kind": "streets",
            "place": [row, col],
            "heading": heading_at((row, col)),
            "units": UNITS,
            "metres": CELL_METRES / UNITS,
            "seconds": FRAME_SECONDS,
            "grid": CELLS,
            "exits": [EXITS.get(divmod(cell, CELLS), []) for cell in range(CELLS**2)],
            "junctions": [row * CELLS + col for row, col in JUNCTIONS],
            "empty": self.tokens(render([])[None])[0].tolist(),
        }


class NoiseWorld(World):
    """Random tokens, for a checkpoint that no world here was trained for; one colour per id.

    Args:
        config: of the checkpoint.
    """

    def __init__(self, config: "LlamaActionConfig") -> None:
        self._config = config

    @property
    def num_episodes(self) -> int:
        return 2**31

    def episode(self, seed: int) -> Episode:
        config, rng = self._config, np.random.default_rng(seed)
        count = config.num_temporal_embeddings
        tokens = rng.integers(0, config.pad_token_id, (count, config.num_image_patches))
        shape = count - 1, config.num_action_tokens, config.action_dim
        return Episode(tokens, rng.standard_normal(shape, dtype=np.float32), self.pictures(tokens))

    def pictures(self, tokens: np.ndarray) -> np.ndarray:
        ids = tokens.reshape(len(tokens), *self._config.grid).astype(np.uint64)
        colours = np.stack([(ids * factor >> 7) % 200 + 40 for factor in (73, 151, 283)], axis=-1).astype(np.uint8)
        return colours.repeat(NOISE_TILE, axis=1).repeat(NOISE_TILE, axis=2)

    def tokens(self, pictures: np.ndarray) -> np.ndarray:
        raise ValueError("the checkpoint comes without an image tokenizer")


def of_config(config: "LlamaActionConfig") -> World:
    """The world that a checkpoint was trained for, by its config.

    Raises:
        ValueError: an image tokenizer that is unknown.
    """
    if config.image_tokenizer is None:
        return NoiseWorld(config)
    if config.image_tokenizer == TILES:
        return TileWorld()
    if config.image_tokenizer == DRIVE:
        return DriveWorld(Path(config._name_or_path))
    raise ValueError(f"image_tokenizer {config.image_tokenizer!r} is unknown")


def _tiles(pictures: np.ndarray) -> np.ndarray:
    """The tiles of pictures: uint8 (tiles of all pictures, values)."""
    side = tiles.TILE_PIXELS
    rows = pictures.reshape(-1, tiles.GRID, side, tiles.GRID, side, 3).swapaxes(2, 3)
    return np.ascontiguousarray(rows).reshape(-1, side * side * 3)


@cache
def _ids_by_tile() -> dict[bytes, int]:
    """Each tile's id by its pixels."""
    ids = np.resize(np.arange(tiles.NUM_TILES), (1, tiles.TOKENS_PER_FRAME))
    drawn = _tiles(TileWorld().pictures(ids))
    return dict(zip((tile.tobytes() for tile in drawn), ids[0].tolist(), strict=True))

"""The world that a checkpoint of Terra dreams of: where its episodes come from, and what its tokens look like."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import CHECKPOINT
from .drive import tokenizer
from .drive.drives import CONTEXT_FRAMES, FRAME_SECONDS, HELD_OUT_DRIVES, NUM_FRAMES
from .drive.metrics import METRES_NEAR, blobs, ego_distance, persistence, psnr, vehicles
from .drive.simulator import CELLS, CLOCK, EXITS, LINES, METRES, UNITS, neighbour, record, render

if TYPE_CHECKING:
    from .configuration import LlamaActionConfig

__all__ = ["CONTEXT_FRAMES", "Episode", "NoiseWorld", "TownWorld", "World", "load_world", "make_episode"]

TOWN = "drive"
"""The value of `LlamaActionConfig.image_tokenizer` for camera frames of the town."""
NOISE_TILE = 12
"""Side of the square that is drawn for a token without a picture, in pixels."""


@dataclass(frozen=True)
class Episode:
    """What happened, for a context and for comparison.

    Attributes:
        frames: int64 (frames, num_image_patches), the image tokens.
        actions: float32 (frames - 1, num_action_tokens, action_dim); action i leads from frame i to frame i + 1.
        pictures: uint8 (frames, height, width, 3), RGB.
    """

    frames: np.ndarray
    actions: np.ndarray
    pictures: np.ndarray


class TownWorld:
    """Camera frames of the town, by way of the checkpoint's codebook.

    Args:
        folder: of the checkpoint.

    Attributes:
        num_episodes: seeds below this have an episode that no model was trained on.
    """

    num_episodes = HELD_OUT_DRIVES

    def __init__(self, folder: Path = CHECKPOINT) -> None:
        self._tokenizer = tokenizer.load_tokenizer(folder)

    def episode(self, seed: int, num_frames: int = NUM_FRAMES) -> Episode:
        """Return the held-out episode of a seed."""
        drive = record(seed, num_frames)
        return Episode(self.tokens(drive.frames), drive.actions, drive.frames)

    def pictures(self, tokens: np.ndarray) -> np.ndarray:
        """Return what tokens, integers (frames, num_image_patches), look like: uint8 (frames, height, width, 3)."""
        return self._tokenizer.decode(np.asarray(tokens), CELLS)

    def tokens(self, pictures: np.ndarray) -> np.ndarray:
        """Return the tokens, int64 (frames, num_image_patches), of pictures, uint8 (frames, height, width, 3)."""
        return self._tokenizer.encode(pictures)

    def compare(self, tokens: np.ndarray, first: int, truth: Episode) -> dict[str, float]:
        """Return figures of generated frames, compared with what happened.

        Args:
            tokens: integers (generated frames, num_image_patches).
            first: index of the first of them in the episode.
            truth: the episode.
        """
        frames = self.pictures(tokens)
        true_frames = truth.pictures[first : first + len(tokens)]
        persistences = []
        is_ego_in_place = []
        for frame, true_frame in zip(frames, true_frames, strict=True):
            generated = blobs(frame)
            true = blobs(true_frame)
            persistences.append(persistence(generated, true))
            is_ego_in_place.append(ego_distance(generated, true) <= METRES_NEAR)
        return {
            "persistence": float(np.mean(persistences)),
            "ego_in_place": float(np.mean(is_ego_in_place)),
            "psnr_db": psnr(frames, true_frames),
        }

    def steering(self, episode: Episode, num_context: int) -> dict[str, Any]:
        """Return what the page steers by, from the frame after the context on.

        That is where the ego vehicle is and heads for, where the streets lead, what they look like when they are
        empty, and which of their cells a vehicle enters from its depot after which token of the clock.
        """

        def number(cell: tuple[int, int]) -> int:
            return cell[0] * CELLS + cell[1]

        ego = vehicles(episode.pictures[num_context - 1])[0]
        for place in ego.follow(episode.actions[num_context - 1]):
            ego = place
        gates = []
        for line in LINES.values():
            for hour in line.hours:
                entry = number(neighbour(line.depot, line.gate))
                clock_token = self.tokens(render([], hour)[None])[0, number(CLOCK)]
                gates.append([entry, int(clock_token)])
        return {
            "place": ego.place,
            "heading": ego.heading,
            "units": UNITS,
            "metres": METRES,
            "seconds": FRAME_SECONDS,
            "grid": CELLS,
            "exits": [EXITS.get(divmod(cell, CELLS), []) for cell in range(CELLS**2)],
            "empty": self.tokens(render([])[None])[0].tolist(),
            "clock": number(CLOCK),
            "gates": gates,
        }


class NoiseWorld:
    """Random tokens, for a checkpoint that comes without an image tokenizer, as the published one; a colour per id.

    Args:
        config: of the checkpoint.
    """

    num_episodes = 2**31

    def __init__(self, config: "LlamaActionConfig") -> None:
        self._config = config

    def episode(self, seed: int) -> Episode:
        """Return the episode of a seed."""
        config = self._config
        rng = np.random.default_rng(seed)
        count = config.num_temporal_embeddings
        frames = rng.integers(0, config.pad_token_id, (count, config.num_image_patches))
        shape = count - 1, config.num_action_tokens, config.action_dim
        actions = rng.standard_normal(shape, dtype=np.float32)
        return Episode(frames, actions, self.pictures(frames))

    def pictures(self, tokens: np.ndarray) -> np.ndarray:
        """See `TownWorld`."""
        ids = tokens.reshape(len(tokens), *self._config.grid).astype(np.uint64)
        channels = [(ids * factor >> 7) % 200 + 40 for factor in (73, 151, 283)]
        colours = np.stack(channels, axis=-1).astype(np.uint8)
        return colours.repeat(NOISE_TILE, axis=1).repeat(NOISE_TILE, axis=2)

    def compare(self, tokens: np.ndarray, first: int, truth: Episode) -> dict[str, float]:
        """Return no figures: nothing happened."""
        return {}


World = TownWorld | NoiseWorld


def load_world(config: "LlamaActionConfig") -> World:
    """Return the world that a checkpoint was trained for, by its config.

    Raises:
        ValueError: an image tokenizer that is unknown.
    """
    if config.image_tokenizer is None:
        return NoiseWorld(config)
    if config.image_tokenizer == TOWN:
        return TownWorld(Path(config._name_or_path))
    raise ValueError(f"image_tokenizer {config.image_tokenizer!r} is unknown")


def make_episode(seed: int, num_frames: int = NUM_FRAMES) -> Episode:
    """Return a held-out drive through the town, in the tokens of the trained checkpoint."""
    return TownWorld().episode(seed, num_frames)

"""A film of arms at work, as GIF."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from .world import COLOURS, SCENE_PIXELS, Episodes, Scenes, observe, render

SIZE = 200
"""Pixels of a scene."""
CAPTION = 24
MARGIN = 8
MILLISECONDS = 120
LAST_MILLISECONDS = 1500
NUM_COLOURS = 32


def choose_scenes(scenes: Scenes, episodes: Episodes) -> np.ndarray:
    """Return the number of one scene for each colour: the one whose arm needs most actions of the first twenty."""
    chosen = []
    lengths = count_actions(episodes)
    for target in range(len(COLOURS)):
        numbers = np.flatnonzero(episodes.touched & (scenes.targets == target))[:20]
        chosen.append(numbers[lengths[numbers].argmax()])
    return np.array(chosen)


def count_actions(episodes: Episodes) -> np.ndarray:
    """Return how many actions each arm needed, int64 (scenes,)."""
    is_still = (episodes.joints[:, 1:] == episodes.joints[:, -1:]).all(-1)
    return is_still.shape[1] - is_still.sum(1) + 1


def write_film(path: Path, scenes: Scenes, episodes: Episodes) -> None:
    """Write the film of a few scenes, side by side, each between its instruction and the view of the arm's camera."""
    frames = []
    for step in range(int(count_actions(episodes).max()) + 1):
        frames.append(_draw_frame(scenes._replace(joints=episodes.joints[:, step])))
    palette = frames[0].quantize(NUM_COLOURS)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [MILLISECONDS] * len(images)
    durations[-1] = LAST_MILLISECONDS
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)


def _draw_frame(scenes: Scenes) -> Image.Image:
    """Return one picture of all scenes."""
    observations = observe(scenes)
    wrist_size = SIZE * observations.wrist.shape[1] // SCENE_PIXELS // 2
    width = len(scenes.joints) * (SIZE + MARGIN) + MARGIN
    below_scene = CAPTION + SIZE + MARGIN
    frame = Image.new("RGB", (width, below_scene + wrist_size + MARGIN), "white")
    draw = ImageDraw.Draw(frame)
    for number, picture in enumerate(render(scenes, SIZE)):
        left = MARGIN + number * (SIZE + MARGIN)
        draw.text((left, 6), observations.instructions[number], fill="black")
        frame.paste(Image.fromarray(picture), (left, CAPTION))
        wrist = Image.fromarray(observations.wrist[number])
        frame.paste(wrist.resize((wrist_size, wrist_size), Image.Resampling.NEAREST), (left, below_scene))
        draw.text((left + wrist_size + MARGIN, below_scene), "the camera\nat the tip", fill="black")
    return frame

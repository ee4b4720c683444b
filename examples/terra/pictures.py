"""Pictures of rollouts: a GIF and a strip of frames, one row per source."""

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .world import render

Rows = dict[str, list[Image.Image]]
"""Per source, its frames, the context first."""

MARGIN, LABEL_HEIGHT = 12, 26
PAPER, INK, FAINT = "#ffffff", "#20242b", "#8a919c"
FRAME_MILLISECONDS = 450


def frame_image(frame: np.ndarray, is_road_world: bool) -> Image.Image:
    """Draw one frame: the road world's tiles, or one colour per token id, in a 9:16 grid, for other vocabularies."""
    if is_road_world:
        return render(frame)
    rows = max(r for r in range(1, math.isqrt(len(frame)) + 1) if len(frame) % r == 0)
    ids = frame.reshape(rows, -1).astype(np.uint64)
    colours = np.stack([(ids * factor >> 7) % 200 + 40 for factor in (73, 151, 283)], axis=-1).astype(np.uint8)
    return Image.fromarray(colours, "RGB").resize((192 * ids.shape[1] // rows, 192), Image.Resampling.NEAREST)


def save_gif(rows: Rows, path: Path, context: int) -> None:
    """All sources side by side, one picture per frame."""
    width, height = next(iter(rows.values()))[0].size
    count = len(next(iter(rows.values())))
    pictures = []
    for index in range(count):
        sheet = Image.new("RGB", (MARGIN + len(rows) * (width + MARGIN), LABEL_HEIGHT + height + MARGIN), PAPER)
        pen = ImageDraw.Draw(sheet)
        for column, (name, frames) in enumerate(rows.items()):
            left = MARGIN + column * (width + MARGIN)
            sheet.paste(frames[index], (left, LABEL_HEIGHT))
            pen.text((left, 6), name, INK, _font())
            if column == len(rows) - 1:
                note = "context" if index < context else f"frame {index + 1}"
                pen.text((left + width - pen.textlength(note, _font()), 6), note, FAINT, _font())
        pictures.append(sheet.quantize(64, dither=Image.Dither.NONE))
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=FRAME_MILLISECONDS, loop=0)


def save_strip(rows: Rows, path: Path, context: int, shown: int = 8) -> None:
    """Evenly chosen frames from left to right, one row per source."""
    width, height = next(iter(rows.values()))[0].size
    count = len(next(iter(rows.values())))
    chosen = sorted({context - 1, *np.linspace(context, count - 1, min(shown, count) - 1).round().astype(int).tolist()})
    row_height = LABEL_HEIGHT + height
    sheet = Image.new("RGB", (MARGIN + len(chosen) * (width + MARGIN), len(rows) * row_height + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    for row, (name, frames) in enumerate(rows.items()):
        top = row * row_height
        for column, index in enumerate(chosen):
            left = MARGIN + column * (width + MARGIN)
            sheet.paste(frames[index], (left, top + LABEL_HEIGHT))
            note = "last of the context" if index < context else f"frame {index + 1}"
            pen.text(
                (left, top + 6), f"{name}, {note}" if column == 0 else note, INK if column == 0 else FAINT, _font()
            )
    sheet.save(path, optimize=True)


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(13)

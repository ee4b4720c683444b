"""Pictures of rollouts: a video and a strip of frames, one row per source."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

Rows = dict[str, list[Image.Image]]
"""Per source, its frames, the context first."""

LARGE = 380
"""About the height that a frame is drawn with, in pixels."""

MARGIN = 12
LABEL_HEIGHT = 26
PAPER = "#ffffff"
INK = "#20242b"
FAINT = "#8a919c"
FRAME_MILLISECONDS = 400


def enlarge(frames: np.ndarray) -> list[Image.Image]:
    """Return frames, uint8 (frames, height, width, 3), as pictures that are large enough to look at."""
    factor = max(1, round(LARGE / frames.shape[1]))
    size = frames.shape[2] * factor, frames.shape[1] * factor
    return [Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in frames]


def save_video(rows: Rows, actions: np.ndarray, gif: Path, mp4: Path, context: int) -> None:
    """Write all sources side by side, one picture per frame, as GIF and as MP4 (H.264).

    Args:
        rows: the frames of each source.
        actions: float (frames - 1, waypoints, 3), drawn as arrows; ahead is upwards.
        gif, mp4: the files.
        context: how many frames the model was given.
    """
    ends = -actions[:, -1, 1::-1]
    sheets = list(_draw_sheets(rows, ends / np.linalg.norm(ends, axis=-1).max(initial=1e-9), context))
    # the palette has the bright colours of small things, too
    colours = [sheet.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE) for sheet in sheets]
    colours[0].save(gif, save_all=True, append_images=colours[1:], duration=FRAME_MILLISECONDS, loop=0)
    with av.open(mp4, "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(1000, FRAME_MILLISECONDS))
        width, height = sheets[0].size
        # H.264 takes even sizes only
        stream.width = width - width % 2
        stream.height = height - height % 2
        stream.pix_fmt = "yuv420p"
        for sheet in sheets:
            container.mux(stream.encode(av.VideoFrame.from_image(sheet)))
        container.mux(stream.encode())


def _draw_sheets(rows: Rows, arrows: np.ndarray, context: int) -> Iterator[Image.Image]:
    """Yield a picture per frame, with all sources, and above the first of them the action that led there."""
    width, height = next(iter(rows.values()))[0].size
    count = len(next(iter(rows.values())))
    for index in range(count):
        sheet = Image.new("RGB", (MARGIN + len(rows) * (width + MARGIN), LABEL_HEIGHT + height + MARGIN), PAPER)
        pen = ImageDraw.Draw(sheet)
        for column, (name, frames) in enumerate(rows.items()):
            left = MARGIN + column * (width + MARGIN)
            sheet.paste(frames[index], (left, LABEL_HEIGHT))
            pen.text((left, 6), name, INK, _font())
            if column == len(rows) - 1:
                note = _describe_frame(index, context)
                pen.text((left + width - pen.textlength(note, _font()), 6), note, FAINT, _font())
        if index:
            _draw_arrow(pen, (MARGIN + width / 2, LABEL_HEIGHT / 2), arrows[index - 1])
        yield sheet


def _draw_arrow(pen: ImageDraw.ImageDraw, middle: tuple[float, float], arrow: np.ndarray) -> None:
    """Draw an arrow through a point; a dot if it leads nowhere."""
    length = float(np.linalg.norm(arrow))
    if length < 0.05:
        pen.circle(middle, 3, INK)
        return
    along = arrow / length
    across = np.array([-along[1], along[0]])
    half = (LABEL_HEIGHT / 2 - 3) * (0.4 + 0.6 * length)
    tip = np.array(middle) + along * half
    neck = np.array(middle) + along * (half - 6)
    pen.line([tuple(np.array(middle) - along * half), tuple(neck)], INK, 3)
    pen.polygon([tuple(tip), tuple(neck + 5 * across), tuple(neck - 5 * across)], INK)


def save_strip(rows: Rows, path: Path, context: int, most: int = 8) -> None:
    """Write evenly chosen frames, at most so many, from left to right, one row per source."""
    width, height = next(iter(rows.values()))[0].size
    count = len(next(iter(rows.values())))
    generated = np.linspace(context, count - 1, min(most, count) - 1).round().astype(int).tolist()
    chosen = sorted({context - 1} | set(generated))
    row_height = LABEL_HEIGHT + height
    sheet = Image.new("RGB", (MARGIN + len(chosen) * (width + MARGIN), len(rows) * row_height + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    for row, (name, frames) in enumerate(rows.items()):
        top = row * row_height
        for column, index in enumerate(chosen):
            left = MARGIN + column * (width + MARGIN)
            sheet.paste(frames[index], (left, top + LABEL_HEIGHT))
            note = _describe_frame(index, context)
            if column == 0:
                pen.text((left, top + 6), f"{name}, {note}", INK, _font())
            else:
                pen.text((left, top + 6), note, FAINT, _font())
    sheet.save(path, optimize=True)


def _describe_frame(index: int, context: int) -> str:
    if index < context:
        return "context"
    return f"frame {index + 1}"


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(13)

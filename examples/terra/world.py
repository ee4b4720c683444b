"""A small deterministic road world seen from above: the data the example checkpoint is trained and judged on.

The map is a torus of exactly one view, the camera follows the car, and an action moves the car by whole cells. So the
next frame is the last one rolled by the displacement, with the car drawn back into its fixed cell: everything needed
to predict it is in the last frame and the action, on any map.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

GRID = 8
"""Rows and columns of a frame."""
TOKENS_PER_FRAME = GRID * GRID
CAR_ROW, CAR_COL = 4, 4
"""The cell the car is always drawn in."""
NUM_FRAMES = 25
CONTEXT_FRAMES = 3
"""Frames a rollout is given; the others are generated."""
NUM_WAYPOINTS = 6
FRAME_SECONDS = 0.5
"""Time from one frame to the next."""
MAX_SPEED = 2
"""Largest displacement between two frames, in cells."""

HELD_OUT_EPISODES = 10_000
"""Seeds below this are held out."""
FIRST_TRAINING_SEED = 1_000_000
"""Seeds from here on are for training; those in between belong to neither."""

ROADS = ("road_h", "road_v", "crossing", "zebra_h", "zebra_v")
SCENERY = (
    "grass", "meadow", "flowers", "tree", "pine", "bush", "house_red", "house_blue", "house_yellow",
    "water", "lilies", "rock", "field", "plaza",
)  # fmt: skip
HEADINGS = {"east": (0, 1), "south": (1, 0), "west": (0, -1), "north": (-1, 0)}
"""(rows, columns) of one cell ahead; rows count southwards."""


def _headings_on(road: str) -> tuple[str, ...]:
    """Headings a car can have on a road tile."""
    if road.endswith("_h"):
        return "east", "west"
    if road.endswith("_v"):
        return "south", "north"
    return tuple(HEADINGS)


CARS = tuple((road, heading) for road in ROADS for heading in _headings_on(road))
"""A car tile tells its heading and the road under it, so that the road is known again once the car has left."""

TILES: tuple[str, ...] = ROADS + SCENERY + tuple(f"car_{heading}_on_{road}" for road, heading in CARS)
"""Tile names by token id."""
TILE_IDS = {name: index for index, name in enumerate(TILES)}
NUM_TILES = len(TILES)


@dataclass(frozen=True)
class Episode:
    """One drive.

    Attributes:
        frames: int64 (NUM_FRAMES, TOKENS_PER_FRAME), tile ids row by row from the north-west corner.
        actions: float32 (NUM_FRAMES - 1, NUM_WAYPOINTS, 3); action i leads from frame i to frame i + 1. Its rows are
            waypoints (x, y, t) relative to the car: cells to the east, cells to the north, seconds.
    """

    frames: np.ndarray
    actions: np.ndarray


def make_action(rows: int, cols: int) -> np.ndarray:
    """Return the action that moves the car at constant speed.

    Args:
        rows: cells to the south, -MAX_SPEED to MAX_SPEED.
        cols: cells to the east, likewise.

    Returns:
        float32 (NUM_WAYPOINTS, 3), waypoints (x, y, t): the last one is the displacement after FRAME_SECONDS.
    """
    shares = np.arange(1, NUM_WAYPOINTS + 1, dtype=np.float32)[:, None] / NUM_WAYPOINTS
    return shares * np.array([cols, -rows, FRAME_SECONDS], dtype=np.float32)


def make_map(rng: np.random.Generator) -> np.ndarray:
    """Draw a map: one or two roads each way, houses mostly along them.

    Returns:
        int64 (GRID, GRID), road and scenery tile ids.
    """
    rows, cols = (_pick_lines(rng) for _ in range(2))
    on_row = np.isin(np.arange(GRID), rows)[:, None]
    on_col = np.isin(np.arange(GRID), cols)[None, :]
    road = on_row | on_col
    beside = np.zeros_like(road)
    for shift, axis in ((1, 0), (-1, 0), (1, 1), (-1, 1)):
        beside |= np.roll(road, shift, axis)
    # How often each of SCENERY stands beside a road, and away from the roads.
    roadside = (4, 3, 3, 3, 2, 3, 4, 4, 4, 1, 0, 1, 1, 3)
    open_land = (3, 3, 2, 4, 4, 2, 1, 1, 1, 5, 3, 2, 4, 1)
    scenery = len(ROADS) + np.where(beside, _draw(rng, roadside), _draw(rng, open_land))
    zebra = rng.random((GRID, GRID)) < 0.15
    tiles = np.where(on_row, np.where(zebra, TILE_IDS["zebra_h"], TILE_IDS["road_h"]), scenery)
    tiles = np.where(on_col, np.where(zebra, TILE_IDS["zebra_v"], TILE_IDS["road_v"]), tiles)
    return np.where(on_row & on_col, TILE_IDS["crossing"], tiles)


def _pick_lines(rng: np.random.Generator) -> list[int]:
    """Pick one or two rows (or columns) that are not neighbours on the torus."""
    first = int(rng.integers(GRID))
    if rng.random() < 0.4:
        return [first]
    return [first, (first + int(rng.integers(3, GRID - 2))) % GRID]


def _draw(rng: np.random.Generator, weights: tuple[int, ...]) -> np.ndarray:
    """Draw a (GRID, GRID) array of indices into the weights."""
    return rng.choice(len(weights), size=(GRID, GRID), p=np.array(weights) / sum(weights))


def draw_frame(road_map: np.ndarray, row: int, col: int, heading: str) -> np.ndarray:
    """Draw what the camera above the car sees.

    Args:
        road_map: int64 (GRID, GRID).
        row, col: the cell of the car, which must be on a road that has this heading.
        heading: one of HEADINGS.

    Returns:
        int64 (TOKENS_PER_FRAME,).
    """
    view = np.roll(road_map, (CAR_ROW - row, CAR_COL - col), axis=(0, 1))
    view[CAR_ROW, CAR_COL] = TILE_IDS[f"car_{heading}_on_{TILES[view[CAR_ROW, CAR_COL]]}"]
    return view.reshape(-1)


def make_episode(seed: int, route_seed: int | None = None, num_frames: int = NUM_FRAMES) -> Episode:
    """Make the episode of a seed: a map, and a drive that keeps to the roads and turns at crossings only.

    Args:
        seed: below HELD_OUT_EPISODES for held-out episodes, from FIRST_TRAINING_SEED on for training.
        route_seed: another drive from the same first frame; by default the seed's own.
        num_frames: frames of the episode, which has one action fewer.

    Returns:
        The episode; equal arguments give equal arrays.
    """
    rng = np.random.default_rng((seed, 0))
    road_map = make_map(rng)
    row, col = (int(index) for index in rng.choice(np.argwhere(road_map < len(ROADS))))
    heading = str(rng.choice(_headings_on(TILES[road_map[row, col]])))
    rng = np.random.default_rng((seed, 1) if route_seed is None else (seed, 2, route_seed))
    frames, actions = [draw_frame(road_map, row, col, heading)], []
    while len(frames) < num_frames:
        speed = int(rng.choice(MAX_SPEED + 1, p=(0.1, 0.5, 0.4)))
        if speed:
            heading = _steer(rng, TILES[road_map[row, col]], heading)
        rows, cols = (speed * step for step in HEADINGS[heading])
        row, col = (row + rows) % GRID, (col + cols) % GRID
        actions.append(make_action(rows, cols))
        frames.append(draw_frame(road_map, row, col, heading))
    return Episode(np.stack(frames), np.array(actions, dtype=np.float32).reshape(-1, NUM_WAYPOINTS, 3))


def _steer(rng: np.random.Generator, road: str, heading: str) -> str:
    """Choose where to head next: at a crossing anywhere but back, elsewhere straight on and rarely back."""
    back = {"east": "west", "west": "east", "north": "south", "south": "north"}[heading]
    if road == "crossing":
        return str(rng.choice([other for other in HEADINGS if other != back]))
    return back if rng.random() < 0.08 else heading


def drive(frame: np.ndarray, action: np.ndarray) -> np.ndarray | None:
    """Move the car by an action, from what one frame shows.

    Args:
        frame: integers (TOKENS_PER_FRAME,).
        action: float (NUM_WAYPOINTS, 3), as `make_action` makes them; rounded to whole cells.

    Returns:
        int64 (TOKENS_PER_FRAME,), the next frame; None if no episode has such a move, because the car would leave its
        road or be too fast.
    """
    view = frame.reshape(GRID, GRID).copy()
    road, heading = CARS[int(view[CAR_ROW, CAR_COL]) - len(ROADS) - len(SCENERY)]
    view[CAR_ROW, CAR_COL] = TILE_IDS[road]
    rows, cols = round(-float(action[-1, 1])), round(float(action[-1, 0]))
    speed = abs(rows) + abs(cols)
    if speed:
        heading = next(
            (name for name, ahead in HEADINGS.items() if (rows, cols) == (speed * ahead[0], speed * ahead[1])), ""
        )
    if speed > MAX_SPEED or heading not in _headings_on(road):
        return None
    return draw_frame(view, CAR_ROW + rows, CAR_COL + cols, heading)


TILE_PIXELS = 24
"""Side of a drawn tile."""
_SCALE = 4  # drawn larger, then reduced, for smooth edges
_GRASS, _ASPHALT, _PAVEMENT, _WHITE = "#8ccb6b", "#565b66", "#c9c4b8", "#f4f1e6"


class _Pen:
    """Draws on one tile in coordinates 0..24, whatever the resolution."""

    def __init__(self, background: str | Image.Image) -> None:
        if isinstance(background, str):
            background = Image.new("RGB", (TILE_PIXELS * _SCALE,) * 2, background)
        self.image = background
        self._draw = ImageDraw.Draw(self.image)

    def box(self, left: float, top: float, right: float, bottom: float, fill: str, radius: float = 0) -> None:
        """Fill a rectangle, with round corners if a radius is given."""
        corners = [left * _SCALE, top * _SCALE, right * _SCALE - 1, bottom * _SCALE - 1]
        self._draw.rounded_rectangle(corners, radius * _SCALE, fill)

    def disc(self, x: float, y: float, radius: float, fill: str) -> None:
        """Fill a circle."""
        corners = [(x - radius) * _SCALE, (y - radius) * _SCALE, (x + radius) * _SCALE, (y + radius) * _SCALE]
        self._draw.ellipse(corners, fill)

    def shape(self, points: list[tuple[float, float]], fill: str) -> None:
        """Fill a polygon."""
        self._draw.polygon([(x * _SCALE, y * _SCALE) for x, y in points], fill)


def _draw_road(name: str) -> Image.Image:
    """Draw a road tile; the vertical ones are the horizontal ones turned."""
    pen = _Pen(_ASPHALT)
    if name == "crossing":
        for x in (0, 21.5):
            for y in (0, 21.5):
                pen.box(x, y, x + 2.5, y + 2.5, _PAVEMENT)
        return pen.image
    pen.box(0, 0, 24, 2.5, _PAVEMENT)
    pen.box(0, 21.5, 24, 24, _PAVEMENT)
    if name.startswith("zebra"):
        for y in (4, 7.5, 11, 14.5, 18):
            pen.box(7, y, 17, y + 2, _WHITE)
    else:
        for x in (-3, 9, 21):
            pen.box(x, 11.3, x + 6, 12.7, "#f2d16b")
    return pen.image.rotate(90) if name.endswith("_v") else pen.image


def _draw_house(pen: _Pen, light: str, dark: str) -> None:
    """Draw a house with its shadow; the two sides of the roof differ in shade."""
    pen.box(4, 5, 22, 22.5, "#6fae55")
    pen.box(2.5, 3, 20.5, 12, light)
    pen.box(2.5, 12, 20.5, 20.5, dark)
    pen.box(2.5, 11.5, 20.5, 12.5, _WHITE)
    pen.box(14.5, 5, 17.5, 8.5, "#8a5a44")


def _draw_scenery(name: str) -> Image.Image:
    """Draw a tile beside the roads."""
    backgrounds = {"water": "#5fb4e5", "lilies": "#5fb4e5", "field": "#e3c565", "plaza": _PAVEMENT, "meadow": "#9dd577"}
    pen = _Pen(backgrounds.get(name, _GRASS))
    if name == "grass":
        for x, y in ((5, 6), (16, 4), (11, 14), (20, 17), (4, 19)):
            pen.shape([(x - 1.5, y - 2), (x, y + 1), (x + 1.5, y - 2), (x, y - 0.5)], "#74b556")
    elif name == "meadow":
        for x, y in ((4, 4), (12, 8), (20, 5), (6, 16), (15, 19)):
            pen.disc(x, y, 2, "#8cc866")
    elif name == "flowers":
        pink, white, orange = "#f27ca0", "#fff4f0", "#f7b733"
        for x, y, petal in ((6, 6, pink), (17, 5, white), (12, 13, orange), (5, 18, white), (19, 18, pink)):
            for dx, dy in ((-1.5, 0), (1.5, 0), (0, -1.5), (0, 1.5)):
                pen.disc(x + dx, y + dy, 1.4, petal)
            pen.disc(x, y, 1.1, "#e0862f")
    elif name == "tree":
        pen.disc(13.5, 14, 9, "#6fae55")
        pen.disc(12, 12, 8.8, "#3f8f45")
        pen.disc(10.5, 10.5, 6, "#55a850")
        pen.disc(9, 9, 2.6, "#74c069")
    elif name == "pine":
        for size, fill in ((10, "#2b6b4a"), (7, "#388058"), (4, "#4a9968")):
            star = [(size * (1 if corner % 2 else 0.62), corner * math.pi / 8) for corner in range(16)]
            pen.shape([(12 + reach * math.cos(angle), 12 + reach * math.sin(angle)) for reach, angle in star], fill)
    elif name == "bush":
        for x, y, radius in ((8, 9, 4.5), (16, 8, 4), (14, 16, 5), (6, 17, 3.2)):
            pen.disc(x, y, radius, "#4f9d4c")
            pen.disc(x - 1, y - 1, radius * 0.55, "#6dba60")
    elif name.startswith("house"):
        roofs = {"red": ("#dc6a55", "#bd4e40"), "blue": ("#6d8fc9", "#5373ac"), "yellow": ("#eeb65a", "#d4953c")}
        _draw_house(pen, *roofs[name.removeprefix("house_")])
    elif name in ("water", "lilies"):
        for x, y in ((3, 5), (13, 10), (5, 17), (16, 20)):
            pen.box(x, y, x + 6, y + 1.2, "#93d0f2", 0.6)
        if name == "lilies":
            for x, y in ((8, 9), (17, 15)):
                pen.disc(x, y, 4, "#57a863")
                pen.shape([(x, y), (x + 5, y - 2), (x + 5, y + 2)], "#5fb4e5")
                pen.disc(x - 1.2, y, 1.4, "#f7a8c4")
    elif name == "rock":
        pen.shape([(4, 15), (7, 7), (14, 5), (20, 11), (19, 19), (9, 20)], "#8d9096")
        pen.shape([(4, 15), (7, 7), (14, 5), (13, 12), (9, 15)], "#b0b3b8")
    elif name == "field":
        for x in (2, 8, 14, 20):
            pen.box(x, 0, x + 2.5, 24, "#cfae4b")
    else:
        pen.box(3, 3, 21, 21, "#d9d4c9", 2)
        pen.disc(12, 12, 6, "#aeb4b8")
        pen.disc(12, 12, 4.4, "#6fc0ea")
        pen.disc(12, 12, 1.6, _WHITE)
    return pen.image


def _draw_car(road: str, heading: str) -> Image.Image:
    """Draw the car on its road; drawn heading east, then turned."""
    turns = {"east": 0, "north": 90, "west": 180, "south": 270}[heading]
    car = _Pen(_draw_road(road).rotate(-turns))
    for x in (4.5, 14.5):
        car.box(x, 5, x + 4, 19, "#23252b", 1)
    car.box(2, 6, 22.5, 18, "#d8242f", 4)
    car.box(13.5, 7.5, 17, 16.5, "#bfe4f5", 1)
    car.box(5, 7.8, 7.2, 16.2, "#9ccbe0", 0.8)
    car.box(7.6, 7.5, 13, 16.5, "#ef4a52", 1)
    for y in (7, 14.6):
        car.box(20.6, y, 22.5, y + 2.4, "#fff3b0", 0.8)
    return car.image.rotate(turns)


@cache
def _sprite(token: int) -> np.ndarray:
    """Draw the tile of a token id, uint8 (TILE_PIXELS, TILE_PIXELS, 3)."""
    if token < len(ROADS):
        image = _draw_road(TILES[token])
    elif token < len(ROADS) + len(SCENERY):
        image = _draw_scenery(TILES[token])
    else:
        image = _draw_car(*CARS[token - len(ROADS) - len(SCENERY)])
    return np.asarray(image.resize((TILE_PIXELS, TILE_PIXELS), Image.Resampling.LANCZOS).convert("RGB"))


def render(frame: np.ndarray) -> Image.Image:
    """Draw a frame.

    Args:
        frame: integers (TOKENS_PER_FRAME,), tile ids.

    Returns:
        RGB image, GRID * TILE_PIXELS pixels square.
    """
    tiles = np.stack([_sprite(token) for token in np.asarray(frame).tolist()])
    rows = tiles.reshape(GRID, GRID, TILE_PIXELS, TILE_PIXELS, 3).swapaxes(1, 2)
    return Image.fromarray(rows.reshape(GRID * TILE_PIXELS, GRID * TILE_PIXELS, 3))

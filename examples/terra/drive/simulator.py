"""The town that Terra sees: one-way streets from a fixed camera, and vehicles whose colour says where they drive.

All that moves is known from what is visible: a vehicle of a colour drives its line, at its speed, keeps its distance,
and gives way to the right. The ego vehicle, drawn green, goes where its actions say.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from .drives import CELL_METRES, FRAME_PIXELS, FRAME_SECONDS, NUM_FRAMES, NUM_WAYPOINTS, VIEW_METRES, Drive

Cell = tuple[int, int]
"""Row and column."""
Colour = tuple[int, int, int]

CELLS = round(VIEW_METRES / CELL_METRES)
"""Cells of the town, along each side."""
UNITS = 2
"""Places of a vehicle from the middle of a cell to the middle of the next one: one every two metres."""
METRES = CELL_METRES / UNITS
"""From one place to the next."""
CELL_PIXELS = FRAME_PIXELS // CELLS
SUPERSAMPLING = 4
"""Pixels that are drawn for each pixel of a frame, along each side."""

NORTH, EAST, SOUTH, WEST = (-1, 0), (0, 1), (1, 0), (0, -1)
STREETS: Sequence[tuple[Cell, Cell]] = (
    # the first cell, and a heading in which the street goes on to the end of the town
    ((0, 0), EAST),
    ((0, 7), SOUTH),
    ((7, 7), WEST),
    ((7, 0), NORTH),
    ((3, 7), WEST),
    ((0, 4), SOUTH),
)
JUNCTIONS = ((0, 4), (3, 7), (3, 4), (7, 4), (3, 0))
"""Cells that two streets lead into or out of."""
GAP = UNITS + 1
"""The least places from the middle of a vehicle to that of the one ahead, so that no patch shows parts of both."""

Line = Mapping[Cell, Cell]
"""The headings in which a vehicle leaves cells; it goes straight on in the others, or where the street goes."""
LINES: dict[str, tuple[Line, int]] = {
    "red": ({(0, 4): SOUTH}, 1),
    "blue": ({(3, 7): WEST}, 1),
    "yellow": ({}, 2),
}
"""By colour: the line, and the most places from one frame to the next."""
CHOICES = {(0, 4): (EAST, SOUTH), (3, 7): (SOUTH, WEST), (3, 4): (SOUTH, WEST)}
"""Where the ego vehicle can choose."""
EGO_SPEEDS, EGO_SHARES = (0, 1, 2), (0.1, 0.4, 0.5)
"""The most places from one frame to the next that the ego vehicle's driver chooses from, and how often each."""
MOST_METRES = max(EGO_SPEEDS) * METRES
"""The furthest that an action leads."""
EGO_CHANGES = 0.2
"""How often the driver chooses."""

LEAST_OTHERS, MOST_OTHERS = 3, 5

EGO = "green"
COLOURS: dict[str, Colour] = {
    EGO: (30, 205, 70),
    "red": (225, 45, 45),
    "blue": (50, 95, 230),
    "yellow": (250, 205, 40),
}
GRASS, ASPHALT, KERB = (172, 190, 146), (104, 106, 112), (206, 204, 196)


def _street(first: Cell, heading: Cell) -> list[Cell]:
    """Its cells."""
    cells = [first]
    while all(0 <= place + step < CELLS for place, step in zip(cells[-1], heading, strict=True)):
        cells.append((cells[-1][0] + heading[0], cells[-1][1] + heading[1]))
    return cells


def _exits() -> dict[Cell, list[Cell]]:
    exits: dict[Cell, list[Cell]] = {}
    for first, heading in STREETS:
        for cell in _street(first, heading)[:-1]:
            exits.setdefault(cell, []).append(heading)
    return exits


EXITS = _exits()
"""The headings in which each cell of the streets can be left."""


@dataclass(frozen=True)
class Vehicle:
    """A vehicle at one of the places of the streets.

    Attributes:
        colour: a key of COLOURS.
        line, speed: see LINES.
        cell: the last one whose middle was reached.
        entered, leaves: the headings in which it came there and goes on.
        units: places from there, below UNITS.
    """

    colour: str
    line: Line
    speed: int
    cell: Cell
    entered: Cell
    leaves: Cell
    units: int = 0

    @property
    def place(self) -> Cell:
        """Row and column, counted in places."""
        return self.cell[0] * UNITS + self.leaves[0] * self.units, self.cell[1] * UNITS + self.leaves[1] * self.units

    @property
    def position(self) -> np.ndarray:
        """float64 (2,), (x, y) in metres from the middle of the view."""
        return (np.array(self.place[::-1]) / UNITS + 0.5) * CELL_METRES - VIEW_METRES / 2

    @property
    def came(self) -> Cell:
        """The heading in which it came where it is."""
        return self.leaves if self.units else self.entered

    @property
    def degrees(self) -> float:
        """The heading, counter-clockwise from east: half-way between two in a corner, where nobody can choose."""
        down, right = self.leaves
        if self.units == 0:
            down, right = self.entered
            if self.cell not in CHOICES:
                down, right = down + self.leaves[0], right + self.leaves[1]
        return math.degrees(math.atan2(-down, right))

    @property
    def ahead(self) -> Cell:
        """The next cell."""
        return self.cell[0] + self.leaves[0], self.cell[1] + self.leaves[1]

    def led(self, action: np.ndarray) -> list["Vehicle"]:
        """The places up to the next frame where an action leads: as far as it says, around the corners that are there.

        Args:
            action: float (NUM_WAYPOINTS, 3); see `Drive`.
        """
        count = round(float(np.abs(action[-1, :2]).sum()) / METRES)
        (down, right), way, before = self.came, [], np.zeros(2)
        for number in range(1, count + 1):
            there = action[round(NUM_WAYPOINTS * number / count) - 1, :2]
            ahead, left = np.round((there - before) / METRES).astype(int).tolist()
            before, vehicle = there, way[-1] if way else self
            wished = ahead * down - left * right, ahead * right + left * down
            if vehicle.units == 0 and wished in EXITS[vehicle.cell]:
                vehicle = replace(vehicle, leaves=wished)
            way.append(vehicle.on())
        return way

    def entering(self, junction: Cell) -> bool:
        """Whether it is past the last cell before a junction, and not yet in its middle."""
        return self.units > 0 and self.ahead == junction

    def on(self) -> "Vehicle":
        """One place further."""
        if self.units + 1 < UNITS:
            return replace(self, units=self.units + 1)
        exits = EXITS[self.ahead]
        straight = self.leaves if self.leaves in exits else exits[0]
        leaves = self.line.get(self.ahead, straight)
        return replace(self, cell=self.ahead, entered=self.leaves, leaves=leaves, units=0)

    def moves(self, others: Sequence["Vehicle"]) -> list["Vehicle"]:
        """The places up to the next frame, as far as the traffic lets it go.

        Args:
            others: the other vehicles, as they are now.
        """
        way = [self]
        for _ in range(self.speed + GAP):
            way.append(way[-1].on())
        taken = {other.place for other in others}
        clear = next((n for n, there in enumerate(way[1:], 1) if there.place in taken), len(way))
        steps = way[1 : 1 + max(0, min(self.speed, clear - GAP))]
        for number, there in enumerate(steps):
            for junction in JUNCTIONS:
                if there.entering(junction) and not self.entering(junction) and self._waits(junction, there, others):
                    return steps[:number]
        return steps

    @staticmethod
    def _waits(junction: Cell, at_line: "Vehicle", others: Sequence["Vehicle"]) -> bool:
        """Whether a junction is taken, or will be by a vehicle from the right."""
        down, right = at_line.leaves
        from_right = -right, down  # the heading of who comes from there
        last = junction[0] - from_right[0], junction[1] - from_right[1]
        for other in others:
            if other.cell == junction or (other.entering(junction) and other.leaves != at_line.leaves):
                return True
            if other.leaves == from_right and last in (other.cell, other.ahead):
                return True
        return False


@cache
def vehicles_at(colour: str, place: Cell) -> Sequence[Vehicle]:
    """What a vehicle of a colour may be at a place, given by row and column counted in places: one that came there by
    each of the streets."""
    line, speed = LINES.get(colour, ({}, max(EGO_SPEEDS)))
    ways = []
    for cell, exits in EXITS.items():
        for heading in exits:
            way = [Vehicle(colour, line, speed, cell, heading, heading)]
            for _ in range(UNITS):
                way.append(way[-1].on())
            ways.append(way[1:])
    return [vehicle for way in ways for vehicle in way if vehicle.place == place]


class Town:
    """The town with traffic.

    Args:
        seed: of everything that is drawn; equal seeds give equal drives.
        vehicles: those that are there, the ego vehicle first; drawn if there are none.
    """

    def __init__(self, seed: int, vehicles: Sequence[Vehicle] = ()) -> None:
        self._rng = np.random.default_rng(seed)
        self.vehicles = list(vehicles) or self._drawn()

    def _drawn(self) -> list[Vehicle]:
        vehicles = [self._placed(EGO, self._way(), 2, [])]
        for _ in range(int(self._rng.integers(LEAST_OTHERS, MOST_OTHERS + 1))):
            colour = str(self._rng.choice(list(LINES)))
            vehicles.append(self._placed(colour, *LINES[colour], vehicles))
        return vehicles

    def _way(self) -> Line:
        return {cell: headings[int(self._rng.integers(2))] for cell, headings in CHOICES.items()}

    def _placed(self, colour: str, line: Line, speed: int, others: Sequence[Vehicle]) -> Vehicle:
        """A vehicle somewhere on its line, away from the others."""
        vehicle = Vehicle(colour, line, speed, (0, 0), NORTH, EAST)
        while True:
            for _ in range(int(self._rng.integers(1, 40 * UNITS))):
                vehicle = vehicle.on()
            distances = [np.abs(vehicle.position - other.position).sum() for other in others]
            if min(distances, default=np.inf) > 2 * CELL_METRES:
                return vehicle

    def advance(self) -> np.ndarray:
        """Drive to the next frame.

        Returns:
            float32 (NUM_WAYPOINTS, 3), the ego vehicle's waypoints; see `Drive`.
        """
        ego = self.vehicles[0]
        if self._rng.random() < EGO_CHANGES:
            ego = replace(ego, speed=int(self._rng.choice(EGO_SPEEDS, p=EGO_SHARES)))
        if ego.cell in CHOICES and ego.units > 0:
            ego = replace(ego, line=self._way())
        self.vehicles[0] = ego
        action = waypoints([ego, *ego.moves(self.vehicles[1:])])
        self.follow(action)
        return action

    def follow(self, action: np.ndarray) -> None:
        """Drive to the next frame, the ego vehicle where an action leads, whatever is there."""
        now, ways = self.vehicles, [self.vehicles[0].led(action)]
        for index, vehicle in enumerate(now[1:], 1):
            ways.append(vehicle.moves(now[:index] + now[index + 1 :]))
        self.vehicles = [way[-1] if way else vehicle for vehicle, way in zip(now, ways, strict=True)]


def waypoints(way: Sequence[Vehicle]) -> np.ndarray:
    """The action along places from one frame to the next, the first place first: float32 (NUM_WAYPOINTS, 3)."""
    times = np.arange(1, NUM_WAYPOINTS + 1) / NUM_WAYPOINTS
    down, right = way[0].came
    axes = np.array([[right, down], [down, -right]])  # forwards and to the left
    places = np.stack([axes @ (vehicle.position - way[0].position) for vehicle in way])
    marks = np.linspace(0.0, 1.0, len(places)) if len(places) > 1 else np.zeros(1)
    x, y = (np.interp(times, marks, places[:, axis]) for axis in range(2))
    return np.stack([x, y, times * FRAME_SECONDS], axis=1).astype(np.float32)


def record(seed: int, num_frames: int = NUM_FRAMES) -> Drive:
    """Record the drive of a seed.

    Args:
        seed: below `drives.HELD_OUT_DRIVES` for judging, from `drives.FIRST_TRAINING_SEED` on for training.
        num_frames: frames of the drive, which has one action fewer.
    """
    town = Town(seed)
    frames, actions = [render(town.vehicles)], []
    for _ in range(num_frames - 1):
        actions.append(town.advance())
        frames.append(render(town.vehicles))
    return Drive(np.array(frames), np.array(actions))


# -- pictures --------------------------------------------------------------------------------------


def render(vehicles: Sequence[Vehicle]) -> np.ndarray:
    """Vehicles in the town: uint8 (FRAME_PIXELS, FRAME_PIXELS, 3), RGB."""
    picture = _ground().copy()
    for vehicle in vehicles:
        sprite = _sprite(vehicle.colour, vehicle.degrees)
        row, col = ((np.array(vehicle.place) / UNITS + 0.5) * CELL_PIXELS).astype(int) - sprite.width // 2
        picture.paste(sprite, (int(col), int(row)), sprite)
    return np.asarray(picture)


def _down(image: Image.Image) -> Image.Image:
    return image.resize((image.width // SUPERSAMPLING, image.height // SUPERSAMPLING), Image.Resampling.BOX)


@cache
def _sprite(colour: str, degrees: float) -> Image.Image:
    """A vehicle seen from above: RGBA, a square."""
    side, dark = 20, tuple(value * 7 // 10 for value in COLOURS[colour])
    image = Image.new("RGBA", (side * SUPERSAMPLING,) * 2)
    pen = ImageDraw.Draw(image)

    def box(left: float, top: float, right: float, bottom: float, fill: tuple[int, ...], radius: float = 0) -> None:
        corners = [(side / 2 + value) * SUPERSAMPLING for value in (left, top, right, bottom)]
        corners[2:] = [value - 1 for value in corners[2:]]
        pen.rounded_rectangle(corners, radius * SUPERSAMPLING, fill)

    box(-7, -4, 7, 4, dark, 2)
    box(-6.5, -3.5, 6.5, 3.5, COLOURS[colour], 2)
    box(0.5, -3, 3, 3, (40, 46, 56), 0.5)
    box(-5.5, -3, -4, 3, (40, 46, 56), 0.5)
    for top in (-3.5, 1.5):
        box(6, top, 7, top + 2, (255, 250, 220))
    turned = image.rotate(degrees, Image.Resampling.BICUBIC)
    return _down(turned)


@cache
def _ground() -> Image.Image:
    """The town without vehicles."""
    scale = CELL_PIXELS * SUPERSAMPLING
    image = Image.new("RGB", (CELLS * scale,) * 2, GRASS)
    pen = ImageDraw.Draw(image)

    def disc(row: float, col: float, radius: float, fill: Colour) -> None:
        pen.circle((col * scale, row * scale), radius * scale, fill)

    def box(top: float, left: float, bottom: float, right: float, fill: Colour) -> None:
        pen.rectangle([value * scale for value in (left, top)] + [value * scale - 1 for value in (right, bottom)], fill)

    for margin, fill in ((0.12, KERB), (0.0, ASPHALT)):
        for first, heading in STREETS:
            rows, cols = (sorted(ends) for ends in zip(first, _street(first, heading)[-1], strict=True))
            box(rows[0] - margin, cols[0] - margin, rows[1] + 1 + margin, cols[1] + 1 + margin, fill)
    for row in range(CELLS):
        for col in range(CELLS):
            if (row, col) in EXITS:
                continue
            kind = (row * 7 + col * 5 + row * col) % 4
            if kind == 0:  # a tree
                disc(row + 0.5, col + 0.5, 0.34, (112, 146, 104))
                disc(row + 0.45, col + 0.45, 0.2, (134, 164, 122))
            elif kind == 1:  # a house
                box(row + 0.2, col + 0.2, row + 0.8, col + 0.8, (186, 140, 116))
                box(row + 0.2, col + 0.2, row + 0.5, col + 0.8, (164, 118, 98))
            elif kind == 2:  # bushes
                for south, east in ((0.3, 0.3), (0.65, 0.6)):
                    disc(row + south, col + east, 0.18, (122, 152, 112))
    return _down(image)

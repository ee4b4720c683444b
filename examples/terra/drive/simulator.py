"""The town that Terra sees: one-way streets from a fixed camera, and traffic by a timetable.

All that moves is known from what is visible: the town clock says when a line leaves its depot, the colour of a vehicle
says which line it drives, and how fast, and no vehicle enters a cell in which another one is. The ego vehicle, drawn
green, goes where its actions say.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    ((2, 7), WEST),
    ((0, 2), SOUTH),
    ((5, 0), EAST),
    ((7, 5), NORTH),
)
CLOCK = (3, 3)
"""The cell of the town clock."""
HOURS = 12
"""Positions of its hand, which goes on by one with each frame."""

Turns = Mapping[Cell, Cell]
"""The headings in which a vehicle leaves cells; it goes straight on in the others, or where the street goes."""


@dataclass(frozen=True)
class Line:
    """What vehicles of a colour drive.

    Attributes:
        depot: the cell of the house that they come from.
        gate: the heading in which they leave it.
        turns: the last one is into the depot where they end.
        speed: the most places from one frame to the next.
        hours: when they leave; nobody does if the street before the depot is taken.
    """

    depot: Cell
    gate: Cell
    turns: Turns
    speed: int
    hours: Collection[int]


LINES = {
    # halves of the outer ring, and of the inner one: the lines do not meet
    "red": Line((1, 4), NORTH, {(7, 4): NORTH}, 2, {0}),
    "blue": Line((6, 3), SOUTH, {(0, 3): SOUTH}, 2, {6}),
    "yellow": Line((3, 6), WEST, {(2, 5): WEST, (2, 2): SOUTH, (3, 2): WEST}, 1, {3}),
    "white": Line((4, 1), EAST, {(5, 2): EAST, (5, 5): NORTH, (4, 5): EAST}, 1, {9}),
}
EGO_SPEEDS, EGO_SHARES = (0, 1, 2), (0.15, 0.4, 0.45)
"""The most places from one frame to the next that the ego vehicle's driver chooses from, and how often each."""
MOST_METRES = max(EGO_SPEEDS) * METRES
"""The furthest that an action leads."""
EGO_CHANGES = 0.15
"""How often the driver chooses."""
WARM_UP = (20, 200)
"""Frames that the town drives before a drive begins: at least, and fewer than."""

EGO = "green"
COLOURS: dict[str, Colour] = {
    EGO: (30, 205, 70),
    "red": (225, 45, 45),
    "blue": (50, 95, 230),
    "yellow": (250, 205, 40),
    "white": (240, 240, 244),
}
GRASS, ASPHALT, KERB = (172, 190, 146), (104, 106, 112), (206, 204, 196)


def neighbour(cell: Cell, heading: Cell) -> Cell:
    """Return the next cell in a heading."""
    return cell[0] + heading[0], cell[1] + heading[1]


def _find_depots() -> dict[Cell, Cell]:
    depots = {}
    for line in LINES.values():
        depots[line.depot] = line.gate
        last_turn = list(line.turns)[-1]
        down, right = line.turns[last_turn]
        depots[neighbour(last_turn, (down, right))] = (-down, -right)
    return depots


DEPOTS = _find_depots()
"""The heading in which each depot is left, or would be."""


def _is_in_town(cell: Cell) -> bool:
    row, col = cell
    return 0 <= row < CELLS and 0 <= col < CELLS


def _cells_of_street(first: Cell, heading: Cell) -> list[Cell]:
    cells = [first]
    while _is_in_town(neighbour(cells[-1], heading)):
        cells.append(neighbour(cells[-1], heading))
    return cells


def _find_exits() -> dict[Cell, list[Cell]]:
    exits: dict[Cell, list[Cell]] = {}
    for first, heading in STREETS:
        for cell in _cells_of_street(first, heading)[:-1]:
            exits.setdefault(cell, []).append(heading)
    return exits


EXITS = _find_exits()
"""The headings in which each cell of the streets can be left."""
CHOICES = {cell: exits for cell, exits in EXITS.items() if len(exits) > 1}
"""Where the ego vehicle can choose."""


@dataclass(frozen=True)
class Vehicle:
    """A vehicle at one of the places of the streets, or half-way to a depot.

    Attributes:
        colour: a key of COLOURS.
        cell: the last one whose middle was reached.
        entered, leaves: the headings in which it came there and goes on.
        units: places from there, below UNITS.
    """

    colour: str
    cell: Cell
    entered: Cell
    leaves: Cell
    units: int = 0

    @property
    def place(self) -> Cell:
        """Row and column, counted in places."""
        row, col = self.cell
        down, right = self.leaves
        return row * UNITS + down * self.units, col * UNITS + right * self.units

    @property
    def position(self) -> np.ndarray:
        """float64 (2,), (x, y) in metres from the middle of the view."""
        return (np.array(self.place[::-1]) / UNITS + 0.5) * CELL_METRES - VIEW_METRES / 2

    @property
    def heading(self) -> Cell:
        """The heading in which it came to its place."""
        return self.leaves if self.units else self.entered

    @property
    def degrees(self) -> float:
        """The heading, counter-clockwise from east: half-way between two in a corner, where nobody can choose."""
        down, right = self.heading
        if self.units == 0 and self.cell not in CHOICES:
            down += self.leaves[0]
            right += self.leaves[1]
        return math.degrees(math.atan2(-down, right))

    @property
    def cells(self) -> set[Cell]:
        """The cells that it is in: two when it is half-way between them."""
        if self.units == 0:
            return {self.cell}
        return {self.cell, neighbour(self.cell, self.leaves)}

    @property
    def is_inside(self) -> bool:
        """Whether it is in a depot, where nobody sees it."""
        return self.cell not in EXITS and self.units == 0

    def advance(self, turns: Turns | None = None) -> "Vehicle":
        """Return the vehicle one place further.

        Args:
            turns: those of its line if there are none.
        """
        if self.units + 1 < UNITS:
            return replace(self, units=self.units + 1)
        if turns is None:
            turns = LINES[self.colour].turns if self.colour in LINES else {}
        cell = neighbour(self.cell, self.leaves)
        exits = EXITS.get(cell, [self.leaves])
        straight = self.leaves if self.leaves in exits else exits[0]
        return replace(self, cell=cell, entered=self.leaves, leaves=turns.get(cell, straight), units=0)

    def path(self, count: int, turns: Turns | None = None) -> list["Vehicle"]:
        """Return the vehicle at the next places, `count` of them, one after the other."""
        path = []
        vehicle = self
        for _ in range(count):
            vehicle = vehicle.advance(turns)
            path.append(vehicle)
        return path

    def follow(self, action: np.ndarray) -> list["Vehicle"]:
        """Return the vehicle at the places up to the next frame where an action leads: as far as it says, around the
        corners that are there.

        Args:
            action: float (NUM_WAYPOINTS, 3); see `Drive`.
        """
        count = round(float(np.abs(action[-1, :2]).sum()) / METRES)
        down, right = self.heading
        vehicle = self
        path = []
        position = np.zeros(2)  # in metres, forwards and to the left
        for number in range(1, count + 1):
            waypoint = action[round(NUM_WAYPOINTS * number / count) - 1, :2]
            ahead, left = np.round((waypoint - position) / METRES).astype(int).tolist()
            position = waypoint
            if vehicle.units == 0:
                exits = EXITS[vehicle.cell]
                wish = (ahead * down - left * right, ahead * right + left * down)
                straight = vehicle.entered if vehicle.entered in exits else exits[0]
                vehicle = replace(vehicle, leaves=wish if wish in exits else straight)
            vehicle = vehicle.advance()
            path.append(vehicle)
        return path


def stop_before(path: Sequence[Vehicle], own_cells: Collection[Cell], occupied: Collection[Cell]) -> list[Vehicle]:
    """Return the places of a path before the first one in an occupied cell, but for the vehicle's own cells."""
    reached = []
    for vehicle in path:
        if not vehicle.cells.isdisjoint(occupied) and not vehicle.cells.issubset(own_cells):
            break
        reached.append(vehicle)
    return reached


@cache
def vehicles_at(colour: str, place: Cell) -> Sequence[Vehicle]:
    """Return what a vehicle of a colour may be at a place, given by row and column counted in places: the ego vehicle
    may have come there by each of the streets."""
    if colour in LINES:
        return [vehicle for vehicle in _path_of_line(colour) if vehicle.place == place]
    candidates = []
    for cell, exits in EXITS.items():
        for heading in exits:
            candidates += Vehicle(colour, cell, heading, heading).path(UNITS)
    return [vehicle for vehicle in candidates if vehicle.place == place]


def _path_of_line(colour: str) -> list[Vehicle]:
    """Return a vehicle at all places of its line, from one depot to the other."""
    path = []
    vehicle = _leave_depot(colour)
    while not vehicle.is_inside:
        path.append(vehicle)
        vehicle = vehicle.advance()
    return path


def _leave_depot(colour: str) -> Vehicle:
    """Return a vehicle half-way out of its depot."""
    line = LINES[colour]
    return Vehicle(colour, line.depot, line.gate, line.gate, 1)


@dataclass
class Driver:
    """What is not to be seen: where the ego vehicle's driver wants to go, and how fast.

    Attributes:
        rng: of the choices.
        speed: one of EGO_SPEEDS.
        turns: at the CHOICES.
    """

    rng: np.random.Generator
    speed: int = 2
    turns: Turns = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Choose the turns."""
        self.choose()

    def choose(self) -> None:
        """Choose where to go at all CHOICES."""
        turns = {}
        for cell, exits in CHOICES.items():
            turns[cell] = exits[int(self.rng.integers(len(exits)))]
        self.turns = turns

    def action(self, town: "Town") -> np.ndarray:
        """Return the action that leads to the next frame, as far as the traffic of a town lets it go.

        Returns:
            float32 (NUM_WAYPOINTS, 3), the ego vehicle's waypoints; see `Drive`.
        """
        ego = town.vehicles[0]
        if self.rng.random() < EGO_CHANGES:
            self.speed = int(self.rng.choice(EGO_SPEEDS, p=EGO_SHARES))
        if ego.cell in CHOICES and ego.units > 0:
            self.choose()
        if ego.units == 0 and ego.cell in CHOICES:
            ego = replace(ego, leaves=self.turns[ego.cell])
        occupied = _find_occupied_cells(town.vehicles[1:] + town.move_traffic())
        path = stop_before(ego.path(self.speed, self.turns), ego.cells, occupied)
        return make_action([ego] + path)


class Town:
    """The town with traffic.

    Args:
        seed: of everything that is drawn; equal seeds give equal drives.
        vehicles: those that are there, the ego vehicle first. If there are none, the town drives a while before it
            begins.
        hour: of the town clock.
    """

    def __init__(self, seed: int, vehicles: Sequence[Vehicle] = (), hour: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.driver = Driver(rng)
        self.vehicles = list(vehicles)
        self.hour = hour
        if not vehicles:
            cell = list(EXITS)[int(rng.integers(len(EXITS)))]
            self.vehicles = [Vehicle(EGO, cell, EXITS[cell][0], EXITS[cell][0])]
            for _ in range(int(rng.integers(WARM_UP[0], WARM_UP[1]))):
                self.advance()

    def advance(self) -> np.ndarray:
        """Drive to the next frame, where the ego vehicle's driver wants to go.

        Returns:
            The action, see `Driver`.
        """
        action = self.driver.action(self)
        self.follow(action)
        return action

    def follow(self, action: np.ndarray) -> None:
        """Drive to the next frame, the ego vehicle where an action leads, whatever is there."""
        ego = self.vehicles[0]
        path = ego.follow(action)
        if path:
            ego = path[-1]
        self.vehicles = [ego] + self.move_traffic()
        self.hour = (self.hour + 1) % HOURS

    def move_traffic(self) -> list[Vehicle]:
        """Return all vehicles but the ego vehicle, in the next frame."""
        traffic = []
        for index, vehicle in enumerate(self.vehicles[1:], 1):
            occupied = _find_occupied_cells(self.vehicles[:index] + self.vehicles[index + 1 :])
            path = vehicle.path(LINES[vehicle.colour].speed)
            path = stop_before(path, vehicle.cells, occupied)
            if any(place.is_inside for place in path):
                continue
            traffic.append(path[-1] if path else vehicle)
        occupied = _find_occupied_cells(self.vehicles)
        for colour, line in LINES.items():
            vehicle = _leave_depot(colour)
            if self.hour in line.hours and vehicle.cells.isdisjoint(occupied):
                traffic.append(vehicle)
        return traffic

    def picture(self) -> np.ndarray:
        """Return what the camera sees; see `render`."""
        return render(self.vehicles, self.hour)


def _find_occupied_cells(vehicles: Sequence[Vehicle]) -> set[Cell]:
    cells: set[Cell] = set()
    for vehicle in vehicles:
        cells |= vehicle.cells
    return cells


def make_action(path: Sequence[Vehicle]) -> np.ndarray:
    """Return the action along places from one frame to the next, the first place first.

    Returns:
        float32 (NUM_WAYPOINTS, 3); see `Drive`.
    """
    times = np.arange(1, NUM_WAYPOINTS + 1) / NUM_WAYPOINTS
    down, right = path[0].heading
    axes = np.array([[right, down], [down, -right]])  # forwards and to the left
    places = np.stack([axes @ (vehicle.position - path[0].position) for vehicle in path])
    marks = np.linspace(0.0, 1.0, len(places)) if len(places) > 1 else np.zeros(1)
    x = np.interp(times, marks, places[:, 0])
    y = np.interp(times, marks, places[:, 1])
    return np.stack([x, y, times * FRAME_SECONDS], axis=1).astype(np.float32)


def record(seed: int, num_frames: int = NUM_FRAMES) -> Drive:
    """Record the drive of a seed.

    Args:
        seed: below `drives.HELD_OUT_DRIVES` for judging, from `drives.FIRST_TRAINING_SEED` on for training.
        num_frames: frames of the drive, which has one action fewer.
    """
    town = Town(seed)
    frames = [town.picture()]
    actions = []
    for _ in range(num_frames - 1):
        actions.append(town.advance())
        frames.append(town.picture())
    return Drive(np.array(frames), np.array(actions))


# -- pictures --------------------------------------------------------------------------------------


def render(vehicles: Sequence[Vehicle], hour: int = 0) -> np.ndarray:
    """Draw vehicles in the town, and the hour of its clock.

    Returns:
        uint8 (FRAME_PIXELS, FRAME_PIXELS, 3), RGB.
    """
    picture = _draw_ground().copy()
    picture.paste(_draw_clock(hour), (CLOCK[1] * CELL_PIXELS, CLOCK[0] * CELL_PIXELS))
    for vehicle in vehicles:
        sprite = _draw_vehicle(vehicle.colour, vehicle.degrees)
        row, col = ((np.array(vehicle.place) / UNITS + 0.5) * CELL_PIXELS).astype(int) - sprite.width // 2
        picture.paste(sprite, (int(col), int(row)), sprite)
    return np.asarray(picture)


def _scale_down(image: Image.Image) -> Image.Image:
    return image.resize((image.width // SUPERSAMPLING, image.height // SUPERSAMPLING), Image.Resampling.BOX)


@cache
def _draw_vehicle(colour: str, degrees: float) -> Image.Image:
    """Draw a vehicle seen from above: RGBA, a square."""
    side = 20
    dark = tuple(value * 7 // 10 for value in COLOURS[colour])
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
    return _scale_down(image.rotate(degrees, Image.Resampling.BICUBIC))


@cache
def _draw_clock(hour: int) -> Image.Image:
    """Draw the cell of the town clock."""
    scale = CELL_PIXELS * SUPERSAMPLING
    image = Image.new("RGB", (scale,) * 2, GRASS)
    pen = ImageDraw.Draw(image)
    middle = np.full(2, scale / 2)
    angle = 2 * math.pi * hour / HOURS
    for radius, fill in ((0.47, (92, 84, 80)), (0.4, (250, 248, 240))):
        pen.circle(tuple(middle), radius * scale, fill)
    tip = middle + 0.36 * scale * np.array([math.sin(angle), -math.cos(angle)])
    pen.line([tuple(middle), tuple(tip)], (60, 30, 30), scale // 8)
    pen.circle(tuple(middle), 0.08 * scale, (60, 30, 30))
    return _scale_down(image)


@cache
def _draw_ground() -> Image.Image:
    """Draw the town without vehicles."""
    scale = CELL_PIXELS * SUPERSAMPLING
    image = Image.new("RGB", (CELLS * scale,) * 2, GRASS)
    pen = _CellPen(ImageDraw.Draw(image), scale)
    for margin, fill in ((0.12, KERB), (0.0, ASPHALT)):
        for first, heading in STREETS:
            last = _cells_of_street(first, heading)[-1]
            top, bottom = sorted((first[0], last[0]))
            left, right = sorted((first[1], last[1]))
            pen.box(top - margin, left - margin, bottom + 1 + margin, right + 1 + margin, fill)
    for cell, heading in DEPOTS.items():
        _draw_depot(pen, cell, heading)
    for row in range(CELLS):
        for col in range(CELLS):
            cell = (row, col)
            if cell not in EXITS and cell not in DEPOTS and cell != CLOCK:
                _draw_scenery(pen, row, col)
    return _scale_down(image)


@dataclass(frozen=True)
class _CellPen:
    """Draws in units of cells.

    Attributes:
        draw: of the picture.
        scale: pixels of a cell.
    """

    draw: ImageDraw.ImageDraw
    scale: int

    def disc(self, row: float, col: float, radius: float, fill: Colour) -> None:
        self.draw.circle((col * self.scale, row * self.scale), radius * self.scale, fill)

    def box(self, top: float, left: float, bottom: float, right: float, fill: Colour) -> None:
        scale = self.scale
        self.draw.rectangle([left * scale, top * scale, right * scale - 1, bottom * scale - 1], fill)


def _draw_depot(pen: _CellPen, cell: Cell, heading: Cell) -> None:
    """Draw a path to the street, a house behind it, its roof and its gate."""
    row, col = cell
    down, right = heading
    for near, far, half, fill in (
        (0.5, 0.0, 0.3, ASPHALT),
        (0.0, -0.46, 0.44, (164, 118, 98)),
        (-0.08, -0.42, 0.38, (186, 140, 116)),
        (0.0, -0.08, 0.3, (58, 50, 54)),
    ):
        # `near` and `far` lie along the heading, `half` of the width across it
        rows = sorted((row + 0.5 + (down * near + half * right), row + 0.5 + (down * far - half * right)))
        cols = sorted((col + 0.5 + (right * near + half * down), col + 0.5 + (right * far - half * down)))
        pen.box(rows[0], cols[0], rows[1], cols[1], fill)


def _draw_scenery(pen: _CellPen, row: int, col: int) -> None:
    """Draw a tree, a house, bushes or nothing into a cell beside the streets."""
    kind = (row * 7 + col * 5 + row * col) % 4
    if kind == 0:  # a tree
        pen.disc(row + 0.5, col + 0.5, 0.34, (112, 146, 104))
        pen.disc(row + 0.45, col + 0.45, 0.2, (134, 164, 122))
    elif kind == 1:  # a house
        pen.box(row + 0.2, col + 0.2, row + 0.8, col + 0.8, (186, 140, 116))
        pen.box(row + 0.2, col + 0.2, row + 0.5, col + 0.8, (164, 118, 98))
    elif kind == 2:  # bushes
        pen.disc(row + 0.3, col + 0.3, 0.18, (122, 152, 112))
        pen.disc(row + 0.65, col + 0.6, 0.18, (122, 152, 112))

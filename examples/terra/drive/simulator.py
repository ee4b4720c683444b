"""The world that Terra sees: highway-env's roundabout from a fixed camera, with drivers of several kinds.

The road, the vehicles, their physics and their pictures are highway-env's
(https://github.com/Farama-Foundation/HighwayEnv). This module places vehicles, lets them drive, and records what the
camera sees and where the ego vehicle, drawn green, goes. Needs `requirements/drive.txt`.
"""

from functools import cached_property
from itertools import count

import gymnasium
import highway_env  # noqa: F401  # registers its environments
import numpy as np
import pygame
from highway_env.road.graphics import RoadGraphics, WorldSurface
from highway_env.vehicle.behavior import IDMVehicle
from highway_env.vehicle.controller import MDPVehicle
from highway_env.vehicle.graphics import VehicleGraphics
from highway_env.vehicle.kinematics import Vehicle

from .drives import FRAME_PIXELS, FRAME_SECONDS, NUM_FRAMES, NUM_WAYPOINTS, VIEW_METRES, Drive

SECONDS_PER_STEP = FRAME_SECONDS / NUM_WAYPOINTS
"""Time of a step of the simulation: as many as waypoints lead from one frame to the next."""
MARGIN_METRES = 3.0
"""The ego vehicle stays at least so far inside the view."""
SUPERSAMPLING = 4
"""Pixels that are drawn for each pixel of a frame, along each side."""

RING = ("se", "ex", "ee", "nx", "ne", "wx", "we", "sx")
"""Nodes of the ring in the direction of travel."""
ENTRIES = (("ses", "se"), ("ees", "ee"), ("nes", "ne"), ("wes", "we"))
EGO_SPEEDS = (0.0, 4.0, 8.0, 12.0)
"""Target speeds of the restless driver, in m/s."""
DRIVERS = {"lane": 0.45, "restless": 0.25, "wanderer": 0.3}
"""How often each kind of driver steers the ego vehicle.

lane: highway-env's IDM and MOBIL models. restless: changes its lane and its target speed at random. wanderer: steers
at random, on the road and off it.
"""


class Roundabout:
    """A roundabout with traffic.

    Args:
        seed: of everything that is drawn; equal seeds give equal drives.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        env = gymnasium.make("roundabout-v1", config={"offscreen_rendering": True}, disable_env_checker=True)
        env.reset(seed=int(self._rng.integers(2**31)))
        self.road = env.unwrapped.road
        self.road.vehicles = []
        for _ in range(int(self._rng.integers(2, 6))):
            self._place_other()
        self.driver = str(self._rng.choice(list(DRIVERS), p=list(DRIVERS.values())))
        self.ego = self._place_ego()
        # no crash may end a drive, so vehicles do not collide; the drivers' models keep them apart
        for vehicle in self.road.vehicles:
            vehicle.check_collisions = False
        self._steering = 0.0

    # -- vehicles ----------------------------------------------------------------------------------

    def _free_place(self) -> tuple[tuple[str, str, int], float]:
        """A lane and a place on it, away from the vehicles that are there."""
        roads = [*zip(RING, RING[1:] + RING[:1], strict=True), *ENTRIES]
        while True:
            start, end = roads[int(self._rng.integers(len(roads)))]
            lanes = self.road.network.graph[start][end]
            index = (start, end, int(self._rng.integers(len(lanes))))
            lane = self.road.network.get_lane(index)
            along = float(self._rng.uniform(0.0, lane.length))
            place = lane.position(along, 0)
            if all(np.linalg.norm(vehicle.position - place) > 9.0 for vehicle in self.road.vehicles):
                return index, along

    def _place_other(self) -> None:
        index, along = self._free_place()
        vehicle = IDMVehicle.make_on_lane(self.road, index, along, speed=float(self._rng.uniform(5.0, 10.0)))
        vehicle.target_speed = float(self._rng.uniform(6.0, 12.0))
        vehicle.randomize_behavior()
        self.road.vehicles.append(vehicle)

    def _place_ego(self) -> Vehicle:
        index, along = self._free_place()
        speed = float(self._rng.uniform(3.0, 10.0))
        if self.driver == "lane":
            ego = IDMVehicle.make_on_lane(self.road, index, along, speed=speed)
            ego.target_speed = float(self._rng.uniform(4.0, 12.0))
        elif self.driver == "restless":
            ego = MDPVehicle.make_on_lane(self.road, index, along, speed=speed)
            ego.target_speeds = np.array(EGO_SPEEDS)
            ego.speed_index = ego.speed_to_index(speed)
        else:
            reach = VIEW_METRES / 2 - 2 * MARGIN_METRES
            place = self._rng.uniform(-reach, reach, size=2)
            ego = Vehicle(self.road, place, heading=float(self._rng.uniform(-np.pi, np.pi)), speed=speed)
        ego.color = VehicleGraphics.EGO_COLOR
        self.road.vehicles.insert(0, ego)
        return ego

    def _decide(self) -> None:
        """What the ego vehicle's driver decides once per frame; the lane driver decides in every step by itself."""
        if self.driver == "restless":
            weights = {"IDLE": 0.55, "FASTER": 0.15, "SLOWER": 0.15, "LANE_LEFT": 0.075, "LANE_RIGHT": 0.075}
            self.ego.act(str(self._rng.choice(list(weights), p=list(weights.values()))))
        elif self.driver == "wanderer":
            self._steering = float(np.clip(0.7 * self._steering + self._rng.normal(0.0, 0.2), -0.6, 0.6))
            homewards = np.arctan2(-self.ego.position[1], -self.ego.position[0]) - self.ego.heading
            homewards = (homewards + np.pi) % (2 * np.pi) - np.pi
            if np.abs(self.ego.position).max() > VIEW_METRES / 2 - 4 * MARGIN_METRES:
                self._steering = float(np.clip(homewards, -0.6, 0.6))
            acceleration = float(self._rng.normal(0.4 * (6.0 - self.ego.speed), 2.0))
            if self.ego.speed < 0.5:
                acceleration = abs(acceleration)
            self.ego.act({"steering": self._steering, "acceleration": acceleration})

    def advance(self) -> np.ndarray:
        """Drive to the next frame.

        Returns:
            float32 (NUM_WAYPOINTS, 3), the ego vehicle's waypoints (x, y, t): metres to the east and to the south of
            the middle of the view, and seconds from the last frame.
        """
        self._decide()
        waypoints = []
        for step in range(NUM_WAYPOINTS):
            self.road.act()
            self.road.step(SECONDS_PER_STEP)
            self.ego.speed = max(self.ego.speed, 0.0)
            waypoints.append([*self.ego.position, (step + 1) * SECONDS_PER_STEP])
        return np.array(waypoints, dtype=np.float32)

    def sees_ego(self) -> bool:
        """Whether the ego vehicle is inside the view."""
        return bool(np.abs(self.ego.position).max() <= VIEW_METRES / 2 - MARGIN_METRES)

    # -- pictures ----------------------------------------------------------------------------------

    @cached_property
    def _ground(self) -> WorldSurface:
        """The road without vehicles, which no frame changes."""
        surface = self._surface()
        RoadGraphics.display(self.road, surface)
        return surface

    def _surface(self) -> WorldSurface:
        size = (FRAME_PIXELS * SUPERSAMPLING,) * 2
        surface = WorldSurface(size, 0, pygame.Surface(size))
        surface.scaling = size[0] / VIEW_METRES
        surface.centering_position = (0.5, 0.5)
        surface.move_display_window_to(np.zeros(2))
        return surface

    def render(self) -> np.ndarray:
        """What the camera sees: uint8 (FRAME_PIXELS, FRAME_PIXELS, 3), RGB."""
        surface = self._surface()
        surface.blit(self._ground, (0, 0))
        for vehicle in reversed(self.road.vehicles):  # the ego vehicle is on top
            VehicleGraphics.display(vehicle, surface, offscreen=True)
        pixels = pygame.surfarray.array3d(surface).swapaxes(0, 1).astype(np.float32)
        blocks = pixels.reshape(FRAME_PIXELS, SUPERSAMPLING, FRAME_PIXELS, SUPERSAMPLING, 3)
        return blocks.mean(axis=(1, 3)).round().astype(np.uint8)


def record(seed: int, num_frames: int = NUM_FRAMES) -> Drive:
    """Record the drive of a seed: the first one that stays in view, of those that the seed gives.

    Args:
        seed: below `drives.HELD_OUT_DRIVES` for judging, from `drives.FIRST_TRAINING_SEED` on for training.
        num_frames: frames of the drive, which has one action fewer.
    """
    drives = (_drive(Roundabout(seed * 1000 + attempt), num_frames) for attempt in count())
    return next(drive for drive in drives if len(drive.frames) == num_frames)


def _drive(world: Roundabout, num_frames: int) -> Drive:
    """Drive until the ego vehicle leaves the view, or there are so many frames."""
    start = world.ego.position.astype(np.float32)
    frames, actions = [], []
    while world.sees_ego() and len(frames) < num_frames:
        frames.append(world.render())
        if len(frames) < num_frames:
            actions.append(world.advance())
    return Drive(np.array(frames), np.array(actions), start, world.driver)

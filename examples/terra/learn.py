"""A policy that learns inside the dream, then drives in the true town: ``python -m examples.terra.learn --help``.

The task: drive as far as possible in STEPS frames, and never into another vehicle, which ends the drive.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn
from tqdm import tqdm

from . import CHECKPOINT, register
from .drive.metrics import vehicles
from .drive.simulator import CHOICES, EGO, EGO_SPEEDS, FRAME_PIXELS, Vehicle, make_action, vehicles_at
from .environment import Dream, EngineDream, Frame, Scenes, TerraVectorEnv, TrueTown
from .rollout import VllmTerra
from .worlds import TownWorld

STEPS = 20
"""Of one drive."""

JUDGED = range(1000, 1200)
"""Episodes for judging."""

LEARNT = range(2000, 3000)
"""Episodes for learning."""

DISCOUNT = 0.8
"""Of later rewards."""

AHEAD = 6
"""Places ahead that a policy looks at."""

FAR = 5
"""The distance, in places, beyond which another vehicle does not matter."""


def _list_moves() -> list[tuple[int, int]]:
    moves = []
    for speed in EGO_SPEEDS:
        moves.append((speed, 0))
        if speed > 0:
            moves.append((speed, 1))
    return moves


MOVES = _list_moves()
"""What a policy chooses from: places, and which of the two ways to go where the streets fork."""

Policy = Callable[[np.ndarray], np.ndarray]
"""Chooses indices of MOVES, (drives,), from the pictures of their frames, (drives, height, width, 3)."""


def main(
    streams: Annotated[int, typer.Option(min=1, help="Drives at once.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of driving and fitting.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the policy, its moves and its episodes.")] = 0,
    judged: Annotated[int, typer.Option(min=2, max=len(JUDGED), help="Drives that judge a policy.")] = 30,
    drafts: Annotated[int, typer.Option(min=0, help="Tokens that vLLM drafts per step; see VllmTerra.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for learn.json.")] = Path("out"),
    log_level: Annotated[str, typer.Option(help="vLLM's log level.", envvar="VLLM_LOGGING_LEVEL")] = "ERROR",
) -> None:
    """Learn in the dream and in the true town, and judge both where neither has been, beside chance."""
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    register()
    truth = TrueTown(TownWorld())
    dream = EngineDream(VllmTerra(CHECKPOINT, drafts=drafts, enforce_eager=True))
    dreamer = learn("dream", dream, streams, rounds, seed)
    driver = learn("true town", truth, streams, rounds, seed)
    # a policy for each world: the one that chooses at random begins with the same draws
    policies: dict[str, tuple[Policy, Policy]] = {
        "chance": (choose_at_random(seed), choose_at_random(seed)),
        "always one place": (choose_always(1), choose_always(1)),
        "learnt in the dream": (dreamer, dreamer),
        "learnt in the true town": (driver, driver),
    }
    report: dict[str, Any] = {"streams": streams, "rounds": rounds, "seed": seed, "judged": judged}
    print(f"{'places, mean ± sd':>30} {'true town':>16} {'dream':>16}")
    for name, (policy_for_truth, policy_for_dream) in policies.items():
        returns = {
            "true": measure_returns(truth, policy_for_truth, judged).tolist(),
            "dream": measure_returns(dream, policy_for_dream, judged).tolist(),
        }
        report[name] = returns
        line = f"{name:>30}"
        for values in returns.values():
            figure = f"{np.mean(values):8.2f} ± {np.std(values):.2f}"
            line += f" {figure:>16}"
        print(line)
    out.mkdir(parents=True, exist_ok=True)
    (out / "learn.json").write_text(json.dumps(report) + "\n")


def choose_at_random(seed: int) -> Policy:
    """Return the policy of any move, each as likely as another."""
    rng = np.random.default_rng(seed)

    def choose(pictures: np.ndarray) -> np.ndarray:
        return rng.integers(len(MOVES), size=len(pictures))

    return choose


def choose_always(move: int) -> Policy:
    """Return the policy of one move, whatever is there."""

    def choose(pictures: np.ndarray) -> np.ndarray:
        return np.full(len(pictures), move)

    return choose


def learn(name: str, dream: Dream, streams: int, rounds: int, seed: int) -> Policy:
    """Learn what a move is worth, by fitted Q iteration over all that was driven so far.

    Args:
        name: of the dream, for the progress bar.
        dream: where to drive.
        streams: drives at once.
        rounds: each has STEPS moves of every drive, at random in the first and less so in each further one, then a fit.
        seed: of everything.

    Returns:
        The policy, which takes the move that it thinks best.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    worth = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(-2))
    # a lazy layer gets its weights with its first input
    worth(extract_features(np.zeros((1, FRAME_PIXELS, FRAME_PIXELS, 3), np.uint8)))
    optimiser = torch.optim.Adam(worth.parameters(), lr=0.01)

    def choose_best(pictures: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return worth(extract_features(pictures)).argmax(dim=-1).numpy()

    envs = make_environments(dream, streams, LEARNT)
    pictures, _ = envs.reset(seed=seed)
    over = np.zeros(streams, bool)
    chosen: list[torch.Tensor] = []
    rewards: list[torch.Tensor] = []
    later: list[torch.Tensor] = []
    goes_on: list[torch.Tensor] = []
    bar = tqdm(total=rounds * STEPS, desc=f"learning in the {name}", unit="step")
    for number in range(rounds):
        for _ in range(STEPS):
            before = pictures
            counts = ~over  # the move of a drive that begins anew does nothing
            is_random = rng.random(streams) < 1 / (number + 1)
            random_moves = rng.integers(len(MOVES), size=streams)
            moves = np.where(is_random, random_moves, choose_best(before))
            pictures, step_rewards, terminated, truncated, _ = envs.step(make_actions(before, moves))
            over = terminated | truncated
            chosen.append(extract_features(before)[np.arange(streams), moves][counts])
            later.append(extract_features(pictures)[counts])
            rewards.append(torch.from_numpy(step_rewards)[counts])
            goes_on.append(torch.from_numpy(~terminated)[counts])
            bar.update()
        bar.set_postfix({"reward per move": f"{torch.cat(rewards[-STEPS:]).mean():.2f}"})
        fit(
            worth,
            optimiser,
            torch.cat(chosen).float(),
            torch.cat(rewards).float(),
            torch.cat(later).float(),
            torch.cat(goes_on).float(),
        )
    bar.close()
    return choose_best


def fit(
    worth: nn.Module,
    optimiser: torch.optim.Optimizer,
    chosen: torch.Tensor,
    rewards: torch.Tensor,
    later: torch.Tensor,
    goes_on: torch.Tensor,
) -> None:
    """Fit the worth of moves to their rewards and the worth of the best move after them.

    Args:
        worth: of features (..., moves, features).
        optimiser: of its parameters.
        chosen: (samples, features).
        rewards, goes_on: (samples,).
        later: (samples, moves, features), what was seen afterwards.
    """
    for _ in range(10):
        with torch.no_grad():
            target = rewards + DISCOUNT * goes_on * worth(later).amax(dim=-1)
        for _ in range(20):
            optimiser.zero_grad()
            nn.functional.mse_loss(worth(chosen[:, None]).squeeze(-1), target).backward()
            optimiser.step()


def measure_returns(dream: Dream, policy: Policy, judged: int) -> np.ndarray:
    """Return what a policy gets in drives that are equal for every policy and every dream, float (judged,)."""
    envs = make_environments(dream, judged, JUDGED)
    pictures, _ = envs.reset(seed=0)
    total = np.zeros(judged)
    going = np.ones(judged, bool)
    while going.any():
        pictures, rewards, terminated, truncated, _ = envs.step(make_actions(pictures, policy(pictures)))
        total += rewards * going
        going &= ~(terminated | truncated)
    return total


# -- the task ----------------------------------------------------------------------------------------------------------


def make_environments(dream: Dream, count: int, episodes: range) -> TerraVectorEnv:
    """Return the task, in so many drives."""
    scenes = Scenes(TownWorld(), episodes)
    return TerraVectorEnv(scenes, dream, count, reward=count_places, ended=is_crash, max_steps=STEPS)


def count_places(before: Frame, action: np.ndarray, after: Frame) -> float:
    """Return the places of an action, unless it leads into a vehicle."""
    if is_crash(before, action, after):
        return 0.0
    return float(len(find_vehicles(before.picture)[0].follow(action)))


def is_crash(before: Frame, action: np.ndarray, after: Frame) -> bool:
    """Return whether an action leads into a vehicle, as far as the frame before it shows.

    A frame without the ego vehicle is a crash, too.
    """
    visible = find_vehicles(before.picture)
    if not visible:
        return True
    ego = visible[0]
    return any(find_distance(place, visible[1:]) < 2 for place in ego.follow(action))


def make_actions(pictures: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Return the waypoints of moves: float32 (drives, num_action_tokens, action_dim)."""
    actions = []
    for picture, move in zip(pictures, moves, strict=True):
        visible = find_vehicles(picture) or vehicles_at(EGO, (0, 1))  # from anywhere if it is missing
        actions.append(make_action(find_path(visible[0], int(move))))
    return np.stack(actions)


def extract_features(pictures: np.ndarray) -> torch.Tensor:
    """Return what a policy sees of each move.

    These are how far the nearest vehicle is from each place ahead, and the move's places.

    Args:
        pictures: uint8 (drives, height, width, 3).

    Returns:
        float32 (drives, moves, features).
    """
    features = torch.zeros(len(pictures), len(MOVES), AHEAD * (FAR + 1) + len(EGO_SPEEDS))
    for drive, picture in enumerate(pictures):
        visible = find_vehicles(picture)
        if not visible:
            continue
        for move, (speed, _) in enumerate(MOVES):
            places = find_path(visible[0], move, AHEAD)[1:]
            for number, place in enumerate(places):
                features[drive, move, number * (FAR + 1) + find_distance(place, visible[1:])] = 1
            features[drive, move, AHEAD * (FAR + 1) + speed] = 1
    return features


def find_path(ego: Vehicle, move: int, count: int | None = None) -> list[Vehicle]:
    """Return where the ego vehicle is and the places of a move, or so many places of its path."""
    speed, turn = MOVES[move]
    turns = {cell: exits[turn] for cell, exits in CHOICES.items()}
    if ego.units == 0 and ego.cell in CHOICES:
        ego = replace(ego, leaves=turns[ego.cell])
    if count is None:
        count = speed
    return [ego, *ego.path(count, turns)]


def find_distance(place: Vehicle, other_vehicles: Sequence[Vehicle]) -> int:
    """Return the places to the nearest other vehicle, at most FAR."""
    nearest = FAR
    for vehicle in other_vehicles:
        nearest = min(nearest, int(np.abs(np.subtract(place.place, vehicle.place)).sum()))
    return nearest


def find_vehicles(picture: np.ndarray) -> Sequence[Vehicle]:
    """Return the vehicles of a picture, the ego vehicle first; none where it is missing."""
    visible = _find_vehicles_in(picture.tobytes())
    if visible and visible[0].colour == EGO:
        return visible
    return []


@lru_cache(4096)
def _find_vehicles_in(picture: bytes) -> Sequence[Vehicle]:
    return vehicles(np.frombuffer(picture, np.uint8).reshape(FRAME_PIXELS, FRAME_PIXELS, 3))


if __name__ == "__main__":
    typer.run(main)

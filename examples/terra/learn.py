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
JUDGED, LEARNT = range(1000, 1200), range(2000, 3000)
"""Episodes for judging, and for learning."""
DISCOUNT = 0.8
"""Of later rewards."""
AHEAD, FAR = 6, 5
"""Places ahead that a policy looks at, and the distance, in places, beyond which another vehicle does not matter."""
MOVES = [(speed, turn) for speed in EGO_SPEEDS for turn in range(1 + (speed > 0))]
"""What a policy chooses from: places, and which of the two ways to go where the streets fork."""

Policy = Callable[[np.ndarray], np.ndarray]
"""Chooses indices of MOVES, (drives,), from the pictures of their frames, (drives, height, width, 3)."""


@lru_cache(4096)
def _shown(picture: bytes) -> Sequence[Vehicle]:
    return vehicles(np.frombuffer(picture, np.uint8).reshape(FRAME_PIXELS, FRAME_PIXELS, 3))


def shown(picture: np.ndarray) -> Sequence[Vehicle]:
    """What a picture shows; empty where the ego vehicle is missing."""
    there = _shown(picture.tobytes())
    return there if there and there[0].colour == EGO else []


def way_of(ego: Vehicle, move: int, count: int | None = None) -> list[Vehicle]:
    """Where the ego vehicle is and the places of a move, or so many of its way."""
    speed, turn = MOVES[move]
    turns = {cell: exits[turn] for cell, exits in CHOICES.items()}
    if ego.units == 0 and ego.cell in CHOICES:
        ego = replace(ego, leaves=turns[ego.cell])
    return [ego, *ego.path(speed if count is None else count, turns)]


def actions_of(pictures: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """The waypoints of moves: float32 (drives, num_action_tokens, action_dim)."""
    there = [shown(picture) or vehicles_at(EGO, (0, 1)) for picture in pictures]  # from anywhere if it is missing
    return np.stack([make_action(way_of(own[0], int(move))) for own, move in zip(there, moves, strict=True)])


def distance(place: Vehicle, others: Sequence[Vehicle]) -> int:
    """Places to the nearest other vehicle, at most FAR."""
    return min([FAR, *(int(np.abs(np.subtract(place.place, other.place)).sum()) for other in others)])


def crashed(before: Frame, action: np.ndarray, after: Frame) -> bool:
    """Whether an action leads into a vehicle, as far as the frame before it shows; or the ego vehicle is missing."""
    there = shown(before.picture)
    if not there:
        return True
    return any(distance(place, there[1:]) < 2 for place in there[0].follow(action))


def reward(before: Frame, action: np.ndarray, after: Frame) -> float:
    """The places of the action, unless it leads into a vehicle."""
    return 0.0 if crashed(before, action, after) else float(len(shown(before.picture)[0].follow(action)))


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
    truth, dream = TrueTown(TownWorld()), EngineDream(VllmTerra(CHECKPOINT, drafts=drafts, enforce_eager=True))
    dreamer, driver = (learnt(*kind, streams, rounds, seed) for kind in (("dream", dream), ("true town", truth)))
    policies: dict[str, Callable[[], Policy]] = {
        "chance": lambda: chance(seed),
        "always one place": lambda: always(1),
        "learnt in the dream": lambda: dreamer,
        "learnt in the true town": lambda: driver,
    }
    report: dict[str, Any] = {"streams": streams, "rounds": rounds, "seed": seed, "judged": judged}
    print(f"{'places, mean ± sd':>30} {'true town':>16} {'dream':>16}")
    for name, policy in policies.items():
        report[name] = {
            kind: returns(world, policy(), judged).tolist() for kind, world in (("true", truth), ("dream", dream))
        }
        figures = (f"{np.mean(values):8.2f} ± {np.std(values):.2f}" for values in report[name].values())
        print(f"{name:>30} " + " ".join(f"{text:>16}" for text in figures))
    out.mkdir(parents=True, exist_ok=True)
    (out / "learn.json").write_text(json.dumps(report) + "\n")


def chance(seed: int) -> Policy:
    """Any move, each as likely as another."""
    rng = np.random.default_rng(seed)
    return lambda pictures: rng.integers(len(MOVES), size=len(pictures))


def always(move: int) -> Policy:
    """One move, whatever is there."""
    return lambda pictures: np.full(len(pictures), move)


def seen(pictures: np.ndarray) -> torch.Tensor:
    """What a policy sees of each move: how far the nearest vehicle is from each place ahead, and the move's places.

    Args:
        pictures: uint8 (drives, height, width, 3).

    Returns:
        float32 (drives, moves, features).
    """
    features = torch.zeros(len(pictures), len(MOVES), AHEAD * (FAR + 1) + len(EGO_SPEEDS))
    for drive, picture in enumerate(pictures):
        there = shown(picture)
        for move, (speed, _) in enumerate(MOVES if there else ()):
            way = way_of(there[0], move, AHEAD)[1:]
            for number, place in enumerate(way):
                features[drive, move, number * (FAR + 1) + distance(place, there[1:])] = 1
            features[drive, move, AHEAD * (FAR + 1) + speed] = 1
    return features


def learnt(name: str, dream: Dream, streams: int, rounds: int, seed: int) -> Policy:
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
    worth(seen(np.zeros((1, FRAME_PIXELS, FRAME_PIXELS, 3), np.uint8)))
    optimiser = torch.optim.Adam(worth.parameters(), lr=0.01)

    def best(pictures: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return worth(seen(pictures)).argmax(dim=-1).numpy()

    envs = environments(dream, streams, LEARNT)
    pictures, _ = envs.reset(seed=seed)
    over = np.zeros(streams, bool)
    chosen, rewards, later, goes_on = [], [], [], []
    bar = tqdm(total=rounds * STEPS, desc=f"learning in the {name}", unit="step")
    for number in range(rounds):
        for _ in range(STEPS):
            before, counted = pictures, ~over  # the move of a drive that begins anew does nothing
            guess = rng.random(streams) < 1 / (number + 1)
            moves = np.where(guess, rng.integers(len(MOVES), size=streams), best(before))
            pictures, gained, terminated, truncated, _ = envs.step(actions_of(before, moves))
            over = terminated | truncated
            chosen.append(seen(before)[np.arange(streams), moves][counted])
            later.append(seen(pictures)[counted])
            rewards.append(torch.from_numpy(gained)[counted])
            goes_on.append(torch.from_numpy(~terminated)[counted])
            bar.update()
        bar.set_postfix({"reward per move": f"{torch.cat(rewards[-STEPS:]).mean():.2f}"})
        fit(worth, optimiser, *(torch.cat(parts).float() for parts in (chosen, rewards, later, goes_on)))
    bar.close()
    return best


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


def environments(dream: Dream, count: int, episodes: range) -> TerraVectorEnv:
    """The task."""
    scenes = Scenes(TownWorld(), episodes)
    return TerraVectorEnv(scenes, dream, count, reward=reward, ended=crashed, max_steps=STEPS)


def returns(dream: Dream, policy: Policy, judged: int) -> np.ndarray:
    """What a policy gets in drives that are the same for every policy and every dream, float (judged,)."""
    envs = environments(dream, judged, JUDGED)
    pictures, _ = envs.reset(seed=0)
    total, going = np.zeros(judged), np.ones(judged, bool)
    while going.any():
        pictures, gained, terminated, truncated, _ = envs.step(actions_of(pictures, policy(pictures)))
        total += gained * going
        going &= ~(terminated | truncated)
    return total


if __name__ == "__main__":
    typer.run(main)

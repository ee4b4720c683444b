"""A policy that learns inside the dream, then drives in the true world: ``python -m examples.terra.learn --help``.

The task: drive onto as many zebra crossings as possible in 10 steps, and never off the roads, which ends the drive.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn
from tqdm import tqdm

from . import CHECKPOINT, register
from .environment import Dream, EngineDream, Frame, TerraVectorEnv, Tiles, TrueTiles
from .rollout import VllmTerra
from .world import (
    CAR_COL,
    CAR_ROW,
    CARS,
    GRID,
    HEADINGS,
    HELD_OUT_EPISODES,
    MAX_SPEED,
    NUM_TILES,
    TILES,
    drive,
    make_action,
)

STEPS = 10
"""Of one drive."""
JUDGED = 200
"""The first so many held-out episodes are for judging, the others of them for learning."""
DISCOUNT = 0.8
"""Of later rewards."""
AHEAD = 4
"""Cells that the policy sees in each direction."""
MOVES = [(heading, speed) for heading in HEADINGS for speed in range(1, MAX_SPEED + 1)] + [("", 0)]
"""What a policy chooses from: a heading and cells, or to wait."""
WAYPOINTS = np.stack(
    [make_action(*(speed * cells for cells in HEADINGS.get(heading, (0, 0)))) for heading, speed in MOVES]
)
"""The actions of MOVES, float32 (moves, num_action_tokens, action_dim)."""

_CAR = CAR_ROW * GRID + CAR_COL
_ON_ZEBRA = [NUM_TILES - len(CARS) + index for index, (road, _) in enumerate(CARS) if road.startswith("zebra")]

Policy = Callable[[np.ndarray], np.ndarray]
"""Chooses indices of MOVES, (drives,), from the tokens of their frames, (drives, num_image_patches)."""


def reward(before: Frame, action: np.ndarray, after: Frame) -> float:
    """1 for driving onto a zebra crossing, as far as the frame after it shows one under the car."""
    arrived = np.any(action[:, :2]) and not off_road(before, action, after)
    return float(arrived and after.tokens[_CAR] in _ON_ZEBRA)


def off_road(before: Frame, action: np.ndarray, after: Frame) -> bool:
    """Whether the car leaves its road, as far as the frame before shows where that is."""
    return bool(before.tokens[_CAR] < NUM_TILES - len(CARS)) or drive(before.tokens, action) is None


def main(
    streams: Annotated[int, typer.Option(min=1, help="Drives at once.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of driving and fitting.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the policy, its moves and its episodes.")] = 0,
    judged: Annotated[int, typer.Option(min=2, max=JUDGED, help="Drives that judge a policy.")] = 30,
    drafts: Annotated[int, typer.Option(min=0, help="Tokens that vLLM drafts per step; see VllmTerra.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for learn.json.")] = Path("out"),
    log_level: Annotated[str, typer.Option(help="vLLM's log level.", envvar="VLLM_LOGGING_LEVEL")] = "ERROR",
) -> None:
    """Learn in the dream and in the true world, and judge both where neither has been, beside chance."""
    os.environ["VLLM_LOGGING_LEVEL"] = log_level
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    register()
    truth, dream = TrueTiles(), EngineDream(VllmTerra(CHECKPOINT, drafts=drafts, enforce_eager=True))
    dreamer, driver = (learnt(*kind, streams, rounds, seed) for kind in (("dream", dream), ("true world", truth)))
    policies: dict[str, Callable[[], Policy]] = {
        "chance": lambda: chance(seed),
        "chance, on the roads": lambda: chance(seed, legal=True),
        "learnt in the dream": lambda: dreamer,
        "learnt in the true world": lambda: driver,
    }
    report: dict[str, Any] = {"streams": streams, "rounds": rounds, "seed": seed, "judged": judged}
    print(f"{'return, mean ± sd':>30} {'true world':>16} {'dream':>16}")
    for name, policy in policies.items():
        report[name] = {
            kind: returns(world, policy(), judged).tolist() for kind, world in (("true", truth), ("dream", dream))
        }
        shown = (f"{np.mean(values):8.2f} ± {np.std(values):.2f}" for values in report[name].values())
        print(f"{name:>30} " + " ".join(f"{text:>16}" for text in shown))
    report["off the roads"] = beyond(dream, judged)
    print(
        "told to leave its road: " + ", ".join(f"{what} {share:.1%}" for what, share in report["off the roads"].items())
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "learn.json").write_text(json.dumps(report) + "\n")


def chance(seed: int, legal: bool = False) -> Policy:
    """Any move, or any that keeps to the roads, each as likely as another."""
    rng = np.random.default_rng(seed)

    def choose(tokens: np.ndarray) -> np.ndarray:
        allowed = [
            [move for move, action in enumerate(WAYPOINTS) if not legal or drive(frame, action) is not None]
            for frame in tokens
        ]
        return np.array([rng.choice(moves) for moves in allowed])

    return choose


def seen(tokens: np.ndarray) -> torch.Tensor:
    """What a policy sees of each move: the tiles ahead, under the car first.

    Args:
        tokens: integers (drives, num_image_patches).

    Returns:
        float32 (drives, moves, features); the last features say which speed it is.
    """
    view = torch.from_numpy(tokens).reshape(-1, GRID, GRID)
    features = torch.zeros(len(view), len(MOVES), (AHEAD + 1) * len(TILES) + MAX_SPEED + 1)
    for move, (heading, speed) in enumerate(MOVES):
        rows, cols = HEADINGS.get(heading, (0, 0))
        ahead = [view[:, (CAR_ROW + i * rows) % GRID, (CAR_COL + i * cols) % GRID] for i in range(AHEAD + 1)]
        tiles = nn.functional.one_hot(torch.stack(ahead, dim=1), len(TILES)).flatten(1)
        features[:, move, : tiles.shape[1]] = tiles
        features[:, move, tiles.shape[1] + speed] = 1
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
    worth(seen(np.zeros((1, GRID * GRID), np.int64)))
    optimiser = torch.optim.Adam(worth.parameters(), lr=0.01)

    def best(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return worth(seen(tokens)).argmax(dim=-1).numpy()

    envs = environments(dream, streams, range(JUDGED, HELD_OUT_EPISODES))
    _, info = envs.reset(seed=seed)
    over = np.zeros(streams, bool)
    chosen, rewards, later, goes_on = [], [], [], []
    bar = tqdm(total=rounds * STEPS, desc=f"learning in the {name}", unit="step")
    for number in range(rounds):
        for _ in range(STEPS):
            before, counted = info["tokens"], ~over  # the move of a drive that begins anew does nothing
            guess = rng.random(streams) < 1 / (number + 1)
            moves = np.where(guess, rng.integers(len(MOVES), size=streams), best(before))
            _, gained, terminated, truncated, info = envs.step(WAYPOINTS[moves])
            over = terminated | truncated
            chosen.append(seen(before)[np.arange(streams), moves][counted])
            later.append(seen(info["tokens"])[counted])
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


def beyond(dream: Dream, count: int) -> dict[str, float]:
    """What is dreamt when a car is told to leave its road, which no episode shows.

    Returns:
        Shares: of frames with a car in the cell where it always is; of the other tokens, those that are the map moved
        as told, and those that are the map where it was.
    """
    envs = environments(dream, count, range(JUDGED))
    _, info = envs.reset(seed=0)
    before, rng = info["tokens"], np.random.default_rng(0)
    leaving = [[move for move, action in enumerate(WAYPOINTS) if drive(frame, action) is None] for frame in before]
    told = np.array([bool(moves) for moves in leaving])  # from a crossing no move leads off the roads
    moves = [rng.choice(moves) if moves else len(MOVES) - 1 for moves in leaving]
    after = envs.step(WAYPOINTS[moves])[4]["tokens"]
    moved = []
    for frame, move in zip(before, moves, strict=True):
        heading, speed = MOVES[move]
        rows, cols = HEADINGS.get(heading, (0, 0))
        moved.append(np.roll(frame.reshape(GRID, GRID), (-speed * rows, -speed * cols), (0, 1)).ravel())
    before, after, there = before[told], after[told], np.stack(moved)[told]
    # the cells where the car is drawn, or was, show nothing of the map
    known = (before < NUM_TILES - len(CARS)) & (there < NUM_TILES - len(CARS))
    return {
        "a car in its cell": float((after[:, _CAR] >= NUM_TILES - len(CARS)).mean()),
        "map moved": float((after == there)[known].mean()),
        "map where it was": float((after == before)[known].mean()),
    }


def environments(dream: Dream, count: int, episodes: range) -> TerraVectorEnv:
    """The task."""
    return TerraVectorEnv(Tiles(episodes), dream, count, reward=reward, ended=off_road, max_steps=STEPS)


def returns(dream: Dream, policy: Policy, judged: int) -> np.ndarray:
    """What a policy gets in drives that are the same for every policy and every dream, float (judged,)."""
    envs = environments(dream, judged, range(JUDGED))
    _, info = envs.reset(seed=0)
    total, going = np.zeros(judged), np.ones(judged, bool)
    while going.any():
        _, gained, terminated, truncated, info = envs.step(WAYPOINTS[policy(info["tokens"])])
        total += gained * going
        going &= ~(terminated | truncated)
    return total


if __name__ == "__main__":
    typer.run(main)

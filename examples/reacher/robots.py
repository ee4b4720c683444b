"""Robots that ask a server what to do, by openpi's client: ``python -m examples.reacher.robots --help``.

It runs in the environment of that client, whose numpy is older than vLLM's; so it needs the standard library and numpy
beside the client.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from .world import Planner, Scenes, draw_scenes, run_episodes, write_messages

ROBOTS = 16
"""How many are connected at once."""


def main() -> None:
    """Let robots work in scenes, and write what became of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("address", help="of the server, as ws://127.0.0.1:8000")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1001], help="of the scenes")
    parser.add_argument("--count", type=int, default=300, help="scenes of each seed")
    parser.add_argument("--out", type=Path, help="folder for a file of each seed")
    arguments = parser.parse_args()
    plan = connect(arguments.address)
    for seed in arguments.seeds:
        scenes = draw_scenes(np.random.default_rng(seed), arguments.count)
        episodes = run_episodes(scenes, plan)
        print(f"scenes of seed {seed}: {episodes.touched.sum()} of {arguments.count} robots touched their disc")
        if arguments.out is not None:
            np.savez(arguments.out / f"{seed}.npz", **episodes._asdict())


def connect(address: str) -> Planner:
    """Return what asks a server for the next chunks of scenes, each robot over a connection of its own."""
    clients = [WebsocketClientPolicy(address, None) for _ in range(ROBOTS)]

    def ask_for(client: WebsocketClientPolicy, messages: Sequence[dict[str, Any]]) -> list[Any]:
        return [client.infer(message)["actions"] for message in messages]

    def plan(scenes: Scenes) -> Any:
        messages = write_messages(scenes)
        shares = [messages[robot::ROBOTS] for robot in range(ROBOTS)]
        with ThreadPoolExecutor(ROBOTS) as pool:
            answers = list(pool.map(ask_for, clients, shares))
        # scene number i is the share's number i // ROBOTS
        return np.stack([answers[number % ROBOTS][number // ROBOTS] for number in range(len(messages))])

    return plan


if __name__ == "__main__":
    main()

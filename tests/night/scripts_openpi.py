"""Runs openpi's client, which needs an older numpy than vLLM, in an environment of its own.

It reads the observations of a folder, and writes there what the client returned, and the errors that it raised.
"""

import argparse
import json
import pickle
import threading
import time
from pathlib import Path

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

CLIENTS = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--key", required=True)
    parser.add_argument("--path", required=True, help="of the route, for the client that is given an address")
    parser.add_argument("--first", action="store_true", help="print the actions for one observation, at both addresses")
    parser.add_argument("--for-ever", action="store_true", help="send observations until somebody ends this")
    arguments = parser.parse_args()
    observations = load(arguments.folder / "observations.pickle")

    def connect(path: str = "") -> WebsocketClientPolicy:
        if path:
            return WebsocketClientPolicy(f"ws://127.0.0.1:{arguments.port}{path}", None, arguments.key)
        return WebsocketClientPolicy("127.0.0.1", arguments.port, arguments.key)

    policy = connect()
    if arguments.for_ever:
        print("ready", flush=True)
        while True:
            policy.infer(observations[0])

    if arguments.first:
        policies = (policy, connect(arguments.path))
        print(json.dumps([policy.infer(observations[0])["actions"].tolist() for policy in policies]))
        return

    results = {"metadata": policy.get_server_metadata()}
    answers = [policy.infer(observation) for observation in observations]
    results["timings"] = [answer["server_timing"] for answer in answers]
    results["engine"] = [answer["policy_timing"]["infer_ms"] for answer in answers]
    results["by_address"] = connect(arguments.path).infer(observations[0])["actions"].tolist()
    results["broker"] = drive(policy, observations[0], len(answers[0]["actions"]))
    results["refusals"] = collect_refusals(policy, observations[0], load(arguments.folder / "malformed.pickle"))
    results["together"] = count_equal_answers(connect, observations, answers)
    np.save(arguments.folder / "actions.npy", np.stack([answer["actions"] for answer in answers]))
    (arguments.folder / "results.json").write_text(json.dumps(results))


def load(path: Path) -> list:
    """Return what the test wrote, in the form of a pickle of lists and numpy's own bytes."""
    return pickle.loads(path.read_bytes())


def drive(policy: WebsocketClientPolicy, observation: dict, steps: int) -> list:
    """Return the actions that openpi's broker takes of one chunk, step by step."""
    broker = ActionChunkBroker(policy, steps)
    broker.reset()
    return [broker.infer(observation)["actions"].tolist() for _ in range(steps)]


def collect_refusals(policy: WebsocketClientPolicy, good: dict, malformed: list) -> list:
    """Return the sentence that each malformed observation raises, and whether the same connection still answers."""
    expected = policy.infer(good)["actions"]
    refusals = []
    for observation in malformed:
        sentence = "none"
        try:
            policy.infer(observation)
        except RuntimeError as error:
            sentence = str(error)
        is_alive = bool((policy.infer(good)["actions"] == expected).all())
        refusals.append([sentence, is_alive])
    return refusals


def count_equal_answers(connect, observations: list, answers: list) -> list:
    """Return how many answers of clients at once are those of one client, and of how many."""
    policies = [connect() for _ in range(CLIENTS)]
    counts = [0] * CLIENTS
    each = min(40, len(observations))

    def run(client: int) -> None:
        for number in range(each):
            index = (client * each + number) % len(observations)
            actions = policies[client].infer(observations[index])["actions"]
            counts[client] += bool((actions == answers[index]["actions"]).all())

    started = time.perf_counter()
    threads = [threading.Thread(target=run, args=(client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{CLIENTS * each / (time.perf_counter() - started):.1f} observations/s of {CLIENTS} clients")
    return [sum(counts), CLIENTS * each]


if __name__ == "__main__":
    main()

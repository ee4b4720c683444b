"""openpi's client, unchanged, in an environment of its own, drives a model of mmkit."""

import json
import os
import pickle
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from examples.llava_like.offline import engine
from examples.server import Server
from mmkit.model.sampling import sampling_params
from mmkit.serve.openpi import OPENPI_ROUTE
from tests.profiles import scaled

from . import robot
from .proxy import NGINX, make_deployed_proxy

pytestmark = pytest.mark.timeout(1200)

OBSERVATIONS = robot.make_observations(scaled(100))
GOOD = OBSERVATIONS[0]
KEY = "secret"

PYTHON = Path(os.environ.get("MMKIT_OPENPI") or Path(sys.prefix, "openpi"), "bin", "python")
"""That of the environment with openpi's client."""

SCRIPT = Path(__file__).with_name("scripts_openpi.py")


def change(**changes: Any) -> dict[str, Any]:
    """Return the good observation with other values; without those that are None."""
    observation = dict(GOOD)
    for name, value in changes.items():
        key = name if name == "prompt" else f"observation/{name}"
        observation.pop(key, None)
        if value is not None:
            observation[key] = value
    return observation


def make_state(value: float) -> np.ndarray[Any, Any]:
    return np.full(robot.STATE_SIZE - 1, value)


JOINTS = "observation/joint_position"
STATE = f"{JOINTS} + observation/gripper_position"
PIXELS = "observation/image: expected 8-bit RGB pixels (height, width, 3), got"
DTYPE = f"{JOINTS}: expected a dtype among "
MALFORMED = [
    (change(joint_position=np.zeros(8)), f"{STATE}: expected a (8,) float32 tensor, got shape (9,)."),
    (change(joint_position=np.zeros((7, 1))), f"{JOINTS}: expected a number, or an array of one dimension, got "),
    (change(joint_position=make_state(np.nan)), f"{STATE}: expected finite values "),
    (change(joint_position=make_state(1e30)), f"{STATE}: expected finite values "),
    (change(joint_position=make_state(1).astype(bool)), f"{JOINTS}: expected a number, or an array of one "),
    (change(joint_position=np.array(["abc"] * 7)), DTYPE),
    (change(joint_position="hello"), f"{JOINTS}: expected a number, or an array of one dimension, got str 'hello'."),
    (change(joint_position=None), f"{JOINTS}: expected a part of a (8,) float32 tensor, got none."),
    (change(image=np.zeros((224, 224), np.uint8)), f"{PIXELS} shape (224, 224) of uint8."),
    (change(image=np.zeros((224, 224, 4), np.uint8)), f"{PIXELS} shape (224, 224, 4) of uint8."),
    (change(image=np.zeros((224, 224, 3), np.float32)), f"{PIXELS} shape (224, 224, 3) of float32. openpi_client."),
    (change(image=np.zeros((0, 224, 3), np.uint8)), "observation/image: expected an array of shape (height, width, 3)"),
    (change(image=np.zeros((4000, 4000, 3), np.uint8)), "observation/image: expected at most 16777216 numbers in one "),
    (GOOD | {"observation/image": None}, "observation/image: expected "),
    (change(wrist_image=None), "observation/wrist_image: expected 8-bit RGB pixels (height, width, 3), got none."),
    (change(imag=GOOD["observation/image"]), "observation/imag: expected keys among ['observation/image', "),
    (change(prompt=None), "prompt: expected a text, got none."),
    (change(prompt=5), "prompt: expected a text, got int 5."),
    (change(prompt="see <image>"), "prompt: expected a text without '<image>', which stands for an item"),
    (change(prompt="a" * 3000), "prompt: This model's maximum context length is 2048 tokens."),
    (change(prompt="a" * 20_000), "prompt: expected a text of at most 16384 bytes, got more."),
    ({}, "prompt: expected a text, got none."),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return robot.make_checkpoint(tmp_path_factory.mktemp("robot"))


@pytest.fixture(scope="module")
def actions(checkpoint: Path, engines: ExitStack) -> np.ndarray[Any, Any]:
    """The actions for the observations, by `LLM.generate` and the policy of the plan: (observations, steps, 7)."""
    from transformers import AutoProcessor

    llm = engines.enter_context(engine(checkpoint, seed=0, hf_overrides=None, enforce_eager=True))
    processor = AutoProcessor.from_pretrained(checkpoint)
    plan = robot.ROBOT.bind(llm.model_config.hf_config, processor.tokenizer, processor=processor)
    policy = plan.policy
    assert policy is not None
    params = sampling_params(policy.output, llm, temperature=0.0)
    requests = [policy.make_request(observation) for observation in OBSERVATIONS]
    results = llm.generate(requests, params, use_tqdm=False)
    return np.stack([policy.decode(result.outputs[0].token_ids) for result in results])


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = ("--dtype", "float32", "--block-size", "32", "--enforce-eager", "--api-key", KEY)
    environment = {"MMKIT_MODULES": robot.__name__}
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(checkpoint, *options, environment=environment, log=log) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder by which this process and the client exchange arrays."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing, of the environment with openpi's client. Run: make openpi")
    folder = tmp_path_factory.mktemp("client")
    (folder / "observations.pickle").write_bytes(pickle.dumps(OBSERVATIONS))
    (folder / "malformed.pickle").write_bytes(pickle.dumps([observation for observation, _ in MALFORMED]))
    return folder


def make_command(port: int, folder: Path, *options: str) -> list[str]:
    command = [str(PYTHON), str(SCRIPT), str(folder), str(port), "--key", KEY, "--path", OPENPI_ROUTE]
    return [*command, *options]


def make_environment() -> dict[str, str]:
    """Return this process's variables, by which the client finds only its own packages."""
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    return environment


@pytest.fixture(scope="module")
def results(actions: Any, server: Server, folder: Path) -> Any:
    """What the client saw."""
    command = make_command(server.port, folder)
    done = subprocess.run(command, env=make_environment(), capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return json.loads((folder / "results.json").read_text())


def test_every_chunk_is_that_of_the_offline_engine(results: Any, actions: np.ndarray[Any, Any], folder: Path) -> None:
    over_the_wire = np.load(folder / "actions.npy")
    assert over_the_wire.shape == (len(OBSERVATIONS), robot.STEPS, robot.DIMENSIONS)
    assert over_the_wire.dtype == actions.dtype
    assert (over_the_wire == actions).all()
    num_different = len(np.unique(actions.reshape(len(actions), -1), axis=0))
    assert num_different > 0.9 * len(OBSERVATIONS)
    assert results["by_address"] == actions[0].tolist()
    assert results["broker"] == actions[0].tolist(), "step by step"


def test_the_client_hears_what_it_talks_to_and_what_took_how_long(results: Any) -> None:
    assert results["metadata"]["action_horizon"] == robot.STEPS
    assert results["metadata"]["action_dim"] == robot.DIMENSIONS
    assert results["metadata"]["reset_pose"] == [0.0] * robot.DIMENSIONS
    last = results["timings"][-1]
    assert set(last) == {"infer_ms", "prev_total_ms", "unpack_ms", "process_ms", "decode_ms"}


def test_a_malformed_observation_is_an_error_and_the_connection_lives(results: Any) -> None:
    assert len(MALFORMED) > 20
    for (_, expected), (sentence, is_alive) in zip(MALFORMED, results["refusals"], strict=True):
        assert sentence.startswith(f"Error in inference server:\n{expected}")
        assert is_alive


def test_clients_at_once_get_their_own_answers(results: Any) -> None:
    num_equal, num_answers = results["together"]
    assert num_equal == num_answers == 640


@pytest.mark.skipif(NGINX is None, reason="needs nginx: apt-get install nginx-light")
def test_the_proxy_of_deploy_passes_robots_with_a_key_on(
    server: Server, folder: Path, actions: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    with make_deployed_proxy(server, tmp_path, KEY) as proxy:
        command = make_command(proxy.port, folder, "--first")
        done = subprocess.run(command, env=make_environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout) == [actions[0].tolist()] * 2
        for path in ("/", OPENPI_ROUTE):
            headers = {"Authorization": f"Api-Key {KEY}s"}
            with pytest.raises(InvalidStatus, match="401"):
                connect(f"ws://127.0.0.1:{proxy.port}{path}", additional_headers=headers, proxy=None)
        assert httpx.get(proxy.url, headers={"Authorization": f"Api-Key {KEY}"}).status_code == 404


def read_metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    values = re.findall(rf"(?m)^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text)
    return sum(map(float, values))


def wait_until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_client_that_is_killed_frees_its_place(results: Any, server: Server, folder: Path) -> None:
    wait_until(lambda: read_metric(server, "mmkit:sessions_open") == 0)
    clients = []
    for _ in range(2):
        command = make_command(server.port, folder, "--for-ever")
        clients.append(subprocess.Popen(command, env=make_environment(), stdout=subprocess.PIPE))
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
    wait_until(lambda: read_metric(server, "vllm:num_requests_running") > 0)
    assert read_metric(server, "mmkit:sessions_open") == 2
    for client in clients:
        client.kill()
        client.wait()
    wait_until(lambda: read_metric(server, "mmkit:sessions_open") == 0)
    wait_until(lambda: read_metric(server, "vllm:num_requests_running") == 0)

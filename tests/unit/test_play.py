"""The game examples/terra/play.py against a small server, by keys of the command line; at night in a terminal."""

from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from examples.terra import play
from examples.terra.world import HEADINGS, make_action, make_episode
from mmkit.serve.client import Client
from mmkit.serve.process import free_port
from tests.unit.fake_server import Fake, car_of, until

APP = typer.Typer()
APP.command()(play.main)


def played(url: str, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(APP, ["--url", url, *options], catch_exceptions=False)
    return done.exit_code, done.output


def driven(seed: int, count: int) -> tuple[str, list[Any]]:
    """Keys of an episode after its context, and its frames."""
    episode = make_episode(seed)
    steps = {key: (HEADINGS.get(heading, (0, 0)), speed) for key, (heading, speed) in play.MOVES.items()}
    keys = {make_action(speed * rows, speed * cols).tobytes(): key for key, ((rows, cols), speed) in steps.items()}
    pressed = "".join(keys[action.tobytes()] for action in episode.actions[2 : 2 + count])
    return pressed, list(episode.frames[2 : 3 + count])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_keys_drive_the_world(fake: Fake, seed: int) -> None:
    keys, frames = driven(seed, 22)
    code, output = played(fake.url, "--keys", keys, "--seed", str(seed))
    assert code == 0, output
    assert all(play.letters(np.asarray(frame)).plain in output for frame in frames)
    assert "frame 0, 22 left" in output
    assert "frame 22, 0 left" in output
    assert output.rstrip().endswith(play.USED_UP)
    assert sum(message["type"] == "start" for message in fake.seen) == 1
    until(lambda: not fake.sessions)


def test_moves_that_the_world_lacks(fake: Fake) -> None:
    road, heading = car_of(make_episode(0).frames[2])
    wrong = {"_h": "U", "_v": "R", "ng": {"north": "D", "south": "U", "east": "L", "west": "R"}[heading]}[road[-2:]]
    code, output = played(fake.url, "--keys", f"{wrong}.")
    assert code == 0
    assert "There is no road to the" in output or "Cars do not turn back" in output
    assert "frame 1, 21 left" in output
    assert {message["type"] for message in fake.seen} == {"start", "close"}


def test_idle_session_is_opened_again(fake: Fake) -> None:
    keys, frames = driven(3, 4)
    with Client(fake.url) as client:
        game = play.Game(client, play.World.of(client, fake.url), 3, False)
        for index, key in enumerate(play.parse_keys(keys)):
            fake.idle = index == 2
            assert game.press(key) == ""
        game.close()
    assert np.array_equal(game.frames[2:], frames)
    assert [message["type"] for message in fake.seen] == ["start", "next", "next", "start", "next", "close"]


def test_errors_of_the_game(fake: Fake) -> None:
    code, output = played(f"http://127.0.0.1:{free_port()}", "--keys", "U")
    assert (code, len(output.strip().splitlines())) == (1, 1)
    assert "expected a server, got no connection" in output
    fake.spec = "other"
    assert "expected a server of Terra's road world, got one of other" in played(fake.url, "--keys", "U")[1]
    assert "got 'X'" in played(fake.url, "--keys", "X")[1]
    assert "expected a terminal" in played(fake.url)[1]

"""The game examples/terra/play.py against a small server, by keys of the command line and in a terminal of its own."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from examples.terra import play
from examples.terra.world import HEADINGS, make_action, make_episode
from mmkit.serve.client import Client
from mmkit.serve.process import free_port
from tests import ROOT
from tests.unit.fake_server import STEP, Fake, car_of, until

WAIT = 120
"""Seconds after which the game does not do it any more."""


APP = typer.Typer()
APP.command()(play.main)


def played(fake: Fake, keys: str, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(APP, ["--url", fake.url, "--keys", keys, *options], catch_exceptions=False)
    return done.exit_code, done.output


def pictured(frame: Any) -> str:
    return play.letters(np.asarray(frame)).plain


def driven(seed: int, count: int) -> tuple[str, list[Any]]:
    """Keys of an episode after its context, and its frames."""
    episode = make_episode(seed)
    keys = {}
    for key, (heading, speed) in play.MOVES.items():
        rows, cols = HEADINGS.get(heading, (0, 0))
        keys[make_action(speed * rows, speed * cols).tobytes()] = key
    pressed = "".join(keys[action.tobytes()] for action in episode.actions[2 : 2 + count])
    return pressed, list(episode.frames[2 : 3 + count])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_keys_drive_the_world(fake: Fake, seed: int) -> None:
    keys, frames = driven(seed, 22)
    code, output = played(fake, keys, "--seed", str(seed))
    assert code == 0, output
    places = [output.find(pictured(frame)) for frame in frames]
    assert -1 not in places
    assert "frame 0, 22 left" in output
    assert "frame 22, 0 left" in output
    assert output.rstrip().endswith(play.USED_UP)
    assert sum(message["type"] == "start" for message in fake.seen) == 1
    until(lambda: not fake.sessions)


def test_moves_that_the_world_lacks(fake: Fake) -> None:
    episode = make_episode(0)
    road, heading = car_of(episode.frames[2])
    wrong = {"_h": "U", "_v": "R", "ng": {"north": "D", "south": "U", "east": "L", "west": "R"}[heading]}[road[-2:]]
    code, output = played(fake, f"{wrong}.")
    assert code == 0
    assert "There is no road to the" in output or "Cars do not turn back" in output
    assert "frame 1, 21 left" in output
    assert all(message["type"] == "start" or message["type"] == "close" for message in fake.seen)


def test_new_world_and_the_end(fake: Fake) -> None:
    fake.room = 5 * STEP
    code, output = played(fake, ".... n.q.")
    assert code == 0
    assert output.count(play.USED_UP) == 2
    assert "world 0, frame 2, 0 left" in output
    assert "world 1, frame 1, 1 left" in output
    assert "frame 2, 0 left" not in output.partition("world 1")[2]


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
    done = CliRunner().invoke(APP, ["--url", f"http://127.0.0.1:{free_port()}", "--keys", "U"])
    assert done.exit_code == 1
    assert "expected a server, got no connection" in done.output
    assert len(done.output.strip().splitlines()) == 1
    fake.spec = "other"
    assert "expected a server of Terra's road world, got one of other" in played(fake, "U")[1]
    assert "got 'X'" in played(fake, "X")[1]
    done = CliRunner().invoke(APP, ["--url", fake.url])
    assert done.exit_code == 2
    assert "expected a terminal" in done.output


class Terminal:
    """The game in a terminal of its own."""

    def __init__(self, url: str) -> None:
        self.keyboard, self._theirs = pty.openpty()
        self._before = termios.tcgetattr(self._theirs)
        self._screen = b""
        variables = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LINES": "40", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.terra.play", "--url", url],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            cwd=ROOT,
            env=os.environ | variables,
            # jobs in the background of a shell ignore ctrl-C, and so would their children
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait(self, words: str) -> None:
        """Until the screen shows them, after what was waited for before."""
        deadline = time.monotonic() + WAIT
        while words.encode() not in self._screen:
            assert time.monotonic() < deadline, self._screen[-2000:]
            if select.select([self.keyboard], [], [], 0.1)[0]:
                self._screen += os.read(self.keyboard, 65536)
        self._screen = self._screen.partition(words.encode())[2]

    def press(self, keys: bytes, words: str) -> None:
        os.write(self.keyboard, keys)
        self.wait(words)

    def left(self, *words: str) -> int:
        """The status of the game, which leaves the terminal as it was."""
        for word in ("\x1b[?1049l", *words):
            self.wait(word)
        status = self.process.wait(WAIT)
        assert termios.tcgetattr(self._theirs) == self._before
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.keyboard)
        os.close(self._theirs)


@contextlib.contextmanager
def terminal(fake: Fake) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(fake.url)) as terminal:
        terminal.wait("frame 0")
        yield terminal


def test_keyboard(fake: Fake) -> None:
    with terminal(fake) as game:
        game.wait("▀")
        game.press(b" ", "frame 1, 21 left")
        game.press(b"\x1b[C", "frame 2, 20 left")
        game.press(b"\x1b[1;2D", "frame 3, 19 left")
        game.press(b"x\x1b[A", "There is no road to the north.")
        game.press(b"n", "world 1, frame 0")
        os.write(game.keyboard, b"q")
        assert game.left() == 0
    until(lambda: not fake.sessions)


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_terminal_is_restored(fake: Fake, sent: int, status: int) -> None:
    with terminal(fake) as game:
        game.process.send_signal(sent)
        assert game.left() == status


def test_server_that_goes_away_while_playing() -> None:
    with contextlib.closing(Fake()) as fake, terminal(fake) as game:
        game.press(b" ", "frame 1")
        fake.close()
        os.write(game.keyboard, b" ")
        assert game.left("expected a server, got no connection") == 1

"""The game examples/terra/play.py in a terminal of its own, against a small server."""

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

import pytest

from tests import ROOT
from tests.unit.fake_server import Fake

WAIT = 120
"""Seconds after which the game does not do it any more."""


class Terminal:
    """The game in a terminal of its own."""

    def __init__(self, url: str) -> None:
        self.keyboard, self._theirs = pty.openpty()
        self._before = termios.tcgetattr(self._theirs)
        self._screen = b""
        variables = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LINES": "40", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.terra.play", "--url", url],
            **dict.fromkeys(("stdin", "stdout", "stderr"), self._theirs),
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

    def left(self, *words: str) -> int:
        """The status of the game, which leaves the terminal as it was."""
        for word in ("\x1b[?1049l", *words):
            self.wait(word)
        status = self.process.wait(WAIT)
        assert termios.tcgetattr(self._theirs) == self._before
        return status


@pytest.fixture
def fake() -> Iterator[Fake]:
    with contextlib.closing(Fake()) as fake:
        yield fake


@pytest.fixture
def game(fake: Fake) -> Iterator[Terminal]:
    terminal = Terminal(fake.url)
    try:
        terminal.wait("frame 0")
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()


def test_keyboard(game: Terminal) -> None:
    game.wait("▀")
    pressed = {
        b" ": "frame 1, 21 left",
        b"\x1b[C": "frame 2, 20 left",
        b"\x1b[1;2D": "frame 3, 19 left",
        b"x\x1b[A": "There is no road to the north.",
        b"n": "world 1, frame 0",
    }
    for keys, words in pressed.items():
        os.write(game.keyboard, keys)
        game.wait(words)
    os.write(game.keyboard, b"q")
    assert game.left() == 0


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_terminal_is_restored(game: Terminal, sent: int, status: int) -> None:
    game.process.send_signal(sent)
    assert game.left() == status


def test_server_that_goes_away_while_playing(fake: Fake, game: Terminal) -> None:
    os.write(game.keyboard, b" ")
    game.wait("frame 1")
    fake.close()
    os.write(game.keyboard, b" ")
    assert game.left("expected a server, got no connection") == 1

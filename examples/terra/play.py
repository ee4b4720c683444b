"""Drive through Terra's world with the arrow keys, a frame per key: ``python -m examples.terra.play --help``."""

import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer
from PIL import Image
from rich.color import Color
from rich.console import Console, Group
from rich.live import Live
from rich.style import Style
from rich.text import Text

from mmkit import MmkitError
from mmkit.serve.client import Client, RequestError, ServerGone, Session

from .world import (
    CAR_COL,
    CAR_ROW,
    CARS,
    CONTEXT_FRAMES,
    GRID,
    HEADINGS,
    HELD_OUT_EPISODES,
    NUM_TILES,
    NUM_WAYPOINTS,
    TILES,
    TOKENS_PER_FRAME,
    make_action,
    make_episode,
    render,
)

MOVES = {
    f"{far}{key}": (heading, speed)
    for far, speed in (("", 1), ("2", 2))
    for key, heading in {"U": "north", "R": "east", "D": "south", "L": "west"}.items()
} | {".": ("", 0)}
"""Heading and cells of a key, as --keys has them."""
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
HELP = "arrows or wasd: one cell, with shift: two   space: wait   n: new world   q: quit"
USED_UP = "These were all the frames that the model holds. n: new world, q: quit."

GLYPHS = dict(zip(TILES, "-|+=H.,*TAoRBY~&x#P", strict=False)) | {
    f"car_{heading}_on_{road}": {"north": "^", "east": ">", "south": "v", "west": "<"}[heading]
    for road, heading in CARS
}
"""A letter per tile, where there are no colours."""


def main(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    seed: Annotated[int, typer.Option(min=0, max=HELD_OUT_EPISODES - 1, help="First world.")] = 0,
    keys: Annotated[
        str | None,
        typer.Option(help="Play these keys and print the frames: U R D L, 2U two cells, . waits, n new world."),
    ] = None,
    off_road: Annotated[bool, typer.Option(help="Let the car leave the roads, which the model never saw.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="The server's API key.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for a frame.")] = 60.0,
) -> None:
    """Drive through a world that the model imagines: each key is an action, each action a frame.

    The server is `python -m mmkit.serve examples/terra/checkpoint`.
    """
    presses = parse_keys(keys) if keys is not None else []
    if keys is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise typer.BadParameter("Arrow keys: expected a terminal, got none. Give the keys as --keys.")
    console = Console(highlight=False)
    try:
        with Client(url, api_key=api_key, timeout=timeout) as client:
            game = Game(client, World.of(client, url), seed, off_road)
            try:
                if keys is None:
                    play(game, console)
                else:
                    replay(game, console, presses)
            finally:
                game.close()
    except MmkitError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def parse_keys(keys: str) -> list[str]:
    """``"u2R.n"`` to ``["U", "2R", ".", "n"]``."""
    presses = re.findall(r"2?[urdlURDL]|[.nq]|\S", keys)
    presses = [press.upper() if press[-1].lower() in "urdl" else press for press in presses]
    for press in presses:
        if press not in MOVES and press not in ("n", "q"):
            raise typer.BadParameter(f"--keys: expected U, R, D, L, 2U, ., n or q, got {press!r}.")
    return presses


@dataclass(frozen=True)
class World:
    """What a server says about its Terra.

    Attributes:
        placeholder: ids of one action in the prompt.
        frames: the most frames of one world, the context's among them.
    """

    placeholder: list[int]
    frames: int

    @classmethod
    def of(cls, client: Client, url: str) -> "World":
        """Ask a server.

        Raises:
            MmkitError: it is not there, or serves another model.
        """
        accepted = client.modalities()
        actions = next((modality for modality in accepted.modalities if modality.name == "actions"), None)
        if not (actions and actions.shape == [NUM_WAYPOINTS, 3] and accepted.vocab_size == NUM_TILES + 1):
            remedy = "Start one with `python -m mmkit.serve examples/terra/checkpoint`."
            raise MmkitError(
                url, "a server of Terra's road world", f"one of {accepted.spec} ({accepted.model})", remedy
            )
        placeholder = actions.placeholder or [NUM_TILES] * NUM_WAYPOINTS
        step = TOKENS_PER_FRAME + len(placeholder)
        fitting = (accepted.max_model_len - TOKENS_PER_FRAME) // step + 1  # the last frame has no action
        return cls(placeholder, min(fitting, actions.limit + 1) if actions.limit is not None else fitting)


class Game:
    """A drive through one world after the other.

    Attributes:
        frames: int64 (TOKENS_PER_FRAME,) each, from the context on.
        actions: float32 (NUM_WAYPOINTS, 3) each; action i leads from frame i to frame i + 1.
    """

    frames: list[np.ndarray]
    actions: list[np.ndarray]

    def __init__(self, client: Client, world: World, seed: int, off_road: bool) -> None:
        self.seed = seed
        self._client, self._world, self._off_road = client, world, off_road
        self._session: Session | None = None
        self._enter()

    def _enter(self) -> None:
        episode = make_episode(self.seed)
        self.frames = list(episode.frames[:CONTEXT_FRAMES])
        self.actions = list(episode.actions[: CONTEXT_FRAMES - 1])

    @property
    def left(self) -> int:
        """Frames that the model can still make of this world."""
        left = self._world.frames - len(self.frames)
        if self._session:
            left = min(left, self._session.remaining // (TOKENS_PER_FRAME + len(self._world.placeholder)))
        return left

    def new_world(self) -> None:
        """Leave this world for the next."""
        self.close()
        self.seed = (self.seed + 1) % HELD_OUT_EPISODES
        self._enter()

    def close(self) -> None:
        """End the session, if there is one."""
        session, self._session = self._session, None
        if session:
            session.close()

    def press(self, key: str) -> str:
        """Make the move of a key.

        Returns:
            Why nothing moved; empty if there is a new frame.

        Raises:
            ServerGone: the server is not there any more.
        """
        heading, speed = MOVES[key]
        if self.left <= 0:
            return USED_UP
        if refusal := self._refusal(heading):
            return refusal
        rows, cols = (speed * step for step in HEADINGS.get(heading, (0, 0)))
        try:
            action = make_action(rows, cols)
            tokens = self._generate(action)
        except RequestError as error:
            return str(error)
        if len(tokens) != TOKENS_PER_FRAME or not all(0 <= token < NUM_TILES for token in tokens):
            self.close()  # its history is not that of the frames any more
            return f"The model made no frame of {TOKENS_PER_FRAME} tiles. Another key tries again, n is a new world."
        self.frames.append(np.array(tokens))
        self.actions.append(action)
        return ""

    def _refusal(self, heading: str) -> str:
        """Why the world has no such move: cars keep to the roads, and do not turn back on a crossing."""
        last = TILES[self.frames[-1][CAR_ROW * GRID + CAR_COL]]
        if self._off_road or not heading or not last.startswith("car_"):
            return ""
        was, road = last.removeprefix("car_").split("_on_")
        if (road, heading) not in CARS:
            return f"There is no road to the {heading}."
        if road == "crossing" and heading == OPPOSITE[was]:
            return "Cars do not turn back on a crossing."
        return ""

    def _generate(self, action: np.ndarray) -> list[int]:
        """Ids of the next frame."""
        if self._session:
            try:
                return self._session.next({"actions": [action]}).token_ids
            except ServerGone:  # perhaps it only closed an idle session: the frames are here
                self.close()
        prompt = [token for frame in self.frames for token in [*frame.tolist(), *self._world.placeholder]]
        items = {"actions": [*self.actions, action]}
        session = self._client.session(prompt, items, max_tokens=TOKENS_PER_FRAME, temperature=0.0, ignore_eos=True)
        self._session = session.__enter__()
        return session.first.token_ids


def replay(game: Game, console: Console, presses: list[str]) -> None:
    """Play keys, and print every frame."""
    console.print(view(game, console))
    for press in presses:
        if press == "q":
            return
        note = ""
        if press == "n":
            game.new_world()
        elif note := game.press(press):
            console.print(f"{press}: {note}", markup=False)
        if not note:
            console.print(f"\n{press}", markup=False)
            console.print(view(game, console))
    if game.left <= 0:
        console.print(USED_UP)


def play(game: Game, console: Console) -> None:
    """Drive with the keyboard, until `q`, ctrl-C or the end of the terminal."""
    with ending_on_signals(), keyboard() as read, Live(console=console, screen=True, auto_refresh=False) as live:
        note = HELP
        while True:
            live.update(Group(view(game, console), Text(note)), refresh=True)
            press = read()
            if press == "q":
                return
            if press == "n":
                game.new_world()
                note = HELP
            elif press:
                live.update(Group(view(game, console), Text("...")), refresh=True)
                note = game.press(press) or (HELP if game.left > 0 else USED_UP)


def view(game: Game, console: Console) -> Group:
    """The last frame and what is left, as large as the terminal allows."""
    generated = len(game.frames) - CONTEXT_FRAMES
    title = Text(f"world {game.seed}, frame {generated}, {game.left} left", Style(bold=True))
    coloured = console.color_system is not None and console.encoding.startswith("utf")
    size = max(1, min(12, (console.height - 4) * 2 // GRID, console.width // GRID))
    return Group(title, blocks(game.frames[-1], size) if coloured else letters(game.frames[-1]))


def blocks(frame: np.ndarray, size: int) -> Text:
    """A frame in half blocks, two pixels each.

    Args:
        frame: integers (TOKENS_PER_FRAME,).
        size: pixels per side of a tile.
    """
    pixels = np.asarray(render(frame).resize((GRID * size,) * 2, Image.Resampling.BOX)).tolist()
    text = Text(no_wrap=True, end="")
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        for top, bottom in zip(upper, lower, strict=True):
            text.append("▀", Style(color=Color.from_rgb(*top), bgcolor=Color.from_rgb(*bottom)))
        text.append("\n")
    return text


def letters(frame: np.ndarray) -> Text:
    """A frame in one letter per tile, for pipes and terminals without colours."""
    rows = frame.reshape(GRID, GRID).tolist()
    return Text("\n".join("".join(GLYPHS[TILES[token]] for token in row) for row in rows))


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Leave in order when asked to end; ctrl-C is as good as `q`."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SEQUENCE = re.compile(r"\x1b[\[O](?:1;(\d))?([A-D])|\x1b\[[0-9;]*[~A-Za-z]|[\s\S]")
_ARROWS = {"A": "U", "B": "D", "C": "R", "D": "L"}
_LETTERS = {"w": "U", "s": "D", "d": "R", "a": "L", " ": "."}


@contextmanager
def keyboard() -> Iterator:
    """Keys as they are pressed, unechoed; the terminal is as before afterwards.

    Yields:
        A function that waits half a second for a key and returns it as --keys has it, or "". Of several it returns the
        last: a key that is held down must not drive on for minutes.
    """
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def read() -> str:
        if not select.select([file], [], [], 0.5)[0]:  # now and then, for a terminal that changes its size
            return ""
        raw = os.read(file, 4096)
        while raw.endswith((b"\x1b", b"\x1b[", b"\x1bO")) and select.select([file], [], [], 0.05)[0]:
            raw += os.read(file, 4096)
        if not raw:
            return "q"
        presses = [press for match in _SEQUENCE.finditer(raw.decode(errors="replace")) if (press := _press(match))]
        return "q" if "q" in presses else presses[-1] if presses else ""

    try:
        tty.setcbreak(file)
        mode = termios.tcgetattr(file)
        mode[6][termios.VSUSP] = b"\0"  # ctrl-Z would leave the shell with this screen
        termios.tcsetattr(file, termios.TCSADRAIN, mode)
        yield read
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _press(match: re.Match[str]) -> str:
    """A key as --keys has it."""
    shift, arrow = match.groups()
    if arrow:
        return ("2" if shift == "2" else "") + _ARROWS[arrow]
    key = match.group()
    if key in ("W", "A", "S", "D"):
        return f"2{_LETTERS[key.lower()]}"
    return key if key in ("n", "q") else _LETTERS.get(key, "")


if __name__ == "__main__":
    typer.run(main)

"""The history of a session, and the parts that its sliding window drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import InputError
from .protocol import Slid, Window


class Place(NamedTuple):
    """The placeholders of one item; `start` and `stop` count the session's tokens from its first
    on, those that have fallen out among them."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Turn:
    """A message of the client, and the chunk that answered it.

    Attributes:
        start: where it begins, as in `Place`.
        prompt: vLLM's prompt of the message, with its items as they came.
        ids: of the message, then of the chunk.
        places: those of the message's items.
    """

    start: int
    prompt: Mapping[str, Any]
    ids: list[int]
    places: list[Place]

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


class History:
    """The turns that are in the window, and the tokens before them that stay.

    Args:
        window: what the client declared.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._turns: list[Turn] = []
        self._cut = self._end = 0

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns that the window has not dropped as a whole."""
        return self._turns

    @property
    def end(self) -> int:
        """Where the next turn begins."""
        return self._end

    def check(self, ids: Sequence[int], places: Sequence[Place]) -> None:
        """Refuse a window that does not go with the first prompt.

        Raises:
            InputError: it does not.
        """
        most, keep, prefix = self._window.items, self._window.keep, self._window.prefix
        if most is not None and keep > most:
            raise InputError("window.keep", f"at most the {most} of window.items", str(keep))
        self.check_count(Counter(place.name for place in places))
        if prefix > len(ids):
            expected = f"at most the {len(ids)} tokens of the first prompt"
            raise InputError("window.prefix", expected, str(prefix))
        for place in places:
            if place.start < prefix < place.stop:
                expected = f"{place.start} or {place.stop}, at an end of an item of {place.name}"
                raise InputError("window.prefix", expected, str(prefix))

    def check_count(self, items: Counter[str]) -> None:
        """Refuse more items than the client has declared."""
        most = self._window.items
        if most is not None and items.total() > most:
            expected = f"at most the {most} of window.items"
            raise InputError("items", expected, str(items.total()))

    def add(
        self,
        prompt: Mapping[str, Any],
        rendered: Mapping[str, Any],
        generated: Sequence[int],
    ) -> None:
        """Remember a turn."""
        ids = [*rendered["prompt_token_ids"], *generated]
        self._turns.append(Turn(self._end, prompt, ids, places(rendered, self._end)))
        self._end += len(ids)

    def at(self, cut: int) -> tuple[int, Counter[str]]:
        """The tokens that are left if the window begins at a cut, and the items."""
        places = (place for turn in self._turns for place in turn.places)
        left = (place.name for place in places if self.position(place.start, cut) is not None)
        return self._window.prefix + self._end - cut, Counter(left)

    def fitting(self, new: int, check: Callable[[int, Counter[str]], object]) -> int | None:
        """Where the window has to begin for a message: the first cut that leaves at most `keep`
        items, those of the message among them; None where nothing has to fall out.

        Args:
            new: items of the message.
            check: refuses tokens and items that leave no room for it.

        Raises:
            InputError: there is no such cut; the error of the last one.
        """
        refused = _refusal(check, *self.at(self._begin))
        if refused is None:
            return None
        for cut in self._cuts():
            behind = sum(place.start >= cut for turn in self._turns for place in turn.places)
            if behind and behind + new > self._window.keep:
                continue
            refused = _refusal(check, *self.at(cut))
            if refused is None:
                return cut
        raise refused

    @property
    def _begin(self) -> int:
        """Where the window begins, behind the prefix."""
        return max(self._cut, self._window.prefix)

    def _cuts(self) -> Iterator[int]:
        """Where it may begin after a slide, the earliest first."""
        if self._window.cut == "item":
            stops = sorted(place.stop for turn in self._turns for place in turn.places)
        else:
            stops = [turn.stop for turn in self._turns]
        return (stop for stop in stops if stop > self._begin)

    def ids(self, cut: int) -> list[int]:
        """The tokens that are left."""
        return [
            token for turn in self._turns for start, stop in self._kept(turn, cut)
            for token in turn.ids[start - turn.start : stop - turn.start]
        ]  # fmt: skip

    def _kept(self, turn: Turn, cut: int) -> Iterator[tuple[int, int]]:
        """The ranges of a turn that are left."""
        for start, stop in ((0, self._window.prefix), (cut, self._end)):
            start, stop = max(start, turn.start), min(stop, turn.stop)
            if start < stop:
                yield start, stop

    def position(self, start: int, cut: int) -> int | None:
        """Where an item stands among the tokens that are left; None if it falls out."""
        if start < self._window.prefix:
            return start
        return start - cut + self._window.prefix if start >= cut else None

    def slide(self, cut: int) -> Slid:
        """Let go of what is before a cut, and tell of how much."""
        begin, (_, before), (_, left) = self._begin, self.at(self._begin), self.at(cut)
        self._turns = [turn for turn in self._turns if any(self._kept(turn, cut))]
        self._cut = cut
        return Slid(tokens=cut - begin, items=dict(before - left))


def _refusal(check: Callable[..., object], *values: Any) -> InputError | None:
    try:
        check(*values)
    except InputError as error:
        return error
    return None


def places(rendered: Mapping[str, Any], start: int = 0) -> list[Place]:
    """The items of a rendered prompt whose first token is the session's `start`th."""
    return [
        Place(name, start + place.offset, start + place.offset + place.length)
        for name, own in rendered.get("mm_placeholders", {}).items()
        for place in own
    ]

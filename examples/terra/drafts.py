"""Drafts of whole frames for vLLM's speculative decoding: the frames before, moved as this frame's tokens so far say.

`FrameDrafts` is what vLLM takes as ``{"method": "custom_class", "model": "examples.terra.drafts.FrameDrafts"}``;
`FrameMotion` and `Drafter`, which make the drafts, need numpy only. The model checks every draft, so the ids are those
without drafts.
"""

import math
import warnings
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

HISTORY = 8
"""Frames that are displaced for a draft."""

MEMORY = 25
"""Frames that are looked through for one in which a cell and those around it were as they are."""

REACH = 4
"""Largest displacement that is looked for, in cells along each axis."""

STEP_TOKENS = 64
"""Drafted tokens that take as long as a step of the engine takes by itself; measured with the example's checkpoint on a
CPU, and more on a GPU."""

FRAME_TOKENS = 63
"""The most tokens per step that are worth drafting from frames."""

NGRAM_TOKENS = 8
"""The most tokens per step that are worth drafting by n-grams."""


def make_speculative_config(most: int) -> dict[str, Any]:
    """Return vLLM's ``speculative_config`` for drafts of frames.

    A vLLM that takes no drafts but its own drafts by n-grams, with a warning.

    Args:
        most: tokens that a step may draft for each stream.
    """
    if find_spec("vllm.v1.spec_decode.custom_class_proposer"):
        model = f"{FrameDrafts.__module__}.{FrameDrafts.__name__}"
        return {"method": "custom_class", "model": model, "num_speculative_tokens": most}
    most = min(most, NGRAM_TOKENS)
    warnings.warn(
        f"This vLLM takes no drafts of frames, as 0.22.1 and later do: n-grams draft {most} tokens instead.",
        stacklevel=3,
    )
    return make_ngram_config(most)


def make_ngram_config(most: int) -> dict[str, Any]:
    """Return vLLM's ``speculative_config`` for what followed the last tokens before, in a stream's history."""
    return {"method": "ngram", "num_speculative_tokens": most, "prompt_lookup_min": 2, "prompt_lookup_max": 6}


class Past(NamedTuple):
    """What the frames so far show.

    Attributes:
        views: integers (frames, cells), the newest first, each displaced to where the newest is.
        valid: bool, likewise: whether a cell of a view shows the world, and not a cell that never moves.
        fixed: bool (cells,), the cells that never move.
        move: the displacement between the last two frames.
        predicted: bool, for each cell of the newest frame whether the frame before predicts it; none for one frame.
        followers: integers (cells,), what a cell showed next when it and those around it were last as they are in the
            newest frame; -1 where they never were.
    """

    views: np.ndarray
    valid: np.ndarray
    fixed: np.ndarray
    move: int
    predicted: np.ndarray
    followers: np.ndarray


class FrameMotion:
    """Continues a frame from the frames before it.

    A displacement of the grid says for each cell which cell of the last frame it shows; what enters the picture comes
    from the opposite edge, or repeats the edge that it crosses. The displacement that explains the frame's first
    tokens best is taken, and among equals the one nearest to the displacement before. Older frames are displaced with
    it, and each cell gets the token that most of them show there: a car that was there once has driven on. Cells that
    no displacement ever explained, like a car that the camera follows, stay as they are. Where nothing is displaced, a
    cell that is as it once was, with those around it, goes on as it did then: cars that drive where others drove.

    Args:
        rows, columns: the grid; a frame is its tokens row by row.
        reach: largest displacement, in cells along each axis.
    """

    def __init__(self, rows: int, columns: int, reach: int = REACH) -> None:
        self.grid = (rows, columns)
        self.cells = rows * columns
        row, column = np.divmod(np.arange(self.cells), columns)
        # two displacements that show the same cells are one: the nearest, which comes first
        moves: dict[bytes, tuple[int, int, bool]] = {}
        for down, right in _list_displacements(reach):
            above = row - down
            left = column - right
            wrapped = above % rows * columns + left % columns
            clipped = above.clip(0, rows - 1) * columns + left.clip(0, columns - 1)
            moves.setdefault(wrapped.tobytes(), (down, right, True))
            moves.setdefault(clipped.tobytes(), (down, right, False))
        self._sources = np.stack([np.frombuffer(source, row.dtype) for source in moves])
        places = np.array(list(moves.values()), dtype=int)
        # less than one token counts, all together: they decide between equals
        self._distances = np.abs(places[:, None] - places).sum(-1) / 100 + np.abs(places[:, :2]).sum(-1) / 10_000
        # every step of a frame asks for the same past again
        self.read_past = lru_cache(256)(self._read_past)

    def draft_frame(self, frames: Sequence[np.ndarray] | np.ndarray, begun: np.ndarray) -> tuple[np.ndarray, float]:
        """Draft a frame.

        Args:
            frames: complete frames, integers (frames, cells), the last one last; at least one.
            begun: the first tokens of the next one, integers (tokens,).

        Returns:
            The next frame, integers (cells,), and which share of its cells may be expected to be right.
        """
        past = self.read_past(np.asarray(frames, np.int32).tobytes())
        move = self._find_move(past.views[0], begun, past.move)
        source = self._sources[move]
        views = past.views[:, source]
        valid = past.valid[:, source]
        votes = ((views[:, None] == views) & valid).sum(1) * valid
        draft = np.take_along_axis(views, votes.argmax(0)[None], 0)[0]  # the newest of equals
        draft[past.fixed] = past.views[0][past.fixed]
        if move == 0:
            draft = np.where(past.followers < 0, draft, past.followers)
        is_right = np.concatenate([past.predicted, draft[: len(begun)] == begun])
        # Laplace's rule of succession: one more right and one more wrong, so that the share is never 0 or 1
        return draft, float((is_right.sum() + 1) / (is_right.size + 2))

    def _find_move(self, before: np.ndarray, begun: np.ndarray, last: int) -> int:
        """Return the displacement from a frame to the next one, of which the first tokens are there."""
        num_explained = (before[self._sources[:, : len(begun)]] == begun).sum(-1)
        return int((num_explained - self._distances[last]).argmax())

    def _read_past(self, frames: bytes) -> Past:
        """Return what frames show, int32 (frames, cells), the last one last."""
        memory = np.frombuffer(frames, np.int32).reshape(-1, self.cells)
        history = memory[-HISTORY:]
        sources = []
        move = 0
        explained = []
        for before, after in pairwise(history):
            move = self._find_move(before, after, move)
            source = self._sources[move]
            sources.append(source)
            explained.append(before[source] == after)
        fixed = self._find_fixed(sources, explained)
        places = [np.arange(self.cells)]
        for source in reversed(sources):
            places.append(source[places[-1]])
        views = np.stack([frame[place] for frame, place in zip(history[::-1], places, strict=True)])
        valid = np.stack([~fixed[place] for place in places])
        edged = np.pad(memory.reshape(-1, *self.grid), ((0, 0), (1, 1), (1, 1)), constant_values=-1)
        around = sliding_window_view(edged, (3, 3), axis=(1, 2)).reshape(-1, self.cells, 9)
        predicted = np.empty(0, bool)
        if explained:
            followers = self._find_followers(memory[:-1], around[:-1])
            predicted = explained[-1] | (history[-1] == history[-2]) | (history[-1] == followers)
        return Past(views, valid, fixed, move, predicted, self._find_followers(memory, around))

    def _find_fixed(self, sources: list[np.ndarray], explained: list[np.ndarray]) -> np.ndarray:
        """Return which cells no displacement ever explained, bool (cells,); none if nothing was displaced."""
        here = np.arange(self.cells)
        fixed = np.zeros(self.cells, bool)
        displaced = [cells for cells, source in zip(explained, sources, strict=True) if (source != here).any()]
        if displaced:
            fixed = ~np.any(displaced, axis=0)
        return fixed

    def _find_followers(self, frames: np.ndarray, around: np.ndarray) -> np.ndarray:
        """Return what followed the newest surroundings of each cell, as in `Past`.

        Args:
            frames: integers (frames, cells).
            around: each cell with those around it, (frames, cells, 9).
        """
        followers = np.full(self.cells, -1)
        # a later frame overwrites an earlier one
        for surroundings, after in zip(around[:-1], frames[1:], strict=True):
            np.copyto(followers, after, where=(surroundings == around[-1]).all(-1))
        return followers


def _list_displacements(reach: int) -> list[tuple[int, int]]:
    """Return all displacements down and to the right, the nearest ones first."""
    steps = range(-reach, reach + 1)
    displacements = [(down, right) for down in steps for right in steps]

    def get_distance(displacement: tuple[int, int]) -> int:
        return abs(displacement[0]) + abs(displacement[1])

    return sorted(displacements, key=get_distance)


class Drafter:
    """Drafts the rest of a frame from all tokens of a stream.

    A token is drafted as long as the odds that it is accepted outweigh its arithmetic. A step of the engine is shared
    by all streams, so the more there are, the fewer tokens each of them drafts.

    Args:
        motion: makes the drafts.
        positions: of a frame: its tokens, then those of its action.
        step_tokens: drafted tokens that take as long as a step of the engine takes by itself.
    """

    def __init__(self, motion: FrameMotion, positions: int, step_tokens: int = STEP_TOKENS) -> None:
        self.motion = motion
        self.positions = positions
        self.step_tokens = step_tokens

    def draft_tokens(self, tokens: np.ndarray, streams: int = 1) -> list[int]:
        """Draft what follows.

        Args:
            tokens: integers (tokens,), from the beginning of a stream's first frame.
            streams: how many there are in the batch.

        Returns:
            At most the rest of the frame but for its last token, which the model adds by itself. Nothing in the first
            frame, and none for an action.
        """
        cells = self.motion.cells
        complete, begun = divmod(len(tokens), self.positions)
        if not complete or begun >= cells - 1:
            return []
        frames = tokens[: complete * self.positions].reshape(complete, self.positions)[-MEMORY:, :cells]
        draft, expected = self.motion.draft_frame(frames, tokens[complete * self.positions :])
        num_worth = int(math.log(streams / (streams + self.step_tokens)) / math.log(expected))
        return draft[begun : cells - 1][:num_worth].tolist()


class FrameDrafts:
    """Drafts of frames, as vLLM asks for them.

    The grid is the config's. ``additional_config={"frame_drafts": {...}}`` of `vllm.LLM` may hold ``reach`` and
    ``step_tokens``.
    """

    def __init__(self, vllm_config: Any) -> None:
        config = vllm_config.model_config.hf_config
        speculative = vllm_config.speculative_config
        options = {"reach": REACH, "step_tokens": STEP_TOKENS}
        options |= vllm_config.additional_config.get("frame_drafts", {})
        rows, columns = config.grid
        motion = FrameMotion(rows, columns, reach=options["reach"])
        self._drafter = Drafter(motion, config.num_spatio_embeddings, options["step_tokens"])
        self._most = speculative.num_speculative_tokens
        # vLLM drafts zeros where the most drafts would pass the end of the longest sequence; these never pass a frame's
        speculative.draft_model_config = copy(speculative.draft_model_config)
        speculative.draft_model_config.max_model_len += self._most

    def load_model(self, *args: Any, **options: Any) -> None:
        """Do nothing: there is no model to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        *args: Any,
        **options: Any,
    ) -> list[list[int]]:
        """Draft for every stream of a batch.

        Args:
            sampled_token_ids: what this step sampled, one list per stream; empty while its prompt is not done.
            num_tokens_no_spec: int32 (streams,), tokens of each stream, those sampled included.
            token_ids_cpu: int32 (streams, longest), the tokens.
        """
        streams = len(sampled_token_ids)
        drafts: list[list[int]] = []
        # the arrays have rows for more streams than there are
        for sampled, count, tokens in zip(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, strict=False):
            draft = []
            if sampled:
                draft = self._drafter.draft_tokens(tokens[:count], streams)[: self._most]
            drafts.append(draft)
        return drafts

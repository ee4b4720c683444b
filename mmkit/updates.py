"""Prompt updates: how layouts get into the prompt.

`replace` puts a layout in place of a target; `insert` puts it at an end of the prompt or after a
prefix; `already_expanded` declares that the caller writes the layouts. All three recognise a layout
that already stands in the prompt and leave it as it is, so an expanded prompt is not expanded
again; see `mmkit.placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from .errors import SpecError
from .expr import Scope
from .layout import Layout, LayoutLike, Placeholder, layout, nothing
from .node import Part


class Update(Part):
    """One way in which an item's layout gets into the prompt: `replace`, `insert` or
    `already_expanded`."""

    target: Layout = nothing

    def resolve(self, scope: Scope) -> Target:
        """The ids of the target, in the scope of one item."""
        return tuple(self.target.lay(scope).ids)

    def written(self, target: Target, placeholder: Placeholder) -> Sequence[int]:
        """The ids that a caller writes into the prompt for an item."""
        return ()

    def anchor(self, prompt: Sequence[int], target: Target) -> int | None:
        """The offset at which the layout is inserted; None for an update that inserts nothing."""
        return None


class Replace(Update):
    """The layout takes the target's place."""

    def written(self, target: Target, placeholder: Placeholder) -> Sequence[int]:
        return target

    def __repr__(self) -> str:
        return f"replace({self.target._source()})"


class AlreadyExpanded(Update):
    """The caller writes the layouts into the prompt; mmkit recognises, counts and checks them, and
    expands nothing."""

    _word = "already_expanded"

    def written(self, target: Target, placeholder: Placeholder) -> Sequence[int]:
        return placeholder.ids


already_expanded = AlreadyExpanded


class Insert(Update):
    """mmkit inserts the layout at an end of the prompt, or after a prefix, which is the target."""

    at: Literal["start", "end", "after"] = "start"

    def anchor(self, prompt: Sequence[int], target: Target) -> int | None:
        if self.at == "end":
            return len(prompt)
        return len(target) if tuple(prompt[: len(target)]) == target else None

    def __repr__(self) -> str:
        if self.at == "after":
            return f"insert(after={self.target._source()})"
        return f"insert(at={self.at!r})"


def replace(target: LayoutLike) -> Update:
    """The layout takes the place of `target`: one occurrence per item, in the items' order.

    Args:
        target: one token (``tok["<image>"]``), a text (``tok.text("<image>")``), ids, or an
            expression over `item.index` for numbered targets (``tok["<|image_{}|>", item.index +
            1]``).

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """
    return Replace(layout(target, "replace()"))


def insert(*, at: Literal["start", "end"] | None = None, after: LayoutLike | None = None) -> Update:
    """mmkit inserts the layouts in the order of the items; the caller writes nothing for them.

    Args:
        at: "start" inserts before the first token of the prompt, "end" after the last.
        after: a prefix with which the prompt must start; the layouts follow it. One token
            (``tok["<s>"]``), a text (``tok.text("...")``) or ids.

    Raises:
        SpecError: neither or both.
    """
    if (at is None) == (after is None) or at not in (None, "start", "end"):
        got = ", ".join(
            f"{name}={value!r}"
            for name, value in (("at", at), ("after", after))
            if value is not None
        )
        raise SpecError("insert()", 'at="start", at="end" or after=a prefix', got or "nothing")
    return Insert(at=at) if at else Insert(layout(after, "insert()"), "after")  # type: ignore[arg-type]


Target: TypeAlias = tuple[int, ...]
"""The ids that stand for an item in a prompt that is not expanded yet."""


class EndingWith(Part):
    """The ids with which every prompt ends."""

    ids: Layout

    _word = "ending_with"


Rewrite: TypeAlias = "EndingWith | Callable[[Scope], Any]"
"""How a spec rewrites a caller's prompt."""


def ending_with(ids: LayoutLike) -> EndingWith:
    """Every prompt ends with these ids, for example ``tok["<sep>"]``. mmkit appends them where the
    prompt does not end with them already.

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """
    return EndingWith(layout(ids))

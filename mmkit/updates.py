"""Prompt updates: how layouts get into the prompt.

`replace` puts a layout in place of a target; `insert` puts it at an end of the prompt or after a
prefix; `already_expanded` declares that the caller writes the layouts. All three recognise a layout
that already stands in the prompt and leave it as it is, so an expanded prompt is not expanded
again; see `mmkit.placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Any, Literal, TypeAlias

from .errors import SpecError
from .expr import Scope
from .layout import Layout, LayoutLike, Placeholder, layout
from .node import Part, Stated, stated

Target: TypeAlias = tuple[int, ...]
"""The ids that stand for an item in a prompt that is not expanded yet."""


class Update(Part):
    """One way in which an item's layout gets into the prompt: `replace`, `insert` or
    `already_expanded`."""

    def resolve(self, scope: Scope) -> Target:
        """The ids of the target, in the scope of one item."""
        return ()

    def written(self, target: Target, placeholder: Placeholder) -> Sequence[int]:
        """The ids that a caller writes into the prompt for an item."""
        return ()

    def anchor(self, prompt: Sequence[int], target: Target) -> int | None:
        """The offset at which the layout is inserted; None for an update that inserts nothing."""
        return None


class Replace(Update):
    """The layout takes the place of `target`: one occurrence per item, in the items' order.

    Attributes:
        target: one token (``tok["<image>"]``), a text (``tok.text("<image>")``), ids, or an
            expression over `item.index` for numbered targets (``tok["<|image_{}|>", item.index +
            1]``).

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """

    target: Stated[LayoutLike, Layout] = stated(partial(layout, where="replace()"))

    _word = "replace"

    def resolve(self, scope: Scope) -> Target:
        return tuple(self.target.lay(scope).ids)

    def written(self, target: Target, placeholder: Placeholder) -> Sequence[int]:
        return target


class AlreadyExpanded(Update):
    """The caller writes the layouts into the prompt; mmkit recognises, counts and checks them, and
    expands nothing."""

    _word = "already_expanded"

    def written(self, target: Target, placeholder: Placeholder) -> Sequence[int]:
        return placeholder.ids


class Insert(Update):
    """mmkit inserts the layouts in the order of the items; the caller writes nothing for them.

    Attributes:
        at: "start" inserts before the first token of the prompt, "end" after the last.
        after: a prefix with which the prompt must start; the layouts follow it. One token
            (``tok["<s>"]``), a text (``tok.text("...")``) or ids.

    Raises:
        SpecError: neither or both.
    """

    at: Literal["start", "end"] | None = field(default=None, kw_only=True)
    after: Stated[LayoutLike | None, Layout | None] = stated(
        partial(layout, where="insert()"), default=None, kw_only=True
    )

    _word = "insert"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.at is None) == (self.after is None) or self.at not in (None, "start", "end"):
            expected = 'at="start", at="end" or after=a prefix'
            raise SpecError("insert()", expected, ", ".join(self._stated()) or "nothing")

    def resolve(self, scope: Scope) -> Target:
        return tuple(self.after.lay(scope).ids) if self.after else ()

    def anchor(self, prompt: Sequence[int], target: Target) -> int | None:
        if self.at == "end":
            return len(prompt)
        return len(target) if tuple(prompt[: len(target)]) == target else None


class EndingWith(Part):
    """Every prompt ends with these ids, for example ``tok["<sep>"]``. mmkit appends them where the
    prompt does not end with them already.

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """

    ids: Stated[LayoutLike, Layout] = stated(layout)

    _word = "ending_with"


Rewrite: TypeAlias = "EndingWith | Callable[[Scope], Any]"
"""How a spec rewrites a caller's prompt."""

replace = Replace
already_expanded = AlreadyExpanded
insert = Insert
ending_with = EndingWith

"""Layouts: the positions of one item in the prompt.

Three combinators cover every static layout: repetition ``x * n``, sequence ``a + b`` and `each`.
`embed(id)` marks the positions that receive encoder rows; every other id is literal. One evaluation
gives the token ids, the embed mask and the number of embeddings, so the three cannot disagree. Rows
of patches, each with a newline, are ``(embed(patch) * cols + newline) * rows + bos``.

The output of a model has a layout, too. There `any_id(start, stop)` marks the positions where the
model chooses: ``(any_id(0, 8192) * cols + newline) * rows + eos``.

Prompt updates say how layouts get into the prompt: `replace` puts a layout in place of a target,
`insert` at the start of the prompt or after a prefix, and `already_expanded` declares that the
caller writes the layouts. All three recognise a layout that already stands in the prompt and leave
it as it is, so an expanded prompt is not expanded again; see `mmkit.plan.placement`.
"""

from __future__ import annotations

import codecs
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from itertools import chain, compress
from numbers import Integral
from typing import Any, Literal, TypeAlias

import torch

from ..errors import SpecError
from .expr import Count, Expr, Leaf, Scope, Value, expression, is_op, plain, written
from .node import Part, Stated, evaluate_all, fold, leaves, parts, stated
from .vocabulary import filled


@dataclass(frozen=True)
class Placeholder:
    """An evaluated layout: the ids of one item in a prompt.

    Attributes:
        ids: token ids, in prompt order. Requests share the list: do not change it.
        mask: one byte per id, 1 where the position receives an encoder row.
    """

    ids: list[int]
    mask: bytes

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def num_embeds(self) -> int:
        """The number of positions that receive an encoder row."""
        return self.mask.count(1)

    @cached_property
    def is_embed(self) -> torch.Tensor | None:
        """Boolean mask (len(ids),); None, as vLLM expects, where every position receives an
        encoder row."""
        if self.num_embeds == len(self.mask):
            return None
        return torch.frombuffer(bytearray(self.mask), dtype=torch.bool)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The runs of positions that receive encoder rows: offset and length of each."""
        return [(run.start(), len(run[0])) for run in re.finditer(b"\x01+", self.mask)]

    @cached_property
    def text(self) -> str:
        """The ids as a string; see `as_text`."""
        return as_text(self.ids)

    @cached_property
    def embed_ids(self) -> frozenset[int]:
        """The ids at the positions that receive encoder rows."""
        return frozenset(compress(self.ids, self.mask))

    @cached_property
    def literal_ids(self) -> frozenset[int]:
        """The ids at the positions that receive no encoder rows."""
        if self.num_embeds == len(self.ids):
            return frozenset()
        return frozenset(
            token for token, embeds in zip(self.ids, self.mask, strict=True) if not embeds
        )


def as_text(ids: Sequence[int]) -> str:
    """Ids as a string, one character each: Python finds one string in another in linear time, and
    has no such search for lists.

    No vocabulary has more ids than there are characters, 1,114,112.
    """
    text, _ = _decoded(array("I", ids), "surrogatepass", True)
    return text


_decoded = codecs.utf_32_le_decode if sys.byteorder == "little" else codecs.utf_32_be_decode

# longer than any context; a count from a caller's arguments must not take all memory
_MOST_IDS = 1 << 22

_MOST_ROUNDS = 1 << 17
"""The rounds of all `each` of one layout together: without a bound, two of them, one inside the
other, would take a year."""

_rounds: ContextVar[int] = ContextVar("rounds of each() in the current layout", default=0)

Piece: TypeAlias = tuple[list[Any], bytes]
"""Ids, in the layout of an output also ranges of ids, with the mask."""

LayoutLike: TypeAlias = "Layout | Expr | int | list[Any] | tuple[Any, ...] | Callable[[Scope], Any]"
"""A layout, or the ids of literal positions."""

_CHOSEN = b"\x02"
"""In a mask, a position where the model chooses."""


class Layout(Part):
    """Base of all layouts. Combine with ``+`` and ``*``; ids on either side of a ``+`` are
    literal."""

    def __add__(self, other: LayoutLike) -> Layout:
        return _sequence(self, layout(other))

    def __radd__(self, other: LayoutLike) -> Layout:
        # Python has added what stands left of a layout; a number added to an id is the next id
        terms = other._args if isinstance(other, Expr) and other._op == "+" else ()
        if terms and all({leaf.root for leaf in leaves(term)} == {"cfg"} for term in terms):
            remedy = f"Write literal({', '.join(map(repr, terms))}) for one after the other."
            raise SpecError(f"{other!r} + {self!r}", "layouts", "ids, which are not added", remedy)
        return _sequence(layout(other), self)

    def __mul__(self, count: Count) -> Layout:
        return Repeated(self, count)

    __rmul__ = __mul__

    def lay(self, scope: Scope) -> Placeholder:
        """Evaluate in a scope.

        Raises:
            SpecError: an id or a count that is not a whole number >= 0, or a value that the scope
                lacks.
        """
        ids, mask = self._emit_within_bounds(scope)
        if _CHOSEN in mask:
            remedy = "It belongs into the layout of an Output."
            raise SpecError(self._source(), "ids and embed()", "any_id()", remedy)
        return Placeholder(ids, mask)

    def allowed(self, scope: Scope) -> list[int | range]:
        """The ids that may stand at each position of an output: one id, or a range.

        Raises:
            SpecError: as for `lay`, or an `embed`.
        """
        ids, mask = self._emit_within_bounds(scope)
        if 1 in mask:
            expected, remedy = "ids and any_id()", "What comes out receives no encoder rows."
            raise SpecError(self._source(), expected, "embed()", remedy)
        return ids

    def bind(self, scope: Scope) -> Layout:
        """This layout with everything that depends on `cfg`, `proc` and `tok` alone evaluated."""
        bound: Layout = super().bind(scope)
        if bound.leaves():
            return bound
        # not of `bound`: errors name the expression, not its value
        known = self.lay(scope)
        return Fixed(known.ids, known.mask)

    def fixed(self) -> list[Placeholder]:
        """The parts of a bound layout that depend on no item."""
        return [Placeholder(end.ids, end.mask) for end in _ends(self) if isinstance(end, Fixed)]

    def varying(self) -> list[Layout]:
        """The parts of a bound layout in which an item chooses the placeholder ids."""
        return [end for end in _ends(self) if not isinstance(end, Fixed)]

    def _emit(self, scope: Scope) -> Piece:
        raise NotImplementedError

    def _emit_within_bounds(self, scope: Scope) -> Piece:
        """Evaluate in a scope, with as many rounds of `each` as a layout may take."""
        reset = _rounds.set(0)
        try:
            return self._emit(scope)
        finally:
            _rounds.reset(reset)


def layout(value: LayoutLike, where: str = "layout") -> Layout:
    """A layout of ids, of an expression or of a function of a `Scope`; `where` names it in errors.

    Raises:
        SpecError: a string; it could mean one token or a text.
    """
    if isinstance(value, Layout):
        return value
    if isinstance(value, str):
        remedy = f"Write tok[{value!r}] for one token or tok.text({value!r}) for text."
        raise SpecError(where, "token ids", repr(value), remedy)
    if isinstance(value, (list, tuple)) and not all(isinstance(v, Integral) for v in value):
        return _sequence(*map(layout, value))
    return Tokens(tuple(value) if isinstance(value, list) else expression(value))


def _sequence(*layouts: Layout) -> Layout:
    nested = (one.parts if isinstance(one, Sequenced) else (one,) for one in layouts)
    parts = tuple(chain.from_iterable(nested))
    return parts[0] if len(parts) == 1 else Sequenced(parts)


class Fixed(Layout):
    """An evaluated part."""

    ids: Stated[Sequence[int], list[int]] = stated(list)
    mask: bytes

    _leaves = frozenset()

    def _emit(self, scope: Scope) -> Piece:
        return self.ids, self.mask

    def __repr__(self) -> str:
        words = ["embed" if embeds else "literal" for embeds in self.mask]
        parts = (f"{word}({token})" for word, token in zip(words, self.ids, strict=True))
        return " + ".join(parts) or "nothing"


class Tokens(Layout):
    """Literal ids: one id, several ids, or a layout that a function or `where` chooses."""

    value: Value

    _word = "literal"

    def _emit(self, scope: Scope) -> Piece:
        value = evaluate_all(self.value, scope)
        if isinstance(value, Layout):
            return value._emit(scope)
        if isinstance(value, list) and {*map(type, value)} == {int} and min(value) >= 0:
            return list(value), bytes(len(value))  # nearly always, also for whole prompts
        value = plain(value)
        several = value if isinstance(value, Sequence) else [value]
        return [whole(one, self.value, "a token id") for one in several], bytes(len(several))

    def bind(self, scope: Scope) -> Layout:
        value = fold(self.value, scope)
        # a layout that the config alone chooses is not bound yet
        return value.bind(scope) if isinstance(value, Layout) else super().bind(scope)

    def _source(self) -> str:
        return repr(self.value)


def _token(value: Any) -> Any:
    if isinstance(value, (Layout, str)) or is_op(value, "tok.text"):
        remedy = 'Write embed(tok["<image>"]) or embed(cfg.some_token_id).'
        raise SpecError("embed()", "one token id", repr(value), remedy)
    return expression(value)


class Embed(Layout):
    """One position that receives an encoder row.

    Attributes:
        token: the placeholder id of that position: ``embed(tok["<image>"])``,
            ``embed(cfg.image_token_id)``.

    Raises:
        SpecError: a string, a text of several tokens, or a layout.
    """

    token: Stated[Count, Any] = stated(_token)

    _word = "embed"

    def _emit(self, scope: Scope) -> Piece:
        return [_whole(self.token, scope, "a token id")], b"\x01"


class AnyId(Layout):
    """One position of an output, where the model chooses among the ids of a range.

    Attributes:
        start: the first id of the range.
        stop: the id after the last one, as in `range`.
    """

    start: Stated[Count, Any] = stated(expression)
    stop: Stated[Count, Any] = stated(expression)

    _word = "any_id"

    def _emit(self, scope: Scope) -> Piece:
        ends = (self.start, self.stop)
        ids = range(*(_whole(end, scope, "a token id") for end in ends))
        if not ids:
            raise SpecError(repr(self), "at least one id", repr(ids))
        return [ids], _CHOSEN


class Selected(Layout):
    """Ids that are known as a whole, for example those of a text that a processor writes. Some of
    them receive encoder rows: ``select(tok.text("<img><pad><pad></img>"), embed=tok["<pad>"])``.

    Attributes:
        ids: the ids of all positions.
        embed: the id, or the ids, whose positions receive an encoder row.

    Raises:
        SpecError: a string.
    """

    ids: Stated[LayoutLike, Layout] = stated(layout)
    embed: Stated[LayoutLike, Layout] = stated(layout, kw_only=True)

    _word = "select"

    def _emit(self, scope: Scope) -> Piece:
        ids, chosen = self.ids._emit(scope)[0], {*self.embed._emit(scope)[0]}
        return ids, bytes(token in chosen for token in ids)


def _ends(part: Any) -> Iterator[Layout]:
    """The parts of a bound layout that have placeholder ids, and those whose ids are known."""
    if isinstance(part, Selected) and isinstance(part.embed, Fixed):
        yield Fixed(part.embed.ids, b"\x01" * len(part.embed.ids))
    elif isinstance(part, (Fixed, Embed, Selected)):
        yield part
    else:
        for inner in parts(part):
            yield from _ends(inner)


class Repeated(Layout):
    body: Layout
    count: Stated[Count, Any] = stated(expression)

    def _emit(self, scope: Scope) -> Piece:
        ids, mask = self.body._emit(scope)
        count = _whole(self.count, scope, "a repetition count")
        _check_length(count * len(ids), self)
        return ids * count, mask * count

    def bind(self, scope: Scope) -> Layout:
        count = fold(self.count, scope)
        if not leaves(count):  # refused now, whatever the body still waits for
            count = whole(count, self.count, "a repetition count")
        return Layout.bind(Repeated(self.body.bind(scope), count), scope)

    def __repr__(self) -> str:
        body = f"({self.body!r})" if isinstance(self.body, Sequenced) else repr(self.body)
        return f"{body} * {written(self.count)}"


class Sequenced(Layout):
    parts: tuple[Layout, ...]

    def _emit(self, scope: Scope) -> Piece:
        pieces: list[Piece] = []
        length = 0
        for part in self.parts:
            pieces.append(part._emit(scope))
            length += len(pieces[-1][0])
            _check_length(length, self)
        return _joined(pieces)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts)) or "nothing"


def _loop(depth: int) -> Expr:
    """The current element of an `each`; depth 0 is the outermost."""
    return Expr("loop", ("xyzuvw"[depth] if depth < 6 else f"x{depth}", depth))


nothing: Layout = Sequenced(())
"""The empty layout."""

_depth: ContextVar[int] = ContextVar("depth of each()", default=0)


def _body(body: Any) -> Layout:
    """The layout of the current element of an `each`, by a function of that element."""
    if isinstance(body, Layout):
        return body
    depth = _depth.get()
    reset = _depth.set(depth + 1)
    try:
        return layout(body(_loop(depth)))
    finally:
        _depth.reset(reset)


class Each(Layout):
    """One `body` per element, in order: rows, tiles, frames. `each` nests.

    Attributes:
        over: a sequence, or a number n for the elements 0 .. n-1.
        body: a function from an expression for the current element to the element's layout; called
            once.
        sep: a layout between two elements.
        last: a layout after the last element; without elements it is left out.
    """

    over: Stated[Value, Any] = stated(expression)
    body: Stated[Callable[[Expr], LayoutLike] | Layout, Layout] = stated(_body)
    _: KW_ONLY
    sep: Stated[LayoutLike, Layout] = stated(layout, default=nothing)
    last: Stated[LayoutLike, Layout] = stated(layout, default=nothing)
    depth: int = field(default_factory=_depth.get, repr=False)

    _word = "each"

    def _emit(self, scope: Scope) -> Piece:
        over = plain(evaluate_all(self.over, scope))
        if not isinstance(over, (tuple, range)):
            over = range(whole(over, self.over, "the number of elements of each(), or a sequence"))
        self._check_rounds(over)
        pieces: list[Piece] = []
        length = 0
        for index, element in enumerate(over):
            inner = scope.looped(self.depth, element)
            for part in (self.sep, self.body) if index else (self.body,):
                pieces.append(part._emit(inner))
                length += len(pieces[-1][0])
            _check_length(length, self)
        return _joined([*pieces, self.last._emit(scope)] if pieces else [])

    def _check_rounds(self, over: range | tuple[Any, ...]) -> None:
        """Count the rounds of this loop with those of the others of the layout.

        Raises:
            SpecError: there are too many.
        """
        # a range may be longer than len() can say
        new = over.stop if isinstance(over, range) else len(over)
        rounds = _rounds.get() + new
        if rounds > _MOST_ROUNDS:
            expected = f"at most {_MOST_ROUNDS} rounds of all each() of a layout"
            raise SpecError(repr(self), expected, str(rounds))
        _rounds.set(rounds)

    @cached_property
    def _leaves(self) -> frozenset[Leaf]:
        inner = self.body.leaves() | self.sep.leaves() | self.last.leaves()
        return leaves(self.over) | {leaf for leaf in inner if leaf.root != f"loop {self.depth}"}

    def _stated(self) -> Iterator[str]:
        over, body, *options = super()._stated()
        yield from (over, f"lambda {_loop(self.depth)!r}: {body}", *options)


embed = Embed
any_id = AnyId
select = Selected
each = Each


def literal(*ids: LayoutLike) -> Layout:
    """Positions that hold ids and receive no encoder row: ``literal(tok["<img>"],
    tok["</img>"])``. Ids beside a layout need no `literal`: ``tok["<img>"] + embed(...)``.

    Args:
        ids: in prompt order: ids, sequences of ids, or expressions or functions of a `Scope` for
            either.

    Raises:
        SpecError: a string.
    """
    return _sequence(*map(layout, ids))


def _joined(pieces: list[Piece]) -> Piece:
    ids: list[int] = []
    for part, _ in pieces:
        ids += part
    return ids, b"".join(mask for _, mask in pieces)


def _whole(value: Any, scope: Scope, what: str) -> int:
    return whole(evaluate_all(value, scope), value, what)


def _check_length(length: int, source: Layout) -> None:
    if length > _MOST_IDS:
        raise SpecError(repr(source), f"at most {_MOST_IDS} ids", str(length))


def whole(value: Any, source: Any, what: str) -> int:
    """A whole number >= 0, also from a tensor of one element.

    Raises:
        SpecError: names the expression that the value came from.
    """
    if type(value) is int and value >= 0:
        return value
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, Integral)) or value < 0:
        remedy = "Use math.floor(), or // and ceil_div() of whole numbers."
        expected, got = f"{what}, a whole number >= 0", repr(value)
        raise SpecError(repr(source), expected, got, remedy if isinstance(value, float) else "")
    return int(value)


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

    A text is found wherever it stands in a prompt, also where the tokenizer has split it otherwise
    than alone, and no token outside it changes: see `mmkit.plan.text_targets.restore_text_targets`.

    Attributes:
        target: one token (``tok["<image>"]``), a text (``tok.text("<image>")``), ids, or an
            expression over `item.index` for numbered targets (``tok["<|image_{}|>", item.index +
            1]``).

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """

    target: Stated[LayoutLike, Layout] = stated(partial(layout, where="replace()"))

    _word = "replace"

    def text(self, scope: Scope) -> str | None:
        """The target as a text, without a vocabulary; None where it is no text in that scope."""
        parts = self.target.parts if isinstance(self.target, Sequenced) else (self.target,)
        sources: list[Any] = [getattr(part, "value", None) for part in parts]
        if not all(is_op(source, "tok[]", "tok.text") for source in sources):
            return None
        with suppress(SpecError):
            return "".join(filled(*evaluate_all(source._args, scope)) for source in sources)
        return None

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
        at: "start" inserts before the first token of the prompt.
        after: a prefix with which the prompt must start; the layouts follow it. One token
            (``tok["<s>"]``), a text (``tok.text("...")``) or ids.

    Raises:
        SpecError: neither or both.
    """

    at: Literal["start"] | None = field(default=None, kw_only=True)
    after: Stated[LayoutLike | None, Layout | None] = stated(
        partial(layout, where="insert()"), default=None, kw_only=True
    )

    _word = "insert"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.at is None) == (self.after is None) or self.at not in (None, "start"):
            got = ", ".join(self._stated()) or "nothing"
            raise SpecError("insert()", 'at="start" or after=a prefix', got)

    def resolve(self, scope: Scope) -> Target:
        return tuple(self.after.lay(scope).ids) if self.after else ()

    def anchor(self, prompt: Sequence[int], target: Target) -> int | None:
        return len(target) if tuple(prompt[: len(target)]) == target else None


class EndingWith(Part):
    """Every prompt ends with these ids, for example ``tok["<sep>"]``. mmkit appends them where the
    prompt does not end with them already.

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """

    ids: Stated[LayoutLike, Layout] = stated(layout)

    _word = "ending_with"


replace = Replace
already_expanded = AlreadyExpanded
insert = Insert
ending_with = EndingWith

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
it as it is, so an expanded prompt is not expanded again; see `mmkit.plan.placing`.

The file in its order: `Layout`, the kinds of layouts that an author writes, the prompt updates,
`ItemTokens`, which evaluating a layout gives, and how layouts are evaluated.
"""

from __future__ import annotations

import codecs
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import compress
from numbers import Integral
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from ..errors import SpecError
from .expr import Count, Expr, Scope, Value, as_expression, call_for_element, next_loop_variable
from .node import (
    Converted,
    Dependency,
    Part,
    dependencies,
    evaluate_all,
    fold,
    list_parts,
    parameter,
    write_source,
)
from .operations import LoopVariable, drop_loop_variable, is_operation, write_operand
from .scope import to_python
from .vocabulary import fill_template

LayoutLike: TypeAlias = "Layout | Expr | int | list[Any] | tuple[Any, ...] | Callable[[Scope], Any]"
"""A layout, or the ids of literal positions."""

Emission: TypeAlias = tuple[list[Any], bytes]
"""What a layout emits in a scope: for each position its id, and one byte, its kind: `_LITERAL`,
`_EMBED` or `_CHOICE`. At a choice, which only the layout of an output has, there is a `range` of
ids in place of an id."""

_LITERAL = 0
"""The kind of a position that holds an id and receives no encoder row."""

_EMBED = 1
"""The kind of a position that receives an encoder row."""

_CHOICE = 2
"""The kind of a position of an output, where the model chooses the id."""


class Layout(Part):
    """Base of all layouts.

    Combine with ``+`` and ``*``; ids on either side of a ``+`` are literal.
    """

    def __add__(self, other: LayoutLike) -> Layout:
        return _make_sequence([self, layout(other)])

    def __radd__(self, other: LayoutLike) -> Layout:
        _refuse_added_ids(other, self)
        return _make_sequence([layout(other), self])

    def __mul__(self, count: Count) -> Layout:
        return Repeated(self, count)

    __rmul__ = __mul__

    def lay(self, scope: Scope) -> ItemTokens:
        """Evaluate the layout of an item in its scope.

        Raises:
            SpecError: an id or a count that is not a whole number >= 0, or a value that the scope
                lacks.
        """
        ids, kinds = self._emit_within_bounds(scope)
        if _CHOICE in kinds:
            remedy = "It belongs into the layout of an Output."
            raise SpecError(self._write_source(), "ids and embed()", "any_id()", remedy)
        # without choices, the kinds are a mask of 0 and 1
        return ItemTokens(ids, kinds)

    def list_allowed_ids(self, scope: Scope) -> list[int | range]:
        """Return the ids that may stand at each position of an output: one id, or a range.

        Raises:
            SpecError: as for `lay`, or an `embed`.
        """
        ids, kinds = self._emit_within_bounds(scope)
        if _EMBED in kinds:
            expected, remedy = "ids and any_id()", "What comes out receives no encoder rows."
            raise SpecError(self._write_source(), expected, "embed()", remedy)
        return ids

    def bind(self, scope: Scope) -> Layout:
        """Return this layout with its static parts evaluated.

        These depend on `cfg`, `proc` and `tok` only.
        """
        bound: Layout = super().bind(scope)
        if bound.dependencies():
            return bound
        # evaluate this layout, not `bound`: errors name the expression, not its value
        tokens = self.lay(scope)
        return Fixed(tokens.ids, tokens.mask)

    def find_fixed_parts(self) -> list[ItemTokens]:
        """Find the parts of a bound layout that depend on no item."""
        parts: list[ItemTokens] = []
        for part in _find_parts_with_ids(self):
            if isinstance(part, Fixed):
                parts.append(ItemTokens(part.ids, part.mask))
        return parts

    def find_varying_parts(self) -> list[Layout]:
        """Find the parts of a bound layout in which an item chooses the placeholder ids."""
        return [part for part in _find_parts_with_ids(self) if not isinstance(part, Fixed)]

    def _emit(self, scope: Scope) -> Emission:
        """Evaluate in a scope.

        Every kind of layout has its own implementation.
        """
        raise NotImplementedError

    def _emit_within_bounds(self, scope: Scope) -> Emission:
        """Evaluate in a scope, with as many rounds of `each` as a layout may take."""
        reset = _num_rounds.set(0)
        try:
            return self._emit(scope)
        finally:
            _num_rounds.reset(reset)


def _refuse_added_ids(left: LayoutLike, right: Layout) -> None:
    """Refuse ids of the config that were added before a layout: ``cfg.a + cfg.b + embed(5)``.

    Python computes ``cfg.a + cfg.b`` first, and a number added to an id is the next id.

    Raises:
        SpecError: each term of the sum at the left is a value of the config.
    """
    if not is_operation(left, "+"):
        return
    terms = left._args  # type: ignore[union-attr]
    for term in terms:
        roots = {dependency.root for dependency in dependencies(term)}
        if roots != {"cfg"}:
            return
    remedy = f"Write literal({', '.join([repr(term) for term in terms])}) for one after the other."
    raise SpecError(f"{left!r} + {right!r}", "layouts", "ids, which are not added", remedy)


def layout(value: LayoutLike, where: str = "layout") -> Layout:
    """Return the layout of ids, of an expression or of a function of a `Scope`.

    Args:
        value: a layout is returned as it is.
        where: names it in errors.

    Raises:
        SpecError: a string; it could mean one token or a text.
    """
    if isinstance(value, Layout):
        return value
    if isinstance(value, str):
        remedy = f"Write tok[{value!r}] for one token or tok.text({value!r}) for text."
        raise SpecError(where, "token ids", repr(value), remedy)
    if isinstance(value, (list, tuple)) and not _are_integers(value):
        return _make_sequence([layout(element) for element in value])
    if isinstance(value, list):
        return LiteralIds(tuple(value))
    return LiteralIds(as_expression(value))


def _are_integers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Integral) for value in values)


def _make_sequence(layouts: Sequence[Layout]) -> Layout:
    """Return a layout of layouts, one after the other.

    Sequences among them are flattened.
    """
    parts: list[Layout] = []
    for part in layouts:
        if isinstance(part, Sequenced):
            parts.extend(part.parts)
        else:
            parts.append(part)
    if len(parts) == 1:
        return parts[0]
    return Sequenced(tuple(parts))


# -- the kinds of layouts --------------------------------------------------------------------------


def literal(*ids: LayoutLike) -> Layout:
    """Return positions that hold ids and receive no encoder row.

    ``literal(tok["<img>"], tok["</img>"])``. Ids beside a layout need no `literal`: ``tok["<img>"]
    + embed(...)``.

    Args:
        ids: in prompt order: ids, sequences of ids, or expressions or functions of a `Scope` for
            either.

    Raises:
        SpecError: a string.
    """
    return _make_sequence([layout(part) for part in ids])


class LiteralIds(Layout):
    """Literal ids: one id, several ids, or a layout that a function or `where` chooses.

    What `literal` and `layout` make.
    """

    value: Value

    _word = "literal"

    def _emit(self, scope: Scope) -> Emission:
        value = evaluate_all(self.value, scope)
        if isinstance(value, Layout):
            return value._emit(scope)
        if isinstance(value, list) and _are_plain_ids(value):
            # nearly always, also for whole prompts
            return list(value), bytes(len(value))
        value = to_python(value)
        if not isinstance(value, Sequence):
            value = [value]
        ids = [to_whole(token, self.value, "a token id") for token in value]
        return ids, bytes(len(ids))  # zeros: `_LITERAL`

    def bind(self, scope: Scope) -> Layout:
        value = fold(self.value, scope)
        if isinstance(value, Layout):
            # a layout that the config alone chooses is not bound yet
            return value.bind(scope)
        return super().bind(scope)

    def _write_source(self) -> str:
        return repr(self.value)


def _are_plain_ids(values: list[Any]) -> bool:
    """Return whether values are ids that need no conversion.

    A set of types is the fastest check of a long list; `bool` is another type than `int`.
    """
    types = {type(value) for value in values}
    return types == {int} and min(values) >= 0


def _as_token(value: Any) -> Any:
    if isinstance(value, (Layout, str)) or is_operation(value, "tok.text"):
        remedy = 'Write embed(tok["<image>"]) or embed(cfg.some_token_id).'
        raise SpecError("embed()", "one token id", repr(value), remedy)
    return as_expression(value)


class Embed(Layout):
    """One position that receives an encoder row.

    Attributes:
        token: the placeholder id of that position: ``embed(tok["<image>"])``,
            ``embed(cfg.image_token_id)``.

    Raises:
        SpecError: a string, a text of several tokens, or a layout.
    """

    token: Converted[Count, Any] = parameter(_as_token)

    _word = "embed"

    def _emit(self, scope: Scope) -> Emission:
        token = _evaluate_whole_number(self.token, scope, "a token id")
        return [token], bytes([_EMBED])


class AnyId(Layout):
    """One position of an output, where the model chooses among the ids of a range.

    Attributes:
        start: the first id of the range.
        stop: the id after the last one, as in `range`.
    """

    start: Converted[Count, Any] = parameter(as_expression)
    stop: Converted[Count, Any] = parameter(as_expression)

    _word = "any_id"

    def _emit(self, scope: Scope) -> Emission:
        start = _evaluate_whole_number(self.start, scope, "a token id")
        stop = _evaluate_whole_number(self.stop, scope, "a token id")
        ids = range(start, stop)
        if not ids:
            raise SpecError(repr(self), "at least one id", repr(ids))
        return [ids], bytes([_CHOICE])


class Select(Layout):
    """Ids that are known as a whole, for example the ids of a text that a processor writes.

    Some of them receive encoder rows: ``select(tok.text("<img><pad><pad></img>"),
    embed=tok["<pad>"])``.

    Attributes:
        ids: the ids of all positions.
        embed: the id, or the ids, whose positions receive an encoder row.

    Raises:
        SpecError: a string.
    """

    ids: Converted[LayoutLike, Layout] = parameter(layout)
    embed: Converted[LayoutLike, Layout] = parameter(layout, kw_only=True)

    _word = "select"

    def _emit(self, scope: Scope) -> Emission:
        ids, _ = self.ids._emit(scope)
        embeds, _ = self.embed._emit(scope)
        embed_ids = set(embeds)
        # True is 1, `_EMBED`, and False `_LITERAL`
        return ids, bytes([token in embed_ids for token in ids])


class Repeated(Layout):
    """A layout several times: ``body * count``."""

    body: Layout
    count: Converted[Count, Any] = parameter(as_expression)

    def _emit(self, scope: Scope) -> Emission:
        ids, kinds = self.body._emit(scope)
        count = _evaluate_whole_number(self.count, scope, "a repetition count")
        _check_length(count * len(ids), self)
        return ids * count, kinds * count

    def bind(self, scope: Scope) -> Layout:
        count = fold(self.count, scope)
        if not dependencies(count):  # refused now, whatever the body still waits for
            count = to_whole(count, self.count, "a repetition count")
        return Layout.bind(Repeated(self.body.bind(scope), count), scope)

    def __repr__(self) -> str:
        body = repr(self.body)
        if isinstance(self.body, Sequenced):
            body = f"({body})"
        return f"{body} * {write_operand(self.count)}"


class Sequenced(Layout):
    """One layout after the other: ``a + b``."""

    parts: tuple[Layout, ...]

    def _emit(self, scope: Scope) -> Emission:
        emissions: list[Emission] = []
        length = 0
        for part in self.parts:
            emission = part._emit(scope)
            emissions.append(emission)
            length += len(emission[0])
            _check_length(length, self)
        return _join(emissions)

    def __repr__(self) -> str:
        return " + ".join([repr(part) for part in self.parts]) or "nothing"


nothing: Layout = Sequenced(())
"""The empty layout."""


def _call_body(body: Any) -> Layout:
    """Return the layout of the current element of an `each`.

    It is what the function of that element returns.
    """
    if isinstance(body, Layout):
        return body
    return layout(call_for_element(body))


class Each(Layout):
    """One `body` per element, in order: rows, tiles, frames. `each` nests.

    Attributes:
        over: a sequence, or a number n for the elements 0 .. n-1.
        body: a function from an expression for the current element to the element's layout; called
            once.
        sep: a layout between two elements.
        last: a layout after the last element; without elements it is left out.
    """

    over: Converted[Value, Any] = parameter(as_expression)
    body: Converted[Callable[[Expr], LayoutLike] | Layout, Layout] = parameter(_call_body)
    _: KW_ONLY
    sep: Converted[LayoutLike, Layout] = parameter(layout, default=nothing)
    last: Converted[LayoutLike, Layout] = parameter(layout, default=nothing)

    _word = "each"

    _variable: ClassVar[LoopVariable]
    """The variable in `body`. An instance sets its own; it is no field, since no author writes it,
    and since equal bodies have the same one."""

    def __post_init__(self) -> None:
        self._set(_variable=next_loop_variable())
        super().__post_init__()

    def _rebuild(self, values: Any) -> Any:
        bound = super()._rebuild(values)
        # its body is a layout already, and has the variable of this one
        bound._set(_variable=self._variable)
        return bound

    def _emit(self, scope: Scope) -> Emission:
        over = to_python(evaluate_all(self.over, scope))
        if not isinstance(over, (tuple, range)):
            expected = "the number of elements of each(), or a sequence"
            over = range(to_whole(over, self.over, expected))
        self._count_rounds(over)
        emissions: list[Emission] = []
        length = 0
        for index, element in enumerate(over):
            inner = scope.in_loop(self._variable.depth, element)
            if index > 0:
                separator = self.sep._emit(inner)
                emissions.append(separator)
                length += len(separator[0])
            emission = self.body._emit(inner)
            emissions.append(emission)
            length += len(emission[0])
            _check_length(length, self)
        if emissions:
            emissions.append(self.last._emit(scope))
        return _join(emissions)

    def _count_rounds(self, over: range | tuple[Any, ...]) -> None:
        """Count the rounds of this loop with those of the other loops of the layout.

        Raises:
            SpecError: there are too many.
        """
        if isinstance(over, range):
            # it may be longer than len() can say
            num_elements = over.stop
        else:
            num_elements = len(over)
        num_rounds = _num_rounds.get() + num_elements
        if num_rounds > MAX_ROUNDS:
            expected = f"at most {MAX_ROUNDS} rounds of all each() of a layout"
            raise SpecError(repr(self), expected, str(num_rounds))
        _num_rounds.set(num_rounds)

    @cached_property
    def _dependencies(self) -> frozenset[Dependency]:
        result = set(dependencies(self.over))
        for part in (self.body, self.sep, self.last):
            result |= drop_loop_variable(part.dependencies(), self._variable)
        return frozenset(result)

    def _write_arguments(self) -> Iterator[str]:
        arguments = list(super()._write_arguments())
        arguments[1] = f"lambda {self._variable!r}: {arguments[1]}"
        yield from arguments


class Fixed(Layout):
    """A part of a bound layout that depends on no item."""

    ids: Converted[Sequence[int], list[int]] = parameter(list)
    mask: bytes

    _dependencies = frozenset()

    def _emit(self, scope: Scope) -> Emission:
        return self.ids, self.mask

    def __repr__(self) -> str:
        positions: list[str] = []
        for token, is_embed in zip(self.ids, self.mask, strict=True):
            word = "embed" if is_embed else "literal"
            positions.append(f"{word}({token})")
        return " + ".join(positions) or "nothing"


embed = Embed
any_id = AnyId
select = Select
each = Each


def _find_parts_with_ids(part: Any) -> Iterator[Layout]:
    """Find the parts of a bound layout that have placeholder ids, and those whose ids are known."""
    if isinstance(part, Select) and isinstance(part.embed, Fixed):
        embed_ids = part.embed.ids
        yield Fixed(embed_ids, bytes([_EMBED]) * len(embed_ids))
    elif isinstance(part, (Fixed, Embed, Select)):
        yield part
    else:
        for inner in list_parts(part):
            yield from _find_parts_with_ids(inner)


def may_embed(part: Layout) -> bool:
    """Return whether a layout has embed() positions, or a function that may return some.

    A function makes a layout only where it stands by itself or in a branch of `where`; everywhere
    else it makes numbers or ids.
    """
    if isinstance(part, (Embed, Select)):
        return True
    if isinstance(part, LiteralIds):
        return _may_be_embedding_layout(part.value)
    parts: list[Any] = list(list_parts(part))
    if isinstance(part, Sequenced):
        parts = list(part.parts)
    return any(may_embed(inner) for inner in parts if isinstance(inner, Layout))


def _may_be_embedding_layout(value: Any) -> bool:
    """Return whether the value of an expression may be a layout that `may_embed`."""
    if isinstance(value, Layout):
        return may_embed(value)
    if is_operation(value, "where"):
        _, then, other = value._args
        return _may_be_embedding_layout(then) or _may_be_embedding_layout(other)
    while is_operation(value, ".", "[]", "get"):  # a part of what a function returns
        value = value._args[0]
    return is_operation(value, "function", "later")


# -- prompt updates --------------------------------------------------------------------------------

Target: TypeAlias = tuple[int, ...]
"""The ids that stand for an item in a prompt that is not expanded yet."""


class Update(Part):
    """One way in which an item's layout gets into the prompt.

    These are `replace`, `insert` and `already_expanded`.
    """

    def resolve_target(self, scope: Scope) -> Target:
        """Return the ids of the target, in the scope of one item."""
        return ()

    def list_caller_ids(self, target: Target, tokens: ItemTokens) -> Sequence[int]:
        """Return the ids that a caller writes into the prompt for an item."""
        return ()

    def find_anchor(self, prompt: Sequence[int], target: Target) -> int | None:
        """Return the offset at which the layout is inserted.

        Return None for an update that inserts nothing.
        """
        return None


def _as_target(value: LayoutLike) -> Layout:
    return layout(value, "replace()")


class Replace(Update):
    """The layout takes the place of `target`: one occurrence per item, in the items' order.

    A text is found wherever it stands in a prompt, also where the tokenizer has split it otherwise
    than alone, and no token outside it changes: see `mmkit.plan.text_targets`.

    Attributes:
        target: one token (``tok["<image>"]``), a text (``tok.text("<image>")``), ids, or an
            expression over `item.index` for numbered targets (``tok["<|image_{}|>", item.index +
            1]``).

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """

    target: Converted[LayoutLike, Layout] = parameter(_as_target)

    _word = "replace"

    def find_text(self, scope: Scope) -> str | None:
        """Return the target as a text, without a vocabulary.

        Return None where it is no text in that scope.
        """
        parts: Sequence[Layout] = (self.target,)
        if isinstance(self.target, Sequenced):
            parts = self.target.parts
        text = ""
        for part in parts:
            value: Any = getattr(part, "value", None)
            if not is_operation(value, "tok[]", "tok.text"):
                return None
            try:
                text += fill_template(*evaluate_all(value._args, scope))
            except SpecError:
                return None
        return text

    def resolve_target(self, scope: Scope) -> Target:
        return tuple(self.target.lay(scope).ids)

    def list_caller_ids(self, target: Target, tokens: ItemTokens) -> Sequence[int]:
        return target


class AlreadyExpanded(Update):
    """The caller writes the layouts into the prompt.

    mmkit recognises, counts and checks them, and expands nothing.
    """

    _word = "already_expanded"

    def list_caller_ids(self, target: Target, tokens: ItemTokens) -> Sequence[int]:
        return tokens.ids


def _as_prefix(value: LayoutLike) -> Layout:
    return layout(value, "insert()")


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
    after: Converted[LayoutLike | None, Layout | None] = parameter(
        _as_prefix, default=None, kw_only=True
    )

    _word = "insert"

    def __post_init__(self) -> None:
        super().__post_init__()
        has_start = self.at is not None
        has_prefix = self.after is not None
        if has_start == has_prefix or self.at not in (None, "start"):
            got = ", ".join(self._write_arguments()) or "nothing"
            raise SpecError("insert()", 'at="start" or after=a prefix', got)

    def resolve_target(self, scope: Scope) -> Target:
        if self.after is None:
            return ()
        return tuple(self.after.lay(scope).ids)

    def find_anchor(self, prompt: Sequence[int], target: Target) -> int | None:
        if tuple(prompt[: len(target)]) == target:
            return len(target)
        return None


class EndingWith(Part):
    """Every prompt ends with these ids, for example ``tok["<sep>"]``.

    mmkit appends them where the prompt does not end with them already. Without ids it is the prompt
    itself: ``decoder_prompt=ending_with()`` gives the decoder the caller's prompt.

    Raises:
        SpecError: a bare string, which could mean one token or a text.
    """

    ids: Converted[LayoutLike, Layout] = parameter(layout, default=nothing)

    _word = "ending_with"

    def _write_arguments(self) -> Iterator[str]:
        if self.ids != nothing:
            yield write_source(self.ids)


replace = Replace
already_expanded = AlreadyExpanded
insert = Insert
ending_with = EndingWith


# -- evaluated layouts -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ItemTokens:
    """An evaluated layout: the tokens of one item in a prompt.

    Attributes:
        ids: token ids, in prompt order. Requests share the list: do not change it.
        mask: one byte per id, 1 where the position receives an encoder row, else 0.
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
        """Boolean mask (len(ids),) of the positions that receive an encoder row.

        It is None, as vLLM expects, where every position receives one.
        """
        if self.num_embeds == len(self.mask):
            return None
        return torch.frombuffer(bytearray(self.mask), dtype=torch.bool)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The runs of positions that receive encoder rows: offset and length of each."""
        return [(run.start(), len(run[0])) for run in re.finditer(b"\x01+", self.mask)]

    @cached_property
    def id_string(self) -> str:
        """The ids as a string; see `make_id_string`."""
        return make_id_string(self.ids)

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


def make_id_string(ids: Sequence[int]) -> str:
    """Return ids as a string, one character each: ``[5, 97]`` as ``"\x05a"``.

    Python finds one string in another in linear time, and has no such search for lists.

    No vocabulary has more ids than there are characters, 1,114,112. Ids of surrogates, which are no
    characters of a text, pass, too.
    """
    text, _ = _decode_utf_32(array("I", ids), "surrogatepass", True)
    return text


if sys.byteorder == "little":
    _decode_utf_32 = codecs.utf_32_le_decode
else:
    _decode_utf_32 = codecs.utf_32_be_decode


# -- evaluation ------------------------------------------------------------------------------------

MAX_IDS = 1 << 22
"""The ids of the longest layout, which is longer than any context: a count from a caller's
arguments must not take all memory."""

MAX_ROUNDS = 1 << 17
"""The rounds of all `each` of one layout together: without a bound, two of them, one inside the
other, would take a year."""

_num_rounds: ContextVar[int] = ContextVar("rounds of each() in the current layout", default=0)


def _join(emissions: list[Emission]) -> Emission:
    """Return what several layouts emit, one after the other."""
    ids: list[Any] = []
    for emitted_ids, _ in emissions:
        ids += emitted_ids
    return ids, b"".join([kinds for _, kinds in emissions])


def _evaluate_whole_number(value: Any, scope: Scope, what: str) -> int:
    return to_whole(evaluate_all(value, scope), value, what)


def _check_length(length: int, source: Layout) -> None:
    if length > MAX_IDS:
        raise SpecError(repr(source), f"at most {MAX_IDS} ids", str(length))


def to_whole(value: Any, source: Any, what: str) -> int:
    """Return a whole number >= 0 as an int, also of a tensor with one element.

    Args:
        value: the number.
        source: the expression that it came from, for the error.
        what: what the number is, for the error.

    Raises:
        SpecError: another value.
    """
    if type(value) is int and value >= 0:
        return value
    value = to_python(value)
    if isinstance(value, bool) or not isinstance(value, (int, Integral)) or value < 0:
        remedy = ""
        if isinstance(value, float):
            remedy = "Use math.floor(), or // and ceil_div() of whole numbers."
        raise SpecError(repr(source), f"{what}, a whole number >= 0", repr(value), remedy)
    return int(value)

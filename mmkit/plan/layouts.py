"""The layouts and targets of the items of one modality."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, MmkitError, SpecError
from ..language.expr import COUNT, INDEX, Dependency, Expr, Scope, evaluate, to_python
from ..language.layout import Insert, ItemTokens, Layout, Replace, Target, to_whole
from ..language.node import dependencies
from ..language.vocabulary import check_spec_ids
from .memo import Memo
from .parsing import Taken
from .placement import ItemLayout, ResolvedUpdate

if TYPE_CHECKING:
    from .modality import BoundModality

_LAYOUT_IDS = 1 << 20
"""Token ids of the layouts that are cached per modality, some ten megabytes."""

_KEYS = 256
"""Values of the largest tensor that tells one layout from another: one that depends on more is
evaluated for each item."""

_NUMBERED = 64
"""Numbered placeholders (``<|image_1|>``) that are known before there is an item."""


class LayoutEvaluator:
    """Evaluates the layout of the raw items of a modality, and their targets, once per geometry.

    Attributes:
        layout: the bound layout.
        fields: names of the processed fields that the layout or the targets read; None where a
            function may read any.
        varies: whether items differ in their layouts or targets.
        depends_on_index: whether an item's layout or target depends on its position among the
            items.
        is_opaque: whether a function makes the layout or a target.
        reads_index: whether a layout, by declaration, depends on an item's position.
        by_company: whether a layout or a target depends, by declaration, on an item's position or
            on the number of items.
        fixed_rows: the encoder rows of every item; None where they vary.
        shared: the alternatives of every item, once they are known; None where they vary.
    """

    def __init__(self, modality: BoundModality, layout: Layout, vocab_size: int) -> None:
        self._modality, self.layout, self._vocab_size = modality, layout, vocab_size
        where = f"{modality.where}, layout"
        for part in layout.find_varying_parts():
            expected = "placeholder ids that no item chooses"
            remedy = "Choose among embed() of several ids by where(): prompts are guarded by ids."
            raise SpecError(where, expected, repr(part), remedy)
        for fixed in layout.find_fixed_parts():
            check_spec_ids(fixed.ids, vocab_size, where)
            self._guard(fixed.embed_ids)
            modality.literal_ids |= fixed.literal_ids
        own, grid = layout.dependencies(), dependencies(modality.grid)
        read = own.union(*(update.dependencies() for update in modality.updates))
        # what tells one geometry from another
        self._told_by = [dependency.expr for dependency in read | grid]
        self._read_by_grid = _fields_read(grid)
        self.is_opaque = any(
            dependency.root == "function" for dependency in read
        )  # it may read anything
        names = _fields_read(read)
        self.fields = None if self.is_opaque or None in names else names
        self.varies = self.is_opaque or bool(self._told_by)
        self.depends_on_index = self.is_opaque or INDEX in read
        self.reads_index = INDEX in own
        self.by_company = not read.isdisjoint((INDEX, COUNT))
        self.fixed_rows = None if own else layout.lay(modality.static).num_embeds
        self.shared: ItemLayout | None = None
        self._least_length: int | None = None
        self._finds_least = False
        self._memo = Memo(_LAYOUT_IDS, lambda known: len(known.tokens) + _KEYS)

    def alternatives(self, scope: Scope) -> ItemLayout:
        """The layout of one item, and the ways in which it may get into a prompt.

        Raises:
            SpecError: an id outside the vocabulary, or declared positions that do not fit.
            InputError: an item without any embed() position.
        """
        # positions may read fields that the layout does not need, and that are not computed yet
        is_whole = self._read_by_grid.issubset(scope.fields or ())
        if self.is_opaque:
            return self._evaluate(scope, is_whole)
        key = (is_whole, *[_geometry(part, scope) for part in self._told_by])
        return self._memo.get(key, lambda: self._evaluate(scope, is_whole))

    def _evaluate(self, scope: Scope, is_whole: bool) -> ItemLayout:
        modality = self._modality
        at = modality.at("layout")
        with at, refusals_of_items(modality, scope):
            placeholder = self.layout.lay(scope)
        if modality.spec.has_positions and not placeholder.num_embeds:
            raise self._without_positions(scope, placeholder)
        check_spec_ids(placeholder.ids, self._vocab_size, at.where)
        self._guard(placeholder.embed_ids)
        if modality.guarded is None:
            modality.literal_ids |= placeholder.literal_ids
        if modality.grid and is_whole:
            self._sizes(scope, placeholder)
        ways = []
        at = modality.at("update")
        for update in modality.updates:
            with at:
                target = update.resolve_target(scope)
            check_spec_ids(target, self._vocab_size, at.where)
            if isinstance(update, Replace) and not target:
                raise SpecError(at.where, "a target of at least one token", "none")
            ways.append(ResolvedUpdate(update, target))
        return ItemLayout(placeholder, ways)

    def _without_positions(self, scope: Scope, placeholder: ItemTokens) -> InputError:
        """The refusal of an item without any position that receives an encoder row."""
        modality = self._modality
        expected, got = "at least one placeholder per item", f"none for {_sized(scope.item)}"
        if literal := len(placeholder):
            got = f"{literal} other token{'' if literal == 1 else 's'} for {_sized(scope.item)}"
        if modality.guarded is not None:  # an item of a request
            remedy = "Send a larger one."
            if least := self._find_least_length():
                remedy = f"Send one of at least {least} samples."
            return InputError(_where(modality, scope), expected, got, remedy)
        remedy = "Round up by ceil_div(), or state a larger least size in the item type."
        return InputError(f"{modality.where}, layout", expected, got, remedy)

    def _find_least_length(self) -> int | None:
        """Return the least number of samples of audio that has a position, found by halves; None
        for other items, and while it is being found."""
        modality = self._modality
        if modality.item.media != "audio" or self._least_length is not None or self._finds_least:
            return self._least_length
        self._finds_least = True
        try:
            too_short, enough = 0, modality.item.largest[0][0]
            while enough - too_short > 1:
                length = (too_short + enough) // 2
                try:
                    list(modality.layouts(Taken.whole([modality.item.blank(length)])))
                except (InputError, SpecError):
                    too_short = length
                else:
                    enough = length
            self._least_length = enough
        finally:
            self._finds_least = False
        return self._least_length

    def _guard(self, ids: Collection[int]) -> None:
        """Add placeholder ids to those against which prompts are guarded, and which are never
        sampled. Once a plan has these, other ids are refused.

        Raises:
            SpecError: names the other ids.
        """
        guarded = self._modality.guarded
        if guarded is None:
            self._modality.embed_ids |= set(ids)
            return
        if more := sorted(set(ids) - guarded):
            expected = "embed() of ids that the largest or the smallest item has, too"
            remedy = "State the layout as an expression: no prompt is guarded against other ids."
            if self._modality.is_of_request:
                expected = "embed() of ids that items have without these options, too"
                remedy = "No prompt is guarded against other ids."
            raise SpecError(f"{self._modality.where}, layout", expected, repr(more), remedy)

    def targets(self) -> dict[Target, bool]:
        """The targets that are known without an item, each with whether it stands for items only.
        Numbered targets (``<|image_1|>``) and those with a special token do; an ordinary word may
        also stand in a prompt without items.
        """
        static, limit = self._modality.static, self._modality.limit
        known: dict[Target, bool] = {}
        for update in self._modality.updates:
            numbered = update.dependencies() == {INDEX}
            if not isinstance(update, Replace) or (update.dependencies() and not numbered):
                continue
            most = min(_NUMBERED if limit is None else limit, _NUMBERED) if numbered else 1
            scopes = [static.for_item(SimpleNamespace(index=index), None) for index in range(most)]
            if numbered and static.tok is not None:
                static.tok.learn([*filter(None, map(update.find_text, scopes))])
            with suppress(SpecError):  # the vocabulary ends somewhere
                for target in map(update.resolve_target, scopes):
                    known[target] = numbered or self._is_special(target)
        return known

    def prefixes(self) -> list[Target]:
        """Return the prefixes after which layouts are inserted, as far as they are known without an
        item."""
        inserts = [update for update in self._modality.updates if isinstance(update, Insert)]
        return [
            update.resolve_target(self._modality.static)
            for update in inserts
            if not update.dependencies()
        ]

    def _is_special(self, target: Target) -> bool:
        """Whether an ordinary text never contains a target."""
        tok = self._modality.static.tok
        return len(target) == 1 if tok is None else not tok.special_ids.isdisjoint(target)

    def rows(self, fields: Mapping[str, Any]) -> int:
        """Encoder rows of an item by its fields alone."""
        scope = self._modality.scope(SimpleNamespace(), 0, fields)
        return self.alternatives(scope).tokens.num_embeds

    def grids(self, fields: Mapping[str, Any], mask: Any) -> list[tuple[int, Any]]:
        """The M-RoPE positions of the encoder rows of an item.

        Args:
            fields: its processed fields.
            mask: which positions of its layout receive encoder rows, an array or a list.

        Returns:
            For each run of such positions the offset in the layout, and integers (3, length): time,
            height, width, counted from 0.

        Raises:
            SpecError: the grid has another number of positions than the layout has rows.
        """
        placeholder = ItemTokens([], np.asarray(mask, np.bool_).tobytes())
        scope = self._modality.scope(SimpleNamespace(), 0, fields)
        t, h, w, *scale = self._sizes(scope, placeholder)
        starts = [start for start, _ in placeholder.runs]
        if len(starts) != 1:
            return [(start, np.indices((1, h, w)).reshape(3, -1)) for start in starts]
        grid = np.indices((t, h, w))
        if scale:
            grid[0] = (grid[0] * scale[0]).astype(np.int64)
        return [(starts[0], grid.reshape(3, -1))]

    def _sizes(self, scope: Scope, placeholder: ItemTokens) -> list[Any]:
        """The sizes of an item's grid, compared with the mask of its layout: one run of all its
        rows, or one of each time."""
        grid = self._modality.grid
        with self._modality.at("positions"):
            values = [to_python(evaluate(part, scope)) for part in grid]
            pairs = zip(values[:3], grid, strict=False)
            t, h, w = (to_whole(value, part, "a size of a grid") for value, part in pairs)
            lengths = [length for _, length in placeholder.runs]
            if lengths not in ([t * h * w], [h * w] * t):
                expected = f"embed() positions for a grid of {(t, h, w)}"
                raise SpecError("layout", expected, f"runs of {lengths}")
        return [t, h, w, *values[3:]]


class EmbeddingLayoutEvaluator(LayoutEvaluator):
    """The same for precomputed embeddings, whose fields come from the caller."""

    def alternatives(self, scope: Scope) -> ItemLayout:
        """As for raw items.

        Raises:
            InputError: any mistake.
        """
        try:
            return super().alternatives(scope)
        except SpecError as error:
            where, got = self._modality.where, str(error).rstrip(".")
            raise InputError(where, "embeddings that can be placed", got) from error


class TooManyRows(InputError):
    """An item has more encoder rows than the spec's largest item."""


def _where(modality: BoundModality, scope: Scope) -> str:
    """The path of the item of a scope."""
    index = getattr(scope.item, "index", None)
    return modality.where if index is None else f"{modality.where}[{index}]"


def _sized(facts: Any) -> str:
    """An item by its sizes, for messages: ``an item of shape (1, 3)``."""
    told = {name: value for name, value in vars(facts).items() if name not in ("index", "count")}
    if "shape" in told:
        return f"an item of shape {tuple(told['shape'])}"
    sizes = [f"{name} {value}" for name, value in told.items() if type(value) is int]
    return f"an item of {' and '.join(sizes)}" if sizes else "an item"


@contextmanager
def refusals_of_items(modality: BoundModality, scope: Scope) -> Iterator[None]:
    """A context in which a ValueError of a function of the spec, or of the library that it calls,
    refuses the item of a request. What the largest and the smallest item cannot pass is a mistake
    of the spec.

    Raises:
        InputError: in place of the SpecError that names the expression and its values.
    """
    try:
        yield
    except (SpecError, ValueError) as error:
        cause: BaseException = error
        while isinstance(cause, MmkitError) and cause.__cause__ is not None:
            cause = cause.__cause__
        is_refusal = isinstance(cause, ValueError) and not isinstance(cause, MmkitError)
        if modality.guarded is None or not is_refusal:
            raise
        got = f"{_sized(scope.item)}: {' '.join(str(cause).split()).rstrip('.')}"
        raise InputError(_where(modality, scope), "an item that has a layout", got) from error


def _fields_read(dependencies: Iterable[Dependency]) -> frozenset[Any]:
    """The names of fields; None for all of them."""
    return frozenset(next(iter(one.keys), None) for one in dependencies if one.root == "fields")


def _geometry(part: Expr, scope: Scope) -> Any:
    """The value of an expression as part of a key.

    None where it has no value: a layout that needs the value raises, and one that guards it by
    `where` does not need it. A large tensor is no key.
    """
    try:
        value = evaluate(part, scope)
    except SpecError:
        return None
    if type(value) is int:  # nearly always
        return value
    if math.prod(getattr(value, "shape", ())) > _KEYS:
        return []  # cannot be hashed
    return to_python(value)

"""The layouts of the items of one modality, and their targets."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, SpecError, locate_errors
from ..language.expr import COUNT, INDEX, Scope, evaluate
from ..language.layout import Insert, ItemTokens, Layout, Replace, Target, Update, to_whole
from ..language.node import Dependency, Node, dependencies
from ..language.scope import to_python
from ..language.vocabulary import check_spec_ids, describe_ids
from .guard import IdRecorder, PlaceholderGuard
from .memo import NOT_CACHEABLE, Memo, Once
from .placement import ItemLayout, ResolvedUpdate
from .scopes import ItemScopes, describe_item, locate_texts, refuse_item
from .text_targets import spells_target

MAX_CACHED_IDS = 1 << 20
"""Token ids of the layouts that are cached per modality, some ten megabytes."""

MAX_KEY_VALUES = 256
"""Values of the largest tensor, or characters of the longest text, that tell layouts apart.

A layout that depends on more is evaluated for each item.
"""

MAX_NUMBERED_TARGETS = 64
"""Numbered targets (``<|image_1|>``) that are known before there is an item."""


class TooManyRows(InputError):
    """An item has more encoder rows than the spec's largest item."""


class NoEncoderRows(InputError):
    """An item of a request has no position that receives an encoder row.

    Attributes:
        expected: what a layout needs.
        got: the layout, and the sizes of the item.
    """

    def __init__(self, where: str, expected: str, got: str) -> None:
        super().__init__(where, expected, got, "Send a larger one.")
        self.expected = expected
        self.got = got


class Grid(NamedTuple):
    """The grid of M-RoPE positions of one item.

    Attributes:
        time: its extent in time.
        height: its rows.
        width: its columns.
        time_scale: by which positions in time are multiplied; 1 where the spec states none.
    """

    time: int
    height: int
    width: int
    time_scale: Any


@dataclass(frozen=True, eq=False)
class IndexedLayout(ItemLayout):
    """The layout of an item whose layout or targets depend on its index.

    It keeps the scope of the item, and with it the item's tensors, alive.

    Attributes:
        layout_at_index: the layout at the item's own index, which items of one geometry share.
        scope: the scope of the item.
        evaluator: evaluates the layout in another scope.
    """

    layout_at_index: ItemLayout
    scope: Scope
    evaluator: LayoutEvaluator

    def for_index(self, index: int) -> ItemLayout:
        if self.scope.item.index == index:
            return self.layout_at_index
        facts = dict(vars(self.scope.item))
        facts["index"] = index
        return self.evaluator.evaluate(replace(self.scope, item=SimpleNamespace(**facts)))


@dataclass(frozen=True, eq=False)
class LayoutEvaluator:
    """Evaluates the layouts of the items of a modality, and their targets, once per geometry.

    Attributes:
        where: names the modality in errors.
        layout: the bound layout.
        updates: the bound alternatives of `update`.
        grid: the sizes of the grid of M-RoPE positions; empty where the spec has none.
        scopes: makes the scopes of items.
        guard: checks the placeholder ids of layouts; while the spec is bound, it records them.
        vocab_size: number of ids of the language model.
        limit: the most items in one request, or None.
        is_ids_only: whether items become ids of the vocabulary, and nothing of them reaches the
            model.
        requires_rows: whether each item needs an embed() position.
        is_of_embeddings: whether the items are precomputed embeddings: their fields come from the
            caller, so that every mistake is the caller's.
        memo: caches evaluated layouts.
        constant_layout: the layout of every item, where items do not differ.
    """

    where: str
    layout: Layout
    updates: Sequence[Update]
    grid: Sequence[Any]
    scopes: ItemScopes
    guard: IdRecorder | PlaceholderGuard
    vocab_size: int
    limit: int | None
    is_ids_only: bool
    requires_rows: bool
    is_of_embeddings: bool
    memo: Memo
    constant_layout: Once[ItemLayout]

    # -- one item ----------------------------------------------------------------------------------

    def lay_out(
        self, value: Any, index: int, count: int, fields: Mapping[str, Any] | None
    ) -> ItemLayout:
        """Return the layout of one item.

        Args:
            value: the canonical item, or precomputed embeddings.
            index: its position among the items of the modality.
            count: the number of items of the modality in the request.
            fields: its processed fields, as far as layouts read them.

        Raises:
            InputError: see `evaluate`.
            SpecError: see `evaluate`.
        """
        constant = self.constant_layout.value
        if constant is not None:
            return constant
        scope = self.scopes.make(value, index, fields, count)
        layout = self.evaluate(scope)
        if self.depends_on_index:
            return IndexedLayout(layout.tokens, layout.updates, layout, scope, self)
        if not self.varies:
            self.constant_layout.remember(layout)
        return layout

    def evaluate(self, scope: Scope) -> ItemLayout:
        """Return the layout in the scope of one item.

        Raises:
            SpecError: an id outside the vocabulary, or declared positions that do not fit.
            InputError: an item without any embed() position; any mistake in precomputed embeddings.
        """
        if not self.is_of_embeddings:
            return self._evaluate_or_reuse(scope)
        try:
            return self._evaluate_or_reuse(scope)
        except SpecError as error:
            got = str(error).rstrip(".")
            raise InputError(self.where, "embeddings that can be placed", got) from error

    def count_rows(self, fields: Mapping[str, Any]) -> int:
        """Return the number of encoder rows of an item by its fields alone."""
        return self.evaluate(self._make_scope(fields)).tokens.num_embeds

    def evaluate_positions(self, fields: Mapping[str, Any], mask: Any) -> list[tuple[int, Any]]:
        """Return the M-RoPE positions of the encoder rows of an item.

        Args:
            fields: its processed fields.
            mask: which positions of its layout receive encoder rows, an array or a list.

        Returns:
            For each run of such positions the offset in the layout, and integers (3, length): time,
            height, width, counted from 0.

        Raises:
            SpecError: the grid has another number of positions than the layout has rows.
        """
        tokens = ItemTokens([], np.asarray(mask, np.bool_).tobytes())
        grid = self._evaluate_grid(self._make_scope(fields), tokens)
        starts = [start for start, _ in tokens.runs]
        if len(starts) == 1:
            positions = np.indices((grid.time, grid.height, grid.width))
            if grid.time_scale != 1:
                positions[0] = (positions[0] * grid.time_scale).astype(np.int64)
            return [(starts[0], positions.reshape(3, -1))]
        positions_of_frame = np.indices((1, grid.height, grid.width)).reshape(3, -1)
        return [(start, positions_of_frame) for start in starts]

    # -- what depends on no item -------------------------------------------------------------------

    @cached_property
    def fields(self) -> frozenset[str] | None:
        """The names of the processed fields that the layout or the targets read.

        None where a function may read any.
        """
        if self.is_opaque:
            return None
        return _find_field_names(self._dependencies)

    def find_unknown_reads(
        self, known_fields: Collection[str], fields_of_known_shape: Collection[str]
    ) -> list[str]:
        """Return the source of what the layout and the targets read of fields that are not known.

        What a function reads is not among it.

        Args:
            known_fields: the names of the fields that are known.
            fields_of_known_shape: the names of fields of which only the shape is known.
        """
        reads = set()
        for dependency in self._dependencies:
            if dependency.root != "fields":
                continue
            name, *attributes = dependency.keys or (None,)
            is_shape = name in fields_of_known_shape and attributes[:1] == ["shape"]
            if name not in known_fields and not is_shape:
                reads.add(repr(dependency))
        return sorted(reads)

    @cached_property
    def is_opaque(self) -> bool:
        """Whether a function makes the layout or a target: it may read anything."""
        return any(dependency.root == "function" for dependency in self._dependencies)

    @cached_property
    def varies(self) -> bool:
        """Whether items differ in their layouts or targets."""
        return self.is_opaque or bool(self._key_parts)

    @cached_property
    def depends_on_index(self) -> bool:
        """Whether an item's layout or target may depend on its position among the items."""
        return self.is_opaque or INDEX in self._dependencies

    @cached_property
    def reads_index(self) -> bool:
        """Whether the layout, by declaration, depends on an item's position."""
        return INDEX in self.layout.dependencies()

    @cached_property
    def depends_on_other_items(self) -> bool:
        """Whether the layout or a target depends, by declaration, on the other items.

        They decide an item's position and the number of items.
        """
        return INDEX in self._dependencies or COUNT in self._dependencies

    @cached_property
    def fixed_rows(self) -> int | None:
        """The number of encoder rows of every item; None where it varies."""
        if self.layout.dependencies():
            return None
        return self.layout.lay(self.scopes.static).num_embeds

    def targets(self) -> dict[Target, bool]:
        """Return the targets that depend on no item, each with whether it is reserved for items.

        Numbered targets (``<|image_1|>``) and targets with a special token are reserved. An
        ordinary word may also stand in a prompt without items.
        """
        targets: dict[Target, bool] = {}
        for update in self.updates:
            if not isinstance(update, Replace):
                continue
            is_numbered = update.dependencies() == {INDEX}
            if is_numbered:
                for target in self._resolve_numbered_targets(update):
                    targets[target] = True
            elif not update.dependencies():
                for target in self._resolve_targets(update, 1):
                    targets[target] = self._is_special(target)
        return targets

    def prefixes(self) -> list[Target]:
        """Return the prefixes after which layouts are inserted, if they depend on no item."""
        prefixes = []
        for update in self.updates:
            if isinstance(update, Insert) and not update.dependencies():
                prefixes.append(update.resolve_target(self.scopes.static))
        return prefixes

    def check_fixed_ids(self) -> None:
        """Check the ids that depend on no item.

        Raises:
            SpecError: an item chooses placeholder ids; an id outside the vocabulary; a placeholder
                id that is not guarded.
        """
        where = f"{self.where}, layout"
        for part in self.layout.find_varying_parts():
            expected = "placeholder ids that no item chooses"
            remedy = "Choose among embed() of several ids by where(): prompts are guarded by ids."
            raise SpecError(where, expected, repr(part), remedy)
        for fixed in self.layout.find_fixed_parts():
            check_spec_ids(fixed.ids, self.vocab_size, where)
            self.guard.check_tokens(fixed, self.where)

    # -- machinery ---------------------------------------------------------------------------------

    @cached_property
    def _dependencies(self) -> frozenset[Dependency]:
        """What the layout and the targets depend on."""
        inputs = self.layout.dependencies()
        for update in self.updates:
            inputs |= update.dependencies()
        return inputs

    @cached_property
    def _key_parts(self) -> Sequence[Node]:
        """The expressions whose values tell one geometry from another."""
        inputs = self._dependencies | dependencies(self.grid)
        return [dependency.expr for dependency in inputs]

    @cached_property
    def _grid_fields(self) -> frozenset[str] | None:
        """The names of the fields that the grid reads; None where it may read any field."""
        return _find_field_names(dependencies(self.grid))

    def _has_grid_fields(self, scope: Scope) -> bool:
        """Return whether all fields that the grid reads are computed.

        The grid may read fields that the layout does not need.
        """
        if self._grid_fields is None:
            return False
        return self._grid_fields.issubset(scope.fields or ())

    def _evaluate_or_reuse(self, scope: Scope) -> ItemLayout:
        """Return the layout in a scope; items of one geometry share it."""
        has_grid_fields = self._has_grid_fields(scope)
        if self.is_opaque:
            return self._evaluate(scope, has_grid_fields)
        key: list[Any] = [has_grid_fields]
        for part in self._key_parts:
            key.append(_evaluate_key_part(part, scope))
        return self.memo.get(tuple(key), lambda: self._evaluate(scope, has_grid_fields))

    def _evaluate(self, scope: Scope, has_grid_fields: bool) -> ItemLayout:
        where = f"{self.where}, layout"
        index = vars(scope.item).get("index")
        refuse: AbstractContextManager[None] = nullcontext()
        if self.guard.is_complete:
            refuse = refuse_item(self.where, index, scope.item)
        with locate_errors(where), refuse, locate_texts(self._name_item(scope)):
            tokens = self.layout.lay(scope)
        if self.requires_rows and not tokens.num_embeds:
            raise self._make_error_without_rows(scope, tokens)
        check_spec_ids(tokens.ids, self.vocab_size, where)
        self.guard.check_tokens(tokens, self.where)
        if self.grid and has_grid_fields:
            self._evaluate_grid(scope, tokens)
        updates: list[ResolvedUpdate] = []
        for update in self.updates:
            updates.append(self._resolve(update, scope))
        if self.is_ids_only:
            self._check_ids_only(scope, tokens, updates)
        return ItemLayout(tokens, updates)

    def _resolve(self, update: Update, scope: Scope) -> ResolvedUpdate:
        """Return one alternative of `update` with the ids of its target."""
        where = f"{self.where}, update"
        with locate_errors(where), locate_texts(self._name_item(scope)):
            target = update.resolve_target(scope)
        check_spec_ids(target, self.vocab_size, where)
        if isinstance(update, Replace) and not target:
            raise SpecError(where, "a target of at least one token", "none")
        return ResolvedUpdate(update, target)

    def _check_ids_only(
        self, scope: Scope, tokens: ItemTokens, updates: Sequence[ResolvedUpdate]
    ) -> None:
        """Refuse ids that do not stand for their item when they are sent without it.

        An item leaves nothing but its ids in an expanded prompt. Its own target among them would be
        one more item, and a placeholder one that has no rows.

        Raises:
            InputError: there are no ids, or such ids. While the spec is bound, report_as_spec_error
                makes a SpecError of it.
        """
        where = self._name_item(scope)
        if not tokens.ids:
            got = f"none for {describe_item(scope.item)}"
            raise InputError(where, "at least one token per item", got, "Send a larger one.")
        tok = self.scopes.static.tok
        for update, target in updates:
            if isinstance(update, Replace) and spells_target(tokens.ids, target, tok):
                expected = (
                    f"an item whose layout is without {describe_ids(target, tok)}, its target"
                )
                remedy = "Begin the layout with another token than the target."
                raise InputError(where, expected, "one with it", remedy)
        placeholders = self.guard.find_placeholders(tokens.ids)
        if placeholders:
            expected = "an item whose layout is without placeholders"
            raise InputError(where, expected, describe_ids(placeholders[:1], tok))

    def _name_item(self, scope: Scope) -> str:
        """Return the name of an item of a request for errors; while the spec is bound, its part."""
        index = vars(scope.item).get("index")
        if not self.guard.is_complete:
            return f"{self.where}, layout"
        return self.where if index is None else f"{self.where}[{index}]"

    def _make_error_without_rows(self, scope: Scope, tokens: ItemTokens) -> InputError:
        """Return the refusal of an item without any position that receives an encoder row."""
        expected = "at least one placeholder per item"
        got = f"none for {describe_item(scope.item)}"
        literal_count = len(tokens)
        if literal_count:
            word = "token" if literal_count == 1 else "tokens"
            got = f"{literal_count} other {word} for {describe_item(scope.item)}"
        if not self.guard.is_complete:
            remedy = "Round up by ceil_div(), or state a larger least size in the item type."
            return InputError(f"{self.where}, layout", expected, got, remedy)
        return NoEncoderRows(self._name_item(scope), expected, got)

    def _resolve_numbered_targets(self, update: Replace) -> list[Target]:
        count = MAX_NUMBERED_TARGETS
        if self.limit is not None:
            count = min(count, self.limit)
        tok = self.scopes.static.tok
        if tok is not None:
            texts: list[str] = []
            for scope in self._make_scopes_of_facts(count):
                text = update.find_text(scope)
                if text:
                    texts.append(text)
            tok.learn(texts)
        return self._resolve_targets(update, count)

    def _resolve_targets(self, update: Replace, count: int) -> list[Target]:
        """Return the targets of the first items, as far as the vocabulary has them."""
        targets: list[Target] = []
        try:
            for scope in self._make_scopes_of_facts(count):
                targets.append(update.resolve_target(scope))
        except SpecError:
            pass  # the vocabulary ends somewhere
        return targets

    def _make_scopes_of_facts(self, count: int) -> list[Scope]:
        """Return scopes of items of which only the index is known."""
        scopes: list[Scope] = []
        for index in range(count):
            scopes.append(self.scopes.static.for_item(SimpleNamespace(index=index), None))
        return scopes

    def _is_special(self, target: Target) -> bool:
        """Return whether an ordinary text never contains a target."""
        tok = self.scopes.static.tok
        if tok is None:
            return len(target) == 1
        return not tok.special_ids.isdisjoint(target)

    def _make_scope(self, fields: Mapping[str, Any]) -> Scope:
        """Return the scope of an item of which only the fields are known."""
        return self.scopes.make(SimpleNamespace(), 0, fields)

    def _evaluate_grid(self, scope: Scope, tokens: ItemTokens) -> Grid:
        """Return an item's grid, after a check that it has the positions of the layout's rows.

        The rows are one run, or one run for each step in time.

        Raises:
            SpecError: the grid has another number of positions.
        """
        with locate_errors(f"{self.where}, positions"):
            values = [to_python(evaluate(part, scope)) for part in self.grid]
            sizes = []
            for value, part in zip(values[:3], self.grid, strict=False):
                sizes.append(to_whole(value, part, "a size of a grid"))
            time, height, width = sizes
            lengths = [length for _, length in tokens.runs]
            lengths_of_frames = [height * width] * time
            if lengths != [time * height * width] and lengths != lengths_of_frames:
                expected = f"embed() positions for a grid of {(time, height, width)}"
                raise SpecError("layout", expected, f"runs of {lengths}")
        time_scale = values[3] if len(values) > 3 else 1
        return Grid(time, height, width, time_scale)


def make_evaluator(
    where: str,
    layout: Layout,
    updates: Sequence[Update],
    grid: Sequence[Any],
    scopes: ItemScopes,
    guard: IdRecorder | PlaceholderGuard,
    *,
    vocab_size: int,
    limit: int | None,
    is_ids_only: bool,
    requires_rows: bool,
    is_of_embeddings: bool,
) -> LayoutEvaluator:
    """Return the evaluator of the layouts of a modality, whose attributes the arguments are.

    Raises:
        SpecError: see `LayoutEvaluator.check_fixed_ids`.
    """
    evaluator = LayoutEvaluator(
        where=where,
        layout=layout,
        updates=updates,
        grid=grid,
        scopes=scopes,
        guard=guard,
        vocab_size=vocab_size,
        limit=limit,
        is_ids_only=is_ids_only,
        requires_rows=requires_rows,
        is_of_embeddings=is_of_embeddings,
        memo=Memo(MAX_CACHED_IDS, _size_in_memo),
        constant_layout=Once(),
    )
    evaluator.check_fixed_ids()
    return evaluator


def _size_in_memo(layout: ItemLayout) -> int:
    """Return the size of a layout in ids; its key counts as well."""
    return len(layout.tokens) + MAX_KEY_VALUES


def _find_field_names(inputs: Iterable[Dependency]) -> frozenset[str] | None:
    """Return the names of the fields among dependencies; None where they are all fields."""
    names: set[str] = set()
    for dependency in inputs:
        if dependency.root != "fields":
            continue
        if not dependency.keys:
            return None
        names.add(dependency.keys[0])
    return frozenset(names)


def _evaluate_key_part(part: Node, scope: Scope) -> Any:
    """Return the value of an expression as part of a key.

    None where it has no value: a layout that needs the value raises, and one that guards it by
    `where` does not need it. A large tensor and a long text are no keys.
    """
    try:
        value = evaluate(part, scope)
    except SpecError:
        return None
    if type(value) is int:  # nearly always
        return value
    if isinstance(value, (SimpleNamespace, tuple)):
        return _make_key_of_facts(value)
    num_values = len(value) if isinstance(value, str) else math.prod(getattr(value, "shape", ()))
    if num_values > MAX_KEY_VALUES:
        return NOT_CACHEABLE
    return to_python(value)


def _make_key_of_facts(value: Any) -> Any:
    """Return the facts of a part, or of the elements of a list, as part of a key.

    Where they are many, they are no key.
    """
    leaves: list[Any] = []
    _collect_facts(value, leaves)
    num_values = 0
    for leaf in leaves:
        num_values += len(leaf) if isinstance(leaf, str) else 1
    if num_values > MAX_KEY_VALUES:
        return NOT_CACHEABLE
    return tuple(leaves)


def _collect_facts(value: Any, leaves: list[Any]) -> None:
    """Append the values in facts to a list, each container behind its kind and its length.

    So different facts give different lists.
    """
    if isinstance(value, SimpleNamespace):
        inner = list(vars(value).values())
    elif isinstance(value, tuple):
        inner = list(value)
    else:
        leaves.append(to_python(value))
        return
    leaves.append(type(value))
    leaves.append(len(inner))
    for part in inner:
        _collect_facts(part, leaves)

"""A modality: one kind of item, declared once.

Everything that vLLM needs is derived from the declaration.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, NamedTuple

from ..errors import SpecError
from .expr import (
    COUNT,
    INDEX,
    Condition,
    Count,
    Expr,
    as_expression,
    as_expression_tuple,
    item,
    tok,
)
from .field import FIELD_KINDS, HF, Batching, Field, Identity, Process, flat, hf, identity
from .items import ItemType
from .items.tensor import Tensor
from .layout import Layout, LayoutLike, Replace, Update, embed, may_embed, nothing, replace
from .layout import layout as as_layout
from .named_part import NamedPart, check_name, require
from .names import find_owner_of_field_name, find_owner_of_modality_name
from .node import Dependency, dependencies

_FIELD_CALLS = [f"{kind._word}()" for kind in FIELD_KINDS]
FIELD_WORDS = f"{', '.join(_FIELD_CALLS[:-1])} or {_FIELD_CALLS[-1]}"
"""What an author may write for a field, in messages."""
UPDATE_WORDS = "replace(), insert(), already_expanded() or a list of them"


class Modality(NamedPart, init=False):
    """One kind of item and everything about it.

    ``placeholder="<image>", tokens=576`` is ``layout=embed(tok["<image>"]) * 576``, and where no
    update is stated, ``update=replace(tok["<image>"])``. ``tokens=0`` alone says that an item takes
    no positions: vLLM passes the fields to the model's `forward`, as for its models of raw input.
    mmkit then ignores the caller's prompt and makes it one id.

    A layout without `embed` or `select` says that items become ids of the vocabulary only. Nothing
    else of such an item reaches the model: no field, no hash, no range. The model reads the ids as
    text, so those of an expanded prompt stand for the item when they are sent without it.

    Attributes:
        name: the key in ``multi_modal_data``.
        item: what a caller may send.
        layout: the positions of one item in the prompt; empty for an item without positions.
        update: how the layout gets into the prompt: one way, or several in order of preference;
            none for an item without positions.
        fields: the processed tensors, by the names under which the model receives them. Those of
            items that become ids only are for the layout, which reads each; there may be none.
        process: how canonical items become these tensors.
        limit: the most items in one request; None for no limit. A modality without positions has
            exactly one item in every request.
        cacheable: whether vLLM may keep processed items in its processor cache: True, False, or a
            condition on `item.count`, the number of items of the modality in the request. Required
            where the declaration reads `item.count`, since a cached item comes back in requests
            with another number of items.
        positions: for models with M-RoPE, the grid of the encoder rows of one item, in row-major
            order: ``(t, h, w)``, or ``(t, h, w, scale)`` where the i-th of t is at the time
            ``int(i * scale)``. t, h and w are whole numbers, scale is a number, over `fields` and
            `cfg`. A layout with literal ids between its embed() positions, for example timestamps
            between frames, has t runs of these positions, each a grid of (1, h, w). None: an item
            counts as text does.
        when: whether the model has this modality, over `cfg`, `proc` and `tok`.
        embeds: callers may also send precomputed embeddings, as ``{"<name>_embeds": ...}`` or, for
            image, video and audio, as vLLM takes them. Give a layout over ``item.rows`` (rows of
            the embedding) where `layout` depends on the raw item. Callers send the fields that the
            layout reads, such as a grid, beside the embeddings: ``{"image_embeds": ...,
            "image_grid_thw": ...}``; these fields state `shape` and `dtype`. ``flat(item.rows)`` is
            True for a model class that takes the rows of all items as one tensor, and tells by
            such fields which rows belong to which item, for example vLLM's own Qwen2-VL.
    """

    name: str
    _: KW_ONLY
    item: ItemType
    layout: Layout
    update: tuple[Update, ...]
    fields: Mapping[str, Field]
    process: Any
    limit: Any = None
    embeds: bool | Layout | Field = False
    cacheable: Any = True
    positions: Any = None
    when: Any = True

    def __init__(
        self,
        name: str,
        *,
        item: ItemType,
        fields: Mapping[str, Field] | None = None,
        layout: LayoutLike | None = None,
        update: Update | Sequence[Update] | None = None,
        placeholder: Count | str | None = None,
        tokens: Count | None = None,
        process: Process | None = None,
        limit: Count | None = None,
        embeds: bool | LayoutLike | Field = False,
        cacheable: Condition = True,
        positions: Sequence[Count] | None = None,
        when: Condition = True,
    ) -> None:
        """Declare a modality.

        The attributes tell what most arguments mean; two are another form of `layout`:

        Args:
            placeholder: the token, or its id, at the positions of an item.
            tokens: their number.

        Raises:
            SpecError: a part is missing, contradictory or of the wrong type.
        """
        where = f"modality {name!r}"
        if _is_without_positions(layout, update, placeholder, tokens):
            layout = nothing
            update = ()
            limit = 1 if limit is None else limit
        elif placeholder is not None or tokens is not None:
            short_form = _expand_short_form(where, layout, placeholder, tokens)
            layout = short_form.layout
            update = short_form.update if update is None else update
        if layout is None or update is None:
            raise _make_incomplete_error(where, layout, update)
        if fields is None:
            fields = {}
        if process is None:
            has_field_item = isinstance(item, ItemType) and item.is_field
            process = identity() if has_field_item or fields == {} else hf()
        self._set(
            name=name,
            item=item,
            layout=as_layout(layout),
            update=tuple(update) if isinstance(update, (list, tuple)) else (update,),
            fields=dict(fields) if isinstance(fields, Mapping) else fields,
            process=process,
            limit=as_expression(limit),
            embeds=_convert_embeds(embeds),
            cacheable=as_expression(cacheable),
            positions=None if positions is None else as_expression_tuple(positions),
            when=as_expression(when),
        )
        self._check(where)

    @property
    def has_positions(self) -> bool:
        """Whether an item takes positions in the prompt."""
        return bool(self.update) or self.layout != nothing

    @property
    def is_ids_only(self) -> bool:
        """Whether an item becomes ids of the vocabulary, and nothing of it reaches the model.

        No position of its layout receives an encoder row.
        """
        return self.has_positions and not may_embed(self.layout)

    @property
    def received_fields(self) -> dict[str, Field]:
        """The fields that the model receives, by name."""
        if self.is_ids_only:
            return {}
        return {name: field for name, field in self.fields.items() if not field.hidden}

    @property
    def arguments(self) -> list[str]:
        """vLLM's names for what `hf` passes: the items, or their parts."""
        if self.item.vllm_modality:
            return [f"{self.item.vllm_modality}s"]
        return list(self.item.parts) or [self.name]

    @property
    def embeds_layout(self) -> Layout | None:
        """The layout of precomputed embeddings; None where they are not taken."""
        if isinstance(self.embeds, Layout):
            return self.embeds
        return self.layout if self.embeds else None

    def companions(self) -> dict[str, Tensor]:
        """Return the fields that callers send beside precomputed embeddings.

        Returns:
            The fields that the layout or the positions of embeddings read, each with the item type
            of one item's part.
        """
        layout = self.embeds_layout
        if layout is None:
            return {}
        names = {
            dependency.keys[0]
            for dependency in dependencies([layout, self.positions])
            if _is_field(dependency)
        }
        companions: dict[str, Tensor] = {}
        for name, field in self.fields.items():
            if name in names:
                companions[name] = Tensor(tuple(field.shape or ()), field.dtype or "float32")
        return companions

    def dependencies(self) -> frozenset[Dependency]:
        """Return all that this modality depends on; see `mmkit.language.node.dependencies`."""
        return dependencies(self)

    # -- the checks; each may rely on the earlier ones --

    def _check(self, where: str) -> None:
        check_name(self.name, where)
        self._check_owner_of_name(where)
        self._check_item(where)
        self._check_update(where)
        self._check_fields(where)
        if not self.has_positions:
            self._check_raw(where)
        if self.positions is not None:
            self._check_positions(where)
        if self.is_ids_only:
            self._check_ids_only(where)
        else:
            require(self.fields, where, "at least one field", "none")
        self._check_process(where)
        self._check_conditions(where)
        self._check_fields_read(where)
        self._check_caching(where)
        self._check_embeds(where)

    def _check_owner_of_name(self, where: str) -> None:
        """Refuse a name by which something else than the items comes."""
        owner = find_owner_of_modality_name(self.name)
        expected = "a name that nothing else has beside the items"
        got = f"{self.name!r}, {owner}"
        require(owner is None, where, expected, got, "Give the modality another name.")

    def _check_item(self, where: str) -> None:
        if not isinstance(self.item, ItemType):
            remedy = _remedy_for_item(self.item)
            raise SpecError(f"{where}, item", "an item type", repr(self.item), remedy)
        if self.item.is_optional:
            remedy = "Only a part of a Record may be absent."
            raise SpecError(f"{where}, item", "an item type", repr(self.item), remedy)

    def _check_update(self, where: str) -> None:
        for update in self.update:
            require(isinstance(update, Update), f"{where}, update", UPDATE_WORDS, repr(update))

    def _check_fields(self, where: str) -> None:
        expected = f"a dict of {FIELD_WORDS}"
        require(isinstance(self.fields, Mapping), f"{where}, fields", expected, repr(self.fields))
        for name, field in self.fields.items():
            where_field = f"{where}, fields[{name!r}]"
            if isinstance(field, type) and issubclass(field, Field):
                word = field._word
                got = f"{word} without its ()"
                raise SpecError(where_field, FIELD_WORDS, got, f"Write {word}().")
            require(isinstance(field, Field), where_field, FIELD_WORDS, repr(field))
            if not field.hidden and not self.is_ids_only:
                self._check_field_name(name, where_field)
        has_update = self.update or not self.has_positions
        require(has_update, where, "at least one update", "none")

    def _check_field_name(self, name: str, where: str) -> None:
        """Refuse a field's name by which something else comes to the model."""
        check_name(name, where)
        owner = find_owner_of_field_name(name, is_raw=not self.has_positions)
        expected = "a name that nothing else has beside the fields"
        longer_name = f"{self.name}_{name}"
        remedy = f"Call the field {longer_name}, for example."
        if isinstance(self.process, HF):
            remedy = f"Rename the output: hf(outputs={{{name!r}: {longer_name!r}}})."
        require(owner is None, where, expected, f"{name!r}, {owner}", remedy)

    def _check_raw(self, where: str) -> None:
        """Check an item without positions.

        `forward` receives the items of all requests of a batch, in the order of the requests, so
        each request has exactly one.
        """
        has_one = isinstance(self.limit, int) and self.limit == 1
        item_words = "for an item without positions"
        require(has_one, where, f"limit=1 {item_words}", repr(self.limit))
        require(not self.embeds, where, f"no embeds {item_words}", repr(self.embeds))

    def _check_ids_only(self, where: str) -> None:
        """Check an item that becomes ids of the vocabulary only.

        A text may have the same ids, so that they do not tell whether the item is laid out: the
        caller's target does. A caller who writes the ids himself needs no item.
        """
        read_names: set[Any] = set()
        for dependency in dependencies([self.layout, self.update, self.fields]):
            if dependency.root == "fields":
                read_names.update(dependency.keys[:1] or self.fields)
        remedy = "Leave it out, or write embed() where the rows of an encoder stand."
        for name in self.fields:
            where_field = f"{where}, fields[{name!r}]"
            expected = (
                "a field that the layout reads, since it has no embed() and the model gets none"
            )
            require(name in read_names, where_field, expected, "another one", remedy)
        words = "for a layout without embed()"
        for update in self.update:
            is_replaced = isinstance(update, Replace)
            require(is_replaced, f"{where}, update", f"replace() {words}", repr(update))
        require(self.positions is None, f"{where}, positions", f"none {words}", "some")
        require(not self.embeds, f"{where}, embeds", f"none {words}", repr(self.embeds))

    def _check_positions(self, where: str) -> None:
        """Check the grid of M-RoPE, which the device computes.

        The device knows the config and the fields that the model receives.
        """
        where = f"{where}, positions"
        expected = "(t, h, w) or (t, h, w, scale)"
        require(self.has_positions, where, expected, "an item without positions")
        require(len(self.positions) in (3, 4), where, expected, repr(self.positions))
        expected = "fields that the model gets, and cfg"
        for dependency in dependencies(self.positions):
            is_received = dependency.root == "cfg"
            if dependency.root == "fields":
                is_received = not self._is_hidden_field(dependency)
            require(is_received, where, expected, repr(dependency), "Declare a derived field.")

    def _is_hidden_field(self, dependency: Dependency) -> bool:
        if not dependency.keys or dependency.keys[0] not in self.fields:
            return False
        return self.fields[dependency.keys[0]].hidden

    def _check_process(self, where: str) -> None:
        process = self.process
        if isinstance(process, Identity):
            if self.fields or not self.is_ids_only:
                self._check_identity(where)
            return
        if isinstance(process, HF):
            unknown = sorted(set(process.unpad) - set(self.fields))
            expected = f"unpad to name fields among {sorted(self.fields)}"
            require(not unknown, where, expected, repr(unknown))
            return
        require(callable(process), where, "hf() or a function for process", repr(process))
        expected = "a function of the items and a Scope"
        got = "one that takes another number of arguments"
        remedy = "Write (items, scope)."
        require(_takes_arguments(process, 2), f"{where}, process", expected, got, remedy)

    def _check_identity(self, where: str) -> None:
        """Check that the fields are the items, or their parts."""
        processed = sorted(name for name, field in self.fields.items() if not field.is_derived)
        expected = "a Tensor or Audio item and one field"
        fits = len(processed) <= 1
        if self.item.parts:
            parts = sorted(name for name, part in self.item.parts.items() if not part.is_text)
            expected = f"a field for each of {parts}"
            fits = processed == parts
        got = f"{self.item!r} and fields {processed}"
        require(self.item.may_be_field and fits, where, f"{expected}, or a process", got)

    def _check_conditions(self, where: str) -> None:
        for name, condition in (("cacheable", self.cacheable), ("when", self.when)):
            is_condition = isinstance(condition, (bool, Expr))
            expected = "True, False or a condition"
            require(is_condition, f"{where}, {name}", expected, repr(condition))

    def _check_fields_read(self, where: str) -> None:
        """Refuse an expression over a field that is not declared."""
        expected = f"a field among {sorted(self.fields)}"
        for dependency in self.dependencies():
            if _is_field(dependency):
                name = dependency.keys[0]
                is_declared = name in self.fields
                remedy = "Declare it in fields."
                require(is_declared, f"{where}, {dependency!r}", expected, repr(name), remedy)

    def _check_caching(self, where: str) -> None:
        """Refuse items that are cached by their content and depend on more than it."""
        if self.cacheable is not True:
            return
        expected = "cacheable to say for which item.count processed items may be kept"
        remedy = "Write cacheable=False, or a condition on item.count."
        require(COUNT not in self.dependencies(), where, expected, "none", remedy)
        reads_index = INDEX in dependencies([self.fields, self.process])
        expected = "fields that do not read item.index, since items are cached by their content"
        remedy = "Read it in the layout, or say by cacheable= when items may be kept."
        require(not reads_index, where, expected, "some that do", remedy)

    def _check_embeds(self, where: str) -> None:
        name = f"{self.name}_embeds"
        is_free = name not in self.item.parts and not (self.embeds and name in self.fields)
        expected = f"no part or field named {name}, as which precomputed embeddings come"
        require(is_free, where, expected, "one")
        if self.embeds:
            owner = find_owner_of_field_name(name, is_raw=False)
            expected = "a name that nothing else has, with _embeds behind it"
            remedy = "Give the modality another name."
            require(owner is None, where, expected, f"{name!r}, {owner}", remedy)
        self._check_companions(where)
        if self.embeds_layout is self.layout:
            for dependency in dependencies(self.layout):
                expected = f"a layout over item.rows, because the layout depends on {dependency!r}"
                require(dependency.root != "item", f"{where}, embeds", expected, repr(self.embeds))
        if isinstance(self.embeds, Field):
            expected = "True, a layout, or flat(item.rows) where layout and targets read fields"
            is_flat_rows = self.embeds == flat(item.rows) and self._reads_only_fields()
            require(is_flat_rows, f"{where}, embeds", expected, repr(self.embeds))

    def _check_companions(self, where: str) -> None:
        """Check the fields that callers send beside precomputed embeddings."""
        expected = "a batched field with shape and dtype, which embeddings come with"
        remedy = "Or give embeds= a layout over item.rows."
        for name in self.companions():
            field = self.fields[name]
            has_form = field.shape is not None and field.dtype is not None
            is_stacked = field.batching is Batching.STACKED
            can_be_sent = is_stacked and has_form and not field.hidden
            require(can_be_sent, f"{where}, fields[{name!r}]", expected, repr(field), remedy)

    def _reads_only_fields(self) -> bool:
        """Return whether layout and targets depend on fields, and on nothing else of an item."""
        roots = {dependency.root for dependency in dependencies([self.layout, self.update])}
        return "fields" in roots and roots.isdisjoint(("item", "function"))


# -- the arguments ---------------------------------------------------------------------------------


class _ShortForm(NamedTuple):
    """What `placeholder` and `tokens` stand for."""

    layout: Layout
    update: Update


def _is_without_positions(layout: Any, update: Any, placeholder: Any, tokens: Any) -> bool:
    """Return whether ``tokens=0`` is all that is said of the positions of an item."""
    is_zero = isinstance(tokens, int) and tokens == 0  # an expression has no truth
    return is_zero and layout is None and update is None and placeholder is None


def _expand_short_form(where: str, layout: Any, placeholder: Any, tokens: Any) -> _ShortForm:
    """Return the layout and the update of ``placeholder=..., tokens=...``.

    Raises:
        SpecError: one of the two is missing, or there is a layout beside them.
    """
    expected = "placeholder and tokens together, or layout"
    if layout is not None:
        has_both = placeholder is not None and tokens is not None
        got = "layout beside them" if has_both else "layout beside one"
        raise SpecError(where, expected, got, "Leave layout= out, or write everything in it.")
    if tokens is None:
        remedy = "Add tokens=, the number of positions of an item."
        raise SpecError(where, expected, "placeholder without tokens", remedy)
    if placeholder is None:
        remedy = 'Add placeholder=, for example placeholder="<image>".'
        raise SpecError(where, expected, "tokens without placeholder", remedy)
    token = tok[placeholder] if isinstance(placeholder, str) else placeholder
    return _ShortForm(embed(token) * tokens, replace(token))


def _make_incomplete_error(where: str, layout: Any, update: Any) -> SpecError:
    """Return the error for a layout without an update, an update without a layout, or neither."""
    expected = "placeholder and tokens, or layout and update"
    if layout is not None:
        return SpecError(where, expected, "layout alone", "Add update=.")
    if update is not None:
        return SpecError(where, expected, "update alone", "Add layout=.")
    return SpecError(where, expected, "neither")


def _convert_embeds(embeds: Any) -> Any:
    """Return embeds as a layout, unless it says by a bool or a field how they come."""
    if embeds is None or isinstance(embeds, (bool, Field)):
        return embeds
    return as_layout(embeds)


def _is_field(dependency: Dependency) -> bool:
    """Return whether a dependency names a field."""
    return dependency.root == "fields" and bool(dependency.keys)


def _remedy_for_item(value: Any) -> str:
    """Return how to write the item type that a value may stand for."""
    if isinstance(value, type) and issubclass(value, ItemType):
        return f"Write {value.__name__}(...)."
    if isinstance(value, (list, tuple)):
        return f"Write Tensor({tuple(value)!r})."
    if isinstance(value, Mapping):
        return "Write Record(...)."
    return ""


def _takes_arguments(function: Any, count: int) -> bool:
    """Return whether a function takes so many arguments by position, as far as it tells."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it does not tell
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True

"""The spec: a modality is declared once, and everything that vLLM needs is derived from the
declaration."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, field
from types import SimpleNamespace
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from ..errors import SpecError
from ..plugin import calling_module
from .expr import COUNT, INDEX, Condition, Count, Expr, Leaf, Scope, expression, item, several, tok
from .field import HF, Batched, Field, Identity, Process, flat, hf, identity
from .items import ItemType
from .items.tensor import Tensor
from .layout import EndingWith, Layout, LayoutLike, Replace, Update, embed, nothing, replace
from .layout import layout as as_layout
from .names import owner_of_field, owner_of_modality
from .node import Node, Stated, leaves, stated

Rewrite: TypeAlias = "EndingWith | Callable[[Scope], Any]"
"""How a spec rewrites a caller's prompt."""

Rule: TypeAlias = "tuple[str, object, str, str] | tuple[str, object, str, str, str]"
"""A part of a declaration, whether it is right, and the words of the refusal where it is not:
expected, got, remedy."""

_FIELD = "batched(), flat(), derived() or constant()"
_WITHOUT = "for an item without positions"


class _Declared(Node):
    name: str

    def _refuse(self, where: str) -> None:
        """Check the parts by the rules.

        Raises:
            SpecError: the first that is broken.
        """
        for part, holds, *words in self._rules():
            if not holds:
                raise SpecError(f"{where}{part}", *words)

    def _rules(self) -> Iterator[Rule]:
        named = isinstance(self.name, str) and self.name.isidentifier()
        yield "", named, "a name that is a Python identifier", repr(self.name)

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """This declaration with some of its arguments changed, checked like a new one.

        Raises:
            SpecError: as for a new one.
        """
        stated = {**{name: getattr(self, name) for name in self._names}, **(update or {})}
        kind: Any = type(self)
        copy: Self = kind(stated.pop("name"), *stated.pop("modalities", ()), **stated)
        return copy


Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

EXTRA_ARG = "mmkit_output"
"""The key of `SamplingParams.extra_args` for the name of the output that a request asks for."""

_OF_OUTPUTS = {"cfg", "tok", "function"}


class Output(_Declared):
    """One kind of output other than text, for example a frame of a world model, an image, or the
    action of a robot: which ids may stand where, and how they become an array. It has a fixed
    number of tokens; the ids outside the `any_id` positions are separators.

    Attributes:
        name: the name by which requests ask for it.
        layout: which ids may stand where.
        decode: a function ``(ids, scope) -> array``. It receives the ids at the `any_id` positions,
            int64 (positions,), and a `Scope` with `cfg` and `tok`, and returns a numpy array. It
            accepts all ids that the layout allows, and returns arrays of one shape and dtype; uint8
            (height, width, 3) is an RGB image. Several threads may call it at once.
        encode: its inverse, ``(array, scope) -> ids``: integers (positions,). It may raise a
            ValueError for an array that the output cannot be.
        lossy: whether `decode` returns only nearly the array that `encode` received, for example
            with a learned image tokenizer.

    Raises:
        SpecError: a name that is no identifier, a layout that depends on more than `cfg` and `tok`,
            or a `decode` or `encode` that is no function.
    """

    name: str
    layout: Stated[LayoutLike, Layout] = stated(as_layout)
    decode: Callable[[Array, Scope], Array]
    encode: Callable[[Array, Scope], Any] | None = None
    _: KW_ONLY
    lossy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse(f"output {self.name!r}")

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        expected = "a function (value, scope)"
        yield ", decode", callable(self.decode), expected, repr(self.decode)
        may_encode = self.encode is None or callable(self.encode)
        yield ", encode", may_encode, expected, repr(self.encode)
        for leaf in self.layout.leaves():
            yield ", layout", leaf.root in _OF_OUTPUTS, "values of cfg and tok", repr(leaf)


class Modality(_Declared):
    """One kind of item and everything about it.

    ``placeholder="<image>", tokens=576`` is ``layout=embed(tok["<image>"]) * 576``, and where no
    update is stated, ``update=replace(tok["<image>"])``. ``tokens=0`` alone says that an item takes
    no positions: vLLM passes the fields to the model's `forward`, as for its models of raw input.
    mmkit then ignores the caller's prompt and makes it one id.

    Attributes:
        name: the key in ``multi_modal_data``.
        item: what a caller may send.
        layout: the positions of one item in the prompt; empty for an item without positions.
        update: how the layout gets into the prompt: one way, or several in order of preference;
            none for an item without positions.
        fields: the processed tensors, by the names under which the model receives them.
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
        placeholder: the token, or its id, at the positions of an item.
        tokens: their number.

    Raises:
        SpecError: a part is missing, contradictory or of the wrong type.
    """

    name: str
    _: KW_ONLY
    item: ItemType
    layout: Stated[LayoutLike | None, Layout] = stated(as_layout, default=None)
    update: Stated[Update | Sequence[Update] | None, tuple[Update, ...]] = stated(
        lambda ways: tuple(ways) if isinstance(ways, (list, tuple)) else (ways,), default=None
    )
    fields: Mapping[str, Field] = stated(lambda own: dict(own) if isinstance(own, Mapping) else own)
    process: Stated[Process | None, Any] = stated(lambda process: process, default=None)
    limit: Stated[Count | None, Any] = stated(expression, default=None)
    embeds: Stated[bool | LayoutLike | Field, bool | Layout | Field] = stated(
        lambda how: how if isinstance(how, (bool, Field)) else as_layout(how), default=False
    )
    cacheable: Stated[Condition, Any] = stated(expression, default=True)
    positions: Stated[Sequence[Count] | None, Any] = stated(several, default=None)
    when: Stated[Condition, Any] = stated(expression, default=True)
    placeholder: InitVar[Count | str | None] = None
    tokens: InitVar[Count | None] = None

    def __post_init__(self, placeholder: Any, tokens: Any) -> None:
        where = f"modality {self.name!r}"
        layout, update = self.layout, self.update
        is_long = layout is not None or update is not None
        if isinstance(tokens, int) and tokens == 0 and placeholder is None and not is_long:
            self._set(layout=nothing, update=(), limit=1 if self.limit is None else self.limit)
        elif placeholder is not None or tokens is not None:
            _refuse_half(where, placeholder, tokens, layout)
            token = tok[placeholder] if isinstance(placeholder, str) else placeholder
            way = replace(token) if update is None else update
            self._set(layout=embed(token) * tokens, update=way)
        elif layout is None or update is None:
            expected, got, remedy = "placeholder and tokens, or layout and update", "neither", ""
            if is_long:
                got, lacking = ("update", "layout") if layout is None else ("layout", "update")
                got, remedy = f"{got} alone", f"Add {lacking}=."
            raise SpecError(where, expected, got, remedy)
        if self.process is None:
            is_field = isinstance(self.item, ItemType) and self.item.is_field
            self._set(process=identity() if is_field else hf())
        super().__post_init__()
        self._refuse(where)

    def _rules(self) -> Iterator[Rule]:
        fields, process, embeds = self.fields, self.process, self.embeds
        yield from super()._rules()
        yield from self._rules_of_name()
        is_item = isinstance(self.item, ItemType)
        yield ", item", is_item, "an item type", repr(self.item), _item_remedy(self.item)
        ways = "replace(), insert(), already_expanded() or a list of them"
        for update in self.update:
            yield ", update", isinstance(update, Update), ways, repr(update)
        yield ", fields", isinstance(fields, Mapping), f"a dict of {_FIELD}", repr(fields)
        for key, declared in fields.items():
            got, remedy = repr(declared), ""
            if isinstance(declared, type) and issubclass(declared, Field):
                got, remedy = f"{declared._word} without its ()", f"Write {declared._word}()."
            yield f", fields[{key!r}]", isinstance(declared, Field), _FIELD, got, remedy
            if not declared.hidden:
                yield from self._rules_of_field_name(key)
        yield "", self.update or not self.has_positions, "at least one update", "none"
        if not self.has_positions:
            # `forward` receives the items of all requests of a batch, in the order of the requests
            is_one = isinstance(self.limit, int) and self.limit == 1
            yield "", is_one, f"limit=1 {_WITHOUT}", repr(self.limit)
            yield "", not embeds, f"no embeds {_WITHOUT}", repr(embeds)
        if self.positions is not None:
            yield from self._rules_of_positions(self.positions)
        yield "", fields, "at least one field", "none"
        known = sorted(fields)
        if isinstance(process, Identity):
            yield from self._rules_of_identity()
        runs = isinstance(process, (Identity, HF)) or callable(process)
        yield "", runs, "hf() or a function for process", repr(process)
        takes_both = isinstance(process, (Identity, HF)) or _takes(process, 2)
        expected = "a function of the items and a Scope"
        got, remedy = "one that takes another number of arguments", "Write (items, scope)."
        yield ", process", takes_both, expected, got, remedy
        odd = sorted(set(process.unpad) - set(fields)) if isinstance(process, HF) else []
        yield "", not odd, f"unpad to name fields among {known}", repr(odd)
        for name, given in (("cacheable", self.cacheable), ("when", self.when)):
            is_condition = isinstance(given, (bool, Expr))
            yield f", {name}", is_condition, "True, False or a condition", repr(given)
        read = self.leaves()
        for leaf in read:
            if leaf.root == "fields" and leaf.keys:
                key, remedy = leaf.keys[0], "Declare it in fields."
                yield f", {leaf!r}", key in fields, f"a field among {known}", repr(key), remedy
        may_change = self.cacheable is not True
        expected = "cacheable to say for which item.count processed items may be kept"
        remedy = "Write cacheable=False, or a condition on item.count."
        yield "", may_change or COUNT not in read, expected, "none", remedy
        expected = "fields that do not read item.index, since items are cached by their content"
        remedy = "Read it in the layout, or say by cacheable= when items may be kept."
        reads_index = INDEX in leaves([fields, process])
        yield "", may_change or not reads_index, expected, "some that do", remedy
        taken = f"{self.name}_embeds"
        is_free = taken not in self.item.parts and not (embeds and taken in fields)
        expected = f"no part or field named {taken}, as which precomputed embeddings come"
        yield "", is_free, expected, "one"
        if embeds:
            owner = owner_of_field(taken, is_raw=False)
            expected = "a name that nothing else has, with _embeds behind it"
            remedy = "Give the modality another name."
            yield "", owner is None, expected, f"{taken!r}, {owner}", remedy
        for key in self.companions():
            sent = fields[key]
            is_stated = sent.shape is not None and sent.dtype is not None
            is_told = isinstance(sent, Batched) and is_stated and not sent.hidden
            expected = "a batched field with shape and dtype, which embeddings come with"
            remedy = "Or give embeds= a layout over item.rows."
            yield f", fields[{key!r}]", is_told, expected, repr(sent), remedy
        for leaf in leaves(self.layout) if self.embeds_layout is self.layout else ():
            expected = f"a layout over item.rows, because the layout depends on {leaf!r}"
            yield ", embeds", leaf.root != "item", expected, repr(embeds)
        if isinstance(embeds, Field):
            roots = {leaf.root for leaf in leaves([self.layout, self.update])}
            told_by_fields = "fields" in roots and roots.isdisjoint(("item", "function"))
            expected = "True, a layout, or flat(item.rows) where layout and targets read fields"
            holds = embeds == flat(item.rows) and told_by_fields
            yield ", embeds", holds, expected, repr(embeds)

    def _rules_of_name(self) -> Iterator[Rule]:
        """Items come by the name of their modality, also where something else comes by its own."""
        owner = owner_of_modality(self.name)
        expected = "a name that nothing else has beside the items"
        got = f"{self.name!r}, {owner}"
        yield "", owner is None, expected, got, "Give the modality another name."

    def _rules_of_field_name(self, key: object) -> Iterator[Rule]:
        """Fields come by their names, also where something else comes by its own."""
        at = f", fields[{key!r}]"
        is_name = isinstance(key, str) and key.isidentifier()
        yield at, is_name, "a name that is a Python identifier", repr(key)
        name = str(key)
        owner = owner_of_field(name, is_raw=not self.has_positions)
        expected = "a name that nothing else has beside the fields"
        other = f"{self.name}_{name}"
        remedy = f"Call the field {other}, for example."
        if isinstance(self.process, HF):
            remedy = f"Rename the output: hf(outputs={{{name!r}: {other!r}}})."
        yield at, owner is None, expected, f"{name!r}, {owner}", remedy

    def _rules_of_identity(self) -> Iterator[Rule]:
        """Fields are the items, or their parts."""
        processed = {name: field for name, field in self.fields.items() if not field.is_derived}
        parts = sorted(self.item.parts)
        fits = self.item.is_field and sorted(processed) == (parts or list(processed)[:1])
        expected = f"a field for each of {parts}" if parts else "a Tensor item and one field"
        got = f"{self.item!r} and fields {sorted(processed)}"
        yield "", fits, f"{expected}, or a process", got

    def _rules_of_positions(self, positions: tuple[Any, ...]) -> Iterator[Rule]:
        """The device computes positions: it knows the config and the fields that the model
        receives."""
        form = "(t, h, w) or (t, h, w, scale)"
        yield ", positions", self.has_positions, form, "an item without positions"
        yield ", positions", len(positions) in (3, 4), form, repr(positions)
        hidden = {name for name, field in self.fields.items() if field.hidden}
        expected, remedy = "fields that the model gets, and cfg", "Declare a derived field."
        for leaf in leaves(positions):
            is_hidden = leaf.root == "fields" and not hidden.isdisjoint(leaf.keys[:1])
            is_sent = leaf.root in ("fields", "cfg") and not is_hidden
            yield ", positions", is_sent, expected, repr(leaf), remedy

    @property
    def has_positions(self) -> bool:
        """Whether an item takes positions in the prompt."""
        return bool(self.update) or self.layout != nothing

    @property
    def arguments(self) -> list[str]:
        """vLLM's names for what `hf` passes: the items, or their parts."""
        if self.item.media:
            return [f"{self.item.media}s"]
        return list(self.item.parts) or [self.name]

    @property
    def embeds_layout(self) -> Layout | None:
        """The layout of precomputed embeddings; None where they are not taken."""
        if isinstance(self.embeds, Layout):
            return self.embeds
        return self.layout if self.embeds else None

    def companions(self) -> dict[str, Tensor]:
        """The fields that the layout or the positions of precomputed embeddings read, each with
        the item type of one item's part."""
        layout = self.embeds_layout
        known = () if layout is None else leaves([layout, self.positions])
        read = {leaf.keys[0] for leaf in known if leaf.root == "fields" and leaf.keys}
        return {
            name: Tensor(tuple(field.shape or ()), field.dtype or "float32")
            for name, field in self.fields.items()
            if name in read
        }

    def leaves(self) -> frozenset[Leaf]:
        """Everything that this modality depends on; see `mmkit.language.expr.leaves`."""
        return leaves(self)


def _refuse_half(where: str, placeholder: Any, tokens: Any, layout: Any) -> None:
    """Refuse a placeholder without its number, a number without a placeholder, and a layout beside
    them.

    Raises:
        SpecError: names what is missing, or what there is too much.
    """
    expected = "placeholder and tokens together, or layout"
    if layout is not None:
        got = "layout beside them" if None not in (placeholder, tokens) else "layout beside one"
        remedy = "Leave layout= out, or write everything in it."
        raise SpecError(where, expected, got, remedy)
    if tokens is None:
        remedy = "Add tokens=, the number of positions of an item."
        raise SpecError(where, expected, "placeholder without tokens", remedy)
    if placeholder is None:
        remedy = 'Add placeholder=, for example placeholder="<image>".'
        raise SpecError(where, expected, "tokens without placeholder", remedy)


def _item_remedy(value: Any) -> str:
    """How somebody writes the item type that a value may stand for."""
    if isinstance(value, type) and issubclass(value, ItemType):
        return f"Write {value.__name__}(...)."
    if isinstance(value, (list, tuple)):
        return f"Write Tensor({tuple(value)!r})."
    if isinstance(value, Mapping):
        return "Write Record(...)."
    return ""


def _takes(function: Any, count: int) -> bool:
    """Whether a function takes so many arguments by position, as far as it tells."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it does not tell, or is no function
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _rewrite(value: Any) -> EndingWith | Layout:
    return value if isinstance(value, EndingWith) else as_layout(value)


class Declaration(_Declared, init=False):
    """The declaration of a `ModelSpec`.

    Attributes:
        name: the model's name in messages and class names.
        modalities: its modalities.
        prompt: how mmkit rewrites every prompt, with or without items, before it places items:
            `ending_with`, or a function of a `Scope` to token ids. None leaves prompts as they are.
            A prompt may come back expanded, so the function must leave its own result unchanged.
        decoder_prompt: for an encoder-decoder model, whose items go into the encoder's prompt: the
            same for the decoder's prompt, or ids that take its place.
        tokenization_kwargs: how texts are tokenized, unless a request says otherwise:
            ``{"add_special_tokens": False}``. Before vLLM 0.17 this concerns texts with items only.
        merges: a character whose runs are tokens, for example a line break. In a prompt with items,
            each run of it becomes the tokens that the tokenizer makes of it, also where it reaches
            across the edge of a layout, as in a text that is tokenized as a whole.
        outputs: the model's outputs other than text.
    """

    name: str
    modalities: tuple[Modality, ...] = field(default=(), repr=False)
    prompt: EndingWith | Layout | None = stated(_rewrite, default=None)
    decoder_prompt: EndingWith | Layout | None = stated(_rewrite, default=None)
    tokenization_kwargs: Mapping[str, Any] = stated(dict, default_factory=dict)
    merges: str | None = None
    outputs: tuple[Output, ...] = stated(tuple, default=())

    _module: ClassVar[str] = "__main__"
    """The module that declares the spec."""

    def __init__(
        self,
        name: str,
        *modalities: Modality,
        prompt: Rewrite | None = None,
        decoder_prompt: Rewrite | LayoutLike | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        merges: str | None = None,
        outputs: Sequence[Output] = (),
    ) -> None:
        """Declare a model.

        Raises:
            SpecError: no modality, or two that share a name or a field name; or two outputs that
                share a name.
        """
        rest = prompt, decoder_prompt, tokenization_kwargs or {}, merges, outputs
        self._set(**dict(zip(self._names, (name, modalities, *rest), strict=True)))
        self._set(_module=calling_module())
        self.__post_init__()
        self._refuse(f"spec {name!r}")

    def _rules(self) -> Iterator[Rule]:
        modalities, outputs, merges = self.modalities, self.outputs, self.merges
        for one in modalities:
            expected = "modalities, each as an argument of its own"
            remedy = "Write a * before it." if isinstance(one, (list, tuple)) else ""
            yield "", isinstance(one, Modality), expected, f"a {type(one).__name__}", remedy
        yield from super()._rules()
        for output in outputs:
            yield ", outputs", isinstance(output, Output), "outputs", repr(output)
        is_character = isinstance(merges, str) and len(merges) == 1
        yield ", merges", merges is None or is_character, "one character", repr(merges)
        yield "", modalities, "at least one modality", "none"
        rewrites = [key for key in ("prompt", "decoder_prompt") if getattr(self, key) is not None]
        names, written = [m.name for m in modalities], [output.name for output in outputs]
        is_alone = len(modalities) == 1 and not written and not rewrites
        expected = "nothing beside a modality without positions, whose fields take up forward"
        got = ", ".join([*names, *written, *rewrites])
        yield "", not self.is_raw or is_alone, expected, got
        arguments = sorted({name for m in modalities for name in m.arguments})
        for m in modalities:
            inputs = m.process.inputs if isinstance(m.process, HF) else {}
            odd = sorted(set(inputs).difference(arguments))
            at = f", {m.name}: hf(inputs=...)"
            yield at, not odd, f"arguments among {arguments}", repr(odd)
        # the model receives fields by name, so a name must tell the modality
        sent = [key for m in modalities for key, field in m.fields.items() if not field.hidden]
        sent += [f"{m.name}_embeds" for m in modalities if m.embeds]
        for kind, taken in (("modality", names), ("field", sent), ("output", written)):
            for key, count in Counter(taken).items():
                yield "", count == 1, f"one {kind} named {key!r}", "several"

    @property
    def is_raw(self) -> bool:
        """Whether `forward` receives the fields of an item, and nothing of the prompt."""
        return not all(modality.has_positions for modality in self.modalities)

    def __getitem__(self, name: str) -> Modality:
        """The modality of that name.

        Raises:
            KeyError: there is none.
        """
        return {modality.name: modality for modality in self.modalities}[name]

    def placeholder_text(self, modality: str, index: int) -> str | None:
        """The text of an item in a chat message, the target of `replace`: ``<image>`` for
        ``tok["<image>"]``.

        Args:
            modality: name of the modality.
            index: the item's position among those of its modality.

        Returns:
            The text; None for another update, and for a target that is no text, or depends on more
            than `item.index`.
        """
        updates = (update for m in self.modalities if m.name == modality for update in m.update)
        replaced = next((update for update in updates if isinstance(update, Replace)), None)
        return replaced.text(Scope(item=SimpleNamespace(index=index))) if replaced else None

    def _stated(self) -> Iterator[str]:
        name, *options = super()._stated()
        yield from (name, *map(repr, self.modalities), *options)

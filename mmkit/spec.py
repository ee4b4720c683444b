"""The spec: a modality is declared once, and everything that vLLM needs is derived from the
declaration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    InstanceOf,
    PrivateAttr,
    StringConstraints,
    ValidationError,
)

from .errors import SpecError
from .expr import (
    COUNT,
    INDEX,
    Condition,
    Count,
    Expr,
    Leaf,
    Scope,
    expression,
    item,
    leaves,
    structure,
    tok,
)
from .field import Batched, Field, Shared, flat
from .items import ItemType
from .items.tensor import Tensor
from .layout import Layout, LayoutLike, embed, nothing, source
from .layout import layout as as_layout
from .outputs import Output
from .plugin import calling_module
from .process import HF, Identity, Process, hf, identity
from .updates import EndingWith, Update, replace

Rewrite: TypeAlias = "EndingWith | Callable[[Scope], Any]"
"""How a spec rewrites a caller's prompt."""

_FIELD = "batched(), flat(), shared(), derived() or constant()"


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def _declare(self, where: str, *, name: str, **values: Any) -> None:
        try:
            BaseModel.__init__(self, name=name, **values)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise SpecError(f"{where}: {at}: {first['msg']}, got {first['input']!r}.") from None
        if not name.isidentifier():
            raise SpecError(where, "a name that is a Python identifier", repr(name))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return bool(self._said() == other._said())

    def __hash__(self) -> int:
        return hash(self._said())

    def _said(self) -> Any:
        """The declaration as plain tuples, without the module that made it."""
        return structure(
            {key: part if key != "modalities" else [m._said() for m in part] for key, part in self}
        )

    def __str__(self) -> str:
        return repr(self)


class Modality(_Declared):
    """One kind of item and everything about it.

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
    """

    name: str
    item: InstanceOf[ItemType]
    layout: InstanceOf[Layout]
    update: tuple[InstanceOf[Update], ...]
    fields: Mapping[str, InstanceOf[Field]]
    process: Any
    limit: Any = None
    embeds: bool | InstanceOf[Layout] | InstanceOf[Field] = False
    cacheable: Any = True
    positions: tuple[Any, ...] | None = None
    when: Any = True

    def __init__(
        self,
        name: str,
        *,
        item: ItemType,
        fields: Mapping[str, Field],
        layout: LayoutLike | None = None,
        update: Update | Sequence[Update] | None = None,
        placeholder: str | None = None,
        tokens: Count | None = None,
        process: Process | None = None,
        limit: Count | None = None,
        embeds: bool | LayoutLike | Field = False,
        cacheable: Condition = True,
        positions: Sequence[Count] | None = None,
        when: Condition = True,
    ) -> None:
        """Declare a modality.

        The plain case has a short form: ``placeholder="<image>", tokens=576`` means
        ``layout=embed(tok["<image>"]) * 576, update=replace(tok["<image>"])``.

        ``tokens=0`` alone says that an item takes no positions: vLLM passes the fields to the
        model's `forward`, as for its models of raw input. mmkit then ignores the caller's prompt
        and makes it one id.

        Raises:
            SpecError: a part is missing, contradictory or of the wrong type.
        """
        where = f"modality {name!r}"
        bare = placeholder is None and layout is None and update is None
        if bare and isinstance(tokens, int) and tokens == 0:
            layout, update, tokens = nothing, (), None
            limit = 1 if limit is None else limit
        if placeholder is not None or tokens is not None:
            if placeholder is None or tokens is None or layout is not None or update is not None:
                expected = "placeholder and tokens together, or layout and update together"
                raise SpecError(where, expected, "a mixture")
            layout, update = embed(tok[placeholder]) * tokens, replace(tok[placeholder])
        if layout is None or update is None:
            raise SpecError(
                where, "layout and update", "neither" if layout is update else "one of them"
            )
        if not isinstance(update, (Update, list, tuple)):
            raise SpecError(
                f"{where}, update",
                "replace(), insert(), already_expanded() or a list of them",
                repr(update),
            )
        if not isinstance(fields, Mapping):
            raise SpecError(f"{where}, fields", f"a dict of {_FIELD}", repr(fields))
        for key, declared in fields.items():
            if not isinstance(declared, Field):
                raise SpecError(f"{where}, fields[{key!r}]", _FIELD, repr(declared))
        if process is None:
            process = identity() if isinstance(item, ItemType) and item.is_field else hf()
        self._declare(
            where,
            name=name,
            item=item,
            layout=as_layout(layout),
            update=(update,) if isinstance(update, Update) else tuple(update),
            fields=dict(fields),
            process=process,
            limit=expression(limit),
            embeds=embeds if isinstance(embeds, (bool, Field)) else as_layout(embeds),
            cacheable=expression(cacheable),
            positions=None if positions is None else tuple(map(expression, positions)),
            when=expression(when),
        )
        self._check(where)

    def _check(self, where: str) -> None:
        if not self.has_positions:
            self._check_raw(where)
        elif not self.update:
            raise SpecError(where, "at least one update", "none")
        if self.positions is not None:
            self._check_positions(f"{where}, positions")
        if not self.fields:
            raise SpecError(where, "at least one field", "none")
        known = sorted(self.fields)
        if isinstance(self.process, Identity):
            self._check_identity(where)
        if not isinstance(self.process, (Identity, HF)) and not callable(self.process):
            raise SpecError(where, "hf() or a function for process", repr(self.process))
        if isinstance(self.process, HF) and (unknown := set(self.process.unpad) - set(self.fields)):
            raise SpecError(where, f"unpad to name fields among {known}", repr(sorted(unknown)))
        for name in ("cacheable", "when"):
            condition = getattr(self, name)
            if not isinstance(condition, (bool, Expr)):
                expected = "True, False or a condition"
                raise SpecError(f"{where}, {name}", expected, repr(condition))
        for leaf in self.leaves():
            if leaf.root == "fields" and leaf.keys and leaf.keys[0] not in self.fields:
                expected = f"a field among {known}"
                raise SpecError(
                    f"{where}, {leaf!r}", expected, repr(leaf.keys[0]), "Declare it in fields."
                )
        if self.cacheable is True and COUNT in self.leaves():
            expected = "cacheable to say for which item.count processed items may be kept"
            raise SpecError(
                where, expected, "none", "Write cacheable=False, or a condition on item.count."
            )
        if self.cacheable is True and INDEX in leaves([self.fields, self.process]):
            expected = "fields that do not read item.index, since items are cached by their content"
            remedy = "Read it in the layout, or say by cacheable= when items may be kept."
            raise SpecError(where, expected, "some that do", remedy)
        if f"{self.name}_embeds" in self.item.part_names:
            expected = f"no part named {self.name}_embeds, as which precomputed embeddings come"
            raise SpecError(where, expected, "one")
        if self.embeds and f"{self.name}_embeds" in self.fields:
            expected = f"no field named {self.name}_embeds, which carries precomputed embeddings"
            raise SpecError(where, expected, "one")
        for key in self.companions():
            sent = self.fields[key]
            if not isinstance(sent, Batched) or sent.hidden or None in (sent.shape, sent.dtype):
                expected = "a batched field with shape and dtype, which embeddings come with"
                remedy = "Or give embeds= a layout over item.rows."
                raise SpecError(f"{where}, fields[{key!r}]", expected, repr(sent), remedy)
        if self.embeds_layout is self.layout and (
            dynamic := [leaf for leaf in self.layout.leaves() if leaf.root == "item"]
        ):
            expected = f"a layout over item.rows, because the layout depends on {dynamic[0]!r}"
            raise SpecError(f"{where}, embeds", expected, repr(self.embeds))
        if isinstance(self.embeds, Field):
            placing = self.layout.leaves().union(*(update.leaves() for update in self.update))
            roots = {leaf.root for leaf in placing}
            told_by_fields = "fields" in roots and roots.isdisjoint(("item", "function"))
            if self.embeds != flat(item.rows) or not told_by_fields:
                expected = "True, a layout, or flat(item.rows) where layout and targets read fields"
                raise SpecError(f"{where}, embeds", expected, repr(self.embeds))

    def _check_identity(self, where: str) -> None:
        """Refuse fields that the items, or their parts, cannot be."""
        processed = {name: field for name, field in self.fields.items() if not field.is_derived}
        parts = sorted(self.item.part_names)
        expected_fields = parts or list(processed)[:1]
        if not self.item.is_field or sorted(processed) != expected_fields:
            expected = f"a field for each of {parts}" if parts else "a Tensor item and one field"
            got = f"{self.item!r} and fields {sorted(processed)}"
            raise SpecError(where, f"{expected}, or a process", got)
        for field in processed.values():
            if isinstance(field, Shared):
                expected = "a batched or flat field where there is no process"
                raise SpecError(where, expected, repr(field))

    def _check_positions(self, where: str) -> None:
        """Refuse positions that the device cannot compute: it knows the config and the fields that
        the model receives."""
        assert self.positions is not None
        if len(self.positions) not in (3, 4) or not self.has_positions:
            got = repr(self.positions) if self.has_positions else "an item without positions"
            raise SpecError(where, "(t, h, w) or (t, h, w, scale)", got)
        for leaf in leaves(self.positions):
            hidden = leaf.root == "fields" and leaf.keys and self._is_hidden(leaf.keys[0])
            if leaf.root not in ("fields", "cfg") or hidden:
                expected, remedy = "fields that the model gets, and cfg", "Declare a derived field."
                raise SpecError(where, expected, repr(leaf), remedy)

    def _is_hidden(self, name: Any) -> bool:
        return name in self.fields and self.fields[name].hidden

    def _check_raw(self, where: str) -> None:
        """Refuse what raw input cannot have: `forward` receives the items of all requests of a
        batch together, in the order of the requests."""
        if self.limit != 1:
            raise SpecError(where, "limit=1 for an item without positions", repr(self.limit))
        if self.embeds:
            expected = "no embeds for an item without positions"
            raise SpecError(where, expected, repr(self.embeds))
        for name, declared in self.fields.items():
            if isinstance(declared, Shared) and not declared.is_derived:
                expected = "batched, flat or constant fields of an item without positions"
                raise SpecError(f"{where}, fields[{name!r}]", expected, repr(declared))

    @property
    def has_positions(self) -> bool:
        """Whether an item takes positions in the prompt."""
        return bool(self.update) or self.layout != nothing

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """This modality with some arguments of `Modality` changed, checked like a new one.

        Raises:
            SpecError: as for `Modality`.
        """
        parts = {**dict(self), **(update or {})}
        return type(self)(parts.pop("name"), **parts)

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
        known = () if layout is None else layout.leaves() | leaves(self.positions)
        read = {leaf.keys[0] for leaf in known if leaf.root == "fields" and leaf.keys}
        return {
            name: Tensor(field.shape or (), field.dtype or "float32")
            for name, field in self.fields.items()
            if name in read
        }

    def leaves(self) -> frozenset[Leaf]:
        """Everything that this modality depends on; see `mmkit.expr.leaves`."""
        return leaves(dict(self))

    def __repr__(self) -> str:
        parts = dict(self)
        name = parts.pop("name")
        parts["update"] = self.update[0] if len(self.update) == 1 else list(self.update)
        if not self.has_positions:
            del parts["layout"], parts["update"]
            parts["tokens"] = 0
        if isinstance(self.process, Identity):
            del parts["process"]
        options = [f"{key}={part!r}" for key, part in parts.items()]
        return f"Modality({', '.join([repr(name), *options])})"


class Declaration(_Declared):
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
        merges: a character whose runs are tokens, for example a line break. Where a layout in a
            prompt meets the prompt or another layout, two such tokens become one, if the tokenizer
            has that token, as in a text that is tokenized as a whole.
        outputs: the model's outputs other than text.
    """

    name: str
    modalities: tuple[Modality, ...]
    prompt: InstanceOf[EndingWith] | InstanceOf[Layout] | None = None
    decoder_prompt: InstanceOf[EndingWith] | InstanceOf[Layout] | None = None
    tokenization_kwargs: Mapping[str, Any] = {}
    merges: Annotated[str, StringConstraints(min_length=1, max_length=1)] | None = None
    outputs: tuple[InstanceOf[Output], ...] = ()
    _module: str = PrivateAttr(default="__main__")

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
        where = f"spec {name!r}"
        for modality in modalities:
            if not isinstance(modality, Modality):
                got = f"a {type(modality).__name__}"
                raise SpecError(where, "modalities, each as an argument of its own", got)
        prompts = {"prompt": prompt, "decoder_prompt": decoder_prompt}
        rewrites = {key: _rewrite(value) for key, value in prompts.items() if value is not None}
        options = dict(tokenization_kwargs or {})
        self._declare(
            where,
            name=name,
            modalities=modalities,
            tokenization_kwargs=options,
            merges=merges,
            outputs=tuple(outputs),
            **rewrites,
        )
        self._module = calling_module()
        if not modalities:
            raise SpecError(where, "at least one modality", "none")
        if self.is_raw and (len(modalities) > 1 or rewrites or outputs):
            got = ", ".join([*(m.name for m in modalities), *(o.name for o in outputs), *rewrites])
            expected = "nothing beside a modality without positions, whose fields take up forward"
            raise SpecError(where, expected, got)
        arguments = sorted({f"{m.item.media}s" if m.item.media else m.name for m in modalities})
        for modality in modalities:
            inputs = modality.process.inputs if isinstance(modality.process, HF) else {}
            if unknown := sorted(set(inputs).difference(arguments)):
                at = f"{where}, {modality.name}: hf(inputs=...)"
                raise SpecError(at, f"arguments among {arguments}", repr(unknown))
        # the model receives fields by name, so a name must tell the modality
        fields = [
            key
            for m in modalities
            for key in (
                *(key for key, field in m.fields.items() if not field.hidden),
                *([f"{m.name}_embeds"] if m.embeds else []),
            )
        ]
        for kind, names in (
            ("modality", [m.name for m in modalities]),
            ("field", fields),
            ("output", [output.name for output in outputs]),
        ):
            if twice := [key for key, count in Counter(names).items() if count > 1]:
                raise SpecError(where, f"one {kind} named {twice[0]!r}", "several")

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

    def __repr__(self) -> str:
        prompts = [
            f"{key}={source(v)}"
            for key in ("prompt", "decoder_prompt")
            if (v := getattr(self, key)) is not None
        ]
        if self.tokenization_kwargs:
            prompts.append(f"tokenization_kwargs={self.tokenization_kwargs!r}")
        if self.merges is not None:
            prompts.append(f"merges={self.merges!r}")
        if self.outputs:
            prompts.append(f"outputs={list(self.outputs)!r}")
        parts = [repr(self.name), *map(repr, self.modalities), *prompts]
        return f"{type(self).__name__}({', '.join(parts)})"

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """This spec with some arguments of `ModelSpec` changed, checked like a new one.

        Raises:
            SpecError: as for `ModelSpec`.
        """
        parts = {**dict(self), **(update or {})}
        return type(self)(parts.pop("name"), *parts.pop("modalities"), **parts)


def _rewrite(value: Any) -> EndingWith | Layout:
    return value if isinstance(value, EndingWith) else as_layout(value)

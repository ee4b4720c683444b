"""The spec: a modality is declared once, and everything that vLLM needs is derived from the declaration."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from .errors import SpecError
from .expr import Expr, Value, expression, first_key, item, leaves, out, root
from .fields import Field
from .items import ItemType, Tensor
from .layout import Layout, embed, tok
from .layout import layout as as_layout
from .process import HF, Identity, Process, hf, identity
from .updates import Update, replace

if TYPE_CHECKING:
    from .generate import Classes
    from .plan import Plan

M = TypeVar("M", bound=type)
_FIELD = "batched(), flat() or shared()"


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

    def __str__(self) -> str:
        return repr(self)


class Modality(_Declared):
    """One kind of item and everything about it.

    Attributes:
        name: the key in ``multi_modal_data``.
        item: what a caller may send.
        layout: what one item becomes in the prompt.
        update: how the layout gets into the prompt: one way, or several in order of preference.
        fields: the processed tensors, by the name under which the model receives them.
        process: how canonical items become these tensors.
        limit: the most items in one request; None for no limit.
        cache: whether processed items may be kept in vLLM's processor cache: False, or an expression over `item.count`
            (the number of items of the request) for processing that depends on it. Wanted where the declaration reads
            `item.count`, since a cached item comes back in requests of other lengths.
        when: whether the model has this modality at all, over `cfg`, `proc` and `tok`.
        embeds: callers may also send precomputed embeddings, as ``{"<name>_embeds": ...}`` or, for image, video and
            audio, as vLLM takes them. Give a layout over ``item.length`` (rows of the embedding) where `layout` depends
            on the raw item.
    """

    name: str
    item: ItemType
    layout: Layout
    update: tuple[Update, ...]
    fields: Mapping[str, Field]
    process: Any
    limit: Any = None
    embeds: bool | Layout = False
    cache: Any = True
    when: Any = True

    def __init__(
        self,
        name: str,
        *,
        item: ItemType,
        fields: Mapping[str, Field],
        layout: Any = None,
        update: Update | list[Update] | tuple[Update, ...] | None = None,
        placeholder: str | None = None,
        tokens: Value = None,
        process: Process | None = None,
        limit: Value = None,
        embeds: Any = False,
        cache: Value = True,
        when: Value = True,
    ) -> None:
        """Declare a modality.

        The plain case has a short form: ``placeholder="<image>", tokens=576`` means
        ``layout=embed(tok["<image>"]) * 576, update=replace(tok["<image>"])``.

        Raises:
            SpecError: a part is missing, contradictory or of the wrong type.
        """
        where = f"modality {name!r}"
        if placeholder is not None or tokens is not None:
            if placeholder is None or tokens is None or layout is not None or update is not None:
                expected = "placeholder and tokens together, or layout and update together"
                raise SpecError(where, expected, "a mixture")
            layout, update = embed(tok[placeholder]) * tokens, replace(tok[placeholder])
        if layout is None or update is None:
            raise SpecError(where, "layout and update", "neither" if layout is update else "one of them")
        if not isinstance(update, (Update, list, tuple)):
            raise SpecError(f"{where}, update", "replace(), insert(), in_place() or a list of them", repr(update))
        if not isinstance(fields, Mapping):
            raise SpecError(f"{where}, fields", f"a dict of {_FIELD}", repr(fields))
        for key, declared in fields.items():
            if not isinstance(declared, Field):
                raise SpecError(f"{where}, fields[{key!r}]", _FIELD, repr(declared))
        if process is None:
            process = identity() if isinstance(item, Tensor) else hf()
        self._declare(
            where,
            name=name,
            item=item,
            layout=as_layout(layout),
            update=(update,) if isinstance(update, Update) else tuple(update),
            fields=dict(fields),
            process=process,
            limit=expression(limit),
            embeds=embeds if isinstance(embeds, bool) else as_layout(embeds),
            cache=expression(cache),
            when=expression(when),
        )
        self._check(where)

    def _check(self, where: str) -> None:
        if not self.update:
            raise SpecError(where, "at least one update", "none")
        if not self.fields:
            raise SpecError(where, "at least one field", "none")
        known = sorted(self.fields)
        if isinstance(self.process, Identity) and (not isinstance(self.item, Tensor) or len(known) != 1):
            got = f"{self.item!r} and fields {known}"
            raise SpecError(where, "a Tensor item and one field for identity()", got)
        if not isinstance(self.process, (Identity, HF)) and not callable(self.process):
            raise SpecError(where, "identity(), hf() or a function for process", repr(self.process))
        if isinstance(self.process, HF) and (unknown := set(self.process.unpad) - set(self.fields)):
            raise SpecError(where, f"unpad to name fields among {known}", repr(sorted(unknown)))
        for leaf in self.leaves():
            if root(leaf) == out and (name := first_key(leaf)) not in self.fields:
                raise SpecError(f"{where}, {leaf!r}", f"a field among {known}", repr(name), "Declare it in fields.")
        if self.cache is True and item.count in self.leaves():
            expected = "cache to say for which item.count processed items may be kept"
            raise SpecError(where, expected, "none", "Write cache=False, or a condition on item.count.")
        if self.embeds and f"{self.name}_embeds" in self.fields:
            expected = f"no field named {self.name}_embeds, which carries precomputed embeddings"
            raise SpecError(where, expected, "one")
        if self.embeds is True and (dynamic := [leaf for leaf in self.layout.leaves() if root(leaf) in (item, out)]):
            expected = f"a layout over item.length, because the layout depends on {dynamic[0]!r}"
            raise SpecError(f"{where}, embeds", expected, "True")

    def leaves(self) -> frozenset[Expr]:
        """Everything that this modality depends on; see `mmkit.expr.leaves`."""
        return _leaves(dict(self))

    def __repr__(self) -> str:
        parts = dict(self)
        name = parts.pop("name")
        parts["update"] = self.update[0] if len(self.update) == 1 else list(self.update)
        return f"Modality({', '.join([repr(name), *(f'{key}={part!r}' for key, part in parts.items())])})"

    def __hash__(self) -> int:
        return hash((self.name, self.item, self.layout, self.update, frozenset(self.fields.items()), self.limit))


class ModelSpec(_Declared):
    """The multimodal side of one model: its name in messages and class names, and its modalities.

    Two specs are equal if they declare the same; a spec can be printed and hashed.

    Attributes:
        name: as above.
        modalities: as above.
        prompt: what becomes of a caller's prompt before items are placed, whether there are any or not: a layout of
            literal ids over `prompt`, as in ``token(prompt) + tok["<sep>"]``, or a function of a `Scope`. None leaves
            it as it is. A prompt may come back expanded: what a layout puts around it is not put there twice, and a
            function must leave its own result as it is.
        decoder_prompt: for an encoder-decoder model, whose items go into the encoder's prompt: the decoder's, likewise.
    """

    name: str
    modalities: tuple[Modality, ...]
    prompt: Layout | None = None
    decoder_prompt: Layout | None = None
    _module: str = PrivateAttr(default="__main__")

    def __init__(self, name: str, *modalities: Modality, prompt: Value = None, decoder_prompt: Value = None) -> None:
        """Declare a model.

        Raises:
            SpecError: no modality, or two that share a name or a field name.
        """
        where = f"spec {name!r}"
        for modality in modalities:
            if not isinstance(modality, Modality):
                got = f"a {type(modality).__name__}"
                raise SpecError(where, "modalities, each as an argument of its own", got)
        prompts = {"prompt": prompt, "decoder_prompt": decoder_prompt}
        layouts = {key: as_layout(value) for key, value in prompts.items() if value is not None}
        self._declare(where, name=name, modalities=modalities, **layouts)
        self._module = _calling_module()
        if not modalities:
            raise SpecError(where, "at least one modality", "none")
        arguments = sorted({m.item.argument or m.name for m in modalities})
        for modality in modalities:
            inputs = modality.process.inputs if isinstance(modality.process, HF) else {}
            if unknown := sorted(set(inputs).difference(arguments)):
                at = f"{where}, {modality.name}: hf(inputs=...)"
                raise SpecError(at, f"arguments among {arguments}", repr(unknown))
        # the model receives fields by name, so a name must tell the modality
        fields = [key for m in modalities for key in (*m.fields, *([f"{m.name}_embeds"] if m.embeds else []))]
        for kind, names in (("modality", [m.name for m in modalities]), ("field", fields)):
            if twice := [key for key, count in Counter(names).items() if count > 1]:
                raise SpecError(where, f"one {kind} named {twice[0]!r}", "several")

    def __getitem__(self, name: str) -> Modality:
        """The modality of that name.

        Raises:
            KeyError: there is none.
        """
        return {modality.name: modality for modality in self.modalities}[name]

    def bind(
        self,
        config: Any,
        tokenizer: Any = None,
        *,
        processor: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Bind to a config and a tokenizer: the compiled form that requests run through. No engine and no vLLM is
        needed.

        Args:
            config: the Hugging Face config of the model.
            tokenizer: its tokenizer; None for a model that runs without one.
            processor: its Hugging Face processor, for specs that use `proc`.
            kwargs: `mm_processor_kwargs` for every request.

        Raises:
            SpecError: the first thing that cannot work, as for `check`.
        """
        from .plan import Plan

        return Plan(self, config, tokenizer, processor, kwargs)

    def check(self, config: Any, tokenizer: Any = None, *, processor: Any = None) -> None:
        """Raise on the first thing that cannot work with this config and tokenizer: an attribute that the config lacks,
        a token that the vocabulary lacks, an id outside the vocabulary, a shape or limit out of range, an item without
        placeholders.

        Arguments as for `bind`.

        Raises:
            SpecError: names the modality, the part, and what to do.
        """
        self.bind(config, tokenizer, processor=processor)

    @property
    def classes(self) -> Classes:
        """The generated vLLM classes: `info`, `dummy_inputs`, `processor`. Generated at the first use; needs vLLM.

        They are ordinary classes, importable from ``mmkit.generated.<module of the spec>.<its variable>``, and may be
        subclassed.

        Raises:
            VllmApiError: the installed vLLM has none of the interfaces that mmkit knows.
        """
        from .generate import classes

        return classes(self)

    def register(
        self,
        model: M | None = None,
        *,
        info: type | None = None,
        dummy_inputs: type | None = None,
        processor: type | None = None,
    ) -> Any:
        """Register the generated classes, and the model class itself, with vLLM. Use it as a decorator of the model
        class.

        Spawned processes (engine core, workers, the registry's inspection) register it too: the calling module is noted
        in the environment variable MMKIT_MODULES, which mmkit's plugin reads in each of them.

        Args:
            model: the model class, your own or one of vLLM's; its `__name__` is the architecture in the checkpoint's
                config.
            info: a subclass of `classes.info` to register in place of it.
            dummy_inputs: the same for `classes.dummy_inputs`.
            processor: the same for `classes.processor`.

        Returns:
            The model class, or a decorator if none is given.

        Raises:
            SpecError: the class cannot run the spec; see `mmkit.model.check_class`.
            VllmApiError: the installed vLLM has none of the interfaces that mmkit knows.
        """
        if model is None:
            return lambda cls: self.register(cls, info=info, dummy_inputs=dummy_inputs, processor=processor)
        from .model import check_class
        from .plugin import announce
        from .vllm_api import register

        check_class(self, model)
        made = self.classes
        register(
            model,
            info=info or made.info,
            dummy_inputs=dummy_inputs or made.dummy_inputs,
            processor=processor or made.processor,
        )
        announce(_calling_module())
        model.mm_spec = self  # type: ignore[attr-defined]
        return model

    def __repr__(self) -> str:
        prompts = [f"{key}={v!r}" for key in ("prompt", "decoder_prompt") if (v := getattr(self, key)) is not None]
        return f"ModelSpec({', '.join([repr(self.name), *map(repr, self.modalities), *prompts])})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelSpec):
            return NotImplemented
        return dict(self) == dict(other)  # wherever they are declared

    def __hash__(self) -> int:
        return hash(tuple(dict(self).values()))


def _leaves(part: Any) -> frozenset[Expr]:
    """The leaves of every expression and layout in a part of a declaration."""
    if isinstance(part, (Expr, Layout)):
        return leaves(part)
    if dataclasses.is_dataclass(part):
        part = [getattr(part, f.name) for f in dataclasses.fields(part)]
    elif isinstance(part, Mapping):
        part = part.values()
    elif not isinstance(part, (list, tuple)):
        return frozenset()
    return frozenset().union(*map(_leaves, part))


def _calling_module() -> str:
    """The module whose code calls this one, as `enum` and `typing` find it."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "__main__"))

"""A spec bound to one config and tokenizer: the compiled form that requests run through.

Everything that depends on the config and the vocabulary alone is evaluated once, when the plan is made; layouts are
evaluated once per item geometry and kept.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import torch

from .errors import InputError, MmkitError, SpecError
from .expr import Expr, Opaque, Scope, evaluate, first_key, item, out, plain, root
from .fields import Field
from .items import ItemType
from .layout import Laid, Layout, nothing, whole
from .process import HF, Identity, unpadded
from .updates import Placement, Resolved, Target, Update, place, refuse_surplus
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from .spec import Modality, ModelSpec

T = TypeVar("T")

_GEOMETRIES = 4096
"""Layouts kept per modality; one of a few thousand ids takes some tens of kilobytes."""

_NUMBERED = 64
"""Numbered placeholders (``<|image_1|>``) that are known before there is an item."""

_CONFIGURED = 32
"""Plans kept for distinct `mm_processor_kwargs`."""


@dataclass(frozen=True)
class Processed:
    """The processed fields of the items of one modality.

    Attributes:
        data: what vLLM splits, by field: a list of parts for batched fields, the whole tensor for others.
        sizes: the extent of each item, for flat fields.
        parts: per item, its part of every field.
    """

    data: Mapping[str, Any]
    sizes: Mapping[str, list[int]]
    parts: list[dict[str, Any]]


@dataclass(frozen=True)
class Preview:
    """What a request becomes.

    Attributes:
        prompt_token_ids: the prompt with the layouts in it.
        placements: where each item's layout stands, in prompt order.
        fields: per modality and item, the processed fields.
    """

    prompt_token_ids: list[int]
    placements: list[Placement]
    fields: dict[str, list[dict[str, Any]]]


class BoundModality:
    """One modality of a plan.

    Attributes:
        spec: the declaration.
        where: names the modality in errors, as ``robot.actions``.
        item: the item type, bound.
        layout: the layout, with its static parts evaluated.
        fields: the fields, bound.
        hf: how to call a Hugging Face processor, bound; None where `process` is another way.
        limit: the most items in one request, or None.
        depends_on_index: an item's layout or target depends on its position among the items.
        kept: what an adapter derives from the modality, for as long as this lives.
    """

    def __init__(self, spec: Modality, where: str, scope: Scope) -> None:
        self.spec, self.where, self._scope = spec, where, scope
        self.name = spec.name
        self.item: ItemType = self._bound("item", spec.item)
        self.layout: Layout = self._bound("layout", spec.layout)
        self.updates: list[Update] = [self._bound("update", update) for update in spec.update]
        self.fields: dict[str, Field] = {name: self._bound("fields", field) for name, field in spec.fields.items()}
        self.hf: HF | None = self._bound("process", spec.process) if isinstance(spec.process, HF) else None
        # derived fields may depend on processed ones, and the sizes of flat fields on both
        self._in_order = sorted(self.fields.items(), key=lambda f: (f[1].kind == "flat", f[1].value is not None))
        self._processed = [name for name, field in self.fields.items() if field.value is None]
        self._of_field = {name: self._naming(f"fields[{name!r}]") for name in self.fields}
        self._needs_scopes = any(f.varies for f in self.fields.values()) or bool(self.hf and self.hf.unpad)
        with self._naming("limit"):
            limit: int | None = evaluate(spec.limit, scope)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise SpecError(f"{where}, limit", "a whole number >= 0 or None", repr(limit))
        self.limit = limit
        self.embeds: Layout | None = self.layout if spec.embeds else None
        if isinstance(spec.embeds, Layout):
            self.embeds = self._bound("embeds", spec.embeds)
        # what tells one geometry from another, for raw items and for embeddings
        self._leaves = {False: self._varying(self.layout), True: self._varying(self.embeds or nothing)}
        leaves = self._leaves[False] | self._leaves[True]
        self._opaque = any(isinstance(leaf, Opaque) for leaf in leaves)  # a function may read anything
        self._reads_out = self._opaque or any(root(leaf) == out for leaf in leaves)
        self.depends_on_index = self._opaque or item.index in leaves
        self._layouts: OrderedDict[Any, list[Resolved]] = OrderedDict()
        self._cacheable: OrderedDict[int, bool] = OrderedDict()
        self.kept: dict[str, Any] = {}

    def _naming(self, part: str) -> _Naming:
        return _Naming(f"{self.where}, {part}")

    def _bound(self, part: str, declared: Any) -> Any:
        with self._naming(part):
            return declared.bind(self._scope)

    def _varying(self, layout: Layout) -> frozenset[Expr]:
        return layout.leaves().union(*(update.leaves() for update in self.updates))

    @property
    def embeds_field(self) -> str:
        """The field that carries precomputed embeddings."""
        return f"{self.name}_embeds"

    # -- items -------------------------------------------------------------------------------------------------------

    def parse(self, data: object) -> list[Any]:
        """A caller's data as canonical items. None stands for an item whose content a `multi_modal_uuids` entry names.

        Raises:
            InputError: no item at all, or a malformed one.
        """
        if data is None:
            expected = f"{self.item.expected} or a list of them"
            raise InputError(self.where, expected, "None", "Send the item, or leave the modality out.")
        values = self.item.split(data, self.where)
        if not values:
            raise InputError(self.where, "at least one item", "none", "Send the items, or leave the modality out.")
        return [None if v is None else self.item.canonical(v, f"{self.where}[{i}]") for i, v in enumerate(values)]

    def check_count(self, count: int, limit: int | None) -> None:
        """Refuse surplus items.

        Raises:
            InputError: more than `limit` of them.
        """
        if limit is not None and count > limit:
            raise InputError(self.where, f"at most {limit} item(s)", str(count), "Send fewer items.")

    def scope(self, value: Any, index: int, out: Mapping[str, Any] | None = None, count: int = 1) -> Scope:
        """What expressions see for one canonical item of a request with `count` of them."""
        facts = value if isinstance(value, SimpleNamespace) else self.item.facts(value, index)
        facts.count = count
        return self._scope.of(facts, out)

    def may_cache(self, count: int) -> bool:
        """Whether items of a request with `count` of them may be kept in vLLM's processor cache."""
        if self.spec.cache is True:
            return True
        return _kept(self._cacheable, count, lambda: self._may_cache(count), _GEOMETRIES)

    def _may_cache(self, count: int) -> bool:
        with self._naming("cache"):
            return bool(evaluate(self.spec.cache, replace(self._scope, item=SimpleNamespace(count=count))))

    # -- processing --------------------------------------------------------------------------------------------------

    @cached_property
    def hf_processor(self) -> Any:
        """What `hf(processor)` names; None for the checkpoint's own."""
        with self._naming("process"):
            return evaluate(self.hf.processor, self._scope) if self.hf else None

    @cached_property
    def hf_text(self) -> str | None:
        """The text of one item that the Hugging Face processor wants; None for none."""
        if self.hf is None or self.hf.text is None:
            return None
        with self._naming("process"):
            return str(evaluate(self.hf.text, self._scope))

    def process(self, values: Sequence[Any], count: int | None = None) -> Processed:
        """Run `identity()` or the process function on canonical items; for `hf()` the caller runs the processor, then
        `finish`.

        Args:
            values: canonical items.
            count: number of items of the modality in the request, where some of them are cached.

        Raises:
            SpecError: the outputs contradict the declared fields.
        """
        process = self.spec.process
        if isinstance(process, Identity):
            ((name, declared),) = self.fields.items()
            if declared.kind == "batched":
                raw: Mapping[str, Any] = {name: list(values)}
            elif declared.kind == "flat":
                raw = {name: torch.cat(list(values), dim=declared.dim)}
            else:
                raise SpecError(f"{self.where}, {name}", "a batched or flat field for identity()", declared.kind)
        else:
            raw = process(values, self._scope)
            if not isinstance(raw, Mapping):
                raise SpecError(f"{self.where}, process", "a dict of tensors", type(raw).__name__)
            if unknown := set(raw).difference(self._processed):
                expected = f"process to return declared fields, {sorted(self._processed)}"
                remedy = "Declare them in fields, or do not return them."
                raise SpecError(self.where, expected, repr(sorted(unknown)), remedy)
        return self.finish(raw, values, count)

    def finish(self, raw: Mapping[str, Any], values: Sequence[Any], count: int | None = None) -> Processed:
        """Split processed tensors into items and check them against the declared fields.

        Raises:
            SpecError: a field is missing, has another number of items, or another shape or dtype than stated.
        """
        if self.hf is not None and self.hf.outputs:
            raw = {self.hf.outputs.get(name, name): value for name, value in raw.items()}
        if missing := [name for name in self._processed if raw.get(name) is None]:
            got = f"{sorted(raw)}, without {missing}"
            raise SpecError(f"{self.where}, process", f"the fields {sorted(self.fields)}", got)
        parts: list[dict[str, Any]] = [{} for _ in values]
        scopes = [self._scope] * len(values)
        if self._needs_scopes:
            scopes = [self.scope(value, i, parts[i], count or len(values)) for i, value in enumerate(values)]
        extents: dict[str, list[int]] = {}
        for name, declared in self._in_order:
            if declared.value is not None:
                with self._of_field[name]:
                    shared = declared.kind == "shared"
                    made = [declared.derive(self._scope)] * len(values) if shared else [*map(declared.derive, scopes)]
            else:
                if declared.kind == "flat":
                    with self._of_field[name]:
                        extents[name] = [whole(evaluate(declared.sizes, s), declared.sizes, "a size") for s in scopes]
                made = declared.split(raw[name], extents.get(name), len(values), self._of_field[name].where)
            for fields, part in zip(parts, made, strict=True):
                fields[name] = part
        for name, sizes in self.hf.unpad.items() if self.hf else ():
            for fields, scope in zip(parts, scopes, strict=True):
                fields[name] = unpadded(fields[name], sizes, scope)
        data = {}
        for name, declared in self.fields.items():
            own = [fields[name] for fields in parts]
            with self._of_field[name]:
                for i, (part, scope) in enumerate(zip(own, scopes, strict=True)):
                    declared.check(part, scope, i)
            data[name] = own if declared.kind == "batched" else own[0] if declared.kind == "shared" else raw[name]
        return Processed(data, extents, parts)

    # -- placeholders ------------------------------------------------------------------------------------------------

    def varies(self, embeds: bool) -> bool:
        """Whether items, or precomputed embeddings, differ in their layouts or targets."""
        return self._opaque or bool(self._leaves[embeds])

    def ways(self, scope: Scope, *, embeds: bool = False) -> list[Resolved]:
        """The alternatives of one item, in order of preference: target, layout, mask.

        Raises:
            SpecError: an id outside the vocabulary, or an item without any placeholder.
        """
        if self._opaque:
            return self._resolve(scope, embeds)
        key = (embeds, *(_geometry(leaf, scope) for leaf in self._leaves[embeds]))
        return _kept(self._layouts, key, lambda: self._resolve(scope, embeds), _GEOMETRIES)

    def _resolve(self, scope: Scope, embeds: bool) -> list[Resolved]:
        layout = self.embeds if embeds else self.layout
        assert layout is not None
        where = f"{self.where}, layout"
        with self._naming("layout"):
            laid = layout.lay(scope)
        if not laid.num_embeds:
            raise SpecError(where, "at least one embed() position per item", f"{len(laid)} literal ids")
        _check_ids(laid.ids, scope, where)
        ways = []
        for update in self.updates:
            with self._naming("update"):
                kind, target = update.resolve(scope)
            _check_ids(target, scope, f"{self.where}, update")
            if kind == "replace" and not target:
                raise SpecError(f"{self.where}, update", "a target of at least one token", "none")
            ways.append(Resolved(kind, target, laid))
        return ways

    def numbered(self) -> list[Target]:
        """The targets of the first items, where they are numbered (``<|image_1|>``). A target that is the same for all
        items may be an ordinary token of a prompt without any."""
        found: list[Target] = []
        for update in self.updates:
            if update.kind == "replace" and update.leaves() == {item.index}:
                with suppress(SpecError):  # the vocabulary ends somewhere
                    for index in range(_NUMBERED if self.limit is None else min(self.limit, _NUMBERED)):
                        found.append(update.resolve(replace(self._scope, item=SimpleNamespace(index=index)))[1])
        return found

    def rows(self, fields: Mapping[str, Any]) -> int | None:
        """Encoder rows of an item, given some of its processed fields; None where they do not tell."""
        if all(root(leaf) == out and first_key(leaf) in fields for leaf in self._leaves[False]):
            return self._laid(SimpleNamespace(), fields).num_embeds
        return None

    def _laid(self, value: Any, fields: Mapping[str, Any] | None) -> Laid:
        """The preferred layout of a raw item that is the only one."""
        return self.ways(self.scope(value, 0, fields))[0].laid

    def largest(self, process: Callable[[Any], Mapping[str, Any]] | None = None) -> tuple[Any, int]:
        """The item with the most encoder rows, and how many they are.

        Args:
            process: a canonical item to its processed fields; wanted where `needs_hf` holds.
        """
        process = process or self._process_one
        candidates = self.item.candidates()
        rows = [self._laid(v, process(v) if self._reads_out else None).num_embeds for v in candidates]
        return candidates[rows.index(max(rows))], max(rows)

    def _process_one(self, value: Any) -> Mapping[str, Any]:
        return self.process([value]).parts[0]

    @property
    def needs_hf(self) -> bool:
        """The layout or the targets need, or may need, the output of the Hugging Face processor."""
        return self.hf is not None and self._reads_out

    def rehearse(self) -> list[Laid]:
        """Take the largest and the smallest item to their layouts, as far as that goes without the HF processor.

        Raises:
            SpecError: what would fail at the first request.
        """
        if self.needs_hf:
            return []
        made = []
        for value in self.item.extremes():
            fields = None
            if self.hf is None:
                with _calling(SpecError, f"{self.where}, process", "to take a well-formed item"):
                    fields = self._process_one(value)
            made.append(self._laid(value, fields))
        return made


class Plan:
    """A spec bound to one config and tokenizer; make it with `ModelSpec.bind`.

    Attributes:
        spec: the declaration.
        modalities: the bound modalities, by name.
        vocab_size: number of ids of the language model.
        embed_ids: the placeholder ids known when the plan is made.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: Any,
        tokenizer: Any = None,
        processor: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = spec
        self.vocab_size = vocab_size(config)
        self._ids = list[Annotated[int, msgspec.Meta(ge=0, lt=self.vocab_size)]]
        vocabulary = tokenizer if tokenizer is None or isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        scope = Scope(cfg=config, proc=processor, tok=vocabulary, kwargs=dict(kwargs or {}))
        self._configured: OrderedDict[str, Plan] = OrderedDict()
        self._bind(scope)
        owners: dict[int, list[str]] = {}
        for modality in self.modalities.values():
            fixed = [*modality.layout.fixed(), *(modality.embeds.fixed() if modality.embeds else ())]
            for laid in fixed:
                _check_ids(laid.ids, scope, f"{modality.where}, layout")
            for laid in fixed + modality.rehearse():
                for token in laid.embed_ids:
                    owners.setdefault(token, []).append(modality.name)
        self._owners = owners
        self.embed_ids = frozenset(owners)

    def _bind(self, scope: Scope) -> None:
        self._scope = scope
        self.modalities = {}
        for m in self.spec.modalities:
            where = f"{self.spec.name}.{m.name}"
            with _Naming(f"{where}, when"):
                present = evaluate(m.when, scope)
            if present:
                self.modalities[m.name] = BoundModality(m, where, scope)
        self._numbered = {target: m.name for m in self.modalities.values() for target in m.numbered()}
        layouts = {"prompt": self.spec.prompt, "decoder_prompt": self.spec.decoder_prompt}
        self._prompts = {name: value.bind(scope) for name, value in layouts.items() if value is not None}

    def configured(self, kwargs: Mapping[str, Any], processor: Any) -> Plan:
        """This plan for the `mm_processor_kwargs` of one request, with the Hugging Face processor that they configure
        as `proc`."""
        if kwargs == self._scope.kwargs:
            return self
        try:
            key = json.dumps(kwargs, sort_keys=True)
        except TypeError:  # values that JSON lacks: do not keep the plan
            return self._with(kwargs, processor)
        return _kept(self._configured, key, lambda: self._with(kwargs, processor), _CONFIGURED)

    def _with(self, kwargs: Mapping[str, Any], processor: Any) -> Plan:
        plan = copy(self)
        plan._bind(replace(self._scope, kwargs=dict(kwargs), proc=processor))
        return plan

    def rewrite(self, part: Literal["prompt", "decoder_prompt"], prompt: list[int]) -> list[int]:
        """The prompt, or the decoder's, that the spec makes of a caller's prompt; the prompt itself where it says none.

        Raises:
            InputError: an id that the model does not have, or a prompt that the function of the spec does not take.
        """
        if (declared := self._prompts.get(part)) is None:
            return prompt
        where = f"{self.spec.name}.{part}"
        with _calling(InputError, where, "a prompt that the spec can rewrite"):
            laid = declared.lay(replace(self._scope, prompt=prompt))
        if laid.num_embeds:
            raise SpecError(where, "literal ids, since placeholders belong to items", "embed()")
        _check_ids(laid.ids, self._scope, where)
        return list(laid.ids)

    def preview(self, prompt: Sequence[int], data: Mapping[str, object]) -> Preview:
        """What a request becomes, without vLLM.

        Args:
            prompt: token ids.
            data: what a caller puts into ``multi_modal_data``.

        Raises:
            InputError: the request would be refused.
            SpecError: a modality wants the Hugging Face processor, which vLLM calls.
        """
        self.check_ids(prompt)
        self.check_names(data)
        ways, fields = {}, {}
        for name, sent in data.items():
            modality = self.modalities[name]
            if modality.hf is not None:
                raise SpecError(modality.where, "a process that runs without vLLM", repr(modality.hf))
            values = modality.parse(sent)
            modality.check_count(len(values), modality.limit)
            fields[name] = modality.process(values).parts
            scopes = [modality.scope(v, i, fields[name][i], len(values)) for i, v in enumerate(values)]
            ways[name] = [*map(modality.ways, scopes)]
        return Preview(*self.place(self.rewrite("prompt", list(prompt)), ways), fields)

    def spell(self, data: Mapping[str, object]) -> list[int]:
        """The ids that stand for items in a caller's prompt, modality by modality: targets where the update replaces
        them, whole layouts where the caller writes these, nothing where they are inserted.

        Args:
            data: what a caller puts into ``multi_modal_data``.

        Raises:
            InputError: the items would be refused.
        """
        self.check_names(data)
        ids: list[int] = []
        for name, sent in data.items():
            modality = self.modalities[name]
            if modality.needs_hf:
                expected = "a prompt, since the placeholders depend on the Hugging Face processor"
                raise InputError(f"{self.spec.name}.prompt", expected, "none")
            values = modality.parse(sent)
            if None in values:
                raise InputError(f"{modality.where}[{values.index(None)}]", modality.item.expected, "None")
            fields = modality.process(values).parts if modality.hf is None else [None] * len(values)
            for index, value in enumerate(values):
                ids += modality.ways(modality.scope(value, index, fields[index], len(values)))[0].spelled
        return ids

    def check_ids(self, prompt: Sequence[Any]) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            InputError: an id that is no whole number, or lies outside the vocabulary.
        """
        try:
            msgspec.convert(prompt, self._ids)  # one pass in C
        except msgspec.ValidationError:
            for position, token in enumerate(prompt):
                where = f"{self.spec.name}.prompt[{position}]"
                if type(token) is not int:
                    got = f"{type(token).__name__} {token!r}"
                    raise InputError(where, "a token id", got, "Send integers.") from None
                if not 0 <= token < self.vocab_size:
                    expected = f"a token id from 0 to {self.vocab_size - 1}"
                    raise InputError(where, expected, str(token), "Check the tokenizer.") from None
            raise

    def check_names(self, data: Iterable[str]) -> None:
        """Refuse data of modalities that the model does not have.

        Raises:
            InputError: names the first of them.
        """
        if unknown := [name for name in data if name not in self.modalities]:
            expected = f"modalities among {sorted(self.modalities)}"
            base = unknown[0].removesuffix("_embeds")
            remedy = f'Send embeddings as {{"{base}": {{"{base}_embeds": ...}}}}.' if base in self.modalities else ""
            raise InputError(f"{self.spec.name}.multi_modal_data", expected, repr(unknown[0]), remedy)

    def check_bare(self, prompt: Sequence[int], present: Collection[str] = ()) -> None:
        """Refuse placeholder ids of modalities that have no items in the request, and numbered placeholders if it has
        none at all.

        Args:
            prompt: token ids.
            present: modalities with at least one item.

        Raises:
            InputError: names the modality and how many placeholder ids there are.
        """
        bare = {token for token, names in self._owners.items() if set(present).isdisjoint(names)}
        if bare and not bare.isdisjoint(prompt):
            token = min(bare.intersection(prompt))
            name = self._owners[token][0]
            got = f"{list(prompt).count(token)} placeholder id(s) {token} and no item"
            remedy = f'Send multi_modal_data={{"{name}": [...]}}, or leave the placeholders out.'
            raise InputError(self.modalities[name].where, "one item per placeholder", got, remedy)
        if not present:
            refuse_surplus(prompt, self._numbered, self.spec.name)

    def place(
        self, prompt: list[int], items: Mapping[str, Sequence[Sequence[Resolved]]]
    ) -> tuple[list[int], list[Placement]]:
        """Bring the layouts of all items into a prompt; see `mmkit.updates.place`."""
        self.check_bare(prompt, [name for name, alternatives in items.items() if alternatives])
        return place(prompt, items, self.spec.name, self._numbered)


class _Naming:
    """Say in errors of the spec where they arose."""

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, SpecError):
            raise SpecError(f"{self.where}: {error}") from error


@contextmanager
def _calling(kind: type[MmkitError], where: str, expected: str) -> Iterator[None]:
    """Make one of our errors of whatever a function of the spec raises."""
    try:
        yield
    except MmkitError:
        raise
    except Exception as error:
        raise kind(where, expected, f"{type(error).__name__}: {error}") from error


def _geometry(leaf: Expr, scope: Scope) -> Any:
    """The value of a leaf as part of a key; None where it has none. A layout that needs it will say so, and one that
    guards it by `where` does not need it."""
    try:
        return plain(evaluate(leaf, scope))
    except SpecError:
        return None


def _kept(kept: OrderedDict[Any, T], key: Any, make: Callable[[], T], most: int) -> T:
    """What is kept under a key, or else what is made, and kept in place of the oldest where the key can be hashed."""
    try:
        found = kept.get(key)
    except TypeError:
        return make()
    if found is None:
        found = kept[key] = make()
        if len(kept) > most:
            kept.popitem(last=False)
    return found


def vocab_size(config: Any) -> int:
    """Number of ids of the language model in a Hugging Face config.

    Raises:
        SpecError: the config does not tell.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = text.get("vocab_size") if isinstance(text, Mapping) else getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        raise SpecError("config", "a vocab_size in the language model's part", repr(size))
    return size


def _check_ids(ids: Sequence[int], scope: Scope, where: str) -> None:
    if ids and max(ids) >= (size := vocab_size(scope.cfg)):
        remedy = "Use a reserved id inside the vocabulary: vLLM refuses prompts with other ids."
        raise SpecError(where, f"token ids below the vocabulary size {size}", str(max(ids)), remedy)

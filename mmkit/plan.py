"""A spec bound to one config and tokenizer: the compiled form that requests run through.

Everything that depends on the config and the vocabulary alone is evaluated once, when the plan is made; layouts are
evaluated once per item geometry and kept.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import msgspec
import torch

from .errors import InputError, MmkitError, SpecError
from .expr import COUNT, INDEX, Fields, Leaf, Scope, evaluate, plain, truth
from .field import Field, Flat
from .items import ItemType, embeddings, unscoped
from .layout import Laid, Layout, nothing
from .process import HF, Identity, unpadded
from .updates import (
    EndingWith,
    Insert,
    NotFound,
    Placement,
    Replace,
    Resolved,
    Target,
    Update,
    may_be_split,
    place,
    place_in_text,
    refuse_surplus,
)
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from .spec import Declaration, Modality

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LAYOUT_IDS = 1 << 20
"""Token ids of the layouts that are kept per modality, some ten megabytes."""

_COUNTS = 4096
"""Numbers of items for which it is kept whether they may be cached."""

_KEYS = 256
"""Values of the largest tensor that tells one layout from another: one that depends on more is made for each item."""

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
    parts: Sequence[dict[str, Any]]


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
    fields: dict[str, Sequence[dict[str, Any]]]


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
        reads_fields: the layout or the targets read processed fields.
        depends_on_index: an item's layout or target depends on its position among the items.
        kept: what an adapter derives from the modality, for as long as this lives.
    """

    def __init__(self, spec: Modality, where: str, scope: Scope) -> None:
        scope = replace(scope, kwargs=unscoped(scope.kwargs or {}, [spec.item]))
        self.spec, self.where, self._scope = spec, where, scope
        self.name = spec.name
        self.item: ItemType = self._bound("item", spec.item)
        self.layout: Layout = self._bound("layout", spec.layout)
        self.updates: list[Update] = [self._bound("update", update) for update in spec.update]
        self.fields: dict[str, Field] = {name: self._bound("fields", field) for name, field in spec.fields.items()}
        self.hf: HF | None = self._bound("process", spec.process) if isinstance(spec.process, HF) else None
        if self.hf is None:
            self.item = self.item.for_function()
        # derived fields may depend on processed ones, and the sizes of flat fields on both
        self._in_order = sorted(self.fields.items(), key=lambda f: (isinstance(f[1], Flat), f[1].is_derived))
        self._processed = [name for name, field in self.fields.items() if not field.is_derived]
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
        roots = {leaf.root for leaf in leaves}
        self._opaque = "function" in roots  # it may read anything
        self.reads_fields = self._opaque or "fields" in roots
        self.depends_on_index = self._opaque or INDEX in leaves
        self._layouts: _Kept[list[Resolved]] = _Kept(_LAYOUT_IDS, lambda ways: len(ways[0].laid) + _KEYS)
        self._cacheable: _Kept[bool] = _Kept(_COUNTS)
        self.kept: dict[Any, Any] = {}

    def _naming(self, part: str) -> _Naming:
        return _Naming(f"{self.where}, {part}")

    def _bound(self, part: str, declared: Any) -> Any:
        with self._naming(part):
            return declared.bind(self._scope)

    def _varying(self, layout: Layout) -> frozenset[Leaf]:
        return layout.leaves().union(*(update.leaves() for update in self.updates))

    @property
    def embeds_field(self) -> str:
        """The field that carries precomputed embeddings."""
        return f"{self.name}_embeds"

    # -- items -------------------------------------------------------------------------------------------------------

    def parse(self, data: object) -> list[Any]:
        """A caller's data as canonical items. None stands for an item whose content a `multi_modal_uuids` entry names.

        Raises:
            InputError: None in place of the data, or a malformed item. An empty list is no item, as in vLLM.
        """
        if data is None:
            expected = f"{self.item.expected} or a list of them"
            raise InputError(self.where, expected, "None", "Send the item, or leave the modality out.")
        values = self.item.split(data, self.where)
        return [None if v is None else self.item.canonical(v, f"{self.where}[{i}]") for i, v in enumerate(values)]

    def take(self, data: object, hidden_size: int | None) -> tuple[list[Any], bool]:
        """A caller's data as canonical items, or as the rows of precomputed embeddings; and whether it is these.

        Raises:
            InputError: see `parse` and `mmkit.items.embeddings`.
        """
        if self.embeds is not None:
            rows = embeddings(data, self.item, self.embeds_field, hidden_size, self.where)
            if rows is not None:
                return rows, True
        elif isinstance(data, Mapping) and set(data) == {self.embeds_field}:
            raise InputError(self.where, self.item.expected, self.embeds_field, "Send the raw item.")
        return self.parse(data), False

    def take_whole(self, data: object, hidden_size: int | None) -> tuple[list[Any], bool]:
        """The same where no cache has what a None stands for.

        Raises:
            InputError: as for `take`, or None in place of an item.
        """
        values, embeds = self.take(data, hidden_size)
        if (absent := next((i for i, value in enumerate(values) if value is None), None)) is not None:
            raise InputError(f"{self.where}[{absent}]", self.item.expected, "None", "Send the item itself.")
        return values, embeds

    def check_rows(self, index: int, rows: int, *, sent: int | None, most: int | None) -> None:
        """Compare the encoder rows of an item with the embeddings that come for it, and with the largest item.

        Args:
            index: position among the items of the modality.
            rows: encoder rows in its layout.
            sent: rows of its precomputed embeddings; None for a raw item.
            most: encoder rows of the largest item that the spec states, which vLLM's memory and schedule are made for;
                None where they are not known.

        Raises:
            InputError: they differ, or there are too many.
        """
        if sent is not None and sent != rows:
            raise InputError(f"{self.where}[{index}]", f"{rows} embedding row(s)", str(sent))
        if most is not None and rows > most:
            expected = f"at most {most} encoder row(s), as the stated largest item has"
            raise InputError(f"{self.where}[{index}]", expected, str(rows), "Send a smaller item.")

    def check_count(self, count: int, limit: int | None) -> None:
        """Refuse surplus items.

        Raises:
            InputError: more than `limit` of them.
        """
        if limit is not None and count > limit:
            remedy = f"At most {limit} {self.name}(s) may be provided in one prompt."  # vLLM's words
            raise InputError(self.where, "fewer items", str(count), remedy)

    def scope(self, value: Any, index: int, fields: Mapping[str, Any] | None = None, count: int = 1) -> Scope:
        """What expressions see for one canonical item of a request with `count` of them."""
        facts = value if isinstance(value, SimpleNamespace) else self.item.facts(value, index)
        facts.count = count
        if fields is not None and type(fields) is not Fields:
            fields = Fields(fields)
        return self._scope.of(facts, fields)

    def may_cache(self, count: int) -> bool:
        """Whether items of a request with `count` of them may be kept in vLLM's processor cache."""
        if self.spec.cacheable is True:
            return True
        return self._cacheable.get(count, lambda: self._may_cache(count))

    def _may_cache(self, count: int) -> bool:
        with self._naming("cacheable"):
            return truth(self.spec.cacheable, replace(self._scope, item=SimpleNamespace(count=count)))

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
            SpecError: the outputs contradict the declared fields, or the function raises anything but an InputError,
                which is the caller's.
        """
        process = self.spec.process
        if isinstance(process, Identity):
            ((name, declared),) = self.fields.items()
            if isinstance(declared, Flat):
                raw: Mapping[str, Any] = {name: torch.cat(list(values), dim=declared.dim)}
            else:
                raw = {name: list(values)}
        else:
            with _calling(SpecError, f"{self.where}, process", "to take well-formed items"):
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
        parts = [Fields() for _ in values]
        scopes = [self._scope] * len(values)
        if self._needs_scopes:
            scopes = [self.scope(value, i, parts[i], count or len(values)) for i, value in enumerate(values)]
        extents: dict[str, list[int]] = {}
        for name, declared in self._in_order:
            with self._of_field[name]:
                if (sizes := declared.sizes_of(scopes)) is not None:
                    extents[name] = sizes
                own = declared.derive_all(self._scope, scopes) if declared.is_derived else None
            if own is None:
                own = declared.split(raw[name], sizes, len(values), self._of_field[name].where)
            for fields, part in zip(parts, own, strict=True):
                fields[name] = part
        for name, corner in self.hf.unpad.items() if self.hf else ():
            for fields, scope in zip(parts, scopes, strict=True):
                fields[name] = unpadded(fields[name], corner, scope)
        data = {}
        for name, declared in self.fields.items():
            own = [fields[name] for fields in parts]
            with self._of_field[name]:
                for i, (part, scope) in enumerate(zip(own, scopes, strict=True)):
                    declared.check(part, scope, i)
            data[name] = declared.gathered(own, raw.get(name))
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
        return self._layouts.get(key, lambda: self._resolve(scope, embeds))

    def all_ways(
        self, values: Sequence[Any], fields: Sequence[Mapping[str, Any] | None], embeds: bool
    ) -> Iterator[list[Resolved]]:
        """The alternatives of each item of a request: see `ways` and `check_rows`."""
        for i, (value, own) in enumerate(zip(values, fields, strict=True)):
            facts, rows = (SimpleNamespace(index=i, rows=len(value)), len(value)) if embeds else (value, None)
            found = self.ways(self.scope(facts, i, own, len(values)), embeds=embeds)
            self.check_rows(i, found[0].laid.num_embeds, sent=rows, most=self.most_rows)
            yield found

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
                target = update.resolve(scope)
            _check_ids(target, scope, f"{self.where}, update")
            if isinstance(update, Replace) and not target:
                raise SpecError(f"{self.where}, update", "a target of at least one token", "none")
            ways.append(Resolved(update, target, laid))
        return ways

    def targets(self) -> dict[Target, bool]:
        """The targets known before there is an item, each with whether it can only stand for an item: numbered ones
        (``<|image_1|>``), and those with a special token. An ordinary word may stand in a prompt without items."""
        known: dict[Target, bool] = {}
        for update in self.updates:
            numbered = update.leaves() == {INDEX}
            if not isinstance(update, Replace) or (update.leaves() and not numbered):
                continue
            count = 1
            if numbered:
                count = _NUMBERED if self.limit is None else min(self.limit, _NUMBERED)
            with suppress(SpecError):  # the vocabulary ends somewhere
                for index in range(count):
                    scope = replace(self._scope, item=SimpleNamespace(index=index))
                    target = update.resolve(scope)
                    known[target] = numbered or self._is_special(target)
        return known

    def _is_special(self, target: Target) -> bool:
        """Whether no text holds a target by chance."""
        if self._scope.tok is None:
            return len(target) == 1
        return not self._scope.tok.special.isdisjoint(target)

    def rows(self, fields: Mapping[str, Any]) -> int | None:
        """Encoder rows of an item, given some of its processed fields; None where they do not tell."""
        known = {(name,) for name in fields}
        if all(leaf.root == "fields" and leaf.keys[:1] in known for leaf in self._leaves[False]):
            return self._laid(SimpleNamespace(), fields).num_embeds
        return None

    def _laid(self, value: Any, fields: Mapping[str, Any] | None) -> Laid:
        """The preferred layout of a raw item that is the only one."""
        return self.ways(self.scope(value, 0, fields))[0].laid

    def largest(
        self, process: Callable[[Any], Mapping[str, Any]] | None = None, sizes: Mapping[str, int] | None = None
    ) -> tuple[Any, int]:
        """The item with the most encoder rows, and how many they are.

        Args:
            process: a canonical item to its processed fields; wanted where `needs_hf` holds.
            sizes: its sizes at most, as vLLM's `limit_mm_per_prompt` names them; None for those of the spec.

        Raises:
            InputError: sizes that items of this type do not have.
        """
        process = process or self._process_one
        candidates = (self.item.within(sizes, self.where) if sizes else self.item).candidates()
        if self.needs_hf and len(candidates) > 1:
            costs = "%s: the Hugging Face processor takes %d items to tell the largest of them."
            logger.warning(
                f"{costs} State that one alone, or a layout over the facts of item.", self.where, len(candidates)
            )
        rows = [self._laid(v, process(v) if self.reads_fields else None).num_embeds for v in candidates]
        return candidates[rows.index(max(rows))], max(rows)

    @cached_property
    def most_rows(self) -> int | None:
        """Encoder rows of the largest item; None where only the Hugging Face processor can tell, or where they depend
        on the other items of the request."""
        return None if self.needs_hf or self.by_company else self.largest()[1]

    @property
    def by_company(self) -> bool:
        """Whether a layout says that it depends on an item's position, or on the number of items."""
        return any(leaf in leaves for leaves in self._leaves.values() for leaf in (INDEX, COUNT))

    def _process_one(self, value: Any) -> Mapping[str, Any]:
        return self.process([value]).parts[0]

    @property
    def needs_hf(self) -> bool:
        """The layout or the targets need, or may need, the output of the Hugging Face processor."""
        return self.hf is not None and self.reads_fields

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
                fields = self._process_one(value)
            made.append(self._laid(value, fields))
        rows, candidates = [laid.num_embeds for laid in made], len(self.item.candidates())
        most = max(rows[:candidates])
        for smallest in rows[candidates:]:
            if smallest > most and not self.by_company:
                got = f"{most}, and {smallest} for the smallest"
                remedy = "State `largest=`, the shape of the item with the most."
                raise SpecError(f"{self.where}, item", "the most encoder rows for the largest item", got, remedy)
        return made


class Plan:
    """A spec bound to one config and tokenizer; make it with `ModelSpec.bind`.

    Attributes:
        spec: the declaration.
        modalities: the bound modalities, by name.
        vocab_size: number of ids of the language model.
        hidden_size: width of the rows that it takes; None where the config does not tell.
        embed_ids: the placeholder ids known when the plan is made.
    """

    def __init__(
        self,
        spec: Declaration,
        config: Any,
        tokenizer: Any = None,
        processor: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = spec
        self.vocab_size = vocab_size(config)
        self.hidden_size = hidden_size(config)
        self._ids = list[Annotated[int, msgspec.Meta(ge=0, lt=self.vocab_size)]]
        vocabulary = tokenizer if tokenizer is None or isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        scope = Scope(cfg=config, proc=processor, tok=vocabulary, kwargs=dict(kwargs or {}))
        self._configured: _Kept[Plan] = _Kept(_CONFIGURED)
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
                present = truth(m.when, scope)
            if present:
                self.modalities[m.name] = BoundModality(m, where, scope)
        self._surplus = self._targets()
        layouts = {"prompt": self.spec.prompt, "decoder_prompt": self.spec.decoder_prompt}
        self._prompts = {name: value.bind(scope) for name, value in layouts.items() if value is not None}
        self._check_end()

    def _check_end(self) -> None:
        """Refuse items that would stand between a prompt and what the spec puts at its end, which would not be seen
        there again when an expanded prompt comes back.

        Raises:
            SpecError: names the modality.
        """
        if not isinstance(self._prompts.get("prompt"), EndingWith):
            return
        for modality in self.modalities.values():
            if any(isinstance(update, Insert) and update.at == "end" for update in modality.updates):
                expected = 'no insert(at="end") beside prompt=ending_with(...)'
                remedy = "Put these ids into the layout of the item."
                raise SpecError(f"{modality.where}, update", expected, 'insert(at="end")', remedy)

    def _targets(self) -> dict[Target, str]:
        """The targets that can only stand for items, each with its modality.

        Raises:
            SpecError: two modalities have the same target, so that nothing tells which item goes where.
        """
        owners: dict[Target, str] = {}
        surplus: dict[Target, str] = {}
        for modality in self.modalities.values():
            for target, special in modality.targets().items():
                if (other := owners.setdefault(target, modality.name)) != modality.name:
                    expected = "a target that no other modality has"
                    got = f"{list(target)}, which is that of {other} too"
                    raise SpecError(f"{modality.where}, update", expected, got, "Give each a token of its own.")
                if special:
                    surplus[target] = modality.name
        return surplus

    def configured(self, kwargs: Mapping[str, Any], processor: Any) -> Plan:
        """This plan for the `mm_processor_kwargs` of one request, with the Hugging Face processor that they configure
        as `proc`."""
        if kwargs == self._scope.kwargs:
            return self
        try:
            key = json.dumps(kwargs, sort_keys=True)
        except TypeError:  # values that JSON lacks: do not keep the plan
            return self._with(kwargs, processor)
        return self._configured.get(key, lambda: self._with(kwargs, processor))

    def _with(self, kwargs: Mapping[str, Any], processor: Any) -> Plan:
        plan = copy(self)
        plan._bind(replace(self._scope, kwargs=dict(kwargs), proc=processor))
        return plan

    def rewrite(self, part: Literal["prompt", "decoder_prompt"], prompt: list[int]) -> list[int]:
        """The prompt, or the decoder's, that the spec makes of a caller's prompt; the prompt itself where it says none.
        A request may have come this way before: what the spec puts at the end is left out where it stands there.

        Raises:
            InputError: an id that the model does not have, or a prompt that the function of the spec does not take.
        """
        if (declared := self._prompts.get(part)) is None:
            return prompt
        where = f"{self.spec.name}.{part}"
        layout = declared.ids if isinstance(declared, EndingWith) else declared
        with _calling(InputError, where, "a prompt that the spec can rewrite"):
            laid = layout.lay(replace(self._scope, prompt=prompt))
        if laid.num_embeds:
            raise SpecError(where, "literal ids, since placeholders belong to items", "embed()")
        _check_ids(laid.ids, self._scope, where)
        if not isinstance(declared, EndingWith):
            return list(laid.ids)
        stands = prompt[max(0, len(prompt) - len(laid)) :] == laid.ids
        return prompt if stands else [*prompt, *laid.ids]

    def preview(self, prompt: Sequence[int], data: Mapping[str, object]) -> Preview:
        """What a request becomes, without vLLM.

        Args:
            prompt: token ids.
            data: what a caller puts into ``multi_modal_data``.

        Raises:
            InputError: the request would be refused.
            SpecError: raw items of a modality that wants the Hugging Face processor, which vLLM calls.
        """
        self.check_ids(prompt)
        self.check_names(data)
        ways: dict[str, list[list[Resolved]]] = {}
        fields: dict[str, Sequence[dict[str, Any]]] = {}
        for name, sent in data.items():
            modality = self.modalities[name]
            values, embeds = modality.take_whole(sent, self.hidden_size)
            if not values:
                continue
            if modality.hf is not None and not embeds:
                raise SpecError(modality.where, "a process that runs without vLLM", repr(modality.hf))
            modality.check_count(len(values), modality.limit)
            fields[name] = [{modality.embeds_field: v} for v in values] if embeds else modality.process(values).parts
            ways[name] = [*modality.all_ways(values, fields[name], embeds)]
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
            values, embeds = modality.take_whole(sent, self.hidden_size)
            if not values:
                continue
            known = modality.reads_fields and not embeds
            fields = modality.process(values).parts if known else [None] * len(values)
            for found in modality.all_ways(values, fields, embeds):
                ids += found[0].spelled
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
            expected, remedy = f"modalities among {sorted(self.modalities)}", ""
            base = unknown[0].removesuffix("_embeds")
            if base in self.modalities:
                remedy = f'Send embeddings as {{"{base}": {{"{base}_embeds": ...}}}}.'
                if self.modalities[base].embeds is None:
                    remedy = f"Send the raw items of {base}: the spec takes no embeddings of them."
            raise InputError(f"{self.spec.name}.multi_modal_data", expected, repr(unknown[0]), remedy)

    def standing(self, name: str) -> Callable[[Sequence[int]], int] | None:
        """What tells at most how many items of a modality a prompt has a place for, without knowing the items.

        None where that depends on the items, or where the caller writes no placeholder.
        """
        modality = self.modalities[name]
        own = {token for token, names in self._owners.items() if name in names}
        if not own or any(not isinstance(update, Replace) or update.leaves() for update in modality.updates):
            return None
        tokens = own | {target[0] for target in modality.targets()}
        return lambda prompt: sum(map(tokens.__contains__, prompt))

    def check_bare(self, prompt: Sequence[int], present: Collection[str] = ()) -> None:
        """Refuse placeholder ids of modalities that have no items in the request, and targets that can only stand for
        items if it has none at all: `place` looks for those that are left over beside items.

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
            refuse_surplus(prompt, self._surplus, self.spec.name)

    def place(
        self, prompt: list[int], items: Mapping[str, Sequence[Sequence[Resolved]]]
    ) -> tuple[list[int], list[Placement]]:
        """Bring the layouts of all items into a prompt; see `mmkit.updates.place` and `place_in_text`. Where targets of
        several modalities match at the same place, or anchors are the same, the order of the spec decides."""
        present = {name: items[name] for name in self.modalities if items.get(name)}
        self.check_bare(prompt, present)
        try:
            return place(prompt, present, self.spec.name, self._surplus)
        except NotFound as error:
            if self._scope.tok is None or not may_be_split(present):
                raise
            try:
                ids, placements = place_in_text(prompt, present, self.spec.name, self._surplus, self._scope.tok)
                self.check_bare(ids, present)
            except Exception:  # not found in the text either, or the tokenizer cannot decode the prompt
                raise error from None
            return ids, placements


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
        if isinstance(error, Exception) and not isinstance(error, MmkitError):  # of a function of the spec
            raise SpecError(self.where, "a value", _cause(error)) from error


@contextmanager
def _calling(kind: type[MmkitError], where: str, expected: str) -> Iterator[None]:
    """Make one of our errors of whatever a function of the spec raises."""
    try:
        yield
    except MmkitError:
        raise
    except Exception as error:
        raise kind(where, expected, _cause(error)) from error


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": .")


def _geometry(leaf: Leaf, scope: Scope) -> Any:
    """The value of a leaf as part of a key; None where it has none. A layout that needs it will say so, and one that
    guards it by `where` does not need it. A large tensor is no key."""
    try:
        value = evaluate(leaf.expr, scope)
    except SpecError:
        return None
    if math.prod(getattr(value, "shape", ())) > _KEYS:
        return []  # cannot be hashed
    return plain(value)


class _Kept(Generic[T]):
    """What was made, by key, up to a total size: the least recently used goes. What has no key is made anew.

    Args:
        most: the total size.
        size: that of one value.
    """

    def __init__(self, most: int, size: Callable[[T], int] = lambda value: 1) -> None:
        self._most, self._size, self._total = most, size, 0
        self._values: OrderedDict[Any, T] = OrderedDict()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        try:
            value = self._values.get(key)
        except TypeError:  # no key
            return make()
        if value is not None:
            with suppress(KeyError):  # another thread may have let it go
                self._values.move_to_end(key)
            return value
        value = make()
        if self._size(value) <= self._most:
            if (other := self._values.pop(key, None)) is not None:  # of another thread
                self._total -= self._size(other)
            self._values[key] = value
            self._total += self._size(value)
        while self._total > self._most and self._values:
            self._total -= self._size(self._values.popitem(last=False)[1])
        return value


def vocab_size(config: Any) -> int:
    """Number of ids of the language model in a Hugging Face config.

    Raises:
        SpecError: the config does not tell.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = text.get("vocab_size") if isinstance(text, Mapping) else getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        raise SpecError("config", "a vocab_size in the language model's part", repr(size))
    if size > sys.maxunicode + 1:  # ids are sought as characters
        raise SpecError("config", f"a vocab_size of at most {sys.maxunicode + 1}", str(size))
    return size


def hidden_size(config: Any) -> int | None:
    """Width of the rows that the language model of a Hugging Face config takes, as vLLM has it; None if it is not
    stated."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("projection_dim", "projection_size", "hidden_size"):
        size = text.get(name) if isinstance(text, Mapping) else getattr(text, name, None)
        if isinstance(size, int):
            return size
    return None


def _check_ids(ids: Sequence[int], scope: Scope, where: str) -> None:
    if ids and max(ids) >= (size := vocab_size(scope.cfg)):
        remedy = "Use a reserved id inside the vocabulary: vLLM refuses prompts with other ids."
        raise SpecError(where, f"token ids below the vocabulary size {size}", str(max(ids)), remedy)

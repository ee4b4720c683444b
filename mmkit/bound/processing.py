"""Canonical items to processed fields."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, combinations, product
from typing import Any, TypeAlias

import torch

from ..errors import SpecError
from ..expr import Fields, evaluate
from ..field import Flat
from ..node import leaves
from ..process import Identity, unpadded
from ..spec import Modality
from .binding import At, Binding
from .memory import overlap, share, spans

Processed: TypeAlias = Sequence[dict[str, Any]]
"""The processed fields of the items of one modality: per item, its part of every field, hidden ones
included."""


class Processing:
    """Runs `process` and checks its result against the declared fields.

    Attributes:
        fields: the bound fields, by name.
        sent: the fields that the model receives.
        from_facts: names of the derived fields that depend on the facts of an item alone.
        hf: the bound call of a Hugging Face processor; None where `process` is something else.
    """

    def __init__(self, spec: Modality, binding: Binding) -> None:
        self._process, self._binding = spec.process, binding
        self._where = f"{binding.where}, process"
        self.fields, self.hf = binding.fields, binding.hf
        self.sent = {name: field for name, field in self.fields.items() if not field.hidden}
        # derived fields may depend on processed ones, and the sizes of flat fields on both
        self._in_order = sorted(
            self.fields.items(), key=lambda f: (isinstance(f[1], Flat), f[1].is_derived)
        )
        self.from_facts = self._from_facts()
        self._processed = [name for name, field in self.fields.items() if not field.is_derived]
        self._stated = {name: field for name, field in self.fields.items() if field.is_stated}
        self._at = {name: binding.at(f"fields[{name!r}]") for name in self.fields}
        self._unpad = self.hf.unpad if self.hf else {}
        self._shares_memory = False
        varies = any(field.varies for field in self.fields.values())
        self._needs_scopes = varies or bool(self._unpad)

    def _from_facts(self) -> frozenset[str]:
        known: set[str] = set()
        for name, field in self._in_order:
            roots = {(leaf.root, *leaf.keys[:1]) for leaf in leaves(field.value)}
            unknown = [root for root in roots if root[0] in ("fields", "function")]
            if field.is_derived and {("fields", name) for name in known}.issuperset(unknown):
                known.add(name)
        return frozenset(known)

    def of_facts(self, value: Any, index: int = 0, count: int = 1) -> Fields:
        """The fields `from_facts` of a canonical item, number `index` of `count`."""
        fields = Fields()
        scope = self._binding.scope(value, index, fields, count, of_fields=True)
        for name, declared in self._in_order:
            if name in self.from_facts:
                with self._at[name]:
                    fields[name] = declared.derive(scope)
        return fields

    @cached_property
    def hf_processor(self) -> Any:
        """The processor of `hf(processor)`; None for the checkpoint's own."""
        with self._binding.at("process"):
            return evaluate(self.hf.processor, self._binding.static) if self.hf else None

    @cached_property
    def hf_text(self) -> str | None:
        """The text of one item for the Hugging Face processor, or None."""
        if self.hf is None or self.hf.text is None:
            return None
        with self._binding.at("process"):
            return str(evaluate(self.hf.text, self._binding.static))

    def run(self, values: Sequence[Any], count: int | None = None) -> Processed:
        """Run `identity()` or the process function on canonical items; for `hf()` the caller runs
        the processor, then `finish`.

        Args:
            values: canonical items.
            count: number of items of the modality in the request, cached items included; None for
                the number of `values`.

        Raises:
            SpecError: the outputs contradict the declared fields, or the function raises anything
                but an InputError, which reports a mistake of the caller.
        """
        if isinstance(self._process, Identity):
            return self.finish(self._columns(values), values, count, in_parts=True)
        if not self._shares_memory:
            raw = self._called(values)
            if not share(raw, values):
                return self.finish(raw, values, count)
            self._shares_memory = True
        raws = [copy.deepcopy(self._called([value])) for value in values]
        return self.finish_each(raws, values, count or len(values))

    def rehearse(self, values: Sequence[Any]) -> None:
        """Call a function of the spec with some items, alone and together.

        Where what it returns lies in memory that another call writes to, it is copied from now on.

        Raises:
            SpecError: an item that vLLM may cache alone has other fields beside others, or the
                next time.
        """
        if self.hf is not None or isinstance(self._process, Identity):
            return
        # an item itself may be what is returned
        twice = [copy.deepcopy(value) for value in (*values, *values)]
        before = [*map(_writes, twice)]
        raws = [self._called([value]) for value in twice]
        if [*map(_writes, twice)] != before:
            expected = "process to leave the items as they are"
            remedy = "They are the caller's: work on a copy."
            raise SpecError(self._where, expected, "another value in one of them", remedy)
        pairs = chain.from_iterable(
            product(spans(one), spans(other)) for one, other in combinations(raws, 2)
        )
        if any(map(overlap, pairs)):
            self._shares_memory = True
            raws = [copy.deepcopy(self._called([value])) for value in twice]
        if not self._binding.is_cached:
            return
        parts = [self.finish(raw, [one])[0] for raw, one in zip(raws, twice, strict=True)]
        alone, again = parts[: len(values)], parts[len(values) :]
        beside = self.run(values)
        for others, got in ((again, "another the next time"), (beside, "another beside others")):
            for first, part in zip(alone, others, strict=True):
                if names := [name for name in first if not _equal(first[name], part[name])]:
                    expected = f"process to return the same {names[0]} for an item, which is cached"
                    remedy = "Process each item by itself, or say by cacheable= when to keep them."
                    raise SpecError(self._where, expected, got, remedy)

    def _called(self, values: Sequence[Any]) -> Mapping[str, Any]:
        """What the function of the spec returns for canonical items."""
        with At(self._where, "to take well-formed items"):
            raw = self._process(values, self._binding.static)
        if not isinstance(raw, Mapping):
            raise SpecError(self._where, "a dict of tensors", type(raw).__name__)
        if unknown := set(raw).difference(self._processed):
            expected = f"process to return declared fields, {sorted(self._processed)}"
            remedy = "Declare them in fields, or do not return them."
            raise SpecError(self._binding.where, expected, repr(sorted(unknown)), remedy)
        return raw

    def _columns(self, values: Sequence[Any]) -> dict[str, Any]:
        """The items as fields; each part of a record as the field of its name."""
        if not self._binding.item.part_names:
            return dict.fromkeys(self._processed, values)
        return {name: [value[name] for value in values] for name in self._processed}

    def finish_each(
        self, raws: Sequence[Mapping[str, Any]], values: Sequence[Any], count: int
    ) -> Processed:
        """`finish` for the outputs of one call per item."""
        pairs = enumerate(zip(raws, values, strict=True))
        return [self.finish(raw, [value], count, i)[0] for i, (raw, value) in pairs]

    def finish(
        self,
        raw: Mapping[str, Any],
        values: Sequence[Any],
        count: int | None = None,
        first: int = 0,
        *,
        in_parts: bool = False,
    ) -> Processed:
        """Split processed tensors into items and check them against the declared fields.

        Args:
            raw: the result of `process`, by field.
            values: canonical items.
            count: as for `run`.
            first: the position of the first item.
            in_parts: whether `raw` has a list of the items' parts for each field.

        Raises:
            SpecError: a field is missing, has another number of items, or another shape or dtype
                than stated.
        """
        if self.hf is not None and (names := self.hf.outputs):
            raw = {names.get(name, name): value for name, value in raw.items()}
        if missing := [name for name in self._processed if raw.get(name) is None]:
            got = f"{sorted(raw)}, without {missing}"
            raise SpecError(self._where, f"the fields {sorted(self.fields)}", got)
        static = self._binding.static
        parts = [Fields() for _ in values]
        scopes = [static] * len(values)
        if self._needs_scopes:
            scope = self._binding.scope
            scopes = [
                scope(value, first + i, parts[i], count or len(values), of_fields=True)
                for i, value in enumerate(values)
            ]
        for name, declared in self._in_order:
            at = self._at[name]
            with at:
                sizes = declared.sizes_of(scopes)
                own = declared.derive_all(static, scopes) if declared.is_derived else None
            if own is None:
                split = declared.split_each if in_parts else declared.split
                own = split(raw[name], sizes, len(values), at.where)
            for fields, part in zip(parts, own, strict=True):
                fields[name] = part
        for name, corner in self._unpad.items():
            for fields, scope_of_item in zip(parts, scopes, strict=True):
                fields[name] = unpadded(fields[name], corner, scope_of_item)
        for name, declared in self._stated.items():
            with self._at[name]:
                for i, (fields, scope_of_item) in enumerate(zip(parts, scopes, strict=True)):
                    declared.check(fields[name], scope_of_item, first + i)
        return parts


def _writes(value: Any) -> Any:
    """How often a tensor, or each tensor of a record, was written to."""
    if isinstance(value, Mapping):
        return {name: _writes(part) for name, part in value.items()}
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if is_counted else 0


def _equal(one: Any, other: Any) -> bool:
    """Whether two parts are the same but for rounding; of tensors alone."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)

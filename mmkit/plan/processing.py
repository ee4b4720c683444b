"""Canonical items to processed fields."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ..errors import InputError, SpecError, convert_errors
from ..language.expr import Fields, Scope
from ..language.field import HF, Field, Flat, Identity, remove_padding
from ..language.node import dependencies, evaluate_all
from .hf_calls import HFCall
from .layouts import refusals_of_items
from .parsing import Taken

if TYPE_CHECKING:
    from .modality import BoundModality

Processed: TypeAlias = Sequence[dict[str, Any]]
"""The processed fields of the items of one modality: per item, its part of every field, hidden ones
included."""


class FieldProcessor:
    """Runs `process` and checks its result against the declared fields.

    Attributes:
        fields: the bound fields, by name.
        from_facts: names of the derived fields that depend on the facts of an item alone.
        hf_call: that of a Hugging Face processor; None where `process` is something else.
        shares_memory: whether a function of the spec returns memory that it writes to again, so
            that what it returns is copied.
    """

    def __init__(self, modality: BoundModality, fields: dict[str, Field], hf: HF | None) -> None:
        self._modality, self.fields = modality, fields
        self.hf_call = HFCall(modality, hf) if hf else None
        self._where, self._process = f"{modality.where}, process", modality.spec.process
        # derived fields may depend on processed ones, and the sizes of flat fields on both
        order = sorted(fields.items(), key=lambda f: (isinstance(f[1], Flat), f[1].is_derived))
        self._in_order = [(n, field, modality.at(f"fields[{n!r}]")) for n, field in order]
        self._stated = [
            step for step in self._in_order if step[1].dtype or step[1].shape is not None
        ]
        self._processed = [name for name, field in fields.items() if not field.is_derived]
        self._unpad = hf.unpad if hf else {}
        self._needs_scopes = bool(self._unpad) or any(field.varies for field in fields.values())
        known: set[str] = set()
        for name, field in order:
            roots = {
                (dependency.root, *dependency.keys[:1]) for dependency in dependencies(field.value)
            }
            unknown = [root for root in roots if root[0] in ("fields", "function")]
            if field.is_derived and {("fields", name) for name in known}.issuperset(unknown):
                known.add(name)
        self.from_facts = frozenset(known)

    @property
    def shares_memory(self) -> bool:
        """See the class."""
        return self._modality.learned.shares_memory

    @shares_memory.setter
    def shares_memory(self, value: bool) -> None:
        self._modality.learned.shares_memory = value

    def of_facts(self, taken: Taken) -> list[dict[str, Any]]:
        """The fields `from_facts` of canonical items."""
        parts: list[dict[str, Any]] = [Fields() for _ in taken.values]
        scopes = self._scopes(taken, parts)
        for name, declared, at in self._in_order:
            if name in self.from_facts:
                for fields, scope in zip(parts, scopes, strict=True):
                    with at, refusals_of_items(self._modality, scope):
                        fields[name] = declared.derive(scope)
        return parts

    def _derived(self, declared: Field, scopes: Sequence[Scope]) -> Sequence[Any]:
        """The parts of a derived field.

        Raises:
            InputError: a function refuses an item of a request.
        """
        try:
            return declared.derive_all(self._modality.static, scopes)
        except (SpecError, ValueError):
            for scope in scopes:  # which item it was
                with refusals_of_items(self._modality, scope):
                    declared.derive(scope)
            raise

    def _scopes(self, taken: Taken, parts: Sequence[dict[str, Any]]) -> list[Scope]:
        """The scope of each item, in which its fields are as far as they are computed."""
        scope, total = self._modality.scope, taken.total
        pairs = enumerate(zip(taken.values, parts, strict=True), taken.first)
        return [scope(value, i, own, total, of_fields=True) for i, (value, own) in pairs]

    def run(self, taken: Taken) -> Processed:
        """The processed fields of canonical items.

        Raises:
            InputError: the Hugging Face processor, or a function of the spec, refuses them.
            SpecError: the outputs contradict the declared fields, or the function raises anything
                but an InputError, which reports a mistake of the caller.
        """
        if isinstance(self._process, Identity):
            # each part of a record is the field of its name
            columns: dict[str, Any] = dict.fromkeys(self._processed, taken.values)
            if self._modality.item.parts:
                columns = {key: [one[key] for one in taken.values] for key in self._processed}
            return self.finish(columns, taken, in_parts=True)
        if self.shares_memory or (self.hf_call and self.hf_call.hf.one_by_one):
            each = taken.each()
            outputs = [self._outputs(one) for one in each]
            return [self.finish(raw, one)[0] for raw, one in zip(outputs, each, strict=True)]
        return self.finish(self._outputs(taken), taken)

    def _outputs(self, taken: Taken) -> Mapping[str, Any]:
        """What the Hugging Face processor or the function of the spec returns for some items."""
        if self.hf_call:
            return self.hf_call.outputs({self.hf_call: taken})
        raw = self.called(taken.values)
        return copy.deepcopy(raw) if self.shares_memory else raw

    def called(self, values: Sequence[Any]) -> Mapping[str, Any]:
        """Return what the function of the spec returns for canonical items.

        Raises:
            InputError: the function refuses them.
            SpecError: it raises anything else, or returns no declared fields.
        """
        with convert_errors(self._where, "to take well-formed items"):
            raw = self._process(values, self._modality.static)
        if not isinstance(raw, Mapping):
            raise SpecError(self._where, "a dict of tensors", type(raw).__name__)
        if unknown := set(raw).difference(self._processed):
            expected = f"process to return declared fields, {sorted(self._processed)}"
            remedy = "Declare them in fields, or do not return them."
            raise SpecError(self._modality.where, expected, repr(sorted(unknown)), remedy)
        return raw

    def zeros(self, taken: Taken) -> Processed | None:
        """The fields of the largest items, with zeros for what a Hugging Face processor would make
        of them: it gets a small item only, which tells the dtypes.

        None where the spec does not state the shape of a field, or the field holds no pixels, which
        are floats or bytes.
        """
        modality = self._modality
        stated = {name: self.fields[name].shape for name in self._processed}
        is_known = len(stated) + len(self.from_facts) == len(self.fields) and not modality.needs_hf
        # of one shape, a small item takes as long as the largest
        if not (self.hf_call and is_known and None not in stated.values() and dependencies(stated)):
            return None
        raw: dict[str, list[torch.Tensor]] = {}
        with suppress(SpecError):  # the processor takes no small item, or it alone tells a shape
            small = modality.process(modality.item.small()[-1])
            one, *_ = taken.each()
            (scope,) = self._scopes(one, self.of_facts(one))
            for name, shape in evaluate_all(stated, scope).items():
                dtype = getattr(small[name], "dtype", torch.int64)
                are_pixels = dtype.is_floating_point or dtype == torch.uint8
                if are_pixels and all(type(size) is int for size in shape):
                    # until somebody looks at it, numpy's memory costs no time, torch's does
                    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
                    zeros = torch.from_numpy(memory).view(dtype).view(shape)
                    raw[name] = [zeros] * len(taken.values)
        return self.finish(raw, taken, in_parts=True) if len(raw) == len(stated) else None

    def finish(self, raw: Mapping[str, Any], taken: Taken, *, in_parts: bool = False) -> Processed:
        """Split processed tensors into items and check them against the declared fields.

        Args:
            raw: the result of `process`, by field.
            taken: the canonical items.
            in_parts: whether `raw` has a list of the items' parts for each field.

        Raises:
            InputError: a Hugging Face processor has made another shape or dtype than stated.
            SpecError: a field is missing, has another number of items, or, from a function of the
                spec, another shape or dtype than stated.
        """
        if not in_parts and self.hf_call and (names := self.hf_call.hf.outputs):
            raw = {names.get(name, name): value for name, value in raw.items()}
        if missing := [name for name in self._processed if raw.get(name) is None]:
            got = f"{sorted(raw)}, without {missing}"
            raise SpecError(self._where, f"the fields {sorted(self.fields)}", got)
        static = self._modality.static
        parts: list[dict[str, Any]] = [Fields() for _ in taken.values]
        scopes = self._scopes(taken, parts) if self._needs_scopes else [static] * len(parts)
        for name, declared, at in self._in_order:
            with at:
                if declared.is_derived:
                    own = self._derived(declared, scopes)
                else:
                    split = declared.split_each if in_parts else declared.split
                    own = split(raw[name], scopes)
            for fields, part in zip(parts, own, strict=True):
                fields[name] = part
        for name, corner in self._unpad.items():
            for fields, scope in zip(parts, scopes, strict=True):
                fields[name] = remove_padding(fields[name], corner, scope)
        for name, declared, at in self._stated:
            with at:
                for i, (fields, scope) in enumerate(zip(parts, scopes, strict=True), taken.first):
                    self._check(declared, fields[name], scope, i, at.where)
        return parts

    def _check(self, declared: Field, part: Any, scope: Scope, index: int, where: str) -> None:
        """Compare the part of an item with the stated shape and dtype.

        Raises:
            InputError: a Hugging Face processor has made other ones of an item, for example of a
                float array in place of bytes. A spec of which all items are so is refused by its
                largest item.
            SpecError: a function of the spec has.
        """
        if self.hf_call is None:
            declared.check(part, scope, index)
            return
        try:
            declared.check(part, scope, index)
        except SpecError as error:
            raise InputError(f"{where}: {error}") from error

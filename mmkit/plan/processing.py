"""The processing of one modality: canonical items to processed fields."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from ..errors import InputError, SpecError, convert_errors, locate_errors, report_as_spec_error
from ..language.expr import Scope
from ..language.field import Batching, Field, Identity, remove_padding
from ..language.items import ItemType
from ..language.node import dependencies, evaluate_all
from ..language.scope import Fields
from .hf_calls import HFCall, call_together
from .parsing import ItemBatch
from .scopes import ItemScopes, refuse_item

ProcessedFields: TypeAlias = Sequence[dict[str, Any]]
"""The processed fields of the items of one modality: per item, its part of every field, hidden ones
included."""


_ONE_BY_ONE = (
    "If the processor takes all items for those of one prompt, call it for each: "
    "hf(..., one_by_one=True)."
)
"""The remedy where a Hugging Face processor returns one batch for several items, as Idefics2's."""

_SEVERAL_PER_ITEM = (
    "If an item has several, declare flat(...). If the processor passes arguments of its own to "
    "its image processor, repeat them: hf(..., kwargs={...})."
)
"""The remedy where a Hugging Face processor returns more entries than items, as GotOcr2's image
processor does where its file says ``crop_to_patches``, which the processor turns off."""


class NeedsProcessing(SpecError):
    """The layout of an item reads a field that does not follow from the facts of the item.

    Attributes:
        reads: the source of what it reads.
    """

    reads: list[str]


class FieldsOfFacts(Fields):
    """The fields of an item that follow from its facts; reading another one is an error.

    Functions read fields in any of these ways.

    Raises:
        NeedsProcessing: names the other field.
    """

    __slots__ = ()

    def __missing__(self, name: str) -> Any:
        raise make_needs_processing("", [f"fields.{name}"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `copy` and `pickle` probe for these
            raise AttributeError(name)
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def make_needs_processing(where: str, reads: Sequence[str]) -> NeedsProcessing:
    """Return the error of a layout that reads more than the facts of an item.

    Args:
        where: names the layout; empty where the error is raised inside `locate_errors`.
        reads: the source of what it reads.
    """
    expected = "a layout that follows from the facts of an item"
    got = f"{', '.join(reads)}, which only processing tells"
    remedy = "Call expand() with the items, or state it from item.* in the spec."
    error = NeedsProcessing(where, expected, got, remedy)
    error.reads = list(reads)
    return error


@dataclass(frozen=True, slots=True)
class FieldStep:
    """One field, in the order in which fields are computed.

    Attributes:
        name: the name of the field.
        field: the bound field.
        where: names the field in errors.
        location: a context that puts `where` before the errors inside it; requests share it.
    """

    name: str
    field: Field
    where: str
    location: locate_errors


@dataclass(frozen=True, eq=False)
class FieldProcessor:
    """Runs `process` and checks its result against the declared fields.

    Attributes:
        where: names the modality in errors.
        process: the declaration: `Identity`, `HF`, or a function of the spec.
        fields: the bound fields, by name.
        hf_call: the call of a Hugging Face processor; None where `process` is something else.
        scopes: makes the scopes of items.
        copies_outputs: whether what a function of the spec returns is copied, because it lies in
            memory that the function writes to again.
        is_rehearsing: whether the spec is being bound. What an item cannot pass is a mistake of the
            spec then, and afterwards a refusal of the item.
    """

    where: str
    process: Any
    fields: Mapping[str, Field]
    hf_call: HFCall | None
    scopes: ItemScopes
    copies_outputs: bool = False
    is_rehearsing: bool = True

    def copying_outputs(self) -> FieldProcessor:
        """Return a processor that copies what the function of the spec returns."""
        return replace(self, copies_outputs=True)

    def for_requests(self) -> FieldProcessor:
        """Return the processor for the items of requests, after its rehearsal."""
        return replace(self, is_rehearsing=False)

    # -- items -------------------------------------------------------------------------------------

    def run(self, batch: ItemBatch) -> ProcessedFields:
        """Return the processed fields of canonical items.

        Raises:
            InputError: the Hugging Face processor, or a function of the spec, refuses them.
            SpecError: the outputs contradict the declared fields, or the function raises anything
                but an InputError, which reports a mistake of the caller.
        """
        if isinstance(self.process, Identity):
            return self.finish(self._make_identity_columns(batch), batch, is_per_item=True)
        is_one_by_one = self.hf_call is not None and self.hf_call.hf.one_by_one
        if not self.copies_outputs and not is_one_by_one:
            return self.finish(self._call_process(batch), batch)
        # all are called before any is finished: the function may write to its memory again
        single_items = batch.each()
        outputs: list[Mapping[str, Any]] = []
        for item in single_items:
            outputs.append(self._call_process(item))
        processed: list[dict[str, Any]] = []
        for raw, item in zip(outputs, single_items, strict=True):
            processed += self.finish(raw, item)
        return processed

    def process_spec_item(self, value: Any) -> dict[str, Any]:
        """Return the processed fields of an item that mmkit made from the spec.

        Raises:
            SpecError: the item is refused, or the outputs contradict the declared fields.
        """
        with report_as_spec_error(remedy=self._item_type.remedy):
            return self.run(ItemBatch.whole([value]))[0]

    def derive_from_facts(self, batch: ItemBatch) -> list[dict[str, Any]]:
        """Return the fields `from_facts` of items.

        Args:
            batch: canonical items, or their facts, as scopes have them.

        Raises:
            InputError: a function of the spec refuses an item of a request.
        """
        parts: list[dict[str, Any]] = [FieldsOfFacts() for _ in batch.values]
        scopes = self._make_scopes(batch, parts)
        for fields, scope in zip(parts, scopes, strict=True):
            fields.update(self._make_tensors_of_shapes(scope.item))
        for step in self._steps:
            if step.name not in self.from_facts:
                continue
            for position, (fields, scope) in enumerate(zip(parts, scopes, strict=True)):
                with step.location:
                    fields[step.name] = self._derive(step.field, scope, batch.index_of(position))
        return parts

    def _make_tensors_of_shapes(self, facts: Any) -> dict[str, torch.Tensor]:
        """Return a tensor without values for each field of `with_known_shapes`."""
        item_type = self._item_type
        tensors: dict[str, torch.Tensor] = {}
        for name in self.with_known_shapes:
            if item_type.parts:
                shape = item_type.parts[name].find_field_shape(getattr(facts, name))
            else:
                shape = item_type.find_field_shape(facts)
            tensors[name] = torch.empty(shape, device="meta")
        return tensors

    def call_function(self, values: Sequence[Any]) -> Mapping[str, Any]:
        """Return what the function of the spec returns for canonical items.

        Raises:
            InputError: the function refuses them.
            SpecError: it raises anything else, or returns no declared fields.
        """
        where = f"{self.where}, process"
        with convert_errors(where, "to take well-formed items"):
            raw = self.process(values, self.scopes.static)
        if not isinstance(raw, Mapping):
            raise SpecError(where, "a dict of tensors", type(raw).__name__)
        unknown_names = sorted(set(raw).difference(self._returned_names))
        if unknown_names:
            expected = f"process to return declared fields, {sorted(self._returned_names)}"
            remedy = "Declare them in fields, or do not return them."
            raise SpecError(self.where, expected, repr(unknown_names), remedy)
        return raw

    def finish(
        self, raw: Mapping[str, Any], batch: ItemBatch, *, is_per_item: bool = False
    ) -> ProcessedFields:
        """Split processed tensors into items and check them against the declared fields.

        Args:
            raw: the result of `process`, by field.
            batch: the canonical items.
            is_per_item: whether `raw` has a list with a value per item for each field, made by
                mmkit, of which `Field.take_parts` makes the parts. What a function or a Hugging
                Face processor returns, a list too, is split by `Field.split`.

        Raises:
            InputError: a Hugging Face processor has made another shape or dtype than stated.
            SpecError: a field is missing, has another number of items, or, from a function of the
                spec, another shape or dtype than stated.
        """
        if self.hf_call is not None and self.hf_call.hf.outputs and not is_per_item:
            raw = rename_outputs(raw, self.hf_call.hf.outputs)
        self._check_names(raw)
        parts: list[dict[str, Any]] = [Fields() for _ in batch.values]
        if self._needs_scopes:
            # a scope holds the fields of its item, which the steps fill in
            scopes = self._make_scopes(batch, parts)
        else:
            scopes = [self.scopes.static] * len(parts)
        for step in self._steps:
            with step.location:
                values = self._split(step, raw, batch, scopes, is_per_item)
            for fields, value in zip(parts, values, strict=True):
                fields[step.name] = value
        for name, sizes in self._unpad.items():
            for fields, scope in zip(parts, scopes, strict=True):
                fields[name] = remove_padding(fields[name], sizes, scope)
        for step in self._steps_to_check:
            with step.location:
                for position, (fields, scope) in enumerate(zip(parts, scopes, strict=True)):
                    self._check(step, fields[step.name], scope, batch.index_of(position))
        return parts

    # -- the dummy request -------------------------------------------------------------------------

    def make_zeros(self, batch: ItemBatch) -> ProcessedFields | None:
        """Return the fields of the largest items, with zeros in place of processed values.

        The Hugging Face processor gets only a small item, which tells the dtypes. None where
        `process` is something else, where a derived field depends on more than the facts of an
        item, where the spec does not state the shape of a field, where a kind of fields changes
        shapes, or where a field holds no pixels, which are floats or bytes.
        """
        if self.hf_call is None:
            return None
        shapes: dict[str, Any] = {}
        for name in self._returned_names:
            field = self.fields[name]
            if field.shape is None or not field.keeps_shape:
                return None
            shapes[name] = field.shape
        if len(shapes) + len(self.from_facts) != len(self.fields):
            return None
        if not dependencies(shapes):  # of one shape, a small item takes as long as the largest
            return None
        columns: dict[str, list[torch.Tensor]] = {}
        try:
            small_fields = self.process_spec_item(self._item_type.small()[-1])
            first = batch.each()[0]
            (scope,) = self._make_scopes(first, self.derive_from_facts(first))
            for name, shape in evaluate_all(shapes, scope).items():
                zeros = _make_zeros(shape, small_fields[name])
                if zeros is None:
                    return None
                columns[name] = [zeros] * len(batch.values)
        except SpecError:  # the processor takes no small item, or only its output tells a shape
            return None
        return self.finish(columns, batch, is_per_item=True)

    # -- what depends on no item -------------------------------------------------------------------

    @cached_property
    def from_facts(self) -> frozenset[str]:
        """The names of the derived fields that depend only on the facts of an item."""
        return find_fields_of_facts(self.fields)

    @cached_property
    def with_known_shapes(self) -> Sequence[str]:
        """The names of the fields whose shapes the facts of an item tell.

        These are the items, or parts of them, of which a kind of fields keeps the shape.
        """
        if not isinstance(self.process, Identity):
            return ()
        names: list[str] = []
        for name in self._returned_names:
            if self.fields[name].keeps_shape:
                names.append(name)
        return names

    @cached_property
    def _steps(self) -> Sequence[FieldStep]:
        steps = []
        for name in order_fields(self.fields):
            where = f"{self.where}, fields[{name!r}]"
            steps.append(FieldStep(name, self.fields[name], where, locate_errors(where)))
        return steps

    @cached_property
    def _steps_to_check(self) -> Sequence[FieldStep]:
        """The fields of which the spec states a shape or a dtype."""
        steps = []
        for step in self._steps:
            if step.field.dtype or step.field.shape is not None:
                steps.append(step)
        return steps

    @cached_property
    def _returned_names(self) -> Sequence[str]:
        """The names of the fields that `process` returns."""
        names: list[str] = []
        for name, field in self.fields.items():
            if not field.is_derived:
                names.append(name)
        return names

    @cached_property
    def _unpad(self) -> Mapping[str, Any]:
        return {} if self.hf_call is None else self.hf_call.hf.unpad

    @cached_property
    def _needs_scopes(self) -> bool:
        """Whether the fields of an item are split, computed or checked by its facts."""
        if self._unpad:
            return True
        return any(field.varies for field in self.fields.values())

    @property
    def _item_type(self) -> ItemType:
        return self.scopes.item_type

    # -- machinery ---------------------------------------------------------------------------------

    def _make_identity_columns(self, batch: ItemBatch) -> dict[str, Any]:
        """Return the items as fields: of a record, each part is the field of its name."""
        item_type = self._item_type
        columns: dict[str, Any] = {}
        for name in self._returned_names:
            if item_type.parts:
                part = item_type.parts[name]
                columns[name] = [part.make_field(value[name]) for value in batch.values]
            else:
                columns[name] = [item_type.make_field(value) for value in batch.values]
        return columns

    def _call_process(self, batch: ItemBatch) -> Mapping[str, Any]:
        """Return what the Hugging Face processor or the function of the spec returns for items."""
        if self.hf_call is not None:
            return call_together({self.hf_call: batch})
        raw = self.call_function(batch.values)
        if self.copies_outputs:
            return copy.deepcopy(raw)
        return raw

    def _check_names(self, raw: Mapping[str, Any]) -> None:
        missing_names = []
        for name in self._returned_names:
            if raw.get(name) is None:
                missing_names.append(name)
        if missing_names:
            expected = f"the fields {sorted(self.fields)}"
            got = f"{sorted(raw)}, without {missing_names}"
            raise SpecError(f"{self.where}, process", expected, got)

    def _make_scopes(self, batch: ItemBatch, parts: Sequence[dict[str, Any]]) -> list[Scope]:
        """Return the scope of each item, in which its fields are as far as they are computed."""
        scopes = []
        for position, (value, fields) in enumerate(zip(batch.values, parts, strict=True)):
            index = batch.index_of(position)
            scope = self.scopes.make(value, index, fields, batch.total, for_fields=True)
            scopes.append(scope)
        return scopes

    def _split(
        self,
        step: FieldStep,
        raw: Mapping[str, Any],
        batch: ItemBatch,
        scopes: Sequence[Scope],
        is_per_item: bool,
    ) -> Sequence[Any]:
        """Return the value of one field for each item."""
        if step.field.is_derived:
            return self._derive_all(step.field, batch, scopes)
        if is_per_item:
            return step.field.take_parts(raw[step.name], scopes)
        data = raw[step.name]
        try:
            return step.field.split(data, scopes)
        except SpecError as error:
            if self.hf_call is None:
                raise
            num_entries = _count_entries(data)
            if len(scopes) > 1 and num_entries == 1:
                raise SpecError(f"{error} {_ONE_BY_ONE}") from error
            # a guess: of such fields, processors mostly return the items along the first dimension
            if step.field.batching is Batching.STACKED and num_entries > len(scopes):
                raise SpecError(f"{error} {_SEVERAL_PER_ITEM}") from error
            raise

    def _derive_all(self, field: Field, batch: ItemBatch, scopes: Sequence[Scope]) -> Sequence[Any]:
        """Return the parts of a derived field.

        Raises:
            InputError: a function refuses an item of a request.
        """
        try:
            return field.derive_all(self.scopes.static, scopes)
        except (SpecError, ValueError):
            # item by item, so that the error names the item that is refused
            for position, scope in enumerate(scopes):
                self._derive(field, scope, batch.index_of(position))
            raise

    def _derive(self, field: Field, scope: Scope, index: int) -> Any:
        """Return the value of a derived field for one item.

        Raises:
            InputError: a function refuses the item of a request.
        """
        if self.is_rehearsing:
            return field.derive(scope)
        with refuse_item(self.where, index, scope.item):
            return field.derive(scope)

    def _check(self, step: FieldStep, part: Any, scope: Scope, index: int) -> None:
        """Compare the part of an item with the stated shape and dtype.

        Raises:
            InputError: a Hugging Face processor has returned another shape or dtype, for example
                because a caller sent a float array in place of bytes. A spec for which this holds
                for every item is refused with its largest item.
            SpecError: a function of the spec has returned another shape or dtype.
        """
        if self.hf_call is None:
            step.field.check(part, scope, index)
            return
        try:
            step.field.check(part, scope, index)
        except SpecError as error:
            raise InputError(f"{step.where}: {error}") from error


def _count_entries(data: Any) -> int:
    """Return the first extent of a processed tensor, or of a list of tensors; 0 for other data."""
    if isinstance(data, torch.Tensor) and data.ndim > 0:
        return len(data)
    return len(data) if isinstance(data, list) else 0


def order_fields(fields: Mapping[str, Field]) -> list[str]:
    """Return the names of fields in the order in which they are computed.

    The fields that `process` returns come first. Derived fields, which may depend on them, follow.
    Fields whose `split` reads others (`flat`, by its sizes) come last.
    """
    returned: list[str] = []
    derived: list[str] = []
    reading: list[str] = []
    reading_and_derived: list[str] = []
    for name, field in fields.items():
        if field.split_reads_fields and field.is_derived:
            reading_and_derived.append(name)
        elif field.split_reads_fields:
            reading.append(name)
        elif field.is_derived:
            derived.append(name)
        else:
            returned.append(name)
    return returned + derived + reading + reading_and_derived


def find_fields_of_facts(fields: Mapping[str, Field]) -> frozenset[str]:
    """Return the names of the derived fields that depend only on the facts of an item.

    They may depend on each other. Of ``a = derived(item.length)``, ``b = derived(fields.a)``,
    ``c = batched()`` and ``d = derived(fields.c)``, these are a and b.
    """
    names: set[str] = set()
    for name in order_fields(fields):
        field = fields[name]
        if field.is_derived and _reads_no_field_but(field, names):
            names.add(name)
    return frozenset(names)


def _reads_no_field_but(field: Field, names: set[str]) -> bool:
    """Return whether the value of a field reads no function, and only fields of these names."""
    for dependency in dependencies(field.value):
        if dependency.root == "function":
            return False
        if dependency.root == "fields" and (not dependency.keys or dependency.keys[0] not in names):
            return False
    return True


def rename_outputs(raw: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return outputs of a Hugging Face processor under the names of fields."""
    outputs: dict[str, Any] = {}
    for name, value in raw.items():
        outputs[names.get(name, name)] = value
    return outputs


def _make_zeros(shape: Sequence[Any], small_part: Any) -> torch.Tensor | None:
    """Return zeros of a shape, in the dtype of the part of a small item.

    None where the part holds no pixels, or where the shape is not known.
    """
    dtype = getattr(small_part, "dtype", torch.int64)
    if not dtype.is_floating_point and dtype != torch.uint8:
        return None
    for size in shape:
        if type(size) is not int:
            return None
    # numpy gets zeroed memory of the system, which costs no time until it is read; torch fills it
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)

"""The form of a field: what its parts have in common, whatever the item.

vLLM batches the items of all requests that arrive together. `torch.stack` and `torch.cat` write
into a tensor of the first item's dtype and device, so that an item of another form raises in the
worker, which ends the engine for everybody, or changes the values of others. Items of another shape
are no danger: vLLM leaves a batched field in a list, and pads a flat one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import InputError, MmkitError
from ..language.field import Batching, Field
from ..language.items import ItemType, dtype_name
from .memo import Once
from .processing import FieldProcessor, ProcessedFields


class FieldForms:
    """The forms of the fields of a modality, which the raw items of all requests have in common.

    They are found in items that mmkit makes, when they are first asked for. The modalities of plans
    for the options of requests share the forms of the server's plan: options may not change them.

    Args:
        where: names the modality in errors.
        item_type: the item type.
        fields: the fields of which all items must have one form, by name.
        processor: processes the items that mmkit makes.
    """

    def __init__(
        self,
        where: str,
        item_type: ItemType,
        fields: Mapping[str, Field],
        processor: FieldProcessor,
    ) -> None:
        self.where = where
        self.item_type = item_type
        self.fields = fields
        self._processor = processor
        self._forms: Once[Mapping[str, Form]] = Once()

    def get(self) -> Mapping[str, Form]:
        """Return the form of each field, as far as items that mmkit makes tell it."""
        return self._forms.get(self._find)

    def of_item(self, fields: Mapping[str, Any]) -> dict[str, Form]:
        """Return the forms of the fields of an item, as far as it tells them."""
        forms: dict[str, Form] = {}
        for name, declared in self.fields.items():
            form = form_of(fields[name], declared)
            if form is not None:
                forms[name] = form
        return forms

    def check(self, processed: ProcessedFields, indices: Sequence[int], remedy: str) -> None:
        """Refuse processed raw items whose fields have another form than in other requests.

        Args:
            processed: the fields of each item; those that an item lacks are not looked at.
            indices: the position of each item in the request.
            remedy: what a caller may do about it.

        Raises:
            InputError: names the first.
        """
        forms = self.get()
        for index, fields in zip(indices, processed, strict=True):
            for name, expected in forms.items():
                part = fields.get(name)
                if has_form(part, expected):
                    continue
                form = form_of(part, self.fields[name])
                if form is not None and form != expected:
                    where = f"{self.where}[{index}], fields[{name!r}]"
                    raise InputError(where, f"{expected}, as all items have", str(form), remedy)

    def _find(self) -> Mapping[str, Form]:
        """Process items, small ones first, until each returned field has a form."""
        forms: dict[str, Form] = {}
        # a small item takes little time, but may leave a list empty; larger ones follow
        values = list(reversed(self.item_type.small()))
        values += self.item_type.candidates()
        for value in values:
            try:
                fields = self._processor.process_spec_item(value)
                forms_of_item = self.of_item(fields)
            except MmkitError:
                # the processor may take no small item; that it takes the largest, vLLM's start
                # shows
                continue
            for name, form in forms_of_item.items():
                forms.setdefault(name, form)
            if self._has_all_returned(forms):
                break
        # in the order of the fields: `check` names the first that differs
        return {name: forms[name] for name in self.fields if name in forms}

    def _has_all_returned(self, forms: Mapping[str, Form]) -> bool:
        """Return whether each field that `process` returns has a form."""
        for name, declared in self.fields.items():
            if not declared.is_derived and name not in forms:
                return False
        return True


class Form(NamedTuple):
    """The form of a part.

    Attributes:
        dtypes: the dtypes of its tensors and arrays; none where it holds only Python values.
        devices: the devices of its tensors.
        layouts: how its tensors lie in memory.
        rank: the number of dimensions of a tensor of a flat field; None for a list of rows, and for
            other fields.
    """

    dtypes: frozenset[torch.dtype | np.dtype[Any]]
    devices: frozenset[torch.device]
    layouts: frozenset[torch.layout]
    rank: int | None

    def __str__(self) -> str:
        if not self.dtypes:
            return "no tensor"
        kind = "tensor" if self.devices else "array"
        dtypes = _join_sorted(dtype_name(dtype) for dtype in self.dtypes)
        text = f"a {dtypes} {kind}"
        if self.rank is not None:
            text += f" of {self.rank} dimension(s)"
        if not self.devices <= {torch.device("cpu")}:
            text += f" on {_join_sorted(self.devices)}"
        if not self.layouts <= {torch.strided}:
            text += f" in {_join_sorted(self.layouts)}"
        return text


def form_of(part: Any, declared: Field) -> Form | None:
    """Return the form of an item's part of a field.

    None for a part that goes with every form: None, an empty list, and Python values that an
    expression has.
    """
    arrays = _find_arrays(part)
    if not arrays and (declared.is_derived or part is None or part in ([], (), {})):
        return None
    dtypes: set[torch.dtype | np.dtype[Any]] = set()
    devices: set[torch.device] = set()
    layouts: set[torch.layout] = set()
    for array in arrays:
        dtypes.add(array.dtype)
        if isinstance(array, torch.Tensor):
            devices.add(array.device)
            layouts.add(array.layout)
    rank = None
    if declared.batching is Batching.JOINED and isinstance(part, torch.Tensor):
        rank = part.ndim
    return Form(frozenset(dtypes), frozenset(devices), frozenset(layouts), rank)


def has_form(part: Any, form: Form) -> bool:
    """Return whether a part that is one tensor has a form; False where `form_of` has to tell."""
    return (
        isinstance(part, torch.Tensor)
        and part.dtype in form.dtypes
        and part.device in form.devices
        and part.layout in form.layouts
        and len(form.dtypes) == 1
        and form.rank in (None, part.ndim)
    )


def _find_arrays(part: Any) -> list[torch.Tensor | np.ndarray[Any, Any]]:
    """Return the tensors and arrays in a part."""
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return [part]
    elements: Collection[Any] = ()
    if isinstance(part, (list, tuple)):
        elements = part
    elif isinstance(part, Mapping):
        elements = part.values()
    arrays: list[torch.Tensor | np.ndarray[Any, Any]] = []
    for element in elements:
        arrays += _find_arrays(element)
    return arrays


def _join_sorted(values: Iterable[object]) -> str:
    """Return values in the order of their names, for messages: ``float16 and float32``."""
    return " and ".join(sorted(str(value) for value in values))

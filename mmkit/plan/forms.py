"""The form of a field: what its parts have in common, whatever the item.

vLLM batches the items of all requests that arrive together. `torch.stack` and `torch.cat` write
into a tensor of the first item's dtype and device, so that an item of another form raises in the
worker, which ends the engine for everybody, or changes the values of others. Items of another shape
are no danger: vLLM leaves a batched field in a list, and pads a flat one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import InputError, MmkitError
from ..language.field import Field, Flat
from ..language.items import ItemType, dtype_name
from .memo import Once
from .processing import FieldProcessor, ProcessedFields


class FieldForms:
    """The forms of the fields of a modality, which the raw items of all requests have in common.

    They are found in items that mmkit makes, when they are first asked for. The modalities of plans
    for the options of requests share those of the server's plan: options may not change them.

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
        """Refuse processed raw items whose fields have another form than those of other requests.

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
        returned_names = {name for name, field in self.fields.items() if not field.is_derived}
        forms: dict[str, Form] = {}
        # a small item takes little time, but may leave a list empty; larger ones follow
        for value in (*reversed(self.item_type.small()), *self.item_type.candidates()):
            try:
                fields = self._processor.process_spec_item(value)
                forms_of_item = self.of_item(fields)
            except MmkitError:
                # the processor may take no small item; that it takes the largest, vLLM's start
                # shows
                continue
            for name, form in forms_of_item.items():
                forms.setdefault(name, form)
            if forms.keys() >= returned_names:
                break
        return {name: forms[name] for name in self.fields if name in forms}


class Form(NamedTuple):
    """The form of a part.

    Attributes:
        dtypes: those of its tensors and arrays; none where it holds Python values alone.
        devices: those of its tensors.
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
        dtypes = " and ".join(sorted(str(dtype_name(dtype)) for dtype in self.dtypes))
        text = f"a {dtypes} tensor" if self.devices else f"a {dtypes} array"
        if self.rank is not None:
            text += f" of {self.rank} dimension(s)"
        if not self.devices <= {torch.device("cpu")}:
            text += f" on {' and '.join(sorted(map(str, self.devices)))}"
        if not self.layouts <= {torch.strided}:
            text += f" in {' and '.join(sorted(map(str, self.layouts)))}"
        return text


def form_of(part: Any, declared: Field) -> Form | None:
    """Return the form of an item's part of a field; None for one that is of every form: None, an
    empty list, and Python values that an expression has."""
    arrays = list(_arrays(part))
    if not arrays and (declared.is_derived or part is None or part in ([], (), {})):
        return None
    tensors = [array for array in arrays if isinstance(array, torch.Tensor)]
    is_flat = isinstance(declared, Flat) and isinstance(part, torch.Tensor)
    return Form(
        frozenset(array.dtype for array in arrays),
        frozenset(tensor.device for tensor in tensors),
        frozenset(tensor.layout for tensor in tensors),
        part.ndim if is_flat else None,
    )


def has_form(part: Any, form: Form) -> bool:
    """Whether a part that is one tensor has a form; False where `form_of` has to tell."""
    return (
        isinstance(part, torch.Tensor)
        and part.dtype in form.dtypes
        and part.device in form.devices
        and part.layout in form.layouts
        and len(form.dtypes) == 1
        and form.rank in (None, part.ndim)
    )


def _arrays(part: Any) -> Iterator[Any]:
    """Yield the tensors and arrays in a part."""
    if isinstance(part, (torch.Tensor, np.ndarray)):
        yield part
    elif isinstance(part, (list, tuple)):
        for element in part:
            yield from _arrays(element)
    elif isinstance(part, Mapping):
        yield from _arrays(list(part.values()))

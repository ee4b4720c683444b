"""The form of a field: what its parts have in common, whatever the item.

vLLM batches the items of all requests that arrive together. `torch.stack` and `torch.cat` write
into a tensor of the first item's dtype and device, so that an item of another form raises in the
worker, which ends the engine for everybody, or changes the values of others. Items of another shape
are no danger: vLLM leaves a batched field in a list, and pads a flat one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ..language.field import Field, Flat
from ..language.items import dtype_name


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
    """The tensors and arrays in a part."""
    if isinstance(part, (torch.Tensor, np.ndarray)):
        yield part
    elif isinstance(part, (list, tuple)):
        for element in part:
            yield from _arrays(element)
    elif isinstance(part, Mapping):
        yield from _arrays(list(part.values()))

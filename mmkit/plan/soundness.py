"""What a language model can carry in place of its token embeddings: finite values, not too large.

Keys and values that are not finite stay in the KV cache after their request, and reach the next
request that gets the blocks: attention multiplies masked values by zero, and zero times NaN is NaN.
Rows that a caller sends are refused by `check_rows`; rows that an encoder makes are replaced by
zeros on the device, in `mmkit.plan.containment`.
"""

from __future__ import annotations

import torch

from ..errors import InputError
from ..language.items.values import (
    LARGEST_FLOAT16,
    check_finite,
    describe_array,
    dtype_name,
    to_plain_tensor,
)

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compute_largest_magnitude(dtype: torch.dtype) -> float:
    """Return the largest magnitude of a row's values that a language model receives.

    It depends on the model's dtype, and is a power of two, which every dtype holds exactly.

    Rows enter the residual stream in the model's dtype. Every layer adds to that stream; the added
    values come from a normalised copy and do not grow with the row. A quarter of the range of
    float16, 16384, therefore leaves the rest to the layers. bfloat16 and float32 have range enough,
    but norms sum the squares of a row's values in float32, whose range ends at 2**128: with 2**53,
    about 9e15, the sum stays finite for rows of up to four million values.
    """
    return 2.0**14 if dtype == torch.float16 else 2.0**53


def check_rows(
    rows: object, where: str, *, width: int | None, dtype: torch.dtype | None, remedy: str = ""
) -> torch.Tensor:
    """Refuse rows that a language model cannot take in place of token embeddings.

    Args:
        rows: what a caller sent as floating (rows, width).
        where: names it in errors.
        width: the hidden size of the language model; None if it is not known.
        dtype: the language model's dtype; None if it is not known.
        remedy: what to do about another shape.

    Returns:
        The rows as a plain tensor in host memory, apart from autograd. It may share memory with
        what the caller sent.

    Raises:
        InputError: something else than a tensor of that form; a value that is not finite, or that
            is larger than what an item or the language model can carry.
    """
    expected = f"a finite floating (rows, {width or 'hidden_size'}) tensor"
    if not isinstance(rows, torch.Tensor) or rows.ndim != 2 or not rows.is_floating_point():
        raise InputError(where, expected, describe_array(rows))
    if rows.dtype not in _FLOAT_DTYPES:
        raise InputError(
            where, expected, describe_array(rows), "Convert it to float16, bfloat16 or float32."
        )
    if width is not None and rows.shape[1] != width:
        raise InputError(where, expected, describe_array(rows), remedy)
    rows = to_plain_tensor(rows, where, expected)
    check_finite(rows, where)
    if dtype is not None and rows.numel():
        _check_magnitude(rows, dtype, where)
    return rows


def _check_magnitude(rows: torch.Tensor, dtype: torch.dtype, where: str) -> None:
    """Refuse finite rows whose values are larger than a language model of this dtype carries.

    `check_finite` has refused what is larger than float16 holds.

    Raises:
        InputError: names the largest magnitude.
    """
    largest_allowed = compute_largest_magnitude(dtype)
    if largest_allowed >= LARGEST_FLOAT16:
        return
    smallest, largest = rows.aminmax()
    magnitude = max(-float(smallest), float(largest))
    if magnitude > largest_allowed:
        carries = f"which a model in {dtype_name(dtype)} carries"
        expected = f"values of magnitude <= {largest_allowed:g}, {carries}"
        raise InputError(where, expected, f"{magnitude:g}")

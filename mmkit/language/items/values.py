"""Arrays and numbers that callers send."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...errors import InputError

ARRAYS = (np.ndarray, torch.Tensor)
SCALARS = (int, float, np.generic)
LARGEST_FLOAT16 = 65504.0


def describe(value: object) -> str:
    if value is None:
        return "None"
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or somebody's class
        text = ""
    return f"{type(value).__name__} {text}" if 0 < len(text) <= 40 else f"a {type(value).__name__}"


def describe_array(value: object) -> str:
    """A tensor or an array by its shape and dtype, for messages; anything else by its class."""
    if isinstance(value, ARRAYS):
        return f"shape {tuple(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"


def to_plain_tensor(tensor: torch.Tensor, where: str, expected: str) -> torch.Tensor:
    """A plain tensor in host memory, apart from autograd."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        raise InputError(where, expected, f"a {tensor.layout} tensor on {tensor.device}")
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_cpu else tensor.cpu()


def as_array(value: object, where: str, expected: str) -> np.ndarray[Any, Any]:
    """An array, tensor, image or list as an array; a floating tensor, which may be a bfloat16, as
    float32."""
    if isinstance(value, torch.Tensor):
        value = to_plain_tensor(value, where, expected)
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(where, expected, "a masked array", "Fill its gaps.")
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        value = value.float()
    try:
        return np.asarray(value)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InputError(where, expected, describe(value)) from error


def check_finite(value: Any, where: str) -> None:
    """Refuse arrays and tensors of other than real numbers that any model dtype can hold.

    Raises:
        InputError: a dtype that is no real number's, NaN, an infinity, or a magnitude beyond the
            largest float16.
    """
    array = as_array(value, where, "real numbers")
    if array.dtype.kind not in "fiub":
        raise InputError(where, "real numbers", f"dtype {array.dtype}")
    if array.dtype.kind != "f" or not array.size:
        return
    most = max(array.max(), -array.min())  # without a copy of it; NaN is both
    if not most <= LARGEST_FLOAT16:
        got = "NaN or an infinity" if not np.isfinite(array).all() else f"{float(most):g}"
        raise InputError(where, f"finite values of magnitude <= {LARGEST_FLOAT16:g}", got)


def dtype_name(dtype: Any) -> Any:
    """The name of a torch dtype; anything else as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype

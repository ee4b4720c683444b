"""Arrays and numbers that callers send."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...errors import InputError

ARRAYS = (np.ndarray, torch.Tensor)
SCALARS = (int, float, np.generic)
LARGEST_FLOAT16 = 65504.0

MAX_TEXT_SHOWN = 40
"""Characters of a value in a message."""


def describe(value: object) -> str:
    """Return a value with its class for a message; only the class where its text is long."""
    if value is None:
        return "None"
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or somebody's class
        text = ""
    if 0 < len(text) <= MAX_TEXT_SHOWN:
        return f"{type(value).__name__} {text}"
    return f"a {type(value).__name__}"


def describe_array(value: object) -> str:
    """Return the shape and the dtype of a tensor or an array, for a message.

    For any other value, return its class.
    """
    if isinstance(value, ARRAYS):
        return f"shape {tuple(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"


def check_unicode(text: str, where: str) -> None:
    """Refuse a text that UTF-8 cannot encode.

    Raises:
        InputError: says where half of a surrogate pair is.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"half of a surrogate pair at {error.start}"
        raise InputError(where, "a text that UTF-8 can encode", got) from None


def to_plain_tensor(tensor: torch.Tensor, where: str, expected: str) -> torch.Tensor:
    """Return a tensor as a plain strided one in host memory, without autograd.

    Raises:
        InputError: it has no strides, for example a sparse or a quantized one.
    """
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        raise InputError(where, expected, f"a {tensor.layout} tensor on {tensor.device}")
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.cpu()  # itself where it is there


def as_array(value: object, where: str, expected: str) -> np.ndarray[Any, Any]:
    """Return an array, tensor, image or list as an array.

    A floating-point tensor becomes float32, since numpy has no bfloat16.
    """
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


def check_finite(value: Any, where: str) -> float:
    """Refuse arrays and tensors with values that are not finite numbers in every model dtype.

    Returns:
        The largest magnitude of floats; 0.0 for integers, which are not looked at.

    Raises:
        InputError: a dtype that is no real number's, NaN, an infinity, or a magnitude beyond the
            largest float16.
    """
    array = as_array(value, where, "real numbers")
    if array.dtype.kind not in "fiub":
        raise InputError(where, "real numbers", f"dtype {array.dtype}")
    if array.dtype.kind != "f" or not array.size:
        return 0.0
    # np.abs would make a copy. Both of these are NaN if any value is, and `not <=` is true of NaN.
    magnitude = float(max(array.max(), -array.min()))
    if not magnitude <= LARGEST_FLOAT16:
        got = f"{magnitude:g}"
        if not np.isfinite(array).all():
            got = "NaN or an infinity"
        raise InputError(where, f"finite values of magnitude <= {LARGEST_FLOAT16:g}", got)
    return magnitude


def dtype_name(dtype: Any) -> Any:
    """Return the name of a torch dtype; anything else as it is."""
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    return dtype

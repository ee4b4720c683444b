"""What travels to a render process and back."""

import os

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mmkit.shared_memory import FOLDER, pack, unpack

ARRAYS = arrays.arrays(
    st.sampled_from(["f4", "f8", "i8", "u1", "?", "c8"]), arrays.array_shapes(min_dims=0, min_side=0, max_side=5)
)
VIEWS = {
    "itself": lambda array: array,
    "start": lambda array: array[:1],
    "end": lambda array: array[1:],
    "strided": lambda array: array[::2],
    "turned": lambda array: array.T,
    "repeated": lambda array: np.broadcast_to(array, (2, *array.shape)),
    "tensor": torch.from_numpy,
    "start as a tensor": lambda array: torch.from_numpy(array)[:1],
    "turned as a tensor": lambda array: torch.from_numpy(array).movedim(0, -1),
    "repeated as a tensor": lambda array: torch.from_numpy(array).expand(2, *array.shape),
    "half": lambda array: torch.from_numpy(array.real).to(torch.bfloat16),
    "conjugate": lambda array: torch.from_numpy(array).conj(),
}


@given(st.lists(ARRAYS, min_size=1, max_size=3), st.data())
def test_what_travels_is_what_was_sent(bases, data):
    """Views of one array, too, in any order, each as often as it comes."""
    ways = data.draw(st.lists(st.tuples(st.sampled_from(bases), st.sampled_from(list(VIEWS))), max_size=6))
    sent = [VIEWS[way](np.atleast_1d(base)) for base, way in ways]
    sent += sent[:1]
    packed = pack(sent, FOLDER)
    got = unpack(packed)
    assert not packed.path or not os.path.exists(packed.path)
    for one, other in zip(sent, got, strict=True):
        assert (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
        both = (torch.tensor(value) if isinstance(value, np.ndarray) else value for value in (one, other))
        torch.testing.assert_close(*both, rtol=0, atol=0, equal_nan=True)

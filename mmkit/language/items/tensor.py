"""Tensors, the items of new modalities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from ...errors import InputError, SpecError
from ..expr import Count, Expr, Scope, Value, as_expression, as_expression_tuple, as_expressions
from ..node import Converted, parameter
from .base import ItemType, count_drawn_values, repeat_values
from .facts import Facts, NeedsItem, TensorFacts, TextFacts
from .memory import copy_if_shared
from .size import (
    Between,
    Size,
    Sizes,
    check_positive,
    check_range,
    check_size,
    convert_shapes,
    fits,
    get_ends,
    write_shape,
)
from .values import (
    ARRAYS,
    LARGEST_FLOAT16,
    SCALARS,
    as_array,
    check_unicode,
    describe,
    dtype_name,
    to_plain_tensor,
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NUMBERS = _FLOATS + _INTEGERS
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch has no arithmetic on these

_ACCEPTED = {**dict.fromkeys(_NUMBERS, _NUMBERS), torch.bool: (torch.bool,)}
"""For each canonical dtype the dtypes that it accepts, where it holds their values."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _ACCEPTED}
"""The dtypes of items, by name."""
_RANDOM_FLOAT, _RANDOM_INTEGER = 2.0, 9
"""The largest magnitude of random values, where a spec allows more."""
_MAX_DEPTH = 32
"""Levels of nested lists. More are a mistake, or a list that holds itself."""


def _as_sizes(shape: Any) -> tuple[Any, ...]:
    """Return the sizes of a shape as expressions or numbers."""
    if not isinstance(shape, (list, tuple)):
        raise SpecError("Tensor.shape", "a tuple of sizes, one per dimension", repr(shape))
    return as_expression_tuple(shape)


def _as_dtype_name(dtype: Any) -> str:
    """Return the name of a dtype that items may have."""
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise SpecError("Tensor.dtype", f"one of {', '.join(DTYPES)}", repr(name))
    return name  # type: ignore[no-any-return]


class Tensor(ItemType):
    """A tensor: the item type of new modalities.

    Callers send one item, a sequence of items, or a batch with one more leading dimension, as torch
    tensors, numpy arrays or nested lists of numbers. The canonical form is a contiguous CPU tensor
    of `dtype`.

    A floating `dtype` accepts every floating dtype (float64, numpy's default, is rounded to
    nearest), lists of numbers (rounded likewise), and integer arrays whose every value it holds
    exactly. An integer `dtype` accepts whole values in its range, of integer and floating dtypes.
    `bool` accepts only bools, and no other dtype accepts bools: a mask in place of values is a
    mistake more often than a choice. Complex arrays are refused. A scalar (shape ``()``) may also
    be a number.

    Attributes:
        shape: one size, expression or `between(least, most)` per dimension.
        dtype: the canonical torch dtype, or its name.
        bound: largest magnitude, rounded to `dtype` like the values; NaN and infinities are
            refused. None, the default, is the largest float16, a value that every model dtype can
            hold; for an integer `dtype` it is the range of that dtype. For indices,
            `between(least, most)` states the range of an integer `dtype`; in a `Record` the ends
            may read a part before: ``between(0, item.atoms.length - 1)``. ``between(-1, most)``
            lets -1 stand for none, and refuses -2.
        largest: shape of the item with the most encoder rows, or a list of shapes that contains it,
            where that is not the item with every size at its most.

    Facts: `shape`, `length` (the first dimension, or 1 for a scalar), `index`.
    """

    shape: Converted[tuple[Size, ...] | list[Size], tuple[Any, ...]] = parameter(_as_sizes)
    dtype: Converted[str | torch.dtype, str] = parameter(_as_dtype_name, default="float32")
    bound: Converted[Expr | float | Between | None, Any] = parameter(as_expression, default=None)
    largest: Converted[Sizes | None, Any] = parameter(as_expressions, default=None)  # type: ignore[misc]

    vllm_modality = ""
    accepted_types = (*ARRAYS, *SCALARS, list, tuple)
    size_hint = "a shape as 9x4"
    facts_class = TensorFacts
    is_field = True
    may_be_field = True

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.shape)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The canonical dtype."""
        return DTYPES[self.dtype]

    def bind(self, scope: Scope) -> Self:
        bound = super().bind(scope)
        for axis, size in enumerate(bound.shape):
            check_size(size, f"Tensor.shape[{axis}] = {self.shape[axis]!s}")
        largest: tuple[Any, ...] = (tuple(size.most for size in bound.bounds()),)
        if bound.largest is not None:
            largest = convert_shapes(bound.largest, bound.ndim, "Tensor.largest")
        for shape in largest:
            if not fits(shape, bound.shape):
                expected = f"a shape within {write_shape(bound.shape)}"
                raise SpecError("Tensor.largest", expected, repr(shape))
        bound = replace(bound, bound=bound._limit_bound(), largest=largest)
        for shape in largest:
            bound.check_bytes(shape)
        return bound

    def _limit_bound(self) -> Any:
        """Return the bound, limited to what the dtype can hold.

        It is a magnitude, rounded as the values are; None means all integers of the dtype.
        """
        where, bound, dtype = "Tensor.bound", self.bound, self.torch_dtype
        if isinstance(bound, Between):
            if dtype not in _INTEGERS:
                remedy = "State the largest magnitude."
                raise SpecError(where, "a number", f"{bound} of {self.dtype}", remedy)
            check_range(bound, where)
            limits = torch.iinfo(dtype)
            if bound.least < limits.min or bound.most > limits.max:
                raise SpecError(where, f"values that {self.dtype} holds", str(bound))
            return bound
        check_positive(bound, where)
        if dtype.is_floating_point:
            limit = LARGEST_FLOAT16 if bound is None else bound
            magnitude = min(limit, torch.finfo(dtype).max)
            # a value that equals the bound may be rounded up, and so may the bound
            return max(magnitude, float(torch.tensor(float(magnitude), dtype=dtype)))
        if bound is None or dtype == torch.bool or bound > torch.iinfo(dtype).max:
            return None
        return int(bound)

    @cached_property
    def expected(self) -> str:
        return f"a {write_shape(self.shape)} {self.dtype} tensor"

    def _is_one(self, data: Sequence[Any]) -> bool:
        """Return whether nested lists are one item, judged by their first number."""
        inner: Any = data
        for _ in range(self.ndim):
            if not isinstance(inner, (list, tuple)):
                break
            if not inner:
                return inner is not data
            inner = inner[0]
        return isinstance(inner, SCALARS)

    def canonical(self, value: object, where: str) -> torch.Tensor:
        return _copy_if_shared(value, self.convert(value, where))

    def convert(self, value: object, where: str) -> torch.Tensor:
        tensor = self._as_fitting_tensor(value, where)
        self._check_values(tensor, where)
        return self._cast(tensor)

    def canonical_all(self, values: Sequence[object], where: str) -> list[Any]:
        """Return each item in its canonical form; None for an item that the caller only names.

        Floats of one shape and dtype are checked together, which takes a fraction of the time.
        """
        if len(values) > 1 and self.torch_dtype.is_floating_point:
            with suppress(InputError):  # the first item at fault is found one by one
                return self._canonical_together(values, where)
        return super().canonical_all(values, where)

    def _canonical_together(self, values: Sequence[object], where: str) -> list[torch.Tensor]:
        """Return items in their canonical form, those that are alike checked together.

        Raises:
            InputError: an item is malformed; the error does not say which.
        """
        tensors = [self._as_fitting_tensor(value, where) for value in values]
        if _are_alike(tensors):
            self._check_values(torch.stack(tensors), where)
        else:
            for tensor in tensors:
                self._check_values(tensor, where)
        items: list[torch.Tensor] = []
        for value, tensor in zip(values, tensors, strict=True):
            items.append(_copy_if_shared(value, self._cast(tensor)))
        return items

    def _as_fitting_tensor(self, value: object, where: str) -> torch.Tensor:
        """Return a value as a tensor of a dtype and a shape that are accepted."""
        tensor = _as_tensor(value, where, self)
        if tensor.dtype not in _ACCEPTED[self.torch_dtype]:
            got = f"dtype {dtype_name(tensor.dtype)}"
            raise InputError(where, self.expected, got, f"Convert it to {self.dtype}.")
        if not fits(tensor.shape, self.shape):
            remedy = ""
            if tensor.ndim > self.ndim and fits(tensor.shape[1:], self.shape):
                remedy = "Send one tensor per item."
            raise InputError(where, self.expected, f"shape {tuple(tensor.shape)}", remedy)
        return tensor

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the canonical dtype and order of memory."""
        if not tensor.numel():  # may have any strides
            return torch.empty(tensor.shape, dtype=self.torch_dtype)
        if tensor.dtype == self.torch_dtype:
            return tensor.contiguous()
        return tensor.to(self.torch_dtype, memory_format=torch.contiguous_format)

    def _check_values(self, tensor: torch.Tensor, where: str) -> None:
        """Refuse values that the canonical dtype or the bound does not allow."""
        if not tensor.numel() or self.torch_dtype == torch.bool:
            return
        if tensor.is_floating_point() and self.torch_dtype.is_floating_point:
            least, most = map(float, tensor.aminmax())  # both are NaN if any value is
            if -self.bound <= least and most <= self.bound:
                return
        if self.bound is None and tensor.dtype == self.torch_dtype:
            return  # integers, of which the dtype holds all; a picture has many
        for rule in self._find_violations(tensor):
            if not rule.is_bad.any():
                continue
            index = rule.is_bad.nonzero()[0].tolist()
            value = tensor[tuple(index)].item()
            got = f"{value:g}" if isinstance(value, float) else str(value)
            if index:
                got = f"{got} at {index}"
            remedy = rule.remedy if math.isfinite(value) else ""
            raise InputError(where, rule.expected, got, remedy)

    def _find_violations(self, tensor: torch.Tensor) -> Iterator[_Violations]:
        """Yield the values that each rule of this type refuses."""
        to_floats, of_floats = self.torch_dtype.is_floating_point, tensor.is_floating_point()
        lowest, highest = self._range
        expected, remedy = f"{self.dtype} values from {lowest} to {highest}", ""
        if to_floats:
            expected, remedy = f"finite values of magnitude <= {highest:g}", "Check the units."
        # float64 and int64 hold the values of both dtypes
        wide = tensor.double() if to_floats or of_floats else tensor.long()
        is_outside = ~((wide >= lowest) & (wide <= highest))  # and so is NaN
        yield _Violations(is_outside, expected, remedy)
        if to_floats == of_floats:
            return
        expected, remedy = f"whole numbers that {self.dtype} holds", ""
        if to_floats:
            expected = f"integers that {self.dtype} holds exactly"
            remedy = "Send floats to have them rounded."
        # 2**63 is no int64, and would come back as any number
        is_changed = tensor.to(self.torch_dtype).to(tensor.dtype) != tensor
        yield _Violations(is_changed | (wide.double() >= 2.0**63), expected, remedy)

    @cached_property
    def _range(self) -> tuple[Any, Any]:
        """The least and the most that a value may be."""
        if isinstance(self.bound, Between):
            return get_ends(self.bound)
        if self.torch_dtype.is_floating_point:
            return -self.bound, self.bound
        limits = torch.iinfo(self.torch_dtype)
        if self.bound is None:
            return limits.min, limits.max
        return max(limits.min, -self.bound), min(limits.max, self.bound)

    def facts(self, value: torch.Tensor, index: int) -> SimpleNamespace:
        shape = tuple(value.shape)
        return SimpleNamespace(index=index, shape=shape, length=_find_length(shape))

    def check_facts(self, facts: Facts, where: str) -> SimpleNamespace:
        self._check_facts_class(facts, where)
        shape = getattr(facts, "shape", None)
        if isinstance(shape, (list, tuple)) and all(type(size) is int for size in shape):
            shape = tuple(shape)
            if fits(shape, self.shape):
                return SimpleNamespace(shape=shape, length=_find_length(shape))
        raise InputError(f"{where}.shape", write_shape(self.shape), describe(shape))

    def sizes(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(value.shape)

    def blank(self, *sizes: int) -> torch.Tensor:
        value = 0
        if isinstance(self.bound, Between):
            # a value below 0 may stand for none, of which an encoder makes less
            value = min(max(0, self.bound.least), self.bound.most)
        return torch.full(sizes, value, dtype=self.torch_dtype)

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> torch.Tensor:
        """Return a tensor with random values within the bounds.

        Floats have a magnitude of at most 2, and integers cover the whole range. Integers that only
        their dtype bounds are from 0 to 9, because many are the ids of a small table.
        """
        shape = self.nearest(sizes)
        count = count_drawn_values(shape)
        dtype = self.torch_dtype
        values: np.ndarray[Any, Any]
        if dtype.is_floating_point:
            largest = min(self.bound, _RANDOM_FLOAT)
            values = generator.uniform(-largest, largest, count)
        else:
            least, most = self._random_range()
            values = generator.integers(least, most, count, endpoint=True)
        return torch.from_numpy(repeat_values(values, shape)).to(dtype)

    def _random_range(self) -> tuple[int, int]:
        """Return the least and the most of a random integer."""
        if self.torch_dtype == torch.bool:
            return 0, 1
        if self.bound is None and self.torch_dtype != torch.uint8:
            return 0, _RANDOM_INTEGER
        least, most = self._range
        return least, most

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return math.prod(sizes) * self.torch_dtype.itemsize

    def bounds(self) -> list[Between]:
        return [Between(*get_ends(size)) for size in self.shape]

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"shape": [_size_to_json(size) for size in self.shape]}
        schema["dtype"] = self.dtype
        if isinstance(self.bound, Between):
            schema["values"] = _size_to_json(self.bound)
        return schema


class _Violations(NamedTuple):
    """What a rule of a `Tensor` refuses in a tensor.

    Attributes:
        is_bad: bools in the shape of the tensor.
        expected: what the rule says.
        remedy: for finite values.
    """

    is_bad: torch.Tensor
    expected: str
    remedy: str


class _FactsWithoutText(SimpleNamespace):
    """The facts of a text of which only the length is known.

    Args:
        where: names the text in errors.
        facts: the facts that are known.
    """

    def __init__(self, where: str, **facts: Any) -> None:
        super().__init__(**facts)
        self._where = where

    def __getattr__(self, name: str) -> Any:
        if name != "text":
            raise AttributeError(name)
        remedy = "Send the item in place of its facts."
        raise NeedsItem(self._where, "the text, which a layout reads", "its length", remedy)


def _copy_if_shared(value: object, tensor: torch.Tensor) -> torch.Tensor:
    """Return a canonical tensor in memory that the caller of a value lacks: itself, or a copy."""
    if not isinstance(value, torch.Tensor):
        return tensor  # `_as_tensor` has copied the value
    return copy_if_shared(value, tensor)  # type: ignore[no-any-return]


def _find_length(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have one shape and one dtype."""
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            return False
    return True


def _size_to_json(size: Any) -> Any:
    """Return a size as clients see it in JSON.

    It is a number, [least, most] for a size that varies, or the source of an expression over other
    parts of a record.
    """
    if isinstance(size, Between):
        return [_size_to_json(end) for end in get_ends(size)]
    if isinstance(size, int):
        return size
    return repr(size)


def _as_tensor(value: object, where: str, kind: Tensor) -> torch.Tensor:
    """Return a value as a strided CPU tensor of its own dtype, which may share its memory."""
    if isinstance(value, torch.Tensor):
        tensor = to_plain_tensor(value, where, kind.expected)
    else:
        if not isinstance(value, (np.ndarray, np.generic)):
            value = _from_list(value, where, kind)
        array = as_array(value, where, kind.expected)
        try:
            # torch refuses negative strides and warns of read-only memory
            tensor = torch.from_numpy(array.copy())
        except (TypeError, ValueError) as error:
            # no number, not of this machine's byte order, or too long for torch
            remedy = f"Convert it to {kind.dtype}."
            raise InputError(where, kind.expected, f"dtype {array.dtype}", remedy) from error
    if tensor.dtype in _UNSIGNED:
        tensor = tensor.to(torch.int64, memory_format=torch.contiguous_format)
        is_huge = tensor < 0  # what int64 does not hold has come round to there
        if is_huge.any():
            got = f"the value {int(tensor[is_huge][0]) + 2**64}"
            raise InputError(where, kind.expected, got)
    return tensor


def _from_list(value: object, where: str, kind: Tensor) -> np.ndarray[Any, Any]:
    """Return a number or nested lists of numbers as an array.

    Lists have no dtype, so integers are accepted for floats.
    """
    numbers: tuple[type, ...] = (int, float, np.integer, np.floating)
    if kind.torch_dtype == torch.bool:
        numbers = (bool, np.bool_)
    is_list = isinstance(value, (list, tuple))
    got = _find_other_than_numbers(value, numbers)
    if got:
        if is_list:
            got = f"a list that holds {got}"
        raise InputError(where, kind.expected, got)
    if is_list and not value:  # it tells nothing of the other sizes
        sizes = [size.least for size in kind.bounds()[1:]]
        return np.zeros((0, *sizes), dtype=numbers[0])
    dtype = np.float64 if kind.torch_dtype.is_floating_point else None
    try:
        return np.array(value, dtype=dtype)
    except ValueError as error:
        raise InputError(where, kind.expected, "a ragged list") from error


def _find_other_than_numbers(value: Any, numbers: tuple[type, ...], depth: int = 0) -> str:
    """Return a description of the first element of nested lists that is no accepted number.

    The description is empty where all elements are of the types `numbers`.
    """
    if isinstance(value, (list, tuple)):
        if depth == _MAX_DEPTH:
            return f"more than {_MAX_DEPTH} levels"
        for element in value:
            description = _find_other_than_numbers(element, numbers, depth + 1)
            if description:
                return description
        return ""
    is_bool = isinstance(value, bool)
    if not isinstance(value, numbers) or (is_bool and bool not in numbers):
        return describe(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return describe(value).removeprefix("int ")
    return ""


_RANDOM_LETTERS = "abc"
"""What random texts are made of, where a spec does not say of what texts are made."""

_BYTES_OF_CHARACTER = 4
"""At most, in UTF-8 and in memory."""


class Text(ItemType):
    """A text that a function or a processor encodes: SMILES, DNA, a query.

    Callers send a string or a list of strings. The canonical form is a `str` that UTF-8 can encode.

    A text that spells a placeholder, or a special token that stands for an item in prompts, is
    refused: a `process` that calls a tokenizer would make the token of it.

    Attributes:
        most: the most characters.
        least: the fewest.
        alphabet: the characters that a text may have; None, the default, for any. Binding and the
            laws make texts of these.
        largest: the text with the most encoder rows, or a list of texts that contains it. None, the
            default, for a text of `most` characters that mmkit makes: the letters of the alphabet
            in turn, or ``a``.

    Facts: `text`, `length` in characters, `index`. ``tok.text("{}", item.text)`` in a layout is the
    text encoded as plain text: no special token comes out of it.
    """

    most: Converted[Count, Any] = parameter(as_expression)
    least: Converted[Count, Any] = parameter(as_expression, default=1)
    alphabet: Converted[Value | None, Any] = parameter(as_expression, default=None)
    largest: Converted[Value | list[str] | None, Any] = parameter(  # type: ignore[misc]
        as_expressions, default=None
    )

    ndim = 1
    vllm_modality = ""
    accepted_types = (str, list, tuple)
    size_hint = "a number of characters"
    facts_class = TextFacts
    remedy = "State its alphabet=, or a text as largest=."
    is_text = True

    def bind(self, scope: Scope) -> Self:
        bound = super().bind(scope)
        check_size(bound.bounds()[0], "Text.least, Text.most")
        bound.check_bytes((bound.most,))
        alphabet = bound.alphabet
        if alphabet is not None and not (isinstance(alphabet, str) and alphabet):
            raise SpecError("Text.alphabet", "a text of at least one character", repr(alphabet))
        largest = bound.largest
        if largest is None:
            return bound
        texts = (largest,)
        if isinstance(largest, (list, tuple)):
            texts = tuple(largest)
        if not texts:
            raise SpecError("Text.largest", "at least one text", "none")
        for text in texts:
            try:
                bound.canonical(text, "Text.largest")
            except InputError as error:
                raise SpecError(str(error)) from error
        return replace(bound, largest=texts)

    def bounds(self) -> list[Between]:
        return [Between(self.least, self.most)]

    @property
    def expected(self) -> str:
        letters = "" if self.alphabet is None else f" among {self.alphabet!r}"
        return f"a text of {Between(self.least, self.most)} characters{letters}"

    def convert(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise InputError(where, self.expected, describe(value))
        if not self.least <= len(value) <= self.most:
            raise InputError(where, self.expected, f"{len(value)} of them")
        if self.alphabet is not None:
            for position, character in enumerate(value):
                if character not in self.alphabet:
                    raise InputError(where, self.expected, f"{character!r} at {position}")
        check_unicode(value, where)
        return str(value)

    def facts(self, value: str, index: int) -> SimpleNamespace:
        return SimpleNamespace(index=index, length=len(value), text=value)

    def check_facts(self, facts: Facts, where: str) -> SimpleNamespace:
        checked = super().check_facts(facts, where)
        return _FactsWithoutText(where, **vars(checked))

    def texts(self, value: str) -> Iterator[tuple[str, str]]:
        yield "", value

    def sizes(self, value: str) -> tuple[int, ...]:
        return (len(value),)

    def blank(self, *sizes: int) -> str:
        """Return a text of a length.

        It repeats the largest text that the spec states, or else the letters of the alphabet.
        """
        (length,) = sizes
        letters = self.alphabet or "a"
        if self.largest and self.largest[0]:
            letters = self.largest[0]
        return (letters * (length // len(letters) + 1))[:length]

    def candidates(self, fraction: float = 1.0, most: Sequence[float] = ()) -> list[str]:
        limit = most[0] if most else math.inf
        candidates = []
        for text in self.largest or [self.blank(self.most)]:
            length = max(self.least, int(min(len(text) * fraction, limit)))
            candidates.append(text[:length])
        return candidates

    def random(self, sizes: Sequence[int], generator: np.random.Generator) -> str:
        (length,) = self.nearest(sizes)
        letters = list(self.alphabet or _RANDOM_LETTERS)
        return "".join(generator.choice(letters, length))

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return _BYTES_OF_CHARACTER * sizes[0]

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"shape": [[self.least, self.most]], "dtype": "text"}
        if self.alphabet is not None:
            schema["alphabet"] = self.alphabet
        return schema

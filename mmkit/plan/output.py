"""An output bound to a config and a tokenizer: ids in, an array out, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, SpecError, convert_errors, locate_errors
from ..language.expr import Scope
from ..language.items.base import describe_array
from ..language.items.tensor import DTYPES
from ..language.spec import Array, Output
from ..language.vocabulary import check_spec_ids, describe_id


class BoundOutput:
    """An output of a spec, bound to a config and a tokenizer: ``plan.outputs["frame"]``.

    Attributes:
        spec: the declaration.
        name: the output's name.
        where: names the output in errors, for example ``terra.outputs.frame``.
        allowed: the ids that may stand at each position.
        common: the allowed ids where they are the same at every position, else None.
        allows_all: whether `common` holds all ids that are sampled at all.
    """

    def __init__(
        self,
        spec: Output,
        model: str,
        scope: Scope,
        vocab_size: int,
        reserved: frozenset[int] = frozenset(),
    ) -> None:
        """Evaluate the layout.

        Raises:
            SpecError: no position to choose, an id that the model lacks, or a placeholder id, which
                is never sampled.
        """
        self.spec = spec
        self.name = spec.name
        self.where = f"{model}.outputs.{spec.name}"
        self._scope = scope
        where = f"{self.where}, layout"
        with locate_errors(where):
            positions = spec.layout.list_allowed_ids(scope)
        self.allowed: list[range] = []
        is_chosen: list[bool] = []
        for ids in positions:
            if isinstance(ids, range):
                is_chosen.append(True)
                self.allowed.append(ids)
            else:  # a literal
                is_chosen.append(False)
                self.allowed.append(range(ids, ids + 1))
        if True not in is_chosen:
            raise SpecError(where, "at least one any_id()", "none")
        self._is_chosen = np.array(is_chosen)
        check_spec_ids([ids[-1] for ids in self.allowed], vocab_size, where)
        distinct = set(self.allowed)
        _check_not_reserved(distinct, reserved, where)
        self.common = self.allowed[0] if len(distinct) == 1 else None
        num_common = 0 if self.common is None else len(self.common)
        num_reserved = 0
        for token in reserved:
            if token < vocab_size:
                num_reserved += 1
        self.allows_all = num_common == vocab_size - num_reserved

    @property
    def num_tokens(self) -> int:
        """The number of ids."""
        return len(self.allowed)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays, taken from the array of the smallest ids."""
        return tuple(self._smallest.shape)

    @property
    def dtype(self) -> str:
        """Dtype of the arrays, by its name in numpy."""
        return self._smallest.dtype.name

    @cached_property
    def _smallest(self) -> Array:
        return self.decode([ids.start for ids in self.allowed])

    def decode(self, ids: Any) -> Array:
        """Return the array that ids stand for.

        Args:
            ids: a sequence of `num_tokens` whole numbers, or an array or tensor of them.

        Raises:
            InputError: another number of ids, or one that may not stand at its position.
            SpecError: the function of the spec fails.
        """
        values = ids.tolist() if hasattr(ids, "tolist") else ids
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise InputError(self.where, "a sequence of token ids", f"a {type(ids).__name__}")
        if len(values) != self.num_tokens:
            remedy = "Sampling for this output stops after one; send the ids of one alone."
            raise InputError(self.where, f"{self.num_tokens} ids", str(len(values)), remedy)
        wrong = self._find_wrong_id(values)
        if wrong is not None:
            where = f"{self.where}[{wrong.position}]"
            remedy = "Check where the output begins, and that sampling was confined to it."
            raise InputError(where, wrong.expected, wrong.got, remedy)
        chosen_ids = np.array(values, np.int64)[self._is_chosen]
        where = f"{self.where}, decode"
        with convert_errors(where, "an array for ids that may stand there"):
            decoded = self.spec.decode(chosen_ids, self._scope)
        if not isinstance(decoded, np.ndarray) or decoded.dtype.name not in DTYPES:
            raise SpecError(where, f"a numpy array of {', '.join(DTYPES)}", describe_array(decoded))
        return decoded

    def encode(self, array: Any) -> list[int]:
        """Return the ids of an array, `num_tokens` of them, literals included.

        Args:
            array: an array of the shape and dtype that `decode` returns.

        Raises:
            InputError: the spec has no `encode`, or `encode` refuses the array.
            SpecError: `encode` returns ids that may not stand there.
        """
        if self.spec.encode is None:
            raise InputError(self.where, "an output with encode", "one without")
        array = np.asarray(array)
        if array.shape != self.shape or array.dtype.name != self.dtype:
            expected = f"an array of shape {self.shape} of {self.dtype}"
            raise InputError(
                self.where, expected, describe_array(array), "Nothing is cast or resized."
            )
        with convert_errors(self.where, "an array that the output can be", InputError):
            chosen_ids = np.asarray(self.spec.encode(array, self._scope))
        where = f"{self.where}, encode"
        num_chosen = int(self._is_chosen.sum())
        if chosen_ids.dtype.kind not in "iu" or chosen_ids.shape != (num_chosen,):
            expected = f"({num_chosen},) integers, one for each any_id()"
            raise SpecError(where, expected, describe_array(chosen_ids))
        ids = np.array([allowed.start for allowed in self.allowed], np.int64)
        ids[self._is_chosen] = chosen_ids
        values: list[int] = ids.tolist()
        wrong = self._find_wrong_id(values)
        if wrong is not None:
            raise SpecError(f"{where}, position {wrong.position}", wrong.expected, wrong.got)
        return values

    def _find_wrong_id(self, ids: Sequence[int]) -> _WrongId | None:
        """Return the first id that may not stand at its position; None if all may."""
        for position, (token, allowed) in enumerate(zip(ids, self.allowed, strict=True)):
            if type(token) is int and token in allowed:
                continue
            expected = f"the id {allowed[0]}"
            if len(allowed) > 1:
                expected = f"an id from {allowed[0]} to {allowed[-1]}"
            return _WrongId(position, expected, describe_id(token))
        return None


class _WrongId(NamedTuple):
    """An id that may not stand at its position, with the words of the refusal."""

    position: int
    expected: str
    got: str


def _check_not_reserved(allowed: Iterable[range], reserved: Iterable[int], where: str) -> None:
    """Refuse an output that allows a placeholder id, which is never sampled.

    Raises:
        SpecError: names the smallest.
    """
    ranges = list(allowed)
    for token in sorted(reserved):
        for ids in ranges:
            if token in ids:
                got = f"the placeholder id {token}"
                remedy = "End the range before it, or begin behind it."
                raise SpecError(where, "ids that may be sampled", got, remedy)

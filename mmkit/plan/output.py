"""An output bound to a config and a tokenizer: ids in, an array out, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import InputError, SpecError, convert_errors, locate_errors
from ..language.expr import Scope
from ..language.items.base import form
from ..language.items.tensor import DTYPES
from ..language.spec import Array, Output
from ..language.vocabulary import check_ids, id_text


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
        self.spec, self.name, self._scope = spec, spec.name, scope
        self.where = f"{model}.outputs.{spec.name}"
        with (at := locate_errors(f"{self.where}, layout")):
            positions = spec.layout.allowed(scope)
        self._chosen = np.array([isinstance(ids, range) for ids in positions])
        if not self._chosen.any():
            raise SpecError(at.where, "at least one any_id()", "none")
        self.allowed = [i if isinstance(i, range) else range(i, i + 1) for i in positions]
        check_ids([ids[-1] for ids in self.allowed], vocab_size, at.where)
        distinct = set(self.allowed)
        if taken := [token for token in reserved if any(token in ids for ids in distinct)]:
            expected, got = "ids that may be sampled", f"the placeholder id {min(taken)}"
            remedy = "End the range before it, or begin behind it."
            raise SpecError(at.where, expected, got, remedy)
        self.common = self.allowed[0] if len(distinct) == 1 else None
        others = vocab_size - len(self.common or ())
        self.allows_all = others == sum(token < vocab_size for token in reserved)

    @property
    def num_tokens(self) -> int:
        """The number of ids."""
        return len(self.allowed)

    def decode(self, ids: Any) -> Array:
        """The array of some ids.

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
        if wrong := self._misplaced(values):
            remedy = "Check where the output begins, and that sampling was confined to it."
            raise InputError(f"{self.where}[{wrong[0]}]", *wrong[1:], remedy)
        chosen = np.array(values, np.int64)[self._chosen]
        with convert_errors(f"{self.where}, decode", "an array for ids that may stand there"):
            decoded = self.spec.decode(chosen, self._scope)
        if not isinstance(decoded, np.ndarray) or decoded.dtype.name not in DTYPES:
            expected = f"a numpy array of {', '.join(DTYPES)}"
            raise SpecError(f"{self.where}, decode", expected, form(decoded))
        return decoded

    def _misplaced(self, ids: Sequence[int]) -> tuple[int, str, str] | None:
        """The first position with an id that may not stand there, and what is expected and got."""
        for position, (token, allowed) in enumerate(zip(ids, self.allowed, strict=True)):
            if type(token) is not int or token not in allowed:
                one, several = f"the id {allowed[0]}", f"an id from {allowed[0]} to {allowed[-1]}"
                return position, several if len(allowed) > 1 else one, id_text(token)
        return None

    def encode(self, array: Any) -> list[int]:
        """The ids of an array, `num_tokens` of them, literals included.

        Args:
            array: an array of the shape and dtype that `decode` returns.

        Raises:
            InputError: the spec has no `encode`, or `encode` refuses the array.
            SpecError: `encode` returns ids that may not stand there.
        """
        if self.spec.encode is None:
            raise InputError(self.where, "an output with encode", "one without")
        given = np.asarray(array)
        if (given.shape, given.dtype.name) != (self.shape, self.dtype):
            expected = f"an array of shape {self.shape} of {self.dtype}"
            raise InputError(self.where, expected, form(given), "Nothing is cast or resized.")
        with convert_errors(self.where, "an array that the output can be", InputError):
            encoded = np.asarray(self.spec.encode(given, self._scope))
        at, count = f"{self.where}, encode", int(self._chosen.sum())
        if encoded.dtype.kind not in "iu" or encoded.shape != (count,):
            raise SpecError(at, f"({count},) integers, one for each any_id()", form(encoded))
        ids = np.array([allowed.start for allowed in self.allowed], np.int64)
        ids[self._chosen] = encoded
        values: list[int] = ids.tolist()
        if wrong := self._misplaced(values):
            raise SpecError(f"{at}, position {wrong[0]}", *wrong[1:])
        return values

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

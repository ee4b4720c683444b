"""An output bound to a config and a tokenizer: ids in, an array out, and back.

An output is the whole answer, or it stands in an answer of text behind a mark, the token `after`.
No mark stands inside an output. So the ids before a position say whether it lies in an output, and
where in it, and never more of them than the longest output has: `BoundOutput.find_position`. No
state of a request has to be kept, moved or restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, SpecError, convert_errors, locate_errors
from ..language.expr import Scope, evaluate
from ..language.items.base import describe_array
from ..language.items.tensor import DTYPES
from ..language.layout import to_whole
from ..language.spec import Array, Output
from ..language.vocabulary import check_spec_ids, describe_id, list_end_ids

MAX_POSITIONS = 1 << 17
"""The ids of the longest output in a text: sampling has a table of them."""


class Position(NamedTuple):
    """What may stand at a position of an output.

    Attributes:
        ids: the ids that may stand there.
        end: the id that may stand there, too, and ends the output; None for none.
    """

    ids: range
    end: int | None


class AnswerPart(NamedTuple):
    """A part of an answer of text with outputs in it.

    Attributes:
        start: the position of its first id in the answer; negative where it began in the prompt.
        ids: its ids; an output's ids include its marks.
        is_output: whether it is an output, and no text.
        array: the output; None for a text, and for an output that is not whole.
    """

    start: int
    ids: list[int]
    is_output: bool
    array: Array | None


class BoundOutput:
    """An output of a spec, bound to a config and a tokenizer: ``plan.outputs["frame"]``.

    Attributes:
        spec: the declaration.
        name: the output's name.
        where: names the output in errors, for example ``terra.outputs.frame``.
        after: the id behind which an output stands in a text; None where it is the whole answer.
        until: the id that ends an output of several units; None for one unit.
        most: the most units.
        allowed: the ids that may stand at each position of a unit, which is the layout.
        positions: what may stand at each position of the longest output, behind `after`.
        common: the allowed ids where they are the same at every position of an answer, else None.
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
        """Evaluate the layout and the marks.

        Raises:
            SpecError: no position to choose, an id that the model lacks, a placeholder id, which
                is never sampled; or a mark, or the end of an answer, among the ids of the output.
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
        self._is_chosen = is_chosen
        check_spec_ids([ids[-1] for ids in self.allowed], vocab_size, where)
        distinct = set(self.allowed)
        _check_not_reserved(distinct, reserved, where)
        self.after = self._evaluate_mark("after", vocab_size, reserved)
        self.until = self._evaluate_mark("until", vocab_size, reserved)
        self.most = self._evaluate_most()
        if self.after is not None:
            self._check_ends()
        self.positions = self._list_positions()
        self.common = None
        if len(distinct) == 1 and self.after is None:
            self.common = self.allowed[0]
        num_common = 0 if self.common is None else len(self.common)
        num_reserved = 0
        for token in reserved:
            if token < vocab_size:
                num_reserved += 1
        self.allows_all = num_common == vocab_size - num_reserved
        self._forms: dict[int, _ArrayForm] = {}

    # -- its size ----------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """The number of ids, marks included; of an output of several units the most."""
        return len(self.list_allowed(self.most))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of one unit, taken from the array of the smallest ids."""
        return self._find_form(1).shape

    @property
    def dtype(self) -> str:
        """Dtype of the arrays, by its name in numpy."""
        return self._find_form(1).dtype

    @property
    def window(self) -> int:
        """The number of last ids that `find_position` reads."""
        return 1 + len(self.allowed) * self.most

    # -- an answer of text with outputs in it ------------------------------------------------------

    def find_position(self, ids: Sequence[int]) -> int | None:
        """Return the position of the next id among those behind `after`; None for one of a text.

        It depends on the last `window` ids alone. What stands behind the last `after` and is no
        beginning of an output is text: a prompt may have it.

        Args:
            ids: the ids before it, of the prompt and of the answer.
        """
        last_ids = list(ids[-self.window :])
        last_ids.reverse()
        if self.after not in last_ids:
            return None
        position = last_ids.index(self.after)
        if position >= len(self.positions):
            return None
        behind_mark = reversed(last_ids[:position])
        for token, allowed in zip(behind_mark, self.positions, strict=False):
            if token not in allowed.ids:
                return None
        return position

    def split_answer(self, ids: Any, prompt: Sequence[int] = ()) -> list[AnswerPart]:
        """Return the texts and the outputs of an answer, in their order.

        The last part may be an output that is not whole, because the answer was cut off.

        Args:
            ids: the ids of the answer.
            prompt: the ids before it, which an output may have begun in.

        Raises:
            InputError: a mark without an output behind it: sampling was not confined.
            SpecError: the function of the spec fails.
        """
        return AnswerReader(self, prompt).find_parts(_list_ids(ids, self.where))

    # -- ids and arrays ----------------------------------------------------------------------------

    def decode(self, ids: Any) -> Array:
        """Return the array that ids stand for.

        Args:
            ids: the ids of one output, its marks and other literals included: a sequence of whole
                numbers, or an array or tensor of them.

        Raises:
            InputError: another number of ids, or an id that may not stand at its position.
            SpecError: the function of the spec fails.
        """
        values = _list_ids(ids, self.where)
        num_units = self._count_units(len(values))
        wrong = _find_wrong_id(values, self.list_allowed(num_units))
        if wrong is not None:
            where = f"{self.where}[{wrong.position}]"
            remedy = "Check where the output begins, and that sampling was confined to it."
            raise InputError(where, wrong.expected, wrong.got, remedy)
        chosen_ids = np.array(values, np.int64)[self._list_chosen(num_units)]
        where = f"{self.where}, decode"
        with convert_errors(where, "an array for ids that may stand there"):
            decoded = self.spec.decode(chosen_ids, self._scope)
        if not isinstance(decoded, np.ndarray) or decoded.dtype.name not in DTYPES:
            raise SpecError(where, f"a numpy array of {', '.join(DTYPES)}", describe_array(decoded))
        return decoded

    def encode(self, array: Any) -> list[int]:
        """Return the ids of an array, marks and other literals included.

        Args:
            array: an array of the shape and dtype that `decode` returns.

        Raises:
            InputError: the spec has no `encode`, or `encode` refuses the array.
            SpecError: `encode` returns ids that may not stand there.
        """
        if self.spec.encode is None:
            raise InputError(self.where, "an output with encode", "one without")
        array = np.asarray(array)
        if self.until is None:
            self._check_form(array, 1)
        with convert_errors(self.where, "an array that the output can be", InputError):
            chosen_ids = np.asarray(self.spec.encode(array, self._scope))
        where = f"{self.where}, encode"
        num_units = self._count_encoded_units(chosen_ids, where)
        if self.until is not None:
            self._check_form(array, num_units)
        allowed = self.list_allowed(num_units)
        ids = np.array([ids_at_position.start for ids_at_position in allowed], np.int64)
        ids[self._list_chosen(num_units)] = chosen_ids
        values: list[int] = ids.tolist()
        wrong = _find_wrong_id(values, allowed)
        if wrong is not None:
            raise SpecError(f"{where}, position {wrong.position}", wrong.expected, wrong.got)
        return values

    def list_allowed(self, num_units: int) -> list[range]:
        """Return the ids that may stand at each position of an output, marks included.

        Args:
            num_units: the number of units that it has; 1 without `until`.
        """
        allowed = self.allowed * num_units
        if self.after is not None:
            allowed = [range(self.after, self.after + 1), *allowed]
        if self.until is not None:
            allowed = [*allowed, range(self.until, self.until + 1)]
        return allowed

    def list_smallest_ids(self, num_units: int = 1) -> list[int]:
        """Return the ids of an output with the smallest id at each position."""
        return [ids.start for ids in self.list_allowed(num_units)]

    # -- machinery ---------------------------------------------------------------------------------

    def _evaluate_mark(self, part: str, vocab_size: int, reserved: frozenset[int]) -> int | None:
        """Return the id of a mark; None where there is none.

        Raises:
            SpecError: the model lacks the id, never samples it, or may sample it inside an output.
        """
        declared = getattr(self.spec, part)
        if declared is None:
            return None
        where = f"{self.where}, {part}"
        with locate_errors(where):
            token = to_whole(evaluate(declared, self._scope), declared, "a token id")
        check_spec_ids([token], vocab_size, where)
        if token in reserved:
            remedy = "Use another token: placeholder ids are never sampled."
            raise SpecError(where, "an id that is sampled", f"the placeholder id {token}", remedy)
        if any(token in ids for ids in self.allowed):
            remedy = "A mark inside an output would be taken for its beginning or its end."
            raise SpecError(where, "an id that the layout does not allow", str(token), remedy)
        if part == "until" and token == self.after:
            raise SpecError(where, "another id than that of after", str(token))
        return token

    def _evaluate_most(self) -> int:
        """Return the most units of an output.

        Raises:
            SpecError: it is no number from 1, or an output would have too many ids.
        """
        declared = self.spec.most
        if declared is None:
            return 1
        where = f"{self.where}, most"
        with locate_errors(where):
            most = to_whole(evaluate(declared, self._scope), declared, "a number of units")
        if most < 1:
            raise SpecError(where, "at least one unit", str(most))
        if most * len(self.allowed) > MAX_POSITIONS:
            got = f"{most} units of {len(self.allowed)}"
            raise SpecError(where, f"at most {MAX_POSITIONS} ids of an output", got)
        return most

    def _check_ends(self) -> None:
        """Refuse an output in which an answer would end.

        Raises:
            SpecError: names the smallest id with which an answer ends.
        """
        for token in sorted(list_end_ids(self._scope.cfg, self._scope.tok)):
            if any(token in ids for ids in self.allowed):
                got = f"{token}, with which an answer ends"
                remedy = "As until= it may end the last output."
                raise SpecError(f"{self.where}, layout", "ids that end no answer", got, remedy)

    def _list_positions(self) -> list[Position]:
        """Return what may stand at each position of the longest output, behind `after`."""
        positions: list[Position] = []
        for num_units_before in range(self.most):
            for index, ids in enumerate(self.allowed):
                may_end = num_units_before > 0 and index == 0
                positions.append(Position(ids, self.until if may_end else None))
        if self.until is not None:
            positions.append(Position(range(self.until, self.until + 1), None))
        return positions

    def _list_chosen(self, num_units: int) -> Array:
        """Return for each position of an output whether its id is chosen, booleans (positions,)."""
        is_chosen = self._is_chosen * num_units
        if self.after is not None:
            is_chosen = [False, *is_chosen]
        if self.until is not None:
            is_chosen = [*is_chosen, False]
        return np.array(is_chosen)

    def _count_units(self, num_ids: int) -> int:
        """Return the number of units of an output of so many ids.

        Raises:
            InputError: no output has so many.
        """
        if self.until is None:
            if num_ids == self.num_tokens:
                return 1
            remedy = "Sampling for this output stops after one; send the ids of one alone."
            if self.after is not None:
                remedy = "Send the ids of one output, from its mark on; split_answer() finds them."
            raise InputError(self.where, f"{self.num_tokens} ids", str(num_ids), remedy)
        num_units, surplus = divmod(num_ids - 2, len(self.allowed))
        if surplus or not 1 <= num_units <= self.most:
            expected = f"a mark, 1 to {self.most} times {len(self.allowed)} ids, and a mark"
            remedy = "Send the ids of one output, with its marks; split_answer() finds them."
            raise InputError(self.where, expected, f"{num_ids} ids", remedy)
        return num_units

    def _count_encoded_units(self, chosen_ids: Array, where: str) -> int:
        """Return the number of units of the ids that `encode` of the spec returns.

        Raises:
            SpecError: they are no integers, or no output has so many.
        """
        num_chosen = sum(self._is_chosen)
        expected = f"({num_chosen},) integers, one for each any_id()"
        most = 1
        if self.until is not None:
            expected = f"1 to {self.most} times {num_chosen} integers, one for each any_id()"
            most = self.most
        num_units = chosen_ids.size // num_chosen
        has_form = chosen_ids.shape == (num_units * num_chosen,) and 1 <= num_units <= most
        if chosen_ids.dtype.kind not in "iu" or not has_form:
            raise SpecError(where, expected, describe_array(chosen_ids))
        return num_units

    def _check_form(self, array: Array, num_units: int) -> None:
        """Refuse an array of another shape or dtype than `decode` returns for so many units.

        Raises:
            InputError: its form is another.
        """
        form = self._find_form(num_units)
        if array.shape != form.shape or array.dtype.name != form.dtype:
            expected = f"an array of shape {form.shape} of {form.dtype}"
            raise InputError(
                self.where, expected, describe_array(array), "Nothing is cast or resized."
            )

    def _find_form(self, num_units: int) -> _ArrayForm:
        """Return the form of the arrays of so many units, from the array of the smallest ids."""
        if num_units not in self._forms:
            array = self.decode(self.list_smallest_ids(num_units))
            self._forms[num_units] = _ArrayForm(tuple(array.shape), array.dtype.name)
        return self._forms[num_units]


class AnswerReader:
    """Finds the outputs in an answer of text, as its ids come.

    Args:
        output: an output with `after`.
        prompt: the ids before the answer, which an output may have begun in.
    """

    def __init__(self, output: BoundOutput, prompt: Sequence[int] = ()) -> None:
        self._output = output
        self._num_ids = 0
        self._text: list[int] = []
        # the output that has begun and is not whole, from its mark on; empty in a text
        self._open: list[int] = []
        self._open_start = 0
        self._is_open_returned = False
        position = output.find_position(prompt)
        if position is not None:
            self._open = list(prompt[-position - 1 :])
            self._open_start = -position - 1

    def find_parts(self, ids: Sequence[int]) -> list[AnswerPart]:
        """Return what the next ids of the answer have: texts, and outputs.

        An output that is not whole comes once, without an array, with the ids in which it begins;
        it comes again with its array when it is whole.

        Raises:
            InputError: an id that may not stand at its position of an output.
            SpecError: the function of the spec that decodes an output fails.
        """
        parts: list[AnswerPart] = []
        for token in ids:
            if self._open:
                self._continue_output(token, parts)
            elif token == self._output.after:
                self._end_text(parts)
                self._open = [token]
                self._open_start = self._num_ids
                self._is_open_returned = False
            else:
                self._text.append(token)
            self._num_ids += 1
        self._end_text(parts)
        if self._open and not self._is_open_returned:
            parts.append(AnswerPart(self._open_start, list(self._open), True, None))
            self._is_open_returned = True
        return parts

    def _continue_output(self, token: int, parts: list[AnswerPart]) -> None:
        """Add an id to the output that has begun; add the output to the parts if it is whole."""
        position = len(self._open) - 1
        allowed = self._output.positions[position]
        if token not in allowed.ids and token != allowed.end:
            where = f"{self._output.where}[{position + 1}]"
            expected = _describe_allowed(allowed.ids)
            if allowed.end is not None:
                expected += f" or {allowed.end}"
            remedy = "Check that sampling was confined to the output."
            raise InputError(where, expected, describe_id(token), remedy)
        self._open.append(token)
        is_whole = token == self._output.until
        if self._output.until is None:
            is_whole = position == len(self._output.positions) - 1
        if is_whole:
            array = self._output.decode(self._open)
            parts.append(AnswerPart(self._open_start, self._open, True, array))
            self._open = []

    def _end_text(self, parts: list[AnswerPart]) -> None:
        """Add the text before the current id to the parts, if there is any."""
        if self._text:
            start = self._num_ids - len(self._text)
            parts.append(AnswerPart(start, self._text, False, None))
            self._text = []


def find_output(outputs: Mapping[str, BoundOutput], name: Any, where: str, got: str) -> BoundOutput:
    """Return the output that a request asks for.

    Args:
        outputs: the outputs of a plan.
        name: from the request.
        where: names it in errors.
        got: the name, as errors quote it.

    Raises:
        InputError: the spec has no such output.
    """
    if isinstance(name, str) and name in outputs:
        return outputs[name]
    expected = "none, as the spec declares none"
    if outputs:
        expected = f"one of {', '.join(outputs)}"
    raise InputError(where, expected, got)


class _ArrayForm(NamedTuple):
    """Shape and dtype of arrays."""

    shape: tuple[int, ...]
    dtype: str


class _WrongId(NamedTuple):
    """An id that may not stand at its position, with the words of the refusal."""

    position: int
    expected: str
    got: str


def _list_ids(ids: Any, where: str) -> Sequence[int]:
    """Return token ids as a sequence.

    Raises:
        InputError: they are none.
    """
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InputError(where, "a sequence of token ids", f"a {type(ids).__name__}")
    return values


def _find_wrong_id(ids: Sequence[int], allowed: Sequence[range]) -> _WrongId | None:
    """Return the first id that may not stand at its position; None if all may."""
    for position, (token, allowed_ids) in enumerate(zip(ids, allowed, strict=True)):
        if type(token) is not int or token not in allowed_ids:
            return _WrongId(position, _describe_allowed(allowed_ids), describe_id(token))
    return None


def _describe_allowed(ids: range) -> str:
    if len(ids) == 1:
        return f"the id {ids[0]}"
    return f"an id from {ids[0]} to {ids[-1]}"


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

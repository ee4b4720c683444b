"""The rehearsal of a modality: what its function and its layout make of a few items, before there
is a request.

vLLM caches processed items one by one, so the fields of an item must not depend on the items
beside it, nor on earlier calls. Zeros hide such a dependence: divided by the largest value of a
batch, they are zeros again. So the function also processes random items, small ones, alone and
beside others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import MmkitError, SpecError, report_as_spec_error
from ..language.field import Identity
from ..language.items.memory import share_memory
from ..language.node import map_values
from .parsing import Taken

if TYPE_CHECKING:
    from ..language.items import ItemType
    from ..language.layout import ItemTokens
    from .modality import BoundModality

_FACTORS = (1, 32, 1024)
"""By how much the small sizes of an item are multiplied, one after the other, until the function
takes random items of these sizes."""

_MOST_BYTES = 1 << 28
"""The bytes of a random item: several of them, and copies, are held at once."""

_TIMES = 8
"""How often a layout that is a function is evaluated for one item."""

_REMEDY = "Process each item by itself, or say by cacheable= when to keep the results."


def rehearse(modality: BoundModality) -> None:
    """Try out a modality that needs no Hugging Face processor: the largest and the smallest item,
    and random ones.

    Where the function of the spec returns memory that it writes to again, what it returns is copied
    from now on. A random item that the function does not take, for example because it is no SMILES,
    says nothing.

    Raises:
        SpecError: a mistake that would otherwise fail the first request, or give an item the fields
            of another one.
    """
    largest, smallest = modality.item.candidates()[0], modality.item.smallest()
    if modality.field_processor.hf_call is None:
        _process(modality, largest, "the largest item")
        for value in smallest[:1]:
            _process(modality, value, "the smallest item")
    items: Sequence[Any]
    if modality.field_processor.hf_call is None and not isinstance(modality.spec.process, Identity):
        items = _check_function(modality, [largest, *smallest[:1], largest])
    else:
        items = next(_random_items(modality.item, largest), [])
    _check_layout(modality, largest, smallest, items)


def _process(modality: BoundModality, value: Any, words: str) -> None:
    """Process an item that the spec states.

    Raises:
        SpecError: the spec refuses it, or the outputs contradict the declared fields.
    """
    with report_as_spec_error(words, modality.item.remedy):
        modality.field_processor.run(Taken.whole([value]))


# -- items -----------------------------------------------------------------------------------------


def _random_items(item: ItemType, largest: Any) -> Iterator[list[Any]]:
    """Yield random items in threes, of which the first and the last have the same sizes: small
    ones, then larger ones, then those as large as the largest. The same ones every time."""
    small, most = item.sizes(item.small()[-1]), item.sizes(largest)
    limits = list(zip(small, most, strict=True))
    pairs: list[tuple[list[int], list[int]]] = []
    for factor in _FACTORS:
        sizes = [min(least * factor + 1, limit) for least, limit in limits]
        others = [
            size + 1 if size < limit else max(size - 1, min(least, limit))
            for size, (least, limit) in zip(sizes, limits, strict=True)
        ]
        pairs.append((sizes, others))
    pairs += [(list(small), list(small)), (list(most), list(most))]
    generator = np.random.default_rng(0)
    for sizes, others in pairs:
        if max(item.num_bytes(sizes), item.num_bytes(others)) <= _MOST_BYTES:
            yield [item.random(own, generator) for own in (sizes, others, sizes)]


# -- the function ----------------------------------------------------------------------------------


@dataclass
class _Result:
    """What the function of a spec returned for some items.

    Attributes:
        items: the items, in place of those copies of them that the function received.
        raw: what it returned.
        copied: a copy of that, made before the next call could write to its memory.
    """

    items: Sequence[Any]
    raw: Mapping[str, Any]
    copied: Mapping[str, Any]


class _NotTaken(Exception):
    """The function of a spec raises for some items; the cause says what."""


def _check_function(modality: BoundModality, blanks: Sequence[Any]) -> Sequence[Any]:
    """Compare what the function of a spec returns for random items, alone and together.

    Args:
        blanks: items of zeros, for a function that takes no random item. The first and the last
            have the same sizes.

    Returns:
        The items.

    Raises:
        SpecError: the function changes an item, returns what no model receives, or returns other
            fields for an item beside others or after others.
    """
    for items in _random_items(modality.item, blanks[0]):
        try:
            alone = _called_alone(modality, items)
        except _NotTaken:
            continue
        _check_results(modality, items, alone)
        _check_finite(modality, alone)
        return items
    _check_results(modality, blanks, _called_alone(modality, blanks))
    return blanks


def _called_alone(modality: BoundModality, items: Sequence[Any]) -> list[_Result]:
    """Call the function of a spec with the first item, the last, which has the same sizes, the
    first again, and then the others."""
    first, *others, last = items
    return [_call(modality, [value]) for value in (first, last, first, *others)]


def _call(modality: BoundModality, items: Sequence[Any]) -> _Result:
    """Call the function of a spec.

    Raises:
        SpecError: it writes into an item.
        _NotTaken: it raises.
    """
    copies = copy.deepcopy(list(items))
    writes = map_values(_writes, copies)
    try:
        raw = modality.field_processor.called(copies)
    except MmkitError as error:
        raise _NotTaken from error
    if map_values(_writes, copies) != writes or not _is_same(list(items), copies):
        expected = "process to leave the items as they are"
        remedy = "They are the caller's: work on a copy."
        got = "another value in one of them"
        raise SpecError(_where(modality), expected, got, remedy)
    return _Result(items, raw, _copied(dict(raw)))


def _check_results(modality: BoundModality, items: Sequence[Any], alone: Sequence[_Result]) -> None:
    """Compare what the function of a spec returned for items that it got alone, see
    `_called_alone`, with what it returns for them together."""
    processing = modality.field_processor
    first, *_, last = items
    is_cached = modality.spec.cacheable is True
    together: list[_Result] = []
    if is_cached and modality.limit != 1:
        together = _called_together(modality, items)
    is_written_again = _overlap([result.raw for result in [*alone, *together]])
    parts = [part for result in together for part in result.raw.values()]
    shared = [part for part in parts if isinstance(part, (list, tuple))]
    processing.shares_memory = is_written_again or any(map(_overlap, shared))

    fields = [_fields(modality, result)[0] for result in alone]
    _check_form(modality, fields)
    if not is_cached:
        return
    _check_read(modality, first, last, alone)
    _compare(modality, fields[0], fields[2], "when it was processed again, after another item")
    if is_written_again:
        return  # from now on each item is processed alone, and what is returned is copied
    fields_alone = [fields[0], *fields[3:], fields[1]]
    for result in together:
        for value, got in zip(result.items, _fields(modality, result), strict=True):
            index = next(i for i, own in enumerate(items) if own is value)
            _compare(modality, fields_alone[index], got, "when other items were beside it")


def _called_together(modality: BoundModality, items: Sequence[Any]) -> list[_Result]:
    """Call the function of a spec with items beside each other, in two orders.

    Raises:
        SpecError: it does not take together what it takes alone.
    """
    beside = list(items[: modality.limit])
    try:
        return [_call(modality, beside), _call(modality, beside[::-1])]
    except _NotTaken as error:
        if not modality.item.small_sizes:
            raise SpecError(str(error.__cause__)) from error.__cause__
    # a spec of pictures cannot say that all have one size
    first, *_, last = items
    try:
        return [_call(modality, [first, last])]
    except _NotTaken as error:
        raise SpecError(str(error.__cause__)) from error.__cause__


def _fields(modality: BoundModality, result: _Result) -> Sequence[dict[str, Any]]:
    """Return the fields of some items that were called together."""
    taken = Taken(result.items, False, len(result.items))
    return modality.field_processor.finish(result.copied, taken)


def _check_form(modality: BoundModality, fields: Sequence[Mapping[str, Any]]) -> None:
    """Refuse fields that vLLM cannot send to its engine.

    Raises:
        SpecError: names the field.
    """
    for name in modality.fields:
        for own in fields:
            if odd := _what_is_no_tensor(own[name]):
                expected = f"tensors, numbers or lists of them as {name}"
                raise SpecError(_where(modality), expected, odd, "vLLM sends nothing else.")


def _what_is_no_tensor(value: Any) -> str:
    """Return in words what no field can hold; nothing for tensors, numbers and lists of them."""
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_what_is_no_tensor, value)), "")
    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float):
        return ""
    kind = type(value)
    return (
        f"a {kind.__name__}"
        if kind.__module__ == "builtins"
        else f"a {kind.__module__}.{kind.__name__}"
    )


def _check_finite(modality: BoundModality, alone: Sequence[_Result]) -> None:
    """Refuse fields that have no finite number for any of several random items.

    Raises:
        SpecError: names the field.
    """
    fields = [_fields(modality, result)[0] for result in alone]
    for name in modality.fields:
        values = [own[name] for own in fields]
        floats = [value for value in values if _is_floating(value) and value.numel()]
        if floats and not any(bool(value.isfinite().any()) for value in floats):
            remedy = "A model gets zeros in place of rows that are not finite."
            expected = f"process to return finite values as {name}"
            raise SpecError(_where(modality), expected, "none for random items", remedy)


def _check_read(modality: BoundModality, first: Any, second: Any, alone: Sequence[_Result]) -> None:
    """Refuse a function that keeps its results by the sizes of items: it returns the very memory of
    an earlier result for another item. A function that reads the sizes alone, and so returns equal
    fields, has memory of its own for each.

    Raises:
        SpecError: it does.
    """
    earlier, later = alone[0], alone[1]
    is_kept = _overlap([earlier.raw, later.raw]) and _is_same(earlier.copied, later.copied)
    if is_kept and not _is_same(first, second):
        names = " and ".join(later.copied)
        expected = f"process to return {names} of each item, which is cached"
        got = "those of an earlier item of the same sizes"
        raise SpecError(_where(modality), expected, got, _REMEDY)


def _compare(
    modality: BoundModality, expected: Mapping[str, Any], got: Mapping[str, Any], when: str
) -> None:
    """Compare the fields of one item from two calls.

    Raises:
        SpecError: names the first that differs.
    """
    for name, value in expected.items():
        if not _is_alike(value, got[name]):
            same = f"process to return the same {name} for an item, which is cached"
            raise SpecError(_where(modality), same, f"different values {when}", _REMEDY)


def _where(modality: BoundModality) -> str:
    return f"{modality.where}, process"


# -- the layout ------------------------------------------------------------------------------------


def _check_layout(
    modality: BoundModality, largest: Any, smallest: Sequence[Any], items: Sequence[Any]
) -> None:
    """Compare the layouts of some items with that of the largest item.

    Raises:
        SpecError: one has more encoder rows, or a function lays an item in several ways.
    """
    if modality.layout_evaluator.is_opaque:
        _check_same_layout(modality, largest)
    for value in smallest:
        _check_rows(modality, modality.placeholder_of(value), "the smallest")
    for value in items:
        try:
            placeholder = modality.placeholder_of(value)
        except SpecError:
            continue  # a random item that the spec refuses says nothing
        _check_rows(modality, placeholder, "a random one")


def _check_rows(modality: BoundModality, placeholder: ItemTokens, which: str) -> None:
    """Refuse an item with more encoder rows than the largest one, unless its position or the other
    items decide.

    Raises:
        SpecError: says which item.
    """
    rows, most = placeholder.num_embeds, modality.stated_rows
    if rows <= most or modality.layout_evaluator.by_company:
        return
    remedy = "State `largest=`, the shape of the item with the most."
    if modality.needs_fields:
        remedy = "The sizes of an item, of which `largest=` states the most, have to tell its rows."
    expected, got = "the most encoder rows for the largest item", f"{most}, and {rows} for {which}"
    raise SpecError(f"{modality.where}, item", expected, got, remedy)


def _check_same_layout(modality: BoundModality, value: Any) -> None:
    """Refuse a layout whose function returns others for one item when it is called again.

    Raises:
        SpecError: it does.
    """
    (fields,) = modality.read(Taken.whole([value]))
    scope = modality.scope(value, 0, fields)
    layouts = [modality.layout_evaluator.alternatives(scope) for _ in range(_TIMES)]
    known = [(own.tokens, [update.target for update in own.updates]) for own in layouts]
    if any(own != known[0] for own in known):
        expected = "the same layout and target for an item every time"
        got = "others when it was evaluated again"
        raise SpecError(f"{modality.where}, layout", expected, got, "vLLM caches it.")


# -- values ----------------------------------------------------------------------------------------


def _copied(value: Any) -> Any:
    """Return a value with copies of its tensors and arrays."""
    return map_values(_copied_leaf, value)


def _copied_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _writes(value: Any) -> int:
    """How often a tensor was written to."""
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return value._version if is_counted else 0


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, as far as they hold numbers and texts."""
    return _equal(one, other, _are_equal)


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two values are the same but for rounding: floats by a thousandth of the largest, or
    by four units in the last place of their dtype."""
    return _equal(one, other, _are_near)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):  # nearly always, and faster than what takes NaN for equal
        return True
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _are_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if _are_equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    unit = torch.finfo(one.dtype).eps
    finite = one[one.isfinite()].abs().double()
    largest = float(finite.max()) if finite.numel() else 0.0
    near = max(1e-3, 4 * unit)
    pair = one.double(), other.double()
    return torch.allclose(*pair, rtol=near, atol=near * largest, equal_nan=True)


def _equal(one: Any, other: Any, are_equal: Any) -> bool:
    """Whether two values are equal: tensors of one shape and dtype by a function, numbers and texts
    by Python; anything else is taken for equal."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype.kind not in "fiub" or other.dtype.kind not in "fiub":
            return True
        one, other = torch.from_numpy(one.copy()), torch.from_numpy(other.copy())
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(are_equal(one, other))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_equal(a, b, are_equal) for a, b in pairs)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            _equal(one[key], other[key], are_equal) for key in one
        )
    is_plain = isinstance(one, (bool, int, float, str)) and isinstance(
        other, (bool, int, float, str)
    )
    return not is_plain or bool(one == other or (one != one and other != other))


def _overlap(parts: Iterable[Any]) -> bool:
    """Whether the tensors or arrays of two parts have a byte in common."""
    return any(share_memory(one, other) for one, other in combinations(parts, 2))

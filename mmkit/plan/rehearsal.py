"""The rehearsal of a modality: it processes and lays out a few items before the first request.

vLLM caches processed items one by one, so the fields of an item must not depend on the other items
of its batch, nor on earlier calls. Zeros hide such a dependence: divided by the largest value of a
batch, they are zeros again. So the function also processes small random items, each by itself and
then together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import MmkitError, SpecError, report_as_spec_error
from ..language.field import Identity
from ..language.items import ItemType
from ..language.items.memory import share_memory
from ..language.layout import ItemTokens
from ..language.node import map_values
from .modality import BoundModality, copy_outputs
from .parsing import ItemBatch

SIZE_FACTORS = (1, 32, 1024)
"""By how much the small sizes of an item are multiplied.

The factors are tried one after the other, until the function takes random items of these sizes.
"""

MAX_RANDOM_BYTES = 1 << 28
"""The most bytes of a random item. Several items and their copies are in memory at once."""

LAYOUT_EVALUATIONS = 8
"""How often a layout that is a function is evaluated for one item."""

_REMEDY = "Process each item by itself, or say by cacheable= when to keep the results."


def rehearse(modality: BoundModality) -> BoundModality:
    """Try out a modality on a few items, unless these need the Hugging Face processor.

    They are the largest item, the smallest item, and random items. A random item that the function
    does not take, for example because it is no SMILES, says nothing.

    Returns:
        The modality. Where its function returns memory that it writes to again, what it returns is
        copied from now on.

    Raises:
        SpecError: a mistake that would otherwise fail the first request, give an item the fields of
            another one, or make an answer wrong.
    """
    if modality.needs_hf:
        return modality
    largest = modality.item.candidates()[0]
    smallest = modality.item.smallest()
    has_hf_call = modality.field_processor.hf_call is not None
    if not has_hf_call:
        _process(modality, largest, "the largest item")
        for value in smallest[:1]:
            _process(modality, value, "the smallest item")
    random_values: Sequence[Any]
    if has_hf_call or isinstance(modality.spec.process, Identity):
        random_values = next(_make_random_items(modality.item, largest), [])
    else:
        blanks = [largest] + smallest[:1] + [largest]
        rehearsal = _check_function(modality, blanks)
        random_values = rehearsal.values
        if rehearsal.writes_again:
            modality = copy_outputs(modality)
    _check_layout(modality, largest, smallest, random_values)
    if not has_hf_call:
        _check_forms(modality)
    # `largest` fits the stated largest item to the context, which finds further mistakes now
    for value in [modality.largest.value] + smallest:
        _check_rows_at_second_position(modality, value)
    return modality


def _process(modality: BoundModality, value: Any, words: str) -> None:
    """Process an item that the spec states.

    Raises:
        SpecError: the spec refuses it, or the outputs contradict the declared fields.
    """
    with report_as_spec_error(words, modality.item.remedy):
        modality.field_processor.run(ItemBatch.whole([value]))


# -- items -----------------------------------------------------------------------------------------


def _make_random_items(item_type: ItemType, largest: Any) -> Iterator[list[Any]]:
    """Yield three random items at a time, of which the first and the last have the same sizes.

    Small items come first, then larger ones, then items as large as the largest. The items are the
    same in every run.
    """
    generator = np.random.default_rng(0)
    for sizes, other_sizes in _choose_sizes(item_type, largest):
        num_bytes = max(item_type.num_bytes(sizes), item_type.num_bytes(other_sizes))
        if num_bytes <= MAX_RANDOM_BYTES:
            first = item_type.random(sizes, generator)
            other = item_type.random(other_sizes, generator)
            last = item_type.random(sizes, generator)
            yield [first, other, last]


def _choose_sizes(item_type: ItemType, largest: Any) -> list[tuple[list[int], list[int]]]:
    """Return pairs of sizes for random items, small ones first."""
    small_sizes = list(item_type.sizes(item_type.small()[-1]))
    largest_sizes = list(item_type.sizes(largest))
    pairs: list[tuple[list[int], list[int]]] = []
    for factor in SIZE_FACTORS:
        sizes: list[int] = []
        other_sizes: list[int] = []
        for small, limit in zip(small_sizes, largest_sizes, strict=True):
            size = min(small * factor + 1, limit)
            sizes.append(size)
            if size < limit:
                other_sizes.append(size + 1)
            else:
                other_sizes.append(max(size - 1, min(small, limit)))
        pairs.append((sizes, other_sizes))
    pairs.append((small_sizes, small_sizes))
    pairs.append((largest_sizes, largest_sizes))
    return pairs


# -- the function ----------------------------------------------------------------------------------


@dataclass
class _Result:
    """What the function of a spec returned for some items.

    Attributes:
        values: the items; the function received copies of them.
        raw: what it returned.
        copied: a copy of `raw`, made before the next call could write to its memory.
    """

    values: Sequence[Any]
    raw: Mapping[str, Any]
    copied: Mapping[str, Any]


class _FunctionRehearsal(NamedTuple):
    """What is known of the function of a spec after its rehearsal.

    Attributes:
        values: the items that it processed.
        writes_again: whether it writes again to memory that it returned.
    """

    values: Sequence[Any]
    writes_again: bool


class _FunctionRaises(Exception):
    """The function of a spec raises for some items; the cause says what."""


def _check_function(modality: BoundModality, blanks: Sequence[Any]) -> _FunctionRehearsal:
    """Compare what the function of a spec returns for random items, one by one and together.

    Args:
        modality: the modality.
        blanks: items of zeros, for a function that takes no random item. The first and the last
            have the same sizes.

    Raises:
        SpecError: the function changes an item, returns what no model receives, or returns other
            fields for an item that it gets together with others or after others.
    """
    for values in _make_random_items(modality.item, blanks[0]):
        try:
            results_alone = _call_with_each(modality, values)
        except _FunctionRaises:
            continue
        writes_again = _check_results(modality, values, results_alone)
        _check_finite(modality, results_alone)
        return _FunctionRehearsal(values, writes_again)
    results_alone = _call_with_each(modality, blanks)
    writes_again = _check_results(modality, blanks, results_alone)
    return _FunctionRehearsal(blanks, writes_again)


def _call_with_each(modality: BoundModality, values: Sequence[Any]) -> list[_Result]:
    """Call the function of a spec with each item by itself.

    The order is the first item, the last item, which has the same sizes, the first item again, and
    then the items between them.
    """
    first = values[0]
    last = values[-1]
    order = [first, last, first]
    order += values[1:-1]
    results: list[_Result] = []
    for value in order:
        results.append(_call(modality, [value]))
    return results


def _call(modality: BoundModality, values: Sequence[Any]) -> _Result:
    """Call the function of a spec.

    Raises:
        SpecError: it writes into an item.
        _FunctionRaises: it raises.
    """
    copies = copy.deepcopy(list(values))
    write_counts = map_values(_count_writes, copies)
    try:
        raw = modality.field_processor.call_function(copies)
    except MmkitError as error:
        raise _FunctionRaises from error
    if map_values(_count_writes, copies) != write_counts or not _is_same(list(values), copies):
        expected = "process to leave the items as they are"
        remedy = "They are the caller's: work on a copy."
        got = "another value in one of them"
        raise SpecError(_name_process(modality), expected, got, remedy)
    return _Result(values, raw, _copy_tensors(dict(raw)))


def _check_results(
    modality: BoundModality, values: Sequence[Any], results_alone: list[_Result]
) -> bool:
    """Compare results for items by themselves with what the function returns for them together.

    Args:
        modality: the modality.
        values: the items.
        results_alone: the results of `_call_with_each`.

    Returns:
        Whether what it returns has to be copied.
    """
    is_cached = modality.spec.cacheable is True
    results_together: list[_Result] = []
    if is_cached and modality.limit != 1:
        results_together = _call_together(modality, values)
    raw_outputs = [result.raw for result in results_alone + results_together]
    writes_again = _overlap(raw_outputs)

    fields = [_finish(modality, result)[0] for result in results_alone]
    _check_field_types(modality, fields)
    if not is_cached:
        return writes_again or _has_overlapping_items(results_together)
    # the order of `_call_with_each`
    fields_of_first = fields[0]
    fields_of_last = fields[1]
    fields_again = fields[2]
    fields_of_middle = fields[3:]
    _check_reads_content(modality, values[0], values[-1], results_alone)
    when = "when it was processed again, after another item"
    _compare(modality, fields_of_first, fields_again, when)
    if not writes_again:  # else each item is processed alone from now on
        fields_alone = [fields_of_first] + fields_of_middle + [fields_of_last]
        for result in results_together:
            for value, got in zip(result.values, _finish(modality, result), strict=True):
                expected = fields_alone[_find_index(values, value)]
                _compare(modality, expected, got, "when other items were beside it")
    return writes_again or _has_overlapping_items(results_together)


def _call_together(modality: BoundModality, values: Sequence[Any]) -> list[_Result]:
    """Call the function of a spec with all items together, in two orders.

    Raises:
        SpecError: it does not take together the items that it takes one by one.
    """
    together = list(values[: modality.limit])
    try:
        return [_call(modality, together), _call(modality, together[::-1])]
    except _FunctionRaises as error:
        if not modality.item.small_sizes:
            raise SpecError(str(error.__cause__)) from error.__cause__
    # a spec of pictures cannot say that all have one size
    try:
        return [_call(modality, [values[0], values[-1]])]
    except _FunctionRaises as error:
        raise SpecError(str(error.__cause__)) from error.__cause__


def _find_index(values: Sequence[Any], value: Any) -> int:
    """Return the position of an item, which is found by its identity."""
    for index, other in enumerate(values):
        if other is value:
            return index
    raise AssertionError("an item that the function did not get")


def _finish(modality: BoundModality, result: _Result) -> Sequence[dict[str, Any]]:
    """Return the fields of items that were processed together."""
    return modality.field_processor.finish(result.copied, ItemBatch.whole(result.values))


def _check_field_types(modality: BoundModality, fields: Sequence[Mapping[str, Any]]) -> None:
    """Refuse fields that vLLM cannot send to its engine.

    Raises:
        SpecError: names the field.
    """
    for name in modality.fields:
        for fields_of_item in fields:
            got = _describe_unsendable(fields_of_item[name])
            if got:
                expected = f"tensors, numbers or lists of them as {name}"
                raise SpecError(_name_process(modality), expected, got, "vLLM sends nothing else.")


def _describe_unsendable(value: Any) -> str:
    """Return in words what no field can hold; nothing for tensors, numbers and lists of them."""
    if isinstance(value, (list, tuple)):
        for element in value:
            words = _describe_unsendable(element)
            if words:
                return words
        return ""
    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float):
        return ""
    kind = type(value)
    if kind.__module__ == "builtins":
        return f"a {kind.__name__}"
    return f"a {kind.__module__}.{kind.__name__}"


def _check_finite(modality: BoundModality, results: Sequence[_Result]) -> None:
    """Refuse fields that have no finite number for any of several random items.

    Raises:
        SpecError: names the field.
    """
    fields = [_finish(modality, result)[0] for result in results]
    for name in modality.fields:
        has_floats = False
        has_finite = False
        for fields_of_item in fields:
            value = fields_of_item[name]
            if _is_floating(value) and value.numel():
                has_floats = True
                has_finite = has_finite or bool(value.isfinite().any())
        if has_floats and not has_finite:
            remedy = "A model gets zeros in place of rows that are not finite."
            expected = f"process to return finite values as {name}"
            raise SpecError(_name_process(modality), expected, "none for random items", remedy)


def _check_reads_content(
    modality: BoundModality, first: Any, second: Any, results: Sequence[_Result]
) -> None:
    """Refuse a function that caches its results by the sizes of items.

    It returns the memory of an earlier result for another item. A function that reads only the
    sizes also returns equal fields, but in new memory for each item.

    Raises:
        SpecError: the function does.
    """
    earlier = results[0]
    later = results[1]
    is_cached = _overlap([earlier.raw, later.raw]) and _is_same(earlier.copied, later.copied)
    if is_cached and not _is_same(first, second):
        names = " and ".join(later.copied)
        expected = f"process to return {names} of each item, which is cached"
        got = "those of an earlier item of the same sizes"
        raise SpecError(_name_process(modality), expected, got, _REMEDY)


def _compare(
    modality: BoundModality, expected: Mapping[str, Any], got: Mapping[str, Any], when: str
) -> None:
    """Compare the fields of one item from two calls.

    Raises:
        SpecError: names the first that differs.
    """
    for name, value in expected.items():
        if not _is_alike(value, got[name]):
            statement = f"process to return the same {name} for an item, which is cached"
            raise SpecError(_name_process(modality), statement, f"different values {when}", _REMEDY)


def _name_process(modality: BoundModality) -> str:
    """Return the process of a modality, as errors name it."""
    return f"{modality.where}, process"


# -- the layout ------------------------------------------------------------------------------------


def _check_layout(
    modality: BoundModality, largest: Any, smallest: Sequence[Any], random_values: Sequence[Any]
) -> None:
    """Compare the layouts of items with the layout of the largest item.

    Raises:
        SpecError: one has more encoder rows, or a function lays an item in several ways.
    """
    if modality.layout_evaluator.is_opaque:
        _check_same_layout(modality, largest)
    for value in smallest:
        _check_rows(modality, modality.lay_out_spec_item(value), "the smallest")
    for value in random_values:
        try:
            tokens = modality.lay_out_spec_item(value)
        except SpecError:
            continue  # a random item that the spec refuses says nothing
        _check_rows(modality, tokens, "a random one")


def _check_rows(modality: BoundModality, tokens: ItemTokens, which: str) -> None:
    """Refuse an item with more encoder rows than the largest one.

    No item is refused where its position or the other items decide its rows.

    Raises:
        SpecError: names the item.
    """
    rows = tokens.num_embeds
    most = modality.stated_rows
    if rows <= most or modality.layout_evaluator.depends_on_other_items:
        return
    remedy = "State `largest=`, the shape of the item with the most."
    if modality.needs_fields:
        remedy = "The sizes of an item, of which `largest=` states the most, have to tell its rows."
    expected = "the most encoder rows for the largest item"
    got = f"{most}, and {rows} for {which}"
    raise SpecError(f"{modality.where}, item", expected, got, remedy)


def _check_same_layout(modality: BoundModality, value: Any) -> None:
    """Refuse a layout whose function returns another layout for an item when called again.

    Raises:
        SpecError: the function does.
    """
    modality.lay_out_spec_item(value)  # raises a SpecError for an item without a layout
    (fields,) = modality.read_fields(ItemBatch.whole([value]))
    scope = modality.scopes.make(value, 0, fields)
    expected_layout = None
    for _ in range(LAYOUT_EVALUATIONS):
        layout = modality.layout_evaluator.evaluate(scope)
        targets = [update.target for update in layout.updates]
        if expected_layout is None:
            expected_layout = (layout.tokens, targets)
        elif expected_layout != (layout.tokens, targets):
            expected = "the same layout and target for an item every time"
            got = "others when it was evaluated again"
            raise SpecError(f"{modality.where}, layout", expected, got, "vLLM caches it.")


def _check_rows_at_second_position(modality: BoundModality, value: Any) -> None:
    """Refuse a layout whose number of encoder rows depends on the position of a cached item.

    The encoder makes the rows of a cached item once, for all of its positions, and vLLM ends where
    rows are missing.

    Raises:
        SpecError: names both numbers.
    """
    reads_index = modality.layout_evaluator.reads_index
    if not reads_index or modality.limit in (0, 1) or not modality.are_independent(2):
        return
    first = modality.lay_out_spec_item(value, 0).num_embeds
    second = modality.lay_out_spec_item(value, 1).num_embeds
    if first != second:
        expected = f"{first} embed() position(s) whatever item.index is, as for the first item"
        remedy = "Say by cacheable=False that an item depends on its position."
        raise SpecError(f"{modality.where}, layout", expected, str(second), remedy)


def _check_forms(modality: BoundModality) -> None:
    """Refuse a function of the spec whose fields vLLM cannot batch.

    They have another form for the largest item than for a small one, or are no dense tensors.

    Raises:
        SpecError: names the field.
    """
    with report_as_spec_error():
        for value in modality.item.candidates()[:1]:
            modality.check_forms([modality.field_processor.process_spec_item(value)])
    for name, form in modality.forms.get().items():
        if not form.layouts <= {torch.strided}:
            where = f"{modality.where}, fields[{name!r}]"
            raise SpecError(where, "dense tensors, which vLLM can batch", str(form))


# -- values ----------------------------------------------------------------------------------------


def _copy_tensors(value: Any) -> Any:
    """Return a value with copies of its tensors and arrays."""
    return map_values(_copy_tensor, value)


def _copy_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return value


def _count_writes(value: Any) -> int:
    """Return how often a tensor was written to: torch counts it. 0 for what it does not count."""
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return value._version
    return 0


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two values are the same, as far as they hold numbers and texts."""
    return _equal(first, second, _are_equal)


def _is_alike(first: Any, second: Any) -> bool:
    """Return whether two values are the same but for rounding.

    Floats may differ by a thousandth of the largest, or by four units in the last place of their
    dtype.
    """
    return _equal(first, second, _are_near)


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if torch.equal(first, second):  # nearly always, and faster than what takes NaN for equal
        return True
    if not first.is_floating_point():
        return False
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


def _are_near(first: torch.Tensor, second: torch.Tensor) -> bool:
    if _are_equal(first, second):
        return True
    if not first.is_floating_point():
        return False
    finite = first[first.isfinite()].abs().double()
    largest = float(finite.max()) if finite.numel() else 0.0
    tolerance = max(1e-3, 4 * torch.finfo(first.dtype).eps)
    return torch.allclose(
        first.double(),
        second.double(),
        rtol=tolerance,
        atol=tolerance * largest,
        equal_nan=True,
    )


def _equal(
    first: Any, second: Any, are_equal: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    """Return whether two values are equal.

    Tensors of one shape and dtype are compared by a function, numbers and texts by Python. Anything
    else counts as equal.
    """
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if first.dtype.kind not in "fiub" or second.dtype.kind not in "fiub":
            return True
        first = torch.from_numpy(first.copy())
        second = torch.from_numpy(second.copy())
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return are_equal(first, second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            return False
        for first_part, second_part in zip(first, second, strict=True):
            if not _equal(first_part, second_part, are_equal):
                return False
        return True
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            return False
        for key in first:
            if not _equal(first[key], second[key], are_equal):
                return False
        return True
    if not _is_number_or_text(first) or not _is_number_or_text(second):
        return True
    is_nan = first != first and second != second
    return bool(first == second or is_nan)


def _is_number_or_text(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _has_overlapping_items(results: Iterable[_Result]) -> bool:
    """Return whether the items of a field that is a list have a byte in common."""
    for result in results:
        for part in result.raw.values():
            if isinstance(part, (list, tuple)) and _overlap(part):
                return True
    return False


def _overlap(parts: Iterable[Any]) -> bool:
    """Return whether the tensors or arrays of two parts have a byte in common."""
    for first, second in combinations(parts, 2):
        if share_memory(first, second):
            return True
    return False

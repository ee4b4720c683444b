"""Encoder rows that a language model cannot carry: items of them become zeros, and no other item changes."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkit.plan.containment import Reporter, get_unsound_items_metric, zero_unsound_rows
from mmkit.plan.encoder_rows import split_rows_or_zero
from mmkit.plan.soundness import compute_largest_magnitude

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
VALUES = [0.0, -1.5, 16384.0, 16392.0, -65504.0, 2.0**53, 2.0**54, -3e38, torch.inf, -torch.inf, torch.nan]


@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.lists(st.lists(st.sampled_from(VALUES), max_size=4)))
def test_an_item_is_contained_as_a_whole_and_alone(model: Any, encoder: Any, items: list[list[float]]) -> None:
    """Whatever the dtypes of the encoder and of the model."""
    bound = compute_largest_magnitude(model)
    rows_of_items = []
    expected = []
    num_unsound = 0
    for values in items or [[]]:
        rows = torch.tensor([[1.0, value] for value in values], dtype=encoder).reshape(-1, 2)
        rows_of_items.append(rows)
        is_sound = all(abs(value) <= bound for value in rows.flatten().tolist())  # no NaN is
        expected.append(rows if is_sound else torch.zeros_like(rows))
        num_unsound += not is_sound

    contained, unsound = zero_unsound_rows(rows_of_items, bound)

    assert int(unsound) == num_unsound
    for rows, expected_rows in zip(contained, expected, strict=True):
        assert torch.equal(rows, expected_rows)
        assert rows.to(model).isfinite().all()


def test_the_bounds_leave_room_for_norms_and_sums() -> None:
    for dtype in DTYPES:
        largest = torch.tensor(compute_largest_magnitude(dtype), dtype=dtype)
        assert (largest + largest).isfinite()
        assert (largest.float().square() * 2**21).isfinite()


def test_the_metric_is_there_before_the_first_unsound_item() -> None:
    """An alert needs a series."""
    client = pytest.importorskip("prometheus_client")

    Reporter("robot", 16384.0, ["silent"])
    assert client.REGISTRY.get_sample_value("mmkit:unsound_items_total", {"modality": "silent"}) == 0


def test_the_operator_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Each item counts once; the log has one line for many of them, and then is quiet."""
    pytest.importorskip("prometheus_client")

    reporter = Reporter("robot", 16384.0, ["actions", "images"])
    before = get_unsound_items_metric().labels("actions")._value.get()
    with caplog.at_level(logging.WARNING):
        for name, number in [("actions", 0), ("actions", 2), ("images", 1), ("actions", 1)]:
            reporter.add(name, torch.tensor(number))
            reporter.poll()
    assert get_unsound_items_metric().labels("actions")._value.get() == before + 3
    (line,) = caplog.messages
    assert line == (
        "mmkit: robot.actions: the encoder rows of 2 item(s) were not finite, or larger than 16384 in magnitude. The "
        "requests were answered as if these rows were zeros."
    )


WIDTH = 2
COUNTS = st.integers(0, 3)
WRONG_ROWS = st.sampled_from(
    [torch.ones(9, WIDTH), torch.ones(1, WIDTH + 1), torch.ones(1, WIDTH).int(), torch.ones(WIDTH), [[1.0, 1.0]], None]
)


def find_rows_or_zeros(returned: Any, counts: list[int]) -> tuple[Any, Any]:
    return split_rows_or_zero(returned, "robot.arm, embed_arm", counts, torch.zeros(WIDTH))


@given(st.lists(st.tuples(COUNTS, st.none() | WRONG_ROWS), max_size=4))
def test_an_item_with_other_rows_than_its_layout_is_zeros_and_no_other_is(items: list[Any]) -> None:
    """Each item gets as many rows as its layout has, and nothing raises."""
    returned = []
    expected = []
    num_wrong = 0
    for count, wrong_rows in items:
        if wrong_rows is None:
            returned.append(torch.ones(count, WIDTH))
            expected.append(torch.ones(count, WIDTH))
        else:
            returned.append(wrong_rows)
            expected.append(torch.zeros(count, WIDTH))
            num_wrong += 1

    rows_of_items, errors = find_rows_or_zeros(returned, [count for count, _ in items])

    assert len(errors) == num_wrong
    for rows, expected_rows in zip(rows_of_items, expected, strict=True):
        assert torch.equal(rows, expected_rows)


@given(st.lists(COUNTS, max_size=4), st.sampled_from(["one item too many", None, 1.0, torch.ones(2, WIDTH)]))
def test_all_items_are_zeros_where_their_rows_cannot_be_told_apart(counts: list[int], returned: Any) -> None:
    if isinstance(returned, str):
        returned = [torch.ones(count, WIDTH) for count in counts] + [torch.ones(1, WIDTH)]
    rows_of_items, errors = find_rows_or_zeros(returned, counts)
    assert len(errors) == len(counts)
    for rows, count in zip(rows_of_items, counts, strict=True):
        assert torch.equal(rows, torch.zeros(count, WIDTH))


def test_the_operator_is_told_of_rows_that_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    reporter = Reporter("robot", 16384.0, ["arm"])
    before = get_unsound_items_metric().labels("arm")._value.get()
    _, errors = find_rows_or_zeros([torch.ones(2, WIDTH)], [3])
    with caplog.at_level(logging.ERROR):
        reporter.add_errors("arm", errors)
        reporter.add_errors("arm", errors)
    assert get_unsound_items_metric().labels("arm")._value.get() == before + 2
    (line,) = caplog.messages
    assert line == (
        "mmkit: robot.arm, embed_arm, item 0: expected 3 encoder rows, got 2. Return one row per embed() position. The "
        "requests of 1 such item(s) were answered as if all rows of the item were zeros."
    )

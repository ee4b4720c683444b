"""Batch inference: the forms of rows, and which runs do not start."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from PIL import Image

from examples import batch
from mmkit import InputError, MmkitError

from .common import expect_refusal


@given(st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=5), array_shapes(max_dims=3, max_side=4))
def test_lists_of_tensors_keep_their_values(counts: list[int | None], shape: tuple[int, ...]) -> None:
    """Through a file, and cut out of a larger table."""
    total = sum(filter(None, counts))
    values = np.random.default_rng(0).standard_normal((total + 1, *shape)).astype("float32")
    ends = np.cumsum([0, *(count or 0 for count in counts)])
    offsets = pa.array(
        [*(int(e) if c is not None else None for e, c in zip(ends, counts, strict=False)), total], pa.int32()
    )
    items = pa.ListArray.from_arrays(offsets, pa.FixedShapeTensorArray.from_numpy_ndarray(values))
    file = BytesIO()
    pq.write_table(pa.table({"id": range(len(counts)), "items": items}), file)
    for row in batch.read_rows(pq.read_table(file).slice(1)):
        start, count = ends[row["id"]], counts[row["id"]]
        if count is None:
            assert row["items"] is None
        else:
            assert np.array_equal(np.array(row["items"]).reshape(-1, *shape), values[start : start + count])


def test_tensors_keep_their_shape() -> None:
    """Each row is one item."""
    values = np.arange(12, dtype="float32").reshape(2, 3, 2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    with_null = pa.ExtensionArray.from_storage(
        tensors.type, pa.concat_arrays([tensors.storage, pa.nulls(1, tensors.storage.type)])
    )
    rows = batch.read_rows(pa.table({"id": range(3), "items": with_null}))
    assert np.array_equal(np.stack([row["items"] for row in rows[:2]]), values)
    assert rows[2]["items"] is None


def test_images_are_files() -> None:
    picture, file = Image.new("RGB", (3, 2), (1, 2, 3)), BytesIO()
    picture.save(file, "PNG")
    item = batch.decode_item({"left": file.getvalue(), "text": "x"})
    assert (item["left"].tobytes(), item["text"]) == (picture.tobytes(), "x")
    with pytest.raises(InputError, match="item: expected the bytes of an image file, got cannot identify"):
        batch.decode_item(b"no image")


REFUSED = [
    ({"name": [1]}, ": expected a column id, got name."),
    ({"id": [2, 1, 2]}, ", id: expected another one in each row, got 2 more than once."),
    (None, ": expected a parquet file, or a folder of them, got none."),
    ({"id": ["a", None]}, ", id: expected another one in each row, got null."),
]


@pytest.mark.parametrize(("columns", "sentence"), REFUSED)
def test_refuses_inputs(tmp_path: Path, columns: dict[str, Any] | None, sentence: str) -> None:
    if columns is not None:
        pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    file = tmp_path / "in.parquet"
    expect_refusal(MmkitError, f"{file}{sentence}", batch.run, file, tmp_path / "out", dict, {})


def test_refuses_the_folder_of_another_run(tmp_path: Path) -> None:
    table = pa.table({"id": [1]})
    pq.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "out").mkdir()
    batch.write_part(tmp_path / "out" / "part-000000.parquet", table, '["dict", {"model": "a"}]')
    sentence = '…: expected the answers of ["dict", {"model": "b"}], got ["dict", {"model": "a"}]…'
    expect_refusal(MmkitError, sentence, batch.run, tmp_path / "in.parquet", tmp_path / "out", dict, {"model": "b"})

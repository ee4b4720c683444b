"""Options of requests (`mm_processor_kwargs`), and the form of the fields that these and odd items make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkit import (
    Image,
    InputError,
    Modality,
    ModelSpec,
    Tensor,
    batched,
    constant,
    derived,
    embed,
    fields,
    flat,
    hf,
    item,
    kwargs,
    later,
    tok,
    where,
)
from mmkit import replace as replaces
from mmkit.testing import check_law
from mmkit.testing.differences import find_difference
from mmkit.testing.vllm_model import batch_items
from mmkit.testing.vllm_path import Caches
from tests.profiles import scaled

from .plain import ONES, plain, processor, run
from .planted.base import HIDDEN, MEDIA, Derived, with_model

# -- what a hash covers ------------------------------------------------------------------------------------------------

OPTIONS = st.dictionaries(st.sampled_from(["scale", "rows"]), st.sampled_from([1, 2, 3]), max_size=2)
SCOPES = st.dictionaries(
    st.sampled_from(["images_kwargs", "videos_kwargs", "audio_kwargs", "common_kwargs", "text_kwargs"]),
    OPTIONS,
    max_size=3,
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "image": st.lists(st.sampled_from([1, 2]), min_size=1, max_size=2),
        "video": st.lists(st.sampled_from([1, 2]), min_size=1, max_size=2),
    },
).filter(bool)
REQUESTS = st.tuples(ITEMS, OPTIONS, SCOPES)
SHAPES = {"image": (4, 4, 3), "video": (2, 4, 4, 3)}
TARGETS = {"image": "<frame>", "video": "<series>"}


def test_items_of_one_hash_have_one_form_and_one_value() -> None:
    """Whatever else a request holds, in whatever scope options are, with a cache of any kind and without."""
    instance = processor(MEDIA)
    caches = [None, Caches(instance, 1.0, pair=False), Caches(instance, 1.0, pair=True)]
    known: dict[str, Any] = {}

    @settings(max_examples=scaled(150))
    @given(REQUESTS, st.sampled_from(caches))
    def holds(request: Any, cache: Caches | None) -> None:
        items, options, scopes = request
        data = {name: [np.full(SHAPES[name], n, np.uint8) for n in own] for name, own in items.items()}
        words = " ".join(TARGETS[name] for name, own in data.items() for _ in own)
        got = run(instance, words, data, kwargs={**options, **scopes}, caches=cache)
        for name, hashes in got.hashes.items():
            for i, item_hash in enumerate(hashes):
                seen = got.values(name, i), got.mask(name, i)
                assert find_difference(known.setdefault(item_hash, seen), seen) is None

    holds()
    assert len(known) > 20


# -- what a model gets -------------------------------------------------------------------------------------------------


def test_an_option_may_change_a_fixed_number_of_rows() -> None:
    """The model knows it from the server's options alone, so that it comes with the item."""

    def repeated(items: Any, scope: Any) -> dict[str, Any]:
        return {"frames": [own[:1].expand(scope.kwargs.get("rows", 2), 3).clone() for own in items]}

    spec = plain(layout=embed(tok["<pad>"]) * kwargs.get("rows", 2), process=repeated)
    options = st.sampled_from([{}, {"rows": 2}, {"rows": 3}])
    check_law("counts", with_model(Derived, spec, kwargs=options), examples=scaled(30))


def _process(items: Any, scope: Any) -> dict[str, Any]:
    """Fields of any form that an option, or the first value of an item, asks for."""
    batch = torch.stack(items)
    if (batch == -1).any():  # some items alone
        batch = batch.int()
    batch = batch.to(getattr(torch, scope.kwargs.get("dtype", str(batch.dtype).removeprefix("torch."))))
    rows = batch.reshape(-1, 3)
    if scope.kwargs.get("rank"):
        rows = rows[..., None]
    raw = {"batch": batch, "rows": rows, "columns": rows.transpose(0, 1)}
    field, form = scope.kwargs.get("form", ("", ""))
    if field:
        raw[field] = FORMS[form](raw[field])
    return raw


FORMS = {
    "on another device": lambda tensor: tensor.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "with a gradient": lambda tensor: tensor.float().clone().requires_grad_(),
    "as an array": torch.Tensor.numpy,
    "as a list": torch.Tensor.tolist,
    "as a list of tensors": list,
    "as None": lambda tensor: [None] * len(tensor),
}


class Raw:
    """Pixels in the dtype in which they come, unless an option says another."""

    def __call__(self, images: Any, dtype: Any = None, return_tensors: str = "") -> dict[str, Any]:
        pixels = [torch.from_numpy(np.array(image)[:1, :1, :3]) for image in images]
        return {"pixels": [own.to(getattr(torch, dtype)) if dtype else own for own in pixels]}


ODD = ModelSpec(
    "odd",
    Modality(
        "frames",
        item=Tensor((2, 3)),
        layout=embed(tok["<pad>"]) * 2,
        update=replaces(tok["<frame>"]),
        fields={
            "batch": batched(),
            "rows": flat(2),
            "columns": flat(2, dim=1),
            "first": derived(fields.batch[0]),
            "some": derived(where(item.index < 0, 1, kwargs.get("some", 1))),
            "shared": constant(later(np.array)(kwargs.get("shared", [1.5, 2.5]))),
        },
        process=_process,
        embeds=True,
        limit=1,
        cacheable=False,
    ),
    Modality(
        "image",
        item=Image(largest=(4, 4)),
        placeholder=tok["<row>"],
        tokens=1,
        update=replaces(tok["<series>"]),
        fields={"pixels": batched()},
        process=hf(Raw()),
        limit=1,
    ),
)
DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int32", "int64", "bool", "complex64"]
FLOATS = DTYPES[:4]
PIXELS = [np.full((4, 4, 3), 7, np.uint8), *(np.full((4, 4, 3), 0.5, dtype) for dtype in ("f2", "f4", "f8"))]
PIXELS += [np.full((4, 4, 4), 7, np.uint8), np.full((4, 4, 3), 7, np.int64)]
FORM = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(DTYPES),
        "rank": st.booleans(),
        "form": st.tuples(st.sampled_from(["batch", "rows", "columns"]), st.sampled_from([*FORMS])),
        "some": st.sampled_from([1, 2.5, None]),
        "shared": st.sampled_from([[1.5, 2.5], [1, 2], [1.5]]),
    },
)
ONE = st.one_of(
    st.tuples(st.just({"frames": [ONES]}), st.just({})),
    st.tuples(st.just({"frames": [-ONES]}), st.just({})),
    st.tuples(st.just({"frames": [ONES]}), FORM),
    st.sampled_from(FLOATS).map(lambda own: ({"frames": {"frames_embeds": [embeddings(own)]}}, {})),
    st.tuples(
        st.sampled_from(PIXELS).map(lambda own: {"image": [own]}),
        st.just({}) | st.sampled_from(DTYPES).map(lambda own: {"images_kwargs": {"dtype": own}}),
    ),
)
WORDS = {"frames": "<frame>", "image": "<series>"}


def embeddings(dtype: str) -> torch.Tensor:
    return torch.full((2, HIDDEN), 0.1).to(getattr(torch, dtype))


def accepted(instance: Any, request: Any) -> Any:
    """The item of a request as the engine gets it; None where it is refused."""
    data, options = request
    (name,) = data
    try:
        (own,) = run(instance, WORDS[name], data, kwargs=options).items[name]
    except InputError:
        return None
    return own


def batched_by_vllm(items: list[Any]) -> list[dict[str, Any]]:
    """The fields of items that vLLM batches together, one by one."""
    fields_of: list[dict[str, Any]] = []
    for group in batch_items(items):
        sizes = {key: 1 if key != "rows" else 2 for key in group}
        count = len(group.get("batch", group.get("pixels", group.get("frames_embeds"))))
        for i in range(count):
            parts = {key: value[i * sizes[key] : (i + 1) * sizes[key]] for key, value in group.items()}
            if "columns" in group:
                parts["columns"] = group["columns"][:, 2 * i : 2 * i + 2]
                parts["shared"] = group["shared"]
            fields_of.append(parts)
    return fields_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whatever_callers_send_their_items_make_one_batch(dtype: str) -> None:
    """Each item is refused, or has beside any others the values and the dtype that it has alone."""
    instance = processor(ODD, enable_mm_embeds=True, dtype=dtype)
    counts = {"accepted": 0, "refused": 0}

    @settings(max_examples=scaled(100))
    @given(st.lists(ONE, min_size=2, max_size=6))
    def holds(requests: Any) -> None:
        by_modality: dict[str, list[Any]] = {}
        for request in requests:
            own = accepted(instance, request)
            counts["accepted" if own else "refused"] += 1
            if own:
                by_modality.setdefault(next(iter(request[0])), []).append(own)
        for items in by_modality.values():
            alone = [batched_by_vllm([own])[0] for own in items]
            together = batched_by_vllm(items)
            assert find_difference(alone, together) is None

    holds()
    assert min(counts.values()) > 20

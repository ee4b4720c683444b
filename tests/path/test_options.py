"""Options of requests (`mm_processor_kwargs`), and the form of the fields that these and odd items make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
    first_with_hash: dict[str, Any] = {}

    @settings(max_examples=scaled(150))
    @given(REQUESTS, st.sampled_from(caches))
    def holds(request: Any, cache: Caches | None) -> None:
        items, options, scopes = request
        data = {}
        words: list[str] = []
        for name, numbers in items.items():
            data[name] = [np.full(SHAPES[name], number, np.uint8) for number in numbers]
            words += [TARGETS[name]] * len(numbers)
        outcome = run(instance, " ".join(words), data, kwargs=options | scopes, caches=cache)
        for name, hashes in outcome.hashes.items():
            for index, item_hash in enumerate(hashes):
                processed = outcome.values(name, index), outcome.mask(name, index)
                expected = first_with_hash.setdefault(item_hash, processed)
                assert find_difference(expected, processed) is None

    holds()
    assert len(first_with_hash) > 20


# -- what a model gets -------------------------------------------------------------------------------------------------


def test_an_option_may_change_a_fixed_number_of_rows() -> None:
    """The model knows it from the server's options alone, so that it comes with the item."""

    def repeat_first_row(items: Any, scope: Any) -> dict[str, Any]:
        num_rows = scope.kwargs.get("rows", 2)
        return {"frames": [value[:1].expand(num_rows, 3).clone() for value in items]}

    spec = plain(layout=embed(tok["<pad>"]) * kwargs.get("rows", 2), process=repeat_first_row)
    options = st.sampled_from([{}, {"rows": 2}, {"rows": 3}])
    check_law("counts", with_model(Derived, spec, kwargs=options), examples=scaled(30))


def _process(items: Any, scope: Any) -> dict[str, Any]:
    """Return fields of any form that an option, or the first value of an item, asks for."""
    batch = torch.stack(items)
    if (batch == -1).any():  # only items of -1
        batch = batch.int()
    if "dtype" in scope.kwargs:
        batch = batch.to(getattr(torch, scope.kwargs["dtype"]))
    rows = batch.reshape(-1, 3)
    if scope.kwargs.get("rank"):
        rows = rows[..., None]
    raw = {"batch": batch, "rows": rows, "columns": rows.transpose(0, 1)}
    if "form" in scope.kwargs:
        name, form = scope.kwargs["form"]
        raw[name] = FORMS[form](raw[name])
    return raw


def _move_to_other_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _require_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().clone().requires_grad_()


def _replace_by_none(tensor: torch.Tensor) -> list[None]:
    return [None] * len(tensor)


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "on another device": _move_to_other_device,
    "sparse": torch.Tensor.to_sparse,
    "with a gradient": _require_gradient,
    "as an array": torch.Tensor.numpy,
    "as a list": torch.Tensor.tolist,
    "as a list of tensors": list,
    "as None": _replace_by_none,
}


class PixelReader:
    """Pixels in the dtype in which they come, unless an option says another."""

    def __call__(self, images: Any, dtype: Any = None, return_tensors: str = "") -> dict[str, Any]:
        pixels = []
        for image in images:
            first_pixel = torch.from_numpy(np.array(image)[:1, :1, :3])
            pixels.append(first_pixel.to(getattr(torch, dtype)) if dtype else first_pixel)
        return {"pixels": pixels}


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
        process=hf(PixelReader()),
        limit=1,
    ),
)
DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int32", "int64", "bool", "complex64"]
FLOATS = DTYPES[:4]
PIXELS = [
    np.full((4, 4, 3), 7, np.uint8),
    np.full((4, 4, 3), 0.5, "f2"),
    np.full((4, 4, 3), 0.5, "f4"),
    np.full((4, 4, 3), 0.5, "f8"),
    np.full((4, 4, 4), 7, np.uint8),
    np.full((4, 4, 3), 7, np.int64),
]
OPTIONS_OF_FRAMES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(DTYPES),
        "rank": st.booleans(),
        "form": st.tuples(st.sampled_from(["batch", "rows", "columns"]), st.sampled_from(list(FORMS))),
        "some": st.sampled_from([1, 2.5, None]),
        "shared": st.sampled_from([[1.5, 2.5], [1, 2], [1.5]]),
    },
)
WORDS = {"frames": "<frame>", "image": "<series>"}


class Request(NamedTuple):
    """A request with one item."""

    modality: str
    data: Any
    options: dict[str, Any]


@st.composite
def requests_with_one_item(draw: Any) -> Request:
    match draw(st.sampled_from(["frame", "negative frame", "frame with options", "embeddings", "image"])):
        case "frame":
            return Request("frames", [ONES], {})
        case "negative frame":
            return Request("frames", [-ONES], {})
        case "frame with options":
            return Request("frames", [ONES], draw(OPTIONS_OF_FRAMES))
        case "embeddings":
            embeddings = torch.full((2, HIDDEN), 0.1).to(getattr(torch, draw(st.sampled_from(FLOATS))))
            return Request("frames", {"frames_embeds": [embeddings]}, {})
        case _:
            pixels = [draw(st.sampled_from(PIXELS))]
            if draw(st.booleans()):
                return Request("image", pixels, {"images_kwargs": {"dtype": draw(st.sampled_from(DTYPES))}})
            return Request("image", pixels, {})


def render_item(instance: Any, request: Request) -> Any:
    """Return the item of a request as the engine gets it; None where it is refused."""
    name = request.modality
    try:
        outcome = run(instance, WORDS[name], {name: request.data}, kwargs=request.options)
    except InputError:
        return None
    (rendered,) = outcome.items[name]
    return rendered


def batch_by_vllm(items: list[Any]) -> list[dict[str, Any]]:
    """Return the fields of items that vLLM batches together, one by one."""
    fields_of_items: list[dict[str, Any]] = []
    for batch in batch_items(items):
        count = len(batch.get("batch", batch.get("pixels", batch.get("frames_embeds"))))
        for index in range(count):
            item_fields = {}
            for name, value in batch.items():
                size = 2 if name == "rows" else 1
                item_fields[name] = value[index * size : (index + 1) * size]
            if "columns" in batch:
                item_fields["columns"] = batch["columns"][:, 2 * index : 2 * index + 2]
                item_fields["shared"] = batch["shared"]
            fields_of_items.append(item_fields)
    return fields_of_items


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whatever_callers_send_their_items_make_one_batch(dtype: str) -> None:
    """Each item is refused, or has beside any others the values and the dtype that it has alone."""
    instance = processor(ODD, enable_mm_embeds=True, dtype=dtype)
    num_accepted = 0
    num_refused = 0

    @settings(max_examples=scaled(100))
    @given(st.lists(requests_with_one_item(), min_size=2, max_size=6))
    def holds(requests: list[Request]) -> None:
        nonlocal num_accepted, num_refused
        items_by_modality: dict[str, list[Any]] = {}
        for request in requests:
            rendered = render_item(instance, request)
            if rendered:
                num_accepted += 1
                items_by_modality.setdefault(request.modality, []).append(rendered)
            else:
                num_refused += 1
        for items in items_by_modality.values():
            batched_one_by_one = [batch_by_vllm([rendered])[0] for rendered in items]
            assert find_difference(batched_one_by_one, batch_by_vllm(items)) is None

    holds()
    assert num_accepted > 20
    assert num_refused > 20

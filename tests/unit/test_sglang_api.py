"""The parts of the room of SGLang that need no SGLang: items, what tells them apart, and which specs are served."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.series.spec import WAVES
from examples.series.untrained import make_model, make_tokenizer
from mmkit import (
    Image,
    InputError,
    List,
    Modality,
    ModelSpec,
    Output,
    Record,
    SpecError,
    Tensor,
    Video,
    already_expanded,
    any_id,
    batched,
    embed,
)
from mmkit.plan.outline import ItemHasher
from mmkit.plan.plan import Plan
from mmkit.sglang_api import make_item_url
from mmkit.sglang_api.fields import choose_feature, hash_fields
from mmkit.sglang_api.items import ItemReader, LoadMedia
from mmkit.sglang_api.specs import check_spec
from mmkit.wire.items import ITEM_DATA_URL
from mmkit.wire.limits import Limits


@pytest.fixture(scope="module")
def plan() -> Plan:
    tokenizer = make_tokenizer()
    return WAVES.bind(make_model(seed=0, vocab_size=len(tokenizer)).config, tokenizer)


def read_items(plan: Plan, lists: dict[str, Any], limits: Limits | None = None) -> dict[str, Any]:
    load = LoadMedia(image=lambda source: f"image of {source}", audio=lambda source, rate: (source, rate))
    return ItemReader(plan, limits or Limits(), load).read_lists(lists)


def test_items_come_in_any_list_and_in_order(plan: Plan):
    first, second, third = torch.ones(3, 1), torch.zeros(2, 1), torch.full((1, 1), 5.0)
    lists = {
        "audio": [make_item_url("series", third)],
        "image": [make_item_url("series", first), None, SimpleNamespace(url=make_item_url("series", second))],
        "video": None,
    }
    items = read_items(plan, lists)["series"]
    assert [item.tolist() for item in items] == [first.tolist(), second.tolist(), third.tolist()]


REFUSED = [
    ({"audio": ["a sound"]}, "waves.multi_modal_data: expected modalities among ['series'], got 'audio'."),
    ({"image": [make_item_url("cloud", [1])]}, "image_data[0]: expected one of series as the modality of a URL, got"),
    (
        {"audio": [f"{ITEM_DATA_URL}series;base64,*"]},
        "audio_data[0]: expected base64 in the URL of an item, got another",
    ),
    (
        {"audio": [make_item_url("series", {"a": 1})]},
        "audio_data[0].a: expected fields among ['data', 'dtype', 'shape', ",
    ),
]


@pytest.mark.parametrize(("lists", "sentence"), REFUSED)
def test_what_is_no_item_is_refused(plan: Plan, lists: dict[str, Any], sentence: str):
    with pytest.raises(InputError) as refusal:
        read_items(plan, lists)
    assert str(refusal.value).startswith(sentence)


def test_the_limits_of_a_request_hold(plan: Plan):
    urls = [make_item_url("series", torch.ones(8, 1))] * 3
    with pytest.raises(InputError, match="expected at most 16 numbers in one request, got more"):
        read_items(plan, {"audio": urls}, Limits(elements=16))


def make_modality(*, cacheable: bool = True) -> Any:
    spec = ModelSpec(
        "pair",
        Modality(
            "cloud",
            item=Tensor((2, 3)),
            layout=embed(5),
            update=already_expanded(),
            fields={"near": batched(), "far": batched(keep_on_cpu=True)},
            process=lambda items, scope: {"near": items, "far": items},
            cacheable=cacheable,
        ),
    )
    return spec.bind(SimpleNamespace(vocab_size=9)).modalities["cloud"]


CLOUD = make_modality()
VALUES = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=6).map(torch.tensor),
    st.lists(st.integers(0, 3), min_size=1, max_size=6).map(lambda values: torch.tensor(values).float()),
    st.lists(st.integers(0, 3), min_size=2, max_size=6).map(lambda values: torch.tensor(values)[:, None]),
    st.integers(0, 3),
    st.text("ab", max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 3).map(lambda value: np.array([value, 1])),
)


def describe(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return (type(value).__name__, str(value.dtype), tuple(value.shape), value.tolist())
    return (type(value).__name__, value)


@given(VALUES, VALUES, VALUES, VALUES)
def test_fields_are_told_apart_by_all_that_they_are(near: Any, far: Any, other_near: Any, other_far: Any):
    """The bytes of one field, which SGLang hashes by itself, are not enough."""
    equal = describe(near) == describe(other_near) and describe(far) == describe(other_far)
    digests = [hash_fields(CLOUD, {"near": a, "far": b}) for a, b in ((near, far), (other_near, other_far))]
    assert (digests[0] == digests[1]) == equal


def test_keys_are_of_processed_fields_and_not_those_of_an_outline(plan: Plan):
    steps = torch.ones(3, 1)
    (key,) = plan.outline("<series> is a", {"series": [steps]}, hasher=ItemHasher("sha256", "waves")).hashes["series"]
    (item,) = items = plan.parse_items({"series": [steps]})
    plan.fill_in_fields(items)
    assert hash_fields(plan.modalities["series"], item.fields).hex() != key


def test_items_that_are_never_kept_are_each_their_own():
    never_kept = make_modality(cacheable=False)
    fields = {"near": torch.ones(2)}
    assert hash_fields(CLOUD, fields) == hash_fields(CLOUD, fields)
    assert hash_fields(never_kept, fields) != hash_fields(never_kept, fields)


def test_the_feature_is_the_largest_tensor_for_the_device():
    assert choose_feature(CLOUD, {"near": torch.ones(2), "far": torch.ones(9)}) == "near"
    assert choose_feature(CLOUD, {"far": torch.ones(9)}) == "far"


def make_spec(**changes: Any) -> ModelSpec:
    return ModelSpec("pair", make_cloud(layout=embed(5), update=already_expanded()), **changes)


def make_cloud(**layout: Any) -> Modality:
    return Modality("cloud", item=Tensor((2,)), fields={"cloud": batched()}, **layout)


NOT_SERVED = [
    (make_spec(decoder_prompt=lambda scope: [0]), "a decoder alone, got decoder_prompt."),
    (
        make_spec(outputs=[Output("ids", layout=any_id(2, 4), decode=list)]),
        "text as the only output, since a request cannot confine what is sampled, got outputs.",
    ),
    (
        ModelSpec("pair", make_cloud(tokens=0)),
        "items that take positions of a prompt, got raw input.",
    ),
]


@pytest.mark.parametrize(("spec", "sentence"), NOT_SERVED)
def test_specs_of_which_a_part_would_be_lost_are_refused(spec: ModelSpec, sentence: str):
    with pytest.raises(SpecError) as refusal:
        check_spec(spec)
    assert str(refusal.value).startswith(f"pair in SGLang: expected {sentence}")


def test_a_spec_of_text_alone_is_served():
    check_spec(WAVES)


def test_media_inside_an_item_are_loaded():
    spec = ModelSpec(
        "pair",
        Modality(
            "scene",
            item=Record(views=List(Image((8, 8)), most=3), size=Tensor((2,))),
            layout=embed(5),
            update=already_expanded(),
            fields={"size": batched()},
            process=lambda items, scope: {"size": [item["size"] for item in items]},
        ),
    )
    plan = spec.bind(SimpleNamespace(vocab_size=9))
    picture = {"image_url": {"url": "http://host/a.png"}}
    scene = {"views": [picture, picture], "size": torch.ones(2)}
    (item,) = read_items(plan, {"audio": [make_item_url("scene", scene)]})["scene"]
    assert item["views"] == ["image of http://host/a.png"] * 2
    assert item["size"].tolist() == [1.0, 1.0]


def test_the_file_of_a_video_is_refused():
    modality = Modality(
        "video",
        item=Video((2, 8, 8)),
        layout=embed(5),
        update=already_expanded(),
        fields={"size": batched()},
        process=lambda items, scope: {"size": [torch.ones(2) for _ in items]},
    )
    plan = ModelSpec("pair", modality).bind(SimpleNamespace(vocab_size=9))
    sentence = r"video_data\[0\]: expected the frames of a video as an item of the modality, got the file of a video\."
    with pytest.raises(InputError, match=sentence):
        read_items(plan, {"video": ["data:video/mp4;base64,AAAA"]})

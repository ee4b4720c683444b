"""Outlines: what follows from the facts of items, against the plan's own path with the items themselves."""

import io
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from mmkit import (
    Audio,
    Image,
    InputError,
    Modality,
    ModelSpec,
    Record,
    SpecError,
    Tensor,
    Text,
    Video,
    batched,
    between,
    ceil_div,
    derived,
    embed,
    fields,
    flat,
    hf,
    identity,
    item,
    kwargs,
    later,
    literal,
    proc,
    replace,
    tok,
)
from mmkit.plan.bind import plan_for_options
from mmkit.plan.hf_calls import LazyProcessor
from mmkit.plan.outline import (
    AudioFacts,
    ImageFacts,
    ItemHasher,
    NeedsProcessing,
    RecordFacts,
    TensorFacts,
    TextFacts,
    VideoFacts,
    decode_audio_file,
    find_unknown_reads,
    inspect_image_file,
)
from mmkit.testing.strategies import items as draw_items
from tests import ROOT
from tests.profiles import scaled

from .common import CONFIG, Tokenizer, bind_plan, make_modality

TARGET = 7
"""The token <image>, in place of which layouts stand."""


def reject_call(**_arguments):
    raise AssertionError("a Hugging Face processor is called")


@later
def grid_of(width, height, unit):
    if width > 200 * height:
        raise ValueError("the image is too wide")
    return [-(-height // unit), -(-width // unit)]


GRID = fields.grid


def image_modality(**options):
    """Return images of a grid that follows from their size, for a processor that must not be called."""
    parts = {
        "item": Image(largest=(640, 640)),
        "layout": literal(9) + embed(5) * (GRID[0] * GRID[1]) + literal(10),
        "update": replace(tok["<image>"]),
        "fields": {
            "pixels": flat(GRID[0] * GRID[1]),
            "grid": derived(grid_of(item.width, item.height, kwargs.get("unit", 32)), dtype="int64"),
        },
        "process": hf(),
        **options,
    }
    return Modality("image", **parts)


def bind_images(**options):
    return bind_plan(image_modality(**options), processor=reject_call)


RECORD = Record(
    genes=Tensor((between(1, 9),), "int64", bound=between(0, 99)),
    values=Tensor((item.genes.length, 2)),
    name=Text(most=20),
)

MODALITIES = {
    "tensor": make_modality(
        item=Tensor((between(1, 40), 2)), layout=embed(5) * ceil_div(item.length, 4), update=replace(TARGET)
    ),
    "shape of the field": make_modality(
        item=Tensor((between(1, 40), 2)), layout=embed(5) * fields.x.shape[0], update=replace(TARGET)
    ),
    "shape of a sound": make_modality(
        item=Audio(largest=400, rate=16000),
        layout=embed(5) * fields.x.shape[0],
        update=replace(TARGET),
        process=identity(),
    ),
    "shape of a part": make_modality(
        item=Record(genes=Tensor((between(1, 9),)), values=Tensor((between(1, 5), 2))),
        layout=embed(5) * (fields.genes.shape[0] + fields.values.shape[0]),
        update=replace(TARGET),
        fields={"genes": batched(), "values": batched()},
    ),
    "text": make_modality(
        item=Text(most=30),
        layout=embed(5) * item.length + literal(9),
        update=replace(TARGET),
        fields={"x": derived(item.length, dtype="int64")},
        process=lambda texts, scope: {},
    ),
    "record": make_modality(
        item=RECORD,
        layout=embed(5) * (item.genes.length + item.name.length),
        update=replace(TARGET),
        fields={"x": batched()},
        process=lambda records, scope: {"x": [record["values"].sum() for record in records]},
    ),
    "audio": make_modality(
        item=Audio(largest=4000, rate=16000),
        layout=embed(5) * ceil_div(item.length, 160),
        update=replace(TARGET),
        process=lambda sounds, scope: {"x": [torch.from_numpy(sound) for sound in sounds]},
    ),
    "video": make_modality(
        item=Video(largest=(6, 32, 32), metadata=True),
        layout=embed(5) * item.frames + literal(9) * later(len)(item.metadata["frames_indices"]),
        update=replace(TARGET),
        process=lambda videos, scope: {"x": [torch.zeros(1) for _ in videos]},
    ),
    "image": make_modality(
        item=Image(largest=(64, 64)),
        layout=embed(5) * (item.width + item.height),
        update=replace(TARGET),
        process=lambda images, scope: {"x": [torch.zeros(1) for _ in images]},
    ),
    "numbered": make_modality(
        item=Tensor((between(1, 9),)),
        layout=embed(5) * (item.length + item.index),
        cacheable=False,
        update=replace(tok["<|image_{}|>", item.index + 1]),
        limit=2,
    ),
}


# -- facts in place of items -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODALITIES)
def test_an_outline_is_what_the_items_give(name):
    plan = bind_plan(MODALITIES[name])
    modality = plan.modalities["m"]

    @settings(max_examples=scaled(25))
    @given(st.lists(draw_items(modality.item), max_size=modality.limit or 3))
    def check(samples):
        data = {"m": [sample.value() for sample in samples]}
        prompt = [3, *plan.spell(data), 4]
        values = [modality.item.canonical(value, "m") for value in data["m"]]
        facts = {"m": [modality.item.state_facts(value) for value in values]}
        preview = plan.preview(prompt, data)
        for known in (facts, data):
            outline = plan.outline(prompt, known)
            assert outline.prompt_token_ids == preview.prompt_token_ids
            assert outline.placements == preview.placements
        if samples:
            assert outline.rows["m"] == [placement.tokens.num_embeds for placement in preview.placements]

    check()


def test_no_processor_is_called_for_an_outline():
    plan = bind_images()
    outline = plan.outline(
        [TARGET, 3, TARGET], {"image": [ImageFacts(width=33, height=64), ImageFacts(width=1, height=1)]}
    )
    assert outline.prompt_token_ids == [9, *[5] * 4, 10, 3, 9, 5, 10]
    assert outline.rows == {"image": [4, 1]}
    assert outline.hashes == {"image": [None, None]}
    assert [place["grid"].tolist() for place in outline.fields["image"]] == [[2, 2], [1, 1]]
    assert outline.uncomputed_fields == {"image": ["pixels"]}


def test_facts_of_one_item_need_no_list():
    plan = bind_images()
    assert plan.outline([TARGET], {"image": ImageFacts(width=1, height=1)}).rows == {"image": [1]}


def test_a_request_without_items_is_outlined():
    outline = bind_images().outline([97, 98], {})
    assert outline.prompt_token_ids == [97, 98]
    assert outline.placements == []


def test_embeddings_are_outlined_by_their_rows_where_raw_items_need_the_processor():
    plan = bind_images(layout=embed(5) * fields.pixels.shape[0], embeds=embed(5) * item.rows)
    outline = plan.outline([TARGET], {"image": {"image_embeds": [torch.zeros(3, 4)]}}, hasher=ItemHasher("sha256", "m"))
    assert outline.rows == {"image": [3]}
    assert outline.uncomputed_fields == {"image": []}
    assert outline.hashes["image"][0]


def test_audio_at_another_rate_is_as_long_as_once_resampled():
    plan = bind_plan(MODALITIES["audio"])
    assert plan.outline([TARGET], {"m": AudioFacts(length=481, rate=48000)}).rows == {"m": [2]}


def test_largest_items_are_computed_from_facts_too():
    plan = bind_images()
    with pytest.raises(InputError, match=re.escape("spec.image[0]: expected at most 400 encoder row(s)")):
        plan.outline([TARGET], {"image": ImageFacts(width=672, height=640)})


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("image", ImageFacts(width=0, height=4), "spec.m[0].width: expected a whole number >= 1, got int 0."),
        ("image", ImageFacts(width=2.0, height=4), "spec.m[0].width: expected a whole number >= 1, got float 2.0."),
        ("image", ImageFacts(width=True, height=4), "spec.m[0].width: expected a whole number >= 1, got bool True."),
        ("image", TensorFacts(shape=(3, 4)), "spec.m[0]: expected ImageFacts, got TensorFacts."),
        ("tensor", TensorFacts(shape=(41, 2)), "spec.m[0].shape: expected (1..40, 2), got tuple (41, 2)."),
        ("tensor", TensorFacts(shape=6), "spec.m[0].shape: expected (1..40, 2), got int 6."),
        ("text", TextFacts(length=31), "spec.m[0].length: expected a whole number in 1..30, got int 31."),
        ("audio", AudioFacts(length=9, rate=0), "spec.m[0]: expected a sampling rate >= 1 in Hz, got 0."),
        (
            "video",
            VideoFacts(frames=2, width=9, height=9),
            "spec.m[0]: expected facts with metadata, got facts without metadata.",
        ),
        (
            "video",
            VideoFacts(frames=2, width=9, height=9, metadata={"frames_indices": [0]}),
            "spec.m[0], metadata: expected frames_indices of 2 frames, got 1 of them.",
        ),
        ("record", RecordFacts({}), "spec.m[0]: expected facts of a dict of genes and values and name, got []."),
        (
            "record",
            RecordFacts(
                {"genes": TensorFacts(shape=(3,)), "values": TensorFacts(shape=(2, 2)), "name": TextFacts(length=1)}
            ),
            "spec.m[0].values.shape: expected (3, 2), got tuple (2, 2).",
        ),
    ],
)  # fmt: skip
def test_facts_of_no_item_are_refused(name, facts, message):
    with pytest.raises(InputError, match=re.escape(message)):
        bind_plan(MODALITIES[name]).outline([TARGET], {"m": [facts]})


def test_facts_beside_items_are_refused():
    plan = bind_plan(MODALITIES["tensor"])
    message = "spec.m[1]: expected facts, got Tensor. Send facts of all items of a modality, or all items."
    with pytest.raises(InputError, match=re.escape(message)):
        plan.outline([TARGET] * 2, {"m": [TensorFacts(shape=(1, 2)), torch.zeros(1, 2)]})


def test_more_items_than_the_limit_are_refused():
    plan = bind_plan(MODALITIES["numbered"])
    with pytest.raises(InputError, match="At most 2"):
        plan.outline([TARGET], {"m": [TensorFacts(shape=(1,))] * 3})


@pytest.mark.parametrize("method", ["expand", "outline"])
def test_an_item_that_a_derived_field_refuses_is_the_callers_mistake(method):
    plan = bind_images()
    picture = PILImage.new("RGB", (402, 2))
    message = (
        "spec.image[0]: expected an item that has a layout, got an item of width 402 and height 2: the image is too"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        getattr(plan, method)([TARGET], {"image": [picture]})


def test_what_needs_the_processor_is_refused_with_the_expression():
    plan = bind_images(layout=embed(5) * fields.pixels.shape[0] * fields.grid[0])
    message = (
        "spec.image, layout: expected a layout that follows from the facts of an item, got fields.pixels.shape[0], "
        "which only processing tells. Call expand() with the items, or state it from item.* in the spec."
    )
    with pytest.raises(SpecError, match=re.escape(message)) as refusal:
        plan.outline([TARGET], {"image": ImageFacts(width=1, height=1)})
    assert refusal.type is NeedsProcessing
    assert find_unknown_reads(plan.modalities["image"]) == ["fields.pixels.shape[0]"]


@pytest.mark.parametrize(
    "read_pixels",
    [
        lambda scope: scope.fields.pixels,
        lambda scope: scope.fields["pixels"],
        lambda scope: scope.fields.get("pixels"),
    ],
    ids=["attribute", "key", "get"],
)
def test_a_function_that_reads_processed_fields_is_found_by_trying(read_pixels):
    def lay_out(scope):
        read_pixels(scope)
        return embed(5)

    plan = bind_images(layout=lay_out)
    assert find_unknown_reads(plan.modalities["image"]) == ["fields.pixels"]
    with pytest.raises(NeedsProcessing, match=r"got fields\.pixels, which only processing tells"):
        plan.outline([TARGET], {"image": ImageFacts(width=1, height=1)})


def test_a_function_of_facts_is_outlined():
    plan = bind_images(layout=embed(5) * ceil_div(item.width, lambda scope: 2))
    assert find_unknown_reads(plan.modalities["image"]) == []
    assert plan.outline([TARGET], {"image": ImageFacts(width=3, height=1)}).rows == {"image": [2]}


# -- options of a request ----------------------------------------------------------------------------------------------


def test_the_options_of_a_request_change_the_outline():
    plan = bind_images()
    facts = {"image": ImageFacts(width=64, height=64)}
    assert plan.outline([TARGET], facts, options={"unit": 16}).rows == {"image": [16]}
    assert plan.outline([TARGET], facts).rows == {"image": [4]}
    assert plan_for_options(plan, {"unit": 16}, None) is plan_for_options(plan, {"unit": 16}, None)


SIDE = proc.size


def bind_with(processor):
    modality = image_modality(layout=embed(5) * (item.width // SIDE))
    return ModelSpec("spec", modality).bind(CONFIG, Tokenizer(), processor=processor)


def test_a_processor_is_loaded_with_the_options_of_a_request():
    plan = bind_with(LazyProcessor(lambda size=32: SimpleNamespace(size=size)))
    facts = {"image": ImageFacts(width=64, height=64)}
    assert plan.outline([TARGET], facts, options={"size": 16}).rows == {"image": [4]}
    assert plan.outline([TARGET], facts).rows == {"image": [2]}


def test_options_that_a_loaded_processor_cannot_follow_are_refused():
    plan = bind_with(SimpleNamespace(size=32))
    message = (
        "spec, mm_processor_kwargs: expected a processor that is loaded with the options of a request, got a "
        "SimpleNamespace that is loaded already. Bind the spec with processor=LazyProcessor(load)."
    )
    with pytest.raises(SpecError, match=re.escape(message)):
        plan.outline([TARGET], {"image": ImageFacts(width=64, height=64)}, options={"size": 16})


# -- hashes ------------------------------------------------------------------------------------------------------------

HASHER = ItemHasher("sha256", "a model")


def hash_of(facts, plan=None, **options):
    plan = plan or bind_images()
    (key,) = plan.outline([TARGET], {"image": facts}, hasher=HASHER, **options).hashes["image"]
    return key


def make_file(size=(4, 2), kind="PNG", **options):
    file = io.BytesIO()
    PILImage.new("RGB", size, (1, 2, 3)).save(file, kind, **options)
    return file.getvalue()


def test_a_file_has_a_hash_and_bare_facts_have_none():
    file = inspect_image_file(make_file())
    assert (file.width, file.height) == (4, 2)
    assert hash_of(file) == hash_of(file)
    assert hash_of(file) != hash_of(inspect_image_file(make_file(kind="BMP")))
    assert hash_of(file) != hash_of(file, options={"unit": 16})
    assert hash_of(ImageFacts(width=4, height=2)) is None


def test_an_item_with_a_uuid_has_its_hash_within_one_cache_salt():
    facts = ImageFacts(width=4, height=2)
    named = hash_of(facts, uuids={"image": ["a"]})
    assert named == hash_of(inspect_image_file(make_file()), uuids={"image": ["a"]})
    assert named != hash_of(facts, uuids={"image": ["b"]})
    assert named != hash_of(facts, uuids={"image": ["a"]}, cache_salt="tenant")


@pytest.mark.parametrize(
    ("uuids", "message"),
    [
        (["a", "b"], "spec.image, multi_modal_uuids: expected 1 uuid(s), got 2."),
        ([5], "spec.image[0]: expected a string in multi_modal_uuids, got int 5."),
    ],
)
def test_other_uuids_are_refused(uuids, message):
    with pytest.raises(InputError, match=re.escape(message)):
        hash_of(ImageFacts(width=4, height=2), uuids={"image": uuids})


def test_items_that_are_never_kept_have_no_hash():
    plan = bind_images(cacheable=False)
    assert hash_of(inspect_image_file(make_file()), plan) is None


def test_items_that_are_processed_together_have_a_hash_of_all_of_them():
    plan = bind_images(cacheable=item.count <= 1)
    file = inspect_image_file(make_file())

    def hash_all(*facts):
        return plan.outline([TARGET] * len(facts), {"image": facts}, hasher=HASHER).hashes["image"]

    first, second = hash_all(file, file)
    assert first.endswith("-1-of-2")
    assert second.endswith("-2-of-2")
    assert hash_all(file, ImageFacts(width=4, height=2)) == [None, None]


def test_options_that_json_lacks_give_no_hash():
    assert hash_of(inspect_image_file(make_file()), options={"other": {1}}) is None


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_orientation_of_a_file_exchanges_its_sides():
    exif = PILImage.Exif()
    exif[0x0112] = 6
    file = inspect_image_file(make_file((4, 2), "JPEG", exif=exif.tobytes()))
    assert (file.width, file.height) == (2, 4)


def test_a_file_with_more_than_8_bits_is_refused():
    data = io.BytesIO()
    PILImage.fromarray(np.zeros((2, 4), np.uint16)).save(data, "PNG")
    with pytest.raises(InputError, match="expected an image of 8 bits per channel, got mode I;16"):
        inspect_image_file(data.getvalue())


def test_bytes_of_no_image_are_refused():
    with pytest.raises(InputError, match="image: expected an image file, got UnidentifiedImageError"):
        inspect_image_file(b"no file")


def test_bytes_of_no_audio_are_refused():
    with pytest.raises(InputError, match="audio: expected a file of audio that soundfile decodes, got "):
        decode_audio_file(b"no file")


def test_audio_is_decoded_to_the_mean_of_its_channels():
    samples, rate = decode_audio_file((ROOT / "tests/data/media/stereo16.wav").read_bytes())
    assert samples.ndim == 1
    assert samples.dtype == np.float32
    assert rate > 0


# -- the process of a router -------------------------------------------------------------------------------------------

WITHOUT_OTHERS = """
import sys
from mmkit.plan.outline import ItemHasher, inspect_image_file
from examples.llava_like.spec import LLAVA_LIKE
print(sorted({"vllm", "transformers"} & {name.partition(".")[0] for name in sys.modules}))
"""


def test_neither_vllm_nor_transformers_is_imported_for_an_outline():
    result = subprocess.run([sys.executable, "-c", WITHOUT_OTHERS], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n", result.stderr

"""Items: one canonical form per value, complete validation, facts and candidates."""

import copy
import math
import sys
import warnings
from collections import UserDict
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage

from mmkit import Audio, Image, InputError, Record, Tensor, Text, Video, between, cfg, item, where
from mmkit.language.expr import Scope
from mmkit.language.items.base import flatten_options, select_options
from mmkit.language.items.memory import copy_if_shared

from .common import get_outcome

CONFIG = Scope(cfg=SimpleNamespace(n=2, d=3, big=100, size=[8, 4]))
PLACE = "spec.modality[3]"
FLOATS = ["float32", "float16", "bfloat16", "float64"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]


def bind_tensor(shape=(2, 3), **options):
    return Tensor(shape=shape, **options).bind(CONFIG)


ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
FRAMES = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
META = {"fps": 2.0, "total_num_frames": 2}
SOUND = np.array([0, 0.5, -0.25], np.float32)
PICTURE = PILImage.fromarray(PIXELS)
WRAPPED = SimpleNamespace(media=PICTURE, original_bytes=b"", getbands=PICTURE.getbands, copy=PICTURE.copy)
"""A picture with its bytes, as vLLM has it of a server."""

IMAGE = Image(largest=(cfg.size[0], cfg.size[1])).bind(CONFIG)
VIDEO = Video(largest=(2, 5, 4)).bind(CONFIG)
VIDEO_WITH_METADATA = replace(VIDEO, metadata=True)
AUDIO = Audio(largest=cfg.big, rate=16000).bind(CONFIG)
MATRIX = bind_tensor()
SCALAR = bind_tensor(shape=())
WORD = Text(most=cfg.d).bind(CONFIG)
CELL = Record(
    ids=Tensor((between(1, cfg.n),), "int64"), values=Tensor((item.ids.length, 2)), name=Text(most=cfg.d)
).bind(CONFIG)
BONDS = Record(bonds=Tensor((between(0, cfg.n), 2), "int64")).bind(CONFIG)
ONE_CELL = {"ids": [1.0, 2.0], "values": [[1, 2], [3, 4]], "name": "ab"}
CANONICAL_CELL = {"ids": torch.tensor([1, 2]), "values": torch.tensor([[1.0, 2], [3, 4]]), "name": "ab"}

# -- one form --------------------------------------------------------------------------------------------------------


def form_of(value):
    """Return everything of a canonical item that vLLM's hash sees."""
    if isinstance(value, tuple):
        return form_of(value[0]), repr(value[1])
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return [(name, form_of(part)) for name, part in value.items()]
    if isinstance(value, PILImage.Image):
        return value.mode, value.size, value.tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.flags.c_contiguous, value.tobytes()
    numbers = value.double().numpy().tobytes()
    return type(value), value.dtype, value.shape, value.stride(), value.device, value.requires_grad, numbers


def assert_one_form(kind, expected, forms):
    """Check that all of these are one item, with the expected form, and so is the canonical item itself."""
    for data in forms + [expected]:
        (value,) = kind.split(data, PLACE)
        assert form_of(kind.canonical(value, PLACE)) == form_of(expected), repr(data)


def list_containers(array, dtypes):
    """Return every array and tensor that holds the values of an array, of these dtypes too."""
    tensor = torch.from_numpy(array.copy())
    read_only = array.copy()
    read_only.flags.writeable = False
    reversed_axes = tuple(reversed(range(array.ndim)))
    transposed = torch.from_numpy(array.T.copy()).permute(reversed_axes)
    containers = [array, read_only, array.copy(order="F"), tensor, transposed]
    if array.ndim:
        backwards = np.ascontiguousarray(array[..., ::-1])
        doubled = np.repeat(array, 2, axis=-1)
        containers += [backwards[..., ::-1], doubled[..., ::2]]
    for dtype in dtypes:
        containers.append(tensor.to(getattr(torch, dtype)))
        if dtype != "bfloat16":
            containers.append(array.astype(dtype))
    if tensor.is_floating_point():
        parameter = torch.nn.Parameter(tensor)
        computed = tensor.requires_grad_() * 1
        containers += [parameter, computed]
    return containers


def quarter(number):
    return number / 4


shapes = st.lists(st.integers(0, 3), max_size=3)


@given(st.data(), shapes, st.sampled_from(FLOATS + INTEGERS))
def test_equal_numbers_have_one_form(data, shape, dtype):
    """Each value is exact in all these dtypes, so containers of different precision hold the same value."""
    size = math.prod(shape)
    kind = bind_tensor(shape=tuple(shape), dtype=dtype)
    numbers = st.integers(-128, 128).map(quarter) if dtype in FLOATS else st.integers(0, 100)
    values = data.draw(st.lists(numbers, min_size=size, max_size=size))
    array = np.array(values, np.float32).reshape(shape)

    forms = list_containers(array, FLOATS)
    if size:
        forms.append(array.tolist())
        if np.array_equal(array, np.trunc(array)):
            forms.append(array.astype(int).tolist())
            forms += list_containers(array.astype(np.int64), ["int16"])
    if dtype in INTEGERS:
        forms += list_containers(array.astype(int), INTEGERS)
        forms += [array.astype("u2"), array.astype("u4"), array.astype("u8")]
    assert_one_form(kind, torch.tensor(values, dtype=kind.torch_dtype).reshape(shape), forms)


PIXELS_BY_CHANNEL = np.moveaxis(PIXELS, -1, 0)
SOUNDS = list_containers(SOUND, ["float64", "float16", "bfloat16"]) + [SOUND.astype(">f4"), SOUND.tolist()]
PICTURES = list_containers(PIXELS, []) + list_containers(PIXELS_BY_CHANNEL, []) + [(PICTURE,)]
VIDEOS = [list(FRAMES), tuple(FRAMES), [PILImage.fromarray(frame) for frame in FRAMES], list(torch.tensor(FRAMES))]


@pytest.mark.parametrize(
    ("kind", "expected", "forms"),
    [
        (bind_tensor(shape=(2,), dtype="bool"), torch.tensor([True, False]), [np.array([True, False]), [True, False]]),
        (AUDIO, SOUND, SOUNDS),
        (AUDIO, SOUND, [(SOUND, 16000), (SOUND.tolist(), np.int64(16000)), [SOUND]]),
        (IMAGE, PICTURE, PICTURES),
        (IMAGE.for_function(), PICTURE, [PIXELS, PIXELS_BY_CHANNEL]),
        (VIDEO, FRAMES, VIDEOS),
        (CELL, CANONICAL_CELL, [ONE_CELL, (ONE_CELL,), dict(reversed(ONE_CELL.items())), [UserDict(ONE_CELL)]]),
        (MATRIX, torch.ones(2, 3), [torch.ones(2, 3, requires_grad=True)]),
        (WORD, "ab", [["ab"], ("ab",), np.array("ab")[()]]),
    ],
)
def test_equal_values_have_one_form(kind, expected, forms):
    """Without a warning: torch has one, once per process, for a tensor that requires a gradient."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_one_form(kind, expected, forms)
    finally:
        torch.set_warn_always(False)


def transpose(rows):
    return rows.T.clone().T


def take_first_column(rows):
    return rows[:, :1]


def make_negative_view(rows):
    return torch.complex(rows, -rows).conj().imag


FORMS = [
    torch.clone,
    torch.Tensor.double,
    torch.Tensor.to_sparse,
    torch.nn.Parameter,
    np.asarray,
    torch.Tensor.tolist,
    torch.Tensor.requires_grad_,
    transpose,
    take_first_column,
    make_negative_view,
]
NUMBERS = st.sampled_from([0.0, -1.5, 65504.0, 65505.0, math.nan, -math.inf])


@given(st.lists(st.tuples(st.sampled_from(FORMS), NUMBERS, st.integers(1, 4)), min_size=1, max_size=3))
def test_several_items_become_what_each_becomes_by_itself(descriptions):
    """Whatever their form, their shape and their values, and whichever is at fault."""
    kind = bind_tensor(shape=(between(1, 3), 2))
    values = []
    for make_form, number, rows in descriptions:
        values.append(make_form(torch.full((rows, 2), number)))

    def convert_one_by_one():
        return [form_of(kind.canonical(value, f"{PLACE}[{index}]")) for index, value in enumerate(values)]

    def convert_together():
        return [form_of(value) for value in kind.canonical_all(values, PLACE)]

    assert get_outcome(convert_together) == get_outcome(convert_one_by_one)


@pytest.mark.parametrize("data", [np.zeros((2, 3)), torch.zeros(2, 3), np.zeros((2, 3), np.float32)], ids=type)
def test_the_callers_data_is_not_changed(data):
    """Nor is an item with it, as where a robot writes the next observation into the same array."""
    data = copy.deepcopy(data)
    batch = [data] + MATRIX.split(data[None], PLACE)
    items = [MATRIX.canonical(data, PLACE)] + MATRIX.canonical_all(batch, PLACE)
    for tensor in items:
        tensor[0, 0] = 99
        assert data[0, 0] == 0

    data[0, 1] = 5
    for tensor in items:
        assert tensor[0, 1] == 0


@pytest.mark.parametrize(
    ("mode", "color", "gray"),
    [("RGBA", (9, 9, 9, 0), 255), ("RGBA", (9, 9, 9, 255), 9), ("LA", (9, 0), 255), ("P", 0, 0), ("L", 9, 9)],
)
def test_pictures_are_shown_in_rgb_upright_on_white(mode, color, gray):
    turned = PILImage.new(mode, (5, 4), color)
    turned.getexif()[0x0112] = 6  # held on its side
    image = IMAGE.canonical(turned, PLACE)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (4, 5), (gray, gray, gray))
    assert IMAGE.canonical(image, PLACE) == image


def test_other_images_stay_as_they_are():
    for value in (PICTURE, np.zeros((4, 5, 3)), np.zeros((4, 4, 5), np.uint8)):
        assert form_of(IMAGE.canonical(value, PLACE)) == form_of(value)
    assert IMAGE.canonical(WRAPPED, PLACE) is WRAPPED


FLOATING = np.ones((4, 5, 3), np.float32)
REWRITABLE = [
    (MATRIX, np.ones((2, 3), np.float32)),
    (MATRIX, torch.ones(2, 3)),
    (MATRIX, torch.ones(3, 2).T),
    (IMAGE, PILImage.new("RGB", (5, 4))),
    (IMAGE, np.ones((4, 5, 3), np.uint8)),
    (IMAGE, torch.ones(3, 4, 5, dtype=torch.uint8)),
    (IMAGE, FLOATING),
    (IMAGE, torch.from_numpy(FLOATING.copy())),
    (VIDEO, np.ones((2, 4, 5, 3), np.uint8)),
    (VIDEO, torch.ones(2, 4, 5, 3)),
    (VIDEO, [np.ones((4, 5, 3), np.uint8), np.ones((4, 5, 3), np.uint8)]),
    (VIDEO, [PILImage.new("RGB", (5, 4))]),
    (VIDEO_WITH_METADATA, (np.ones((1, 4, 5, 3), np.uint8), {"fps": 1.0, "frames_indices": [0]})),
    (AUDIO, np.ones(3, np.float32)),
    (AUDIO, np.ones(6, np.float32)[::2]),
    (AUDIO, torch.ones(3)),
    (AUDIO, (np.ones(3, np.float32), 16000)),
    (AUDIO, memoryview(np.ones(3, np.float32))),
    (AUDIO, [0.5, 0.25]),
    (CELL, {"ids": np.ones(2, np.int64), "values": torch.ones(2, 2), "name": "ab"}),
]
"""Items in memory that a caller may write to again."""


def overwrite(value):
    """Put other content into the memory of a caller's item."""
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(part, float):
                value[key] = 7.0
            else:
                overwrite(part)
    elif isinstance(value, list) and isinstance(value[0], int | float):
        value[:] = [7] * len(value)
    elif isinstance(value, list | tuple):
        for part in value:
            overwrite(part)
    elif isinstance(value, PILImage.Image):
        value.paste((7, 7, 7), (0, 0, value.width, value.height))
    elif not isinstance(value, int | float | str):
        np.asarray(value)[...] = 7


@pytest.mark.parametrize(("kind", "value"), REWRITABLE)
def test_what_a_caller_writes_later_changes_no_item(kind, value):
    (item,) = kind.canonical_all(kind.split([value], PLACE), PLACE)
    before = form_of(item)
    overwrite(value)
    assert form_of(item) == before


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (MATRIX, np.ones((2, 3))),
        (IMAGE, PILImage.new("L", (5, 4))),
        (VIDEO, [np.ones((4, 5, 3), np.uint8)]),
        (AUDIO, np.ones(3)),
    ],
)
def test_an_item_that_is_in_new_memory_is_not_copied_again(kind, value):
    converted = kind.convert(value, PLACE)
    assert copy_if_shared(value, converted) is converted


HAS_RESAMPLER = bool(find_spec("torchaudio") or find_spec("soxr"))
needs_resampler = pytest.mark.skipif(not HAS_RESAMPLER, reason="no library that resamples")


def make_tone(samples):
    """Return a second of 440 Hz in so many samples."""
    return np.sin(2 * np.pi * 440 * np.arange(samples) / samples)


def test_a_list_of_one_sample_is_one_recording():
    kind = Audio(largest=9, rate=16000).bind(CONFIG)
    assert kind.split([0.5], PLACE) == [[0.5]]
    assert kind.split([], PLACE) == []


@needs_resampler
@pytest.mark.parametrize("rate", [8000, 32000])
def test_resampling_keeps_the_seconds_and_the_tone(rate):
    """By whichever library there is."""
    kind = Audio(largest=32000, rate=16000).bind(CONFIG)
    samples = kind.canonical((make_tone(rate), rate), PLACE)
    assert samples.shape == (16000,)
    differences = np.abs(samples - make_tone(16000))
    assert differences[1000:-1000].max() < 0.01, "but for the ends"


@pytest.mark.parametrize("rate", [8000, 32000])
def test_resampling_without_a_library_is_refused(rate, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchaudio", None)
    monkeypatch.setitem(sys.modules, "torchaudio.functional", None)
    monkeypatch.setitem(sys.modules, "soxr", None)
    kind = Audio(largest=32000, rate=16000).bind(CONFIG)
    with pytest.raises(InputError, match=f"got {rate} Hz, and no library that resamples"):
        kind.canonical((make_tone(rate), rate), PLACE)


@needs_resampler
@given(st.integers(1, 400), st.sampled_from([4000, 8000, 11025, 22050, 44100, 48000]))
def test_one_rule_for_the_length_after_resampling(length, rate):
    """That of torchaudio, whichever library there is; a recording may be longer than the largest item."""
    kind = Audio(largest=9, rate=16000).bind(CONFIG)
    samples = kind.canonical((np.zeros(length), rate), PLACE)
    assert len(samples) == math.ceil(length * 16000 / rate)


def test_a_stated_length_holds_after_resampling():
    kind = Audio(largest=9, rate=16000, most=32).bind(CONFIG)
    with pytest.raises(InputError, match="at most 32 samples at 16000 Hz, got 34 of them from 17 at 8000 Hz"):
        kind.canonical((np.zeros(17), 8000), PLACE)


@given(st.floats(-9, 9, width=32), st.none() | st.floats(0.5, 20, width=32))
def test_samples_within_the_bound_are_accepted(value, bound):
    """The bound is 8 where the spec states none."""
    audio = Audio(9).bind(CONFIG)
    if bound is not None:
        audio = Audio(9, bound=bound).bind(CONFIG)
    samples = np.array([0.0, value])
    if abs(value) <= (bound or 8.0):
        assert audio.canonical(samples, PLACE).tolist() == [0.0, np.float32(value)]
    else:
        with pytest.raises(InputError, match=r"Scale them to -1\.\.1"):
            audio.canonical(samples, PLACE)


@given(st.floats(-9, 9, width=32))
def test_audio_without_a_bound_takes_any_finite_sample(value):
    audio = Audio(9, bound=None).bind(CONFIG)
    assert len(audio.canonical(np.array([0.0, value]), PLACE)) == 2


# -- bounds ----------------------------------------------------------------------------------------------------------


def assert_accepted(kind, value, forms):
    """Check that these forms of a number are one item."""
    assert_one_form(kind, torch.tensor(value, dtype=kind.torch_dtype), forms)


def assert_refused(kind, forms):
    for data in forms:
        with pytest.raises(InputError):
            kind.canonical(data, PLACE)


@given(
    st.floats(allow_nan=False) | st.sampled_from([math.nan, 0.1, 1.0, 65504.0]),
    st.sampled_from([0.1, 1000.0, 65504.0, math.inf]),
    st.sampled_from(FLOATS),
)
def test_floats_within_their_bound(value, limit, dtype):
    """It is rounded as values are: who clips to it in float32 is within it, as is what is within it when rounded."""
    kind = bind_tensor(shape=(), dtype=dtype, bound=limit)
    limit = min(limit, torch.finfo(kind.torch_dtype).max)
    limit = max(limit, float(torch.tensor(limit, dtype=kind.torch_dtype)))
    forms = [value, np.array(value)]
    if abs(value) <= limit:
        assert_accepted(kind, value, forms)
    else:
        assert_refused(kind, forms)
    assert kind.bind(CONFIG) == kind


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("bound", "largest"), [(None, math.inf), (math.inf, math.inf), (cfg.big, 100)])
def test_integers_within_their_bound(dtype, bound, largest):
    kind = bind_tensor(shape=(), dtype=dtype, bound=bound)
    limits = torch.iinfo(kind.torch_dtype)
    least = max(limits.min, -largest)
    most = min(limits.max, largest)
    for value in (least, most, least - 1, most + 1, 2**64 - 1, -(10**30)):
        forms = list_forms_of_integer(value)
        if least <= value <= most:
            assert_accepted(kind, value, forms)
        else:
            assert_refused(kind, forms)


def list_forms_of_integer(value):
    """Return the number itself, and as a float and as arrays that hold it exactly."""
    forms = [value]
    if float(value) == value:
        forms.append(float(value))
    for dtype in ("i8", "u8"):
        limits = np.iinfo(dtype)
        if limits.min <= value <= limits.max:
            forms.append(np.array(value, dtype))
    return forms


@given(st.integers(0, 3), st.integers(0, 4))
def test_indices_of_an_earlier_part(least, more):
    """A bond joins atoms that are there."""
    atoms = Tensor((between(1, 5),), "int64", bound=between(least, least + more))
    bonds = Tensor((between(1, 5), 2), "int8", bound=between(0, item.atoms.length - 1))
    kind = Record(atoms=atoms, bonds=bonds).bind(CONFIG)
    assert {least} == set(kind.candidates()[0]["atoms"].tolist())
    assert kind.canonical({"atoms": [least, least + more], "bonds": [[0, 1]]}, PLACE)["bonds"].tolist() == [[0, 1]]
    with pytest.raises(InputError, match=r"bonds: expected int8 values from 0 to 1, got 2 at \[0, 1\]\."):
        kind.canonical({"atoms": [least, least], "bonds": [[0, 2]]}, PLACE)
    with pytest.raises(InputError, match=rf"atoms: expected int64 values from {least} to {least + more}"):
        kind.canonical({"atoms": [least - 1], "bonds": [[0, 0]]}, PLACE)


@given(st.integers(-3, 0), st.integers(0, 4))
def test_an_index_that_stands_for_none(least, most):
    """A node of a template has the id -1 where the graph has none."""
    kind = Record(nodes=Tensor((3,), "int64", bound=between(least, most)), text=Text(3)).bind(CONFIG)
    tensors = [record["nodes"] for record in kind.candidates() + kind.small()]
    assert {0} == {value for tensor in tensors for value in tensor.tolist()}
    for value in (least, most):
        assert kind.canonical({"nodes": [value] * 3, "text": "a"}, PLACE)["nodes"].tolist() == [value] * 3
    for value in (least - 1, most + 1):
        with pytest.raises(InputError, match=rf"nodes: expected int64 values from {least} to {most}, got {value} at"):
            kind.canonical({"nodes": [0, value, 0], "text": "a"}, PLACE)
    drawn = kind.random((3, 1), np.random.default_rng(0))["nodes"]
    assert least <= int(drawn.min()) <= int(drawn.max()) <= most
    assert kind.schema()["parts"]["nodes"]["values"] == [least, most]


def lists_and_objects(values):
    return st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=2), values, max_size=2)


json_scalars = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3)
json_values = st.recursive(json_scalars, lists_and_objects, max_leaves=12)
dtypes_of_numpy = st.sampled_from(["f2", "f4", "f8", ">f4", "i4", "u2", "bool", "c8", "U3", "O", "g"])


@st.composite
def arrays(draw):
    return np.ones(draw(shapes)).astype(draw(dtypes_of_numpy))


@st.composite
def lists_of_two_arrays(draw):
    array = draw(arrays())
    return [array, array]


@given(json_values | arrays() | lists_of_two_arrays())
def test_whatever_is_sent_is_canonical_or_refused(data):
    kind = bind_tensor(shape=(between(1, 3), 2))
    try:
        items = [kind.canonical(value, PLACE) for value in kind.split(data, PLACE)]
    except InputError:
        return
    for tensor in items:
        assert tensor.dtype == torch.float32
        assert tensor.shape in ((1, 2), (2, 2), (3, 2))
        assert torch.isfinite(tensor).all()


# -- one item, several, a batch --------------------------------------------------------------------------------------


TWO = dict(shape=(2, 3), length=2)
PAIR = dict(shape=(2,), length=2)
NUMBER = dict(shape=(), length=1)
SIZE = dict(width=5, height=4)
FILM = dict(SIZE, frames=2, metadata=None)
FILM_OF_ONE_FRAME = dict(FILM, frames=1)
FILM_WITH_METADATA = dict(FILM, metadata=META)
CELL_FACTS = dict(
    ids=SimpleNamespace(shape=(2,), length=2),
    values=SimpleNamespace(shape=(2, 2), length=2),
    name=SimpleNamespace(length=2, text="ab"),
)
NO_BONDS = dict(bonds=SimpleNamespace(shape=(0, 2), length=0))
PICTURES_WITHOUT_PIL = [
    PIXELS,
    PICTURE.convert("L"),
    WRAPPED,
    np.zeros((4, 5, 4), np.uint8),
    np.zeros((1, 4, 5)),
    np.zeros((4, 5, 1), "f4"),
    torch.zeros(3, 4, 5),
    torch.zeros(4, 5, 3).bfloat16(),
    torch.zeros(4, 5, 3, requires_grad=True),
]
FILMS_WITH_METADATA = [
    (FRAMES, META),
    [SimpleNamespace(media=(FRAMES, META))],
    [(SimpleNamespace(media=FRAMES), META)],
]
LISTS_OF_NO_BONDS = [
    {"bonds": []},
    {"bonds": ()},
    {"bonds": np.zeros((0, 2), int)},
    {"bonds": np.zeros((0, 2), "u8")},
]


@pytest.mark.parametrize(
    ("kind", "count", "facts", "forms"),
    [
        (MATRIX, 0, TWO, [[], (), torch.zeros(0, 2, 3)]),
        (MATRIX, 2, TWO, [[ROWS, ROWS], [ROWS, np.array(ROWS)], torch.zeros(2, 2, 3)]),
        (MATRIX, 3, TWO, [(ROWS, ROWS, ROWS), [np.array(ROWS), torch.tensor(ROWS), ROWS], np.array([ROWS] * 3)]),
        (SCALAR, 1, NUMBER, [3.0, [3.0], np.float64(3), np.zeros(())]),
        (SCALAR, 2, NUMBER, [[3.0, 3], np.zeros(2), list(torch.zeros(2))]),
        (BONDS, 1, NO_BONDS, LISTS_OF_NO_BONDS),
        (CELL, 2, CELL_FACTS, [[ONE_CELL, ONE_CELL]]),
        (WORD, 2, dict(length=2, text="ab"), [["ab", "ab"]]),
        (WORD, 2, dict(length=2, text="\U0001f600b"), [["\U0001f600b"] * 2]),
        (bind_tensor(shape=(2,)), 1, PAIR, [list(np.ones(2, "f4")), list(np.ones(2, "f2")), [0, 1]]),
        (IMAGE, 1, SIZE, PICTURES_WITHOUT_PIL),
        (IMAGE, 2, SIZE, [[PICTURE, PICTURE], np.stack([PIXELS] * 2), torch.zeros(2, 3, 4, 5)]),
        (VIDEO, 0, FILM, [[]]),
        (VIDEO, 1, FILM, [(PICTURE, PICTURE), (FRAMES, None), [FRAMES], torch.zeros(2, 3, 4, 5)]),
        (VIDEO, 1, FILM_OF_ONE_FRAME, [(PICTURE,), [PICTURE], FRAMES[:1]]),
        (VIDEO, 1, FILM, [(FRAMES, META)]),
        (VIDEO_WITH_METADATA, 1, FILM_WITH_METADATA, FILMS_WITH_METADATA),
        (VIDEO, 2, FILM, [np.stack([FRAMES] * 2), [list(FRAMES), list(FRAMES)]]),
        (VIDEO_WITH_METADATA, 2, FILM_WITH_METADATA, [[(FRAMES, META), (FRAMES, META)]]),
        (AUDIO, 2, dict(length=3), [np.zeros((2, 3)), [(SOUND, 16000), SOUND], (SOUND, SOUND)]),
        (AUDIO, 2, dict(length=1), [[[0.0], [0.5]]]),
    ],
)
def test_data_is_split_into_items(kind, count, facts, forms):
    for data in forms:
        items = kind.canonical_all(kind.split(data, PLACE), PLACE)
        assert len(items) == count
        for value in items:
            assert kind.facts(value, 4) == SimpleNamespace(index=4, **facts)


@pytest.mark.parametrize(
    ("kind", "data"),
    [(MATRIX, ROWS), (IMAGE, PICTURE), (VIDEO, FRAMES), (AUDIO, SOUND), (CELL, ONE_CELL), (WORD, "ab")],
)
def test_splitting_keeps_none_for_items_that_a_uuid_names(kind, data):
    assert kind.split([None], PLACE) == [None]
    items = kind.canonical_all(kind.split([data, None, data], PLACE), PLACE)
    assert [value is None for value in items] == [False, True, False]


# -- sizes and facts -------------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 6))
def test_between_includes_both_ends(least, more, length):
    kind = bind_tensor(shape=(between(least, least + more), cfg.d))
    value = torch.zeros(length, 3)
    if least <= length <= least + more:
        assert_one_form(kind, value, [value])
    else:
        with pytest.raises(InputError, match=f"got shape \\({length}, 3\\)"):
            kind.canonical(value, PLACE)
    assert [tuple(value.shape) for value in kind.smallest()] == [(least, 3)]
    assert [tuple(value.shape) for value in kind.candidates()] == [(least + more, 3)]


def return_two(scope):
    return 2


def return_five(scope):
    return 5


def test_the_expected_shape_is_told_in_numbers():
    assert bind_tensor(shape=(cfg.n, between(1, cfg.d * 2))).expected == "a (2, 1..6) float32 tensor"


def test_functions_of_a_scope_stand_for_values():
    assert bind_tensor(shape=(return_two,), bound=return_five) == bind_tensor(shape=[cfg.n], bound=5)
    assert Audio(largest=4, rate=return_five).bind(CONFIG).rate == 5


def test_lists_and_tuples_are_equal_in_declarations():
    assert hash(Tensor(shape=[cfg.n, 3])) == hash(Tensor(shape=(cfg.n, 3)))
    assert hash(Image(largest=[(1, 2)])) == hash(Image(largest=((1, 2),)))


@pytest.mark.parametrize(
    ("records", "length"), [(CELL.candidates(), 2), (CELL.small(), 1), (CELL.smallest(), 1)], ids=repr
)
def test_parts_of_a_record_that_mmkit_makes_fit_each_other(records, length):
    (record,) = records
    assert len(CELL.canonical(record, PLACE)["values"]) == length


def test_binding_again_changes_nothing():
    assert CELL.bind(CONFIG) == CELL


def test_an_image_of_a_function_has_the_same_source():
    assert repr(IMAGE.for_function()) == repr(IMAGE)


def test_the_schema_of_a_tensor():
    assert MATRIX.schema() == {"shape": [2, 3], "dtype": "float32"}
    indices = bind_tensor(shape=(between(1, cfg.n),), dtype="int64", bound=between(0, cfg.d))
    assert indices.schema() == {"shape": [[1, 2]], "dtype": "int64", "values": [0, 3]}


def get_alphabet(scope):
    return "AB"


def repeat_b(scope):
    return "B" * scope.cfg.d


def list_two_sizes(scope):
    return [(1, 2), (3, 4)]


@pytest.mark.parametrize(
    ("kind", "candidates", "half", "small"),
    [
        (Text(most=3), ["aaa"], ["a"], ["a"]),
        (Text(most=8, least=2, alphabet="ACGTN"), ["ACGTNACG"], ["ACGT"], ["AC"]),
        (Text(most=8, alphabet="ACGTN", largest="N" * 8), ["NNNNNNNN"], ["NNNN"], ["N"]),
        (Text(most=8, largest="CC(=O)O"), ["CC(=O)O"], ["CC("], ["C"]),
        (Text(most=cfg.big, least=0, largest=["", "CCO", "CCN"]), ["", "CCO", "CCN"], ["", "C", "C"], [""]),
        (Text(most=3, alphabet=get_alphabet, largest=repeat_b), ["BBB"], ["B"], ["B"]),
    ],
)
def test_texts_that_mmkit_makes(kind, candidates, half, small):
    """Binding and the laws make them; a text that the spec states comes first."""
    kind = kind.bind(CONFIG)
    assert kind.bind(CONFIG) == kind
    assert kind.candidates() == candidates
    assert kind.candidates(0.5) == half
    assert kind.small() == small
    for text in candidates + half + small:
        assert kind.canonical(text, PLACE) == text


def test_letters_of_a_text():
    kind = Text(most=4, alphabet="ACGTN").bind(CONFIG)
    sentence = f"{PLACE}: expected a text of 1..4 characters among 'ACGTN', got"
    assert kind.canonical("ACGN", PLACE) == "ACGN"
    assert get_outcome(kind.canonical, "ACga", PLACE) == f"{sentence} 'g' at 2."
    assert get_outcome(kind.canonical, "ACGTN", PLACE) == f"{sentence} 5 of them."
    assert kind.schema() == {"shape": [[1, 4]], "dtype": "text", "alphabet": "ACGTN"}


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Tensor(shape=(between(1, 4), cfg.d), largest=[(1, cfg.d), (cfg.n, 3)]), [(1, 3), (2, 3)]),
        (Image(largest=cfg.size), [(4, 8, 3)]),
        (Image(largest=[(cfg.n, 4), (1, cfg.d)]), [(4, 2, 3), (3, 1, 3)]),
        (Image(largest=list_two_sizes), [(2, 1, 3), (4, 3, 3)]),
        (Image(largest=(where(cfg.n > 1, 7, 1), 3)), [(3, 7, 3)]),
        (Video(largest=[(1, 2, 3), (4, 5, 6)]), [(1, 3, 2, 3), (4, 6, 5, 3)]),
        (Audio(largest=cfg.big, rate=cfg.d), [(100,)]),
    ],
)
def test_the_largest_items_are_blank(kind, shapes):
    kind = kind.bind(CONFIG)
    assert kind.bind(CONFIG) == kind, "binding again changes nothing"
    for candidate, shape in zip(kind.candidates(), shapes, strict=True):
        assert form_of(kind.canonical(candidate, PLACE)) == form_of(candidate)
        assert np.asarray(candidate).shape == shape
        blank = 255 if isinstance(kind, Image) else 0
        assert np.unique(np.asarray(candidate)).tolist() == [blank]


@pytest.mark.parametrize("kind", [Tensor((3, 4), dtype="int16"), IMAGE, Audio(9), Video(largest=(2, 5, 4))], ids=repr)
def test_the_bytes_of_an_item_are_those_of_its_numbers(kind):
    kind = kind.bind(CONFIG)
    (blank,) = kind.candidates()
    canonical = kind.canonical(blank, PLACE)
    num_bytes = canonical.nbytes if hasattr(canonical, "nbytes") else np.asarray(canonical).nbytes
    assert kind.num_bytes(kind.sizes(canonical)) == num_bytes


def test_random_items_take_the_values_of_their_type():
    generator = np.random.default_rng(0)
    assert set(Tensor((64,), dtype="bool").bind(CONFIG).random((64,), generator).tolist()) == {False, True}
    samples = Audio(512).bind(CONFIG).random((512,), generator)
    assert -1 <= samples.min() < -0.5
    assert 0.5 < samples.max() <= 1


@pytest.mark.parametrize("width", [2, 3, 4, 6, 8])
def test_the_rows_of_a_large_random_array_differ(width):
    rows = Tensor((3000, width)).bind(CONFIG).random((3000, width), np.random.default_rng(0))
    assert len(rows.unique(dim=0)) == 3000


@pytest.mark.parametrize(("fraction", "shape"), [(1, (8, 9, 6, 3)), (0.5, (4, 9, 6, 3)), (0.06, (1, 4, 2, 3))])
def test_a_smaller_video_has_fewer_frames(fraction, shape):
    (video,) = Video(largest=(8, 6, 9)).bind(CONFIG).candidates(fraction)
    assert video.shape == shape


OPTIONS = {"size": 1, "n": 2, "common_kwargs": {"size": 3}, "images_kwargs": {"size": 4}, "audio_kwargs": None}


@pytest.mark.parametrize(("kind", "size"), [(Tensor((2,)), 3), (AUDIO, 3), (IMAGE, 4)])
def test_options_of_a_scope_override_those_of_all(kind, size):
    assert flatten_options(kind, OPTIONS) == {"size": size, "n": 2}


def test_options_of_other_items_are_left_out():
    without_images = dict(OPTIONS)
    del without_images["images_kwargs"]
    assert select_options(AUDIO, OPTIONS) == without_images
    assert select_options(Tensor((2,)), OPTIONS) == OPTIONS


def test_options_of_a_scope_are_a_dict():
    sentence = r"^mm_processor_kwargs\['images_kwargs'\]: expected a dict of options, got 4\.$"
    with pytest.raises(InputError, match=sentence):
        flatten_options(IMAGE, {"images_kwargs": 4})


def test_metadata_where_it_is_required():
    ((video, metadata),) = Video(largest=(2, 5, 4), metadata=True).bind(CONFIG).candidates()
    assert video.shape == FRAMES.shape
    assert metadata == {"fps": 1.0, "duration": 2.0, "total_num_frames": 2, "frames_indices": [0, 1]}


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 30))
def test_sizes_within_bounds(largest, more, size):
    """The nearest size is accepted, whatever is asked for; a size that is accepted is its own nearest."""
    most = largest + more
    audio = Audio(largest, most=most).bind(CONFIG)
    (near,) = audio.nearest([size])
    assert 1 <= near <= most
    assert (near == size) == (1 <= size <= most)
    with pytest.raises(InputError, match=f"of at most {most} samples, got {most + 1} samples"):
        audio.canonical(np.zeros(most + 1), PLACE)

    blanks = audio.small() + audio.smallest() + audio.candidates() + [audio.blank(near)]
    for blank in blanks:
        assert len(audio.canonical(blank, PLACE)) == len(blank)
    (smaller,) = audio.within({"length": near}, PLACE).candidates()
    assert len(smaller) == min(near, largest)

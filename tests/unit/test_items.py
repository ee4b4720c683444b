"""Items: one canonical form per value, complete validation, facts and candidates."""

import math
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
AT = "spec.modality[3]"
FLOATS, INTEGERS = ["float32", "float16", "bfloat16", "float64"], ["uint8", "int8", "int16", "int32", "int64"]


def bound(**options):
    return Tensor(**{"shape": (2, 3), **options}).bind(CONFIG)


ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
FRAMES = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
META = {"fps": 2.0, "total_num_frames": 2}
SOUND = np.array([0, 0.5, -0.25], np.float32)
PICTURE = PILImage.fromarray(PIXELS)
WRAPPED = SimpleNamespace(media=PICTURE, original_bytes=b"", getbands=PICTURE.getbands, copy=PICTURE.copy)
IMAGE = Image(largest=(cfg.size[0], cfg.size[1])).bind(CONFIG)
VIDEO = Video(largest=(2, 5, 4)).bind(CONFIG)
AUDIO = Audio(largest=cfg.big, rate=16000).bind(CONFIG)
MATRIX, SCALAR, WORD = bound(), bound(shape=()), Text(most=cfg.d).bind(CONFIG)
IDS, VALUES = Tensor((between(1, cfg.n),), "int64"), Tensor((item.ids.length, 2))
CELL = Record(ids=IDS, values=VALUES, name=Text(most=cfg.d)).bind(CONFIG)
BONDS = Record(bonds=Tensor((between(0, cfg.n), 2), "int64")).bind(CONFIG)
ONE_CELL = {"ids": [1.0, 2.0], "values": [[1, 2], [3, 4]], "name": "ab"}
FIRST_CELL = {"ids": torch.tensor([1, 2]), "values": torch.tensor([[1.0, 2], [3, 4]]), "name": "ab"}

# -- one form --------------------------------------------------------------------------------------------------------


def form(value):
    """Everything of a canonical item that vLLM's hash sees."""
    if isinstance(value, tuple):
        return form(value[0]), repr(value[1])
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return [(name, form(part)) for name, part in value.items()]
    if isinstance(value, PILImage.Image):
        return value.mode, value.size, value.tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.flags.c_contiguous, value.tobytes()
    about = type(value), value.dtype, value.shape, value.stride(), value.device, value.requires_grad
    return *about, value.double().numpy().tobytes()


def assert_one_form(kind, expected, forms):
    """All of these are one item, with the expected form; so is the canonical item itself."""
    for data in (*forms, expected):
        (value,) = kind.split(data, AT)
        assert form(kind.canonical(value, AT)) == form(expected), repr(data)


def containers(array, dtypes):
    """Every array and tensor that holds the values of an array, of these dtypes too."""
    read_only, tensor = array.copy(), torch.from_numpy(array.copy())
    read_only.flags.writeable = False
    transposed = torch.from_numpy(array.T.copy()).permute(tuple(range(array.ndim))[::-1])
    yield from (array, read_only, array.copy(order="F"), tensor, transposed)
    if array.ndim:
        yield from (np.ascontiguousarray(array[..., ::-1])[..., ::-1], np.repeat(array, 2, axis=-1)[..., ::2])
    for dtype in dtypes:
        yield tensor.to(getattr(torch, dtype))
        if dtype != "bfloat16":
            yield array.astype(dtype)
    if tensor.is_floating_point():
        yield from (torch.nn.Parameter(tensor), tensor.requires_grad_() * 1)


shapes = st.lists(st.integers(0, 3), max_size=3)


@given(st.data(), shapes, st.sampled_from(FLOATS + INTEGERS))
def test_equal_numbers_have_one_form(data, shape, dtype):
    """Each value is exact in all these dtypes, so containers of different precision hold the same value."""
    size, kind = math.prod(shape), bound(shape=tuple(shape), dtype=dtype)
    quarters = st.integers(-128, 128).map(lambda n: n / 4) if dtype in FLOATS else st.integers(0, 100)
    values = data.draw(st.lists(quarters, min_size=size, max_size=size))
    array = np.array(values, np.float32).reshape(shape)
    forms = [*containers(array, FLOATS), *([array.tolist()] if size else [])]
    if size and np.array_equal(array, np.trunc(array)):
        forms += [array.astype(int).tolist(), *containers(array.astype(np.int64), ["int16"])]
    if dtype in INTEGERS:
        forms += [*containers(array.astype(int), INTEGERS), *map(array.astype, ("u2", "u4", "u8"))]
    assert_one_form(kind, torch.tensor(values, dtype=kind.torch_dtype).reshape(shape), forms)


@pytest.mark.parametrize(
    ("kind", "expected", "forms"),
    [
        (bound(shape=(2,), dtype="bool"), torch.tensor([True, False]), [np.array([True, False]), [True, False]]),
        (AUDIO, SOUND, [*containers(SOUND, ["float64", "float16", "bfloat16"]), SOUND.astype(">f4"), SOUND.tolist()]),
        (AUDIO, SOUND, [(SOUND, 16000), (SOUND.tolist(), np.int64(16000)), [SOUND]]),
        (IMAGE, PICTURE, [*containers(PIXELS, []), *containers(np.moveaxis(PIXELS, -1, 0), []), (PICTURE,)]),
        (IMAGE.for_function(), PICTURE, [PIXELS, np.moveaxis(PIXELS, -1, 0)]),
        (VIDEO, FRAMES, [list(FRAMES), tuple(FRAMES), list(map(PILImage.fromarray, FRAMES)), [*torch.tensor(FRAMES)]]),
        (CELL, FIRST_CELL, [ONE_CELL, (ONE_CELL,), dict(reversed(ONE_CELL.items())), [UserDict(ONE_CELL)]]),
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


FORMS = [torch.clone, torch.Tensor.double, torch.Tensor.to_sparse, torch.nn.Parameter, np.asarray, torch.Tensor.tolist]
FORMS += [torch.Tensor.requires_grad_, lambda rows: rows.T.clone().T]
FORMS += [lambda rows: rows[:, :1], lambda rows: torch.complex(rows, -rows).conj().imag]
NUMBERS = st.sampled_from([0.0, -1.5, 65504.0, 65505.0, math.nan, -math.inf])


@given(st.lists(st.tuples(st.sampled_from(FORMS), NUMBERS, st.integers(1, 4)), min_size=1, max_size=3))
def test_several_are_taken_as_each_alone(drawn):
    """Whatever their form, their shape and their values, and whichever is at fault."""
    kind = bound(shape=(between(1, 3), 2))
    values = [make(torch.full((rows, 2), number)) for make, number, rows in drawn]

    alone = get_outcome(lambda: [form(kind.canonical(value, f"{AT}[{i}]")) for i, value in enumerate(values)])
    assert get_outcome(lambda: [*map(form, kind.canonical_all(values, AT))]) == alone


def test_the_callers_data_is_not_changed():
    """Nor is an item with it, as where a robot writes the next observation into the same array."""
    for data in (np.zeros((2, 3)), torch.zeros(2, 3), np.zeros((2, 3), np.float32)):
        items = MATRIX.canonical(data, AT), *MATRIX.canonical_all([data, *MATRIX.split(data[None], AT)], AT)
        for own in items:
            own[0, 0] = 99
            assert data[0, 0] == 0
        data[0, 1] = 5
        assert all(own[0, 1] == 0 for own in items)


@pytest.mark.parametrize(
    ("mode", "color", "shown"),
    [("RGBA", (9, 9, 9, 0), 255), ("RGBA", (9, 9, 9, 255), 9), ("LA", (9, 0), 255), ("P", 0, 0), ("L", 9, 9)],
)
def test_pictures_are_shown_in_rgb_upright_on_white(mode, color, shown):
    turned = PILImage.new(mode, (5, 4), color)
    turned.getexif()[0x0112] = 6  # held on its side
    image = IMAGE.canonical(turned, AT)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (4, 5), (shown,) * 3)
    assert IMAGE.canonical(image, AT) == image


def test_other_images_stay_as_they_are():
    for value in (PICTURE, np.zeros((4, 5, 3)), np.zeros((4, 4, 5), np.uint8)):
        assert form(IMAGE.canonical(value, AT)) == form(value)
    assert IMAGE.canonical(WRAPPED, AT) is WRAPPED


FLOATING = np.ones((4, 5, 3), np.float32)
FILMED = replace(VIDEO, metadata=True)
WRITTEN = [
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
    (FILMED, (np.ones((1, 4, 5, 3), np.uint8), {"fps": 1.0, "frames_indices": [0]})),
    (AUDIO, np.ones(3, np.float32)),
    (AUDIO, np.ones(6, np.float32)[::2]),
    (AUDIO, torch.ones(3)),
    (AUDIO, (np.ones(3, np.float32), 16000)),
    (AUDIO, memoryview(np.ones(3, np.float32))),
    (AUDIO, [0.5, 0.25]),
    (CELL, {"ids": np.ones(2, np.int64), "values": torch.ones(2, 2), "name": "ab"}),
]


def overwrite(value):
    """Put other content into the memory of a caller's item."""
    if isinstance(value, dict):
        for key, part in value.items():
            value[key] = 7.0 if isinstance(part, float) else overwrite(part)
    elif isinstance(value, list) and isinstance(value[0], int | float):
        value[:] = [7] * len(value)
    elif isinstance(value, list | tuple):
        for part in value:
            overwrite(part)
    elif isinstance(value, PILImage.Image):
        value.paste((7, 7, 7), (0, 0, *value.size))
    elif not isinstance(value, int | float | str):
        np.asarray(value)[...] = 7
    return value


@pytest.mark.parametrize(("kind", "value"), WRITTEN)
def test_what_a_caller_writes_later_changes_no_item(kind, value):
    (item,) = kind.canonical_all(kind.split([value], AT), AT)
    before = form(item)
    overwrite(value)
    assert form(item) == before


@pytest.mark.parametrize("kind", [MATRIX, IMAGE, VIDEO, AUDIO])
def test_an_item_that_is_in_new_memory_is_not_copied_again(kind):
    values = {
        MATRIX: np.ones((2, 3)),
        IMAGE: PILImage.new("L", (5, 4)),
        VIDEO: [np.ones((4, 5, 3), np.uint8)],
        AUDIO: np.ones(3),
    }
    converted = kind.convert(values[kind], AT)
    assert copy_if_shared(values[kind], converted) is converted


@pytest.mark.parametrize("rate", [8000, 32000])
def test_resampling(rate):
    """By whichever library there is: as many seconds of the same tone, or a sentence."""
    kind = Audio(largest=32000, rate=16000).bind(CONFIG)
    tone, wanted = (np.sin(2 * np.pi * 440 * np.arange(count) / count) for count in (rate, 16000))
    if any(map(find_spec, ("torchaudio", "soxr"))):
        samples = kind.canonical((tone, rate), AT)
        assert samples.shape == (16000,)
        assert np.abs(samples - wanted)[1000:-1000].max() < 0.01
    else:
        with pytest.raises(InputError, match=f"got {rate} Hz, and no library that resamples"):
            kind.canonical((tone, rate), AT)


@given(st.integers(1, 400), st.sampled_from([4000, 8000, 11025, 22050, 44100, 48000]))
def test_one_rule_for_the_length_after_resampling(length, rate):
    """That of torchaudio, whichever library there is; a recording may be longer than the largest item."""
    if not any(map(find_spec, ("torchaudio", "soxr"))):
        pytest.skip("no library that resamples")
    kind = Audio(largest=9, rate=16000).bind(CONFIG)
    samples = kind.canonical((np.zeros(length), rate), AT)
    assert len(samples) == math.ceil(length * 16000 / rate)


def test_a_stated_length_holds_after_resampling():
    kind = Audio(largest=9, rate=16000, most=32).bind(CONFIG)
    with pytest.raises(InputError, match="at most 32 samples at 16000 Hz, got 34 of them from 17 at 8000 Hz"):
        kind.canonical((np.zeros(17), 8000), AT)


@given(st.floats(-9, 9, width=32), st.none() | st.floats(0.5, 20, width=32))
def test_samples_are_scaled(value, bound):
    """Or refused; None takes any finite value."""
    options = {} if bound is None else {"bound": bound}
    samples = np.array([0.0, value])
    audio = Audio(9, **options).bind(CONFIG)
    if abs(value) <= (bound or 8.0):
        assert audio.canonical(samples, AT).tolist() == [0.0, np.float32(value)]
    else:
        with pytest.raises(InputError, match=r"Scale them to -1\.\.1"):
            audio.canonical(samples, AT)
    assert len(Audio(9, bound=None).bind(CONFIG).canonical(samples, AT)) == 2


# -- bounds ----------------------------------------------------------------------------------------------------------


def assert_taken(kind, value, is_item, forms):
    """All of these are one item, or refused."""
    if is_item:
        return assert_one_form(kind, torch.tensor(value, dtype=kind.torch_dtype), forms)
    for data in forms:
        with pytest.raises(InputError):
            kind.canonical(data, AT)


@given(
    st.floats(allow_nan=False) | st.sampled_from([math.nan, 0.1, 1.0, 65504.0]),
    st.sampled_from([(limit, dtype) for limit in (0.1, 1000.0, 65504.0, math.inf) for dtype in FLOATS]),
)
def test_floats_within_their_bound(value, bounded):
    """It is rounded as values are: who clips to it in float32 is within it, as is what is within it when rounded."""
    limit, dtype = bounded
    kind = bound(shape=(), dtype=dtype, bound=limit)
    limit = min(limit, torch.finfo(kind.torch_dtype).max)
    limit = max(limit, float(torch.tensor(limit, dtype=kind.torch_dtype)))
    assert_taken(kind, value, abs(value) <= limit, [value, np.array(value)])
    assert kind.bind(CONFIG) == kind


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("limit", "stated"), [(None, math.inf), (math.inf, math.inf), (cfg.big, 100)])
def test_integers_within_their_bound(dtype, limit, stated):
    kind = bound(shape=(), dtype=dtype, bound=limit)
    limits = torch.iinfo(kind.torch_dtype)
    least, most = max(limits.min, -stated), min(limits.max, stated)
    for value in (least, most, least - 1, most + 1, 2**64 - 1, -(10**30)):
        forms = [value, *([float(value)] if float(value) == value else [])]
        forms += [
            np.array(value, dtype) for dtype in ("i8", "u8") if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
        ]
        assert_taken(kind, value, least <= value <= most, forms)


@given(st.integers(0, 3), st.integers(0, 4))
def test_indices_of_an_earlier_part(least, more):
    """A bond joins atoms that are there."""
    atoms = Tensor((between(1, 5),), "int64", bound=between(least, least + more))
    bonds = Tensor((between(1, 5), 2), "int8", bound=between(0, item.atoms.length - 1))
    kind = Record(atoms=atoms, bonds=bonds).bind(CONFIG)
    assert {least} == set(kind.candidates()[0]["atoms"].tolist())
    assert kind.canonical({"atoms": [least, least + more], "bonds": [[0, 1]]}, AT)["bonds"].tolist() == [[0, 1]]
    with pytest.raises(InputError, match=r"bonds: expected int8 values from 0 to 1, got 2 at \[0, 1\]\."):
        kind.canonical({"atoms": [least, least], "bonds": [[0, 2]]}, AT)
    with pytest.raises(InputError, match=rf"atoms: expected int64 values from {least} to {least + more}"):
        kind.canonical({"atoms": [least - 1], "bonds": [[0, 0]]}, AT)


json_like = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)
odd_dtypes = st.sampled_from(["f2", "f4", "f8", ">f4", "i4", "u2", "bool", "c8", "U3", "O", "g"])
odd_arrays = st.builds(lambda shape, dtype: np.ones(shape).astype(dtype), shapes, odd_dtypes)


@given(json_like | odd_arrays | odd_arrays.map(lambda a: [a, a]))
def test_whatever_is_sent_is_canonical_or_refused(data):
    kind = bound(shape=(between(1, 3), 2))
    try:
        items = [kind.canonical(value, AT) for value in kind.split(data, AT)]
    except InputError:
        return
    for tensor in items:
        assert tensor.dtype == torch.float32
        assert tensor.shape in ((1, 2), (2, 2), (3, 2))
        assert torch.isfinite(tensor).all()


# -- one item, several, a batch --------------------------------------------------------------------------------------


TWO, PAIR, SHAPED = dict(shape=(2, 3), length=2), dict(shape=(2,), length=2), dict(width=5, height=4)
SEEN, SHOWN = dict(SHAPED, frames=2, metadata=None), dict(SHAPED, frames=2, metadata=META)
PARTS = dict(ids=PAIR, values=dict(shape=(2, 2), length=2), name=dict(length=2))
CELL_FACTS = {name: SimpleNamespace(**part) for name, part in PARTS.items()}
NO_BONDS = dict(bonds=SimpleNamespace(shape=(0, 2), length=0))
OTHER_PICTURES = [np.zeros((4, 5, 4), np.uint8), np.zeros((1, 4, 5)), np.zeros((4, 5, 1), "f4"), torch.zeros(3, 4, 5)]
OTHER_PICTURES += [torch.zeros(4, 5, 3).bfloat16(), torch.zeros(4, 5, 3, requires_grad=True)]
PAIRED = SimpleNamespace(media=(FRAMES, META)), (SimpleNamespace(media=FRAMES), META)


@pytest.mark.parametrize(
    ("kind", "count", "facts", "datas"),
    [
        (MATRIX, 0, TWO, [[], (), torch.zeros(0, 2, 3)]),
        (MATRIX, 2, TWO, [[ROWS, ROWS], [ROWS, np.array(ROWS)], torch.zeros(2, 2, 3)]),
        (MATRIX, 3, TWO, [(ROWS,) * 3, [np.array(ROWS), torch.tensor(ROWS), ROWS], np.array([ROWS] * 3)]),
        (SCALAR, 1, dict(shape=(), length=1), [3.0, [3.0], np.float64(3), np.zeros(())]),
        (SCALAR, 2, dict(shape=(), length=1), [[3.0, 3], np.zeros(2), list(torch.zeros(2))]),
        (BONDS, 1, NO_BONDS, [{"bonds": []}, {"bonds": ()}, *[{"bonds": np.zeros((0, 2), t)} for t in (int, "u8")]]),
        (CELL, 2, CELL_FACTS, [[ONE_CELL, ONE_CELL]]),
        (WORD, 2, dict(length=2), [["ab", "cd"], ["\U0001f600b"] * 2]),
        (bound(shape=(2,)), 1, PAIR, [list(np.ones(2, "f4")), list(np.ones(2, "f2")), [0, 1]]),
        (IMAGE, 1, SHAPED, [PIXELS, PICTURE.convert("L"), WRAPPED, *OTHER_PICTURES]),
        (IMAGE, 2, SHAPED, [[PICTURE, PICTURE], np.stack([PIXELS] * 2), torch.zeros(2, 3, 4, 5)]),
        (VIDEO, 0, SEEN, [[]]),
        (VIDEO, 1, SEEN, [(PICTURE, PICTURE), (FRAMES, None), [FRAMES], torch.zeros(2, 3, 4, 5)]),
        (VIDEO, 1, dict(SEEN, frames=1), [(PICTURE,), [PICTURE], FRAMES[:1]]),
        (VIDEO, 1, SEEN, [(FRAMES, META)]),
        (replace(VIDEO, metadata=True), 1, SHOWN, [(FRAMES, META), *([pair] for pair in PAIRED)]),
        (VIDEO, 2, SEEN, [np.stack([FRAMES] * 2), [list(FRAMES), list(FRAMES)]]),
        (replace(VIDEO, metadata=True), 2, SHOWN, [[(FRAMES, META), (FRAMES, META)]]),
        (AUDIO, 2, dict(length=3), [np.zeros((2, 3)), [(SOUND, 16000), SOUND], (SOUND, SOUND)]),
        (AUDIO, 2, dict(length=1), [[[0.0], [0.5]]]),
    ],
)
def test_splitting(kind, count, facts, datas):
    for data in datas:
        items = kind.canonical_all(kind.split(data, AT), AT)
        assert [kind.facts(item, 4) for item in items] == [SimpleNamespace(index=4, **facts)] * count


def test_splitting_keeps_none_for_items_that_a_uuid_names():
    ones = {MATRIX: ROWS, IMAGE: PICTURE, VIDEO: FRAMES, AUDIO: SOUND, CELL: ONE_CELL, WORD: "ab"}
    for kind, one in ones.items():
        assert kind.split([None], AT) == [None]
        items = kind.canonical_all(kind.split([one, None, one], AT), AT)
        assert [item is None for item in items] == [False, True, False]


# -- sizes and facts -------------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 6))
def test_between_includes_both_ends(least, more, length):
    kind = bound(shape=(between(least, least + more), cfg.d))
    value = torch.zeros(length, 3)
    if least <= length <= least + more:
        assert_one_form(kind, value, [value])
    else:
        with pytest.raises(InputError, match=f"got shape \\({length}, 3\\)"):
            kind.canonical(value, AT)
    assert [tuple(value.shape) for value in kind.smallest()] == [(least, 3)]
    assert [tuple(value.shape) for value in kind.candidates()] == [(least + more, 3)]


def test_expressions_and_functions_in_declarations():
    assert bound(shape=(cfg.n, between(1, cfg.d * 2))).expected == "a (2, 1..6) float32 tensor"
    assert bound(shape=(lambda s: 2,), bound=lambda s: 5) == bound(shape=[cfg.n], bound=5)
    assert hash(Tensor(shape=[cfg.n, 3])) == hash(Tensor(shape=(cfg.n, 3)))
    assert hash(Image(largest=[(1, 2)])) == hash(Image(largest=((1, 2),)))
    assert Audio(largest=4, rate=lambda s: 16).bind(CONFIG).rate == 16
    for records, length in ((CELL.candidates(), 2), (CELL.small(), 1), (CELL.smallest(), 1)):
        assert [len(CELL.canonical(record, AT)["values"]) for record in records] == [length]
    assert CELL.bind(CONFIG) == CELL
    assert repr(IMAGE.for_function()) == repr(IMAGE)
    assert MATRIX.schema() == {"shape": [2, 3], "dtype": "float32"}
    indices = bound(shape=(between(1, cfg.n),), dtype="int64", bound=between(0, cfg.d))
    assert indices.schema() == {"shape": [[1, 2]], "dtype": "int64", "values": [0, 3]}


@pytest.mark.parametrize(
    ("kind", "candidates", "half", "small"),
    [
        (Text(most=3), ["aaa"], ["a"], ["a"]),
        (Text(most=8, least=2, alphabet="ACGTN"), ["ACGTNACG"], ["ACGT"], ["AC"]),
        (Text(most=8, alphabet="ACGTN", largest="N" * 8), ["NNNNNNNN"], ["NNNN"], ["N"]),
        (Text(most=8, largest="CC(=O)O"), ["CC(=O)O"], ["CC("], ["C"]),
        (Text(most=cfg.big, least=0, largest=["", "CCO", "CCN"]), ["", "CCO", "CCN"], ["", "C", "C"], [""]),
        (Text(most=3, alphabet=lambda s: "AB", largest=lambda s: "B" * s.cfg.d), ["BBB"], ["B"], ["B"]),
    ],
)
def test_texts_that_mmkit_makes(kind, candidates, half, small):
    """Binding and the laws make them; a text that the spec states comes first."""
    kind = kind.bind(CONFIG)
    assert kind.bind(CONFIG) == kind
    assert (kind.candidates(), kind.candidates(0.5), kind.small()) == (candidates, half, small)
    for text in (*candidates, *half, *small):
        assert kind.canonical(text, AT) == text


def test_letters_of_a_text():
    kind = Text(most=4, alphabet="ACGTN").bind(CONFIG)
    sentence = f"{AT}: expected a text of 1..4 characters among 'ACGTN', got"
    assert kind.canonical("ACGN", AT) == "ACGN"
    assert get_outcome(kind.canonical, "ACga", AT) == f"{sentence} 'g' at 2."
    assert get_outcome(kind.canonical, "ACGTN", AT) == f"{sentence} 5 of them."
    assert kind.schema() == {"shape": [[1, 4]], "dtype": "text", "alphabet": "ACGTN"}


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Tensor(shape=(between(1, 4), cfg.d), largest=[(1, cfg.d), (cfg.n, 3)]), [(1, 3), (2, 3)]),
        (Image(largest=cfg.size), [(4, 8, 3)]),
        (Image(largest=[(cfg.n, 4), (1, cfg.d)]), [(4, 2, 3), (3, 1, 3)]),
        (Image(largest=lambda s: [(1, 2), (3, 4)]), [(2, 1, 3), (4, 3, 3)]),
        (Image(largest=(where(cfg.n > 1, 7, 1), 3)), [(3, 7, 3)]),
        (Video(largest=[(1, 2, 3), (4, 5, 6)]), [(1, 3, 2, 3), (4, 6, 5, 3)]),
        (Audio(largest=cfg.big, rate=cfg.d), [(100,)]),
    ],
)
def test_largest(kind, shapes):
    kind = kind.bind(CONFIG)
    assert kind.bind(CONFIG) == kind, "binding again changes nothing"
    for candidate, shape in zip(kind.candidates(), shapes, strict=True):
        assert form(kind.canonical(candidate, AT)) == form(candidate)
        assert np.asarray(candidate).shape == shape
        assert np.unique(np.asarray(candidate)).tolist() == [255 if isinstance(kind, Image) else 0]


@pytest.mark.parametrize(("fraction", "shape"), [(1, (8, 9, 6, 3)), (0.5, (4, 9, 6, 3)), (0.06, (1, 4, 2, 3))])
def test_a_smaller_video_has_fewer_frames(fraction, shape):
    (video,) = Video(largest=(8, 6, 9)).bind(CONFIG).candidates(fraction)
    assert video.shape == shape


def test_options_of_the_parts_of_a_processor():
    """Those of a scope override the others, for the items that it concerns."""
    options = {"size": 1, "n": 2, "common_kwargs": {"size": 3}, "images_kwargs": {"size": 4}, "audio_kwargs": None}
    for kind, size in ((Tensor((2,)), 3), (AUDIO, 3), (IMAGE, 4)):
        assert flatten_options(kind, options) == {"size": size, "n": 2}
    assert select_options(AUDIO, options) == {key: own for key, own in options.items() if key != "images_kwargs"}
    assert select_options(Tensor((2,)), options) == options
    with pytest.raises(
        InputError, match=r"^mm_processor_kwargs\['images_kwargs'\]: expected a dict of options, got 4\.$"
    ):
        flatten_options(IMAGE, {"images_kwargs": 4})


def test_metadata_where_it_is_required():
    ((video, metadata),) = Video(largest=(2, 5, 4), metadata=True).bind(CONFIG).candidates()
    assert video.shape == FRAMES.shape
    assert metadata == {"fps": 1.0, "duration": 2.0, "total_num_frames": 2, "frames_indices": [0, 1]}


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 30))
def test_sizes_within_bounds(largest, more, size):
    """The nearest size is taken, whatever was asked for; what is taken is its own nearest."""
    most = largest + more
    audio = Audio(largest, most=most).bind(CONFIG)
    (near,) = audio.nearest([size])
    assert near in range(1, most + 1)
    assert (near == size) == (1 <= size <= most)
    with pytest.raises(InputError, match=f"of at most {most} samples, got {most + 1} samples"):
        audio.canonical(np.zeros(most + 1), AT)
    for blank in (*audio.small(), *audio.smallest(), *audio.candidates(), audio.blank(near)):
        assert len(audio.canonical(blank, AT)) == len(blank)
    (smaller,) = audio.within({"length": near}, AT).candidates()
    assert len(smaller) == min(near, largest)

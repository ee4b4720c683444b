"""Items: one canonical form per value, complete validation, facts and candidates."""

import math
import warnings
from collections import UserDict
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image as PILImage

from mmkit import Audio, Image, InputError, Record, Tensor, Text, Video, between, cfg, item, where
from mmkit.expr import Scope

CONFIG = Scope(cfg=SimpleNamespace(n=2, d=3, big=100, size=[8, 4], text="x", minus=-1, half=0.5))
AT = "spec.modality[3]"


def bound(**options):
    return Tensor(**{"shape": (2, 3), **options}).bind(CONFIG)


def canonical(value, **options):
    return bound(**options).canonical(value, AT)


def same(one, other) -> bool:
    """Bit for bit, and in everything that vLLM's hash sees."""
    return (
        (one.dtype, one.shape, one.stride(), one.device) == (other.dtype, other.shape, other.stride(), other.device)
        and one.is_contiguous()
        and not one.requires_grad
        and one.double().numpy().tobytes() == other.double().numpy().tobytes()
    )


sizes = st.tuples(st.integers(0, 3), st.integers(0, 3)) | st.tuples(st.integers(0, 4)) | st.just(())
# every value is exact in all floating dtypes, so containers of different precision hold the same value
exact = st.integers(-128, 128).map(lambda n: n / 4)


@st.composite
def arrays(draw):
    shape = draw(sizes)
    values = draw(st.lists(exact, min_size=math.prod(shape), max_size=math.prod(shape)))
    return np.array(values, dtype=np.float32).reshape(shape)


def containers(array):
    """Every accepted way of writing the value of a float32 array."""
    forms = {
        "float32": array,
        "float64": array.astype(np.float64),
        "float16": array.astype(np.float16),
        "fortran": array.copy(order="F"),
        "reversed twice": np.ascontiguousarray(array[..., ::-1])[..., ::-1] if array.ndim else array,
        "strided": np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array,
        "torch": torch.from_numpy(array.copy()),
        "half": torch.from_numpy(array.copy()).half(),
        "bfloat16": torch.from_numpy(array.copy()).bfloat16(),
        "double": torch.from_numpy(array.copy()).double(),
        "transposed": torch.from_numpy(np.ascontiguousarray(array.T)).T if array.ndim == 2 else torch.from_numpy(array),
        "parameter": torch.nn.Parameter(torch.from_numpy(array.copy())),
        "result": torch.from_numpy(array.copy()).requires_grad_() * 1,
    }
    forms["read-only"] = array.copy()
    forms["read-only"].flags.writeable = False
    if array.ndim and array.size:
        forms |= {"list": array.tolist(), "tuple": tuple(array.tolist())}
        if np.array_equal(array, np.trunc(array)):
            forms["integers"] = array.astype(int).tolist()
            forms["int64"] = torch.from_numpy(array.astype(np.int64))
            forms["int16"] = array.astype(np.int16)
    return forms


@given(arrays(), st.sampled_from(["float32", "float16", "bfloat16", "float64"]))
def test_equal_values_have_one_form(array, dtype):
    kind = Tensor(shape=array.shape, dtype=dtype).bind(CONFIG)
    expected = torch.from_numpy(array.copy()).to(kind.torch_dtype)
    for name, value in containers(array).items():
        tensor = kind.canonical(value, AT)
        assert type(tensor) is torch.Tensor, name
        assert tensor.is_contiguous(), name
        assert not tensor.requires_grad, name
        assert (tensor.dtype, tensor.shape) == (kind.torch_dtype, array.shape), name
        assert torch.equal(tensor, expected), name
        assert same(kind.canonical(tensor, AT), tensor), f"{name}: canonicalising again changes it"


@given(st.floats(-60000, 60000))
def test_float64_is_rounded_to_nearest(value):
    tensor = canonical(np.full((2, 3), value))
    assert (tensor.numpy() == np.float32(value)).all()
    assert torch.equal(tensor, canonical([[value] * 3] * 2))
    assert torch.equal(tensor, canonical(torch.full((2, 3), value, dtype=torch.float64)))


def test_the_callers_data_is_not_changed():
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    canonical(array)[0, 0] = 99
    assert array[0, 0] == 0


def test_no_warning_for_a_tensor_that_requires_grad():
    """torch warns once per process, so a process of its own is not needed, but the warning has to be armed again."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            canonical(torch.ones(2, 3, requires_grad=True))
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_bound_is_rounded_as_values_are(dtype):
    """Who clips to a bound in float32 is within it, as is the canonical form of what is within it."""
    kind = bound(dtype=dtype, bound=0.1)
    tensor = kind.canonical([[0.1] * 3] * 2, AT)
    assert torch.equal(kind.canonical(tensor, AT), tensor)
    assert kind.bind(CONFIG) == kind


def test_not_finite_where_allowed():
    value = [[math.nan, math.inf, -math.inf]] * 2
    tensor = canonical(value, finite=False)
    assert tensor.isnan()[:, 0].all()
    assert tensor.isinf()[:, 1:].all()
    assert canonical([[0.0, 1e30, 0.0]] * 2, finite=False, bound=math.inf)[0, 1] == 1e30


@given(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([1.0, 1000.0, 65504.0]))
def test_bounds(value, limit):
    rows = np.full((2, 3), value)
    if abs(value) <= limit:
        assert canonical(rows, bound=limit).dtype == torch.float32
        assert canonical(rows, bound=cfg.big * (limit / 100)).dtype == torch.float32
    else:
        with pytest.raises(InputError, match=r"expected finite values of magnitude <= .*, got .* at \[0, 0\]"):
            canonical(rows, bound=limit)


json_like = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)
odd_arrays = st.builds(
    lambda shape, dtype: np.ones(shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.sampled_from(["f2", "f4", "f8", ">f4", "i4", "u2", "bool", "c8", "U3", "O", "g"]),
)


@given(json_like | odd_arrays | odd_arrays.map(lambda a: [a, a]))
def test_whatever_is_sent_is_canonical_or_refused(data):
    kind = bound(shape=(between(1, 3), 2))
    try:
        items = [kind.canonical(value, AT) for value in kind.split(data, AT)]
    except InputError:
        return
    for tensor in items:
        assert tensor.dtype == torch.float32
        assert tensor.shape[1:] == (2,)
        assert 1 <= len(tensor) <= 3
        assert torch.isfinite(tensor).all()


# -- integers and bools ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_integers_that_fit_have_one_form(dtype):
    expected = torch.tensor([0, 5, 100], dtype=getattr(torch, dtype))
    kind = Tensor(shape=(3,), dtype=dtype).bind(CONFIG)
    for name in ("u1", "u2", "u4", "i1", "i2", "i4", "i8"):
        assert same(kind.canonical(np.array([0, 5, 100], name), AT), expected), name
    for other in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        assert same(kind.canonical(expected.to(other), AT), expected)
    assert same(kind.canonical([0, 5, 100], AT), expected)
    for name in ("f2", "f4", "f8"):
        assert same(kind.canonical(np.array([0, 5, 100], name), AT), expected), name
    assert same(kind.canonical(expected.bfloat16(), AT), expected)
    assert same(kind.canonical([0.0, 5, 100.0], AT), expected)
    limits = torch.iinfo(expected.dtype)
    for odd in (limits.min - 1, limits.max + 1, -(10**30)):
        with pytest.raises(InputError):
            kind.canonical([0, odd, 1], AT)
    edge = kind.canonical(torch.tensor([limits.min, limits.max, 0], dtype=expected.dtype), AT)
    assert edge.tolist() == [limits.min, limits.max, 0]


@given(st.integers(0, 3), st.integers(0, 4))
def test_indices_of_an_earlier_part(least, more):
    """A bond joins atoms that are there."""
    atoms = Tensor((between(1, 5),), "int64", bound=between(least, least + more))
    bonds = Tensor((between(1, 5), 2), "int8", bound=between(0, item.atoms.length - 1))
    kind = Record(atoms=atoms, bonds=bonds).bind(CONFIG)
    assert {least} == set(kind.candidates()[0]["atoms"].tolist())
    assert kind.canonical({"atoms": [least, least + more], "bonds": [[0, 1]]}, AT)["bonds"].tolist() == [[0, 1]]
    with pytest.raises(InputError, match=r"bonds: expected int8 values from 0 to 1, got values from 0 to 2\."):
        kind.canonical({"atoms": [least, least], "bonds": [[0, 2]]}, AT)
    with pytest.raises(InputError, match=rf"atoms: expected int64 values from {least} to {least + more}"):
        kind.canonical({"atoms": [least - 1], "bonds": [[0, 0]]}, AT)


def test_bound_of_integers():
    kind = Tensor(shape=(2,), dtype="int64", bound=cfg.big).bind(CONFIG)
    assert kind.canonical([100, -100], AT).tolist() == [100, -100]
    assert kind.canonical(np.array([7, 0], np.uint64), AT).tolist() == [7, 0]
    for bound in (None, math.inf):
        unlimited = Tensor(shape=(1,), dtype="int64", bound=bound).bind(CONFIG)
        assert unlimited.canonical(np.array([-(2**63)]), AT).tolist() == [-(2**63)]
        assert unlimited.canonical([-(2**63)], AT).tolist() == [-(2**63)]
        assert unlimited.canonical([-(2.0**63)], AT).tolist() == [-(2**63)]


def test_bools():
    kind = Tensor(shape=(2,), dtype="bool").bind(CONFIG)
    expected = torch.tensor([True, False])
    assert same(kind.canonical(np.array([True, False]), AT), expected)
    assert same(kind.canonical(expected, AT), expected)
    assert same(kind.canonical([True, False], AT), expected)


# -- one item, several, a batch --------------------------------------------------------------------------------------

ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
FRAMES = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
META = {"fps": 2.0, "total_num_frames": 2}
SOUND = np.zeros(3, np.float32)
PICTURE = PILImage.new("RGB", (5, 4))
IMAGE = Image(largest=(cfg.size[0], cfg.size[1])).bind(CONFIG)
VIDEO = Video(largest=(2, 5, 4)).bind(CONFIG)
AUDIO = Audio(largest=cfg.big, rate=16000).bind(CONFIG)
SCALAR = Tensor(shape=()).bind(CONFIG)
IDS, VALUES, WORD = Tensor((between(1, cfg.n),), "int64"), Tensor((item.ids.length, 2)), Text(most=cfg.d).bind(CONFIG)
CELL = Record(ids=IDS, values=VALUES, name=Text(most=cfg.d)).bind(CONFIG)
BONDS = Record(bonds=Tensor((between(0, cfg.n), 2), "int64")).bind(CONFIG)
ONE_CELL = {"ids": [1.0, 2.0], "values": [[1, 2], [3, 4]], "name": "ab"}


@pytest.mark.parametrize(
    ("kind", "count", "datas"),
    [
        (bound(), 0, [[], (), torch.zeros(0, 2, 3)]),
        (bound(), 1, [ROWS, tuple(map(tuple, ROWS)), [ROWS], np.array(ROWS), torch.tensor(ROWS), (np.array(ROWS),)]),
        (bound(), 2, [[ROWS, ROWS], [ROWS, np.array(ROWS)]]),
        (bound(), 3, [(ROWS, ROWS, ROWS), [np.array(ROWS), torch.tensor(ROWS), ROWS], np.array([ROWS] * 3)]),
        (SCALAR, 1, [3.0, [3.0], np.float64(3), np.zeros(())]),
        (SCALAR, 2, [[3.0, 3], np.zeros(2)]),
        (CELL, 0, [[]]),
        (BONDS, 1, [{"bonds": []}, {"bonds": ()}, {"bonds": np.zeros((0, 2), int)}]),
        (CELL, 1, [ONE_CELL, [ONE_CELL], (ONE_CELL,), UserDict(ONE_CELL)]),
        (CELL, 2, [[ONE_CELL, dict(reversed(ONE_CELL.items()))]]),
        (WORD, 1, ["ab", ["ab"], ("ab",), np.array("ab")[()]]),
        (WORD, 2, [["ab", "cd"]]),
        (Tensor(shape=(2,)).bind(CONFIG), 1, [list(np.ones(2, "f4")), list(np.ones(2, "f2"))]),
        (IMAGE, 1, [PICTURE, (PICTURE,), PIXELS, [PIXELS]]),
        (IMAGE, 2, [[PICTURE, PICTURE], np.stack([PIXELS] * 2), torch.zeros(2, 3, 4, 5)]),
        (VIDEO, 0, [[]]),
        (VIDEO, 1, [FRAMES, list(FRAMES), (PICTURE, PICTURE), (FRAMES, META), (FRAMES, None), [FRAMES]]),
        (VIDEO, 2, [np.stack([FRAMES] * 2), [(FRAMES, META), (FRAMES, META)], [list(FRAMES), list(FRAMES)]]),
        (AUDIO, 1, [SOUND, (SOUND, 16000), (SOUND, np.int64(16000)), [0.0, 0.5], torch.zeros(3).bfloat16(), [SOUND]]),
        (AUDIO, 2, [np.zeros((2, 3)), [(SOUND, 16000), SOUND], (SOUND, SOUND), [[0.0], [0.5]]]),
    ],
)
def test_splitting(kind, count, datas):
    for data in datas:
        items = [kind.canonical(value, AT) for value in kind.split(data, AT)]
        assert len(items) == count
        assert len({repr(kind.facts(item, 0)) for item in items}) <= 1


@pytest.mark.parametrize(
    ("kind", "value"),
    [(bound(), np.array(ROWS)), (IMAGE, PICTURE), (VIDEO, FRAMES), (AUDIO, SOUND), (CELL, ONE_CELL), (WORD, "ab")],
)
def test_splitting_keeps_none_for_items_that_a_uuid_names(kind, value):
    assert kind.split([None], AT) == [None]
    assert [one is None for one in kind.split([value, None, value], AT)] == [False, True, False]


@given(st.integers(0, 3), st.integers(1, 4))
def test_rank_decides_what_is_one_item(rank, count):
    shape = (2,) * rank
    kind = Tensor(shape=shape).bind(CONFIG)
    batch = np.arange(count * 2**rank, dtype=np.float32).reshape(count, *shape)
    for form in (batch, torch.from_numpy(batch), list(batch), tuple(torch.from_numpy(batch)), batch.tolist()):
        items = [kind.canonical(value, AT) for value in kind.split(form, AT)]
        assert [item.tolist() for item in items] == batch.tolist()
    if rank:
        for form in (batch[0], torch.from_numpy(batch[0]), batch[0].tolist()):
            assert [kind.canonical(v, AT).tolist() for v in kind.split(form, AT)] == [batch[0].tolist()]


# -- dimensions ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 6))
def test_between_includes_both_ends(least, more, length):
    kind = Tensor(shape=(between(least, least + more), cfg.d)).bind(CONFIG)
    value = torch.zeros(length, 3)
    if least <= length <= least + more:
        assert kind.canonical(value, AT).shape == (length, 3)
    else:
        with pytest.raises(InputError, match=f"got shape \\({length}, 3\\)"):
            kind.canonical(value, AT)
    (largest,) = kind.candidates()
    assert [tuple(value.shape) for value in kind.smallest()] == [(least, 3)]
    assert largest.shape == (least + more, 3)
    assert kind.canonical(largest, AT) is not None


def test_expressions_in_shapes():
    kind = Tensor(shape=(cfg.n, between(1, cfg.d * 2))).bind(CONFIG)
    assert kind.expected == "a (2, 1..6) float32 tensor"
    assert Tensor(shape=(cfg.n,)).bind(CONFIG).expected == "a (2,) float32 tensor"
    assert hash(Tensor(shape=[cfg.n, 3])) == hash(Tensor(shape=(cfg.n, 3)))
    assert hash(Image(largest=[(1, 2)])) == hash(Image(largest=((1, 2),)))
    assert Tensor(shape=(lambda s: 2,)).bind(CONFIG).shape == (2,)
    assert Tensor(shape=(2,), bound=lambda s: 5).bind(CONFIG).bound == 5
    assert Audio(largest=4, rate=lambda s: 16).bind(CONFIG).rate == 16


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Tensor(shape=(between(1, 4), cfg.d)), [(4, 3)]),
        (Tensor(shape=(between(1, 4), cfg.d), largest=[(1, cfg.d), (cfg.n, 3)]), [(1, 3), (2, 3)]),
        (Tensor(shape=(between(1, 4),), dtype="int64", largest=(1,)), [(1,)]),
        (Image(largest=(cfg.size[0], cfg.size[1])), [(4, 8, 3)]),
        (Image(largest=cfg.size), [(4, 8, 3)]),
        (Image(largest=[(cfg.n, 4), (1, cfg.d)]), [(4, 2, 3), (3, 1, 3)]),
        (Image(largest=lambda s: [(1, 2), (3, 4)]), [(2, 1, 3), (4, 3, 3)]),
        (Image(largest=(where(cfg.n > 1, 7, 1), 3)), [(3, 7, 3)]),
        (Video(largest=(2, 5, 4)), [(2, 4, 5, 3)]),
        (Video(largest=[(1, 2, 3), (4, 5, 6)]), [(1, 3, 2, 3), (4, 6, 5, 3)]),
        (Audio(largest=cfg.big, rate=cfg.d), [(100,)]),
    ],
)
def test_largest(kind, shapes):
    kind = kind.bind(CONFIG)
    assert kind.bind(CONFIG) == kind, "binding again changes nothing"
    for candidate, shape in zip(kind.candidates(), shapes, strict=True):
        canonical = kind.canonical(candidate, AT)
        assert np.asarray(canonical).shape == shape
        assert np.array_equal(np.asarray(candidate), np.asarray(canonical))
        assert np.unique(np.asarray(candidate)).tolist() == [255 if isinstance(kind, (Image, Video)) else 0]


@pytest.mark.parametrize(
    ("kind", "value", "facts"),
    [
        (bound(), ROWS, dict(shape=(2, 3), length=2)),
        (SCALAR, 3.0, dict(shape=(), length=1)),
        (IMAGE, PICTURE, dict(width=5, height=4)),
        (IMAGE, PILImage.new("L", (5, 4)), dict(width=5, height=4)),
        (IMAGE, PIXELS, dict(width=5, height=4)),
        (IMAGE, torch.zeros(3, 4, 5), dict(width=5, height=4)),
        (IMAGE, np.zeros((1, 4, 5)), dict(width=5, height=4)),
        (IMAGE, np.zeros((4, 5, 1), np.float32), dict(width=5, height=4)),
        (IMAGE, np.zeros((4, 5, 4), np.uint8), dict(width=5, height=4)),
        (IMAGE, torch.zeros(4, 5, 3).bfloat16(), dict(width=5, height=4)),
        (IMAGE, torch.zeros(4, 5, 3, requires_grad=True), dict(width=5, height=4)),
        (IMAGE, SimpleNamespace(media=PICTURE), dict(width=5, height=4)),
        (VIDEO, FRAMES, dict(frames=2, width=5, height=4, metadata=None)),
        (VIDEO, (FRAMES, META), dict(frames=2, width=5, height=4, metadata=META)),
        (VIDEO, torch.zeros(3, 3, 4, 5), dict(frames=3, width=5, height=4, metadata=None)),
        (VIDEO, SimpleNamespace(media=(FRAMES, META)), dict(frames=2, width=5, height=4, metadata=META)),
        (VIDEO, (SimpleNamespace(media=FRAMES), META), dict(frames=2, width=5, height=4, metadata=META)),
        (AUDIO, SOUND, dict(length=3)),
        (AUDIO, (SOUND, 16000), dict(length=3)),
        (WORD, "\U0001f600b", dict(length=2)),
        (
            CELL,
            ONE_CELL,
            dict(
                ids=SimpleNamespace(shape=(2,), length=2),
                values=SimpleNamespace(shape=(2, 2), length=2),
                name=SimpleNamespace(length=2),
            ),
        ),
    ],
)
def test_facts(kind, value, facts):
    assert kind.facts(kind.canonical(value, AT), 4) == SimpleNamespace(index=4, **facts)


def test_a_record_is_its_parts_in_their_order():
    canonical_record = CELL.canonical(dict(reversed(ONE_CELL.items())), AT)
    assert list(canonical_record) == ["ids", "values", "name"]
    assert same(canonical_record["ids"], torch.tensor([1, 2]))
    assert same(canonical_record["values"], torch.tensor([[1.0, 2], [3, 4]]))
    assert CELL.bind(CONFIG) == CELL
    for one, lengths in ((CELL.candidates(), 2), (CELL.small(), 1), (CELL.smallest(), 1)):
        assert [len(record["values"]) for record in one] == [lengths]
        assert CELL.canonical(one[0], AT).keys() == one[0].keys()
    letters = Text(most=3, alphabet="CN").bind(CONFIG)
    assert (letters.candidates(), letters.small()) == (["CCC"], ["C"])


# -- media -----------------------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from([1, 1.1, 1.5, 3, 7.5]),
    st.tuples(st.integers(1, 30), st.integers(1, 30)),
)
def test_sizes_within_bounds(least, more, aspect, sizes):
    """The nearest sizes are taken, whatever was asked for; what is taken is its own nearest."""
    most = (least[0] + more[0], least[1] + more[1])
    kind = Image(largest=(1, 1), least=least, most=most, aspect=aspect)
    rows = [(w, h) for w in range(least[0], most[0] + 1) for h in range(least[1], most[1] + 1)]
    taken = [row for row in rows if max(row) <= aspect * min(row)]
    assume(taken)
    assert [row for row in rows if kind.takes(row)] == taken
    assert kind.nearest(sizes) in taken
    assert kind.nearest(taken[-1]) == taken[-1]
    assert not kind.takes((least[0] - 1, least[1]))
    assert not kind.takes((most[0], most[1] + 1))
    bound = Image(largest=taken, least=least, most=most, aspect=aspect).bind(CONFIG)
    for made in (*bound.small(), *bound.smallest(), *bound.varied(), *bound.candidates()):
        assert bound.canonical(made, AT) is made
    if all(width > sizes[0] for width, _ in taken):
        with pytest.raises(InputError, match="limit_mm_per_prompt"):
            bound.within({"width": sizes[0]}, AT)
    else:
        smaller = [made.size for made in bound.within({"width": sizes[0]}, AT).candidates()]
        assert all(size in taken and size[0] <= sizes[0] for size in smaller)


def test_equal_rgb_pixels_have_one_form():
    expected = PILImage.fromarray(PIXELS)
    strided = np.repeat(PIXELS, 2, axis=1)[:, ::2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (PIXELS, torch.from_numpy(PIXELS), np.asfortranarray(PIXELS), strided, expected):
            image = IMAGE.canonical(value, AT)
            assert isinstance(image, PILImage.Image)
            assert (image.mode, image.size, image.tobytes()) == ("RGB", (5, 4), expected.tobytes())


@pytest.mark.parametrize(
    ("mode", "color", "shown"),
    [
        ("RGBA", (9, 9, 9, 0), 255),
        ("RGBA", (9, 9, 9, 255), 9),
        ("LA", (9, 0), 255),
        ("P", 0, 0),
        ("L", 9, 9),
    ],
)
def test_pictures_are_shown_in_rgb_upright_on_white(mode, color, shown):
    turned = PILImage.new(mode, (5, 4), color)
    turned.getexif()[0x0112] = 6  # held on its side
    image = IMAGE.canonical(turned, AT)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (4, 5), (shown,) * 3)
    assert IMAGE.canonical(image, AT) is image


def test_other_images_stay_as_they_are():
    for value in (PICTURE, SimpleNamespace(media=PICTURE), np.zeros((4, 5, 3)), np.zeros((4, 4, 5), np.uint8)):
        assert IMAGE.canonical(value, AT) is value


def test_equal_8_bit_pixels_have_one_form():
    first = np.moveaxis(PIXELS, -1, 0)
    for form in (
        PIXELS,
        first,
        np.ascontiguousarray(first),
        torch.tensor(PIXELS),
        torch.tensor(PIXELS).permute(2, 0, 1),
    ):
        assert np.array_equal(np.asarray(IMAGE.canonical(form, AT)), PIXELS)
        assert np.array_equal(np.asarray(IMAGE.for_function().canonical(form, AT)), PIXELS)


def test_equal_frames_have_one_form():
    images, tensors = [PILImage.fromarray(frame) for frame in FRAMES], [torch.tensor(frame) for frame in FRAMES]
    for form in (FRAMES, list(FRAMES), tuple(FRAMES), images, tensors):
        (frames,) = VIDEO.split(form, AT)
        video = VIDEO.canonical(frames, AT)
        assert video.dtype == FRAMES.dtype
        assert np.array_equal(video, FRAMES)


def test_metadata_where_it_is_required():
    kind = Video(largest=(2, 5, 4), metadata=True).bind(CONFIG)
    frames, metadata = kind.canonical((FRAMES, META), AT)
    assert metadata == META
    assert np.array_equal(frames, FRAMES)
    ((video, metadata),) = kind.candidates()
    assert video.shape == FRAMES.shape
    assert metadata == {"fps": 1.0, "duration": 2.0, "total_num_frames": 2, "frames_indices": [0, 1]}


@given(st.lists(exact, min_size=1, max_size=8))
def test_equal_samples_have_one_form(values):
    expected = np.array(values, np.float32)
    forms = [expected, expected.astype(np.float64), expected.astype(">f4"), np.repeat(expected, 2)[::2], values]
    forms += [expected.astype(np.float16), torch.tensor(values), torch.tensor(values).half()]
    for form in forms:
        (audio,) = AUDIO.split(form, AT)
        samples = AUDIO.canonical(audio, AT)
        assert type(samples) is np.ndarray
        assert (samples.dtype, samples.flags.c_contiguous, samples.tolist()) == (np.float32, True, values)
        (pair,) = AUDIO.split((form, 16000), AT)
        samples = AUDIO.canonical(pair, AT)
        assert (samples.dtype, samples.tolist()) == (np.float32, values)


def test_resampling():
    """By whichever library there is: as many seconds of the same tone, or a sentence."""
    kind, times = Audio(largest=32000, rate=16000).bind(CONFIG), np.arange(16000) / 16000
    sent = np.sin(2 * np.pi * 440 * times[::2]), 8000
    if any(map(find_spec, ("torchaudio", "soxr", "scipy"))):
        samples = kind.canonical(sent, AT)
        assert samples.shape == (16000,)
        assert np.abs(samples - np.sin(2 * np.pi * 440 * times))[1000:-1000].max() < 0.01
    else:
        with pytest.raises(InputError, match="got 8000 Hz, and no library that resamples"):
            kind.canonical(sent, AT)
